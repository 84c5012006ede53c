//! The smart schedule: which ranks exchange rows in which step (FasterMoE; spec: pairwise shifts of groups), and when a
//! rank computes the rows that it does not send.

/// The ranks of an expert group, divided into consecutive groups of equal size that exchange rows in shifts: a rank sends
/// to its own group first, then to group `own + t` while it receives from group `own - t`, modulo the number of groups.
///
/// A rank's rows for its own experts do not travel. Half of them come before all exchanges and half after them, so that
/// the experts are busy while the first rows of others arrive and while the last results return.
///
/// ```text
///  rank 0 of 3 in 3 groups   to and from itself | to 1, from 2 | to 2, from 1 | to and from itself
///  computes                  first half           rows of 2      rows of 1      second half
///  under way                 rows of 2, 1         rows of 1      results of 2   results of 1
/// ```
///
/// With one group all rows are exchanged in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    rank: usize,
    groups: usize,
    ranks_per_group: usize,
}

impl Schedule {
    /// # Panics
    /// If `groups` does not divide `ranks`; the configuration is checked before.
    pub fn new(rank: usize, ranks: usize, groups: usize) -> Schedule {
        assert!(ranks.is_multiple_of(groups), "{ranks} ranks in {groups} groups");
        Schedule { rank, groups, ranks_per_group: ranks / groups }
    }

    /// The number of all-to-alls. In the first and the last of several, rows of no rank go to another.
    pub fn steps(&self) -> usize {
        if self.groups == 1 { 1 } else { self.last() + 1 }
    }

    /// The steps in which this rank sends to `rank` the first and the second half of the rows for it.
    pub fn steps_to(&self, rank: usize) -> [usize; 2] {
        self.steps_of(rank, rank / self.ranks_per_group + self.groups - self.own_group())
    }

    /// The steps in which the two halves of what `rank` sends to this rank arrive.
    pub fn steps_from(&self, rank: usize) -> [usize; 2] {
        self.steps_of(rank, self.own_group() + self.groups - rank / self.ranks_per_group)
    }

    /// `shift` is the distance from the sending group to the receiving one.
    fn steps_of(&self, rank: usize, shift: usize) -> [usize; 2] {
        match rank == self.rank {
            _ if self.groups == 1 => [0, 0],
            true => [0, self.last()],
            false => [self.first_shift() + shift % self.groups; 2],
        }
    }

    fn own_group(&self) -> usize {
        self.rank / self.ranks_per_group
    }

    /// The step of shift 0. A group of one rank has none.
    fn first_shift(&self) -> usize {
        usize::from(self.ranks_per_group > 1)
    }

    fn last(&self) -> usize {
        self.first_shift() + self.groups
    }
}

/// Of rows that lie in runs one after the other, the number in each run that belongs to the first half of all.
pub(super) fn first_half(runs: &[usize]) -> Vec<usize> {
    let mut left = runs.iter().sum::<usize>().div_ceil(2);
    let take = |&rows: &usize| {
        let taken = rows.min(left);
        left -= taken;
        taken
    };
    runs.iter().map(take).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_ranks_meets_in_the_steps_of_both() {
        for (ranks, groups, steps) in [(1, 1, 1), (4, 1, 1), (4, 2, 4), (4, 4, 5), (6, 3, 5), (2, 2, 3)] {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let (sender, receiver) = (Schedule::new(from, ranks, groups), Schedule::new(to, ranks, groups));
                let what = format!("{from} to {to} of {ranks} in {groups}");
                assert_eq!(sender.steps(), steps, "{what}");
                let sends = sender.steps_to(to);
                assert_eq!(sends, receiver.steps_from(from), "{what}");
                let own = if groups == 1 { [0, 0] } else { [0, steps - 1] };
                let is_between = sends[0] == sends[1] && (1..steps - 1).contains(&sends[0]);
                assert!(if from == to || groups == 1 { sends == own } else { is_between }, "{what}: {sends:?}");
            }
        }
    }

    #[test]
    fn ranks_of_other_groups_come_in_shifts() {
        let steps = |rank: usize| (0..6).map(|to| Schedule::new(rank, 6, 3).steps_to(to)[0]).collect::<Vec<_>>();
        assert_eq!(steps(0), [0, 1, 2, 2, 3, 3]);
        assert_eq!(steps(3), [3, 3, 1, 0, 2, 2]);
    }

    #[test]
    fn the_first_half_is_taken_in_order() {
        assert_eq!(first_half(&[3, 4, 2]), [3, 2, 0]);
        assert_eq!(first_half(&[5]), [3]);
        assert_eq!(first_half(&[0, 1]), [0, 1]);
        assert_eq!(first_half(&[]), [0usize; 0]);
    }
}
