//! What makes two prepared corpora the same: the name of a corpus's folder.
//!
//! The fingerprint covers everything that could change the tokens: this program's format, the `[data]`
//! section, the vocabulary, the contents of a given tokenizer, and for every file its path, size and time of
//! change. Contents are not hashed for it, so that a second run starts at once even with a hundred thousand
//! files; a file changed without changing size or time goes unnoticed.

use serde::Serialize;

use super::chat::ChatTemplate;
use super::config::{ChatLoss, Config};
use super::error::Error;
use super::manifest::{FORMAT, sha256};
use super::sources::Listing;
use super::stages::Limits;
use super::tasks::TaskSources;

/// Everything that could change the tokens. The vocabulary is part of a trained tokenizer's key only: a
/// given one makes the same tokens for every model they fit.
#[derive(Serialize)]
struct Key<'a, T> {
    format: u32,
    limits: [u64; 3],
    tokenizer: String,
    end_of_text: &'a Option<String>,
    held_out: f64,
    max_bytes: Option<u64>,
    files: Vec<FileKey<'a>>,
    /// What conversations are written by, and what of them is learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    chat: Option<(&'a str, ChatLoss)>,
    /// Absent without tasks, whose files are in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    tasks: Option<T>,
}

#[derive(Serialize)]
struct FileKey<'a> {
    path: String,
    relative: &'a str,
    source: usize,
    field: Option<&'a str>,
    named: bool,
    #[serde(skip_serializing_if = "is_false")]
    chat: bool,
    #[serde(skip_serializing_if = "is_false")]
    held_out: bool,
    bytes: u64,
    modified_ns: u128,
}

/// Keys that most corpora lack are left out of theirs.
fn is_false(value: &bool) -> bool {
    !value
}

/// `tokenizer` says how the tokens are made: the vocabulary to train, or the contents of the file given.
pub(super) fn fingerprint(
    config: &Config,
    limits: Limits,
    tokenizer: String,
    (listing, chat): (&Listing, Option<&ChatTemplate>),
    tasks: Option<&TaskSources>,
) -> Result<String, Error> {
    let files = listing.files.iter().map(|file| FileKey {
        path: file.path.to_string_lossy().into_owned(),
        relative: &file.relative,
        source: file.source,
        field: file.field_used(),
        named: file.named,
        chat: file.chat,
        held_out: file.held_out,
        bytes: file.bytes,
        modified_ns: file.modified_ns,
    });
    let key = Key {
        format: FORMAT,
        limits: [limits.part_bytes as u64, limits.sample_bytes_per_entry as u64, limits.shard_tokens],
        tokenizer,
        end_of_text: &config.end_of_text,
        held_out: config.held_out,
        max_bytes: config.max_bytes,
        files: files.collect(),
        chat: chat.map(|template| (template.key(), config.chat_loss)),
        tasks: tasks.map(TaskSources::key),
    };
    let json = serde_json::to_vec(&key).map_err(|error| Error::Config(vec![error.to_string()]))?;
    // Half of the hash is beyond any accident and keeps paths readable.
    Ok(sha256(&json)[..32].to_owned())
}
