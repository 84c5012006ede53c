//! Which ranks are on one node: those whose messages cross no network.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::{Axis, MeshShape};

/// The node of every rank of a world, counted from 0 in the order of their first ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    of: Arc<[usize]>,
}

impl Nodes {
    /// Of ranks that are on these nodes, by any names.
    pub fn named<N: Ord>(names: impl IntoIterator<Item = N>) -> Nodes {
        let mut numbers = BTreeMap::new();
        let number = |name: N| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        Nodes { of: names.into_iter().map(number).collect() }
    }

    /// All on one.
    pub fn one(ranks: usize) -> Nodes {
        Nodes::of_consecutive(ranks, ranks.max(1))
    }

    /// So many consecutive ranks on each; the last may have fewer.
    pub fn of_consecutive(ranks: usize, per_node: usize) -> Nodes {
        Nodes::named((0..ranks).map(|rank| rank / per_node))
    }

    /// The node of a rank.
    pub fn of(&self, rank: usize) -> usize {
        self.of[rank]
    }

    /// The nodes of some ranks.
    pub fn among(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().map(|&rank| self.of[rank]).collect()
    }

    pub fn count(&self) -> usize {
        self.sizes().len()
    }

    /// Ranks of each node.
    pub fn sizes(&self) -> Vec<usize> {
        sizes(&self.of)
    }

    /// Whether messages between some ranks can be saved by going from node to node together: they are on several, and on one
    /// of them there are several.
    pub fn may_gather(&self, ranks: &[usize]) -> bool {
        let sizes = sizes(&self.among(ranks));
        sizes.iter().filter(|size| **size > 0).count() > 1 && sizes.iter().any(|size| *size > 1)
    }

    /// Whether that holds for any expert group of a shape.
    pub fn may_gather_experts(&self, shape: &MeshShape) -> bool {
        shape.groups(Axis::Expert(shape.expert)).iter().any(|group| self.may_gather(group))
    }
}

fn sizes(nodes: &[usize]) -> Vec<usize> {
    let mut sizes = vec![0; nodes.iter().max().map_or(0, |last| last + 1)];
    nodes.iter().for_each(|node| sizes[*node] += 1);
    sizes
}

/// `2 nodes of 4 ranks`, `3 nodes of 4, 4 and 2 ranks`.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.sizes();
        let (first, all) = (sizes.first().copied().unwrap_or_default(), sizes.len());
        let ranks = |of: usize| if of == 1 { "1 rank".to_owned() } else { format!("{of} ranks") };
        let are_alike = sizes.iter().all(|size| *size == first);
        match (all, sizes.as_slice()) {
            (1, _) => f.write_str("1 node"),
            (_, [others @ .., last]) if !are_alike => {
                let others: Vec<String> = others.iter().map(ToString::to_string).collect();
                write!(f, "{all} nodes of {} and {}", others.join(", "), ranks(*last))
            }
            _ => write!(f, "{all} nodes of {}", ranks(first)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart_by_any_names_in_any_order() {
        let nodes = Nodes::named(["b", "a", "b", "c", "a", "b"]);
        assert_eq!(nodes.among(&[0, 1, 2, 3, 4, 5]), [0, 1, 0, 2, 1, 0]);
        assert_eq!(
            (nodes.count(), nodes.sizes(), nodes.to_string().as_str()),
            (3, vec![3, 2, 1], "3 nodes of 3, 2 and 1 rank")
        );
        assert_eq!(Nodes::of_consecutive(8, 4).to_string(), "2 nodes of 4 ranks");
        assert_eq!(Nodes::of_consecutive(3, 1).to_string(), "3 nodes of 1 rank");
        assert_eq!(Nodes::one(5).to_string(), "1 node");
    }

    #[test]
    fn messages_are_saved_where_several_ranks_of_a_node_send_elsewhere() {
        let nodes = Nodes::of_consecutive(6, 2);
        for (ranks, may) in [(vec![0, 1], false), (vec![0, 2, 4], false), (vec![0, 1, 2], true), (vec![1, 5, 4], true)]
        {
            assert_eq!(nodes.may_gather(&ranks), may, "{ranks:?}");
        }
    }
}
