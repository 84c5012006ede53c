//! Plans: what will be sent, as integers. A plan is made from a routing without looking at a single activation, and
//! can be tested without a communicator.
//!
//! A schedule and shadowing are nothing but another order of the rows: the rows of each step lie together, and after
//! those of the last step lie those that stay, for experts whose weights come here instead.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Request};

use super::{Routing, Schedule};
use crate::parallel::ExpertTable;
use crate::parallel::collectives::RowCounts;

/// In which order rows travel, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub table: ExpertTable,
    pub schedule: Schedule,
    /// Experts whose weights visit every rank of the group, so that their rows need not travel; by owner, then number.
    pub shadowed: Vec<usize>,
}

/// What this rank sends: rows sorted by step, then by expert in the order of the ranks that hold them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub layout: Layout,
    /// The token of every row.
    pub tokens: Vec<u32>,
    /// The row of every route, or `u32::MAX` for a dropped one: the inverse of the sort.
    pub places: Vec<u32>,
    /// Rows for each expert of the whole group.
    pub rows_per_expert: Vec<usize>,
}

/// A plan after the ranks of an expert group have told each other their counts: what will arrive, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPlan {
    pub plan: Plan,
    pub steps: Vec<Step>,
}

/// What travels at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Of the plan's rows.
    pub rows: Range<usize>,
    pub counts: RowCounts,
    /// Rows for each expert of this rank, from all ranks of the step together.
    pub rows_per_local_expert: Vec<usize>,
    /// The received row that comes i-th when rows are sorted by local expert, then by source rank.
    pub by_expert: Vec<u32>,
}

impl Layout {
    /// Equal shares of experts, everything in one step.
    pub fn plain(experts: usize, group: &dyn Communicator) -> Layout {
        let table = ExpertTable::even(experts, group.size());
        Layout { table, schedule: Schedule::new(group.rank(), group.size(), 1), shadowed: Vec::new() }
    }

    fn travels(&self, expert: usize) -> bool {
        !self.shadowed.contains(&expert)
    }

    /// The experts that rows of one step go to, in the order of the rows.
    fn reached(&self, step: usize) -> impl Iterator<Item = usize> {
        let of_rank = |rank| self.table.of(rank).iter().copied().filter(|&expert| self.travels(expert));
        self.schedule.destinations(step).flat_map(of_rank)
    }

    /// All experts, in the order of the rows.
    fn order(&self) -> impl Iterator<Item = usize> {
        let steps = (0..self.schedule.steps()).flat_map(|step| self.reached(step));
        steps.chain(self.shadowed.iter().copied())
    }
}

impl Plan {
    /// A stable counting sort of routes by expert: rows of one expert keep the order of their tokens, so no run and
    /// no number of threads changes it (FastMoE 3.2, whose kernels leave this order to chance).
    pub fn new(routing: &Routing, layout: Layout) -> Plan {
        let rows_per_expert = routing.rows();
        let (mut next, mut start) = (vec![0; rows_per_expert.len()], 0);
        for expert in layout.order() {
            next[expert] = start;
            start += rows_per_expert[expert];
        }
        let mut tokens = vec![0u32; start];
        let place = |(route, &expert): (usize, &u32)| {
            if expert == Routing::DROPPED {
                return u32::MAX;
            }
            let row = next[expert as usize];
            next[expert as usize] += 1;
            tokens[row] = (route / routing.k) as u32;
            row as u32
        };
        let places = routing.expert.iter().enumerate().map(place).collect();
        Plan { layout, tokens, places, rows_per_expert }
    }

    /// Tells every rank of the expert group how many rows to expect. Collective.
    ///
    /// # Errors
    /// What the group reports.
    pub fn exchange(self, group: &Arc<dyn Communicator>) -> Result<ExpertPlan, Error> {
        let (layout, local) = (&self.layout, self.layout.table.of(group.rank()).len());
        let send = (0..group.size()).flat_map(|rank| self.rows_to(rank)).map(|n| n as u64).collect::<Vec<_>>();
        let counts = (0..group.size()).map(|rank| layout.table.of(rank).len()).collect();
        let receive = (vec![0u64; local * group.size()], vec![local; group.size()]);
        let incoming = group.start(Request::all_to_all(send, counts, receive.0, receive.1))?.wait()?.recv.into_u64();
        Ok(self.with_incoming(&incoming))
    }

    /// The rows that travel to each expert of a rank.
    fn rows_to(&self, rank: usize) -> impl Iterator<Item = usize> {
        let rows = |&expert: &usize| if self.layout.travels(expert) { self.rows_per_expert[expert] } else { 0 };
        self.layout.table.of(rank).iter().map(rows)
    }

    /// `incoming[s * L + e]`: rows that rank s sends to local expert e of L.
    fn with_incoming(self, incoming: &[u64]) -> ExpertPlan {
        let mut start = 0;
        let step = |index| {
            let step = self.step(index, start, incoming);
            start = step.rows.end;
            step
        };
        let steps = (0..self.layout.schedule.steps()).map(step).collect();
        ExpertPlan { steps, plan: self }
    }

    fn step(&self, index: usize, start: usize, incoming: &[u64]) -> Step {
        let (ranks, schedule) = (self.layout.table.ranks(), &self.layout.schedule);
        let local = incoming.len() / ranks;
        let destinations = schedule.destinations(index);
        let to = |rank| if destinations.contains(&rank) { self.rows_to(rank).sum() } else { 0 };
        let send: Vec<usize> = (0..ranks).map(to).collect();
        let arrives = |cell: usize| schedule.sources(index).contains(&(cell / local));
        let incoming: Vec<usize> =
            incoming.iter().enumerate().map(|(cell, &n)| if arrives(cell) { n as usize } else { 0 }).collect();
        let receive = incoming.chunks(local).map(|rows| rows.iter().sum()).collect();
        Step {
            rows: start..start + send.iter().sum::<usize>(),
            counts: RowCounts { send, receive },
            rows_per_local_expert: (0..local).map(|e| incoming.iter().skip(e).step_by(local).sum()).collect(),
            by_expert: by_expert(&incoming, local),
        }
    }

    /// The tokens of the rows that stay, and how many of them each shadowed expert gets.
    pub fn staying(&self) -> (&[u32], Vec<usize>) {
        let counts: Vec<usize> = self.layout.shadowed.iter().map(|&expert| self.rows_per_expert[expert]).collect();
        (&self.tokens[self.tokens.len() - counts.iter().sum::<usize>()..], counts)
    }
}

impl ExpertPlan {
    /// Rows from this rank, which is number `rank` of the group, to each rank of the group. Those that stay for a visiting
    /// expert count to itself.
    pub fn sent(&self, rank: usize) -> Vec<usize> {
        let mut rows = vec![0; self.plan.layout.table.ranks()];
        for step in &self.steps {
            rows.iter_mut().zip(&step.counts.send).for_each(|(sum, n)| *sum += n);
        }
        rows[rank] += self.plan.staying().0.len();
        rows
    }
}

impl Step {
    /// Whether rows arrive sorted by expert already: there is one source or one expert.
    pub fn arrives_sorted(&self) -> bool {
        self.by_expert.iter().enumerate().all(|(i, &row)| i as u32 == row)
    }

    /// The place of every received row after sorting: the inverse of `by_expert`.
    pub fn sorted_places(&self) -> Vec<u32> {
        let mut places = vec![0; self.by_expert.len()];
        for (place, &row) in self.by_expert.iter().enumerate() {
            places[row as usize] = place as u32;
        }
        places
    }
}

/// Rows arrive by source rank, then expert; experts want them by expert, then source rank (FastMoE's layout).
fn by_expert(incoming: &[usize], local: usize) -> Vec<u32> {
    let starts: Vec<usize> =
        incoming.iter().scan(0, |start, &rows| Some(std::mem::replace(start, *start + rows))).collect();
    let mut order = Vec::with_capacity(incoming.iter().sum());
    for expert in 0..local {
        for cell in (expert..incoming.len()).step_by(local) {
            order.extend((starts[cell]..starts[cell] + incoming[cell]).map(|row| row as u32));
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(table: ExpertTable, rank: usize, groups: usize, shadowed: &[usize]) -> Layout {
        let schedule = Schedule::new(rank, table.ranks(), groups);
        Layout { table, schedule, shadowed: shadowed.to_vec() }
    }

    #[test]
    fn routes_are_sorted_by_expert_in_token_order() {
        let routing = Routing::new(vec![2, 0, 2, Routing::DROPPED, 0, 2], 2, 3);
        let plan = Plan::new(&routing, layout(ExpertTable::even(3, 1), 0, 1, &[]));
        assert_eq!(plan.rows_per_expert, [2, 0, 3]);
        assert_eq!(plan.tokens, [0, 2, 0, 1, 2]);
        assert_eq!(plan.places, [2, 0, 3, u32::MAX, 1, 4]);
    }

    #[test]
    fn received_rows_are_sorted_by_expert_then_source() {
        let routing = Routing::new(vec![0, 1], 1, 4);
        let plan = Plan::new(&routing, layout(ExpertTable::even(4, 2), 0, 1, &[]));
        // Rank 0 sends 2 rows to expert 0 and 1 to expert 1; rank 1 sends 1 and 2.
        let plan = plan.with_incoming(&[2, 1, 1, 2]);
        let step = &plan.steps[0];
        assert_eq!(step.counts, RowCounts { send: vec![2, 0], receive: vec![3, 3] });
        assert_eq!(step.rows_per_local_expert, [3, 3]);
        assert_eq!(step.by_expert, [0, 1, 3, 2, 4, 5]);
        assert_eq!(step.sorted_places(), [0, 1, 3, 2, 4, 5]);
        assert!(!step.arrives_sorted());
    }

    /// Rank 1 of two, in two steps: its own expert first, then the other rank's; the shadowed last.
    #[test]
    fn steps_and_shadows_are_an_order_of_rows() {
        let table = ExpertTable::new(&[1, 0, 0], 2);
        let routing = Routing::new(vec![0, 1, 2, 0], 1, 3);
        let plan = Plan::new(&routing, layout(table.clone(), 1, 2, &[2]));
        assert_eq!(plan.tokens, [0, 3, 1, 2]);
        assert_eq!(plan.staying(), (&[2u32][..], vec![1]));
        let plan = plan.with_incoming(&[7, 2]);
        assert_eq!(plan.steps[0].rows, 0..2);
        assert_eq!(plan.steps[0].counts, RowCounts { send: vec![0, 2], receive: vec![0, 2] });
        assert_eq!(plan.steps[1].rows, 2..3);
        assert_eq!(plan.steps[1].counts, RowCounts { send: vec![1, 0], receive: vec![7, 0] });
        assert_eq!(plan.steps[1].rows_per_local_expert, [7]);
        assert_eq!(plan.sent(1), [1, 3], "to itself also the row that stays");
    }
}
