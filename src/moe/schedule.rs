//! The smart schedule: which ranks exchange rows in which step (FasterMoE; spec: pairwise shifts of groups).

use std::ops::Range;

/// The ranks of an expert group, divided into consecutive groups of equal size. In step t a rank sends to group
/// `own + t` and receives from group `own - t`, modulo the number of groups. So every rank sends to each group once,
/// and to its own group first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Index of this rank's group.
    own: usize,
    groups: usize,
    ranks_per_group: usize,
}

impl Schedule {
    /// # Panics
    /// If `groups` does not divide `ranks`; the configuration is checked before.
    pub fn new(rank: usize, ranks: usize, groups: usize) -> Schedule {
        assert!(ranks.is_multiple_of(groups), "{ranks} ranks in {groups} groups");
        let ranks_per_group = ranks / groups;
        Schedule { own: rank / ranks_per_group, groups, ranks_per_group }
    }

    pub fn steps(&self) -> usize {
        self.groups
    }

    /// The step in which this rank sends to `rank`.
    pub(super) fn step_to(&self, rank: usize) -> usize {
        (rank / self.ranks_per_group + self.groups - self.own) % self.groups
    }

    /// The ranks to which this rank sends in a step.
    pub fn destinations(&self, step: usize) -> Range<usize> {
        self.ranks((self.own + step) % self.groups)
    }

    /// The ranks from which this rank receives in a step.
    pub fn sources(&self, step: usize) -> Range<usize> {
        self.ranks((self.own + self.groups - step) % self.groups)
    }

    fn ranks(&self, group: usize) -> Range<usize> {
        group * self.ranks_per_group..(group + 1) * self.ranks_per_group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_ranks_meets_once() {
        for (ranks, groups) in [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)] {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let (sender, receiver) = (Schedule::new(from, ranks, groups), Schedule::new(to, ranks, groups));
                let sends: Vec<usize> = (0..groups).filter(|&t| sender.destinations(t).contains(&to)).collect();
                let receives: Vec<usize> = (0..groups).filter(|&t| receiver.sources(t).contains(&from)).collect();
                assert_eq!(sends.len(), 1, "{from} to {to} of {ranks} in {groups}");
                assert_eq!(sends, receives, "{from} to {to} of {ranks} in {groups}");
            }
        }
    }
}
