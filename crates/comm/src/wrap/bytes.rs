//! Bytes, and messages that carry them, that a collective makes one rank move to and from *others* over a wire, whatever the
//! implementation really does; n is the size of the group:
//!
//! | collective | sent by this rank | received by it |
//! |---|---|---|
//! | barrier | 0 | 0 |
//! | broadcast | at the root buffer to each, elsewhere 0 | at the root 0, elsewhere buffer, from the root |
//! | all_reduce | 2/n x buffer to each, as rings and pairs alike; the sum rounded down | as much |
//! | all_gather | own contribution to each | theirs |
//! | reduce_scatter | their part of `send` to each | own part from each |
//! | all_to_all | the parts of `send` that go to them | the parts of `recv` that come from them |
//!
//! A message is what one rank sends another at once: one for each part that is not empty, two of an all_reduce.

use crate::operation::Operation;
use crate::payload::ElementKind;

/// What travels between one rank and some others, one way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wired {
    pub messages: u64,
    pub bytes: u64,
}

impl Wired {
    fn of(messages: usize, bytes: usize) -> Wired {
        Wired { messages: if bytes == 0 { 0 } else { messages as u64 }, bytes: bytes as u64 }
    }

    /// The larger of each.
    pub(super) fn max(self, other: Wired) -> Wired {
        Wired { messages: self.messages.max(other.messages), bytes: self.bytes.max(other.bytes) }
    }
}

/// What rank `rank` of `size` sends to `others`, which do not include it. Tolerates requests that will be refused.
pub(crate) fn sent(operation: &Operation, rank: usize, size: usize, others: impl Iterator<Item = usize>) -> Wired {
    match operation {
        Operation::Barrier => Wired::default(),
        Operation::Broadcast { root, buf } if *root == rank => to_each(others, buf.bytes()),
        Operation::Broadcast { .. } => Wired::default(),
        Operation::AllReduce { buf, .. } => {
            let others = others.count();
            Wired::of(2 * others, 2 * others * buf.bytes() / size)
        }
        Operation::AllGather { send, .. } => to_each(others, send.bytes()),
        Operation::ReduceScatter { send, counts, .. } | Operation::AllToAll { send, send_counts: counts, .. } => {
            parts(counts, others, send.kind())
        }
    }
}

/// What it receives from them.
pub(super) fn received(
    operation: &Operation,
    rank: usize,
    size: usize,
    mut others: impl Iterator<Item = usize>,
) -> Wired {
    match operation {
        Operation::Barrier => Wired::default(),
        Operation::Broadcast { root, buf } => match others.any(|other| other == *root) {
            true => Wired::of(1, buf.bytes()),
            false => Wired::default(),
        },
        Operation::AllReduce { .. } => sent(operation, rank, size, others),
        Operation::ReduceScatter { recv, .. } => to_each(others, recv.bytes()),
        Operation::AllGather { recv, counts, .. } | Operation::AllToAll { recv, recv_counts: counts, .. } => {
            parts(counts, others, recv.kind())
        }
    }
}

fn to_each(others: impl Iterator<Item = usize>, bytes: usize) -> Wired {
    let others = others.count();
    Wired::of(others, others * bytes)
}

fn parts(counts: &[usize], ranks: impl Iterator<Item = usize>, kind: ElementKind) -> Wired {
    let parts = ranks.filter_map(|rank| counts.get(rank)).filter(|count| **count > 0);
    let (messages, elements) = parts.fold((0, 0), |(messages, elements), count| (messages + 1, elements + count));
    Wired::of(messages, elements * kind.size())
}
