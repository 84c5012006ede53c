//! Plans: the rows to send, as integers only. A plan is made from a routing without looking at a single activation, and
//! can be tested without a communicator.
//!
//! A new plan sends all rows, sorted by the rank that holds their expert, then by expert, then by token.
//! [Rewrites](super::rewrites) transform a plan into another one by splitting and reordering its rows.

use std::ops::Range;

use guildhall_tensor::{Index, Indices};

use super::{Lanes, Routing, Schedule};
use crate::parallel::ExpertTable;

/// The rows that this rank sends, or keeps for shadowed experts. If the lanes (the ranks of a tensor group) divide the
/// routes, the plan also has the rows of the other lanes, ordered by lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub table: ExpertTable,
    pub lanes: Lanes,
    /// The steps in which rows are sent.
    pub schedule: Schedule,
    /// Experts whose weights are copied to every rank of the group, so that their rows are not sent; sorted by owner
    /// rank, then by expert.
    pub shadowed: Vec<usize>,
    /// All rows in send order, run-length encoded.
    pub runs: Vec<RowRun>,
    /// For each row, its token.
    pub tokens: Indices,
    /// For each route, its row, or `u32::MAX` if it is dropped. Several routes may share a row.
    pub places: Indices,
    /// Number of routes per token (top-k).
    pub slots: usize,
    /// If the rows are divided among lanes: the order of the rows before the division.
    pub undealt: Option<UndealtRows>,
    /// For each token, the rank of the expert group that receives its results. `None`: results return to the rank that
    /// sent the rows (no migration).
    pub homes: Option<Vec<u32>>,
    /// Whether the input gradient of a row that several routes share is spread evenly over their tokens; otherwise the
    /// row's own token receives it.
    pub spreads: bool,
}

/// Consecutive rows of one expert. No run is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRun {
    /// The lane that sends this run.
    pub lane: usize,
    /// The step of the schedule in which the run is sent.
    pub step: usize,
    /// The rank of the expert group that computes the run; `None` if the expert is shadowed and the rows stay on this
    /// rank.
    pub rank: Option<usize>,
    pub expert: usize,
    pub rows: usize,
}

/// The rows in the order before they were divided among lanes. This order is the same on every lane, so all lanes
/// accumulate gradients in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndealtRows {
    pub tokens: Indices,
    /// For each row of this order, its index in the plan.
    pub places: Indices,
}

/// A strided selection of a plan's rows, used by rewrites: `run.rows` rows, starting at row `first`, with stride
/// `every`.
#[derive(Clone, Copy, Debug)]
pub struct StridedRows {
    pub run: RowRun,
    pub first: usize,
    pub every: usize,
}

impl Plan {
    /// The plan of rank `rank` of an expert group before any rewrite: a stable counting sort of routes by expert. The
    /// rows of an expert stay in token order, so the order is deterministic: the same in every execution and with any
    /// number of threads (unlike in FastMoE, 3.2, whose kernels leave it undefined).
    pub fn new(routing: &Routing, table: ExpertTable, rank: usize) -> Plan {
        let routes = routing.rows();
        let (mut runs, mut next, mut end) = (Vec::new(), vec![0; routes.len()], 0);
        for owner in 0..table.ranks() {
            for &expert in table.of(owner).iter().filter(|&&expert| routes[expert] > 0) {
                next[expert] = end;
                end += routes[expert];
                runs.push(RowRun { lane: 0, step: 0, rank: Some(owner), expert, rows: routes[expert] });
            }
        }
        let (tokens, places) = match routing.counted {
            Some(_) => (Indices::Counted(end), Indices::Counted(routing.tokens() * routing.k)),
            None => sorted(routing, next, end),
        };
        let schedule = Schedule::new(rank, table.ranks(), 1);
        let (shadowed, lanes) = (Vec::new(), Lanes::ALONE);
        let (slots, undealt, homes, spreads) = (routing.k, None, None, false);
        Plan { table, lanes, schedule, shadowed, runs, tokens, places, slots, undealt, homes, spreads }
    }

    /// All rows, one selection per run.
    pub fn portions(&self) -> Vec<StridedRows> {
        let mut next = 0;
        let portion = |&run: &RowRun| {
            let first = next;
            next += run.rows;
            StridedRows { run, first, every: 1 }
        };
        self.runs.iter().map(portion).collect()
    }

    /// The same rows with other labels on their runs, sorted by these: by lane, those that stay last, and by step.
    pub fn relabelled(self, label: impl Fn(RowRun) -> RowRun) -> Plan {
        let mut portions = self.portions();
        portions.iter_mut().for_each(|portion| portion.run = label(portion.run));
        self.sorted(portions)
    }

    /// The plan made of these selections, sorted by lane, those that stay last, and by step.
    pub fn sorted(self, mut portions: Vec<StridedRows>) -> Plan {
        portions.sort_by_key(|StridedRows { run, .. }| (run.lane, run.rank.is_none(), run.step));
        self.of_portions(portions)
    }

    /// The plan made of these selections, in this order. A row that is in no selection is not sent: its routes are
    /// marked as dropped, unless the rewrite then points them to another row.
    pub fn of_portions(mut self, portions: Vec<StridedRows>) -> Plan {
        if let Indices::Known(tokens) = &self.tokens {
            let rows = |portion: &StridedRows| (portion.first..).step_by(portion.every).take(portion.run.rows);
            let order: Vec<usize> = portions.iter().flat_map(rows).collect();
            let mut place_of = vec![u32::MAX; tokens.len()];
            order.iter().enumerate().for_each(|(place, &row)| place_of[row] = place as u32);
            let follow = |places: &mut Indices| {
                if let Indices::Known(places) = places {
                    places.iter_mut().filter(|row| **row != u32::MAX).for_each(|row| *row = place_of[*row as usize]);
                }
            };
            self.tokens = Indices::Known(order.into_iter().map(|row| tokens[row]).collect());
            follow(&mut self.places);
            self.undealt.iter_mut().for_each(|undealt| follow(&mut undealt.places));
        }
        self.runs = portions.into_iter().map(|portion| portion.run).collect();
        self
    }

    /// The number of rows of each lane.
    pub fn rows_of_lanes(&self) -> Vec<usize> {
        let mut rows = vec![0; self.lanes.sharing()];
        self.runs.iter().for_each(|run| rows[run.lane] += run.rows);
        rows
    }

    /// The range of the rows that this rank sends, or keeps for shadowed experts.
    pub fn own_rows(&self) -> Range<usize> {
        let (rows, own) = (self.rows_of_lanes(), self.lanes.own());
        let first = rows[..own].iter().sum();
        first..first + rows[own]
    }

    /// The tokens of the rows in [`Plan::own_rows`].
    pub fn own_tokens(&self) -> Index<'_> {
        self.tokens.part(self.own_rows())
    }

    pub(super) fn own_runs(&self) -> impl Iterator<Item = &RowRun> {
        self.runs.iter().filter(|run| run.lane == self.lanes.own())
    }

    /// For each expert of the group, the number of rows that this rank sends to it or keeps for it.
    pub fn rows_per_expert(&self) -> Vec<usize> {
        let mut rows = vec![0; self.table.experts()];
        self.own_runs().for_each(|run| rows[run.expert] += run.rows);
        rows
    }

    /// The number of steps in which rows are sent: none if all experts are shadowed, as every rank knows.
    pub fn steps(&self) -> usize {
        if self.shadowed.len() == self.table.experts() { 0 } else { self.schedule.steps() }
    }

    /// For each shadowed expert, the number of this rank's rows that are computed locally. These are the last of this
    /// rank's rows.
    pub fn staying(&self) -> Vec<usize> {
        let rows = self.rows_per_expert();
        self.shadowed.iter().map(|&expert| rows[expert]).collect()
    }
}

/// For each row its token, and for each route its row. `next` has the first row of each expert; `rows` is the number of
/// rows.
fn sorted(routing: &Routing, mut next: Vec<usize>, rows: usize) -> (Indices, Indices) {
    let (mut tokens, mut places) = (vec![0; rows], Vec::with_capacity(routing.expert.len()));
    for (token, routes) in routing.expert.chunks_exact(routing.k.max(1)).enumerate() {
        for &expert in routes {
            if expert == Routing::DROPPED {
                places.push(u32::MAX);
                continue;
            }
            let next = &mut next[expert as usize];
            tokens[*next] = token as u32;
            places.push(*next as u32);
            *next += 1;
        }
    }
    (Indices::Known(tokens), Indices::Known(places))
}

#[cfg(test)]
mod tests {
    use super::super::Share;
    use super::super::rewrites::{duplicates::deal, schedule::in_steps, shadowing::shadow};
    use super::*;

    #[test]
    fn routes_are_sorted_by_expert_in_token_order() {
        let routing = Routing::new(vec![2, 0, 2, Routing::DROPPED, 0, 2], 2, 3);
        let plan = Plan::new(&routing, ExpertTable::even(3, 1), 0);
        assert_eq!(plan.rows_per_expert(), [2, 0, 3]);
        assert_eq!(plan.tokens, Indices::Known(vec![0, 2, 0, 1, 2]));
        assert_eq!(plan.places, Indices::Known(vec![2, 0, 3, u32::MAX, 1, 4]));
    }

    /// Two lanes divide the routes of five tokens. Expert 0 has three routes, of which the second lane sends the middle
    /// one; expert 1 has two, one for each lane.
    #[test]
    fn lanes_that_share_routes_send_each_once() {
        let routing = Routing::new(vec![0, 1, 0, 0, 1], 1, 2);
        let plan = |index| {
            let lanes = Lanes { index, count: 2, share: Share::Ordinals, sliced: false };
            deal(Plan::new(&routing, ExpertTable::even(2, 1), 0), lanes)
        };
        let [first, second] = [plan(0), plan(1)];
        let known = |numbers: &[u32]| Indices::Known(numbers.to_vec());
        assert_eq!((&first.tokens, &first.rows_per_expert()[..]), (&known(&[0, 3, 1, 2, 4]), &[2, 1][..]));
        assert_eq!((&second.tokens, &second.rows_per_expert()[..]), (&first.tokens, &[1, 1][..]));
        assert_eq!([first.own_rows(), second.own_rows()], [0..3, 3..5]);
        assert_eq!((first.rows_of_lanes(), &first.places), (vec![3, 2], &known(&[0, 2, 3, 1, 4])));
        let undealt = UndealtRows { tokens: known(&[0, 2, 3, 1, 4]), places: known(&[0, 3, 1, 2, 4]) };
        assert_eq!((&first.undealt, &second.undealt), (&Some(undealt.clone()), &Some(undealt)));
    }

    /// Combines shadowing, lanes and a schedule: each lane's rows are sorted by step, with the rows of the shadowed
    /// expert last.
    #[test]
    fn every_lane_has_steps_of_its_own() {
        let routing = Routing::new((0..12).map(|route| route % 3).collect(), 1, 3);
        let lanes = Lanes { index: 1, count: 2, share: Share::Ordinals, sliced: false };
        let plain = || Plan::new(&routing, ExpertTable::new(&[0, 1, 1], 2), 1);
        let schedules = [Schedule::new(0, 2, 2), Schedule::new(1, 2, 2)];
        let plan = in_steps(deal(shadow(plain(), vec![2]), lanes), &schedules);
        let runs: Vec<_> = plan.runs.iter().map(|run| (run.lane, run.rank, run.step, run.expert)).collect();
        let own = |lane, step| (lane, Some(lane), step, lane);
        let lane = |lane, far| [own(lane, 0), (lane, Some(far), 1, far), own(lane, 2), (lane, None, 0, 2)];
        assert_eq!(runs, [lane(0, 1), lane(1, 0)].concat());
        for (route, &row) in plan.places.known().iter().enumerate() {
            assert_eq!(plan.tokens.known()[row as usize], route as u32);
        }
    }
}
