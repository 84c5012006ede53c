//! Writing one split, document by document.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::data::error::Error;
use crate::data::manifest::{GivenEntry, ShardEntry, SplitEntry, hex};
use crate::data::splits::Split;

/// The fixed numbers of a corpus's files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriterShape {
    /// 2 or 4.
    pub(crate) token_bytes: u32,
    pub(crate) shard_tokens: u64,
    pub(crate) end_of_text: u32,
    /// Whether some tokens are given, which is then told of both splits.
    pub(crate) marks_given: bool,
}

/// Appends documents to a split's files.
pub(crate) struct SplitWriter {
    dir: PathBuf,
    split: Split,
    shape: WriterShape,
    entry: SplitEntry,
    shard: Option<(HashedFile, u64)>,
    boundaries: HashedFile,
    given: Option<(HashedFile, GivenEntry)>,
}

impl SplitWriter {
    pub(crate) fn create(dir: &Path, split: Split, shape: WriterShape) -> Result<Self, Error> {
        let boundaries = HashedFile::create(dir.join(split.boundaries_name()))?;
        let given = shape.marks_given.then(|| HashedFile::create(dir.join(split.given_name()))).transpose()?;
        let none = GivenEntry { tokens: 0, runs: 0, sha256: String::new() };
        let given = given.map(|file| (file, none));
        Ok(Self { dir: dir.to_owned(), split, shape, entry: SplitEntry::default(), shard: None, boundaries, given })
    }

    /// Says which of the tokens that are appended next are given: stretches in ascending order, counted from the next token.
    pub(crate) fn give(&mut self, runs: &[Range<usize>]) -> Result<(), Error> {
        let Some((file, entry)) = &mut self.given else { return Ok(()) };
        for run in runs {
            entry.runs += 1;
            entry.tokens += run.len() as u64;
            for place in [run.start, run.end] {
                file.write(&(self.entry.tokens + place as u64).to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Appends a stretch of a document that stands for `text_bytes` bytes of text.
    pub(crate) fn append(&mut self, tokens: &[u32], text_bytes: usize) -> Result<(), Error> {
        self.entry.text_bytes += text_bytes as u64;
        tokens.iter().try_for_each(|&token| self.push(token))
    }

    /// Ends the document with its end of text.
    pub(crate) fn end_document(&mut self) -> Result<(), Error> {
        self.push(self.shape.end_of_text)?;
        self.close_document()
    }

    /// Ends the document where it is.
    pub(crate) fn close_document(&mut self) -> Result<(), Error> {
        self.entry.documents += 1;
        self.boundaries.write(&self.entry.tokens.to_le_bytes())
    }

    /// Waits until everything is on disk.
    pub(crate) fn finish(mut self) -> Result<SplitEntry, Error> {
        self.close_shard()?;
        self.entry.boundaries_sha256 = self.boundaries.finish()?;
        let told = |(file, entry): (HashedFile, GivenEntry)| Ok(GivenEntry { sha256: file.finish()?, ..entry });
        self.entry.given = self.given.map(told).transpose()?;
        Ok(self.entry)
    }

    fn push(&mut self, token: u32) -> Result<(), Error> {
        if self.shard.as_ref().is_some_and(|(_, tokens)| *tokens == self.shape.shard_tokens) {
            self.close_shard()?;
        }
        let (file, tokens) = match &mut self.shard {
            Some(shard) => shard,
            None => {
                let name = self.split.shard_name(self.entry.shards.len());
                self.shard.insert((HashedFile::create(self.dir.join(name))?, 0))
            }
        };
        *tokens += 1;
        self.entry.tokens += 1;
        file.write(&token.to_le_bytes()[..self.shape.token_bytes as usize])
    }

    fn close_shard(&mut self) -> Result<(), Error> {
        if let Some((file, tokens)) = self.shard.take() {
            let name = self.split.shard_name(self.entry.shards.len());
            self.entry.shards.push(ShardEntry { file: name, tokens, sha256: file.finish()? });
        }
        Ok(())
    }
}

/// A file with the hash of what was written to it.
struct HashedFile {
    path: PathBuf,
    file: BufWriter<Hashed>,
}

/// Below the buffer, so that the hash sees blocks and not single tokens.
struct Hashed {
    file: File,
    hasher: Sha256,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl HashedFile {
    fn create(path: PathBuf) -> Result<Self, Error> {
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path, file: BufWriter::with_capacity(1 << 16, Hashed { file, hasher: Sha256::new() }) })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(Error::io("write", &self.path))
    }

    /// Waits until the file is on disk; returns the hash in hexadecimal.
    fn finish(self) -> Result<String, Error> {
        let Self { path, file } = self;
        let Hashed { file, hasher } =
            file.into_inner().map_err(|error| Error::io("write", &path)(error.into_error()))?;
        file.sync_all().map_err(Error::io("write", &path))?;
        Ok(hex(&hasher.finalize()))
    }
}
