//! The device of a rank, of the kind that the recipe names.

use std::sync::Arc;

use guildhall_tensor::{Device, EngineError};

use crate::parallel::Backend;

/// Why a backend is not to be had here.
#[derive(Debug, thiserror::Error)]
#[error("parallel.backend = \"{}\": {reason}", backend.name())]
pub struct MissingBackend {
    pub backend: Backend,
    pub reason: MissingPart,
}

/// What it lacks.
#[derive(Debug, thiserror::Error)]
pub enum MissingPart {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("this build has no CUDA engine yet; choose \"cpu\"")]
    Cuda,
}

/// A device whose products use up to `threads` threads.
///
/// # Errors
/// If this machine or this build lacks what the backend needs.
pub fn device(backend: Backend, threads: usize) -> Result<Arc<Device>, MissingBackend> {
    let found = match backend {
        Backend::Cpu => Ok(Device::new(threads)),
        Backend::Simulated => Device::simulated(threads).map_err(MissingPart::Engine),
        Backend::Cuda => Err(MissingPart::Cuda),
    };
    found.map_err(|reason| MissingBackend { backend, reason })
}
