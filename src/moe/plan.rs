//! Plans: what will be sent, as integers. A plan is made from a routing without looking at a single activation, and
//! can be tested without a communicator.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};

use super::Routing;
use crate::parallel::collectives::RowCounts;

/// What this rank sends: rows sorted by expert, hence by the rank that holds the expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The token of every row sent.
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
    pub counts: RowCounts,
    /// Rows for each expert of this rank, from all ranks together.
    pub rows_per_local_expert: Vec<usize>,
    /// The received row that comes i-th when rows are sorted by local expert, then by source rank.
    pub by_expert: Vec<u32>,
}

impl Plan {
    /// A stable counting sort of routes by expert: rows of one expert keep the order of their tokens, so no run and
    /// no number of threads changes it (FastMoE 3.2, whose kernels leave this order to chance).
    pub fn new(routing: &Routing) -> Plan {
        let mut rows_per_expert = vec![0usize; routing.experts];
        for &expert in routing.expert.iter().filter(|&&e| e != Routing::DROPPED) {
            rows_per_expert[expert as usize] += 1;
        }
        let mut next: Vec<usize> =
            rows_per_expert.iter().scan(0, |start, &rows| Some(std::mem::replace(start, *start + rows))).collect();
        let mut tokens = vec![0u32; rows_per_expert.iter().sum()];
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
        Plan { tokens, places, rows_per_expert }
    }

    /// Tells every rank of the expert group how many rows to expect. Collective.
    ///
    /// # Errors
    /// What the group reports.
    pub fn exchange(self, group: &Arc<dyn Communicator>) -> Result<ExpertPlan, Error> {
        let outgoing: Vec<u64> = self.rows_per_expert.iter().map(|&n| n as u64).collect();
        let incoming = group.all_to_all_u64(&outgoing)?;
        Ok(self.with_incoming(&incoming, group.size()))
    }

    /// `incoming[s * L + e]`: rows that rank s sends to local expert e of L.
    fn with_incoming(self, incoming: &[u64], ranks: usize) -> ExpertPlan {
        let local = incoming.len() / ranks;
        let per_rank = |rows: &[usize]| rows.chunks(local).map(|rows| rows.iter().sum()).collect();
        let incoming: Vec<usize> = incoming.iter().map(|&n| n as usize).collect();
        let counts = RowCounts { send: per_rank(&self.rows_per_expert), receive: per_rank(&incoming) };
        let rows_per_local_expert = (0..local).map(|e| incoming.iter().skip(e).step_by(local).sum()).collect();
        ExpertPlan { counts, rows_per_local_expert, by_expert: by_expert(&incoming, local), plan: self }
    }
}

impl ExpertPlan {
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

    #[test]
    fn routes_are_sorted_by_expert_in_token_order() {
        let routing = Routing::new(vec![2, 0, 2, Routing::DROPPED, 0, 2], 2, 3);
        let plan = Plan::new(&routing);
        assert_eq!(plan.rows_per_expert, [2, 0, 3]);
        assert_eq!(plan.tokens, [0, 2, 0, 1, 2]);
        assert_eq!(plan.places, [2, 0, 3, u32::MAX, 1, 4]);
    }

    #[test]
    fn received_rows_are_sorted_by_expert_then_source() {
        let routing = Routing::new(vec![0, 1], 1, 4);
        // Rank 0 sends 2 rows to expert 0 and 1 to expert 1; rank 1 sends 1 and 2.
        let plan = Plan::new(&routing).with_incoming(&[2, 1, 1, 2], 2);
        assert_eq!(plan.counts, RowCounts { send: vec![2, 0], receive: vec![3, 3] });
        assert_eq!(plan.rows_per_local_expert, [3, 3]);
        assert_eq!(plan.by_expert, [0, 1, 3, 2, 4, 5]);
        assert_eq!(plan.sorted_places(), [0, 1, 3, 2, 4, 5]);
        assert!(!plan.arrives_sorted());
    }
}
