//! How the tokens of a micro-batch lie on a tensor group between the sub-layers of a model: every rank has all of them,
//! or, with sequence parallelism, some (Korthikanti et al. 2022). A sub-layer is the same code for both.
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

/// Tokens of one micro-batch, which all ranks of `group` work on together.
#[derive(Clone)]
pub struct Stream {
    group: Arc<dyn Communicator>,
    /// What is known of all of them.
    rows: Rc<Rows>,
    /// Tokens of each rank; absent where each has all.
    split: Option<Vec<usize>>,
}

impl Stream {
    /// Every rank has all tokens.
    pub fn whole(rows: impl Into<Rc<Rows>>, group: &Arc<dyn Communicator>) -> Stream {
        Stream { group: group.clone(), rows: rows.into(), split: None }
    }

    /// Every rank has consecutive tokens, as evenly many as can be.
    pub fn split(rows: impl Into<Rc<Rows>>, group: &Arc<dyn Communicator>) -> Stream {
        let rows = rows.into();
        let (ranks, bound) = (group.size(), |rank: usize| rows.len() * rank / group.size());
        let split = Some((0..ranks).map(|rank| bound(rank + 1) - bound(rank)).collect());
        Stream { group: group.clone(), rows, split }
    }

    /// What is known of all tokens, those of other ranks of the group among them.
    pub fn rows(&self) -> &Rc<Rows> {
        &self.rows
    }

    /// The numbers within the step of the tokens that are here.
    pub fn numbers(&self) -> RowIds {
        let all = self.rows.numbers();
        if self.is_split() { all.part(self.tokens()) } else { all }
    }

    /// Other tokens that lie in the same way.
    pub fn with_rows(&self, rows: Rows) -> Stream {
        if self.is_split() { Stream::split(rows, &self.group) } else { Stream::whole(rows, &self.group) }
    }

    pub fn group(&self) -> &Arc<dyn Communicator> {
        &self.group
    }

    /// Whether ranks have different tokens.
    pub fn is_split(&self) -> bool {
        self.split.is_some()
    }

    /// Those of the micro-batch's tokens that are here.
    pub fn tokens(&self) -> Range<usize> {
        match &self.split {
            None => 0..self.rows.len(),
            Some(split) => {
                let first = split[..self.group.rank()].iter().sum();
                first..first + split[self.group.rank()]
            }
        }
    }

    /// All tokens of x `[own, D]`, for products with slices of weights.
    ///
    /// # Errors
    /// What the group reports, here and from the tape; so for all that follow.
    pub fn to_parts(&self, x: &Var) -> Result<Var, Error> {
        match &self.split {
            None => whole_to_parts(x.clone(), &self.group),
            Some(rows) => split_to_parts(x.clone(), rows, &self.group),
        }
    }

    /// The sum of what all ranks' slices made of all tokens, `[T, D]`, at the tokens that are here.
    ///
    /// # Errors
    /// As [`Stream::to_parts`].
    pub fn from_parts(&self, x: Var) -> Result<Var, Error> {
        match &self.split {
            None => parts_to_whole(x, &self.group),
            Some(rows) => parts_to_split(x, rows, &self.group),
        }
    }

    /// All tokens, with which every rank does the same.
    ///
    /// # Errors
    /// As [`Stream::to_parts`].
    pub fn to_whole(&self, x: &Var) -> Result<Var, Error> {
        match &self.split {
            None => Ok(x.clone()),
            Some(rows) => split_to_whole(x.clone(), rows, &self.group),
        }
    }

    /// What is to be added once to a sum of parts: here if this is the first rank.
    pub fn once(&self, x: Var) -> Var {
        whole_as_parts(x, self.group.rank())
    }
}
