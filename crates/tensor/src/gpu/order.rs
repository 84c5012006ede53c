//! Whether what is asked of an accelerator has an order where it needs one.
//!
//! A stream does what it is asked for in order. Two streams, or a stream and the host, have an order only where one waits
//! for the other; an engine that does everything at once would not show that a wait is missing. So each stream and the host
//! has a vector clock (Mattern 1989): how far it knows each stream to be. A use of memory must know the uses before it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A queue of an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DeviceStream {
    /// Kernels, and copies to the device that they wait for.
    Compute,
    /// Copies to the host that the host waits for.
    Copy,
    /// Copies to the device of what is kept on the host.
    Fetch,
    /// Copies to the host of what is kept there.
    Keep,
    /// What collectives copy and reduce.
    Exchange,
}

impl DeviceStream {
    pub(super) const ALL: [DeviceStream; 5] =
        [DeviceStream::Compute, DeviceStream::Copy, DeviceStream::Fetch, DeviceStream::Keep, DeviceStream::Exchange];
}

const STREAMS: usize = DeviceStream::ALL.len();

/// A stream of one of the engines, which each have a number.
type StreamOf = (usize, DeviceStream);

/// How far each stream is known to be: a point in a stream that another can wait for.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamClock(BTreeMap<StreamOf, u64>);

impl StreamClock {
    fn join(&mut self, other: &StreamClock) {
        for (&place, &time) in &other.0 {
            let own = self.0.entry(place).or_default();
            *own = time.max(*own);
        }
    }

    fn knows(&self, other: &StreamClock) -> bool {
        other.0.iter().all(|(place, time)| self.0.get(place).is_some_and(|known| known >= time))
    }
}

/// An operation of a stream, and all that it comes after.
#[derive(Debug)]
pub(crate) struct TimedOperation<'a> {
    place: StreamOf,
    clock: StreamClock,
    what: &'a str,
}

/// How memory was used last: by stream, the number of its operation.
#[derive(Debug, Default)]
struct Uses {
    writes: StreamClock,
    reads: StreamClock,
}

/// How a block of memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// Everything that was asked of an engine.
#[derive(Debug, Default)]
pub(super) struct UseOrder {
    /// Its address is the engine's number.
    identity: Arc<u8>,
    streams: [StreamClock; STREAMS],
    host: StreamClock,
    uses: HashMap<u64, Uses>,
}

impl UseOrder {
    /// An operation of `stream` that uses blocks of memory, by their addresses.
    ///
    /// # Panics
    /// If a use does not come after those it depends on.
    pub(super) fn operation(&mut self, stream: DeviceStream, what: &str, uses: impl Iterator<Item = (u64, Use)>) {
        let operation = self.begin(stream, what);
        uses.for_each(|(address, used)| self.note(&operation, address, used));
    }

    /// The next operation of `stream`.
    pub(super) fn begin<'a>(&mut self, stream: DeviceStream, what: &'a str) -> TimedOperation<'a> {
        let place = (Arc::as_ptr(&self.identity).addr(), stream);
        let own = &mut self.streams[stream as usize];
        // The host asks after what it has waited for.
        own.join(&self.host);
        *own.0.entry(place).or_default() += 1;
        TimedOperation { place, clock: own.clone(), what }
    }

    /// An operation, of this engine or of another one, uses a block of this one's memory.
    ///
    /// # Panics
    /// If the use does not come after those it depends on.
    pub(super) fn note(&mut self, operation: &TimedOperation, address: u64, used: Use) {
        let TimedOperation { place, clock, what } = operation;
        let before = self.uses.entry(address).or_default();
        let is_ordered = clock.knows(&before.writes) && (used == Use::Read || clock.knows(&before.reads));
        assert!(is_ordered, "{what} on stream {:?} uses memory that another stream may not be done with", place.1);
        let last = match used {
            Use::Read => &mut before.reads,
            Use::Write => &mut before.writes,
        };
        last.0.insert(*place, clock.0[place]);
    }

    pub(super) fn record(&self, stream: DeviceStream) -> StreamClock {
        self.streams[stream as usize].clone()
    }

    pub(super) fn wait(&mut self, stream: DeviceStream, event: &StreamClock) {
        self.streams[stream as usize].join(event);
    }

    /// The host waits for a stream.
    pub(super) fn synchronize(&mut self, stream: DeviceStream) {
        let event = self.record(stream);
        self.host.join(&event);
    }

    /// Memory that is no more.
    pub(super) fn forget(&mut self, address: u64) {
        self.uses.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 64;

    fn write(order: &mut UseOrder, stream: DeviceStream) {
        order.operation(stream, "a test", [(A, Use::Write)].into_iter());
    }

    fn read(order: &mut UseOrder, stream: DeviceStream) {
        order.operation(stream, "a test", [(A, Use::Read)].into_iter());
    }

    #[test]
    fn a_stream_or_an_event_gives_order() {
        let mut order = UseOrder::default();
        write(&mut order, DeviceStream::Compute);
        read(&mut order, DeviceStream::Compute);
        let event = order.record(DeviceStream::Compute);
        order.wait(DeviceStream::Copy, &event);
        read(&mut order, DeviceStream::Copy);
        // What the host has waited for is over when it asks for more.
        order.synchronize(DeviceStream::Copy);
        write(&mut order, DeviceStream::Compute);
    }

    #[test]
    #[should_panic(expected = "a test on stream Copy uses memory")]
    fn reading_needs_the_write_before_it() {
        let mut order = UseOrder::default();
        write(&mut order, DeviceStream::Compute);
        read(&mut order, DeviceStream::Copy);
    }

    #[test]
    #[should_panic(expected = "a test on stream Compute uses memory")]
    fn writing_needs_the_reads_before_it() {
        let mut order = UseOrder::default();
        read(&mut order, DeviceStream::Copy);
        write(&mut order, DeviceStream::Compute);
    }

    #[test]
    #[should_panic(expected = "a test on stream Copy uses memory")]
    fn an_event_is_of_the_time_it_was_recorded_at() {
        let mut order = UseOrder::default();
        let early = order.record(DeviceStream::Compute);
        write(&mut order, DeviceStream::Compute);
        order.wait(DeviceStream::Copy, &early);
        read(&mut order, DeviceStream::Copy);
    }

    /// Two may read at a time.
    #[test]
    fn reads_need_no_order() {
        let mut order = UseOrder::default();
        read(&mut order, DeviceStream::Copy);
        read(&mut order, DeviceStream::Compute);
        order.forget(A);
        write(&mut order, DeviceStream::Copy);
    }
}
