//! Clusters with something wrong: in the choice of the row, or in what is made of it.

use std::sync::Arc;

use guildhall_tensor::Indices;

use crate::moe::Plan;
use crate::moe::condensation::{ClusterPolicy, ComparedRoutes};

/// A policy whose members are given the representative of another cluster of their set, where there is one.
#[derive(Debug)]
pub(super) struct Astray(pub(super) Arc<dyn ClusterPolicy>);

impl ClusterPolicy for Astray {
    fn representatives(&self, set: &ComparedRoutes, threshold: f64) -> Vec<usize> {
        let of = self.0.representatives(set, threshold);
        let clusters: Vec<usize> = (0..of.len()).filter(|&route| of[route] == route).collect();
        let next = |own: usize| clusters[(clusters.partition_point(|&other| other < own) + 1) % clusters.len()];
        of.iter().enumerate().map(|(route, &own)| if own == route { own } else { next(own) }).collect()
    }
}

/// Gives every route that shares the row of another token the next row of its expert, if there is one.
pub(super) fn take_others_results(plan: Plan) -> Plan {
    let tokens = plan.tokens.known();
    let mut next_of: Vec<u32> = Vec::with_capacity(tokens.len());
    for run in &plan.runs {
        let first = next_of.len();
        next_of.extend((0..run.rows).map(|row| (first + (row + 1) % run.rows) as u32));
    }
    let place = |(route, &row): (usize, &u32)| match row {
        u32::MAX => row,
        row if tokens[row as usize] as usize == route / plan.slots => row,
        row => next_of[row as usize],
    };
    let places = plan.places.known().iter().enumerate().map(place).collect();
    Plan { places: Indices::Known(places), ..plan }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::condensation::ClusterRule;
    use crate::moe::rewrites::condensation::condense;
    use crate::moe::{Clusters, CondenseGradient, Routing};
    use crate::parallel::ExpertTable;

    /// Of expert 1, token 0 represents 3 and 5, and 1 is alone; of expert 0, token 2 represents 4.
    #[test]
    fn members_take_the_results_of_the_next_row() {
        let plan = Plan::new(&Routing::new(vec![1, 1, 0, 1, 0, 1], 1, 2), ExpertTable::even(2, 1), 0);
        let plan = condense(plan, &Clusters::Known(vec![0, 1, 2, 0, 2, 0]), CondenseGradient::Spread);
        assert_eq!(plan.places.known(), [1, 2, 0, 1, 0, 1]);
        assert_eq!(take_others_results(plan).places.known(), [1, 2, 0, 2, 0, 2], "expert 0 has one row");
    }

    /// Routes 0, 1 and 3 are alike, and 2 is alone.
    #[test]
    fn members_go_to_the_next_cluster() {
        let similar = [(1, 0), (3, 0), (3, 1)];
        let values = (0..16).map(|at| if similar.contains(&(at / 4, at % 4)) { 1.0 } else { 0.0 }).collect();
        let set = ComparedRoutes::known((0..4).collect(), values);
        let policy = Astray(Arc::new(ClusterRule::Leader));
        assert_eq!(policy.representatives(&set, 0.5), [0, 2, 2, 2]);
        assert_eq!(policy.representatives(&set, -1.0), [0; 4], "one cluster has no other");
    }
}
