//! Which rows a rank sees in which micro-batch of which step.
//!
//! The rows of a step form one global sequence that depends on the seed and the number of rows in a step and
//! on nothing else. Micro-batches are consecutive stretches of it, and each rank takes one consecutive share
//! of each stretch, so neither the mesh nor the micro-batch changes what is learned from.

use std::ops::Range;

use super::error::Error;
use super::source::{IGNORE, Row, Source};

/// Some rows side by side; the vectors have length `rows * seq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// May be 0: a rank without rows still takes part in every collective.
    pub rows: usize,
    pub seq: usize,
    /// Index within the step, over all ranks and micro-batches, of the first token.
    pub first_token: u64,
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub segments: Vec<u32>,
    pub positions: Vec<u32>,
    /// Which of its step.
    pub micro_batch: u32,
    /// What an encoder reads besides, for a decoder that reads it: as many rows, of another length, without targets.
    pub source: Option<Box<Batch>>,
    /// Of each row, the part of its [`Source`] that it is from.
    pub components: Vec<u32>,
    /// What is known of a batch without tokens, for whoever walks a step of sizes: the vectors are empty then.
    pub counted: Option<Counted>,
}

/// Numbers in place of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Targets that are not [`IGNORE`].
    pub valid: usize,
    /// Micro-batches of the step that are like this one, itself among them.
    pub alike: u64,
}

impl Batch {
    /// A batch of no rows that stands at a global row of its step.
    pub fn empty(seq: usize, first_row: u64) -> Self {
        Self {
            rows: 0,
            seq,
            first_token: first_row * seq as u64,
            tokens: Vec::new(),
            targets: Vec::new(),
            segments: Vec::new(),
            positions: Vec::new(),
            micro_batch: 0,
            source: None,
            components: Vec::new(),
            counted: None,
        }
    }

    /// The same with a text to read: row r of `source` belongs to row r of this batch, segment s of it to segment s.
    ///
    /// # Panics
    /// If there are not as many rows.
    #[track_caller]
    pub fn reading(self, source: Batch) -> Batch {
        assert_eq!(source.rows, self.rows, "a row to read for every row");
        Batch { source: Some(Box::new(source)), ..self }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.rows * self.seq
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Micro-batches that this one stands for.
    pub fn alike(&self) -> u64 {
        self.counted.map_or(1, |counted| counted.alike)
    }

    /// Number of targets that are not [`IGNORE`].
    pub fn valid(&self) -> usize {
        if let Some(counted) = &self.counted {
            return counted.valid;
        }
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }

    /// Appends a row, and to the batch to read what it reads.
    ///
    /// # Panics
    /// If the row has another length, or nothing to read where there is a batch to read.
    #[track_caller]
    pub fn push(&mut self, row: &Row) {
        for part in [&row.tokens, &row.targets, &row.segments, &row.positions] {
            assert_eq!(part.len(), self.seq, "a row of another length than the batch's");
        }
        self.rows += 1;
        self.tokens.extend_from_slice(&row.tokens);
        self.targets.extend_from_slice(&row.targets);
        self.segments.extend_from_slice(&row.segments);
        self.positions.extend_from_slice(&row.positions);
        self.components.push(row.component);
        if let Some(source) = &mut self.source {
            source.push(row.source.as_ref().expect("a row of a source with texts to read has one"));
        }
    }
}

/// How the rows of a step are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Orders the rows.
    pub seed: u64,
    /// Rows of one step over all ranks.
    pub rows_per_step: usize,
    /// Rows of one micro-batch over all ranks; the last of a step may have fewer.
    pub micro_batch: usize,
    pub rank: usize,
    pub ranks: usize,
}

impl BatchPlan {
    /// # Errors
    /// Numbers that describe nothing, with the valid choices.
    pub fn check(&self) -> Result<(), Error> {
        let problem = if self.rows_per_step == 0 {
            "a step of 0 rows learns nothing: use at least 1".to_owned()
        } else if self.micro_batch == 0 {
            format!("a micro-batch of 0 rows never ends: use 1 to {}", self.rows_per_step)
        } else if self.rank >= self.ranks {
            format!("rank {} of {} ranks: ranks count from 0", self.rank, self.ranks)
        } else {
            return Ok(());
        };
        Err(Error::BadPlan(problem))
    }

    /// Micro-batches in a step; the same on every rank.
    pub fn micro_batches(&self) -> usize {
        self.rows_per_step.div_ceil(self.micro_batch)
    }

    /// This rank's rows of a micro-batch, as places in the step.
    pub fn share(&self, micro: usize) -> Range<usize> {
        let start = (micro * self.micro_batch).min(self.rows_per_step);
        let end = (start + self.micro_batch).min(self.rows_per_step);
        share(start..end, self.rank, self.ranks)
    }

    /// The row that stands at a place of a step, and the pass over the source in which it does.
    ///
    /// # Panics
    /// If the source is empty.
    pub fn row(&self, source: &dyn Source, step: u64, place: usize) -> (usize, u64) {
        source.place(self.seed, u128::from(step) * self.rows_per_step as u128 + place as u128)
    }

    /// Of the row that stands at a place of a step, the part of the source that it is from.
    pub fn component(&self, source: &dyn Source, step: u64, place: usize) -> u32 {
        let (index, pass) = self.row(source, step, place);
        source.component(index, pass)
    }

    /// One micro-batch of one step.
    ///
    /// # Errors
    /// A source without rows, or rows that cannot be read.
    pub fn batch(&self, source: &dyn Source, step: u64, micro: usize) -> Result<Batch, Error> {
        self.batch_while(source, step, micro, &|| true)
    }

    /// The same, given up between two rows once `wanted` says so.
    pub(super) fn batch_while(
        &self,
        source: &dyn Source,
        step: u64,
        micro: usize,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Batch, Error> {
        let len = source.len();
        if len == 0 {
            return Err(Error::RowOutOfRange { index: 0, len });
        }
        let batch = gather(source, self.share(micro), |place| match wanted() {
            true => Ok(self.row(source, step, place)),
            false => Err(Error::LoaderStopped),
        })?;
        Ok(Batch { micro_batch: micro as u32, ..batch })
    }
}

/// The first `rows` rows of a source (or all, where it has fewer) in their own order and as in its first pass, in
/// micro-batches, as one rank sees them. Every rank gets the same number of batches.
///
/// # Errors
/// Numbers that describe nothing; while iterating, rows that cannot be read.
pub fn eval_batches(
    source: &dyn Source,
    rows: usize,
    micro_batch: usize,
    rank: usize,
    ranks: usize,
) -> Result<impl Iterator<Item = Result<Batch, Error>> + '_, Error> {
    let rows_per_step = rows.min(source.len());
    let plan = BatchPlan { seed: 0, rows_per_step, micro_batch, rank, ranks };
    if rows_per_step > 0 {
        plan.check()?;
    }
    let count = if rows_per_step > 0 { plan.micro_batches() } else { 0 };
    Ok((0..count).map(move |micro| gather(source, plan.share(micro), |place| Ok((place, 0)))))
}

fn gather(
    source: &dyn Source,
    places: Range<usize>,
    row: impl Fn(usize) -> Result<(usize, u64), Error>,
) -> Result<Batch, Error> {
    let empty = |seq| Batch::empty(seq, places.start as u64);
    let mut batch = Batch { source: source.source_seq().map(|seq| Box::new(empty(seq))), ..empty(source.seq()) };
    for place in places.clone() {
        let (index, pass) = row(place)?;
        batch.push(&source.get(index, pass)?);
    }
    Ok(batch)
}

/// The consecutive share of `rows` of one rank; shares differ by at most one row.
fn share(rows: Range<usize>, rank: usize, ranks: usize) -> Range<usize> {
    let bound = |rank: usize| rows.start + (rows.len() as u128 * rank as u128 / ranks as u128) as usize;
    bound(rank)..bound(rank + 1)
}
