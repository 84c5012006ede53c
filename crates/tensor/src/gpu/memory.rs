//! A block of an accelerator's memory.

use std::sync::Arc;

use super::{Accelerator, DeviceElements, DeviceStream, Event, Gpu};
use crate::device::Device;
use crate::dtype::Dtype;

/// Bytes at an address that only the engine understands; freed when dropped.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    address: u64,
    bytes: usize,
    engine: Arc<dyn Accelerator>,
}

impl DeviceMemory {
    pub(super) fn new(engine: &Arc<dyn Accelerator>, bytes: usize) -> Result<DeviceMemory, String> {
        Ok(DeviceMemory { address: engine.allocate(bytes)?, bytes, engine: engine.clone() })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn engine(&self) -> &dyn Accelerator {
        &*self.engine
    }

    fn check(&self, first: usize, bytes: &[u8]) {
        assert!(first + bytes.len() <= self.bytes, "bytes {first} + {} of {}", bytes.len(), self.bytes);
    }

    /// What it holds is of no use any more.
    pub(crate) fn forget(&self) {
        self.engine.forget(self);
    }

    /// Writes bytes from `first` on. Comes after the kernels before it, and does not wait.
    pub(crate) fn write(&self, first: usize, bytes: &[u8]) {
        self.check(first, bytes);
        if !bytes.is_empty() {
            self.engine.upload(DeviceStream::Compute, self, first, bytes);
        }
    }

    /// Reads bytes from `first` on: waits for the kernels before it.
    pub(crate) fn read(&self, first: usize, bytes: &mut [u8]) {
        self.check(first, bytes);
        if bytes.is_empty() {
            return;
        }
        // On a stream of its own: kernels that are launched meanwhile need not wait for the copy.
        let kernels = self.engine.record(DeviceStream::Compute);
        self.engine.wait(DeviceStream::Copy, &kernels);
        self.engine.download(DeviceStream::Copy, self, first, bytes);
    }

    /// Reads the first bytes as what was launched leaves them, for who checks results.
    pub(crate) fn look(&self, bytes: &mut [u8]) {
        self.check(0, bytes);
        if !bytes.is_empty() {
            self.engine.look(self, bytes);
        }
    }

    /// Writes pinned bytes from `first` on, after what comes before `after`, and returns when they are there.
    pub(crate) fn fetch(&self, first: usize, bytes: &[u8], after: &Event) {
        self.check(first, bytes);
        if !bytes.is_empty() {
            self.engine.wait(DeviceStream::Fetch, after);
            self.engine.upload(DeviceStream::Fetch, self, first, bytes);
            self.engine.synchronize(DeviceStream::Fetch);
        }
    }

    /// Reads into pinned bytes from `first` on, after what comes before `after`, and returns when they are there.
    pub(crate) fn keep(&self, first: usize, bytes: &mut [u8], after: &Event) {
        self.check(first, bytes);
        if !bytes.is_empty() {
            self.engine.wait(DeviceStream::Keep, after);
            self.engine.download(DeviceStream::Keep, self, first, bytes);
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.engine.free(self.address, self.bytes);
    }
}

/// Memory of a line of the table that is not an operand; it goes back to the device when dropped.
#[derive(Debug)]
pub(super) struct Temporary<'a> {
    device: &'a Device,
    /// There until the drop.
    memory: Option<DeviceMemory>,
    elements: DeviceElements,
}

impl<'a> Temporary<'a> {
    /// Room for so many elements.
    pub(super) fn new(gpu: &Gpu, device: &'a Device, dtype: Dtype, len: usize) -> Temporary<'a> {
        let memory = device.take_memory(gpu, len * dtype.bytes());
        Temporary { device, elements: DeviceElements::new(&memory, dtype, len), memory: Some(memory) }
    }

    pub(super) fn device_elements(&self) -> DeviceElements {
        self.elements
    }
}

impl Drop for Temporary<'_> {
    /// Whoever takes the memory next uses it on the same stream, after what used it here.
    fn drop(&mut self) {
        self.memory.take().into_iter().for_each(|memory| self.device.give_memory(memory));
    }
}
