//! Accelerators: engines whose memory the host does not reach, and whose kernels are compiled while the program runs.
//!
//! ```text
//!  kernels.rs ── a line of the table, on a tensor of an accelerator
//!    ├─ twin ── the same line on copies, by the CPU                 (where results are checked)
//!    ├─ Call ── operands and arguments as C sees them (pass)
//!    │    └─ Accelerator::launch ── the kernel of that name, of kernels/<module>.cu
//!    └─ twin ── compares what both wrote
//! ```
//!
//! There are two engines. [`simulated`] compiles the kernels for the host, and checks the order of what it is asked to do
//! ([`order`]). [`cuda`] compiles them for an NVIDIA GPU, whose addresses, streams and events the trait has. Products are of
//! the engines. Some lines are several of both ([`composed`]).

mod attention;
mod call;
mod compile;
pub(crate) mod composed;
mod cuda;
mod error;
mod failure;
mod indexed;
mod matrix;
mod memory;
mod nvrtc;
mod order;
mod pass;
mod pin;
mod products;
mod simulated;
mod sources;
mod sums;
#[cfg(test)]
mod tests;
mod twin;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use call::{Call, DeviceElements};
pub use compile::{Compiler, find_compiler};
pub use error::EngineError;
pub use failure::{DeviceFailure, on_device};
pub(crate) use matrix::{DeviceMatrix, DeviceProduct};
pub(crate) use memory::DeviceMemory;
pub(crate) use order::DeviceStream;
pub(crate) use pass::KernelArgument;
pub(crate) use pin::PagePin;
pub(crate) use twin::{OperandKind, TwinTolerance, compare, rounding_of, sums_of};

use call::Launch;
pub(crate) use cuda::{Cuda, nccl};
pub use cuda::{CudaDevice, cuda_devices};
use cudarc::driver::CudaEvent;
use order::{StreamClock, TimedOperation, Use};
pub use simulated::SimulatedLimits;

use crate::account::Cause;
use crate::device::Device;

/// A point in a stream.
#[derive(Debug)]
pub(crate) enum Event {
    Simulated(StreamClock),
    Cuda(CudaEvent),
}

impl Event {
    /// Whether the stream has come to it; of a device that has failed, too, of which others tell.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Event::Simulated(_) => true,
            Event::Cuda(event) => event.try_is_complete().unwrap_or(true),
        }
    }
}

/// What allocates, copies and launches. Calls of one stream happen in order; calls of two only where one waits for an
/// event of the other. What an engine cannot do ends the rank's work ([`DeviceFailure::raise`]).
pub(crate) trait Accelerator: Debug + Send + Sync {
    /// The address of so many bytes, of whatever they last held.
    ///
    /// # Errors
    /// The engine's reason, if it has no room for them.
    fn allocate(&self, bytes: usize) -> Result<u64, String>;

    /// Takes back what [`Accelerator::allocate`] gave. Does not fail: memory is dropped while a failure unwinds, too.
    fn free(&self, address: u64, bytes: usize);

    /// What these bytes hold is of no use any more. An engine that looks for mistakes makes it worse than useless.
    fn forget(&self, memory: &DeviceMemory);

    /// Lets the device copy to and from these bytes of the host by itself, until they are unpinned.
    ///
    /// # Errors
    /// The engine's reason, if the pages cannot be kept in their place.
    fn pin(&self, bytes: &[u8]) -> Result<(), String>;

    /// Ends what [`Accelerator::pin`] began with bytes at this address. Does not fail, as [`Accelerator::free`].
    fn unpin(&self, first: usize);

    /// Copies to bytes of `memory` from `first` on. `bytes` are read before it returns, pinned or not.
    fn upload(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &[u8]);

    /// Copies from bytes of `memory` from `first` on, and waits until they are there.
    fn download(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &mut [u8]);

    /// Copies the first bytes of `memory` when all is done that was asked for. For who checks results: an engine that looks for
    /// an order that is missing takes it for nothing that has been waited for.
    fn look(&self, memory: &DeviceMemory, bytes: &mut [u8]);

    /// Begins to copy so many bytes of `from`, from an offset on, to this engine's `to`; `from` may be another engine's of the
    /// same kind. Does not wait.
    fn copy(&self, stream: DeviceStream, to: (&DeviceMemory, usize), from: (&DeviceMemory, usize), bytes: usize);

    /// Another engine uses bytes of this one's memory. Who looks for an order that is missing takes note.
    fn note_use(&self, _memory: (&DeviceMemory, Range<usize>), _used: Use, _by: &TimedOperation) {}

    /// The engine as one of CUDA's.
    fn cuda(&self) -> Option<&Cuda> {
        None
    }

    /// Begins a kernel. Does not wait.
    fn launch(&self, stream: DeviceStream, launch: &Launch);

    /// Of each kernel's launch with the most bytes for a block: those of its largest operand, and how many blocks had anything
    /// to do. Nothing, of an engine that does not look.
    fn shares(&self) -> BTreeMap<&'static str, [u64; 2]> {
        BTreeMap::new()
    }

    /// What the stream has been asked for up to now.
    fn record(&self, stream: DeviceStream) -> Event;

    /// What the stream is asked for from now on comes after `event`.
    fn wait(&self, stream: DeviceStream, event: &Event);

    /// Waits until all is done that the stream has been asked for.
    fn synchronize(&self, stream: DeviceStream);

    /// Begins a product. Does not wait. An engine whose products are the CPU's takes the threads of `device`.
    fn multiply(&self, stream: DeviceStream, device: &Device, product: &DeviceProduct);

    /// Begins products of which none writes what another reads or writes. Does not wait.
    fn multiply_all(&self, stream: DeviceStream, device: &Device, products: &[DeviceProduct]) {
        products.iter().for_each(|product| self.multiply(stream, device, product));
    }
}

/// An engine, and who checks its results.
#[derive(Debug)]
pub(crate) struct Gpu {
    engine: Arc<dyn Accelerator>,
    /// A device of the host, on which every kernel runs a second time.
    twin: Option<Arc<Device>>,
    /// What collectives bring together, on their stream alone.
    workspace: Mutex<Option<Workspace>>,
}

/// Memory, and how much of it was asked for.
#[derive(Debug)]
struct Workspace {
    memory: DeviceMemory,
    bytes: usize,
}

impl Gpu {
    /// The simulated one, of which each kernel's results are compared with the CPU's.
    pub(crate) fn simulated(threads: usize, limits: SimulatedLimits) -> Result<Gpu, EngineError> {
        let engine = simulated::Simulated::new(limits, &sources::all())?;
        Ok(Gpu::new(Arc::new(engine), Some(Device::new(threads))))
    }

    /// NVIDIA's GPU of this number. With `checks` each kernel's results are compared with the CPU's.
    pub(crate) fn cuda(number: usize, threads: usize, checks: bool) -> Result<Gpu, EngineError> {
        let twin = checks.then(|| Device::new(threads));
        Ok(Gpu::new(Arc::new(Cuda::new(number, &sources::all())?), twin))
    }

    fn new(engine: Arc<dyn Accelerator>, twin: Option<Arc<Device>>) -> Gpu {
        Gpu { engine, twin, workspace: Mutex::default() }
    }

    pub(crate) fn engine(&self) -> &dyn Accelerator {
        &*self.engine
    }

    /// Calls `f` with memory of at least so many bytes for the stream of collectives.
    pub(crate) fn with_workspace<R>(&self, device: &Device, bytes: usize, f: impl FnOnce(&DeviceMemory) -> R) -> R {
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let before = workspace.as_ref().map_or(0, |workspace| workspace.bytes);
        if before < bytes {
            // The old one is freed first, if it may be in the way.
            *workspace = None;
            let memory = device.take_memory(self, bytes);
            // Kernels may use what it was before.
            self.engine.wait(DeviceStream::Exchange, &self.point());
            device.account().add(Cause::Communication, (bytes - before) as u64);
            *workspace = Some(Workspace { memory, bytes });
        }
        let Workspace { memory, .. } = workspace.as_ref().expect("it was taken above");
        memory.forget();
        f(memory)
    }

    /// Who checks results.
    pub(crate) fn twin(&self) -> Option<&Arc<Device>> {
        self.twin.as_ref()
    }

    fn multiply(&self, device: &Device, product: &DeviceProduct) {
        self.engine.multiply(DeviceStream::Compute, device, product);
    }

    fn multiply_all(&self, device: &Device, products: &[DeviceProduct]) {
        self.engine.multiply_all(DeviceStream::Compute, device, products);
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<DeviceMemory, String> {
        DeviceMemory::new(&self.engine, bytes)
    }

    /// What kernels have been asked for up to now.
    pub(crate) fn point(&self) -> Event {
        self.engine.record(DeviceStream::Compute)
    }

    /// Pins bytes of the host until the pin is dropped, which is before the bytes are gone.
    pub(crate) fn pin(&self, bytes: &[u8]) -> PagePin {
        PagePin::new(&self.engine, bytes)
    }

    /// See [`Accelerator::shares`].
    pub(crate) fn shares(&self) -> BTreeMap<&'static str, [u64; 2]> {
        self.engine.shares()
    }

    /// Waits until all kernels are done.
    pub(crate) fn synchronize(&self) {
        self.engine.synchronize(DeviceStream::Compute);
    }
}
