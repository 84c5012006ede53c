//! Rows of several pairs of texts each: the texts to read in one row, those to write in another, the pair's number as the
//! segment of both. What is left of a row is padding.

use std::ops::Range;
use std::sync::Arc;

use guildhall_tensor::{Draws, Purpose};

use super::corrupt::{Corruption, TextDraws, TokenWords};
use crate::data::error::Error;
use crate::data::manifest::sha256;
use crate::data::shards::SplitReader;
use crate::data::shuffle::Permutation;
use crate::data::source::{IGNORE, PAD, Row, Source};

/// Which pairs share a row is the same in every run.
const PACKING_SEED: u64 = 0x0070_6163_6b69_6e67;

/// The tokens around the texts of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairTags {
    /// Before the text to read: its language.
    pub source: u32,
    /// Before the text to write: its language, or the task.
    pub target: u32,
    /// Behind each text.
    pub end: u32,
}

/// What is read for a text to write.
#[derive(Clone, Debug)]
pub enum TextToRead {
    /// The pair's other text.
    Other,
    /// What corruption leaves of it, other in every pass.
    Corrupted { words: TokenWords, by: Corruption, seed: u64 },
    /// No text but the tag.
    Nothing,
}

/// Pairs of documents of a split, packed into rows.
#[derive(Clone, Debug)]
pub struct PairRows {
    split: Arc<SplitReader>,
    /// The documents to read and to write, in the order of rows; of a task without texts to read they are the same.
    pairs: Arc<[[u32; 2]]>,
    tags: PairTags,
    reading: TextToRead,
    /// Tokens of a row to read and of one to write.
    lengths: [usize; 2],
    /// The first pair of each row, and the number of pairs.
    starts: Arc<[usize]>,
    too_long: u64,
}

impl PairRows {
    /// Packs the pairs into rows to read and to write of these lengths: in an order of their own, each into the row of the one
    /// before if there is room on both sides. Pairs that are longer than a row are left out and counted.
    pub fn new(
        split: Arc<SplitReader>,
        pairs: &[[u32; 2]],
        (tags, reading): (PairTags, TextToRead),
        lengths: [usize; 2],
    ) -> PairRows {
        let order = Permutation::new(pairs.len() as u64, PACKING_SEED, 0);
        let pairs = (0..pairs.len() as u64).map(|place| pairs[order.get(place) as usize]);
        let taken = |pair: &[u32; 2]| places(&split, &reading, *pair);
        let fits = |pair: &[u32; 2]| taken(pair).iter().zip(lengths).all(|(taken, room)| *taken <= room);
        let (fitting, longer): (Vec<_>, Vec<_>) = pairs.partition(fits);
        let (mut starts, mut left) = (Vec::new(), [0, 0]);
        for (number, pair) in fitting.iter().enumerate() {
            let taken = taken(pair);
            if taken[0] > left[0] || taken[1] > left[1] {
                starts.push(number);
                left = lengths;
            }
            left = [left[0] - taken[0], left[1] - taken[1]];
        }
        starts.push(fitting.len());
        PairRows {
            pairs: fitting.into(),
            starts: starts.into(),
            too_long: longer.len() as u64,
            split,
            tags,
            reading,
            lengths,
        }
    }

    /// Pairs that no row has room for.
    pub fn too_long(&self) -> u64 {
        self.too_long
    }

    /// Number of pairs in all rows.
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Of all places to read and to write, those that have a token.
    pub fn filled(&self) -> [u64; 2] {
        let taken = self.pairs.iter().map(|pair| places(&self.split, &self.reading, *pair));
        taken.fold([0, 0], |sum, taken| [sum[0] + taken[0] as u64, sum[1] + taken[1] as u64])
    }

    /// What is read for a pair in the first pass, and what is written: each a tag, a text and the end.
    ///
    /// # Errors
    /// A shard that cannot be read; no such pair.
    pub fn pair(&self, number: usize) -> Result<[Vec<u32>; 2], Error> {
        match self.pairs.get(number) {
            Some(_) => self.texts(number, 0),
            None => Err(Error::RowOutOfRange { index: number, len: self.pairs.len() }),
        }
    }

    /// What is read for a pair, and what is written; the end behind the latter is no input.
    fn texts(&self, number: usize, pass: u64) -> Result<[Vec<u32>; 2], Error> {
        let PairTags { source, target, end } = self.tags;
        let [reads, writes] = self.pairs[number];
        let text = |document: u32| self.split.read(within(&self.split, document));
        let written = text(writes)?;
        let read = match &self.reading {
            TextToRead::Other => text(reads)?,
            TextToRead::Nothing => vec![end],
            TextToRead::Corrupted { words, by, seed } => {
                // The numbers of documents need more bits than the label of a stream has.
                let draws = Draws::new(seed ^ u64::from(writes) << 32, Purpose::Denoise, pass, 0);
                let clean = &written[..written.len() - 1];
                [&words.corrupt(clean, by, TextDraws(draws))[..], &[end]].concat()
            }
        };
        Ok([[&[source], &read[..]].concat(), [&[target], &written[..]].concat()])
    }

    fn row_of(&self, pairs: Range<usize>, pass: u64) -> Result<Row, Error> {
        let [mut source, mut target] = [Row::default(), Row::default()];
        for (segment, number) in (0..).zip(pairs) {
            let [reads, writes] = self.texts(number, pass)?;
            append(&mut source, &reads, &vec![IGNORE; reads.len()], segment);
            let (input, targets) = (&writes[..writes.len() - 1], &writes[1..]);
            append(&mut target, input, targets, segment);
        }
        pad(&mut source, self.lengths[0], self.tags.end);
        pad(&mut target, self.lengths[1], self.tags.end);
        Ok(Row { source: Some(Box::new(source)), ..target })
    }
}

/// Positions of a document with the end behind it.
fn within(split: &SplitReader, document: u32) -> Range<u64> {
    let (ends, document) = (split.ends(), document as usize);
    (if document == 0 { 0 } else { ends[document - 1] })..ends[document]
}

/// Places that a pair takes on each side: a tag and a text with its end, of which one is not written.
fn places(split: &SplitReader, reading: &TextToRead, [reads, writes]: [u32; 2]) -> [usize; 2] {
    let len = |document: u32| {
        let within = within(split, document);
        (within.end - within.start) as usize
    };
    let read = match reading {
        TextToRead::Other => len(reads),
        TextToRead::Corrupted { .. } => len(writes),
        TextToRead::Nothing => 1,
    };
    [1 + read, len(writes)]
}

fn append(row: &mut Row, tokens: &[u32], targets: &[u32], segment: u32) {
    row.tokens.extend_from_slice(tokens);
    row.targets.extend_from_slice(targets);
    row.segments.resize(row.tokens.len(), segment);
    row.positions.extend(0..tokens.len() as u32);
}

fn pad(row: &mut Row, len: usize, end: u32) {
    row.tokens.resize(len, end);
    row.targets.resize(len, IGNORE);
    row.segments.resize(len, PAD);
    row.positions.resize(len, 0);
}

impl Source for PairRows {
    fn len(&self) -> usize {
        self.starts.len() - 1
    }

    fn seq(&self) -> usize {
        self.lengths[1]
    }

    fn source_seq(&self) -> Option<usize> {
        Some(self.lengths[0])
    }

    fn get(&self, index: usize, pass: u64) -> Result<Row, Error> {
        if index >= self.len() {
            return Err(Error::RowOutOfRange { index, len: self.len() });
        }
        self.row_of(self.starts[index]..self.starts[index + 1], pass)
    }

    fn fingerprint(&self) -> String {
        let pairs: Vec<u8> = self.pairs.iter().flatten().flat_map(|document| document.to_le_bytes()).collect();
        let reading = match &self.reading {
            TextToRead::Other => "other".to_owned(),
            TextToRead::Nothing => "nothing".to_owned(),
            TextToRead::Corrupted { words: _, by, seed } => format!("corrupted {by:?} {seed}"),
        };
        let Self { lengths, tags, .. } = self;
        sha256(format!("pairs {lengths:?} {tags:?} {reading} {} {}", sha256(&pairs), self.split.content()).as_bytes())
    }
}
