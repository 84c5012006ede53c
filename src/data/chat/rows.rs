//! Rows of whole conversations.
//!
//! Conversations follow each other in a row as long as there is room for a whole one. What is left of the row has the
//! beginning of the next, which is not learned there: it stands whole in the next row. So every answer is learned once in a
//! pass, behind all that it answers. (Padding would do as well, but experts would see rows of other lengths than in training
//! on text.) Of a conversation that is longer than a row, the row has the beginning.

use std::sync::Arc;

use crate::data::error::Error;
use crate::data::manifest::sha256;
use crate::data::shards::SplitReader;
use crate::data::source::{IGNORE, Row, Source};

/// The conversations of a split, packed into rows.
#[derive(Clone, Debug)]
pub struct ConversationRows {
    split: Arc<SplitReader>,
    seq: usize,
    /// The documents in the order of rows.
    documents: Arc<[u64]>,
    /// The first document of each row as an index of those, and their number.
    starts: Arc<[usize]>,
    longer: u64,
    unanswered: u64,
}

impl ConversationRows {
    /// # Errors
    /// Fewer than `rows_min` rows, with the numbers.
    pub(in crate::data) fn new(split: Arc<SplitReader>, seq: usize, rows_min: u64) -> Result<Self, Error> {
        if seq == 0 {
            return Err(Error::BadPlan("a row of 0 tokens holds nothing: set model.seq to at least 1".into()));
        }
        let (mut documents, mut starts, mut left) = (Vec::new(), Vec::new(), 0);
        let (mut longer, mut unanswered) = (0, 0);
        for document in 0..split.ends().len() as u64 {
            let tokens = split.document(document);
            let length = (tokens.end - tokens.start) as usize;
            longer += u64::from(length > seq);
            let seen = tokens.start + 1..tokens.end.min(tokens.start + seq as u64 + 1);
            if seen.is_empty() || split.given(seen.clone()).any(|given| given == seen) {
                unanswered += 1;
                continue;
            }
            if length > left {
                starts.push(documents.len());
                left = seq;
            }
            documents.push(document);
            left -= length.min(left);
        }
        let rows = starts.len() as u64;
        if rows < rows_min {
            if unanswered > 0 && documents.is_empty() {
                return Err(Error::Unanswered { split: split.split(), seq });
            }
            let (tokens, needed) = (split.tokens(), rows_min.saturating_mul(seq as u64));
            return Err(Error::TooSmall { split: split.split(), tokens, needed, rows: rows_min, seq });
        }
        starts.push(documents.len());
        Ok(Self { split, seq, documents: documents.into(), starts: starts.into(), longer, unanswered })
    }

    /// Number of conversations in all rows.
    pub fn conversations(&self) -> usize {
        self.documents.len()
    }

    /// Conversations that are longer than a row.
    pub fn longer(&self) -> u64 {
        self.longer
    }

    /// Conversations without an answer in the beginning that a row has room for, which are in no row.
    pub fn unanswered(&self) -> u64 {
        self.unanswered
    }

    /// Appends a document, or what there is room for.
    fn add(&self, row: &mut Row, (document, segment): (u64, u32), is_learned: bool) -> Result<(), Error> {
        let (first, all) = (row.tokens.len(), self.split.document(document));
        let end = all.end.min(all.start + (self.seq - first) as u64);
        let mut tokens = self.split.read(all.start..(end + 1).min(all.end))?;
        let mut targets: Vec<u32> = if is_learned { tokens[1..].to_vec() } else { Vec::new() };
        self.split.hide_given(all.start + 1, &mut targets);
        tokens.truncate((end - all.start) as usize);
        targets.resize(tokens.len(), IGNORE);
        row.segments.resize(first + tokens.len(), segment);
        row.positions.extend(0..tokens.len() as u32);
        row.tokens.extend(tokens);
        row.targets.extend(targets);
        Ok(())
    }
}

impl Source for ConversationRows {
    fn len(&self) -> usize {
        self.starts.len() - 1
    }

    fn seq(&self) -> usize {
        self.seq
    }

    fn get(&self, index: usize, _pass: u64) -> Result<Row, Error> {
        if index >= self.len() {
            return Err(Error::RowOutOfRange { index, len: self.len() });
        }
        let (mut row, own) = (Row::default(), self.starts[index]..self.starts[index + 1]);
        for (segment, place) in (0..).zip(own.start..) {
            if row.tokens.len() == self.seq {
                break;
            }
            self.add(&mut row, (self.documents[place % self.documents.len()], segment), own.contains(&place))?;
        }
        Ok(row)
    }

    fn fingerprint(&self) -> String {
        sha256(format!("conversations {} {}", self.seq, self.split.content()).as_bytes())
    }
}
