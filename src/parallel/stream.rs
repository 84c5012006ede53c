//! How the tokens of a micro-batch are distributed over a tensor group between the sub-layers of a model: every rank
//! has all tokens or, with sequence parallelism, some of them (Korthikanti et al. 2022). The code of a sub-layer is the
//! same in both cases.
//!
//! ```text
//!            whole stream                                     split stream
//!  norm      all tokens, the same on every rank               own tokens
//!  to_parts    | -                (back: all_reduce)            | all_gather       (back: reduce_scatter)
//!  products  slices of weights, all tokens                    the same
//!  from_parts  | all_reduce       (back: -)                     | reduce_scatter   (back: all_gather)
//!  residual  all tokens                                       own tokens
//! ```

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{RowIds, Var};

use super::Rows;
use super::operands::{parts_to_split, parts_to_whole, split_to_parts, split_to_whole, whole_as_parts, whole_to_parts};

/// The tokens of one micro-batch, and their distribution over the ranks of a tensor group.
#[derive(Clone)]
pub struct Stream {
    group: Arc<dyn Communicator>,
    /// The row table of all tokens.
    rows: Rc<Rows>,
    /// Number of tokens of each rank; `None` if every rank has all tokens.
    split: Option<Vec<usize>>,
}

impl Stream {
    /// A stream of which every rank has all tokens.
    pub fn whole(rows: impl Into<Rc<Rows>>, group: &Arc<dyn Communicator>) -> Stream {
        Stream { group: group.clone(), rows: rows.into(), split: None }
    }

    /// A stream of which every rank has a range of consecutive tokens; the ranges are as equal in size as possible.
    pub fn split(rows: impl Into<Rc<Rows>>, group: &Arc<dyn Communicator>) -> Stream {
        let rows = rows.into();
        let (ranks, bound) = (group.size(), |rank: usize| rows.len() * rank / group.size());
        let split = Some((0..ranks).map(|rank| bound(rank + 1) - bound(rank)).collect());
        Stream { group: group.clone(), rows, split }
    }

    /// The row table of all tokens, including those of other ranks of the group.
    pub fn rows(&self) -> &Rc<Rows> {
        &self.rows
    }

    /// The numbers within the step of this rank's tokens.
    pub fn numbers(&self) -> RowIds {
        let all = self.rows.numbers();
        if self.is_split() { all.part(self.tokens()) } else { all }
    }

    /// A stream of other tokens with the same kind of distribution.
    pub fn with_rows(&self, rows: Rows) -> Stream {
        if self.is_split() { Stream::split(rows, &self.group) } else { Stream::whole(rows, &self.group) }
    }

    pub fn group(&self) -> &Arc<dyn Communicator> {
        &self.group
    }

    /// Whether the tokens are split among the ranks.
    pub fn is_split(&self) -> bool {
        self.split.is_some()
    }

    /// This rank's tokens, as a range of the stream's tokens.
    pub fn tokens(&self) -> Range<usize> {
        match &self.split {
            None => 0..self.rows.len(),
            Some(split) => {
                let first = split[..self.group.rank()].iter().sum();
                first..first + split[self.group.rank()]
            }
        }
    }

    /// All-gathers x `[own, D]` of this rank's tokens to all tokens if the stream is split, for products with slices of
    /// weights.
    ///
    /// # Errors
    /// Any error of the group's communicator, in this call or later in backward.
    pub fn to_parts(&self, x: &Var) -> Result<Var, Error> {
        match &self.split {
            None => whole_to_parts(x.clone(), &self.group),
            Some(rows) => split_to_parts(x.clone(), rows, &self.group),
        }
    }

    /// Sums over the ranks what their slices of weights computed for all tokens, `[T, D]`; gives the sums for this
    /// rank's tokens.
    ///
    /// # Errors
    /// As [`Stream::to_parts`].
    pub fn from_parts(&self, x: Var) -> Result<Var, Error> {
        match &self.split {
            None => parts_to_whole(x, &self.group),
            Some(rows) => parts_to_split(x, rows, &self.group),
        }
    }

    /// All-gathers x to all tokens if the stream is split, for a computation that every rank repeats in the same way.
    ///
    /// # Errors
    /// As [`Stream::to_parts`].
    pub fn to_whole(&self, x: &Var) -> Result<Var, Error> {
        match &self.split {
            None => Ok(x.clone()),
            Some(rows) => split_to_whole(x.clone(), rows, &self.group),
        }
    }

    /// A term that is added only once to a sum of parts: x on the first rank, zeros on the others.
    pub fn once(&self, x: Var) -> Var {
        whole_as_parts(x, self.group.rank())
    }
}
