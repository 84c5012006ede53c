//! Every op by the kernels of accelerators, each of whose results is compared with the CPU's on the way: on the simulated
//! one and, where there is one, on a GPU. On a GPU alone where there is no C++ compiler.

use std::sync::Arc;

use guildhall_tensor::{Device, cuda_devices};

mod suite;

/// Those that the suite runs on.
fn devices() -> Vec<Arc<Device>> {
    let gpu = cuda_devices().is_ok_and(|gpus| !gpus.is_empty()).then(|| Device::cuda(0, 2, true).expect("a GPU"));
    let simulated = match Device::simulated(2) {
        Err(_) if gpu.is_some() => None,
        simulated => Some(simulated.expect("a C++ compiler")),
    };
    simulated.into_iter().chain(gpu).collect()
}
