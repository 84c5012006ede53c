//! An accelerator that is not there: kernels compiled for the host, in memory that nobody else looks at.
//!
//! Everything is done at once, and what would go wrong on a device that does it later is looked for: memory that nobody
//! wrote holds NaN, writes behind an operand are noticed, and uses without an order are refused ([`super::order`]).

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{ptr, slice};

use libloading::Library;

use super::call::{Launch, LaunchOperand};
use super::compile;
use super::error::EngineError;
use super::order::{DeviceStream, TimedOperation, Use, UseOrder, WHOLE};
use super::pin::PinnedBytes;
use super::sources::KernelSource;
use super::{Accelerator, DeviceFailure, DeviceMatrix, DeviceMemory, DeviceProduct, Event};
use crate::cpu::product::{Matrix, Product, multiply_into};
use crate::cpu::stored::{Stored, StoredRef};
use crate::device::Device;
use crate::dtype::Dtype;

/// Two warps.
const THREADS: u32 = 64;

/// What bytes are that nobody has written: of any float type, NaN.
const UNWRITTEN: u8 = 0xff;

/// Bytes behind an operand that a kernel is seen to write.
const MARGIN: usize = 1024;

/// That of device allocations.
const ALIGN_BYTES: usize = 256;

/// A kernel as `host.h` makes it: pointers to its parameters, blocks, threads of each. How many blocks had anything to do.
type KernelEntry = unsafe extern "C" fn(*const *const c_void, u32, u32) -> u32;

#[derive(Debug)]
pub(super) struct Simulated {
    libraries: BTreeMap<&'static str, Library>,
    order: Mutex<UseOrder>,
    limits: SimulatedLimits,
    /// Bytes that are taken.
    held: Mutex<usize>,
    /// Operations so far.
    asked: AtomicU64,
    pinned: PinnedBytes,
    /// Of each kernel's launch with the most bytes for a block: see [`Accelerator::shares`].
    shares: Mutex<BTreeMap<&'static str, [u64; 2]>>,
}

/// What a simulated device has of what a device has an end of.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedLimits {
    /// Bytes of memory.
    pub bytes: usize,
    /// Copies, launches and products. After so many the device is lost: all that follow fail.
    pub operations: u64,
    /// Blocks of a launch.
    pub blocks: u32,
}

impl Default for SimulatedLimits {
    /// As much memory as the host has, and no end of operations. Blocks are few and odd, so that kernels go round their loops
    /// more than once with small tensors.
    fn default() -> SimulatedLimits {
        SimulatedLimits { bytes: usize::MAX, operations: u64::MAX, blocks: 3 }
    }
}

impl Simulated {
    /// With kernels made from `sources`.
    pub(super) fn new(limits: SimulatedLimits, sources: &[KernelSource]) -> Result<Simulated, EngineError> {
        let (libraries, order, held) = (compile::libraries(sources)?, Mutex::default(), Mutex::default());
        let (pinned, asked) = (PinnedBytes::default(), AtomicU64::new(0));
        Ok(Simulated { libraries, order, limits, held, asked, pinned, shares: Mutex::default() })
    }

    /// Counts an operation, which fails if the device is lost.
    fn ask(&self, what: impl Display) {
        if self.asked.fetch_add(1, Ordering::Relaxed) >= self.limits.operations {
            DeviceFailure::broken(what, "the device is lost, as it was told to be").raise();
        }
    }

    /// Copies that run beside kernels are of pinned memory: others would not run beside them.
    fn check_pinned(&self, stream: DeviceStream, bytes: &[u8]) {
        if matches!(stream, DeviceStream::Fetch | DeviceStream::Keep) {
            assert!(self.pinned.contain(bytes), "a copy on stream {stream:?} of memory that is not pinned");
        }
    }

    fn order(&self) -> MutexGuard<'_, UseOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_share(&self, launch: &Launch, busy: u32) {
        let bytes = launch.operands().iter().map(|operand| operand.bytes as u64).max().unwrap_or(0);
        let (now, mut shares) = ([bytes, busy.into()], self.shares.lock().unwrap_or_else(PoisonError::into_inner));
        let share = |[bytes, busy]: [u64; 2]| bytes / busy.max(1);
        let most = shares.entry(launch.name).or_default();
        if share(now) >= share(*most) {
            *most = now;
        }
    }

    fn kernel(&self, module: &str, name: &str) -> KernelEntry {
        let (library, symbol) = (self.libraries.get(module), format!("simulated_{name}"));
        // SAFETY: a kernel has the type that `KERNEL` gives it.
        let found = library.and_then(|library| unsafe { library.get::<KernelEntry>(symbol.as_bytes()) }.ok());
        let lacks =
            || DeviceFailure::broken(format_args!("kernel `{name}`"), format_args!("{module} has no such kernel"));
        *found.unwrap_or_else(|| lacks().raise())
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN_BYTES).expect("a size that memory can have")
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Accelerator for Simulated {
    fn allocate(&self, bytes: usize) -> Result<u64, String> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if self.limits.bytes - *held < bytes {
            return Err(format!("{held} bytes of {} are taken", self.limits.bytes));
        }
        // SAFETY: the layout has a size that is not zero.
        let memory = unsafe { alloc(layout(bytes)) };
        if memory.is_null() {
            return Err(format!("the host gives no {bytes} bytes"));
        }
        *held += bytes;
        Ok(memory.expose_provenance() as u64)
    }

    fn free(&self, address: u64, bytes: usize) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
        self.order().forget(address);
        // SAFETY: `allocate` gave the address for as many bytes, and its only owner is gone.
        unsafe { dealloc(pointer(address), layout(bytes)) };
    }

    fn forget(&self, memory: &DeviceMemory) {
        // SAFETY: these bytes are the memory's.
        unsafe { ptr::write_bytes(pointer(memory.address()), UNWRITTEN, memory.bytes()) };
    }

    fn pin(&self, bytes: &[u8]) -> Result<(), String> {
        if bytes.is_empty() {
            return Err("nothing cannot be pinned".to_owned());
        }
        self.pinned.insert(bytes);
        Ok(())
    }

    fn unpin(&self, first: usize) {
        self.pinned.remove(first);
    }

    fn upload(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &[u8]) {
        self.ask("a copy to the device");
        self.check_pinned(stream, bytes);
        self.order().operation(stream, "a copy to the device", [((memory.address(), WHOLE), Use::Write)].into_iter());
        // SAFETY: `DeviceMemory` has checked that the bytes lie in it, and those of the host are other memory.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(memory.address()).add(first), bytes.len()) };
    }

    fn download(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &mut [u8]) {
        self.ask("a copy to the host");
        self.check_pinned(stream, bytes);
        let mut order = self.order();
        order.operation(stream, "a copy to the host", [((memory.address(), WHOLE), Use::Read)].into_iter());
        order.synchronize(stream);
        // SAFETY: as in `upload`; `DeviceMemory` is filled when it is handed out, so no byte is uninitialised.
        unsafe { ptr::copy_nonoverlapping(pointer(memory.address()).add(first), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn look(&self, memory: &DeviceMemory, bytes: &mut [u8]) {
        // SAFETY: as in `download`; everything that was asked for is done.
        unsafe { ptr::copy_nonoverlapping(pointer(memory.address()), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn copy(&self, stream: DeviceStream, to: (&DeviceMemory, usize), from: (&DeviceMemory, usize), bytes: usize) {
        self.ask("a copy within devices");
        let copy = self.order().begin(stream, "a copy within devices");
        let of = |first: usize| first..first + bytes;
        self.note_use((to.0, of(to.1)), Use::Write, &copy);
        from.0.engine().note_use((from.0, of(from.1)), Use::Read, &copy);
        let [to, from] = [to, from].map(|(memory, first)| {
            assert!(first + bytes <= memory.bytes(), "bytes {first} + {bytes} of {}", memory.bytes());
            pointer(memory.address()).wrapping_add(first)
        });
        // SAFETY: the bytes lie in their memory, and are other bytes, as the engine's caller lends them; nobody uses them
        // meanwhile, or an order is missing.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to, bytes) };
    }

    fn note_use(&self, (memory, bytes): (&DeviceMemory, Range<usize>), used: Use, by: &TimedOperation) {
        self.order().note(by, (memory.address(), bytes), used);
    }

    fn launch(&self, stream: DeviceStream, launch: &Launch) {
        self.ask(format_args!("kernel `{}`", launch.name));
        let kernel = self.kernel(launch.module, launch.name);
        let uses = launch.operands().iter().map(|operand| ((operand.address, operand.touched.clone()), operand.used));
        self.order().operation(stream, launch.name, uses);
        let parameters = launch.parameters();
        // SAFETY: the parameters are those of the kernel, which a test compares with the table of kernels; operands are
        // alive and, where they are written, nobody else's while `launch` borrows them.
        let busy = unsafe { kernel(parameters.as_ptr(), self.limits.blocks, THREADS) };
        self.note_share(launch, busy);
        for LaunchOperand { address, bytes, capacity, .. } in launch.operands() {
            let margin = (capacity - bytes).min(MARGIN);
            // SAFETY: the operand's memory is as large as its capacity and was filled when it was handed out.
            let behind = unsafe { slice::from_raw_parts(pointer(*address).add(*bytes), margin) };
            let is_untouched = behind.iter().all(|&byte| byte == UNWRITTEN);
            assert!(is_untouched, "kernel `{}` wrote behind the end of an operand of {bytes} bytes", launch.name);
        }
    }

    fn shares(&self) -> BTreeMap<&'static str, [u64; 2]> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn record(&self, stream: DeviceStream) -> Event {
        Event::Simulated(self.order().record(stream))
    }

    fn wait(&self, stream: DeviceStream, event: &Event) {
        let Event::Simulated(clock) = event else { panic!("an event of another engine") };
        self.order().wait(stream, clock);
    }

    fn synchronize(&self, stream: DeviceStream) {
        self.order().synchronize(stream);
    }

    fn multiply(&self, stream: DeviceStream, device: &Device, product: &DeviceProduct) {
        self.ask("a product");
        let [rows, _, cols] = product.dims();
        let &DeviceProduct { c, a, b, accumulate } = product;
        let uses = [(c, Use::Write), (a, Use::Read), (b, Use::Read)];
        self.order().operation(
            stream,
            "a product",
            uses.map(|(of, used)| ((of.elements.address(), WHOLE), used)).into_iter(),
        );
        let matrix = |of: DeviceMatrix| Matrix { rows: 0..of.rows, cols: of.cols, transposed: of.transposed };
        let p = Product { a: matrix(a), b: matrix(b), first: 0, accumulate };
        let (to, len) = (pointer(c.address()), rows * cols);
        // SAFETY: the matrices lie in their memory, as `dims` has checked, which is aligned and filled with bits, which are
        // numbers; the result is nobody else's while the operands of a line of the table are borrowed.
        unsafe {
            let to = match c.elements.dtype() {
                Dtype::F32 => Stored::F32(slice::from_raw_parts_mut(to.cast(), len)),
                _ => Stored::Bf16(slice::from_raw_parts_mut(to.cast(), len)),
            };
            multiply_into(device, to, elements(&a), elements(&b), &p);
        }
    }

    /// One after the other, though a device may do them in any order.
    fn multiply_all(&self, stream: DeviceStream, device: &Device, products: &[DeviceProduct]) {
        DeviceProduct::assert_apart(products);
        products.iter().for_each(|product| self.multiply(stream, device, product));
    }
}

/// # Safety
/// The matrix lies in memory that is filled, and nobody writes to it for as long as its elements are borrowed.
unsafe fn elements<'a>(of: &DeviceMatrix) -> StoredRef<'a> {
    let (data, len) = (pointer(of.address()).cast_const(), of.rows * of.cols);
    // SAFETY: the caller's promise.
    unsafe {
        match of.elements.dtype() {
            Dtype::F32 => StoredRef::F32(slice::from_raw_parts(data.cast(), len)),
            _ => StoredRef::Bf16(slice::from_raw_parts(data.cast(), len)),
        }
    }
}
