//! The collectives as data: what one rank asks of its group, with the buffers it lends for it.
//!
//! `counts` are elements per rank, may be uneven and may be zero. Receive buffers come from the caller, so that
//! memory is reused. A [`Request`] remembers the line that made it, which errors then name.

use std::fmt;
use std::panic::Location;

use crate::digest::digest;
use crate::payload::{ElementKind, Payload};

/// How elements from several ranks become one, always taken in rank order 0, 1, ..., n-1.
///
/// Summation of bf16 accumulate in f32 and round once. Maxima and minima pass NaN on. Integer sums wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    Max,
    Min,
}

/// What an engine promises of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Summation {
    /// In rank order, as [`Reduce`] says: the same bits in every run and on every engine that promises this.
    Exact,
    /// In an order of the engine's own, which may be another in another run: equal but for rounding.
    Tolerant,
}

/// One collective and its buffers.
#[derive(Debug)]
pub enum Operation {
    /// Nobody passes until everybody has arrived.
    Barrier,
    /// Every rank's `buf` becomes that of `root`.
    Broadcast { root: usize, buf: Payload },
    /// Every rank's `buf` becomes the reduction of all of them.
    AllReduce { reduce: Reduce, buf: Payload },
    /// `recv` becomes all ranks' `send`, one after the other; rank r contributes `counts[r]` elements.
    AllGather { send: Payload, recv: Payload, counts: Vec<usize> },
    /// `send` is reduced over the ranks; rank r receives the r-th part, of `counts[r]` elements.
    ReduceScatter { reduce: Reduce, send: Payload, recv: Payload, counts: Vec<usize> },
    /// Rank r receives from every rank the part of `send` meant for r, in rank order.
    AllToAll { send: Payload, send_counts: Vec<usize>, recv: Payload, recv_counts: Vec<usize> },
}

/// Which collective, without its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Collective {
    Barrier,
    Broadcast,
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Collective {
    /// The name used in messages and reports.
    pub fn name(self) -> &'static str {
        match self {
            Collective::Barrier => "barrier",
            Collective::Broadcast => "broadcast",
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
        }
    }
}

impl Operation {
    /// Which collective this is.
    pub fn collective(&self) -> Collective {
        match self {
            Operation::Barrier => Collective::Barrier,
            Operation::Broadcast { .. } => Collective::Broadcast,
            Operation::AllReduce { .. } => Collective::AllReduce,
            Operation::AllGather { .. } => Collective::AllGather,
            Operation::ReduceScatter { .. } => Collective::ReduceScatter,
            Operation::AllToAll { .. } => Collective::AllToAll,
        }
    }

    /// What this rank gives; a barrier has nothing.
    pub(crate) fn given(&self) -> Option<&Payload> {
        match self {
            Operation::Barrier => None,
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => Some(buf),
            Operation::AllGather { send, .. }
            | Operation::ReduceScatter { send, .. }
            | Operation::AllToAll { send, .. } => Some(send),
        }
    }

    /// Element type of the buffers; a barrier has none.
    pub fn kind(&self) -> Option<ElementKind> {
        self.given().map(Payload::kind)
    }

    /// Whether its buffers are sizes without elements.
    pub(crate) fn is_opaque(&self) -> bool {
        self.given().is_some_and(|given| matches!(given, Payload::Opaque(..)))
    }

    /// Whether its buffers are in memory of a device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.given().is_some_and(Payload::is_on_device)
    }

    /// Bytes of all its buffers.
    pub fn bytes(&self) -> usize {
        match self {
            Operation::Barrier => 0,
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => buf.bytes(),
            Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. }
            | Operation::AllToAll { send, recv, .. } => send.bytes() + recv.bytes(),
        }
    }

    /// True when a peer's `other` can meet this operation. Per-peer counts of an all-to-all are not compared
    /// here: they differ between ranks by nature and have an error of their own.
    pub(crate) fn agrees_with(&self, other: &Operation) -> bool {
        use Operation::*;
        if self.kind() != other.kind() || self.is_on_device() != other.is_on_device() {
            return false;
        }
        match (self, other) {
            (Barrier, Barrier) | (AllToAll { .. }, AllToAll { .. }) => true,
            (Broadcast { root: a, buf: x }, Broadcast { root: b, buf: y }) => a == b && x.len() == y.len(),
            (AllReduce { reduce: a, buf: x }, AllReduce { reduce: b, buf: y }) => a == b && x.len() == y.len(),
            (AllGather { counts: a, .. }, AllGather { counts: b, .. }) => a == b,
            (ReduceScatter { reduce: a, counts: x, .. }, ReduceScatter { reduce: b, counts: y, .. }) => {
                a == b && x == y
            }
            _ => false,
        }
    }

    /// A number that is equal where [`Operation::agrees_with`] holds, for ranks that cannot look at each other's
    /// requests.
    pub(crate) fn digest(&self) -> u64 {
        let kind = self.kind().map_or(0, |kind| 1 + kind as u64);
        let head = [self.collective() as u64, kind, u64::from(self.is_on_device())];
        let count = |counts: &[usize]| digest(counts.iter().map(|&count| count as u64));
        let rest = match self {
            Operation::Barrier | Operation::AllToAll { .. } => [0, 0],
            Operation::Broadcast { root, buf } => [*root as u64, buf.len() as u64],
            Operation::AllReduce { reduce, buf } => [*reduce as u64, buf.len() as u64],
            Operation::AllGather { counts, .. } => [0, count(counts)],
            Operation::ReduceScatter { reduce, counts, .. } => [*reduce as u64, count(counts)],
        };
        digest(head.into_iter().chain(rest))
    }

    /// The buffers back to their owner.
    pub(crate) fn into_completed(self) -> Completed {
        match self {
            Operation::Barrier => Completed::nothing(),
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => Completed { send: None, recv: buf },
            Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. }
            | Operation::AllToAll { send, recv, .. } => Completed { send: Some(send), recv },
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.collective().name();
        let place = if self.is_on_device() { " on a device" } else { "" };
        let kind = format!("{}{place}", self.kind().map_or("", ElementKind::name));
        match self {
            Operation::Barrier => write!(f, "{name}"),
            Operation::Broadcast { root, buf } => {
                write!(f, "{name}(root {root}, {} x {kind})", buf.len())
            }
            Operation::AllReduce { reduce, buf } => {
                write!(f, "{name}({reduce:?}, {} x {kind})", buf.len())
            }
            Operation::AllGather { counts, .. } => write!(f, "{name}(counts {counts:?} of {kind})"),
            Operation::ReduceScatter { reduce, counts, .. } => {
                write!(f, "{name}({reduce:?}, counts {counts:?} of {kind})")
            }
            Operation::AllToAll { send_counts, recv_counts, .. } => {
                write!(f, "{name}(send {send_counts:?}, receive {recv_counts:?} of {kind})")
            }
        }
    }
}

/// An operation and the line that asked for it.
#[derive(Debug)]
pub struct Request {
    pub operation: Operation,
    pub site: &'static Location<'static>,
}

impl Request {
    /// An operation asked for by the calling line.
    #[track_caller]
    pub fn new(operation: Operation) -> Self {
        Request { operation, site: Location::caller() }
    }

    /// See [`Operation::Barrier`].
    #[track_caller]
    pub fn barrier() -> Self {
        Self::new(Operation::Barrier)
    }

    /// See [`Operation::Broadcast`].
    #[track_caller]
    pub fn broadcast(root: usize, buf: impl Into<Payload>) -> Self {
        Self::new(Operation::Broadcast { root, buf: buf.into() })
    }

    /// See [`Operation::AllReduce`].
    #[track_caller]
    pub fn all_reduce(reduce: Reduce, buf: impl Into<Payload>) -> Self {
        Self::new(Operation::AllReduce { reduce, buf: buf.into() })
    }

    /// See [`Operation::AllGather`].
    #[track_caller]
    pub fn all_gather(send: impl Into<Payload>, recv: impl Into<Payload>, counts: Vec<usize>) -> Self {
        Self::new(Operation::AllGather { send: send.into(), recv: recv.into(), counts })
    }

    /// See [`Operation::ReduceScatter`].
    #[track_caller]
    pub fn reduce_scatter(
        reduce: Reduce,
        send: impl Into<Payload>,
        recv: impl Into<Payload>,
        counts: Vec<usize>,
    ) -> Self {
        Self::new(Operation::ReduceScatter { reduce, send: send.into(), recv: recv.into(), counts })
    }

    /// See [`Operation::AllToAll`].
    #[track_caller]
    pub fn all_to_all(
        send: impl Into<Payload>,
        send_counts: Vec<usize>,
        recv: impl Into<Payload>,
        recv_counts: Vec<usize>,
    ) -> Self {
        Self::new(Operation::AllToAll { send: send.into(), send_counts, recv: recv.into(), recv_counts })
    }
}

/// The buffers of a finished operation, back with the rank that lent them.
#[derive(Debug)]
pub struct Completed {
    /// What was sent, unchanged; none for operations in place.
    pub send: Option<Payload>,
    /// The result; empty for a barrier.
    pub recv: Payload,
}

impl Completed {
    /// Of nothing that was lent.
    pub(crate) fn nothing() -> Self {
        Completed { send: None, recv: Payload::empty() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations of which no two are alike in all that must agree, but for the last three.
    fn operations() -> Vec<Operation> {
        let gather = |counts: [usize; 2]| Request::all_gather(vec![0u8; 3], vec![0u8; 6], counts.to_vec());
        let scatter = |reduce| Request::reduce_scatter(reduce, vec![0u8; 6], vec![0u8; 3], vec![3, 3]);
        let exchange =
            |counts: [usize; 2]| Request::all_to_all(vec![0u8; 3], counts.to_vec(), vec![0u8; 3], counts.to_vec());
        let requests = [
            Request::barrier(),
            Request::broadcast(0, vec![0u8; 4]),
            Request::broadcast(1, vec![0u8; 4]),
            Request::broadcast(1, vec![0u8; 5]),
            Request::all_reduce(Reduce::Sum, vec![0f32; 4]),
            Request::all_reduce(Reduce::Max, vec![0f32; 4]),
            Request::all_reduce(Reduce::Max, vec![0u32; 4]),
            Request::all_reduce(Reduce::Max, vec![0u32; 5]),
            gather([3, 3]),
            gather([2, 4]),
            scatter(Reduce::Sum),
            scatter(Reduce::Min),
            Request::all_to_all(vec![0f32; 3], vec![1, 2], vec![0f32; 3], vec![1, 2]),
            exchange([1, 2]),
            exchange([2, 1]),
            exchange([3, 0]),
        ];
        requests.into_iter().map(|request| request.operation).collect()
    }

    #[test]
    fn digests_are_equal_where_operations_agree() {
        let operations = operations();
        let mut agreeing = 0;
        for one in &operations {
            for other in &operations {
                assert_eq!(one.digest() == other.digest(), one.agrees_with(other), "{one}, {other}");
                agreeing += usize::from(one.agrees_with(other));
            }
        }
        assert_eq!(agreeing, 13 + 3 * 3);
    }
}
