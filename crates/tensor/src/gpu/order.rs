//! Whether what is asked of an accelerator has an order where it needs one.
//!
//! A stream does what it is asked for in order. Two streams, or a stream and the host, have an order only where one waits
//! for the other; an engine that does everything at once would not show that a wait is missing. So each stream and the host
//! has a vector clock (Mattern 1989): how far it knows each stream to be. A use of memory must know the uses before it.

use std::collections::HashMap;

/// A queue of an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceStream {
    /// Kernels, and copies to the device that they wait for.
    Compute,
    /// Copies to the host that the host waits for.
    Copy,
    /// Copies to the device of what is kept on the host.
    Fetch,
    /// Copies to the host of what is kept there.
    Keep,
}

impl DeviceStream {
    pub(super) const ALL: [DeviceStream; 4] =
        [DeviceStream::Compute, DeviceStream::Copy, DeviceStream::Fetch, DeviceStream::Keep];
}

const STREAMS: usize = DeviceStream::ALL.len();

/// How far each stream is known to be: a point in a stream that another can wait for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamClock([u64; STREAMS]);

impl StreamClock {
    fn join(&mut self, other: &StreamClock) {
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own = other.max(*own));
    }
}

/// How memory was used last: by stream, the number of its operation.
#[derive(Clone, Copy, Debug, Default)]
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
        let host = self.host;
        let own = &mut self.streams[stream as usize];
        // The host asks after what it has waited for.
        own.join(&host);
        own.0[stream as usize] += 1;
        let now = *own;
        for (address, used) in uses {
            let before = self.uses.entry(address).or_default();
            check(&now, &before.writes, stream, what);
            let last = match used {
                Use::Read => &mut before.reads,
                Use::Write => {
                    check(&now, &before.reads, stream, what);
                    &mut before.writes
                }
            };
            last.0[stream as usize] = now.0[stream as usize];
        }
    }

    pub(super) fn record(&self, stream: DeviceStream) -> StreamClock {
        self.streams[stream as usize]
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

fn check(now: &StreamClock, before: &StreamClock, stream: DeviceStream, what: &str) {
    let is_known = now.0.iter().zip(before.0).all(|(known, used)| *known >= used);
    assert!(is_known, "{what} on stream {stream:?} uses memory that another stream may not be done with");
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
