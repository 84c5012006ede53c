//! What stands behind a tensor: memory of the host, an accelerator's, or its size alone.
//!
//! Nothing but this file and the dispatch in [`crate::kernels`] asks which it is.

use std::ops::Range;
use std::sync::Arc;

use crate::account::Cause;
use crate::cpu::stored::{Stored, StoredRef};
use crate::device::{Device, Engine};
use crate::dtype::Dtype;
use crate::elements::{Elements, HostElements};
use crate::gpu::DeviceMemory;
use crate::pool::aligned_window;

/// Where the elements are.
#[derive(Debug)]
enum Storage {
    /// The window is the part of the memory that holds the elements.
    Host(Elements, Range<usize>),
    /// In memory of an accelerator, from its beginning on; `None` when it has been given back.
    Accelerator(Option<DeviceMemory>, Dtype, usize),
    /// Nowhere: only how many there would be is known.
    Sizes(Dtype, usize),
}

/// Elements charged to an account; the last handle gives memory back to the device for reuse.
#[derive(Debug)]
pub(crate) struct Allocation {
    storage: Storage,
    cause: Cause,
    device: Arc<Device>,
}

impl Device {
    /// Host memory for `len` elements, of whatever it last held, and their window in it. No account counts it.
    pub fn host_window(&self, dtype: Dtype, len: usize) -> (Elements, Range<usize>) {
        let elements = self.take(dtype, len);
        let window = match &elements {
            Elements::F32(data) => aligned_window(data, len),
            Elements::Bf16(data) => aligned_window(data, len),
            Elements::U32(data) => aligned_window(data, len),
        };
        (elements, window)
    }
}

impl Allocation {
    /// Room for `len` elements of whatever the memory last held.
    pub(crate) fn stale(device: &Arc<Device>, dtype: Dtype, len: usize) -> Allocation {
        let storage = match device.engine() {
            Engine::Host => {
                let (elements, window) = device.host_window(dtype, len);
                Storage::Host(elements, window)
            }
            Engine::Accelerator(gpu) => {
                Storage::Accelerator(Some(device.take_memory(gpu, len * dtype.bytes())), dtype, len)
            }
            Engine::Sizes(_) => Storage::Sizes(dtype, len),
        };
        Allocation::new(device, storage)
    }

    /// Memory that came from elsewhere: an accelerator copies it, and on a device without data only its size stays.
    pub(crate) fn of_window(device: &Arc<Device>, elements: Elements, window: Range<usize>) -> Allocation {
        match device.engine() {
            Engine::Host => Allocation::new(device, Storage::Host(elements, window)),
            Engine::Accelerator(_) => {
                let mut copy = Allocation::stale(device, elements.dtype(), window.len());
                copy.write(0, elements.stored_ref().part(window));
                device.give(elements);
                copy
            }
            Engine::Sizes(_) => Allocation::new(device, Storage::Sizes(elements.dtype(), window.len())),
        }
    }

    /// An accelerator's memory that came back.
    pub(crate) fn of_memory(device: &Arc<Device>, memory: DeviceMemory, dtype: Dtype, len: usize) -> Allocation {
        Allocation::new(device, Storage::Accelerator(Some(memory), dtype, len))
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
            Storage::Accelerator(_, dtype, _) | Storage::Sizes(dtype, _) => *dtype,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.storage {
            Storage::Host(_, window) => window.len(),
            Storage::Accelerator(_, _, len) | Storage::Sizes(_, len) => *len,
        }
    }

    fn bytes(&self) -> u64 {
        (self.len() * self.dtype().bytes()) as u64
    }

    /// Host memory, for whoever owns it while a collective is in flight, which an accelerator copies to first; `None` if
    /// there is only a size.
    pub(crate) fn into_window(mut self) -> Option<(Elements, Range<usize>)> {
        let (dtype, len) = (self.dtype(), self.len());
        match &mut self.storage {
            Storage::Host(elements, window) => Some((elements.take(), window.clone())),
            Storage::Accelerator(..) => {
                let (mut elements, window) = self.device.host_window(dtype, len);
                self.memory().read(0, elements.stored().part(window.clone()).bytes());
                Some((elements, window))
            }
            Storage::Sizes(..) => None,
        }
    }

    /// An accelerator's memory, for whoever owns it while a collective is in flight.
    ///
    /// # Panics
    /// If it is not an accelerator's.
    #[track_caller]
    pub(crate) fn into_memory(mut self) -> DeviceMemory {
        let Storage::Accelerator(memory, ..) = &mut self.storage else { panic!("memory that is not an accelerator's") };
        memory.take().expect("it is given back by the drop alone")
    }

    /// The elements as they are stored.
    #[track_caller]
    pub(crate) fn stored_ref(&self) -> StoredRef<'_> {
        match &self.storage {
            Storage::Host(elements, window) => elements.stored_ref().part(window.clone()),
            Storage::Accelerator(..) | Storage::Sizes(..) => no_data(),
        }
    }

    /// The elements as they are stored, to write.
    #[track_caller]
    pub(crate) fn stored(&mut self) -> Stored<'_> {
        match &mut self.storage {
            Storage::Host(elements, window) => elements.stored().part(window.clone()),
            Storage::Accelerator(..) | Storage::Sizes(..) => no_data(),
        }
    }

    /// Some of the elements on the host: copies of an accelerator's, for whose kernels it waits, and zeros where there are
    /// only sizes.
    pub(crate) fn elements(&self, range: Range<usize>) -> HostElements<'_> {
        match &self.storage {
            Storage::Host(..) => match self.stored_ref().part(range) {
                StoredRef::F32(data) => HostElements::F32(data.into()),
                StoredRef::Bf16(data) => HostElements::Bf16(data.into()),
                StoredRef::U32(data) => HostElements::U32(data.into()),
            },
            Storage::Accelerator(_, dtype, _) => {
                let mut copy = Elements::zeros(*dtype, range.len());
                self.memory().read(range.start * dtype.bytes(), copy.stored().bytes());
                copy.into()
            }
            Storage::Sizes(dtype, _) => Elements::zeros(*dtype, range.len()).into(),
        }
    }

    /// All elements on the host, for who checks results.
    pub(crate) fn seen(&self) -> HostElements<'_> {
        match &self.storage {
            Storage::Accelerator(_, dtype, len) => {
                let mut copy = Elements::zeros(*dtype, *len);
                self.memory().look(copy.stored().bytes());
                copy.into()
            }
            Storage::Host(..) | Storage::Sizes(..) => self.elements(0..self.len()),
        }
    }

    /// Writes elements of the host over those from `first` on. Does not wait.
    #[track_caller]
    pub(crate) fn write(&mut self, first: usize, elements: StoredRef) {
        let (device, len) = (self.device.clone(), elements.len());
        match &self.storage {
            Storage::Host(..) => crate::cpu::stored::convert(&device, self.stored(), elements, first, 0..len),
            Storage::Accelerator(_, dtype, _) => {
                assert_eq!(*dtype, elements.dtype(), "bytes are copied, not converted");
                self.memory().write(first * dtype.bytes(), elements.bytes());
            }
            Storage::Sizes(..) => {}
        }
    }

    /// An accelerator's memory.
    #[track_caller]
    pub(crate) fn memory(&self) -> &DeviceMemory {
        match &self.storage {
            Storage::Accelerator(Some(memory), ..) => memory,
            _ => panic!("an operand that is not on its kernel's device"),
        }
    }
}

#[track_caller]
fn no_data() -> ! {
    panic!("the host does not have this device's elements: cross over with `to_host`")
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.account().remove(self.cause, self.bytes());
        match &mut self.storage {
            Storage::Host(elements, _) => self.device.give(elements.take()),
            Storage::Accelerator(memory, ..) => {
                if let Some(memory) = memory.take() {
                    self.device.give_memory(memory);
                }
            }
            Storage::Sizes(..) => {}
        }
    }
}
