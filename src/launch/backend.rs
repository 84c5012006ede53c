//! The device of a rank, of the kind that the recipe names.

use std::sync::Arc;

use guildhall_tensor::{Blocking, CudaDevice, Device, EngineError, cuda_devices};

use crate::parallel::Backend;

/// Why a backend is not to be had here.
#[derive(Debug, thiserror::Error)]
#[error("parallel.backend = \"{}\": {reason}; \"cpu\" needs nothing", backend.name())]
pub struct MissingBackend {
    pub backend: Backend,
    pub reason: EngineError,
}

/// Bytes of memory that are its own for each of so many ranks of this machine, where ranks compute in other memory than the
/// machine's: their part of the smallest GPU.
pub fn memory_apart(backend: Backend, ranks: usize) -> Option<u64> {
    if backend != Backend::Cuda {
        return None;
    }
    let gpus = gpus().ok()?;
    let smallest = gpus.iter().map(|(_, gpu)| gpu.bytes as u64).min()?;
    Some(smallest / ranks.div_ceil(gpus.len()) as u64)
}

/// GPUs that ranks can compute on, by their numbers; where none is new enough all, of which each says what it lacks.
pub(super) fn gpus() -> Result<Vec<(usize, CudaDevice)>, EngineError> {
    let all = cuda_devices()?.into_iter().enumerate();
    let (new, old): (Vec<_>, Vec<_>) = all.partition(|(_, gpu)| gpu.is_new_enough());
    Ok(if new.is_empty() { old } else { new })
}

/// The device of the rank at this place among those of its node, whose products use up to `threads` threads. GPUs are dealt
/// out in turn.
///
/// # Errors
/// If this machine lacks what the backend needs.
pub(super) fn device(
    backend: Backend,
    (threads, blocking): (usize, Blocking),
    place: usize,
) -> Result<Arc<Device>, MissingBackend> {
    let found = match backend {
        Backend::Cpu => Ok(Device::blocked(threads, blocking)),
        Backend::Simulated => Device::simulated(threads),
        Backend::Cuda => gpus().and_then(|gpus| {
            let number = gpus.get(place % gpus.len().max(1)).map_or(0, |(number, _)| *number);
            Device::cuda(number, threads, false)
        }),
    };
    found.map_err(|reason| MissingBackend { backend, reason })
}

/// Whether ranks can compute on it here.
///
/// # Errors
/// As of the device of a rank.
pub fn is_here(backend: Backend) -> Result<(), MissingBackend> {
    device(backend, (1, Blocking::default()), 0).map(drop)
}
