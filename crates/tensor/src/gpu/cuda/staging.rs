//! Pinned memory of the host, through which bytes go to the device wherever they lie.
//!
//! The driver copies from memory that is not pinned only after what the stream was asked for before, while the host waits: a
//! list of routes would have the device idle until the next kernel is launched. From here the device copies by itself.

use std::ptr;
use std::slice;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::{done, failed};
use crate::gpu::error::EngineError;

/// Of the ring, at most; and the part of a GPU's memory that it is at most.
const BYTES_MOST: usize = 32 << 20;
const PART: usize = 1 << 10;
/// Where each list begins: at a line of the cache.
const ALIGN_BYTES: usize = 64;

/// A ring of pinned bytes, for one stream. One half is filled while the device still copies from the other.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: *mut u8,
    /// Of each half.
    size: usize,
    /// The half that is filled, and how many bytes of it are.
    half: usize,
    filled: usize,
    /// After the last copy from each half.
    copied: [Option<CudaEvent>; 2],
    stream: Arc<CudaStream>,
}

// SAFETY: the bytes are this ring's alone.
unsafe impl Send for Staging {}

impl Staging {
    /// For a stream of a GPU with so many bytes of memory.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
        bytes: usize,
    ) -> Result<Staging, EngineError> {
        let size = (bytes / PART).min(BYTES_MOST) / 2 / ALIGN_BYTES * ALIGN_BYTES;
        let pinned = || {
            context.bind_to_thread()?;
            // SAFETY: nothing is read that has not been written.
            unsafe { result::malloc_host((2 * size).max(1), 0) }
        };
        let bytes = pinned().map_err(|error: DriverError| failed("pinning memory", error))?;
        Ok(Staging { bytes: bytes.cast(), size, half: 0, filled: 0, copied: [None, None], stream: stream.clone() })
    }

    /// Begins to copy to an address of the device, whose context is the thread's. `bytes` are read before it returns. False if
    /// there are too many.
    pub(super) fn upload(&mut self, to: u64, bytes: &[u8]) -> bool {
        if bytes.len() > self.size {
            return false;
        }
        if self.filled + bytes.len() > self.size {
            self.turn();
        }
        let first = self.half * self.size + self.filled;
        // SAFETY: the place lies in the ring, and the device has copied what it held before.
        let staged = unsafe {
            let place = self.bytes.add(first);
            ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len());
            slice::from_raw_parts(place.cast_const(), bytes.len())
        };
        // SAFETY: the address is of as many bytes, and those of the ring stay what they are until the event after the copy.
        done(unsafe { result::memcpy_htod_async(to, staged, self.stream.cu_stream()) }, "a copy to the device");
        self.filled = (self.filled + bytes.len()).next_multiple_of(ALIGN_BYTES);
        true
    }

    /// Goes on with the other half, when nothing is copied from it any more.
    fn turn(&mut self) {
        self.copied[self.half] = Some(done(self.stream.record_event(None), "recording an event"));
        (self.half, self.filled) = (1 - self.half, 0);
        if let Some(event) = self.copied[self.half].take() {
            done(event.synchronize(), "waiting for a copy to the device");
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Of a device that is lost nothing can be waited for or freed.
        let _ = self.stream.synchronize();
        // SAFETY: `new` took the bytes, and no copy from them goes on.
        let _ = unsafe { result::free_host(self.bytes.cast()) };
    }
}
