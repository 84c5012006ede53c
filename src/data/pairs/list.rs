//! Which files hold pairs, in which languages: the sources of parallel text expanded into an ordered list.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::texts;
use crate::data::error::Error;
use crate::data::expand::expand;
use crate::data::sources::{self, Compression, SourceFile, format_of};

/// The language of messages in catalogues, and of the programs that have them.
const ENGLISH: &str = "en";

/// Where parallel text lies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, remote = "Self")]
pub struct PairSpec {
    /// A file, a folder or a glob. `data/news` with `from` and `to` also stands for the files `data/news.en` and
    /// `data/news.de`.
    pub path: String,
    /// The languages of the two sides. Catalogues and folders of aligned files tell them themselves; there they choose.
    #[serde(default)]
    pub from: Option<String>,
    #[serde(default)]
    pub to: Option<String>,
    /// The two fields of JSONL, columns of Parquet, or numbers of columns of TSV, from 1. Absent means the languages,
    /// or the languages within `translation`, and the first two columns of TSV.
    #[serde(default)]
    pub fields: Option<[String; 2]>,
    /// Makes it a source of texts in this language, not of pairs, for a task that reads one text.
    #[serde(default)]
    pub language: Option<String>,
    /// Of such a source, the field of JSONL or the column of Parquet; absent means `text`.
    #[serde(default)]
    pub field: Option<String>,
    /// Whether the task reads one text: a file of lines without another beside it is then text of the language in which
    /// its name ends.
    #[serde(skip)]
    pub of_one_text: bool,
}

impl Serialize for PairSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        PairSpec::serialize(self, serializer)
    }
}

/// By hand, because a path alone will do, and the derived form of such an enum does not name a misspelt key.
impl<'de> Deserialize<'de> for PairSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairSpecForm;
        impl<'de> Visitor<'de> for PairSpecForm {
            type Value = PairSpec;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a path or a table { path = \"...\", from = \"en\", to = \"de\" }")
            }

            fn visit_str<E>(self, path: &str) -> Result<PairSpec, E> {
                Ok(PairSpec { path: path.to_owned(), ..PairSpec::default() })
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<PairSpec, M::Error> {
                PairSpec::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(PairSpecForm)
    }
}

/// How a file holds its pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairLayout {
    /// On lines, those of the other side in another file.
    Lines {
        other: PathBuf,
    },
    /// A text a line.
    Texts,
    Tsv {
        columns: [usize; 2],
    },
    Jsonl {
        fields: Option<[String; 2]>,
    },
    Parquet {
        fields: Option<[String; 2]>,
    },
    Tmx,
    /// Messages of the program `domain`.
    Catalogue {
        domain: String,
        compiled: bool,
    },
}

/// A file, or two, of pairs in two languages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairFile {
    pub path: PathBuf,
    pub layout: PairLayout,
    pub languages: [String; 2],
    /// Which entry of the sources it came from.
    pub source: usize,
    /// Whether the source names this very file, rather than a folder or glob around it.
    pub named: bool,
    /// Whether it holds texts of one language, each a pair with itself.
    pub alone: bool,
}

impl PairFile {
    /// The files it is read from.
    pub fn paths(&self) -> Vec<&Path> {
        match &self.layout {
            PairLayout::Lines { other } => vec![&self.path, other],
            _ => vec![&self.path],
        }
    }
}

/// The files of parallel text in their order, and what was passed over on the way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairListing {
    pub files: Vec<PairFile>,
    /// Catalogues of English, whose translations are their messages.
    pub english: u64,
    /// Files of folders and globs that hold no pairs by their names.
    pub others: u64,
}

/// Expands `specs` into the files they match. `cache` is left out wherever it lies.
///
/// # Errors
/// A source that is malformed, matches nothing, or does not tell its languages.
pub fn list(specs: &[PairSpec], cache: &Path) -> Result<PairListing, Error> {
    let mut listing = PairListing::default();
    for (source, spec) in specs.iter().enumerate() {
        let before = listing.files.len();
        list_one(source, spec, cache, &mut listing)?;
        if listing.files.len() == before {
            return Err(bad(spec, nothing(spec)));
        }
    }
    let mut met = BTreeSet::new();
    listing.files.retain(|file| met.insert((file.path.clone(), format!("{:?}", file.layout), file.languages.clone())));
    Ok(listing)
}

pub(super) fn bad(spec: &PairSpec, message: impl Into<String>) -> Error {
    Error::PairSource { source_name: spec.path.clone(), message: message.into() }
}

fn nothing(spec: &PairSpec) -> String {
    if let Some(language) = &spec.language {
        return format!(
            "no file of texts in `{language}`: name .txt, .jsonl or .parquet files, or files of lines whose names end in \
             it (news.{language})"
        );
    }
    match (&spec.from, &spec.to) {
        (None, None) => {
            let kinds = "name .po, .mo, .tmx, .tsv, .jsonl or .parquet files, or files of aligned lines whose names end in \
                         their languages (news.en, news.de), all of them in one source: their folder or a glob (news.*)";
            format!("none of its files holds pairs: {kinds}")
        }
        (from, to) => {
            let name = |side: &Option<String>| side.clone().unwrap_or_else(|| "any language".to_owned());
            format!("no file from {} to {}: check `from` and `to`", name(from), name(to))
        }
    }
}

fn list_one(source: usize, spec: &PairSpec, cache: &Path, listing: &mut PairListing) -> Result<(), Error> {
    if let Some(language) = &spec.language {
        return texts::list(source, (spec, language), cache, listing);
    }
    let path = expand(&spec.path)?;
    if let (Some(from), Some(to), false) = (&spec.from, &spec.to, path.exists())
        && let (Some(one), Some(other)) = (with_language(&path, from), with_language(&path, to))
    {
        let languages = [from.clone(), to.clone()];
        let layout = PairLayout::Lines { other };
        listing.files.push(PairFile { path: one, layout, languages, source, named: true, alone: false });
        return Ok(());
    }
    let found = sources::list_all(&spec.path, cache)?;
    let mut aligned: BTreeMap<String, BTreeMap<String, SourceFile>> = BTreeMap::new();
    for mut file in found.files {
        file.source = source;
        match Kind::of(&file, spec) {
            Kind::Catalogue { compiled } => listing.add_catalogue(file, compiled, spec),
            Kind::Table(layout) => listing.add_table(file, layout, spec)?,
            Kind::Aligned { stem, language } => {
                aligned.entry(stem).or_default().insert(language, file);
            }
            Kind::Other => listing.others += 1,
        }
    }
    for languages in aligned.into_values() {
        let alone = languages.len() == 1 && spec.of_one_text && spec.from.is_none() && spec.to.is_none();
        match alone {
            true => languages.into_iter().for_each(|(language, file)| texts::add(file, spec, &language, listing)),
            false => listing.add_aligned(&languages, spec),
        }
    }
    Ok(())
}

/// `path.en`, compressed or not, where it exists.
fn with_language(path: &Path, language: &str) -> Option<PathBuf> {
    let named = |ending: &str| PathBuf::from(format!("{}.{language}{ending}", path.display()));
    ["", ".gz", ".zst"].map(named).into_iter().find(|path| path.is_file())
}

/// What a file is by its name.
enum Kind {
    Catalogue {
        compiled: bool,
    },
    Table(&'static str),
    /// One side of aligned lines: the name before the language, with its folder, and the language.
    Aligned {
        stem: String,
        language: String,
    },
    Other,
}

impl Kind {
    fn of(file: &SourceFile, spec: &PairSpec) -> Kind {
        let (stem, ending) = ending_of(file);
        match ending.to_lowercase().as_str() {
            "mo" | "gmo" => Kind::Catalogue { compiled: true },
            "po" => Kind::Catalogue { compiled: false },
            "tsv" => Kind::Table("tsv"),
            "jsonl" | "ndjson" | "json-lines" => Kind::Table("jsonl"),
            "parquet" => Kind::Table("parquet"),
            "tmx" => Kind::Table("tmx"),
            _ if is_side(ending, spec) => Kind::Aligned { stem: stem.to_owned(), language: ending.to_owned() },
            _ => Kind::Other,
        }
    }
}

/// A file's name before its ending, with its folder, and the ending; without that of compression.
pub(super) fn ending_of(file: &SourceFile) -> (&str, &str) {
    let name = file.relative.strip_suffix(".gz").or_else(|| file.relative.strip_suffix(".zst"));
    name.unwrap_or(&file.relative).rsplit_once('.').unwrap_or_default()
}

/// Whether an ending is a language: one that the source names, or one of two letters that no other files end in, or one
/// with a region or a script.
fn is_side(ending: &str, spec: &PairSpec) -> bool {
    let asked = [&spec.from, &spec.to].into_iter().flatten().any(|language| language == ending);
    let is_code = ending.len() == 2 || ending.contains(['_', '-', '@']);
    asked || (is_code && is_language(ending) && !["gz", "md", "py", "rs", "sh", "so"].contains(&ending))
}

/// Whether a name looks like that of a language: `de`, `pt_BR`, `zh-Hans`, `sr@latin`.
fn is_language(name: &str) -> bool {
    let mut parts = name.split(['_', '-', '@']);
    let language = parts.next().unwrap_or_default();
    let is_word = |part: &str, longest: usize| {
        (2..=longest).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    is_word(language, 3) && language.bytes().all(|byte| byte.is_ascii_lowercase()) && parts.all(|part| is_word(part, 8))
}

/// Whether a language is the one asked for, or none is.
fn fits(wanted: &Option<String>, language: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == language)
}

impl PairListing {
    fn add_catalogue(&mut self, file: SourceFile, compiled: bool, spec: &PairSpec) {
        let Some((language, domain)) = catalogue_name(&file.path) else {
            self.others += 1;
            return;
        };
        if language == ENGLISH || language.starts_with("en_") || language.starts_with("en@") {
            self.english += 1;
        } else if fits(&spec.from, ENGLISH) && fits(&spec.to, &language) {
            let layout = PairLayout::Catalogue { domain, compiled };
            self.add(file, layout, [ENGLISH.to_owned(), language]);
        }
    }

    fn add_table(&mut self, file: SourceFile, kind: &str, spec: &PairSpec) -> Result<(), Error> {
        let (Some(from), Some(to)) = (&spec.from, &spec.to) else {
            let texts = if spec.of_one_text { ", or `language` if it holds no pairs" } else { "" };
            let message = format!("set `from` and `to`{texts}: nothing tells the languages of {}", file.path.display());
            return Err(bad(spec, message));
        };
        let layout = match kind {
            "tsv" => PairLayout::Tsv { columns: columns(spec)? },
            "jsonl" => PairLayout::Jsonl { fields: spec.fields.clone() },
            "parquet" => PairLayout::Parquet { fields: spec.fields.clone() },
            _ => PairLayout::Tmx,
        };
        self.add(file, layout, [from.clone(), to.clone()]);
        Ok(())
    }

    /// Every two of the languages that a text has, in the order of their names.
    fn add_aligned(&mut self, languages: &BTreeMap<String, SourceFile>, spec: &PairSpec) {
        for (from, file) in languages {
            for (to, other) in languages.iter().filter(|(to, _)| *to != from) {
                let asked = spec.from.is_some() || spec.to.is_some();
                if (asked || from < to) && fits(&spec.from, from) && fits(&spec.to, to) {
                    let layout = PairLayout::Lines { other: other.path.clone() };
                    self.add(file.clone(), layout, [from.clone(), to.clone()]);
                }
            }
        }
    }

    fn add(&mut self, file: SourceFile, layout: PairLayout, languages: [String; 2]) {
        let SourceFile { path, source, named, .. } = file;
        self.files.push(PairFile { path, layout, languages, source, named, alone: false });
    }
}

fn columns(spec: &PairSpec) -> Result<[usize; 2], Error> {
    let Some(fields) = &spec.fields else { return Ok([1, 2]) };
    let column = |field: &String| {
        let number = field.parse().ok().filter(|&number: &usize| number > 0);
        number.ok_or_else(|| bad(spec, format!("`fields` of TSV are numbers of columns from 1, not `{field}`")))
    };
    Ok([column(&fields[0])?, column(&fields[1])?])
}

/// The language and the domain of a catalogue by its path: `.../pt_BR/LC_MESSAGES/tar.mo`, or `.../tar/po/pt_BR.po`.
/// The encoding that some folders have behind the language says nothing new.
fn catalogue_name(path: &Path) -> Option<(String, String)> {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let (folder, file) = (path.parent()?, name(path)?);
    let stem = file.split('.').next().unwrap_or_default().to_owned();
    let (language, domain) = match name(folder).as_deref() {
        Some("LC_MESSAGES") => {
            let domain = file.rsplit_once('.').map_or(file.as_str(), |(domain, _)| domain).to_owned();
            (name(folder.parent()?)?, domain)
        }
        Some("po" | "locale" | "locales" | "lang") => (stem, name(folder.parent()?).unwrap_or_default()),
        folder => (stem, folder.unwrap_or_default().to_owned()),
    };
    let (language, modifier) = language.split_once('@').map_or((language.as_str(), ""), |(name, rest)| (name, rest));
    let language = language.split('.').next().unwrap_or_default();
    let language = if modifier.is_empty() { language.to_owned() } else { format!("{language}@{modifier}") };
    is_language(&language).then_some((language, domain))
}

/// How a file is compressed, by its name.
pub(super) fn compression(path: &Path) -> Compression {
    format_of(path).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_tell_language_and_domain() {
        for (path, expected) in [
            ("/usr/share/locale/pt_BR/LC_MESSAGES/tar.mo", Some(("pt_BR", "tar"))),
            ("/usr/share/locale/sr@latin/LC_MESSAGES/glib20.mo", Some(("sr@latin", "glib20"))),
            ("/usr/share/locale/ja.eucJP/LC_MESSAGES/gtk-3.0.mo", Some(("ja", "gtk-3.0"))),
            ("/usr/share/locale/ca.UTF-8@valencia/LC_MESSAGES/a.mo", Some(("ca@valencia", "a"))),
            ("/src/tar/po/zh_CN.po", Some(("zh_CN", "tar"))),
            ("/src/tar/de.po.gz", Some(("de", "tar"))),
            ("/usr/share/locale/l10n/LC_MESSAGES/a.mo", None),
            ("/src/po/messages.po", None),
        ] {
            let found = catalogue_name(Path::new(path));
            assert_eq!(found, expected.map(|(language, domain)| (language.to_owned(), domain.to_owned())), "{path}");
        }
    }
}
