//! The tokens of a stream as a table: a line for every token, in whole sequences. Blocks read here what they have to know
//! of their tokens. Sequences may change ranks between layers, and their lines go with them.

use guildhall_tensor::{Index, RowIds};

/// The tokens of a micro-batch that one tensor group has; every rank of the group has the whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Tokens of a sequence: a row of data, beyond which no token looks.
    pub seq: usize,
    /// Of its step.
    pub micro_batch: u32,
    /// The number of each sequence's first token within the step, over all ranks and micro-batches; ascending.
    pub sequences: Vec<u64>,
    /// The rank of the data group that read each sequence.
    pub origins: Vec<u32>,
    /// Of each token, its number in the vocabulary. Empty, as all that follow, where nobody asks.
    pub ids: Vec<u32>,
    /// Within its document.
    pub positions: Vec<u32>,
    /// Its document, within its sequence.
    pub segments: Vec<u32>,
    /// Number in the vocabulary of the token to predict.
    pub targets: Vec<u32>,
    /// Tokens with a target, where there are only numbers and the columns are empty.
    pub counted: Option<usize>,
}

impl Rows {
    /// One sequence of `tokens` tokens from number `first` on, of which nothing else is known.
    pub fn consecutive(first: u64, tokens: usize) -> Rows {
        let sequences = if tokens > 0 { vec![first] } else { Vec::new() };
        Rows { seq: tokens, origins: vec![0; sequences.len()], sequences, ..Rows::default() }
    }

    /// One sequence of tokens with these numbers in the vocabulary.
    pub fn of_ids(first: u64, ids: &[u32]) -> Rows {
        Rows { ids: ids.to_vec(), ..Rows::consecutive(first, ids.len()) }
    }

    /// How many tokens.
    pub fn len(&self) -> usize {
        self.sequences.len() * self.seq
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The number of every token within the step.
    pub fn numbers(&self) -> RowIds {
        RowIds::new(self.sequences.iter().map(|&first| first..first + self.seq as u64))
    }

    /// One of the columns, as ops take it.
    pub fn index<'a>(&self, column: &'a [u32]) -> Index<'a> {
        if self.counted.is_some() { Index::Counted(self.len()) } else { Index::Known(column) }
    }
}
