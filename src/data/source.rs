//! The seam between stored tokens and training: random access to rows.

use super::error::Error;
use super::shuffle::Permutation;

/// The target of a position that has nothing to predict.
pub const IGNORE: u32 = u32::MAX;

/// The segment of a place that has no token.
pub const PAD: u32 = u32::MAX;

/// `seq` consecutive tokens; the vectors have length `seq`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub tokens: Vec<u32>,
    /// What is to be predicted at each place: the token that follows, or the one that was hidden; else [`IGNORE`].
    pub targets: Vec<u32>,
    /// Number of the document within the row, from 0; attention does not cross segments.
    pub segments: Vec<u32>,
    /// Place within the segment, from 0 in every segment of every row.
    pub positions: Vec<u32>,
    /// What an encoder reads for it, without targets.
    pub source: Option<Box<Row>>,
    /// The part of its [`Source`] that it is from.
    pub component: u32,
}

impl Row {
    /// A row that is one document.
    pub fn of_document(tokens: &[u32]) -> Row {
        Row {
            tokens: tokens.to_vec(),
            targets: tokens.iter().skip(1).copied().chain([IGNORE]).take(tokens.len()).collect(),
            segments: vec![0; tokens.len()],
            positions: (0..tokens.len() as u32).collect(),
            ..Row::default()
        }
    }
}

/// Rows by index. Mixing, shuffling, sharing over ranks and resuming are arithmetic on indices, so an
/// implementation keeps no place and may be read from many threads.
pub trait Source: Send + Sync {
    /// Number of rows.
    fn len(&self) -> usize;

    /// Tokens in each row.
    fn seq(&self) -> usize;

    /// Tokens in what an encoder reads for each row; none if there is no such text.
    fn source_seq(&self) -> Option<usize> {
        None
    }

    /// The row that training meets at place `index` of all rows of all steps, and the pass over the source in which it
    /// does. Each pass has an order of its own. The source is not empty.
    fn place(&self, seed: u64, index: u128) -> (usize, u64) {
        let len = self.len() as u128;
        let (pass, within) = ((index / len) as u64, (index % len) as u64);
        (Permutation::new(len as u64, seed, pass).get(within) as usize, pass)
    }

    /// [`Row::component`] of a row, without reading it.
    fn component(&self, _index: usize, _pass: u64) -> u32 {
        0
    }

    /// One row, as it is met in a pass over the source, counted from 0.
    ///
    /// # Errors
    /// `index` out of range, or stored data that cannot be read.
    fn get(&self, index: usize, pass: u64) -> Result<Row, Error>;

    /// Equal for two sources exactly when all their rows are equal.
    fn fingerprint(&self) -> String;

    /// Whether there are no rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
