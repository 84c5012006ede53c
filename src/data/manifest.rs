//! `manifest.json`: what a prepared corpus consists of, written last and checked first.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::Error;
use super::splits::Split;
use super::tasks::PairIndex;

/// Raised whenever the same configuration would give other files.
pub(crate) const FORMAT: u32 = 2;
pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// The description of a prepared corpus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusManifest {
    pub format: u32,
    /// Names the folder; of the configuration and of the files' paths, sizes and times.
    pub fingerprint: String,
    /// Every token is below it: the tokenizer's number of entries, at most `model.vocab`.
    pub vocab: usize,
    /// The token after each document.
    pub end_of_text: u32,
    pub end_of_text_name: String,
    /// Bytes of a stored token, 2 or 4, little-endian.
    pub token_bytes: u32,
    /// Tokens of every shard but the last of its split.
    pub shard_tokens: u64,
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: String,
    pub train: SplitEntry,
    pub held_out: SplitEntry,
    /// What each entry of `data.sources` contributed.
    pub sources: Vec<SourceEntry>,
    pub skipped: SkippedFiles,
    /// Of a corpus of tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairIndex>,
    /// Of a corpus of conversations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatEntry>,
}

/// What became of conversations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatEntry {
    /// Documents of both splits.
    pub conversations: u64,
    /// Left out, since nobody answers in them.
    pub without_answers: u64,
    /// Left out, since a message has the name of a special token, which this tokenizer cannot write as text.
    pub forged: u64,
    /// SHA-256 of the template and of what else lies beside the tokenizer, by name.
    pub files: BTreeMap<String, String>,
}

/// The tokens of a split that are given and not predicted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenEntry {
    pub tokens: u64,
    /// Stretches of such tokens, each two positions (u64, little-endian): its first token and the one behind its last.
    pub runs: u64,
    /// SHA-256 of the stretches.
    pub sha256: String,
}

/// The files of one split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitEntry {
    /// Tokens, with one end of text per document.
    pub tokens: u64,
    pub documents: u64,
    /// Bytes of text these tokens stand for.
    pub text_bytes: u64,
    pub shards: Vec<ShardEntry>,
    /// SHA-256 of the documents' end offsets (u64, little-endian).
    pub boundaries_sha256: String,
    /// Of conversations of which the answers are learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<GivenEntry>,
}

/// One file of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    pub file: String,
    pub tokens: u64,
    pub sha256: String,
}

/// What one source contributed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceEntry {
    /// As written in the recipe.
    pub source: String,
    pub files: u64,
    pub documents: u64,
    pub text_bytes: u64,
}

/// What was passed over, so that nothing is left out silently.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SkippedFiles {
    /// Files in folders or globs that are not UTF-8 text.
    pub binary: u64,
    /// The first few of them.
    pub binary_examples: Vec<String>,
    /// Documents without any text.
    pub empty: u64,
    /// Files and folders whose names start with a dot.
    pub hidden: u64,
    /// Links that lead nowhere.
    pub broken_links: u64,
    /// Files that would have exceeded `data.max_bytes`.
    pub over_max_bytes: u64,
}

impl fmt::Display for SkippedFiles {
    /// One line, empty when nothing was passed over.
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let counts = [
            (self.binary, "binary files"),
            (self.empty, "empty documents"),
            (self.hidden, "hidden files or folders"),
            (self.broken_links, "broken links"),
            (self.over_max_bytes, "files over data.max_bytes"),
        ];
        let told = counts.iter().filter(|(count, _)| *count > 0);
        let told: Vec<_> = told.map(|(count, what)| format!("{count} {what}")).collect();
        formatter.write_str(&told.join(", "))
    }
}

impl CorpusManifest {
    pub fn split(&self, split: Split) -> &SplitEntry {
        split.of(&self.train, &self.held_out)
    }

    /// Reads and checks the manifest of a folder.
    pub(crate) fn read(dir: &Path) -> Result<CorpusManifest, Error> {
        let path = dir.join(MANIFEST);
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        let damaged = |error: serde_json::Error| Error::damaged(&path, error.to_string());
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(damaged)?;
        let found = value.get("format").and_then(serde_json::Value::as_u64);
        let found = found.ok_or_else(|| Error::damaged(&path, "it names no format"))?;
        if found != u64::from(FORMAT) {
            return Err(Error::OtherFormat { path, found, expected: FORMAT });
        }
        let manifest: CorpusManifest = serde_json::from_value(value).map_err(damaged)?;
        manifest.check().map_err(|message| Error::damaged(&path, message))?;
        Ok(manifest)
    }

    /// Writes the manifest into a folder and waits until it is on disk.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), Error> {
        let path = dir.join(MANIFEST);
        let json = serde_json::to_vec_pretty(self).map_err(|error| Error::damaged(&path, error.to_string()))?;
        write_durably(&path, &json)
    }

    /// The numbers must agree with each other before any of them is trusted.
    fn check(&self) -> Result<(), String> {
        if !matches!(self.token_bytes, 2 | 4) || (self.token_bytes == 2 && self.vocab > 1 << 16) {
            return Err(format!("{} bytes cannot hold a vocabulary of {}", self.token_bytes, self.vocab));
        }
        if self.shard_tokens == 0 || self.vocab == 0 || self.end_of_text as usize >= self.vocab {
            return Err("its sizes contradict each other".into());
        }
        Split::ALL.into_iter().try_for_each(|split| self.check_split(split))
    }

    fn check_split(&self, split: Split) -> Result<(), String> {
        let entry = self.split(split);
        let mut tokens = 0u64;
        for (index, shard) in entry.shards.iter().enumerate() {
            if shard.file != split.shard_name(index) {
                return Err(format!("shard {index} of {split} is called `{}`", shard.file));
            }
            let last = index + 1 == entry.shards.len();
            if shard.tokens > self.shard_tokens || (!last && shard.tokens != self.shard_tokens) {
                return Err(format!("{} has {} tokens", shard.file, shard.tokens));
            }
            tokens += shard.tokens;
        }
        if tokens != entry.tokens || entry.documents > entry.tokens {
            return Err(format!("the counts of {split} contradict each other"));
        }
        Ok(())
    }
}

/// Writes a whole small file and waits until it is on disk.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("write", path))
}

/// SHA-256 of some bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256_of_file(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hasher = Sha256::new();
    let mut block = vec![0; 1 << 18];
    loop {
        match file.read(&mut block).map_err(Error::io("read", path))? {
            0 => return Ok(hex(&hasher.finalize())),
            read => hasher.update(&block[..read]),
        }
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
