//! The seam between stored tokens and training: random access to rows.

use super::error::Error;

/// The target of a position that has nothing to predict.
pub const IGNORE: u32 = u32::MAX;

/// `seq` consecutive tokens; every field has length `seq`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub tokens: Vec<u32>,
    /// What is to be predicted at each place: the token that follows, or the one that was hidden; else [`IGNORE`].
    pub targets: Vec<u32>,
    /// Number of the document within the row, from 0; attention does not cross segments.
    pub segments: Vec<u32>,
    /// Place within the segment, from 0 in every segment of every row.
    pub positions: Vec<u32>,
}

impl Row {
    /// A row that is one document.
    pub fn of_document(tokens: &[u32]) -> Row {
        Row {
            tokens: tokens.to_vec(),
            targets: tokens.iter().skip(1).copied().chain([IGNORE]).take(tokens.len()).collect(),
            segments: vec![0; tokens.len()],
            positions: (0..tokens.len() as u32).collect(),
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
