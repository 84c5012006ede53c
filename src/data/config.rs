//! The `[data]` section of a recipe: which text, which tokenizer, what is held out.

use std::fmt;
use std::path::PathBuf;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::pairs::{Cleaning, PairSpec};
use super::tasks::Corruption;

/// Where text comes from and how it becomes tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Files, folders or globs; `~` and `${NAME:-default}` are expanded. A table names the field, the split of a data set,
    /// or conversations.
    #[serde(default)]
    pub sources: Vec<SourceSpec>,
    /// What a model of two stacks learns, in place of sources.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskTable>,
    /// Within a task, directions of n pairs are met in proportion to n^(1/temperature): 1 is as many as there are, more
    /// is more even.
    #[serde(default = "default_temperature")]
    pub temperature: f64,
    /// `"bpe"` trains a byte-level BPE of `model.vocab` entries on the corpus; anything else is the path of
    /// a Hugging Face `tokenizer.json`.
    #[serde(default = "default_tokenizer")]
    pub tokenizer: String,
    /// The token that ends a document; absent means `<|endoftext|>` for `"bpe"`, and the first of the usual
    /// names found in a `tokenizer.json`.
    #[serde(default)]
    pub end_of_text: Option<String>,
    /// Fraction of the documents kept for evaluation, chosen by a hash of their place in the corpus; 0 keeps
    /// none. Where one document is more than half of the text, the end of that document is kept instead.
    #[serde(default = "default_held_out")]
    pub held_out: f64,
    /// The template that writes conversations: a file of Jinja, a `tokenizer_config.json`, or a folder with either; absent
    /// means the folder of the tokenizer.
    #[serde(default)]
    pub chat_template: Option<PathBuf>,
    /// The day that templates may ask for, `"2026-07-26"`; absent means that they get none.
    #[serde(default)]
    pub chat_date: Option<String>,
    /// Of conversations, the tokens that are learned.
    #[serde(default)]
    pub chat_loss: ChatLoss,
    /// Probability that a token is selected to be predicted, in masked language models; absent means 0.15.
    #[serde(default)]
    pub mask_rate: Option<f64>,
    /// Upper bound on the bytes of text read, whole files in an order fixed by a hash of their paths;
    /// absent means everything.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// Folder for prepared token shards, shared between runs; one sub-folder per fingerprint.
    #[serde(default = "default_cache")]
    pub cache: PathBuf,
}

impl Config {
    /// Everything wrong with the values themselves, without looking at any file; empty means fine.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut require = |fine: bool, problem: &str| {
            if !fine {
                problems.push(problem.to_owned());
            }
        };
        let is_named = !self.sources.is_empty() || !self.tasks.is_empty();
        require(is_named, "data.sources is empty: name a file, a folder or a glob");
        require(
            self.sources.iter().all(|source| !source.path().trim().is_empty()),
            "data.sources has an empty path: name a file, a folder or a glob",
        );
        require(!self.tokenizer.trim().is_empty(), "data.tokenizer is empty: write \"bpe\" or a path");
        require(self.end_of_text.as_deref() != Some(""), "data.end_of_text is empty: leave it out instead");
        require(
            (0.0..=0.5).contains(&self.held_out),
            &format!("data.held_out = {} is not a fraction between 0 and 0.5", self.held_out),
        );
        require(
            self.mask_rate.is_none_or(|rate| rate > 0.0 && rate <= 1.0),
            &format!("data.mask_rate = {:?} is not a probability above 0", self.mask_rate.unwrap_or_default()),
        );
        let alike = self.sources.iter().all(|source| source.is_chat() == self.has_conversations());
        require(alike, "data.sources has conversations (chat = true) beside text: a corpus is of one kind");
        require(
            !self.has_conversations() || !self.trains_tokenizer(),
            "data.tokenizer = \"bpe\" has none of the tokens that a chat template writes: name a model's tokenizer.json",
        );
        require(self.max_bytes != Some(0), "data.max_bytes = 0 reads nothing: leave it out to read all");
        require(!self.cache.as_os_str().is_empty(), "data.cache is empty: name a folder");
        problems
    }

    /// Whether the tokenizer is made from the text.
    pub fn trains_tokenizer(&self) -> bool {
        self.tokenizer == "bpe"
    }

    /// Whether the sources hold conversations.
    pub fn has_conversations(&self) -> bool {
        self.sources.iter().any(SourceSpec::is_chat)
    }

    /// Whether a source says itself what of it is held out; the fraction is then of no use.
    pub fn names_held_out(&self) -> bool {
        self.sources.iter().any(|source| source.table().is_some_and(|table| table.held_out.is_some()))
    }
}

/// Which tokens of a conversation are learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatLoss {
    /// Those of the assistant's messages, and of their ends.
    #[default]
    Answers,
    All,
}

/// One entry of `data.tasks`: what is read and what is to be written for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskTable {
    pub kind: TaskKind,
    /// What the task is called in metrics; absent means its kind.
    #[serde(default)]
    pub name: Option<String>,
    /// Of all rows, the share of this task in proportion to those of the others.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Parallel text, or texts of one language for denoising and language modelling, which without any source take the
    /// texts of the translation tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<PairSpec>,
    /// The languages to take; absent means all that are found.
    #[serde(default)]
    pub languages: Option<Vec<String>>,
    /// The directions to take, `"en-de"` or `"en-*"`; absent means both ways between all languages.
    #[serde(default)]
    pub directions: Option<Vec<String>>,
    /// A direction, or a language by itself, with fewer pairs or texts to train on is left out.
    #[serde(default = "default_min_pairs")]
    pub min_pairs: u64,
    /// The longest text, in characters.
    #[serde(default = "default_max_chars")]
    pub max_chars: usize,
    /// How many times as long as the other a side may be.
    #[serde(default = "default_length_ratio")]
    pub length_ratio: f64,
    /// What denoising does to a text; absent means the defaults.
    #[serde(default)]
    pub noise: Option<Corruption>,
}

/// What is to be written for what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// The same in another language.
    Translation,
    /// A text, of what corruption has left of it.
    Denoising,
    /// A text, of nothing.
    LanguageModel,
    /// The label of a text.
    Classification,
}

impl TaskKind {
    pub fn name(self) -> &'static str {
        match self {
            TaskKind::Translation => "translation",
            TaskKind::Denoising => "denoising",
            TaskKind::LanguageModel => "language_model",
            TaskKind::Classification => "classification",
        }
    }

    /// Whether one text is all there is of a pair.
    pub fn is_of_one_text(self) -> bool {
        matches!(self, TaskKind::Denoising | TaskKind::LanguageModel)
    }
}

impl TaskTable {
    /// What the task is called.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(self.kind.name())
    }

    /// Whether the task learns from this language to that.
    pub fn takes(&self, [from, to]: [&str; 2]) -> bool {
        let is_label = self.kind == TaskKind::Classification;
        let named =
            |language: &str| self.languages.as_ref().is_none_or(|names| names.iter().any(|name| name == language));
        let fits = |pattern: &String| pattern_fits(pattern, [from, to]);
        named(from) && (is_label || named(to)) && self.directions.as_ref().is_none_or(|all| all.iter().any(fits))
    }
}

/// Whether `"en-*"` means this direction. Names of languages may have dashes, too.
pub(super) fn pattern_fits(pattern: &str, [from, to]: [&str; 2]) -> bool {
    let fits = |part: &str, language: &str| part == "*" || part == language;
    let dashes = pattern.match_indices('-');
    let mut cuts = dashes.map(|(at, _)| (&pattern[..at], &pattern[at + 1..]));
    cuts.any(|(one, other)| fits(one, from) && fits(other, to))
}

/// One entry of `data.sources`: a path, or a table with the details.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum SourceSpec {
    /// A file, folder or glob whose format is told by its name.
    Path(String),
    /// The same with the text's field or column named.
    Table(SourceTable),
}

/// A source with its details written out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTable {
    /// A file, folder or glob.
    pub path: String,
    /// The JSONL field or Parquet column that holds the text, or the messages; absent means `text` or `messages`.
    #[serde(default)]
    pub field: Option<String>,
    /// Whether the field holds conversations.
    #[serde(default, skip_serializing_if = "is_false")]
    pub chat: bool,
    /// Of a data set of Hugging Face's hub, the split to train on; absent means `train`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The split to hold out; absent means a fraction of what is trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<String>,
    /// Which of its configurations; absent means the default one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

impl SourceTable {
    /// Whether it is about a data set of the hub, whatever its folder looks like.
    pub(super) fn is_of_data_set(&self) -> bool {
        self.split.is_some() || self.held_out.is_some() || self.config.is_some()
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

impl SourceSpec {
    /// The path as written.
    pub fn path(&self) -> &str {
        match self {
            SourceSpec::Path(path) => path,
            SourceSpec::Table(table) => &table.path,
        }
    }

    /// The details, if they are written out.
    pub fn table(&self) -> Option<&SourceTable> {
        match self {
            SourceSpec::Path(_) => None,
            SourceSpec::Table(table) => Some(table),
        }
    }

    /// Whether its records are conversations.
    pub fn is_chat(&self) -> bool {
        self.table().is_some_and(|table| table.chat)
    }

    /// The JSONL field or Parquet column that holds the text or the messages.
    pub fn field(&self) -> String {
        let given = self.table().and_then(|table| table.field.clone());
        given.unwrap_or_else(|| if self.is_chat() { "messages" } else { "text" }.to_owned())
    }
}

/// By hand, because the derived form answers a misspelt key with "did not match any variant".
impl<'de> Deserialize<'de> for SourceSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Spec;
        impl<'de> Visitor<'de> for Spec {
            type Value = SourceSpec;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a path or a table { path = \"...\", field = \"...\" }")
            }

            fn visit_str<E>(self, path: &str) -> Result<SourceSpec, E> {
                Ok(SourceSpec::Path(path.to_owned()))
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<SourceSpec, M::Error> {
                let table = SourceTable::deserialize(MapAccessDeserializer::new(map))?;
                let field = SourceSpec::Table(table.clone()).field();
                Ok(SourceSpec::Table(SourceTable { field: Some(field), ..table }))
            }
        }
        deserializer.deserialize_any(Spec)
    }
}

fn default_temperature() -> f64 {
    1.0
}

fn default_weight() -> f64 {
    1.0
}

fn default_min_pairs() -> u64 {
    1
}

fn default_max_chars() -> usize {
    Cleaning::default().max_chars
}

fn default_length_ratio() -> f64 {
    Cleaning::default().length_ratio
}

fn default_tokenizer() -> String {
    "bpe".into()
}

fn default_held_out() -> f64 {
    0.01
}

fn default_cache() -> PathBuf {
    ".guildhall/data".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_paths_or_tables() {
        let config: Config =
            toml::from_str("sources = ['a.txt', { path = 'b.jsonl', field = 'body' }, { path = 'c' }]").unwrap();
        let fields: Vec<_> = config.sources.iter().map(|s| (s.path().to_owned(), s.field())).collect();
        let expected = [("a.txt", "text"), ("b.jsonl", "body"), ("c", "text")];
        assert_eq!(fields, expected.map(|(path, field)| (path.to_owned(), field.to_owned())));
        let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn patterns_are_of_whole_languages() {
        for (pattern, direction, fits) in [
            ("en-de", ["en", "de"], true),
            ("en-de", ["de", "en"], false),
            ("en-*", ["en", "zh-Hans"], true),
            ("*-en", ["zh-Hans", "en"], true),
            ("zh-Hans-en", ["zh-Hans", "en"], true),
            ("en-d", ["en", "de"], false),
            ("*-*", ["fr", "es"], true),
            ("ende", ["en", "de"], false),
        ] {
            assert_eq!(pattern_fits(pattern, direction), fits, "{pattern} {direction:?}");
        }
    }

    #[test]
    fn tasks_are_written_as_they_are_read() {
        let text = "[[tasks]]\nkind = 'translation'\nsources = ['a', { path = 'b', from = 'en', fields = ['1', '3'] }]\n\
                    [[tasks]]\nkind = 'denoising'\nweight = 0.5\nnoise = { mask = 0.2 }";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.tasks[0].sources[0], PairSpec { path: "a".into(), ..PairSpec::default() });
        assert_eq!(config.tasks[1].noise, Some(Corruption { mask: 0.2, ..Corruption::default() }));
        let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn a_misspelt_key_of_a_source_is_named() {
        let error = toml::from_str::<Config>("sources = [{ path = 'a', feild = 'x' }]").unwrap_err();
        assert!(error.to_string().contains("feild"), "{error}");
    }

    #[test]
    fn all_problems_are_told_together() {
        let config: Config = toml::from_str(
            "sources = []\nheld_out = 0.9\nmask_rate = 0.0\nmax_bytes = 0\ncache = ''\nend_of_text = ''",
        )
        .unwrap();
        assert_eq!(config.problems().len(), 6, "{:?}", config.problems());
        let fine: Config = toml::from_str("sources = ['a']").unwrap();
        assert_eq!(fine.problems(), Vec::<String>::new());
    }
}
