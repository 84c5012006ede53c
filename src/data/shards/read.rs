//! Reading one split by position.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::data::error::Error;
use crate::data::manifest::{CorpusManifest, GivenEntry, SplitEntry, sha256, sha256_of_file};
use crate::data::source::IGNORE;
use crate::data::splits::Split;

/// A split opened for reading; any number of threads may read at once.
#[derive(Debug)]
pub struct SplitReader {
    split: Split,
    shards: Vec<(PathBuf, File)>,
    tokens: u64,
    shard_tokens: u64,
    token_bytes: u32,
    vocab: usize,
    /// The position after each document, ascending.
    ends: Vec<u64>,
    /// Stretches of tokens that are not predicted, ascending.
    given: Vec<Range<u64>>,
    /// Of all tokens, boundaries, given tokens and pairs; says nothing about where they lie.
    content: String,
}

impl SplitReader {
    /// Opens the files of a split and checks their sizes against the manifest.
    pub(crate) fn open(dir: &Path, manifest: &CorpusManifest, split: Split) -> Result<Self, Error> {
        let entry = manifest.split(split);
        let shards = entry.shards.iter().map(|shard| {
            let path = dir.join(&shard.file);
            let file = open_sized(&path, shard.tokens * u64::from(manifest.token_bytes))?;
            Ok((path, file))
        });
        Ok(Self {
            split,
            shards: shards.collect::<Result<_, Error>>()?,
            tokens: entry.tokens,
            shard_tokens: manifest.shard_tokens,
            token_bytes: manifest.token_bytes,
            vocab: manifest.vocab,
            ends: read_boundaries(&dir.join(split.boundaries_name()), entry)?,
            given: match &entry.given {
                Some(given) => read_given(&dir.join(split.given_name()), given, entry.tokens)?,
                None => Vec::new(),
            },
            content: content_of(entry, manifest, split),
        })
    }

    /// Compares the contents of every shard with the manifest.
    pub(crate) fn verify(&self, entry: &SplitEntry) -> Result<(), Error> {
        let own = self.shards.iter().zip(&entry.shards).map(|((path, _), shard)| (path, &shard.sha256));
        let compare = |&(path, expected): &(&PathBuf, &String)| match sha256_of_file(path)? == *expected {
            true => Ok(()),
            false => Err(Error::damaged(path, "its contents do not match their SHA-256")),
        };
        // A few at a time: a thread that waits for hours without running is taken for one whose disk does not answer.
        let at_once = rayon::current_num_threads();
        own.collect::<Vec<_>>().chunks(at_once).try_for_each(|some| some.par_iter().try_for_each(compare))
    }

    pub fn split(&self) -> Split {
        self.split
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The position after each document.
    pub fn ends(&self) -> &[u64] {
        &self.ends
    }

    /// The positions of a document's tokens.
    ///
    /// # Panics
    /// If there is no such document.
    pub fn document(&self, document: u64) -> Range<u64> {
        let number = document as usize;
        let start = if number == 0 { 0 } else { self.ends[number - 1] };
        start..self.ends[number]
    }

    /// The parts of a stretch of tokens that are given, and not to be predicted.
    pub fn given(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.given.partition_point(|run| run.end <= range.start);
        let within = self.given[first..].iter().take_while(move |run| run.start < range.end);
        within.map(move |run| run.start.max(range.start)..run.end.min(range.end))
    }

    /// Leaves no target where the token is given; `targets` are the tokens from position `first` on.
    pub(in crate::data) fn hide_given(&self, first: u64, targets: &mut [u32]) {
        for run in self.given(first..first + targets.len() as u64) {
            targets[(run.start - first) as usize..(run.end - first) as usize].fill(IGNORE);
        }
    }

    /// A hash of the split's tokens, boundaries, given tokens and pairs.
    pub fn content(&self) -> &str {
        &self.content
    }

    /// The tokens at some positions.
    ///
    /// # Errors
    /// A file that cannot be read; a token outside the vocabulary.
    ///
    /// # Panics
    /// If the range ends after the last token.
    #[track_caller]
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u32>, Error> {
        assert!(range.end <= self.tokens, "tokens {range:?} of {}", self.tokens);
        let mut tokens = Vec::with_capacity((range.end.saturating_sub(range.start)) as usize);
        let mut at = range.start;
        while at < range.end {
            let shard = at / self.shard_tokens;
            let end = range.end.min((shard + 1) * self.shard_tokens);
            self.read_shard(shard as usize, at % self.shard_tokens, (end - at) as usize, &mut tokens)?;
            at = end;
        }
        Ok(tokens)
    }

    fn read_shard(&self, shard: usize, first: u64, count: usize, tokens: &mut Vec<u32>) -> Result<(), Error> {
        let (path, file) = &self.shards[shard];
        let width = self.token_bytes as usize;
        let mut bytes = vec![0; count * width];
        file.read_exact_at(&mut bytes, first * width as u64).map_err(Error::io("read", path))?;
        for (position, token) in (first..).zip(bytes.chunks_exact(width)) {
            let id = token.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
            if id as usize >= self.vocab {
                return Err(Error::TokenOutOfRange { path: path.clone(), position, id, vocab: self.vocab });
            }
            tokens.push(id);
        }
        Ok(())
    }
}

fn open_sized(path: &Path, expected: u64) -> Result<File, Error> {
    let file = File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::damaged(path, "it is missing"),
        _ => Error::io("open", path)(error),
    })?;
    let found = file.metadata().map_err(Error::io("look at", path))?.len();
    match found == expected {
        true => Ok(file),
        false => Err(Error::damaged(path, format!("it has {found} bytes instead of {expected}"))),
    }
}

fn read_boundaries(path: &Path, entry: &SplitEntry) -> Result<Vec<u64>, Error> {
    open_sized(path, entry.documents.saturating_mul(8))?;
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    if sha256(&bytes) != entry.boundaries_sha256 {
        return Err(Error::damaged(path, "its contents do not match their SHA-256"));
    }
    let ends = bytes.chunks_exact(8).map(|end| u64::from_le_bytes(end.try_into().unwrap_or_default()));
    let ends: Vec<u64> = ends.collect();
    let ascending = ends.iter().zip(&ends[1.min(ends.len())..]).all(|(a, b)| a < b);
    if !ascending || ends.last().copied().unwrap_or(0) != entry.tokens {
        return Err(Error::damaged(path, "its documents do not cover the tokens"));
    }
    Ok(ends)
}

fn read_given(path: &Path, entry: &GivenEntry, tokens: u64) -> Result<Vec<Range<u64>>, Error> {
    open_sized(path, entry.runs.saturating_mul(16))?;
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    if sha256(&bytes) != entry.sha256 {
        return Err(Error::damaged(path, "its contents do not match their SHA-256"));
    }
    let places = bytes.as_chunks::<8>().0.iter().map(|place| u64::from_le_bytes(*place));
    let runs: Vec<Range<u64>> =
        places.collect::<Vec<u64>>().as_chunks::<2>().0.iter().map(|&[start, end]| start..end).collect();
    let ascending = runs.array_windows().all(|[one, next]| one.end <= next.start);
    let within = runs.iter().all(|run| run.start < run.end && run.end <= tokens);
    match ascending && within {
        true => Ok(runs),
        false => Err(Error::damaged(path, "its stretches are not of the tokens")),
    }
}

fn content_of(entry: &SplitEntry, manifest: &CorpusManifest, split: Split) -> String {
    let mut text = format!("{} {}", manifest.token_bytes, entry.boundaries_sha256);
    for shard in &entry.shards {
        text.push(' ');
        text.push_str(&shard.sha256);
    }
    if let Some(given) = &entry.given {
        text.push_str(" given ");
        text.push_str(&given.sha256);
    }
    if let Some(pairs) = &manifest.pairs {
        text.push(' ');
        text.push_str(pairs.sha256(split));
    }
    sha256(text.as_bytes())
}
