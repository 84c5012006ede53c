//! Where the parts of an all-to-all are when, as data: what one rank takes from whom and hands on to whom, leg by leg.
//! Nothing here sends anything.

use std::collections::BTreeMap;

use super::NodeWay;
use crate::operation::Operation;
use crate::payload::{ElementKind, Payload};

/// What one rank of a group sends to another, itself included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shipment {
    from: usize,
    to: usize,
}

/// The way of every shipment, as one rank of a group knows it.
pub(crate) struct RelayRoute {
    /// Ranks of the group.
    size: usize,
    /// Those of them on this rank's node, ascending.
    mates: Vec<usize>,
    legs: Vec<Leg>,
    /// By sender, the place of its shipment for this rank among those that the last leg brings.
    unpacking: Vec<usize>,
}

/// One all-to-all: between nodes over the whole group, or within one.
struct Leg {
    is_within: bool,
    /// In the order in which they are sent: by the rank of the leg's group that takes them.
    leaving: Vec<Handover>,
    /// The place of each of them among those that this rank held before: what it sends itself, or what the leg before brought.
    packing: Vec<usize>,
    /// In the order in which they come.
    coming: Vec<Handover>,
}

#[derive(Clone, Copy)]
struct Handover {
    shipment: Shipment,
    /// Rank of the leg's group.
    peer: usize,
}

/// Elements of shipments as the ranks of a node have told each other: of what each sends to every rank of the group, then of
/// what it receives from every one, mate by mate.
pub(crate) struct ShipmentLengths(pub(super) Vec<u64>);

/// The counts of a leg's all-to-all, and the elements of each shipment in the order in which they come.
pub(super) struct LegCounts {
    pub(super) send: Vec<usize>,
    pub(super) receive: Vec<usize>,
    pub(super) coming: Vec<usize>,
}

/// Who is on which node.
struct Geography<'a> {
    nodes: &'a [usize],
    /// Ranks of each node, ascending.
    members: BTreeMap<usize, Vec<usize>>,
}

impl Geography<'_> {
    fn of(nodes: &[usize]) -> Geography<'_> {
        let mut members = BTreeMap::<usize, Vec<usize>>::new();
        nodes.iter().enumerate().for_each(|(rank, node)| members.entry(*node).or_default().push(rank));
        Geography { nodes, members }
    }

    fn mates(&self, rank: usize) -> &[usize] {
        &self.members[&self.nodes[rank]]
    }

    /// The rank with a shipment after so many legs.
    fn stop(&self, way: NodeWay, legs: usize, Shipment { from, to }: Shipment) -> usize {
        let (here, there) = (self.mates(from), self.mates(to));
        let is_near = self.nodes[from] == self.nodes[to];
        // Of ranks of another node, one for each rank here, dealt out evenly; and for each pair of nodes, one on either.
        let place = here.iter().position(|rank| *rank == from).expect("a rank is on its node");
        let speaker =
            |ranks: &[usize], other: usize| ranks[ranks.len() - 1 - self.steps(ranks[0], other) % ranks.len()];
        match (way, legs) {
            (_, 0) => from,
            (NodeWay::TwoD, 1) => {
                if is_near {
                    from
                } else {
                    there[place % there.len()]
                }
            }
            (NodeWay::TwoLevel, 1) => {
                if is_near {
                    to
                } else {
                    speaker(here, to)
                }
            }
            (NodeWay::TwoLevel, 2) => {
                if is_near {
                    to
                } else {
                    speaker(there, from)
                }
            }
            _ => to,
        }
    }

    /// Nodes between those of two ranks, going round. So the last rank of a node speaks to the next, and no other rank of its
    /// node speaks to more nodes. Where nodes are of one size, none of any node does: plans are of the last rank.
    fn steps(&self, from: usize, to: usize) -> usize {
        let [from, to] = [from, to].map(|rank| self.number(self.nodes[rank]));
        (to + self.members.len() - from - 1) % self.members.len()
    }

    fn number(&self, node: usize) -> usize {
        self.members.keys().position(|other| *other == node).expect("a node has ranks")
    }
}

impl RelayRoute {
    /// That of rank `me`, where the ranks of a group are on these nodes.
    pub(crate) fn new(way: NodeWay, nodes: &[usize], me: usize) -> RelayRoute {
        let (geography, size) = (Geography::of(nodes), nodes.len());
        let mates = geography.mates(me).to_vec();
        let of_mates = mates.iter().flat_map(|&mate| (0..size).flat_map(move |other| [(mate, other), (other, mate)]));
        // No other shipment comes by.
        let mut shipments: Vec<Shipment> = of_mates.map(|(from, to)| Shipment { from, to }).collect();
        shipments.sort_unstable();
        shipments.dedup();
        let mut held: Vec<Shipment> = (0..size).map(|to| Shipment { from: me, to }).collect();
        let mut legs = Vec::new();
        for (done, is_within) in way.legs().iter().copied().enumerate() {
            let stop = |legs: usize, shipment: &Shipment| geography.stop(way, legs, *shipment);
            let seat = |rank: usize| match is_within {
                true => mates.iter().position(|mate| *mate == rank).expect("it stays on the node"),
                false => rank,
            };
            // Sorted by shipment already, and the sort is stable.
            let handed = |mine: usize, peers: usize| {
                let own = shipments.iter().filter(|shipment| stop(mine, shipment) == me);
                let mut all: Vec<Handover> =
                    own.map(|shipment| Handover { shipment: *shipment, peer: seat(stop(peers, shipment)) }).collect();
                all.sort_by_key(|handover| handover.peer);
                all
            };
            let (leaving, coming) = (handed(done, done + 1), handed(done + 1, done));
            let packing = leaving.iter().map(|handover| place(&held, handover.shipment)).collect();
            held = coming.iter().map(|handover| handover.shipment).collect();
            legs.push(Leg { is_within, leaving, packing, coming });
        }
        let unpacking = (0..size).map(|from| place(&held, Shipment { from, to: me })).collect();
        RelayRoute { size, mates, legs, unpacking }
    }

    /// Ranks of the group on this rank's node.
    pub(crate) fn mates(&self) -> &[usize] {
        &self.mates
    }

    pub(super) fn legs(&self) -> usize {
        self.legs.len()
    }

    pub(super) fn is_within(&self, leg: usize) -> bool {
        self.legs[leg].is_within
    }

    /// The place, among those held before, of each shipment in the order in which a leg sends them; after the last leg, of
    /// each in the order in which the all-to-all receives them.
    pub(super) fn packing(&self, leg: usize) -> &[usize] {
        self.legs.get(leg).map_or(&self.unpacking, |leg| &leg.packing)
    }

    /// What a leg sends and receives.
    pub(super) fn counts(&self, leg: usize, lengths: &ShipmentLengths) -> LegCounts {
        let Leg { is_within, leaving, coming, .. } = &self.legs[leg];
        let size = if *is_within { self.mates.len() } else { self.size };
        let (mut send, mut receive) = (vec![0; size], vec![0; size]);
        leaving.iter().for_each(|handover| send[handover.peer] += self.leaving(handover.shipment, lengths));
        let coming = coming.iter().map(|handover| {
            let elements = self.coming(handover.shipment, lengths);
            receive[handover.peer] += elements;
            elements
        });
        let coming = coming.collect();
        LegCounts { send, receive, coming }
    }

    /// What leaves is as long as its sender says, and what comes as its receiver says, where they are on this node: so ranks
    /// that contradict each other do so in a leg, which tells.
    fn leaving(&self, Shipment { from, to }: Shipment, lengths: &ShipmentLengths) -> usize {
        self.sent(from, to, lengths).or_else(|| self.received(from, to, lengths)).expect("an end is here")
    }

    fn coming(&self, Shipment { from, to }: Shipment, lengths: &ShipmentLengths) -> usize {
        self.received(from, to, lengths).or_else(|| self.sent(from, to, lengths)).expect("an end is here")
    }

    fn sent(&self, from: usize, to: usize, ShipmentLengths(told): &ShipmentLengths) -> Option<usize> {
        Some(told[2 * self.size * self.seat(from)? + to] as usize)
    }

    fn received(&self, from: usize, to: usize, ShipmentLengths(told): &ShipmentLengths) -> Option<usize> {
        Some(told[2 * self.size * self.seat(to)? + self.size + from] as usize)
    }

    fn seat(&self, rank: usize) -> Option<usize> {
        self.mates.binary_search(&rank).ok()
    }

    /// What the ranks of this node tell each other first, then every leg: whether within the node, and the operation. For
    /// worlds in which nothing travels: the others are taken to send and receive what this rank does.
    pub(crate) fn mirrored(
        &self,
        kind: ElementKind,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Vec<(bool, Operation)> {
        let told: Vec<u64> = send_counts.iter().chain(recv_counts).map(|&count| count as u64).collect();
        let (mates, own) = (self.mates.len(), told.len());
        let opaque = |kind, counts: &[usize]| Payload::Opaque(kind, counts.iter().sum());
        let counts = vec![own; mates];
        let (send, recv) = (opaque(ElementKind::U64, &[own]), opaque(ElementKind::U64, &counts));
        let telling = (true, Operation::AllGather { send, recv, counts });
        let lengths = ShipmentLengths(told.repeat(mates));
        let leg = |leg: usize| {
            let LegCounts { send, receive, .. } = self.counts(leg, &lengths);
            let (sent, received) = (opaque(kind, &send), opaque(kind, &receive));
            let operation = Operation::AllToAll { send: sent, send_counts: send, recv: received, recv_counts: receive };
            (self.is_within(leg), operation)
        };
        [telling].into_iter().chain((0..self.legs()).map(leg)).collect()
    }
}

fn place(held: &[Shipment], shipment: Shipment) -> usize {
    held.iter().position(|other| *other == shipment).expect("what a rank hands on it holds")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of equal and of different numbers of ranks, in order and not.
    const NODES: [&[usize]; 7] = [
        &[0, 0, 1, 1],
        &[0, 1, 0, 1],
        &[0, 0, 0, 1],
        &[2, 0, 0, 1, 1, 2, 2],
        &[0, 0, 0, 0],
        &[3, 1, 2],
        &[0, 0, 1, 1, 2, 2, 3, 3],
    ];

    fn routes(way: NodeWay, nodes: &[usize]) -> Vec<RelayRoute> {
        (0..nodes.len()).map(|me| RelayRoute::new(way, nodes, me)).collect()
    }

    /// What a rank hands to another in a leg, the other takes from it, in the same order; and no leg crosses what it should not.
    #[test]
    fn what_leaves_comes() {
        for nodes in NODES {
            for way in [NodeWay::TwoLevel, NodeWay::TwoD] {
                let routes = routes(way, nodes);
                for leg in 0..way.legs().len() {
                    let rank = |of: usize, peer: usize| if way.legs()[leg] { routes[of].mates[peer] } else { peer };
                    let handed = |from: usize, to: usize, is_leaving: bool| {
                        let (of, other) = if is_leaving { (from, to) } else { (to, from) };
                        let Leg { leaving, coming, .. } = &routes[of].legs[leg];
                        let all = if is_leaving { leaving } else { coming };
                        let met = all.iter().filter(|handover| rank(of, handover.peer) == other);
                        met.map(|handover| handover.shipment).collect::<Vec<_>>()
                    };
                    for from in 0..nodes.len() {
                        for to in 0..nodes.len() {
                            let shipments = handed(from, to, true);
                            assert_eq!(shipments, handed(from, to, false), "{way:?} on {nodes:?}, leg {leg}");
                            let crosses = nodes[from] != nodes[to];
                            assert!(shipments.is_empty() || crosses != way.legs()[leg] || from == to);
                        }
                    }
                }
            }
        }
    }

    /// Messages between nodes: one for each rank and other node, or one for each pair of nodes.
    #[test]
    fn few_messages_cross() {
        let crossing = |way: NodeWay, nodes: &[usize]| {
            let of = |route: &RelayRoute| {
                let across = route.legs.iter().find(|leg| !leg.is_within).expect("a leg between nodes");
                let mut peers: Vec<usize> = across.leaving.iter().map(|handover| handover.peer).collect();
                peers.dedup();
                peers.iter().filter(|peer| !route.mates.contains(peer)).count()
            };
            routes(way, nodes).iter().map(of).collect::<Vec<_>>()
        };
        let nodes = [0, 0, 1, 1, 2, 2, 3, 3];
        assert_eq!(crossing(NodeWay::TwoD, &nodes), [3; 8]);
        let pairs = crossing(NodeWay::TwoLevel, &nodes);
        assert_eq!((pairs.iter().sum::<usize>(), pairs.iter().max()), (12, Some(&2)), "{pairs:?}");
        assert_eq!(crossing(NodeWay::TwoD, &[0, 0, 0, 1]), [1; 4]);
        assert_eq!(crossing(NodeWay::TwoLevel, &[0, 0, 0, 1]).iter().sum::<usize>(), 2);
    }
}
