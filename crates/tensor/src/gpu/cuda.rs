//! NVIDIA's GPUs, by the libraries that are there when the program runs: the driver, NVRTC for kernels, cuBLASLt and
//! cuBLAS for products. None is needed to build it.
//!
//! A stream is CUDA's, and so is an event. Kernels are launched with as many threads as fill the device, whatever their
//! size: they go over their elements in strides.

mod blas;
mod groups;
mod libraries;
pub(crate) mod nccl;
mod products;
mod staging;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::cublas::result::CublasError;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;
use cudarc::nvrtc::result::NvrtcError;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use blas::BlasHandle;
use groups::ProductGroups;
use libraries::find_libraries;
use products::Products;
use staging::Staging;

use super::call::Launch;
use super::compile::kept;
use super::error::EngineError;
use super::nvrtc::{KernelImage, OPTIONS, compile, version as nvrtc_version};
use super::pin::PinnedBytes;
use super::sources::KernelSource;
use super::{Accelerator, DeviceFailure, DeviceMemory, DeviceProduct, DeviceStream, Event};
use crate::device::Device;

/// Threads of a block of most kernels, and those that a multiprocessor has at once.
const THREADS: u32 = 256;
const THREADS_EACH: u32 = 2048;
/// The first architecture with bf16.
const OLDEST: (i32, i32) = (8, 0);

/// A GPU of this machine.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Its place among all.
    pub number: usize,
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Of its memory.
    pub bytes: usize,
    /// No other GPU has it, on whatever machine.
    pub identity: String,
}

impl CudaDevice {
    /// Whether it has what kernels need.
    pub fn is_new_enough(&self) -> bool {
        self.capability >= OLDEST
    }

    /// Bytes of its memory that nobody has taken, beside what the driver takes to look.
    ///
    /// # Errors
    /// If the driver finds fault.
    pub fn free_bytes(&self) -> Result<usize, EngineError> {
        let context = CudaContext::new(self.number).map_err(|error| failed("opening the device", error))?;
        Ok(context.mem_get_info().map_err(|error| failed("asking for free memory", error))?.0)
    }
}

/// The GPUs of this machine.
///
/// # Errors
/// If a library is missing, or the driver finds fault.
pub fn cuda_devices() -> Result<Vec<CudaDevice>, EngineError> {
    find_libraries()?;
    let count = match CudaContext::device_count() {
        // What the driver says where it is installed and there is no GPU.
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        count => count.map_err(|error| failed("counting devices", error))?,
    };
    (0..count).map(about).collect::<Result<_, _>>().map_err(|error| failed("looking at devices", error))
}

/// The GPU of this number, without a look at the others.
fn about(number: i32) -> Result<CudaDevice, DriverError> {
    result::init()?;
    let device = result::device::get(number)?;
    // SAFETY: the driver gave the device.
    let [bytes, major, minor] = unsafe {
        let attribute = |which| result::device::get_attribute(device, which);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        [result::device::total_mem(device)?, major as usize, minor as usize]
    };
    let (name, capability) = (result::device::get_name(device)?, (major as i32, minor as i32));
    let identity = result::device::get_uuid(device)?.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
    Ok(CudaDevice { number: number as usize, name, capability, bytes, identity })
}

/// A driver takes kernels of its own major version of CUDA and of older ones. The version of NVRTC.
fn check_driver() -> Result<(i32, i32), EngineError> {
    let (major, minor) = nvrtc_version().map_err(|error| failed("asking NVRTC for its version", error))?;
    let mut driver = 0;
    // SAFETY: the number is there to be written.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result();
    asked.map_err(|error| failed("asking the driver for its version", error))?;
    if driver / 1000 < major {
        return Err(EngineError::OldDriver { driver: (driver / 1000, driver % 1000 / 10), libraries: (major, minor) });
    }
    Ok((major, minor))
}

fn failed(what: &'static str, error: impl LibraryError) -> EngineError {
    EngineError::Cuda { what, reason: error.told() }
}

/// An error of a library, in its words.
trait LibraryError {
    fn told(&self) -> String;
}

impl LibraryError for DriverError {
    fn told(&self) -> String {
        let said =
            self.error_string().ok().and_then(|text| text.to_str().ok()).unwrap_or("the driver does not say why");
        format!("{:?}, {said}", self.0)
    }
}

impl LibraryError for CublasError {
    fn told(&self) -> String {
        format!("{:?}", self.0)
    }
}

impl LibraryError for NvrtcError {
    fn told(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// What a rank cannot go on without.
fn done<T, E: LibraryError>(result: Result<T, E>, what: impl Display) -> T {
    // Kernels run on by themselves, so that a library may tell of an earlier one's failure.
    let reason = |error: E| format!("{}; that, or a kernel that was launched before", error.told());
    result.unwrap_or_else(|error| DeviceFailure::broken(what, reason(error)).raise())
}

#[derive(Debug)]
pub(crate) struct Cuda {
    // Dropped before their streams and the context.
    products: Mutex<Products>,
    groups: Mutex<ProductGroups>,
    blas: Mutex<BlasHandle>,
    context: Arc<CudaContext>,
    /// By [`DeviceStream`].
    streams: Vec<Arc<CudaStream>>,
    /// For products that go on beside those on the stream of kernels.
    beside: Arc<CudaStream>,
    modules: BTreeMap<&'static str, Arc<CudaModule>>,
    /// By name, those that have been launched.
    functions: Mutex<HashMap<&'static str, CudaFunction>>,
    pinned: PinnedBytes,
    /// Of the stream of kernels.
    staging: Mutex<Staging>,
    /// GPUs that copies have come from, by number.
    reached: Mutex<BTreeSet<usize>>,
    /// Multiprocessors.
    processors: u32,
    /// Why what other ranks were to send does not come.
    ended: OnceLock<DeviceFailure>,
}

impl Cuda {
    /// The GPU of this number, with kernels made from `sources`.
    pub(super) fn new(number: usize, sources: &[KernelSource]) -> Result<Cuda, EngineError> {
        find_libraries()?;
        let CudaDevice { name, capability, bytes, .. } = match about(number as i32) {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_INVALID_DEVICE)) => {
                return Err(EngineError::NoDevice { number, count: cuda_devices()?.len() });
            }
            found => found.map_err(|error| failed("looking at devices", error))?,
        };
        let (major, minor) = capability;
        if capability < OLDEST {
            return Err(EngineError::TooOld { name, major, minor });
        }
        let compiler = check_driver()?;
        let context = CudaContext::new(number).map_err(|error| failed("opening the device", error))?;
        let stream = || context.new_stream().map_err(|error| failed("making a stream", error));
        let streams = DeviceStream::ALL.iter().map(|_| stream()).collect::<Result<Vec<_>, _>>()?;
        let modules = modules(&context, capability, compiler, sources)?;
        let processors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let processors = processors.map_err(|error| failed("counting multiprocessors", error))?;
        let beside = stream()?;
        let kernels = &streams[DeviceStream::Compute as usize];
        let products = Products::new(&context, [kernels.clone(), beside.clone()], bytes)?;
        let blas = Mutex::new(BlasHandle::new(kernels)?);
        let staging = Mutex::new(Staging::new(&context, kernels, bytes)?);
        let (functions, products, processors) = (Mutex::default(), Mutex::new(products), processors as u32);
        let (pinned, reached, groups) = (PinnedBytes::default(), Mutex::default(), Mutex::default());
        let ended = OnceLock::new();
        Ok(Cuda {
            context,
            streams,
            beside,
            modules,
            functions,
            products,
            blas,
            pinned,
            staging,
            reached,
            processors,
            groups,
            ended,
        })
    }

    fn stream(&self, stream: DeviceStream) -> &CudaStream {
        done(self.context.bind_to_thread(), "turning to the device");
        &self.streams[stream as usize]
    }

    /// Has this GPU copy from the other one without a way by the host, if they are wired so. The driver finds another way
    /// otherwise.
    fn reach(&self, peer: &Cuda) {
        let ordinal = peer.context.ordinal();
        if ordinal != self.context.ordinal() && lock(&self.reached).insert(ordinal) {
            // SAFETY: this GPU's context is the thread's, and the other one is there as long as its engine.
            let _ = unsafe { sys::cuCtxEnablePeerAccess(peer.context.cu_ctx(), 0) };
        }
    }

    fn function(&self, module: &str, name: &'static str) -> sys::CUfunction {
        let mut functions = lock(&self.functions);
        let load = || done(self.modules[module].load_function(name), format_args!("kernel `{name}`"));
        functions.entry(name).or_insert_with(load).cu_function()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kernels for this architecture by this version of NVRTC, compiled once and kept, by module.
fn modules(
    context: &Arc<CudaContext>,
    (major, minor): (i32, i32),
    compiler: (i32, i32),
    sources: &[KernelSource],
) -> Result<BTreeMap<&'static str, Arc<CudaModule>>, EngineError> {
    let architecture = format!("sm_{major}{minor}");
    let place = |folder: &Path, source: &KernelSource| folder.join(source.module).with_extension("cubin");
    let folder = kept((&architecture, compiler, OPTIONS), sources, |folder| {
        let make = |source: &KernelSource| {
            let path = place(folder, source);
            let kernels = compile(folder, source, &architecture, KernelImage::Cubin)?;
            fs::write(&path, kernels).map_err(|source| EngineError::Folder { path, source })
        };
        // Half a minute one after the other.
        sources.par_iter().try_for_each(make)
    })?;
    let load = |source: &KernelSource| {
        let path: PathBuf = place(&folder, source);
        let module = context.load_module(Ptx::from_file(path.clone()));
        let unloadable = |error: DriverError| EngineError::Unloadable { path, reason: error.told() };
        Ok((source.module, module.map_err(unloadable)?))
    };
    sources.iter().map(load).collect()
}

impl Accelerator for Cuda {
    fn allocate(&self, bytes: usize) -> Result<u64, String> {
        done(self.context.bind_to_thread(), "turning to the device");
        // SAFETY: nothing is read that nobody has written: `DeviceMemory` is filled by kernels and copies.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Err(error @ DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(error.told()),
            allocated => Ok(done(allocated, "allocating memory")),
        }
    }

    fn free(&self, address: u64, _: usize) {
        // Of a device that is lost nothing can be freed, and who drops memory while a failure unwinds has nobody to tell.
        // SAFETY: `allocate` gave the address, and its only owner is gone; the driver waits for what uses it.
        let _ = unsafe { result::ctx::set_current(self.context.cu_ctx()).and_then(|()| result::free_sync(address)) };
    }

    fn forget(&self, _: &DeviceMemory) {}

    fn pin(&self, bytes: &[u8]) -> Result<(), String> {
        done(self.context.bind_to_thread(), "turning to the device");
        let first = ptr::with_exposed_provenance_mut(bytes.as_ptr().expose_provenance());
        // SAFETY: the bytes are there until they are unpinned, and who copies to them has them to write.
        let pinned = unsafe { sys::cuMemHostRegister_v2(first, bytes.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) };
        pinned.result().map_err(|error| error.told())?;
        self.pinned.insert(bytes);
        Ok(())
    }

    fn unpin(&self, first: usize) {
        self.pinned.remove(first);
        let first = ptr::with_exposed_provenance_mut(first);
        // Of a device that is lost nothing can be unpinned.
        // SAFETY: `pin` was given the address, and the bytes are still there.
        let _ = unsafe {
            result::ctx::set_current(self.context.cu_ctx()).and_then(|()| sys::cuMemHostUnregister(first).result())
        };
    }

    fn upload(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &[u8]) {
        let (is_kernels, stream, to) =
            (stream == DeviceStream::Compute, self.stream(stream), memory.address() + first as u64);
        if is_kernels && lock(&self.staging).upload(to, bytes) {
            return;
        }
        // SAFETY: `DeviceMemory` has checked that the bytes lie in it. Memory of the host that is not pinned has been read
        // when the call returns; for other memory the host waits.
        done(unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream()) }, "a copy to the device");
        if self.pinned.share_pages_with(bytes) {
            done(stream.synchronize(), "waiting for a copy to the device");
        }
    }

    fn download(&self, stream: DeviceStream, memory: &DeviceMemory, first: usize, bytes: &mut [u8]) {
        let (stream, from) = (self.stream(stream), memory.address() + first as u64);
        // SAFETY: as above; the bytes are borrowed until the stream is done.
        done(unsafe { result::memcpy_dtoh_async(bytes, from, stream.cu_stream()) }, "a copy to the host");
        done(stream.synchronize(), "waiting for a copy to the host");
        self.check_exchange();
    }

    fn look(&self, memory: &DeviceMemory, bytes: &mut [u8]) {
        DeviceStream::ALL.into_iter().for_each(|stream| self.synchronize(stream));
        self.download(DeviceStream::Copy, memory, 0, bytes);
    }

    fn copy(&self, stream: DeviceStream, to: (&DeviceMemory, usize), from: (&DeviceMemory, usize), bytes: usize) {
        let stream = self.stream(stream).cu_stream();
        let peer = from.0.engine().cuda().expect("devices of one kind copy from each other");
        let [to, from] = [to, from].map(|(memory, first)| memory.address() + first as u64);
        let [own, others] = [self, peer].map(|engine| engine.context.cu_ctx());
        // SAFETY: the caller lends both, and has the stream wait for whoever uses them.
        let begun = unsafe {
            if own == others {
                result::memcpy_dtod_async(to, from, bytes, stream)
            } else {
                self.reach(peer);
                result::memcpy_peer_async(own, to, others, from, bytes, stream)
            }
        };
        done(begun, "a copy within devices");
    }

    fn cuda(&self) -> Option<&Cuda> {
        Some(self)
    }

    fn launch(&self, stream: DeviceStream, launch: &Launch) {
        let (stream, kernel) = (self.stream(stream).cu_stream(), self.function(launch.module, launch.name));
        let mut parameters: Vec<*mut c_void> = launch.parameters().into_iter().map(<*const c_void>::cast_mut).collect();
        let threads = launch.threads.unwrap_or(THREADS);
        let blocks = self.processors * (THREADS_EACH / threads);
        // SAFETY: the parameters are those of the kernel, which a test compares with the table of kernels, and are read
        // before the call returns; operands stay until what was launched before is done with them, by the order of streams.
        let launched =
            unsafe { result::launch_kernel(kernel, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut parameters) };
        done(launched, format_args!("kernel `{}`", launch.name));
    }

    fn record(&self, stream: DeviceStream) -> Event {
        Event::Cuda(done(self.stream(stream).record_event(None), "recording an event"))
    }

    fn wait(&self, stream: DeviceStream, event: &Event) {
        let Event::Cuda(event) = event else { panic!("an event of another engine") };
        done(self.stream(stream).wait(event), "waiting for an event");
    }

    fn synchronize(&self, stream: DeviceStream) {
        done(self.stream(stream).synchronize(), "waiting for kernels");
        self.check_exchange();
    }

    fn multiply(&self, stream: DeviceStream, _: &Device, product: &DeviceProduct) {
        assert_eq!(stream, DeviceStream::Compute, "products are on the stream of kernels");
        self.stream(stream);
        lock(&self.products).multiply(0, product);
    }

    fn multiply_all(&self, stream: DeviceStream, device: &Device, products: &[DeviceProduct]) {
        assert_eq!(stream, DeviceStream::Compute, "products are on the stream of kernels");
        if !self.multiply_together(device, products) {
            self.multiply_side_by_side(products);
        }
    }
}
