//! Which ranks the tokens of a micro-batch lie on, and so which ranks share a routing group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::RowIds;

use super::gates::present;
use crate::parallel::gather_numbers;

/// Where the tokens of a micro-batch lie. Every rank knows all of it, so that none has to ask who shares a routing group
/// with it, and all agree on whether anything has to be exchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    /// Ascending, without a gap and without an empty one.
    runs: Vec<TokenRun>,
    /// The numbers of tokens that are padding, ascending.
    padding: Vec<Range<u64>>,
}

/// Consecutive tokens on one rank, by their index within the step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRun {
    pub rank: usize,
    pub ids: Range<u64>,
}

impl TokenRun {
    pub fn len(&self) -> usize {
        (self.ids.end - self.ids.start) as usize
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// Tokens that compete with each other, as runs in the order of their indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingGroup {
    pub runs: Vec<TokenRun>,
}

impl RoutingGroup {
    /// The first token's index within the step.
    pub fn first(&self) -> u64 {
        self.runs[0].ids.start
    }

    pub fn tokens(&self) -> usize {
        self.runs.iter().map(TokenRun::len).sum()
    }

    /// The numbers within the step of the tokens on `rank`, the only one that has any.
    pub fn numbers_on(&self, rank: usize) -> Range<u64> {
        let mut runs = self.on(rank).map(|run| run.ids.clone());
        let first = runs.next().expect("a rank with tokens of the group");
        first.start..runs.last().map_or(first.end, |last| last.end)
    }

    /// The tokens' numbers within the step.
    pub fn numbers(&self) -> Range<u64> {
        self.first()..self.first() + self.tokens() as u64
    }

    /// The runs of `rank`.
    pub fn on(&self, rank: usize) -> impl Iterator<Item = &TokenRun> {
        self.runs.iter().filter(move |run| run.rank == rank)
    }

    /// Tokens that lie on `rank`.
    pub fn tokens_on(&self, rank: usize) -> usize {
        self.on(rank).map(TokenRun::len).sum()
    }

    /// Whether its tokens lie on several ranks.
    pub fn is_shared(&self) -> bool {
        self.runs.iter().any(|run| run.rank != self.runs[0].rank)
    }
}

impl Homes {
    /// Of the tokens that each rank has; together they are consecutive.
    pub fn new(shares: impl IntoIterator<Item = Range<u64>>) -> Homes {
        let runs = shares.into_iter().enumerate().map(|(rank, ids)| TokenRun { rank, ids });
        let mut runs: Vec<TokenRun> = runs.filter(|run| !run.is_empty()).collect();
        runs.sort_by_key(|run| run.ids.start);
        Homes { runs, padding: Vec::new() }
    }

    /// Of a rank that has them all.
    pub fn alone(ids: Range<u64>) -> Homes {
        Homes::new(std::iter::once(ids))
    }

    /// Of ranks that each know their own. Collective.
    ///
    /// # Errors
    /// What the group reports.
    ///
    /// # Panics
    /// If this rank's are not consecutive.
    pub fn gather(own: &RowIds, group: &Arc<dyn Communicator>) -> Result<Homes, Error> {
        let own = match own.runs() {
            [] => 0..0,
            [run] => run.clone(),
            runs => panic!("consecutive tokens, not {runs:?}"),
        };
        let bounds = group.all_gather_u64(&[own.start, own.end])?;
        Ok(Homes::new(bounds.chunks_exact(2).map(|ends| ends[0]..ends[1])))
    }

    /// Of ranks that each know their own, which need not be consecutive. Collective.
    ///
    /// # Errors
    /// What the group reports.
    pub fn gather_runs(own: &RowIds, group: &Arc<dyn Communicator>) -> Result<Homes, Error> {
        let own = own.runs().iter().flat_map(|run| [run.start, run.end]).collect();
        let mut runs = Vec::new();
        for (rank, bounds) in gather_numbers(own, group)?.into_iter().enumerate() {
            runs.extend(bounds.chunks_exact(2).map(|ids| TokenRun { rank, ids: ids[0]..ids[1] }));
        }
        runs.sort_by_key(|run| run.ids.start);
        Ok(Homes { runs, padding: Vec::new() })
    }

    /// Where tokens of these numbers are padding: those of this rank, one range for each of its rows, which may be empty.
    /// Ranks whose tokens compete tell each other, if `group` has any: then collective.
    ///
    /// # Errors
    /// What the group reports.
    pub fn padded(self, own: Vec<Range<u64>>, group: Option<&Arc<dyn Communicator>>) -> Result<Homes, Error> {
        let mut padding = own;
        if let Some(group) = group {
            let bounds = padding.iter().flat_map(|ids| [ids.start, ids.end]).collect();
            let told = gather_numbers(bounds, group)?;
            padding = told.iter().flat_map(|bounds| bounds.chunks_exact(2)).map(|ids| ids[0]..ids[1]).collect();
        }
        padding.retain(|ids| !ids.is_empty());
        padding.sort_by_key(|ids| ids.start);
        Ok(Homes { padding, ..self })
    }

    /// Whether nothing is known of where tokens lie, as they do not compete.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The numbers of tokens that are padding, ascending: this rank's, and of others those that its tokens may compete with.
    pub fn padding(&self) -> &[Range<u64>] {
        &self.padding
    }

    /// How many of these tokens are not padding.
    pub fn present(&self, numbers: &RowIds) -> usize {
        numbers.runs().iter().map(|run| present(&self.padding, run.clone())).sum()
    }

    /// The first token of all, and the number of tokens in a routing group of `size`.
    fn grid(&self, size: Option<usize>) -> (u64, u64) {
        let first = self.runs.first().map_or(0, |run| run.ids.start);
        let end = self.runs.last().map_or(0, |run| run.ids.end);
        (first, size.map_or(end - first, |size| size as u64).max(1))
    }

    /// Whether any routing group of `size` tokens lies on several ranks; the same answer on every rank.
    pub fn shares_groups(&self, size: Option<usize>) -> bool {
        let (first, size) = self.grid(size);
        let cuts =
            |pair: &[TokenRun]| pair[0].rank != pair[1].rank && !(pair[1].ids.start - first).is_multiple_of(size);
        self.runs.windows(2).any(cuts)
    }

    /// The routing groups of `size` tokens that hold some of this rank's, in order; the last of all may be shorter.
    pub fn groups_of(&self, rank: usize, size: Option<usize>) -> impl Iterator<Item = RoutingGroup> {
        let (first, size) = self.grid(size);
        let own = self.runs.iter().filter(move |run| run.rank == rank);
        let mut next = 0;
        let places = own.flat_map(move |run| {
            let places = ((run.ids.start - first) / size).max(next)..(run.ids.end - first).div_ceil(size);
            next = places.end.max(next);
            places
        });
        places.map(move |place| self.within(first + place * size..first + (place + 1) * size))
    }

    fn within(&self, ids: Range<u64>) -> RoutingGroup {
        let begin = self.runs.partition_point(|run| run.ids.end <= ids.start);
        let runs = self.runs[begin..].iter().take_while(|run| run.ids.start < ids.end);
        let part =
            |run: &TokenRun| TokenRun { rank: run.rank, ids: run.ids.start.max(ids.start)..run.ids.end.min(ids.end) };
        RoutingGroup { runs: runs.map(part).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(runs: &[(usize, Range<u64>)]) -> RoutingGroup {
        RoutingGroup { runs: runs.iter().map(|(rank, ids)| TokenRun { rank: *rank, ids: ids.clone() }).collect() }
    }

    #[test]
    fn groups_are_sets_of_tokens_whatever_rank_they_lie_on() {
        // The second of four ranks has none, and the third has the first tokens.
        let homes = Homes::new([106..113, 0..0, 100..106, 113..115]);
        let of = |rank, size| homes.groups_of(rank, size).collect::<Vec<_>>();
        let [a, b] = [group(&[(2, 100..106), (0, 106..108)]), group(&[(0, 108..113), (3, 113..115)])];
        assert_eq!((of(2, Some(8)), of(0, Some(8)), of(3, Some(8))), (vec![a.clone()], vec![a, b.clone()], vec![b]));
        assert_eq!(of(1, Some(8)), []);
        assert_eq!(of(2, Some(3)), [group(&[(2, 100..103)]), group(&[(2, 103..106)])]);
        // Where a run ends and a group begins, the run has no part in it.
        assert_eq!(of(3, Some(1)), [group(&[(3, 113..114)]), group(&[(3, 114..115)])]);
        assert_eq!(of(3, None), [group(&[(2, 100..106), (0, 106..113), (3, 113..115)])]);
        assert!(homes.shares_groups(Some(8)) && homes.shares_groups(None) && homes.shares_groups(Some(6)));
        assert!(homes.shares_groups(Some(3)) && !homes.shares_groups(Some(1)));
        assert!(!Homes::new([0..8, 8..8, 8..24]).shares_groups(Some(4)));
        assert!(!Homes::new([3..3, 3..9]).shares_groups(None) && !Homes::default().shares_groups(None));
    }

    /// A rank may come to have several runs, two of them in one group.
    #[test]
    fn a_group_is_listed_once() {
        let run = |rank, ids| TokenRun { rank, ids };
        let homes = Homes { runs: vec![run(0, 0..2), run(1, 2..3), run(0, 3..9)], ..Homes::default() };
        let groups: Vec<_> = homes.groups_of(0, Some(4)).collect();
        let first = group(&[(0, 0..2), (1, 2..3), (0, 3..4)]);
        assert_eq!(groups, [first.clone(), group(&[(0, 4..8)]), group(&[(0, 8..9)])]);
        assert_eq!((first.tokens(), first.tokens_on(0), first.is_shared()), (4, 3, true));
    }
}
