//! The second pass over a corpus: text to tokens, split and written.
//!
//! One thread reads and writes, all threads tokenise; no more than a chunk of text and its tokens is in
//! memory. The order of the tokens is that of the corpus, whatever the number of threads.

use std::ops::ControlFlow;
use std::path::Path;

use rayon::prelude::*;

use super::chat::{ChatEncoder, EncodedChat};
use super::documents::{self, DocumentPart};
use super::error::Error;
use super::manifest::{ChatEntry, SplitEntry};
use super::shards::{SplitWriter, WriterShape};
use super::splits::{HeldOut, Split};
use super::stages::{Limits, PrepareStage};
use super::survey::{Survey, SurveyedFile};
use super::tokenizer::Tokenizer;

/// What is to be tokenised, how, and for which split.
pub(super) struct TokenizeTask<'a> {
    pub(super) survey: &'a Survey,
    pub(super) tokenizer: &'a Tokenizer,
    /// In place of the tokenizer, if documents are conversations.
    pub(super) chat: Option<&'a ChatEncoder>,
    pub(super) held_out: HeldOut,
    pub(super) limits: Limits,
}

/// The written splits.
pub(super) struct WrittenSplits {
    pub(super) train: SplitEntry,
    pub(super) held_out: SplitEntry,
    pub(super) chat: Option<ChatEntry>,
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
            chat: ChatEntry::default(),
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
        let chat = self.chat.map(|_| output.chat);
        let (train, held_out) = (output.train.finish()?, output.held_out.finish()?);
        match chat {
            Some(ChatEntry { without_answers, forged, .. }) if train.documents == 0 => {
                Err(Error::NoAnswers { without_answers, forged })
            }
            chat => Ok(WrittenSplits { train, held_out, chat }),
        }
    }

    /// Sends one file, whose first document has the given place in the corpus.
    fn file(&self, file: &SurveyedFile, first_document: u64, output: &mut TokenWriter) -> Result<(), Error> {
        let (mut document, mut within, mut bytes) = (first_document, 0u64, 0u64);
        documents::read(&file.file, self.limits.part_bytes, &mut |part| {
            bytes += part.text.len() as u64;
            self.part(part, (document, file), within, output)?;
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
    fn part(
        &self,
        part: DocumentPart,
        (document, file): (u64, &SurveyedFile),
        within: u64,
        output: &mut TokenWriter,
    ) -> Result<(), Error> {
        let place = self.chat.map(|_| file.file.place(part.place));
        let Some(cut) = self.held_out.cut(document) else {
            let split = self.held_out.split(document, file.file.held_out);
            return output.push(PendingText { text: part.text.to_owned(), split, last: part.last, place });
        };
        let at = part.text.ceil_char_boundary(cut.saturating_sub(within).min(part.text.len() as u64) as usize);
        let (train, held_out) = part.text.split_at(at);
        let reaches_cut = within + at as u64 >= cut;
        if !train.is_empty() {
            let text = train.to_owned();
            output.push(PendingText { text, split: Split::Train, last: reaches_cut, place: None })?;
        }
        if !held_out.is_empty() {
            let text = held_out.to_owned();
            output.push(PendingText { text, split: Split::HeldOut, last: part.last, place: None })?;
        }
        Ok(())
    }

    /// The tokens of a piece of text or of a conversation.
    fn encode(&self, piece: &PendingText) -> Result<EncodedChat, Error> {
        let Some(chat) = self.chat else {
            return Ok(EncodedChat::Tokens { tokens: self.tokenizer.encode(&piece.text)?, given: Vec::new() });
        };
        let place = || piece.place.clone().unwrap_or_default();
        chat.encode(&piece.text).map_err(|message| Error::Conversation { place: place(), message })
    }
}

/// A stretch of a document that waits to be tokenised.
struct PendingText {
    text: String,
    split: Split,
    last: bool,
    /// Where a conversation is.
    place: Option<String>,
}

/// Collects pieces and writes their tokens in order.
struct TokenWriter<'a> {
    task: &'a TokenizeTask<'a>,
    train: SplitWriter,
    held_out: SplitWriter,
    chunk: Vec<PendingText>,
    chunk_bytes: usize,
    chat: ChatEntry,
    bytes_done: u64,
    bytes: u64,
    progress: &'a dyn Fn(PrepareStage),
}

impl TokenWriter<'_> {
    fn push(&mut self, piece: PendingText) -> Result<(), Error> {
        self.chunk_bytes += piece.text.len();
        self.chunk.push(piece);
        match self.chunk_bytes >= self.task.limits.chunk_bytes {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        let task = self.task;
        let encoded: Vec<EncodedChat> =
            self.chunk.par_iter().map(|piece| task.encode(piece)).collect::<Result<_, _>>()?;
        for (piece, encoded) in self.chunk.drain(..).zip(encoded) {
            let writer = piece.split.of(&mut self.train, &mut self.held_out);
            let (tokens, given) = match encoded {
                EncodedChat::Tokens { tokens, given } => (tokens, given),
                EncodedChat::NoAnswer => {
                    self.chat.without_answers += 1;
                    continue;
                }
                EncodedChat::Forged => {
                    self.chat.forged += 1;
                    continue;
                }
            };
            writer.give(&given)?;
            writer.append(&tokens, piece.text.len())?;
            // A conversation ends as its template ends it.
            match (piece.last, piece.place) {
                (true, None) => writer.end_document()?,
                (true, Some(_)) => {
                    self.chat.conversations += 1;
                    writer.close_document()?;
                }
                (false, _) => {}
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
