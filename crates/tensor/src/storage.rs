//! What stands behind a tensor: memory of the host, or its size alone.
//!
//! Nothing but this file and the dispatch in [`crate::kernels`] asks which it is. An engine with memory of its own adds
//! an arm here and one there.

use std::ops::Range;
use std::sync::Arc;

use crate::account::Cause;
use crate::cpu::stored::{Stored, StoredRef};
use crate::device::{Device, aligned_window};
use crate::dtype::Dtype;
use crate::elements::Elements;

/// Where the elements are.
#[derive(Debug)]
enum Storage {
    /// The window is the part of the memory that holds the elements.
    Host(Elements, Range<usize>),
    /// Nowhere: only how many there would be is known.
    Sizes(Dtype, usize),
}

/// Elements charged to an account; the last handle gives host memory back to the device for reuse.
#[derive(Debug)]
pub(crate) struct Allocation {
    storage: Storage,
    cause: Cause,
    device: Arc<Device>,
}

impl Allocation {
    /// Room for `len` elements of whatever the memory last held.
    pub(crate) fn stale(device: &Arc<Device>, dtype: Dtype, len: usize) -> Allocation {
        if !device.has_data() {
            return Allocation::new(device, Storage::Sizes(dtype, len));
        }
        let elements = device.take(dtype, len);
        let window = match &elements {
            Elements::F32(data) => aligned_window(data, len),
            Elements::Bf16(data) => aligned_window(data, len),
            Elements::U32(data) => aligned_window(data, len),
        };
        Allocation::new(device, Storage::Host(elements, window))
    }

    /// Memory that came from elsewhere; on a device without data only its size stays.
    pub(crate) fn of_window(device: &Arc<Device>, elements: Elements, window: Range<usize>) -> Allocation {
        match device.has_data() {
            true => Allocation::new(device, Storage::Host(elements, window)),
            false => Allocation::new(device, Storage::Sizes(elements.dtype(), window.len())),
        }
    }

    /// Only a size, as what a collective returns that moved nothing.
    pub(crate) fn sized(device: &Arc<Device>, dtype: Dtype, len: usize) -> Allocation {
        assert!(!device.has_data(), "a device with data has tensors with data");
        Allocation::new(device, Storage::Sizes(dtype, len))
    }

    fn new(device: &Arc<Device>, storage: Storage) -> Allocation {
        let cause = device.account().current();
        let buffer = Allocation { storage, cause, device: device.clone() };
        device.account().add(cause, buffer.bytes());
        buffer
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn dtype(&self) -> Dtype {
        match &self.storage {
            Storage::Host(elements, _) => elements.dtype(),
            Storage::Sizes(dtype, _) => *dtype,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.storage {
            Storage::Host(_, window) => window.len(),
            Storage::Sizes(_, len) => *len,
        }
    }

    fn bytes(&self) -> u64 {
        (self.len() * self.dtype().bytes()) as u64
    }

    /// The host memory, for whoever owns it while a collective is in flight; `None` if there is only a size.
    pub(crate) fn into_window(mut self) -> Option<(Elements, Range<usize>)> {
        match &mut self.storage {
            Storage::Host(elements, window) => Some((elements.take(), window.clone())),
            Storage::Sizes(..) => None,
        }
    }

    /// The elements as they are stored.
    #[track_caller]
    pub(crate) fn stored_ref(&self) -> StoredRef<'_> {
        match &self.storage {
            Storage::Host(Elements::F32(data), window) => StoredRef::F32(&data[window.clone()]),
            Storage::Host(Elements::Bf16(data), window) => StoredRef::Bf16(&data[window.clone()]),
            Storage::Host(Elements::U32(data), window) => StoredRef::U32(&data[window.clone()]),
            Storage::Sizes(..) => no_data(),
        }
    }

    /// The elements as they are stored, to write.
    #[track_caller]
    pub(crate) fn stored(&mut self) -> Stored<'_> {
        match &mut self.storage {
            Storage::Host(Elements::F32(data), window) => Stored::F32(&mut data[window.clone()]),
            Storage::Host(Elements::Bf16(data), window) => Stored::Bf16(&mut data[window.clone()]),
            Storage::Host(Elements::U32(data), window) => Stored::U32(&mut data[window.clone()]),
            Storage::Sizes(..) => no_data(),
        }
    }
}

#[track_caller]
fn no_data() -> ! {
    panic!("this device has the sizes of tensors but not their elements: cross over with `to_host`")
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.account().remove(self.cause, self.bytes());
        if let Storage::Host(elements, _) = &mut self.storage {
            self.device.give(elements.take());
        }
    }
}
