//! Steps: the rows that are sent in one all-to-all, and how received rows are sorted by expert.

use std::ops::Range;

use guildhall_tensor::{Indices, Var};

use super::Share;
use crate::parallel::collectives::RowCounts;

/// The rows that are sent in one all-to-all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Their range within the rows that this rank sends.
    pub rows: Range<usize>,
    pub counts: RowCounts,
    /// Sorts the received rows by this rank's experts.
    pub sorting: Sorting,
}

/// The permutation that sorts received rows, which are ordered by lane, by expert. Within an expert, rows are ordered
/// by source rank, then by token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sorting {
    /// For each lane whose rows are gathered here, the number of its rows; one entry if there is no gather.
    pub lanes: Vec<usize>,
    pub rows_per_expert: Vec<usize>,
    /// The sorting permutation: for each position in the sorted order, the row in arrival order.
    pub by_expert: Indices,
    /// Whether rows arrive sorted.
    is_done: bool,
}

impl Sorting {
    /// `cells[lane][source * experts + expert]`: the number of rows by lane, source and expert, in the order of
    /// arrival.
    pub(super) fn new(cells: &[Vec<usize>], experts: usize, share: Share) -> Sorting {
        let counted = Sorting::counted(cells, experts);
        if counted.is_done {
            let rows: usize = counted.lanes.iter().sum();
            return Sorting { by_expert: Indices::Run(0..rows as u32), ..counted };
        }
        let by_expert = Sorting::order(cells, experts, share);
        let is_done = by_expert.iter().enumerate().all(|(i, &row)| i as u32 == row);
        Sorting { by_expert: Indices::Known(by_expert), is_done, ..counted }
    }

    /// The same without the permutation: the counts, and whether rows need sorting.
    pub(super) fn counted(cells: &[Vec<usize>], experts: usize) -> Sorting {
        let of_expert = |expert| cells.iter().flat_map(|c| c.iter().skip(expert).step_by(experts)).sum();
        let lanes: Vec<usize> = cells.iter().map(|cells| cells.iter().sum()).collect();
        let sources = |lane: &[usize]| lane.chunks(experts.max(1)).filter(|rows| rows.iter().any(|&n| n > 0)).count();
        let from_one = lanes.iter().filter(|&&rows| rows > 0).count() <= 1;
        let is_done = from_one && (experts <= 1 || cells.iter().all(|lane| sources(lane) <= 1));
        let by_expert = Indices::Counted(lanes.iter().sum());
        Sorting { lanes, rows_per_expert: (0..experts).map(of_expert).collect(), by_expert, is_done }
    }

    fn order(cells: &[Vec<usize>], experts: usize, share: Share) -> Vec<u32> {
        let all = cells.iter().flatten();
        let mut next: Vec<usize> = all.scan(0, |start, &rows| Some(std::mem::replace(start, *start + rows))).collect();
        let (of_lane, lanes) = (cells[0].len(), cells.len());
        let mut by_expert = Vec::with_capacity(cells.iter().flatten().sum());
        for cell in (0..experts).flat_map(|expert| (expert..of_lane).step_by(experts)) {
            let mut take = |lane: usize, rows: usize| {
                let next = &mut next[lane * of_lane + cell];
                by_expert.extend((*next..*next + rows).map(|row| row as u32));
                *next += rows;
            };
            match share {
                Share::Ordinals => {
                    let longest = cells.iter().map(|cells| cells[cell]).max().unwrap_or(0);
                    let turns = (0..longest).flat_map(|turn| (0..lanes).map(move |lane| (turn, lane)));
                    turns.filter(|&(turn, lane)| turn < cells[lane][cell]).for_each(|(_, lane)| take(lane, 1));
                }
                Share::Every | Share::Tokens => (0..lanes).for_each(|lane| take(lane, cells[lane][cell])),
            }
        }
        by_expert
    }

    /// Whether rows arrive sorted.
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// For each row in arrival order, its position after sorting: the inverse of `by_expert`.
    pub fn places(&self) -> Indices {
        let Indices::Known(by_expert) = &self.by_expert else { return self.by_expert.clone() };
        let mut places = vec![0; by_expert.len()];
        for (place, &row) in by_expert.iter().enumerate() {
            places[row as usize] = place as u32;
        }
        Indices::Known(places)
    }

    /// Sorts rows `[R, D]` by expert.
    pub fn sort(&self, rows: Var) -> Var {
        if self.is_done { rows } else { rows.gather_rows(&self.by_expert) }
    }

    /// Restores the order in which the rows arrived.
    pub fn unsort(&self, rows: Var) -> Var {
        if self.is_done { rows } else { rows.gather_rows(&self.places()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lanes;
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_then_source() {
        // Rank 0 sends two rows for expert 0 and one for expert 1, rank 1 sends one and two.
        let sorting = Sorting::new(&[vec![2, 1, 1, 2]], 2, Share::Every);
        assert_eq!(sorting.rows_per_expert, [3, 3]);
        assert_eq!(sorting.by_expert, Indices::Known(vec![0, 1, 3, 2, 4, 5]));
        assert_eq!(sorting.places(), Indices::Known(vec![0, 1, 3, 2, 4, 5]));
        assert!(!sorting.is_done);
    }

    /// One expert, one source, five routes: lane 0 sent routes 0, 2 and 4, lane 1 routes 1 and 3.
    #[test]
    fn shares_of_an_expert_become_what_one_lane_would_have_sent() {
        let by = |share| Sorting::new(&[vec![3], vec![2]], 1, share).by_expert;
        assert_eq!(by(Share::Ordinals), Indices::Known(vec![0, 3, 1, 4, 2]));
        assert_eq!(by(Share::Tokens), Indices::Known(vec![0, 1, 2, 3, 4]));
        let lanes = Lanes { index: 1, count: 2, share: Share::Ordinals, sliced: true };
        assert_eq!([lanes.of(5, 0), lanes.of(5, 1), lanes.of(0, 1)], [3, 2, 0]);
    }
}
