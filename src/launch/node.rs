//! What processes have in common that are on one machine, and on one node of a network.

use std::fs;

/// Where a rank is, as its process tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankPlace {
    pub(super) machine: String,
    pub(super) node: String,
    pub(super) cores: String,
    /// What it has for carrying GPUs' memory.
    pub(super) carriers: String,
}

impl RankPlace {
    /// Of the ranks of this process.
    pub(super) fn here(carriers: String) -> RankPlace {
        RankPlace { machine: machine(), node: node(), cores: cores(), carriers }
    }

    pub(super) fn told(&self) -> String {
        format!("{}\n{}\n{}\n{}", self.machine, self.node, self.cores, self.carriers)
    }

    pub(super) fn of(told: &str) -> RankPlace {
        let mut lines = told.lines().map(str::to_owned);
        let mut line = || lines.next().unwrap_or_default();
        RankPlace { machine: line(), node: line(), cores: line(), carriers: line() }
    }
}

/// What processes of one machine, and no others, have in common: they share its memory and its cores. Where there is no such
/// thing, each has its own machine.
pub fn machine() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map_or_else(|_| format!("process {}", std::process::id()), |id| id.trim().to_owned())
}

/// The cores on which this process may run: a launcher may have dealt them. Processes of one machine that are told the same
/// share them. Containers do not: each may have a quota of its own.
fn cores() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or("all");
    let container = fs::read_link("/proc/self/ns/cgroup").map(|space| space.display().to_string());
    format!("{} {}", list.trim(), container.unwrap_or_default())
}

/// What processes of one node, and no others, have in common: they reach each other at the loopback address, so that what
/// they send crosses no network. Processes of one machine that have network namespaces of their own are on nodes of their
/// own; they would not be if shared memory told, which namespaces do not divide.
pub(super) fn node() -> String {
    let space = fs::read_link("/proc/self/ns/net").map(|space| space.display().to_string());
    format!("{}/{}", machine(), space.unwrap_or_default()).replace(' ', "_")
}

/// Of each rank, how many before it are on the same node.
pub(super) fn places_on(nodes: &[&str]) -> Vec<usize> {
    let before = |rank: usize| nodes[..rank].iter().filter(|node| **node == nodes[rank]).count();
    (0..nodes.len()).map(before).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_node_are_counted_from_the_first() {
        assert_eq!(places_on(&["a", "b", "a", "a", "b"]), [0, 0, 1, 2, 1]);
    }
}
