//! How tensors are cut into shares, one a holder, and how the shares of several travel in one message: as integers.
//!
//! ```text
//!  two weights of 5 and 2 elements, two ranks:     rank 0: a[0..2] b[0..1]     rank 1: a[2..5] b[1..2]
//!  in a message                                    a0 a1 b0 | a2 a3 a4 b1      so each rank's shares lie together
//! ```

use std::ops::Range;

use guildhall_tensor::{Device, Dtype, Tensor};
use std::sync::Arc;

/// The share of the `index`-th of `parts` holders in `len` elements. Shares differ by one element at most.
pub fn share(len: usize, (index, parts): (usize, usize)) -> Range<usize> {
    len * index / parts..len * (index + 1) / parts
}

/// The shares of tensors in a message, those of one rank together, ranks in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Elements of each member.
    lengths: Vec<usize>,
    /// Elements of each rank's shares.
    pub counts: Vec<usize>,
}

impl Packing {
    /// Of members of these lengths, over `ranks`.
    pub fn new(lengths: &[usize], ranks: usize) -> Packing {
        // Of most members all shares are alike, and of thousands of ranks nobody asks for each of them.
        let (alike, others): (Vec<usize>, Vec<usize>) = lengths.iter().partition(|&&len| len.is_multiple_of(ranks));
        let alike = alike.iter().sum::<usize>() / ranks;
        let count = |rank| alike + others.iter().map(|&len| share(len, (rank, ranks)).len()).sum::<usize>();
        Packing { lengths: lengths.to_vec(), counts: (0..ranks).map(count).collect() }
    }

    /// Elements of the message.
    pub fn len(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn ranks(&self) -> usize {
        self.counts.len()
    }

    /// The share of `rank` in a member.
    pub fn share(&self, member: usize, rank: usize) -> Range<usize> {
        share(self.lengths[member], (rank, self.ranks()))
    }

    /// The shares of some ranks in a member, and where each begins in a message of all members.
    pub(super) fn shares(&self, member: usize, ranks: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut first: usize = self.counts[..ranks.start].iter().sum();
        ranks.map(move |rank| {
            let within = self.within_rank(member, rank);
            let at = first + within.start;
            first += self.counts[rank];
            (self.share(member, rank), at)
        })
    }

    /// A message of whole members, each asked for once.
    pub(super) fn pack(&self, device: &Arc<Device>, dtype: Dtype, whole: impl Fn(usize) -> Tensor) -> Tensor {
        let mut message = Tensor::stale(device, &[self.len()], dtype);
        for member in 0..self.lengths.len() {
            let parts = self.shares(member, 0..self.ranks()).map(|(elements, at)| (at, elements));
            message.copy_parts(&whole(member), self.lengths[member], parts);
        }
        message
    }

    /// Writes a member out of a message.
    pub(super) fn unpack(&self, message: &Tensor, member: usize, whole: &mut Tensor) {
        let parts = self.shares(member, 0..self.ranks());
        let parts = parts.map(|(elements, at)| (elements.start, at..at + elements.len()));
        whole.copy_parts(message, self.lengths[member], parts);
    }

    /// Where the share of `rank` in a member lies among all shares of that rank.
    pub(super) fn within_rank(&self, member: usize, rank: usize) -> Range<usize> {
        let before: usize = (0..member).map(|member| self.share(member, rank).len()).sum();
        before..before + self.share(member, rank).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_uneven_lengths() {
        for len in 0..20 {
            for parts in 1..6 {
                let shares: Vec<_> = (0..parts).map(|index| share(len, (index, parts))).collect();
                assert!(shares.iter().cloned().flatten().eq(0..len), "{len} in {parts}: {shares:?}");
                let lengths = shares.iter().map(ExactSizeIterator::len);
                assert!(lengths.clone().max().unwrap() - lengths.min().unwrap() <= 1, "{len} in {parts}: {shares:?}");
            }
        }
    }

    #[test]
    fn a_message_is_rank_by_rank() {
        let (device, packing) = (Device::new(1), Packing::new(&[5, 2], 2));
        assert_eq!(packing.counts, [3, 4]);
        let members = [[0.0, 1.0, 2.0, 3.0, 4.0].as_slice(), &[10.0, 11.0]];
        let member = |i: usize| Tensor::from_slice(&device, &[members[i].len()], members[i]);
        let message = packing.pack(&device, Dtype::F32, member);
        assert_eq!(message.f32s(), [0.0, 1.0, 10.0, 2.0, 3.0, 4.0, 11.0]);
        assert_eq!((packing.share(0, 1), packing.within_rank(0, 1), packing.within_rank(1, 1)), (2..5, 0..3, 3..4));
        for (i, member) in members.iter().enumerate() {
            let mut back = Tensor::zeros(&device, &[member.len()]);
            packing.unpack(&message, i, &mut back);
            assert_eq!(back.f32s(), *member);
        }
    }
}
