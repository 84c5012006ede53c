//! A block of an accelerator's memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Accelerator, DeviceStream, Use};

/// Bytes at an address that only the engine understands; freed when dropped.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    address: u64,
    bytes: usize,
    engine: Arc<dyn Accelerator>,
}

impl DeviceMemory {
    pub(super) fn new(engine: &Arc<dyn Accelerator>, bytes: usize) -> DeviceMemory {
        DeviceMemory { address: engine.allocate(bytes), bytes, engine: engine.clone() }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it holds is of no use any more.
    pub(crate) fn forget(&self) {
        self.engine.forget(self);
    }

    /// Writes bytes from `first` on. Comes after the kernels before it, and does not wait.
    pub(crate) fn write(&self, first: usize, bytes: &[u8]) {
        assert!(first + bytes.len() <= self.bytes, "bytes {first} + {} of {}", bytes.len(), self.bytes);
        if !bytes.is_empty() {
            self.engine.upload(DeviceStream::Compute, self, first, bytes);
        }
    }

    /// Reads bytes from `first` on: waits for the kernels before it.
    pub(crate) fn read(&self, first: usize, bytes: &mut [u8]) {
        assert!(first + bytes.len() <= self.bytes, "bytes {first} + {} of {}", bytes.len(), self.bytes);
        if bytes.is_empty() {
            return;
        }
        // On a stream of its own: kernels that are launched meanwhile need not wait for the copy.
        let kernels = self.engine.record(DeviceStream::Compute);
        self.engine.wait(DeviceStream::Copy, &kernels);
        self.engine.download(DeviceStream::Copy, self, first, bytes);
    }

    /// Where the CPU finds it that makes a product in the place of a kernel.
    ///
    /// # Panics
    /// If the host does not reach it.
    #[track_caller]
    pub(crate) fn reach(&self, used: Use) -> NonNull<u8> {
        self.engine.reach(DeviceStream::Compute, self, used).expect("memory that the CPU's products reach")
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.engine.free(self.address, self.bytes);
    }
}
