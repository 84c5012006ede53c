//! Experts that move to other ranks of their groups: which elements go where, as integers, and the exchange.
//!
//! A stack of experts has its entries end to end, in the order of the experts' numbers. Every rank keeps as many experts
//! as it has, so a stack keeps its shape, and so does the share of it that ZeRO leaves on a rank: what changes is which
//! elements of which experts are there.
//!
//! ```text
//!  experts 0 1 | 2 3 on two ranks, 1 and 2 change places       stacks    [0 1]  [2 3]  ->  [0 2]  [1 3]
//!  the same in shares, of two ranks each                       shares    [0] [1] [2] [3]  ->  [0] [2] [1] [3]
//! ```

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Request};
use guildhall_tensor::{Cause, Tensor};

use super::flight::{Flight, arriving, buffer, payload, received};
use super::{Axis, ExpertTable, Mesh, share};

/// What changes between two tables.
#[derive(Clone)]
pub struct Relocation {
    world: Arc<dyn Communicator>,
    before: Vec<StackEntry>,
    after: ExpertTable,
    /// By rank of this rank's expert group, the ranks of the world that hold the same slices of the same experts.
    holders: Vec<Vec<usize>>,
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, Default)]
struct StackEntry {
    /// Of the expert group.
    rank: usize,
    /// In the rank's stacks.
    slot: usize,
}

/// Elements of a stack that one rank of the world has and another, or itself, gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertPassage {
    from: usize,
    to: usize,
    /// First element in the stack that was, and in the one that will be.
    was: usize,
    is: usize,
    len: usize,
}

impl Relocation {
    /// Between two tables of a layer, on a mesh of the layer's degree ([`Mesh::at`]).
    ///
    /// # Panics
    /// If a rank would own another number of experts than before.
    pub fn new(before: &ExpertTable, after: &ExpertTable, mesh: &Mesh) -> Relocation {
        let counts = |table: &ExpertTable| (0..table.ranks()).map(|rank| table.of(rank).len()).collect::<Vec<_>>();
        assert_eq!(counts(before), counts(after), "ranks keep as many experts as they have");
        let (shape, degree, own) = (mesh.shape(), mesh.shape().expert, mesh.world.rank());
        let group = shape.members(Axis::Expert(degree), own);
        let holders = group.into_iter().map(|rank| shape.members(Axis::ExpertData(degree), rank)).collect();
        let mut entries = vec![StackEntry::default(); before.experts()];
        for rank in 0..before.ranks() {
            before.of(rank).iter().enumerate().for_each(|(slot, &expert)| entries[expert] = StackEntry { rank, slot });
        }
        Relocation { world: mesh.world.clone(), before: entries, after: after.clone(), holders }
    }

    /// Gives `tensor`, which from element `at` on has what this rank keeps of a stack of entries of `width` elements, that
    /// of the experts which it owns from now on. `in_shares`: each holder of a stack keeps its share, otherwise all of it.
    /// Collective over the world.
    ///
    /// # Errors
    /// What the world reports.
    pub fn exchange(&self, tensor: &mut Tensor, (at, width): (usize, usize), in_shares: bool) -> Result<(), Error> {
        let (own, device) = (self.world.rank(), tensor.device().clone());
        let (mut leaving, mut coming): (Vec<ExpertPassage>, Vec<ExpertPassage>) = Default::default();
        let first = self.passages(width, in_shares, |passage| {
            leaving.extend((passage.from == own).then_some(passage));
            coming.extend((passage.to == own).then_some(passage));
        });
        // Between two ranks both lists have the passages in the same order.
        leaving.sort_by_key(|passage| passage.to);
        coming.sort_by_key(|passage| passage.from);
        let counts = |passages: &[ExpertPassage], peer: fn(&ExpertPassage) -> usize| {
            let mut counts = vec![0; self.world.size()];
            passages.iter().for_each(|passage| counts[peer(passage)] += passage.len);
            counts
        };
        let (send_counts, receive_counts) = (counts(&leaving, |p| p.to), counts(&coming, |p| p.from));
        let mut send = buffer(&device, &[send_counts.iter().sum()], tensor.dtype());
        let mut place = 0;
        for passage in leaving {
            let start = at + passage.was - first;
            send.copy_part(place, tensor, start..start + passage.len);
            place += passage.len;
        }
        let shape = [receive_counts.iter().sum()];
        let receive = arriving(&self.world, &device, &shape, tensor.dtype());
        let request = Request::all_to_all(payload(&self.world, send), send_counts, receive, receive_counts);
        let arrived =
            received(&device, &shape, Flight::start(&self.world, &device, Cause::Communication, request)?.wait()?);
        let mut place = 0;
        for passage in coming {
            tensor.copy_part(at + passage.is - first, &arrived, place..place + passage.len);
            place += passage.len;
        }
        Ok(())
    }

    /// Calls `f` with all passages between the ranks that hold the same slices as this one; returns the first element that
    /// this rank keeps of a stack.
    fn passages(&self, width: usize, in_shares: bool, mut f: impl FnMut(ExpertPassage)) -> usize {
        let (own, mut first) = (self.world.rank(), 0);
        let kept = |rank: usize, (index, count): (usize, usize)| {
            let len = self.after.of(rank).len() * width;
            if in_shares { share(len, (index, count)) } else { 0..len }
        };
        for (rank, holders) in self.holders.iter().enumerate() {
            for (index, &to) in holders.iter().enumerate() {
                let here = kept(rank, (index, holders.len()));
                if to == own {
                    first = here.start;
                }
                for (slot, &expert) in self.after.of(rank).iter().enumerate() {
                    let Some(part) = common(&here, &(slot * width..(slot + 1) * width)) else { continue };
                    let StackEntry { rank: owner, slot: before } = self.before[expert];
                    let was = before * width + part.start - slot * width..before * width + part.end - slot * width;
                    let sources = if in_shares { 0..holders.len() } else { index..index + 1 };
                    for source in sources {
                        let Some(there) = common(&was, &kept(owner, (source, holders.len()))) else { continue };
                        let is = part.start + there.start - was.start;
                        f(ExpertPassage {
                            from: self.holders[owner][source],
                            to,
                            was: there.start,
                            is,
                            len: there.len(),
                        });
                    }
                }
            }
        }
        first
    }
}

/// What two ranges have in common, if that is something.
fn common(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}
