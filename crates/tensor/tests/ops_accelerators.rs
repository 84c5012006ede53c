//! Every op by the kernels of accelerators, each of whose results is compared with the CPU's on the way: on the simulated
//! one and, where there is one, on a GPU.

use std::sync::Arc;

use guildhall_tensor::{Device, cuda_devices};

mod suite;

/// Those that the suite runs on.
fn devices() -> Vec<Arc<Device>> {
    let simulated = Device::simulated(2).expect("a C++ compiler");
    let gpu = cuda_devices().is_ok_and(|gpus| !gpus.is_empty()).then(|| Device::cuda(0, 2, true).expect("a GPU"));
    [simulated].into_iter().chain(gpu).collect()
}
