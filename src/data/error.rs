//! What can go wrong with data, said so that the reader knows what, where, and what to do next.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use super::splits::Split;

/// A failure of the data module. Lines, rows and bytes within files count from 1, tokens from 0.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the [data] section cannot be used:{}", bullets(.0))]
    Config(Vec<String>),
    #[error("could not {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} sources cannot be used:{}", .0.len(), bullets(.0))]
    Many(Vec<Error>),

    #[error(
        "`{text}` uses the environment variable {name}, which is not set: set it, or write \
         `${{{name}:-default}}`"
    )]
    UnsetVariable { name: String, text: String },
    #[error("`{text}` has `${{` without a closing brace: write `${{NAME}}` or `${{NAME:-default}}`")]
    OpenVariable { text: String },
    #[error("source `{source_name}` is not a valid glob: {message}")]
    BadGlob { source_name: String, message: String },
    #[error("source `{source_name}` cannot be used: {message}")]
    BadSource { source_name: String, message: String },
    #[error("source `{source_name}` matches no file: {help}")]
    NoMatch { source_name: String, help: String },
    #[error(
        "none of the {files} files fits data.max_bytes = {max_bytes}: the smallest holds more text than \
         that; raise data.max_bytes or split the file"
    )]
    NothingFits { files: usize, max_bytes: u64 },
    #[error(
        "the {files} files of data.sources hold no text ({binary} binary files and {empty} empty documents \
         were passed over): check data.sources"
    )]
    NoText { files: usize, binary: u64, empty: u64 },

    #[error(
        "{} is not UTF-8 text: {what} at byte {byte}; convert the file, or leave it out of data.sources",
        path.display()
    )]
    NotText { path: PathBuf, byte: u64, what: &'static str },
    #[error("{}:{line}: not a JSON object ({message}); correct or remove the line", path.display())]
    BadJson { path: PathBuf, line: u64, message: String },
    #[error(
        "{}:{line}: no text in field `{field}` ({found}); correct the line or name the right `field` of the \
         source",
        path.display()
    )]
    MissingField { path: PathBuf, line: u64, field: String, found: String },
    #[error(
        "{}:{line}: the line is longer than {limit} bytes; each record needs a line of its own",
        path.display()
    )]
    LongLine { path: PathBuf, line: u64, limit: u64 },
    #[error("{} cannot be read as Parquet: {message}; replace the file", path.display())]
    Parquet { path: PathBuf, message: String },
    #[error(
        "{} has no column `{column}`; name one of {} as `field` of the source",
        path.display(),
        list(available)
    )]
    MissingColumn { path: PathBuf, column: String, available: Vec<String> },
    #[error(
        "{}: row {row} has no text in column `{column}` ({found}); correct the row or name another `field`",
        path.display()
    )]
    BadRow { path: PathBuf, row: u64, column: String, found: String },
    #[error("{place}: no conversation to learn from: {message}; correct or remove it")]
    Conversation { place: String, message: String },
    #[error(
        "no chat template: {} has neither chat_template.jinja nor a tokenizer_config.json with `chat_template`; name a file \
         with one as data.chat_template, or the tokenizer.json of a chat model as data.tokenizer",
        if place.as_os_str().is_empty() { ".".into() } else { place.display().to_string() }
    )]
    NoChatTemplate { place: PathBuf },
    #[error("the chat template {} cannot be used: {message}", path.display())]
    ChatTemplate { path: PathBuf, message: String },
    #[error(
        "no conversation can be learned from: in {without_answers} nobody answers, and {forged} have the name of a special \
         token in a message, which the tokenizer cannot write as text; check data.sources, `field`, and the chat template"
    )]
    NoAnswers { without_answers: u64, forged: u64 },
    #[error("the data set {}: {message}", path.display())]
    DataSet { path: PathBuf, message: String },
    #[error(
        "{} changed while it was read ({before} bytes of text, then {after}): run again when nothing writes \
         to it",
        path.display()
    )]
    Changed { path: PathBuf, before: u64, after: u64 },

    #[error(
        "{} has {} lines and {} has {}: line n of one must be the translation of line n of the other; find where they \
         part, or leave both out; texts that are no translations are sources with `language`",
        paths[0].display(), lines[0], paths[1].display(), lines[1]
    )]
    UnequalLines { paths: [PathBuf; 2], lines: [u64; 2] },
    #[error(
        "{}:{line}: no column {column}, the line has {columns}: correct the line, or name the right columns as `fields` \
         of the source",
        path.display()
    )]
    MissingCell { path: PathBuf, line: u64, column: usize, columns: usize },
    #[error("{}: not XML at byte {byte} ({message}); correct the file or leave it out", path.display())]
    Xml { path: PathBuf, byte: u64, message: String },
    #[error(
        "{} has no unit with both `{}` and `{}` (of {units} units, in {}): name two of its languages as `from` and `to` of \
         the source",
        path.display(), languages[0], languages[1], list(found)
    )]
    NoDirection { path: PathBuf, languages: [String; 2], found: Vec<String>, units: u64 },
    #[error("{}: unknown encoding `{charset}`; convert the file to UTF-8", path.display())]
    Charset { path: PathBuf, charset: String },
    #[error("{} is not a catalogue of gettext: {message}; make it again with msgfmt, or leave it out", path.display())]
    Catalogue { path: PathBuf, message: String },
    #[error(
        "{}:{line}: not a catalogue of gettext ({message}); correct the line (`msgfmt -c` checks the file) or leave the \
         file out",
        path.display()
    )]
    CatalogueLine { path: PathBuf, line: u64, message: String },
    #[error(
        "{} has no text in `{language}` (left out: {skipped}): a text is a line, or the field `field` of the source, of \
         at most max_chars characters; leave the file out if it has none",
        path.display()
    )]
    NoTexts { path: PathBuf, language: String, skipped: String },
    #[error("source `{source_name}`: {message}")]
    PairSource { source_name: String, message: String },

    #[error(
        "task `{task}`: no source has the language `{language}`; found are {}: correct `languages`, or add a source",
        list(found)
    )]
    NoTaskLanguage { task: String, language: String, found: Vec<String> },
    #[error(
        "task `{task}`: no source has the direction `{direction}`; found are the languages {}: correct `directions`, or \
         add a source",
        list(found)
    )]
    NoTaskDirection { task: String, direction: String, found: Vec<String> },
    #[error("task `{task}`: no pair to train on for the direction `{direction}`: {help}")]
    EmptyDirection { task: String, direction: String, help: String },
    #[error("task `{task}`: no text to train on in the language `{language}`: {help}")]
    EmptyLanguage { task: String, language: String, help: String },
    #[error("task `{task}`: nothing has min_pairs = {min_pairs} pairs to train on, at most {most}: {help}")]
    NoTaskPairs { task: String, most: u64, min_pairs: u64, help: String },
    #[error(
        "the tokenizer {} has no tags for {} (`__de__` would be German's); its tags are {}: set data.tokenizer = \"bpe\" \
         to train one that has them, or choose `languages` that it has",
        path.display(), list(missing), if tags.is_empty() { "none".to_owned() } else { list(tags) }
    )]
    NoTags { path: PathBuf, missing: Vec<String>, tags: Vec<String> },
    #[error(
        "no pair of {} fits rows of {} tokens to read and {} to write ({too_long} are longer): raise model.source_seq and \
         model.seq, or lower max_chars",
        split, lengths[0], lengths[1]
    )]
    NoRows { split: Split, lengths: [usize; 2], too_long: u64 },
    #[error("nothing is held out of any task: raise data.held_out, or add text")]
    NothingHeldOut,

    #[error("model.vocab = {vocab} is too small for a byte-level BPE with all its tags: it needs at least {needed}")]
    SmallVocab { vocab: usize, needed: usize },
    #[error(
        "the tokenizer {} has {found} entries, more than model.vocab = {vocab}: set model.vocab to at least \
         {found}, or choose another tokenizer",
        path.display()
    )]
    LargeTokenizer { path: PathBuf, found: usize, vocab: usize },
    #[error("the tokenizer {} cannot be used: {message}", path.display())]
    BadTokenizer { path: PathBuf, message: String },
    #[error(
        "the tokenizer {} has none of the usual end-of-text tokens ({}): name its own as data.end_of_text",
        path.display(),
        list(tried)
    )]
    NoEndOfText { path: PathBuf, tried: Vec<String> },
    #[error(
        "a masked language model needs a mask token, and the tokenizer has none of {}: add one to its tokenizer.json, \
         or choose another data.tokenizer (\"bpe\" trains one that has it)",
        list(tried)
    )]
    NoMask { tried: Vec<String> },
    #[error("the tokenizer failed: {0}; try another tokenizer")]
    Tokenizer(String),
    #[error("token {id} is not in the vocabulary of {vocab} entries: was it made by another tokenizer?")]
    UnknownToken { id: u32, vocab: usize },

    #[error("{}", damaged(path, message))]
    Damaged { path: PathBuf, message: String },
    #[error(
        "{} was prepared in format {found}, this program reads format {expected}: delete its folder and run \
         prepare again",
        path.display()
    )]
    OtherFormat { path: PathBuf, found: u64, expected: u32 },
    #[error(
        "{}: token {position} is {id}, outside the vocabulary of {vocab}: the file is damaged; delete its \
         folder and run prepare again",
        path.display()
    )]
    TokenOutOfRange { path: PathBuf, position: u64, id: u32, vocab: usize },
    #[error(
        "the {split} split is too small: {tokens} tokens found, {needed} needed for {rows} rows of {seq}; \
         {}",
        enlarge(*split)
    )]
    TooSmall { split: Split, tokens: u64, needed: u64, rows: u64, seq: usize },

    #[error(
        "no conversation of the {split} split has an answer in its first {seq} tokens: raise model.seq, or shorten what \
         stands before the answers"
    )]
    Unanswered { split: Split, seq: usize },

    #[error("row {index} was asked of a source of {len} rows")]
    RowOutOfRange { index: usize, len: usize },
    #[error("the batch plan cannot be used: {0}")]
    BadPlan(String),
    #[error("could not start the thread that reads ahead: {source}; free some threads or raise the limit")]
    Thread { source: io::Error },
    #[error("the loader stopped after an earlier error: make a new one to go on")]
    LoaderStopped,
}

impl Error {
    /// Wraps an I/O error with what was being done to which path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }

    /// A prepared file that is not what its manifest says.
    pub(super) fn damaged(path: &Path, message: impl Into<String>) -> Error {
        Error::Damaged { path: path.to_owned(), message: message.into() }
    }
}

fn damaged(path: &Path, message: &str) -> String {
    let folder = path.parent().unwrap_or(path);
    format!("{} is damaged: {message}; delete the folder {} and run prepare again", path.display(), folder.display())
}

fn enlarge(split: Split) -> &'static str {
    match split {
        Split::Train => "add text to data.sources, or lower model.seq or the batch",
        Split::HeldOut => "raise data.held_out, add text to data.sources, or lower model.seq",
    }
}

fn bullets(items: &[impl Display]) -> String {
    items.iter().map(|item| format!("\n  - {item}")).collect()
}

fn list(items: &[String]) -> String {
    items.iter().map(|item| format!("`{item}`")).collect::<Vec<_>>().join(", ")
}
