//! Rows on their way to experts and back, and experts that visit other ranks, of sizes: as `src/moe/transport.rs` has it.

use guildhall_comm::Collective;

use super::books::{Part, When};
use super::layout::{Load, Task};
use super::moe::Moe;
use super::moves::{Group, RowCounts, Stream, Underway, start_all_to_all, start_gather_parts};
use super::tape::Tape;
use super::var::Var;
use crate::moe::Shadowing;
use crate::parallel::{Axis, ExpertTable};

/// The experts of a layer: which rank of a group holds each, and which visit every rank.
pub(super) struct Holders {
    pub(super) table: ExpertTable,
    /// The first ones: under an even load no expert is hotter than another.
    pub(super) visiting: usize,
}

impl Holders {
    /// Experts of a rank whose rows travel.
    pub(super) fn reached(&self, rank: usize) -> u64 {
        self.table.of(rank).iter().filter(|&&expert| expert >= self.visiting).count() as u64
    }

    fn visiting_from(&self, rank: usize) -> u64 {
        self.table.of(rank).len() as u64 - self.reached(rank)
    }
}

impl Moe {
    /// Rows sorted by expert, there and back.
    pub(super) fn through_experts(
        &self,
        x: &Var,
        weights: &[Var],
        task: &Task,
        (load, index, routes): (&Load, usize, u64),
    ) -> Var {
        let [group, slices] = [Axis::Expert(self.degree), Axis::ExpertTensor].map(|axis| task.group(axis, self.rank));
        let tensor = task.group(Axis::Tensor, self.rank);
        let shares = task.layout.shares_rows() && !task.layout.sequence;
        let gathers = (shares || task.layout.sequence) && slices.size > 1;
        let holders = Holders {
            table: task.layout.expert_table(self.config.experts, self.degree),
            // Whether an expert is worth a visit is not known before rows are: none is planned.
            visiting: match self.config.shadowing() {
                Shadowing::Force(n) => n.min(self.config.experts),
                Shadowing::Off | Shadowing::Auto => 0,
            },
        };
        let own_routes = if shares { tensor.share(routes) } else { routes };
        let rows = load.rows(index, own_routes, (group, &holders));
        let stay = if holders.visiting == 0 { 0 } else { own_routes.saturating_sub(rows.sent()) };
        self.tell_counts(&x.tape, &holders, (group, slices, gathers));
        let groups = self.config.schedule_groups(group.size as usize);
        let schedule = Task::schedule(groups, group);
        let step = |step| rows.between(&schedule.destinations(step), &schedule.sources(step));
        let steps: Vec<RowCounts> = (0..groups).map(step).collect();
        let own = if shares { x.gather_rows_in_part((rows.sent() + stay, routes), tensor) } else { x.clone() };
        let start = |counts: &RowCounts| start_all_to_all(own.gather_rows(counts.sent()), counts, group);
        let arriving: Vec<Underway> = steps.iter().map(start).collect();
        let visitors = start_visits(weights, &holders, group);
        let books = x.tape.books();
        let through = |rows: Var, weights: &[Var], sorted| {
            books.part.set(Part::Experts);
            let tokens = rows.rows() * if gathers { slices.size } else { 1 };
            let rows = self.in_slices(rows, weights, sorted, &Stream { tokens, group: slices, split: gathers });
            books.part.set(Part::Routing);
            rows
        };
        // Rows come sorted from one source, and for one expert.
        let local = holders.table.of(group.index as usize).len();
        let sorted = !gathers && (local == 1 || group.size as usize / groups == 1);
        let back = |(arriving, counts): (Underway, &RowCounts)| {
            start_all_to_all(through(arriving.finish(), weights, sorted), &counts.swapped(), group)
        };
        let returning: Vec<Underway> = arriving.into_iter().zip(&steps).map(back).collect();
        let stayed = (!visitors.is_empty()).then(|| {
            let visitors: Vec<Var> = visitors.into_iter().map(Underway::finish).collect();
            through(own.gather_rows(stay), &visitors, !gathers)
        });
        let mut home: Vec<Var> = returning.into_iter().map(Underway::finish).chain(stayed).collect();
        let home = if home.len() == 1 { home.remove(0) } else { Var::concat_rows(home) };
        Stream { tokens: routes, group: tensor, split: shares }.whole_of(&home)
    }

    /// How many rows everyone is to expect: what has been routed is not told again.
    fn tell_counts(&self, tape: &Tape, holders: &Holders, (group, slices, gathers): (Group, Group, bool)) {
        if tape.is_again() {
            return;
        }
        let (books, experts) = (tape.books(), self.config.experts as u64);
        if self.config.shadowing() != Shadowing::Off {
            group.all_gather(books, experts * 8);
        }
        let local = holders.table.of(group.index as usize).len() as u64;
        books.send(group.axis, Collective::AllToAll, When::Now, (experts - local) * 8);
        if gathers {
            slices.all_gather(books, (local * group.size + holders.visiting as u64) * 8);
        }
    }

    fn in_slices(&self, rows: Var, weights: &[Var], sorted: bool, stream: &Stream) -> Var {
        let order = |rows: Var| {
            let count = rows.rows();
            if sorted { rows } else { rows.gather_rows(count) }
        };
        let apply = |rows: Var| order(self.experts.apply(weights, &order(rows)));
        match stream.group.size {
            1 => apply(rows),
            _ => {
                let parts = stream.parts_of(&rows);
                drop(rows);
                stream.sum_of_parts(apply(parts))
            }
        }
    }
}

/// The weights of visiting experts, on their way from their owners to every rank of the group.
fn start_visits(weights: &[Var], holders: &Holders, group: Group) -> Vec<Underway> {
    if holders.visiting == 0 {
        return Vec::new();
    }
    let own = holders.visiting_from(group.index as usize);
    let local = holders.table.of(group.index as usize).len() as u64;
    let start = |weight: &Var| {
        let (rows, cols) = weight.size();
        let of = |experts: u64| (experts * (rows / local), cols);
        start_gather_parts(weight, (of(own), of(holders.visiting as u64)), group)
    };
    weights.iter().map(start).collect()
}
