//! The exchange of counts: an all-to-all over the expert group, after which every rank knows how many rows it will
//! receive.

use std::ops::Range;

use guildhall_comm::Error;
use guildhall_tensor::Indices;

use super::carrying::Carrying;
use super::deliveries::{Deliveries, Delivery};
use super::schedule::first_half;
use super::{CondensedCounts, Plan, SentRoutes, Sorting, Step};
use crate::parallel::collectives::RowCounts;
use crate::parallel::{Mesh, Migration};

/// A plan after the exchange of counts: with the rows that this rank receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPlan {
    pub plan: Plan,
    pub steps: Vec<Step>,
    /// How the rows that stay on this rank are sorted by shadowed expert.
    pub staying: Sorting,
    /// Present if results are not returned to the ranks that sent the rows (migration).
    pub deliveries: Option<Deliveries>,
}

impl Plan {
    /// Exchanges the row counts over the expert group, if any expert's rows travel. If the slices of an expert
    /// all-gather their rows, also exchanges the counts over the slices. Collective.
    ///
    /// # Errors
    /// Any error of a group's communicator.
    pub fn exchange(self, mesh: &Mesh) -> Result<ExpertPlan, Error> {
        let (group, table) = (&mesh.expert, &self.table);
        let local = table.of(group.rank()).len();
        let mut travel = vec![0u64; table.experts()];
        self.own_runs().filter(|run| run.rank.is_some()).for_each(|run| travel[run.expert] += run.rows as u64);
        let send = (0..group.size()).flat_map(|rank| table.of(rank)).map(|&expert| travel[expert]).collect::<Vec<_>>();
        let counts = (0..group.size()).map(|rank| table.of(rank).len()).collect();
        let receive = (vec![0u64; local * group.size()], vec![local; group.size()]);
        let mut own = match self.steps() {
            0 => receive.0,
            _ => group.all_to_all(send, counts, receive.0, receive.1)?.recv.into_u64(),
        };
        own.extend(self.staying().into_iter().map(|n| n as u64));
        let cells = own.len().max(1);
        let all = if self.lanes.gathers() { mesh.expert_tensor.all_gather_u64(&own)? } else { own };
        let lanes: Vec<Vec<usize>> = all.chunks(cells).map(|lane| lane.iter().map(|&n| n as usize).collect()).collect();
        Ok(self.with_incoming(&lanes, mesh.expert_tensor.rank()))
    }

    /// `lanes[t][s * L + e]` is the number of rows that rank s sends to local expert e of L in lane t. After these
    /// come, for each shadowed expert, the number of rows that stay in lane t. Without a gather there is one lane, this
    /// rank's.
    fn with_incoming(self, lanes: &[Vec<usize>], rank: usize) -> ExpertPlan {
        let own = if lanes.len() == 1 { 0 } else { rank };
        let stay = self.shadowed.len();
        let cells = lanes[0].len() - stay;
        let mut send = vec![vec![0; self.table.ranks()]; self.steps()];
        self.own_runs().filter_map(|run| Some((run, run.rank?))).for_each(|(run, to)| send[run.step][to] += run.rows);
        let mut start = 0;
        let step = |(index, send): (usize, Vec<usize>)| {
            let rows = start..start + send.iter().sum::<usize>();
            start = rows.end;
            let (receive, sorting) = self.arriving(index, (lanes, own, cells));
            Step { rows, counts: RowCounts { send, receive }, sorting }
        };
        let steps = send.into_iter().enumerate().map(step).collect();
        let staying = match stay {
            0 => Sorting::default(),
            _ => self.sorting(&lanes.iter().map(|lane| lane[cells..].to_vec()).collect::<Vec<_>>(), stay),
        };
        ExpertPlan { steps, staying, plan: self, deliveries: None }
    }

    /// For one step: the number of rows received from each rank, and how they are sorted by expert.
    fn arriving(&self, step: usize, (lanes, own, cells): (&[Vec<usize>], usize, usize)) -> (Vec<usize>, Sorting) {
        let local = cells / self.table.ranks();
        let of_source = |(source, rows): (usize, &[usize])| {
            let (steps, first) = (self.schedule.steps_from(source), first_half(rows));
            match [steps[0] == step, steps[1] == step] {
                [true, true] => rows.to_vec(),
                [true, false] => first,
                [false, true] => rows.iter().zip(first).map(|(rows, first)| rows - first).collect(),
                [false, false] => vec![0; rows.len()],
            }
        };
        let of_lane = |lane: &Vec<usize>| lane[..cells].chunks(local.max(1)).enumerate().flat_map(of_source).collect();
        let incoming: Vec<Vec<usize>> = lanes.iter().map(of_lane).collect();
        let receive = incoming[own].chunks(local).map(|rows| rows.iter().sum()).collect();
        (receive, self.sorting(&incoming, local))
    }

    fn sorting(&self, cells: &[Vec<usize>], experts: usize) -> Sorting {
        match self.tokens {
            Indices::Counted(_) => Sorting::counted(cells, experts),
            _ => Sorting::new(cells, experts, self.lanes.share),
        }
    }
}

impl ExpertPlan {
    /// Adds the deliveries of results to the ranks to which `migration` carries their tokens. If `carries`, results carry
    /// the residual stream. Collective over the expert group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn delivering(self, migration: &Migration, carries: bool) -> Result<ExpertPlan, Error> {
        let deliveries = Deliveries::new(&self.plan, (&self.steps, self.stay()), migration, carries)?;
        Ok(ExpertPlan { deliveries: Some(deliveries), ..self })
    }

    /// The range, within the rows that this rank sends or keeps, of those that it keeps.
    pub fn stay(&self) -> Range<usize> {
        let rows = self.plan.own_rows().len();
        let kept: usize = self.plan.own_runs().filter(|run| run.rank.is_none()).map(|run| run.rows).sum();
        rows - kept..rows
    }

    /// For each rank of the group, the number of rows that this rank sends to it. `rank` is this rank's index in the
    /// group; rows that stay for shadowed experts count as sent to itself.
    pub fn sent(&self, rank: usize) -> Vec<usize> {
        let mut rows = vec![0; self.plan.table.ranks()];
        for step in &self.steps {
            rows.iter_mut().zip(&step.counts.send).for_each(|(sum, n)| *sum += n);
        }
        rows[rank] += self.stay().len();
        rows
    }

    /// What condensation saves of `routes`; `ranks` are those of the lanes in their expert groups. `None` if the layer does
    /// not condense.
    pub fn condensed(&self, routes: SentRoutes, ranks: &[usize]) -> Option<CondensedCounts> {
        let (condensed, Plan { table, lanes, shadowed, .. }) = (routes.condensed?, &self.plan);
        let mut counts = CondensedCounts { pairs: condensed.pairs, ..CondensedCounts::default() };
        for (expert, (all, left)) in routes.routing.rows().into_iter().zip(routes.rows()).enumerate() {
            // Of an expert's rows, those that are dealt to lanes on other ranks.
            let travel = |rows: usize| -> u64 {
                let away = |lane: &usize| !table.of(ranks[*lane]).contains(&expert) && !shadowed.contains(&expert);
                (0..lanes.sharing()).filter(away).map(|lane| lanes.of(rows, lane) as u64).sum()
            };
            counts.routes += all as u64;
            counts.uncomputed += (all - left) as u64;
            counts.travelling += travel(all);
            counts.unsent += travel(all) - travel(left);
        }
        Some(counts)
    }

    /// How the results of a step are delivered, if not to the ranks that sent the rows.
    pub fn delivery(&self, step: usize) -> Option<&Delivery> {
        self.deliveries.as_ref().map(|deliveries| &deliveries.steps[step])
    }

    /// Which results carry the residual stream, if any may.
    pub fn carrying(&self) -> Option<&Carrying> {
        self.deliveries.as_ref()?.carrying.as_ref()
    }

    /// For each lane, the number of result rows that are summed on this rank.
    pub fn rows_of_lanes(&self) -> Vec<usize> {
        self.deliveries.as_ref().map_or_else(|| self.plan.rows_of_lanes(), |to| to.rows_of_lanes.clone())
    }

    /// For each route whose result is summed on this rank, its row among those of all lanes.
    pub fn places(&self) -> &Indices {
        self.deliveries.as_ref().map_or(&self.plan.places, |to| &to.places)
    }

    /// The number of rows that this rank's experts received from ranks of the group.
    pub fn received(&self) -> usize {
        self.steps.iter().flat_map(|step| &step.counts.receive).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::rewrites::{schedule::in_steps, shadowing::shadow};
    use super::super::{Routing, Schedule};
    use super::*;
    use crate::parallel::ExpertTable;

    /// Rank 1 of two, in three steps: a row for its own expert, those for the other rank's, another for its own; the rows
    /// of the shadowed expert last.
    #[test]
    fn steps_and_shadows_are_an_order_of_rows() {
        let routing = Routing::new(vec![0, 1, 2, 0], 1, 3);
        let plan = shadow(Plan::new(&routing, ExpertTable::new(&[1, 0, 0], 2), 1), vec![2]);
        let plan = in_steps(plan, &[Schedule::new(1, 2, 2)]);
        assert_eq!(plan.tokens, Indices::Known(vec![0, 1, 3, 2]));
        assert_eq!(plan.staying(), [1]);
        let plan = plan.with_incoming(&[vec![7, 2, 1]], 0);
        for (step, rows) in [(0, 0..1), (2, 2..3)] {
            assert_eq!(plan.steps[step].rows, rows);
            assert_eq!(plan.steps[step].counts, RowCounts { send: vec![0, 1], receive: vec![0, 1] });
        }
        assert_eq!(plan.steps[1].rows, 1..2);
        assert_eq!(plan.steps[1].counts, RowCounts { send: vec![1, 0], receive: vec![7, 0] });
        assert_eq!(plan.steps[1].sorting.rows_per_expert, [7]);
        assert_eq!(plan.sent(1), [1, 3], "to itself also the row that stays");
    }
}
