//! Every op by the kernels of accelerators, each of whose results is compared with the CPU's on the way.

use std::sync::Arc;

use guildhall_tensor::Device;

mod suite;

/// Those that the suite runs on.
fn devices() -> Vec<Arc<Device>> {
    vec![Device::simulated(2).expect("a C++ compiler")]
}
