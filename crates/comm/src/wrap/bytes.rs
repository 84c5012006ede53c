//! Bytes that a collective makes one rank move to and from *others* over a wire, whatever the implementation really
//! does; n is the size of the group:
//!
//! | collective | sent by this rank | received by it |
//! |---|---|---|
//! | barrier | 0 | 0 |
//! | broadcast | at the root buffer to each, elsewhere 0 | at the root 0, elsewhere buffer, from the root |
//! | all_reduce | 2/n x buffer to each, as rings and pairs alike; the sum rounded down | as much |
//! | all_gather | own contribution to each | theirs |
//! | reduce_scatter | their part of `send` to each | own part from each |
//! | all_to_all | the parts of `send` that go to them | the parts of `recv` that come from them |

use crate::operation::Operation;
use crate::payload::ElementKind;

/// Bytes rank `rank` of `size` sends to `others`, which do not include it. Tolerates requests that will be refused.
pub(crate) fn sent(operation: &Operation, rank: usize, size: usize, others: impl Iterator<Item = usize>) -> u64 {
    let bytes = match operation {
        Operation::Barrier => 0,
        Operation::Broadcast { root, buf } if *root == rank => others.count() * buf.bytes(),
        Operation::Broadcast { .. } => 0,
        Operation::AllReduce { buf, .. } => 2 * others.count() * buf.bytes() / size,
        Operation::AllGather { send, .. } => others.count() * send.bytes(),
        Operation::ReduceScatter { send, counts, .. } | Operation::AllToAll { send, send_counts: counts, .. } => {
            parts(counts, others, send.kind())
        }
    };
    bytes as u64
}

/// Bytes it receives from them.
pub(super) fn received(
    operation: &Operation,
    rank: usize,
    size: usize,
    mut others: impl Iterator<Item = usize>,
) -> u64 {
    let bytes = match operation {
        Operation::Barrier => 0,
        Operation::Broadcast { root, buf } => {
            if others.any(|other| other == *root) {
                buf.bytes()
            } else {
                0
            }
        }
        Operation::AllReduce { .. } => return sent(operation, rank, size, others),
        Operation::ReduceScatter { recv, .. } => others.count() * recv.bytes(),
        Operation::AllGather { recv, counts, .. } | Operation::AllToAll { recv, recv_counts: counts, .. } => {
            parts(counts, others, recv.kind())
        }
    };
    bytes as u64
}

fn parts(counts: &[usize], ranks: impl Iterator<Item = usize>, kind: ElementKind) -> usize {
    ranks.filter_map(|rank| counts.get(rank)).sum::<usize>() * kind.size()
}
