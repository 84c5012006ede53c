//! The row table of a stream: one line for each token, in whole sequences. Blocks read the metadata of their tokens
//! here. If sequences migrate to other ranks between layers, their lines migrate with them.

use std::ops::Range;

use guildhall_tensor::{Index, RowIds};

use super::share;

/// Number of metadata columns.
const COLUMNS: usize = 4;

/// Number of words in a sequence's header, before its columns.
const HEADER_WORDS: usize = 4;

/// The tokens of a micro-batch on one tensor group; every rank of the group has the whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Number of tokens per sequence. A sequence is a row of data; no token attends beyond its sequence.
    pub seq: usize,
    /// Index of the micro-batch within its step.
    pub micro_batch: u32,
    /// For each sequence, the number of its first token within the step, over all ranks and micro-batches; ascending.
    pub sequences: Vec<u64>,
    /// For each sequence, the rank of the data group that loaded it.
    pub origins: Vec<u32>,
    /// For each token, its vocabulary id. This column and the following ones are empty if nothing reads them.
    pub ids: Vec<u32>,
    /// For each token, its position within its document.
    pub positions: Vec<u32>,
    /// For each token, the index of its document within the sequence.
    pub segments: Vec<u32>,
    /// For each token, the vocabulary id of the token to predict.
    pub targets: Vec<u32>,
    /// Number of tokens with a target, if the table has sizes only and its columns are empty.
    pub counted: Option<usize>,
}

impl Rows {
    /// Number of words in which a token's metadata is sent, but for its sequence's header.
    pub const WORDS_PER_TOKEN: usize = COLUMNS;

    /// One sequence of `tokens` tokens, numbered from `first` on, without metadata.
    pub fn consecutive(first: u64, tokens: usize) -> Rows {
        let sequences = if tokens > 0 { vec![first] } else { Vec::new() };
        Rows { seq: tokens, origins: vec![0; sequences.len()], sequences, ..Rows::default() }
    }

    /// One sequence of tokens with these vocabulary ids.
    pub fn of_ids(first: u64, ids: &[u32]) -> Rows {
        Rows { ids: ids.to_vec(), ..Rows::consecutive(first, ids.len()) }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.sequences.len() * self.seq
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// For each token, its number within the step.
    pub fn numbers(&self) -> RowIds {
        RowIds::new(self.sequences.iter().map(|&first| first..first + self.seq as u64))
    }

    fn columns(&self) -> [&Vec<u32>; COLUMNS] {
        [&self.ids, &self.positions, &self.segments, &self.targets]
    }

    fn columns_mut(&mut self) -> [&mut Vec<u32>; COLUMNS] {
        [&mut self.ids, &mut self.positions, &mut self.segments, &mut self.targets]
    }

    /// Number of words in which a sequence and its metadata are sent.
    pub(super) fn words_per_sequence(&self) -> usize {
        HEADER_WORDS + COLUMNS * self.seq
    }

    /// The number of words of a sequence of `seq` tokens, and which of them are its targets: those of the last column.
    pub(crate) fn target_words(seq: usize) -> (usize, Range<usize>) {
        let words = HEADER_WORDS + COLUMNS * seq;
        (words, words - seq..words)
    }

    /// The words of sequence `place`: the number of its first token, its origin, a bit mask of the columns that are not
    /// empty, and the columns. If the table has sizes only, the number of its tokens with a target lies above the mask.
    pub(super) fn words_of(&self, place: usize) -> Vec<u32> {
        let (first, tokens) = (self.sequences[place], place * self.seq..(place + 1) * self.seq);
        let mut words = vec![first as u32, (first >> 32) as u32, self.origins[place], 0];
        if let Some(counted) = self.counted {
            words[3] = (share(counted, (place, self.sequences.len())).len() << COLUMNS) as u32;
        }
        for (number, column) in self.columns().into_iter().enumerate() {
            words[3] |= u32::from(!column.is_empty()) << number;
            match column.is_empty() {
                true => words.resize(words.len() + self.seq, 0),
                false => words.extend(&column[tokens.clone()]),
            }
        }
        words
    }

    /// The number of a sequence's first token, from the sequence's words.
    pub(super) fn first_of(words: &[u32]) -> u64 {
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    /// The row table, for the same micro-batch, of the sequences with these words. The numbers of the sequences must be
    /// ascending.
    pub(super) fn of_words(&self, sequences: &[&[u32]]) -> Rows {
        let mut rows = Rows { seq: self.seq, micro_batch: self.micro_batch, ..Rows::default() };
        rows.counted = self.counted.map(|_| sequences.iter().map(|words| words[3] as usize >> COLUMNS).sum());
        for words in sequences {
            rows.sequences.push(Rows::first_of(words));
            rows.origins.push(words[2]);
            let columns = words[HEADER_WORDS..].chunks_exact(self.seq);
            for (number, (column, values)) in rows.columns_mut().into_iter().zip(columns).enumerate() {
                if words[3] >> number & 1 == 1 {
                    column.extend(values);
                }
            }
        }
        rows
    }

    /// One of the columns, as an index for ops.
    pub fn index<'a>(&self, column: &'a [u32]) -> Index<'a> {
        if self.counted.is_some() { Index::Counted(self.len()) } else { Index::Known(column) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_read_from_their_words() {
        let column = |start: u32| (start..start + 4).collect::<Vec<u32>>();
        let rows = Rows {
            seq: 2,
            micro_batch: 3,
            sequences: vec![6, 1 << 33],
            origins: vec![1, 0],
            ids: column(10),
            positions: column(20),
            segments: Vec::new(),
            targets: column(30),
            counted: None,
        };
        let words: Vec<Vec<u32>> = (0..2).map(|place| rows.words_of(place)).collect();
        assert!(words.iter().all(|words| words.len() == rows.words_per_sequence()));
        assert_eq!(rows.of_words(&[&words[0], &words[1]]), rows);
        let (len, targets) = Rows::target_words(rows.seq);
        assert_eq!((len, &words[1][targets]), (rows.words_per_sequence(), &[32, 33][..]));
        let second = rows.of_words(&[&words[1]]);
        assert_eq!((second.sequences, second.origins, second.targets), (vec![1 << 33], vec![0], vec![32, 33]));
        assert_eq!(rows.numbers().runs(), [6..8, 1 << 33..(1 << 33) + 2]);
        let counted = Rows { ids: Vec::new(), positions: Vec::new(), targets: Vec::new(), counted: Some(3), ..rows };
        let words: Vec<Vec<u32>> = (0..2).map(|place| counted.words_of(place)).collect();
        assert_eq!(counted.of_words(&[&words[0], &words[1]]), counted);
        assert_eq!(counted.of_words(&[]).counted, Some(0));
    }
}
