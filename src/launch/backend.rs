//! The device of a rank, of the kind that the recipe names.

use std::sync::Arc;

use guildhall_tensor::{Blocking, CudaDevice, Device, EngineError, Standby, cuda_devices};

use crate::parallel::Backend;

/// Why a backend is not to be had here.
#[derive(Debug, thiserror::Error)]
#[error("parallel.backend = \"{}\": {reason}; \"cpu\" needs nothing", backend.name())]
pub struct MissingBackend {
    pub backend: Backend,
    pub reason: EngineError,
}

/// Bytes of memory that are its own for each of so many ranks of this machine, where ranks compute in other memory than the
/// machine's: their part of what is free of the GPU that has least.
pub fn memory_apart(backend: Backend, ranks: usize) -> Option<u64> {
    free_part(&gpus(backend).ok()?, ranks)
}

fn free_part(gpus: &[CudaDevice], ranks: usize) -> Option<u64> {
    let free = gpus.iter().map(CudaDevice::free_bytes).collect::<Result<Vec<_>, _>>().ok()?;
    Some(free.into_iter().min()? as u64 / ranks.div_ceil(gpus.len()) as u64)
}

/// GPUs that ranks of this backend can compute on; where none is new enough all, of which each says what it lacks.
pub(super) fn gpus(backend: Backend) -> Result<Vec<CudaDevice>, EngineError> {
    if backend != Backend::Cuda {
        return Ok(Vec::new());
    }
    let (new, old): (Vec<_>, Vec<_>) = cuda_devices()?.into_iter().partition(CudaDevice::is_new_enough);
    Ok(if new.is_empty() { old } else { new })
}

/// What a rank's device is made with.
pub(super) struct ComputeMeans {
    /// For products.
    pub threads: usize,
    pub blocking: Blocking,
    /// What does parts of its work while other ranks of its process wait.
    pub standby: Option<Arc<Standby>>,
}

/// The device of the rank at this place among those of its node. GPUs are dealt out in turn.
///
/// # Errors
/// If this machine lacks what the backend needs.
pub(super) fn device(backend: Backend, means: ComputeMeans, place: usize) -> Result<Arc<Device>, MissingBackend> {
    open(backend, means, place).map(|first| first.device)
}

fn open(backend: Backend, means: ComputeMeans, place: usize) -> Result<OpenBackend, MissingBackend> {
    let ComputeMeans { threads, blocking, standby } = means;
    let missing = |reason| MissingBackend { backend, reason };
    let gpus = gpus(backend).map_err(missing)?;
    let device = match backend {
        Backend::Cpu => Ok(Device::beside(threads, blocking, standby)),
        Backend::Simulated => Device::simulated(threads),
        Backend::Cuda => {
            let number = gpus.get(place % gpus.len().max(1)).map_or(0, |gpu| gpu.number);
            Device::cuda(number, threads, false)
        }
    };
    Ok(OpenBackend { device: device.map_err(missing)?, gpus })
}

/// A backend that is here, and a device of it.
pub struct OpenBackend {
    /// Of a first rank.
    pub device: Arc<Device>,
    gpus: Vec<CudaDevice>,
}

impl OpenBackend {
    /// [`memory_apart`], without another look for devices.
    pub fn memory_apart(&self, ranks: usize) -> Option<u64> {
        free_part(&self.gpus, ranks)
    }
}

/// Opens what ranks can compute on here, with so many threads for products.
///
/// # Errors
/// As of the device of a rank.
pub fn open_backend(backend: Backend, threads: usize) -> Result<OpenBackend, MissingBackend> {
    open(backend, ComputeMeans { threads, blocking: Blocking::default(), standby: None }, 0)
}
