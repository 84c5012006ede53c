//! What a collective comes to in messages, as data: which bytes of which buffer go to whom, and what is done with those that
//! come. Nothing here sends anything.
//!
//! ```text
//!  operation       first                                   then             second
//!  barrier         a byte from and to everybody
//!  broadcast       the root's bytes to everybody
//!  all_gather      own bytes to everybody
//!  all_to_all      the r-th part to rank r
//!  reduce_scatter  the r-th part to rank r                 sum in rank order
//!  all_reduce      the r-th part to rank r                 sum in rank order    own part to everybody
//! ```
//!
//! An all-reduce sends 2 (n - 1) / n of its bytes, as a ring does, but every element is summed on one rank in rank order:
//! the bits of thread ranks.

use std::ops::Range;

use crate::operation::Operation;

/// The memory that a message comes from or goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessagePlace {
    /// What the operation sends; in place, its only buffer.
    Send,
    /// What the operation receives.
    Receive,
    /// A buffer for what this peer alone sends: its part of a sum.
    Part(usize),
    /// A byte that says nothing.
    Token,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// Rank of the group.
    pub(crate) peer: usize,
    pub(crate) place: MessagePlace,
    /// Of the part of the buffer that takes part.
    pub(crate) bytes: Range<usize>,
}

/// The messages of a stage, none of them empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageStage {
    pub(crate) send: Vec<Message>,
    pub(crate) receive: Vec<Message>,
}

/// What a rank adds up when the first stage is over: every rank's part, its own from where `own` is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sum {
    /// Where the own part is.
    pub(crate) own: (MessagePlace, Range<usize>),
    /// Where the sum goes.
    pub(crate) to: (MessagePlace, Range<usize>),
}

/// An operation of rank `me` of a group of `size`.
#[derive(Debug)]
pub(crate) struct Moves {
    pub(crate) first: MessageStage,
    /// What the rank gives itself: from the bytes that are sent to those that are received.
    pub(crate) copy: Option<[Range<usize>; 2]>,
    pub(crate) sum: Option<Sum>,
    /// Empty where there is none.
    pub(crate) second: MessageStage,
}

impl Moves {
    /// Of a validated operation.
    pub(crate) fn of(operation: &Operation, me: usize, size: usize) -> Moves {
        let element = operation.kind().map_or(1, |kind| kind.size());
        let mut moves =
            Moves { first: MessageStage::default(), copy: None, sum: None, second: MessageStage::default() };
        let Moves { first, copy, sum, second } = &mut moves;
        // Nobody is the first that all others send to.
        let peers = || (1..size).map(|step| (me + step) % size);
        match operation {
            Operation::Barrier => {
                first.send = messages(peers(), MessagePlace::Token, |_| 0..1);
                first.receive = of_parts(peers(), 1);
            }
            Operation::Broadcast { root, buf } if *root == me => {
                first.send = messages(peers(), MessagePlace::Send, |_| 0..buf.bytes());
            }
            Operation::Broadcast { root, buf } => {
                first.receive = messages([*root].into_iter(), MessagePlace::Send, |_| 0..buf.bytes());
            }
            Operation::AllGather { send, counts, .. } => {
                let parts = parts(counts, element);
                first.send = messages(peers(), MessagePlace::Send, |_| 0..send.bytes());
                first.receive = messages(peers(), MessagePlace::Receive, |peer| parts[peer].clone());
                *copy = Some([0..send.bytes(), parts[me].clone()]);
            }
            Operation::AllToAll { send_counts, recv_counts, .. } => {
                let [sent, received] = [send_counts, recv_counts].map(|counts| parts(counts, element));
                first.send = messages(peers(), MessagePlace::Send, |peer| sent[peer].clone());
                first.receive = messages(peers(), MessagePlace::Receive, |peer| received[peer].clone());
                *copy = Some([sent[me].clone(), received[me].clone()]);
            }
            Operation::ReduceScatter { counts, .. } => {
                let (parts, own) = (parts(counts, element), counts[me] * element);
                first.send = messages(peers(), MessagePlace::Send, |peer| parts[peer].clone());
                first.receive = of_parts(peers(), own);
                *sum = Some(Sum { own: (MessagePlace::Send, parts[me].clone()), to: (MessagePlace::Receive, 0..own) });
            }
            Operation::AllReduce { buf, .. } => {
                let bound = |rank: usize| buf.len() * rank / size;
                let counts: Vec<usize> = (0..size).map(|rank| bound(rank + 1) - bound(rank)).collect();
                let parts = parts(&counts, element);
                let own = || (MessagePlace::Send, parts[me].clone());
                first.send = messages(peers(), MessagePlace::Send, |peer| parts[peer].clone());
                first.receive = of_parts(peers(), parts[me].len());
                *sum = Some(Sum { own: own(), to: own() });
                second.send = messages(peers(), MessagePlace::Send, |_| parts[me].clone());
                second.receive = messages(peers(), MessagePlace::Send, |peer| parts[peer].clone());
            }
        }
        moves
    }
}

/// The bytes of each rank's elements, one rank's behind the other's.
fn parts(counts: &[usize], element: usize) -> Vec<Range<usize>> {
    let part = |end: &mut usize, count: &usize| {
        let start = *end;
        *end += count * element;
        Some(start..*end)
    };
    counts.iter().scan(0, part).collect()
}

fn messages(
    peers: impl Iterator<Item = usize>,
    place: MessagePlace,
    bytes: impl Fn(usize) -> Range<usize>,
) -> Vec<Message> {
    let all = peers.map(|peer| Message { peer, place, bytes: bytes(peer) });
    all.filter(|message| !message.bytes.is_empty()).collect()
}

/// What each peer sends, into a buffer of its own.
fn of_parts(peers: impl Iterator<Item = usize>, bytes: usize) -> Vec<Message> {
    let all = peers.map(|peer| Message { peer, place: MessagePlace::Part(peer), bytes: 0..bytes });
    all.filter(|message| !message.bytes.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{Reduce, Request};

    fn bytes(messages: &[Message]) -> usize {
        messages.iter().map(|message| message.bytes.len()).sum()
    }

    #[test]
    fn a_sum_sends_what_a_ring_sends() {
        for (size, len) in [(2, 10), (3, 9), (4, 1000), (5, 7)] {
            let request = Request::all_reduce(Reduce::Sum, vec![0f32; len]);
            let all: Vec<Moves> = (0..size).map(|me| Moves::of(&request.operation, me, size)).collect();
            let sent: usize = all.iter().map(|moves| bytes(&moves.first.send) + bytes(&moves.second.send)).sum();
            assert_eq!(sent, 2 * (size - 1) * len * 4, "{size} ranks");
        }
    }

    /// Whatever is sent is awaited, and nothing else.
    #[test]
    fn what_one_sends_another_receives() {
        let size = 3;
        let counts = |me: usize, peer: usize| 2 * me + peer * peer;
        let request = |which: usize, me: usize| match which {
            0 => Request::barrier(),
            1 => Request::broadcast(2, vec![0u64; 5]),
            2 => Request::all_reduce(Reduce::Max, vec![0u8; 2]),
            3 => Request::all_gather(vec![0f32; me], vec![0f32; 3], vec![0, 1, 2]),
            4 => Request::reduce_scatter(Reduce::Sum, vec![0f64; 5], vec![0f64; [4, 0, 1][me]], vec![4, 0, 1]),
            _ => {
                let sent: Vec<usize> = (0..size).map(|peer| counts(me, peer)).collect();
                let received: Vec<usize> = (0..size).map(|peer| counts(peer, me)).collect();
                let (send, recv) = (vec![0u32; sent.iter().sum()], vec![0u32; received.iter().sum()]);
                Request::all_to_all(send, sent, recv, received)
            }
        };
        for which in 0..6 {
            let all: Vec<Moves> = (0..size).map(|me| Moves::of(&request(which, me).operation, me, size)).collect();
            for second in [false, true] {
                let mut sent: Vec<[usize; 3]> = Vec::new();
                let mut received = Vec::new();
                for (me, moves) in all.iter().enumerate() {
                    let MessageStage { send, receive } = if second { &moves.second } else { &moves.first };
                    sent.extend(send.iter().map(|message| [me, message.peer, message.bytes.len()]));
                    received.extend(receive.iter().map(|message| [message.peer, me, message.bytes.len()]));
                }
                sent.sort_unstable();
                received.sort_unstable();
                assert_eq!(sent, received, "operation {which}");
            }
        }
    }
}
