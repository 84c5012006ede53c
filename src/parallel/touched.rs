//! Which rows of a table that is looked up by ids get a gradient in a step: those of the ids that some rank reads.
//!
//! A vocabulary may have many more rows than a step has tokens. Then the rows that have a gradient travel between ranks, and
//! the others, which are zeros on every rank, do not.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Reduce, Request};
use guildhall_tensor::{Cause, Indices, Tensor};

use super::Weight;
use super::flight::{Flight, payload, received};

const BITS: usize = u64::BITS as usize;

/// The rows of a table that have a gradient on some rank of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TouchedRows {
    /// Ascending.
    Known(Vec<u32>),
    /// So many at most: of batches without tokens.
    AtMost(usize),
}

impl TouchedRows {
    /// Of a group's ranks that read ids of a vocabulary, this one `own`. Collective.
    ///
    /// # Errors
    /// What the group reports.
    ///
    /// # Panics
    /// If an id is outside the vocabulary.
    pub fn of_group(
        own: impl Iterator<Item = u32>,
        vocab: usize,
        group: &Arc<dyn Communicator>,
    ) -> Result<TouchedRows, Error> {
        let mut bits = vec![0u64; vocab.div_ceil(BITS)];
        own.for_each(|id| bits[id as usize / BITS] |= 1 << (id as usize % BITS));
        let all = group.all_gather_u64(&bits)?;
        let is_read = |id: &u32| {
            let (word, bit) = (*id as usize / BITS, *id as usize % BITS);
            all[word..].iter().step_by(bits.len()).any(|bits| bits >> bit & 1 == 1)
        };
        Ok(TouchedRows::Known((0..vocab as u32).filter(is_read).collect()))
    }

    /// Of a group whose ranks read so many ids, whatever they are. Collective, with the messages of
    /// [`TouchedRows::of_group`].
    ///
    /// # Errors
    /// What the group reports.
    pub fn of_counted(tokens: usize, vocab: usize, group: &Arc<dyn Communicator>) -> Result<TouchedRows, Error> {
        TouchedRows::of_group(std::iter::empty(), vocab, group)?;
        Ok(TouchedRows::AtMost(tokens.min(vocab)))
    }

    /// The ids of those in a part of the table.
    pub(super) fn within(&self, part: Range<usize>) -> Indices {
        match self {
            TouchedRows::Known(ids) => {
                let before = |end: usize| ids.partition_point(|&id| (id as usize) < end);
                Indices::Known(ids[before(part.start)..before(part.end)].to_vec())
            }
            TouchedRows::AtMost(count) => Indices::Counted(part.len().min(*count)),
        }
    }
}

/// The rows of a table that are here, by their numbers in the whole of it.
pub(super) fn rows_here(table: &Weight) -> Range<usize> {
    let piece = &table.placement.pieces[0];
    piece.slice.map_or(0..piece.shape[0], |slice| slice.start..slice.start + slice.len)
}

/// The sum of a table's gradient over a group, of which the touched rows travel.
pub(super) struct RowsUnderWay {
    flight: Flight,
    gradient: Tensor,
    ids: Indices,
    /// The id of the gradient's first row.
    first: usize,
}

impl RowsUnderWay {
    /// Starts it, of the rows that are `here`.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn start(
        group: &Arc<dyn Communicator>,
        gradient: Tensor,
        (here, touched): (Range<usize>, &TouchedRows),
    ) -> Result<RowsUnderWay, Error> {
        let (device, ids, first) = (gradient.device().clone(), touched.within(here.clone()), here.start);
        let rows = {
            let _charge = device.charge(Cause::Communication);
            gradient.rows_by_id(&ids, first)
        };
        debug_assert_eq!(nonzeros(&gradient), nonzeros(&rows), "a row without a reader has a gradient");
        let request = Request::all_reduce(Reduce::Sum, payload(group, rows));
        let flight = Flight::start(group, &device, Cause::Communication, request)?;
        Ok(RowsUnderWay { flight, gradient, ids, first })
    }

    /// The whole gradient with the sums in it.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn wait(self) -> Result<Tensor, Error> {
        let RowsUnderWay { flight, mut gradient, ids, first } = self;
        let sums = received(gradient.device(), &[ids.len(), gradient.cols()], flight.wait()?);
        gradient.set_rows_by_id(&sums, &ids, first);
        Ok(gradient)
    }
}

/// How many numbers are not zero.
fn nonzeros(tensor: &Tensor) -> usize {
    if tensor.device().has_data() { tensor.to_vec().iter().filter(|&&x| x != 0.0).count() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_part_of_the_table_its_own_rows_have_gradients() {
        let group = guildhall_comm::solo::world();
        let touched = TouchedRows::of_group([129, 3, 64, 3, 63].into_iter(), 130, &group).unwrap();
        assert_eq!(touched, TouchedRows::Known(vec![3, 63, 64, 129]));
        for (part, expected) in [(0..130, &[3, 63, 64, 129][..]), (4..64, &[63]), (64..129, &[64]), (65..129, &[])] {
            assert_eq!(touched.within(part.clone()), Indices::Known(expected.to_vec()), "{part:?}");
        }
        let counted = TouchedRows::of_counted(100, 130, &group).unwrap();
        assert_eq!(counted.within(0..130), Indices::Counted(100));
        assert_eq!(counted.within(65..130), Indices::Counted(65));
    }
}
