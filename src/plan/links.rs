//! How long messages take: a latency a call, and bytes over the links of a node or out of it.
//!
//! Ranks of a node share its links to other nodes, and all ranks do the same at the same time. So what counts is what
//! leaves the busiest node: of a ring (all-reduce, all-gather, reduce-scatter) what one rank sends, for every group that
//! goes on elsewhere; of an all-to-all, from every rank, what is for ranks elsewhere. One that goes round by nodes sends
//! nothing else over the group itself, and the rest within its nodes.

use guildhall_comm::Collective;
use guildhall_comm::wrap::NodeWay;

use super::books::PlannedTraffic;
use super::devices::Machine;
use super::layout::Layout;
use crate::parallel::{Axis, MeshShape};

/// Seconds that the messages of a kind take the slowest node.
pub fn message(
    layout: &Layout,
    axis: Axis,
    collective: Collective,
    traffic: &PlannedTraffic,
    machine: &Machine,
) -> f64 {
    let (mesh, bytes) = (&layout.mesh, traffic.bytes as f64);
    let leaving = match (axis, collective) {
        (Axis::ExpertNode(_), _) => 0.0,
        _ if mesh.degree(axis) == 1 => return 0.0,
        (Axis::Expert(degree), Collective::AllToAll) if layout.relays(degree) => {
            let ranks = machine.neighbours(layout);
            crossing(layout.way, ranks, degree.div_ceil(ranks))
        }
        _ => leaving(mesh, axis, collective, machine.ranks_per_node),
    };
    let wire = if leaving == 0.0 { machine.within } else { machine.between };
    let out = bytes * leaving / (machine.between.bandwidth * machine.ranks_per_node as f64);
    let messages = traffic.calls as f64 * wire.latency_s + traffic.messages as f64 * wire.message_s;
    messages + out.max(bytes / machine.within.bandwidth)
}

/// What leaves a node of so many ranks for so many nodes but its own, as a multiple of what the rank of a plan sends: of
/// `two_level` that rank speaks to as many of the other nodes as any, and others may to none.
fn crossing(way: NodeWay, ranks: usize, nodes: usize) -> f64 {
    match way {
        NodeWay::TwoLevel => nodes.saturating_sub(1) as f64 / nodes.saturating_sub(1).div_ceil(ranks).max(1) as f64,
        NodeWay::Direct | NodeWay::TwoD => ranks as f64,
    }
}

/// What leaves the busiest node, as a multiple of what a rank sends.
fn leaving(mesh: &MeshShape, axis: Axis, collective: Collective, ranks_per_node: usize) -> f64 {
    let node = |rank: usize| rank / ranks_per_node;
    let mut of_nodes = vec![0.0; mesh.ranks.div_ceil(ranks_per_node)];
    for group in mesh.groups(axis) {
        for here in group.chunk_by(|&a, &b| node(a) == node(b)) {
            let elsewhere = group.len() - here.len();
            of_nodes[node(here[0])] += match collective {
                _ if elsewhere == 0 => 0.0,
                Collective::AllToAll => (here.len() * elsewhere) as f64 / (group.len() - 1) as f64,
                _ => 1.0,
            };
        }
    }
    of_nodes.into_iter().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Bucketing;

    fn mesh(ranks: usize, tensor: usize, expert: usize) -> MeshShape {
        MeshShape { tensor, expert_tensor: tensor, ..MeshShape::of(ranks, expert) }
    }

    #[test]
    fn what_leaves_a_node_is_counted_once_a_ring_and_by_pairs_of_ranks() {
        let leaves = |mesh: MeshShape, axis, collective| leaving(&mesh, axis, collective, 6);
        // Nodes {0 ... 5} {6 ... 11}: of tensor groups, {4 5 6 7} is on both.
        assert_eq!(leaves(mesh(12, 4, 3), Axis::Tensor, Collective::AllReduce), 1.0);
        assert_eq!(leaves(mesh(12, 2, 6), Axis::Tensor, Collective::AllReduce), 0.0);
        // Two rings, {0 2 4 ...} and {1 3 5 ...}.
        assert_eq!(leaves(mesh(12, 2, 6), Axis::Data, Collective::ReduceScatter), 2.0);
        // Two such groups too; each of six ranks sends three of five parts away.
        assert_eq!(leaves(mesh(12, 2, 6), Axis::Expert(6), Collective::AllToAll), 6.0 * 3.0 / 5.0);
        assert_eq!(leaves(mesh(12, 2, 3), Axis::Expert(3), Collective::AllToAll), 0.0);
    }

    #[test]
    fn of_two_levels_one_rank_speaks_to_a_node() {
        let leaves = |way| [(2, 2), (2, 4), (4, 3)].map(|(ranks, nodes)| crossing(way, ranks, nodes));
        assert_eq!(leaves(NodeWay::TwoD), [2.0, 2.0, 4.0]);
        // Of three other nodes the last of two ranks speaks to two.
        assert_eq!(leaves(NodeWay::TwoLevel), [1.0, 1.5, 2.0]);
    }

    #[test]
    fn messages_take_latency_and_the_slower_of_two_links() {
        let machine = Machine::known("a100-40g").unwrap();
        let traffic = PlannedTraffic { calls: 3, messages: 5, bytes: 6_000_000_000 };
        let layout = |mesh| Layout::of(mesh, Bucketing { bytes: 1, overlap: true });
        let seconds = |mesh: MeshShape, axis| message(&layout(mesh), axis, Collective::AllReduce, &traffic, &machine);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(seconds(mesh(16, 8, 2), Axis::Tensor), 3.0 * 5e-6 + 6.0 / 300.0);
        // Eight rings out of a node share its eight links; the ring of all has them to itself.
        close(seconds(mesh(16, 8, 2), Axis::Data), 3.0 * 15e-6 + 6.0 / 25.0);
        close(seconds(mesh(16, 1, 2), Axis::World), 3.0 * 15e-6 + 6.0 / 200.0);
        close(seconds(mesh(16, 1, 16), Axis::Tensor), 0.0);
    }
}
