//! A prepared corpus, opened.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::chat::ConversationRows;
use super::error::Error;
use super::manifest::{CorpusManifest, TOKENIZER, sha256};
use super::pack::PackedRows;
use super::shards::SplitReader;
use super::splits::Split;
use super::tokenizer::Tokenizer;

/// How much of a corpus is checked when it is opened. Sizes, the tokenizer and the documents' ends always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorpusCheck {
    /// Nothing more; for further processes on the same files.
    Sizes,
    /// Every token, by SHA-256, at about the speed of the disk; once per run.
    Contents,
}

/// Tokens on disk with the tokenizer that made them.
pub struct Corpus {
    pub dir: PathBuf,
    pub manifest: CorpusManifest,
    pub tokenizer: Tokenizer,
    /// Of conversations: their template, and what else lies beside the tokenizer, by name.
    pub chat_files: BTreeMap<String, Vec<u8>>,
    train: Arc<SplitReader>,
    held_out: Arc<SplitReader>,
}

impl fmt::Debug for Corpus {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let mut shown = formatter.debug_struct("Corpus");
        shown.field("dir", &self.dir).field("manifest", &self.manifest).finish_non_exhaustive()
    }
}

impl Corpus {
    /// Opens a prepared folder and checks all of it.
    ///
    /// # Errors
    /// A file that is missing, was cut short or has changed; another format.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        Self::open_with(dir, CorpusCheck::Contents)
    }

    /// Opens a prepared folder and checks as much of it as asked.
    ///
    /// # Errors
    /// A file that is missing, was cut short or has changed; another format.
    pub fn open_with(dir: &Path, verify: CorpusCheck) -> Result<Self, Error> {
        let manifest = CorpusManifest::read(dir)?;
        let tokenizer = open_tokenizer(dir, &manifest)?;
        let open = |split| SplitReader::open(dir, &manifest, split).map(Arc::new);
        let (train, held_out) = (open(Split::Train)?, open(Split::HeldOut)?);
        if verify == CorpusCheck::Contents {
            train.verify(&manifest.train)?;
            held_out.verify(&manifest.held_out)?;
        }
        let chat_files = open_chat_files(dir, &manifest)?;
        Ok(Self { dir: dir.to_owned(), manifest, tokenizer, chat_files, train, held_out })
    }

    /// A split as rows of `seq` tokens: at least one for training; the held-out split may have none.
    ///
    /// # Errors
    /// Too little text for one row, with the numbers.
    pub fn rows(&self, split: Split, seq: usize) -> Result<PackedRows, Error> {
        let rows_min = match split {
            Split::Train => 1,
            Split::HeldOut => 0,
        };
        self.rows_at_least(split, seq, rows_min)
    }

    /// A split as rows of `seq` tokens, of which there must be at least `rows_min`.
    ///
    /// # Errors
    /// Too little text, with the numbers.
    pub fn rows_at_least(&self, split: Split, seq: usize, rows_min: u64) -> Result<PackedRows, Error> {
        PackedRows::new(Arc::clone(self.split(split)), seq, rows_min)
    }

    /// The conversations of a split in rows of `seq` tokens, of which there must be at least `rows_min`.
    ///
    /// # Errors
    /// Too few of them, with the numbers.
    pub fn conversations(&self, split: Split, seq: usize, rows_min: u64) -> Result<ConversationRows, Error> {
        ConversationRows::new(Arc::clone(self.split(split)), seq, rows_min)
    }

    /// The tokens and document ends of a split.
    pub fn split(&self, split: Split) -> &Arc<SplitReader> {
        split.of(&self.train, &self.held_out)
    }

    /// The pairs of documents of a split, as its table has them; none in a corpus of plain text.
    ///
    /// # Errors
    /// A table that is missing or has changed.
    pub(super) fn pairs(&self, split: Split) -> Result<Vec<[u32; 2]>, Error> {
        let Some(index) = &self.manifest.pairs else { return Ok(Vec::new()) };
        let path = self.dir.join(split.pairs_name());
        let bytes = fs::read(&path).map_err(missing(&path))?;
        if sha256(&bytes) != index.sha256(split) {
            return Err(Error::damaged(&path, "its contents do not match their SHA-256"));
        }
        let numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        let pairs: Vec<[u32; 2]> = numbers.collect::<Vec<u32>>().as_chunks::<2>().0.to_vec();
        let documents = self.manifest.split(split).documents;
        let exist = pairs.iter().flatten().all(|&document| u64::from(document) < documents);
        match exist && index.pairs(split) <= pairs.len() as u64 {
            true => Ok(pairs),
            false => Err(Error::damaged(&path, "its pairs are of other documents than the manifest has")),
        }
    }

    /// Every token is below it.
    pub fn vocab(&self) -> usize {
        self.manifest.vocab
    }
}

/// What is said of a file of the corpus that cannot be read.
fn missing(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::damaged(&path, "it is missing"),
        _ => Error::io("read", &path)(error),
    }
}

fn open_chat_files(dir: &Path, manifest: &CorpusManifest) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let open = |(name, hash): (&String, &String)| {
        let path = dir.join(name);
        let bytes = fs::read(&path).map_err(missing(&path))?;
        match sha256(&bytes) == *hash {
            true => Ok((name.clone(), bytes)),
            false => Err(Error::damaged(&path, "its contents do not match their SHA-256")),
        }
    };
    manifest.chat.iter().flat_map(|chat| &chat.files).map(open).collect()
}

fn open_tokenizer(dir: &Path, manifest: &CorpusManifest) -> Result<Tokenizer, Error> {
    let path = dir.join(TOKENIZER);
    let bytes = fs::read(&path).map_err(missing(&path))?;
    if sha256(&bytes) != manifest.tokenizer_sha256 {
        return Err(Error::damaged(&path, "its contents do not match their SHA-256"));
    }
    let tokenizer = Tokenizer::from_json(&bytes, &path, Some(&manifest.end_of_text_name))?;
    match (tokenizer.vocab(), tokenizer.end_of_text()) == (manifest.vocab, manifest.end_of_text) {
        true => Ok(tokenizer),
        false => Err(Error::damaged(&path, "it is not the tokenizer the manifest describes")),
    }
}
