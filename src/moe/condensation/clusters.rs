//! Clusters of routes that share a row: every member is within the threshold of its representative.

use serde::{Deserialize, Serialize};

use super::ComparedRoutes;
use crate::moe::Routing;

/// `moe.condense_clusters`: which token represents others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClusterRule {
    /// The one with the most similar tokens, as in the paper: it may come later than those that it represents.
    Star,
    /// An earlier one: a token joins the most similar of the representatives before it, or becomes one. Nothing about a
    /// token depends on later ones.
    Leader,
}

/// Decides who represents whom. A pure function of similarities: ranks that see the same tokens call it independently,
/// and all must get the same result. It is not asked about thresholds above 1, at which nothing is condensed.
pub trait ClusterPolicy: std::fmt::Debug + Send + Sync {
    /// For each route of a set the index of its representative; its own if it represents itself.
    fn representatives(&self, set: &ComparedRoutes, threshold: f64) -> Vec<usize>;
}

impl ClusterRule {
    /// In a causal stack a token must not receive the result of a later one, which knows its future.
    pub fn of_stack(is_causal: bool) -> ClusterRule {
        if is_causal { ClusterRule::Leader } else { ClusterRule::Star }
    }
}

impl ClusterPolicy for ClusterRule {
    fn representatives(&self, set: &ComparedRoutes, threshold: f64) -> Vec<usize> {
        match self {
            ClusterRule::Star => stars(set, threshold),
            ClusterRule::Leader => leaders(set, threshold),
        }
    }
}

/// The node with the most neighbours represents them, and is removed with them; again until no edge is left. Of equals
/// the first is taken.
fn stars(set: &ComparedRoutes, threshold: f64) -> Vec<usize> {
    let nodes = set.len();
    let near = |i: usize, j: usize| i != j && f64::from(set.similarity(i, j)) >= threshold;
    let edges: Vec<Vec<usize>> = (0..nodes).map(|i| (0..nodes).filter(|&j| near(i, j)).collect()).collect();
    let mut degrees: Vec<usize> = edges.iter().map(Vec::len).collect();
    let (mut of, mut left) = ((0..nodes).collect::<Vec<_>>(), vec![true; nodes]);
    // `max_by_key` takes the last of equals.
    while let Some(hub) = (0..nodes).rev().filter(|&i| left[i]).max_by_key(|&i| degrees[i]).filter(|&i| degrees[i] > 0)
    {
        let members: Vec<usize> = edges[hub].iter().copied().filter(|&member| left[member]).collect();
        for &removed in members.iter().chain([&hub]) {
            of[removed] = hub;
            left[removed] = false;
            edges[removed].iter().for_each(|&neighbour| degrees[neighbour] -= 1);
        }
    }
    of
}

/// Each joins the most similar leader before it that is within the threshold, of equals the first, or becomes a leader.
fn leaders(set: &ComparedRoutes, threshold: f64) -> Vec<usize> {
    let (mut of, mut leaders) = (Vec::with_capacity(set.len()), Vec::new());
    for i in 0..set.len() {
        let near = leaders.iter().rev().copied().filter(|&leader| f64::from(set.similarity(i, leader)) >= threshold);
        let leader = near.max_by(|&a, &b| set.similarity(i, a).total_cmp(&set.similarity(i, b)));
        if leader.is_none() {
            leaders.push(i);
        }
        of.push(leader.unwrap_or(i));
    }
    of
}

/// Whether routes may share rows at a threshold: above 1 nothing is condensed, whatever rounding makes of the similarity of
/// equal rows, and whatever a policy says. So all ranks know it, whether their tokens are similar or not.
pub fn may_share(threshold: f64) -> bool {
    threshold <= 1.0
}

/// For each route of a set the index of its representative by a policy.
pub fn representatives(policy: &dyn ClusterPolicy, set: &ComparedRoutes, threshold: f64) -> Vec<usize> {
    match may_share(threshold) {
        true => policy.representatives(set, threshold),
        false => (0..set.len()).collect(),
    }
}

/// Which routes share a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clusters {
    /// For each route, the route whose row it shares; itself if it has a row of its own, or none.
    Known(Vec<u32>),
    /// In a simulated step: by expert, the rows that are left.
    Counted(Vec<usize>),
}

/// The representative of each route so far.
pub(super) struct Representatives(Vec<u32>);

impl Representatives {
    /// Every route represents itself.
    pub(super) fn none(routing: &Routing) -> Representatives {
        Representatives((0..routing.expert.len() as u32).collect())
    }

    /// Those of a set.
    pub(super) fn add(&mut self, set: &ComparedRoutes, policy: &dyn ClusterPolicy, threshold: f64) {
        for (place, representative) in representatives(policy, set, threshold).into_iter().enumerate() {
            self.0[set.routes[place] as usize] = set.routes[representative];
        }
    }

    /// `None` if no route shares another's row.
    pub(super) fn clusters(self) -> Option<Clusters> {
        Clusters::of(self.0)
    }
}

impl Clusters {
    /// Those in which these routes represent the routes; `None` if no route shares another's row.
    pub fn of(representatives: Vec<u32>) -> Option<Clusters> {
        let shares = representatives.iter().zip(0..).any(|(&of, route)| of != route);
        shares.then_some(Clusters::Known(representatives))
    }

    /// By expert, the rows that are left of a routing.
    pub fn rows(&self, routing: &Routing) -> Vec<usize> {
        match self {
            Clusters::Counted(rows) => rows.clone(),
            Clusters::Known(of) => {
                let mut rows = vec![0; routing.experts];
                let own = routing.expert.iter().zip(of).zip(0..).filter(|((_, of), route)| **of == *route);
                let sent = own.filter(|((expert, _), _)| **expert != Routing::DROPPED);
                sent.for_each(|((&expert, _), _)| rows[expert as usize] += 1);
                rows
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guildhall_tensor::{Draws, Purpose};

    fn set(similarities: &[&[f32]]) -> ComparedRoutes {
        let n = similarities.len();
        let value = |i: usize, j: usize| if i > j { similarities[i][j] } else { similarities[j][i] };
        let values = (0..n * n).map(|at| value(at / n, at % n)).collect();
        ComparedRoutes::known((0..n as u32).collect(), values)
    }

    /// A chain a - b - c - d, in which only neighbours are similar. The hub b takes a and c; d is alone, although it is
    /// similar to c. In token order, a leads b, and c leads d.
    #[test]
    fn no_chain_becomes_a_cluster() {
        let chain = set(&[&[1.0], &[0.9, 1.0], &[0.1, 0.9, 1.0], &[0.1, 0.1, 0.9, 1.0]]);
        assert_eq!(stars(&chain, 0.8), [1, 1, 1, 3]);
        assert_eq!(leaders(&chain, 0.8), [0, 0, 2, 2]);
        assert_eq!(representatives(&ClusterRule::Star, &chain, 1.5), [0, 1, 2, 3]);
    }

    #[test]
    fn a_token_joins_the_most_similar_leader() {
        let three = set(&[&[1.0], &[0.2, 1.0], &[0.85, 0.95, 1.0]]);
        assert_eq!(leaders(&three, 0.8), [0, 1, 1]);
        let equal = set(&[&[1.0], &[0.2, 1.0], &[0.9, 0.9, 1.0]]);
        assert_eq!(leaders(&equal, 0.8), [0, 1, 0]);
    }

    /// On random graphs: members are within the threshold of their representatives, which represent themselves, and no
    /// two representatives of a star cluster are similar.
    #[test]
    fn members_are_within_the_threshold_of_their_representatives() {
        for case in 0..200u64 {
            let (n, draws) = (1 + (case % 12) as usize, Draws::new(case, Purpose::Test, 0, 0));
            let value = |i: usize, j: usize| draws.uniform((i * n + j) as u64);
            let rows: Vec<Vec<f32>> = (0..n).map(|i| (0..=i).map(|j| value(i, j)).collect()).collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let (set, threshold) = (set(&rows), 0.6);
            let similarity = |i, j| f64::from(set.similarity(i, j));
            for rule in [ClusterRule::Star, ClusterRule::Leader] {
                let of = rule.representatives(&set, threshold);
                for (i, &r) in of.iter().enumerate() {
                    assert_eq!(of[r], r, "case {case}");
                    assert!(i == r || similarity(i, r) >= threshold, "case {case}");
                    assert!(rule == ClusterRule::Star || r <= i, "case {case}");
                }
                let all: Vec<usize> = (0..n).filter(|&i| of[i] == i).collect();
                let apart = |&a: &usize| all.iter().all(|&b| a == b || similarity(a, b) < threshold);
                assert!(all.iter().all(apart), "case {case}: {rule:?}");
            }
        }
    }
}
