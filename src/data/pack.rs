//! Rows cut from a split's tokens.
//!
//! Row `i` covers positions `[i * seq, (i + 1) * seq)` of the split: documents follow each other without
//! padding, and a document longer than a row goes on in the next one. Tokens after the last whole row are not
//! used. Alternatives such as best-fit packing waste nothing either but make a row depend on all documents.

use std::sync::Arc;

use super::error::Error;
use super::manifest::sha256;
use super::shards::SplitReader;
use super::source::{IGNORE, Row, Source};

/// A split seen as rows of `seq` tokens.
#[derive(Clone, Debug)]
pub struct PackedRows {
    split: Arc<SplitReader>,
    seq: usize,
}

impl PackedRows {
    /// # Errors
    /// Fewer than `rows_min` rows, with the numbers.
    pub(crate) fn new(split: Arc<SplitReader>, seq: usize, rows_min: u64) -> Result<Self, Error> {
        if seq == 0 {
            return Err(Error::BadPlan("a row of 0 tokens holds nothing: set model.seq to at least 1".into()));
        }
        let (tokens, needed) = (split.tokens(), rows_min.saturating_mul(seq as u64));
        if tokens < needed {
            return Err(Error::TooSmall { split: split.split(), tokens, needed, rows: rows_min, seq });
        }
        Ok(Self { split, seq })
    }

    /// Number of tokens in all rows.
    pub fn tokens(&self) -> u64 {
        self.len() as u64 * self.seq as u64
    }

    /// The token after the row is needed for the row's last target, where there is one.
    fn read(&self, start: u64) -> Result<Vec<u32>, Error> {
        let end = (start + self.seq as u64 + 1).min(self.split.tokens());
        self.split.read(start..end)
    }
}

impl Source for PackedRows {
    fn len(&self) -> usize {
        (self.split.tokens() / self.seq as u64) as usize
    }

    fn seq(&self) -> usize {
        self.seq
    }

    fn get(&self, index: usize, _pass: u64) -> Result<Row, Error> {
        if index >= self.len() {
            return Err(Error::RowOutOfRange { index, len: self.len() });
        }
        let start = index as u64 * self.seq as u64;
        let mut tokens = self.read(start)?;
        let ends = self.split.ends();
        let first = ends.partition_point(|&end| end <= start);
        let mut row = DocumentEnds::new(start, self.seq, &ends[first..]).row(&mut tokens);
        let known = (self.split.tokens() - start - 1).min(self.seq as u64) as usize;
        self.split.hide_given(start + 1, &mut row.targets[..known]);
        Ok(row)
    }

    fn fingerprint(&self) -> String {
        sha256(format!("packed {} {}", self.seq, self.split.content()).as_bytes())
    }
}

/// Where the documents end within a row.
struct DocumentEnds<'a> {
    start: u64,
    seq: usize,
    /// Ends of the documents from the row's first on.
    ends: &'a [u64],
}

impl<'a> DocumentEnds<'a> {
    fn new(start: u64, seq: usize, ends: &'a [u64]) -> Self {
        Self { start, seq, ends }
    }

    /// Turns the row's tokens, and the one after them if any, into a row.
    fn row(&self, tokens: &mut Vec<u32>) -> Row {
        let mut row = Row { targets: tokens[1..].to_vec(), ..Row::default() };
        row.targets.resize(self.seq, IGNORE);
        tokens.truncate(self.seq);
        row.tokens = std::mem::take(tokens);
        for (segment, &end) in (0..).zip(self.ends) {
            let from = row.segments.len();
            let to = ((end - self.start) as usize).min(self.seq);
            row.segments.resize(to, segment);
            row.positions.extend(0..(to - from) as u32);
            if end - self.start <= self.seq as u64 {
                row.targets[to - 1] = IGNORE;
            }
            if to == self.seq {
                break;
            }
        }
        row
    }
}
