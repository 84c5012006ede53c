//! Plans: what will be sent, as integers. A plan is made from a routing without looking at a single activation, and
//! can be tested without a communicator.
//!
//! A schedule and shadowing are nothing but another order of the rows: the rows of each step lie together, and after
//! those of the last step lie those that stay, for experts whose weights come here instead.

use std::ops::Range;

use guildhall_comm::{Communicator, Error, Request};
use guildhall_tensor::Indices;

use super::{Lanes, Routing, Schedule, Sorting};
use crate::parallel::collectives::RowCounts;
use crate::parallel::{ExpertTable, Mesh};

/// In which order rows travel, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub table: ExpertTable,
    pub schedule: Schedule,
    /// Experts whose weights visit every rank of the group, so that their rows need not travel; by owner, then number.
    pub shadowed: Vec<usize>,
    pub lanes: Lanes,
    /// The schedule of each lane, where lanes share routes: those of whole experts are different ranks of one expert group.
    pub lane_schedules: Vec<Schedule>,
}

/// What this rank sends: rows sorted by step, then by expert in the order of the ranks that hold them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub layout: Layout,
    /// The token of every row.
    pub tokens: Indices,
    /// The row of every route, or `u32::MAX` for a dropped one: the inverse of the sort. Rows are counted over all lanes
    /// that share the routes, lane after lane.
    pub places: Indices,
    /// Rows for each expert of the whole group.
    pub rows_per_expert: Vec<usize>,
    /// Rows of each lane that shares the routes.
    pub home: Vec<usize>,
    /// Where lanes share the routes: the rows of all of them as one lane alone would have them.
    pub shared: Option<SharedRows>,
}

/// The rows that lanes share, in the order of a plan that has one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRows {
    pub tokens: Indices,
    /// The row's place when rows lie lane after lane.
    pub places: Indices,
}

/// A plan after the ranks of an expert group have told each other their counts: what will arrive, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPlan {
    pub plan: Plan,
    pub steps: Vec<Step>,
    /// Of the rows that stay, by shadowed expert.
    pub staying: Sorting,
}

/// What travels at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Of the plan's rows.
    pub rows: Range<usize>,
    pub counts: RowCounts,
    /// Of what arrives, by expert of this rank.
    pub sorting: Sorting,
}

impl Layout {
    /// Equal shares of experts, everything in one step.
    pub fn plain(experts: usize, group: &dyn Communicator) -> Layout {
        let table = ExpertTable::even(experts, group.size());
        Layout {
            table,
            schedule: Schedule::new(group.rank(), group.size(), 1),
            shadowed: Vec::new(),
            lanes: Lanes::ALONE,
            lane_schedules: Vec::new(),
        }
    }

    fn travels(&self, expert: usize) -> bool {
        !self.shadowed.contains(&expert)
    }

    /// The experts that rows of one step go to, in the order of the rows.
    fn reached(&self, schedule: Schedule, step: usize) -> impl Iterator<Item = usize> {
        let of_rank = |rank| self.table.of(rank).iter().copied().filter(|&expert| self.travels(expert));
        schedule.destinations(step).flat_map(of_rank)
    }

    /// All experts, in the order of the rows of one lane of those that share the routes.
    fn order(&self, lane: usize) -> impl Iterator<Item = usize> {
        let schedule = self.schedule_of(lane);
        let steps = (0..schedule.steps()).flat_map(move |step| self.reached(schedule, step));
        steps.chain(self.shadowed.iter().copied())
    }

    fn schedule_of(&self, lane: usize) -> Schedule {
        if self.lanes.sharing() > 1 { self.lane_schedules[lane] } else { self.schedule }
    }
}

impl Plan {
    /// A stable counting sort of routes by expert: rows of one expert keep the order of their tokens, so no run and
    /// no number of threads changes it (FastMoE 3.2, whose kernels leave this order to chance). Of routes that lanes
    /// share, this rank sends its own.
    pub fn new(routing: &Routing, layout: Layout) -> Plan {
        let (routes, lanes) = (routing.rows(), layout.lanes);
        let own = lanes.own();
        let (mut starts, mut home, mut end) = (Vec::new(), Vec::new(), 0);
        for lane in 0..lanes.sharing() {
            let (mut of_expert, begin) = (vec![0; routes.len()], end);
            for expert in layout.order(lane) {
                of_expert[expert] = end;
                end += lanes.of(routes[expert], lane);
            }
            starts.push(of_expert);
            home.push(end - begin);
        }
        let rows_per_expert = routes.iter().map(|&routes| lanes.of(routes, own)).collect();
        if routing.counted.is_some() {
            let all = Indices::Counted(home.iter().sum());
            let shared = (lanes.sharing() > 1).then(|| SharedRows { tokens: all.clone(), places: all });
            let (tokens, places) = (Indices::Counted(home[own]), Indices::Counted(routing.tokens() * routing.k));
            return Plan { layout, tokens, places, rows_per_expert, home, shared };
        }
        let first: usize = home[..own].iter().sum();
        let (mut tokens, mut seen) = (vec![0u32; home[own]], vec![0; routes.len()]);
        let place = |(route, &expert): (usize, &u32)| {
            if expert == Routing::DROPPED {
                return u32::MAX;
            }
            let expert = expert as usize;
            let (ordinal, lane) = (seen[expert], seen[expert] % lanes.sharing());
            seen[expert] += 1;
            let row = starts[lane][expert] + ordinal / lanes.sharing();
            if lane == own {
                tokens[row - first] = (route / routing.k) as u32;
            }
            row as u32
        };
        let places: Vec<u32> = routing.expert.iter().enumerate().map(place).collect();
        // On all lanes the same, as are the gradients that are added up in this order.
        let alone =
            || Plan::new(routing, Layout { lanes: Lanes::ALONE, schedule: layout.schedule_of(0), ..layout.clone() });
        let shared = (lanes.sharing() > 1).then(|| SharedRows::new(alone(), &places));
        let (tokens, places) = (Indices::Known(tokens), Indices::Known(places));
        Plan { layout, tokens, places, rows_per_expert, home, shared }
    }

    /// Tells every rank of the expert group how many rows to expect, and where rows are gathered over slices every slice
    /// how many each has. Collective.
    ///
    /// # Errors
    /// What a group reports.
    pub fn exchange(self, mesh: &Mesh) -> Result<ExpertPlan, Error> {
        let group = &mesh.expert;
        let (layout, local) = (&self.layout, self.layout.table.of(group.rank()).len());
        let send = (0..group.size()).flat_map(|rank| self.rows_to(rank)).map(|n| n as u64).collect::<Vec<_>>();
        let counts = (0..group.size()).map(|rank| layout.table.of(rank).len()).collect();
        let receive = (vec![0u64; local * group.size()], vec![local; group.size()]);
        let incoming = group.start(Request::all_to_all(send, counts, receive.0, receive.1))?.wait()?.recv.into_u64();
        let mut own: Vec<u64> = incoming;
        own.extend(self.staying().into_iter().map(|n| n as u64));
        let cells = own.len().max(1);
        let all = if layout.lanes.gathers() { mesh.expert_tensor.all_gather_u64(&own)? } else { own };
        let lanes: Vec<Vec<usize>> = all.chunks(cells).map(|lane| lane.iter().map(|&n| n as usize).collect()).collect();
        Ok(self.with_incoming(&lanes, mesh.expert_tensor.rank()))
    }

    /// The rows that travel to each expert of a rank.
    fn rows_to(&self, rank: usize) -> impl Iterator<Item = usize> {
        let rows = |&expert: &usize| if self.layout.travels(expert) { self.rows_per_expert[expert] } else { 0 };
        self.layout.table.of(rank).iter().map(rows)
    }

    /// `lanes[t][s * L + e]`: rows that rank s sends to local expert e of L in lane t; after them, for each shadowed
    /// expert, the rows that stay in lane t. Without a gather there is one lane, this rank's.
    fn with_incoming(self, lanes: &[Vec<usize>], rank: usize) -> ExpertPlan {
        let own = if lanes.len() == 1 { 0 } else { rank };
        let stay = self.layout.shadowed.len();
        let (mut start, cells) = (0, lanes[0].len() - stay);
        let step = |index| {
            let step = self.step(index, start, (lanes, own, cells));
            start = step.rows.end;
            step
        };
        let steps = (0..self.layout.schedule.steps()).map(step).collect();
        let staying = match stay {
            0 => Sorting::default(),
            _ => {
                let lanes: Vec<Vec<usize>> = lanes.iter().map(|lane| lane[cells..].to_vec()).collect();
                self.sorting(&lanes, stay)
            }
        };
        ExpertPlan { steps, staying, plan: self }
    }

    fn step(&self, index: usize, start: usize, (lanes, own, cells): (&[Vec<usize>], usize, usize)) -> Step {
        let (ranks, schedule) = (self.layout.table.ranks(), &self.layout.schedule);
        let local = cells / ranks;
        let destinations = schedule.destinations(index);
        let to = |rank| if destinations.contains(&rank) { self.rows_to(rank).sum() } else { 0 };
        let send: Vec<usize> = (0..ranks).map(to).collect();
        let arrives = |cell: usize| schedule.sources(index).contains(&(cell / local));
        let of_step = |lane: &Vec<usize>| {
            lane[..cells].iter().enumerate().map(|(cell, &n)| if arrives(cell) { n } else { 0 }).collect()
        };
        let incoming: Vec<Vec<usize>> = lanes.iter().map(of_step).collect();
        let receive = incoming[own].chunks(local).map(|rows| rows.iter().sum()).collect();
        Step {
            rows: start..start + send.iter().sum::<usize>(),
            counts: RowCounts { send, receive },
            sorting: self.sorting(&incoming, local),
        }
    }

    fn sorting(&self, cells: &[Vec<usize>], experts: usize) -> Sorting {
        match self.tokens {
            Indices::Counted(_) => Sorting::counted(cells, experts),
            _ => Sorting::new(cells, experts, self.layout.lanes.share),
        }
    }

    /// How many of the rows that stay each shadowed expert gets. These rows are the last.
    pub fn staying(&self) -> Vec<usize> {
        self.layout.shadowed.iter().map(|&expert| self.rows_per_expert[expert]).collect()
    }
}

impl SharedRows {
    /// `alone` is the plan of the same routes in one lane, `home` the place of every route's row among all lanes.
    fn new(alone: Plan, home: &[u32]) -> SharedRows {
        let (mut places, Indices::Known(rows)) = (vec![0; alone.tokens.len()], alone.places) else {
            panic!("known routes have known places");
        };
        for (&row, &place) in rows.iter().zip(home).filter(|(row, _)| **row != u32::MAX) {
            places[row as usize] = place;
        }
        SharedRows { tokens: alone.tokens, places: Indices::Known(places) }
    }
}

impl ExpertPlan {
    /// The rows of the plan that stay.
    pub fn stay(&self) -> Range<usize> {
        let rows = self.plan.tokens.len();
        rows - self.plan.staying().iter().sum::<usize>()..rows
    }

    /// Rows from this rank, which is number `rank` of the group, to each rank of the group. Those that stay for a visiting
    /// expert count to itself.
    pub fn sent(&self, rank: usize) -> Vec<usize> {
        let mut rows = vec![0; self.plan.layout.table.ranks()];
        for step in &self.steps {
            rows.iter_mut().zip(&step.counts.send).for_each(|(sum, n)| *sum += n);
        }
        rows[rank] += self.stay().len();
        rows
    }

    /// Rows that came to this rank's experts.
    pub fn received(&self) -> usize {
        self.steps.iter().flat_map(|step| &step.counts.receive).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Share;
    use super::*;

    fn layout(table: ExpertTable, rank: usize, groups: usize, shadowed: &[usize]) -> Layout {
        let schedule = Schedule::new(rank, table.ranks(), groups);
        let (lanes, lane_schedules) = (Lanes::ALONE, vec![schedule; 2]);
        Layout { table, schedule, shadowed: shadowed.to_vec(), lanes, lane_schedules }
    }

    #[test]
    fn routes_are_sorted_by_expert_in_token_order() {
        let routing = Routing::new(vec![2, 0, 2, Routing::DROPPED, 0, 2], 2, 3);
        let plan = Plan::new(&routing, layout(ExpertTable::even(3, 1), 0, 1, &[]));
        assert_eq!(plan.rows_per_expert, [2, 0, 3]);
        assert_eq!(plan.tokens, Indices::Known(vec![0, 2, 0, 1, 2]));
        assert_eq!(plan.places, Indices::Known(vec![2, 0, 3, u32::MAX, 1, 4]));
    }

    /// Rank 1 of two, in two steps: its own expert first, then the other rank's; the shadowed last.
    #[test]
    fn steps_and_shadows_are_an_order_of_rows() {
        let table = ExpertTable::new(&[1, 0, 0], 2);
        let routing = Routing::new(vec![0, 1, 2, 0], 1, 3);
        let plan = Plan::new(&routing, layout(table.clone(), 1, 2, &[2]));
        assert_eq!(plan.tokens, Indices::Known(vec![0, 3, 1, 2]));
        assert_eq!(plan.staying(), [1]);
        let plan = plan.with_incoming(&[vec![7, 2, 1]], 0);
        assert_eq!(plan.steps[0].rows, 0..2);
        assert_eq!(plan.steps[0].counts, RowCounts { send: vec![0, 2], receive: vec![0, 2] });
        assert_eq!(plan.steps[1].rows, 2..3);
        assert_eq!(plan.steps[1].counts, RowCounts { send: vec![1, 0], receive: vec![7, 0] });
        assert_eq!(plan.steps[1].sorting.rows_per_expert, [7]);
        assert_eq!(plan.sent(1), [1, 3], "to itself also the row that stays");
    }

    /// Two lanes share the routes of five tokens: three for expert 0, of which one lane sends the second, two for 1.
    #[test]
    fn lanes_that_share_routes_send_each_once() {
        let routing = Routing::new(vec![0, 1, 0, 0, 1], 1, 2);
        let plan = |index| {
            let lanes = Lanes { index, count: 2, share: Share::Ordinals, sliced: false };
            Plan::new(&routing, Layout { lanes, ..layout(ExpertTable::even(2, 1), 0, 1, &[]) })
        };
        let [first, second] = [plan(0), plan(1)];
        let known = |numbers: &[u32]| Indices::Known(numbers.to_vec());
        assert_eq!((&first.tokens, &first.rows_per_expert[..]), (&known(&[0, 3, 1]), &[2, 1][..]));
        assert_eq!((&second.tokens, &second.rows_per_expert[..]), (&known(&[2, 4]), &[1, 1][..]));
        assert_eq!((&first.home[..], &first.places), (&[3, 2][..], &known(&[0, 2, 3, 1, 4])));
        assert_eq!((&second.home, &second.places), (&first.home, &first.places));
        let shared = SharedRows { tokens: known(&[0, 2, 3, 1, 4]), places: known(&[0, 3, 1, 2, 4]) };
        assert_eq!(first.shared, Some(shared));
    }
}
