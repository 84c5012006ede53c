//! The second pass over a corpus: text to tokens, split and written.
//!
//! One thread reads and writes, all threads tokenise; no more than a chunk of text and its tokens is in
//! memory. The order of the tokens is that of the corpus, whatever the number of threads.

use std::ops::ControlFlow;
use std::path::Path;

use rayon::prelude::*;

use super::documents::{self, DocumentPart};
use super::error::Error;
use super::manifest::SplitEntry;
use super::shards::{SplitWriter, WriterShape};
use super::splits::{HeldOut, Split};
use super::stages::{Limits, PrepareStage};
use super::survey::{Survey, SurveyedFile};
use super::tokenizer::Tokenizer;

/// What is to be tokenised, how, and for which split.
pub(super) struct TokenizeTask<'a> {
    pub(super) survey: &'a Survey,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) held_out: HeldOut,
    pub(super) limits: Limits,
}

/// The written splits.
pub(super) struct WrittenSplits {
    pub(super) train: SplitEntry,
    pub(super) held_out: SplitEntry,
}

impl TokenizeTask<'_> {
    /// Writes both splits into a folder.
    ///
    /// # Errors
    /// Files that changed since the survey, and everything reading and writing can meet.
    pub(super) fn write(
        &self,
        dir: &Path,
        shape: WriterShape,
        progress: &dyn Fn(PrepareStage),
    ) -> Result<WrittenSplits, Error> {
        let mut output = TokenWriter {
            task: self,
            train: SplitWriter::create(dir, Split::Train, shape)?,
            held_out: SplitWriter::create(dir, Split::HeldOut, shape)?,
            chunk: Vec::new(),
            chunk_bytes: 0,
            bytes_done: 0,
            bytes: self.survey.bytes(),
            progress,
        };
        output.report();
        let mut document = 0;
        for file in &self.survey.files {
            self.file(file, document, &mut output)?;
            document += file.documents;
        }
        output.flush()?;
        Ok(WrittenSplits { train: output.train.finish()?, held_out: output.held_out.finish()? })
    }

    /// Sends one file, whose first document has the given place in the corpus.
    fn file(&self, file: &SurveyedFile, first_document: u64, output: &mut TokenWriter) -> Result<(), Error> {
        let (mut document, mut within, mut bytes) = (first_document, 0u64, 0u64);
        documents::read(&file.file, self.limits.part_bytes, &mut |part| {
            bytes += part.text.len() as u64;
            self.part(part, document, within, output)?;
            within += part.text.len() as u64;
            if part.last {
                document += 1;
                within = 0;
            }
            Ok(if bytes > file.bytes { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if (document - first_document, bytes) != (file.documents, file.bytes) {
            let path = file.file.path.clone();
            return Err(Error::Changed { path, before: file.bytes, after: bytes });
        }
        Ok(())
    }

    /// Sends a part that starts `within` bytes into a document, cut where the held-out end begins.
    fn part(&self, part: DocumentPart, document: u64, within: u64, output: &mut TokenWriter) -> Result<(), Error> {
        let Some(cut) = self.held_out.cut(document) else {
            return output.push(part.text, self.held_out.split(document), part.last);
        };
        let at = part.text.ceil_char_boundary(cut.saturating_sub(within).min(part.text.len() as u64) as usize);
        let (train, held_out) = part.text.split_at(at);
        let reaches_cut = within + at as u64 >= cut;
        if !train.is_empty() {
            output.push(train, Split::Train, reaches_cut)?;
        }
        if !held_out.is_empty() {
            output.push(held_out, Split::HeldOut, part.last)?;
        }
        Ok(())
    }
}

/// A stretch of a document that waits to be tokenised.
struct PendingText {
    text: String,
    split: Split,
    last: bool,
}

/// Collects pieces and writes their tokens in order.
struct TokenWriter<'a> {
    task: &'a TokenizeTask<'a>,
    train: SplitWriter,
    held_out: SplitWriter,
    chunk: Vec<PendingText>,
    chunk_bytes: usize,
    bytes_done: u64,
    bytes: u64,
    progress: &'a dyn Fn(PrepareStage),
}

impl TokenWriter<'_> {
    fn push(&mut self, text: &str, split: Split, last: bool) -> Result<(), Error> {
        self.chunk.push(PendingText { text: text.to_owned(), split, last });
        self.chunk_bytes += text.len();
        match self.chunk_bytes >= self.task.limits.chunk_bytes {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        let tokenizer = self.task.tokenizer;
        let tokens: Vec<Vec<u32>> =
            self.chunk.par_iter().map(|piece| tokenizer.encode(&piece.text)).collect::<Result<_, _>>()?;
        for (piece, tokens) in self.chunk.drain(..).zip(tokens) {
            let writer = piece.split.of(&mut self.train, &mut self.held_out);
            writer.append(&tokens, piece.text.len())?;
            if piece.last {
                writer.end_document()?;
            }
        }
        self.bytes_done += self.chunk_bytes as u64;
        self.chunk_bytes = 0;
        self.report();
        Ok(())
    }

    fn report(&self) {
        (self.progress)(PrepareStage::Tokenizing { bytes_done: self.bytes_done, bytes: self.bytes });
    }
}
