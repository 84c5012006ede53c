//! Clusters with something wrong.

use std::sync::Arc;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::condensation::ClusterRule;

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
