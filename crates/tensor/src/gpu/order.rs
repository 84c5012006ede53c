//! Whether what is asked of an accelerator has an order where it needs one.
//!
//! A stream does what it is asked for in order. Two streams, or a stream and the host, have an order only where one waits
//! for the other; an engine that does everything at once would not show that a wait is missing. So each stream and the host
//! has a vector clock (Mattern 1989): how far it knows each stream to be. A use of memory must know the uses before it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
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
    /// What collectives copy, send and reduce.
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

    fn knows(&self, place: &StreamOf, time: u64) -> bool {
        self.0.get(place).is_some_and(|&known| known >= time)
    }
}

/// An operation of a stream, and all that it comes after.
#[derive(Debug)]
pub(crate) struct TimedOperation<'a> {
    place: StreamOf,
    clock: StreamClock,
    what: &'a str,
}

/// A use of some bytes of a block by a stream.
#[derive(Debug)]
struct PastUse {
    bytes: Range<usize>,
    used: Use,
    place: StreamOf,
    /// The number of the stream's operation.
    time: u64,
}

/// All bytes of a block, as kernels use it.
pub(super) const WHOLE: Range<usize> = 0..usize::MAX;

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
    /// By address.
    uses: HashMap<u64, Vec<PastUse>>,
}

impl UseOrder {
    /// An operation of `stream` that uses blocks of memory, by their addresses, and bytes of them.
    ///
    /// # Panics
    /// If a use does not come after those it depends on.
    pub(super) fn operation(
        &mut self,
        stream: DeviceStream,
        what: &str,
        uses: impl Iterator<Item = ((u64, Range<usize>), Use)>,
    ) {
        let operation = self.begin(stream, what);
        uses.for_each(|(block, used)| self.note(&operation, block, used));
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

    /// An operation, of this engine or of another one, uses bytes of the block of this one's memory at an address.
    ///
    /// # Panics
    /// If the use does not come after those it depends on.
    pub(super) fn note(&mut self, operation: &TimedOperation, (address, bytes): (u64, Range<usize>), used: Use) {
        let TimedOperation { place, clock, what } = operation;
        let before = self.uses.entry(address).or_default();
        let concerns = |past: &PastUse| {
            let overlaps = past.bytes.start < bytes.end && bytes.start < past.bytes.end;
            overlaps && (past.used == Use::Write || used == Use::Write)
        };
        let is_ordered = before.iter().filter(|past| concerns(past)).all(|past| clock.knows(&past.place, past.time));
        assert!(is_ordered, "{what} on stream {:?} uses memory that another stream may not be done with", place.1);
        let time = clock.0[place];
        // What comes after this use comes after those that it knows.
        before.retain(|past| {
            let is_within = bytes.start <= past.bytes.start && past.bytes.end <= bytes.end;
            let replaces = used == Use::Write || past.used == Use::Read && past.place == *place;
            !(is_within && replaces && clock.knows(&past.place, past.time))
        });
        before.push(PastUse { bytes, used, place: *place, time });
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
        order.operation(stream, "a test", [((A, WHOLE), Use::Write)].into_iter());
    }

    fn read(order: &mut UseOrder, stream: DeviceStream) {
        order.operation(stream, "a test", [((A, WHOLE), Use::Read)].into_iter());
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

    /// What one writes and another reads are different bytes.
    #[test]
    fn uses_of_other_bytes_need_no_order() {
        let mut order = UseOrder::default();
        let mut part = |stream, bytes, used| order.operation(stream, "a test", [((A, bytes), used)].into_iter());
        part(DeviceStream::Compute, 0..8, Use::Write);
        part(DeviceStream::Copy, 8..16, Use::Write);
        part(DeviceStream::Compute, 0..8, Use::Read);
        part(DeviceStream::Copy, 12..20, Use::Read);
    }

    #[test]
    #[should_panic(expected = "a test on stream Compute uses memory")]
    fn bytes_that_are_shared_need_one() {
        let mut order = UseOrder::default();
        let mut part = |stream, bytes, used| order.operation(stream, "a test", [((A, bytes), used)].into_iter());
        part(DeviceStream::Copy, 8..16, Use::Write);
        part(DeviceStream::Compute, 0..9, Use::Read);
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
