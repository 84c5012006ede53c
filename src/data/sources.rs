//! Which files a corpus is made of: `data.sources` expanded into an ordered list.
//!
//! Looks at names and metadata only; whether a file holds text is found out when it is read. The order is by
//! source, then by the path relative to the source's fixed part, so it is the same wherever the corpus lies.
//! Names starting with a dot are passed over inside folders and globs (and counted); a link to a folder is
//! followed once.

use std::collections::HashSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::config::{SourceSpec, SourceTable};
use super::error::Error;
use super::expand::expand;
use super::hub;

/// How the documents of a file are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The whole file is one document.
    Plain,
    /// Each line is a JSON object with the text in one field.
    Jsonl,
    /// Each row is a document, with the text in one column.
    Parquet,
}

/// What the bytes of a file are wrapped in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

/// One file of the corpus.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// The canonical path.
    pub path: PathBuf,
    /// Which entry of `data.sources` it came from.
    pub source: usize,
    /// The path below the source's fixed part, with `/` between names; machine-independent.
    pub relative: String,
    pub format: Format,
    pub compression: Compression,
    /// The JSONL field or Parquet column that holds the text.
    pub field: String,
    /// Whether the field holds conversations.
    pub chat: bool,
    /// Whether the source says that it is held out.
    pub held_out: bool,
    /// Whether the source names this very file, rather than a folder or glob around it.
    pub named: bool,
    /// Size on disk.
    pub bytes: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified_ns: u128,
}

/// The files of a corpus, in its order.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    pub files: Vec<SourceFile>,
    /// Files and folders passed over because their names start with a dot.
    pub hidden: u64,
    /// Links inside folders that lead nowhere.
    pub broken_links: u64,
}

/// Expands `specs` into the files they match, each file once. `cache` is left out wherever it lies, or a
/// prepared corpus would become part of the next one.
///
/// # Errors
/// Every source that is malformed or matches nothing, all together.
pub fn list(specs: &[SourceSpec], cache: &Path) -> Result<Listing, Error> {
    list_with(specs, FolderWalk { finds_data_sets: true, ..FolderWalk::new(cache) })
}

/// Expands a path into the files that it matches: all of a folder, also of a data set of the hub.
///
/// # Errors
/// As [`list`].
pub(super) fn list_all(path: &str, cache: &Path) -> Result<Listing, Error> {
    list_with(&[SourceSpec::Path(path.to_owned())], FolderWalk::new(cache))
}

fn list_with(specs: &[SourceSpec], mut walk: FolderWalk) -> Result<Listing, Error> {
    let mut errors = Vec::new();
    let mut listing = Listing::default();
    for (source, spec) in specs.iter().enumerate() {
        match list_one(source, spec, &mut walk) {
            Ok(files) => listing.files.extend(files),
            Err(error) => errors.push(error),
        }
    }
    match errors.len() {
        0 => {}
        1 => return Err(errors.remove(0)),
        _ => return Err(Error::Many(errors)),
    }
    let mut seen = HashSet::new();
    listing.files.retain(|file| seen.insert((file.path.clone(), file.field_used().map(str::to_owned))));
    listing.hidden = walk.hidden;
    listing.broken_links = walk.broken_links;
    Ok(listing)
}

impl SourceFile {
    /// The field, where the format has any.
    pub fn field_used(&self) -> Option<&str> {
        (self.format != Format::Plain).then_some(self.field.as_str())
    }

    /// How a record is named in messages.
    pub(super) fn place(&self, number: u64) -> String {
        match self.format {
            Format::Parquet => format!("{}: row {number}", self.path.display()),
            Format::Plain | Format::Jsonl => format!("{}:{number}", self.path.display()),
        }
    }
}

fn list_one(source: usize, spec: &SourceSpec, walk: &mut FolderWalk) -> Result<Vec<SourceFile>, Error> {
    let mut path = expand(spec.path())?;
    if walk.finds_data_sets {
        path = hub::snapshot(path);
    }
    let found = if path.is_dir() {
        walk.begin();
        let mut found = Vec::new();
        walk.folder(&path, &mut found)?;
        let set = if walk.finds_data_sets { hub::data_set(&path, &found, spec)? } else { None };
        if let Some(set) = set {
            return set.iter().map(|file| of_data_set(file, source, spec, &path)).collect();
        }
        Found { base: path.clone(), files: found, named: false }
    } else if path.is_file() {
        Found { base: path.parent().unwrap_or(Path::new("")).to_owned(), files: vec![path.clone()], named: true }
    } else {
        Found { base: fixed_prefix(&path), files: walk.glob(spec.path(), &path)?, named: false }
    };
    if found.files.is_empty() {
        return Err(Error::NoMatch { source_name: spec.path().to_owned(), help: nearest_folder(&path) });
    }
    let wrong = |message: String| Err(Error::BadSource { source_name: spec.path().to_owned(), message });
    if spec.table().is_some_and(SourceTable::is_of_data_set) {
        return wrong("split, held_out and config are of data sets, and this is no folder".to_owned());
    }
    let mut files =
        found.files.iter().map(|file| describe(file, source, spec, &found)).collect::<Result<Vec<_>, Error>>()?;
    if let Some(file) = files.iter().find(|file| file.chat && file.format == Format::Plain) {
        return wrong(format!("{} is no .jsonl or .parquet, which conversations are read from", file.path.display()));
    }
    files.sort_by(|a, b| (&a.relative, &a.path).cmp(&(&b.relative, &b.path)));
    Ok(files)
}

/// What one source led to, before it is described.
struct Found {
    base: PathBuf,
    files: Vec<PathBuf>,
    named: bool,
}

/// A file of a data set, under its own name even where that is a link into a cache of the hub.
fn of_data_set(file: &hub::DataFile, source: usize, spec: &SourceSpec, base: &Path) -> Result<SourceFile, Error> {
    let found = Found { base: base.to_owned(), files: Vec::new(), named: false };
    let described = describe(&file.path, source, spec, &found)?;
    let folder = fs::canonicalize(base).map_err(Error::io("look at", base))?;
    let path = folder.join(file.path.strip_prefix(base).unwrap_or(&file.path));
    let format = if described.format == Format::Plain { Format::Jsonl } else { described.format };
    Ok(SourceFile { path, format, held_out: file.held_out, ..described })
}

fn describe(path: &Path, source: usize, spec: &SourceSpec, found: &Found) -> Result<SourceFile, Error> {
    let metadata = fs::metadata(path).map_err(Error::io("look at", path))?;
    let modified = metadata.modified().map_err(Error::io("look at", path))?;
    let (format, compression) = format_of(path);
    Ok(SourceFile {
        path: fs::canonicalize(path).map_err(Error::io("look at", path))?,
        source,
        relative: relative_name(path, &found.base),
        format,
        compression,
        field: spec.field(),
        chat: spec.is_chat(),
        held_out: false,
        named: found.named,
        bytes: metadata.len(),
        modified_ns: modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()),
    })
}

/// Tells format and compression by the endings of the name, whatever their case.
pub fn format_of(path: &Path) -> (Format, Compression) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let (name, compression) = if let Some(stem) = name.strip_suffix(".gz") {
        (stem, Compression::Gzip)
    } else if let Some(stem) = name.strip_suffix(".zst") {
        (stem, Compression::Zstd)
    } else {
        (name.as_str(), Compression::None)
    };
    let jsonl = [".jsonl", ".ndjson", ".json-lines"].iter().any(|ending| name.ends_with(ending));
    let format = if jsonl {
        Format::Jsonl
    } else if name.ends_with(".parquet") {
        Format::Parquet
    } else {
        Format::Plain
    };
    (format, compression)
}

fn relative_name(path: &Path, base: &Path) -> String {
    let relative = path.strip_prefix(base).unwrap_or(path);
    let names = relative.components().map(|part| part.as_os_str().to_string_lossy());
    names.collect::<Vec<_>>().join("/")
}

/// The walk over folders, with what it passed over.
#[derive(Default)]
struct FolderWalk {
    cache: Option<PathBuf>,
    /// Whether a folder may be a data set of the hub, of which not all files are taken.
    finds_data_sets: bool,
    visited: HashSet<PathBuf>,
    hidden: u64,
    broken_links: u64,
}

impl FolderWalk {
    fn new(cache: &Path) -> Self {
        Self { cache: fs::canonicalize(cache).ok(), ..Self::default() }
    }

    /// Forgets the folders of the source before: only links inside one source can go in circles.
    fn begin(&mut self) {
        self.visited.clear();
    }

    fn folder(&mut self, folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
        let canonical = fs::canonicalize(folder).map_err(Error::io("look at", folder))?;
        if self.cache.as_ref() == Some(&canonical) || !self.visited.insert(canonical) {
            return Ok(());
        }
        for path in sorted_entries(folder)? {
            self.entry(path, files)?;
        }
        Ok(())
    }

    fn entry(&mut self, path: PathBuf, files: &mut Vec<PathBuf>) -> Result<(), Error> {
        if is_hidden(&path) {
            self.hidden += 1;
            return Ok(());
        }
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => self.folder(&path, files),
            Ok(metadata) if metadata.is_file() => {
                files.push(path);
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) if path.is_symlink() => {
                self.broken_links += 1;
                Ok(())
            }
            Err(error) => Err(Error::io("look at", &path)(error)),
        }
    }

    fn glob(&self, written: &str, path: &Path) -> Result<Vec<PathBuf>, Error> {
        let bad = |message: String| Error::BadGlob { source_name: written.to_owned(), message };
        let pattern = path.to_str().ok_or_else(|| bad("the path is not UTF-8".into()))?;
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::default() };
        let mut files = Vec::new();
        for found in glob::glob_with(pattern, options).map_err(|error| bad(error.to_string()))? {
            let found = found.map_err(|error| {
                let path = error.path().to_owned();
                Error::io("look at", &path)(error.into())
            })?;
            if found.is_file() && !self.in_cache(&found) {
                files.push(found);
            }
        }
        Ok(files)
    }

    fn in_cache(&self, path: &Path) -> bool {
        match (&self.cache, fs::canonicalize(path)) {
            (Some(cache), Ok(path)) => path.starts_with(cache),
            _ => false,
        }
    }
}

fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<Result<Vec<_>, _>>().map_err(Error::io("list", folder))?;
    paths.sort();
    Ok(paths)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// The folders of a glob before its first wildcard.
fn fixed_prefix(pattern: &Path) -> PathBuf {
    let fixed = |part: &Component| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']);
    let parts: Vec<_> = pattern.components().collect();
    let count = parts.iter().take_while(|part| fixed(part)).count();
    parts[..count.min(parts.len().saturating_sub(1))].iter().collect()
}

fn nearest_folder(path: &Path) -> String {
    if path.is_dir() {
        return "the folder holds no files but hidden ones".into();
    }
    let folders = path.ancestors().skip(1).map(|folder| match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    });
    match folders.filter_map(|folder| fs::canonicalize(folder).ok()).find(|folder| folder.is_dir()) {
        Some(folder) => format!("the nearest existing folder is {}", folder.display()),
        None => "no folder above it exists".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_names() {
        for (name, format, compression) in [
            ("a.txt", Format::Plain, Compression::None),
            ("a", Format::Plain, Compression::None),
            ("a.json", Format::Plain, Compression::None),
            ("a.jsonl", Format::Jsonl, Compression::None),
            ("a.NDJSON.gz", Format::Jsonl, Compression::Gzip),
            ("a.json-lines.zst", Format::Jsonl, Compression::Zstd),
            ("a.rs.gz", Format::Plain, Compression::Gzip),
            ("a.parquet", Format::Parquet, Compression::None),
        ] {
            assert_eq!(format_of(Path::new(name)), (format, compression), "{name}");
        }
    }

    #[test]
    fn the_fixed_part_of_a_glob_ends_before_its_wildcard() {
        for (pattern, expected) in [("a/b/*.rs", "a/b"), ("/a/**/c", "/a"), ("*.txt", ""), ("a/[bc]/d", "a")] {
            assert_eq!(fixed_prefix(Path::new(pattern)), Path::new(expected), "{pattern}");
        }
    }
}
