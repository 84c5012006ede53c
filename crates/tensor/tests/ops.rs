//! Every op on the host, on one, two and three threads.

use std::sync::Arc;

use guildhall_tensor::Device;

mod suite;

/// Those that the suite runs on.
fn devices() -> Vec<Arc<Device>> {
    (1..=3).map(Device::new).collect()
}
