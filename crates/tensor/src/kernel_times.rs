//! How long kernels take, where somebody wants to know.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::books::PRODUCTS;

/// The calls of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelTime {
    pub calls: u64,
    /// From call to return: with all threads of the device, and with waiting for the last of them.
    pub time: Duration,
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelKind {
    /// Matrix products, with what is fused into them.
    Product,
    Attention,
    Other,
}

impl KernelKind {
    /// Of the kernel of a name.
    pub fn of(kernel: &str) -> KernelKind {
        match kernel {
            kernel if PRODUCTS.contains(&kernel) => KernelKind::Product,
            kernel if kernel.contains("attention") || kernel.contains("attend") => KernelKind::Attention,
            _ => KernelKind::Other,
        }
    }
}

/// By kernel.
#[derive(Debug, Default)]
pub(crate) struct KernelTimes(Mutex<BTreeMap<&'static str, KernelTime>>);

impl KernelTimes {
    pub(crate) fn add(&self, kernel: &'static str, begun: Instant) {
        let time = begun.elapsed();
        let mut times = self.times();
        let sum = times.entry(kernel).or_default();
        sum.calls += 1;
        sum.time += time;
    }

    /// Those since the call before.
    pub(crate) fn take(&self) -> BTreeMap<&'static str, KernelTime> {
        std::mem::take(&mut *self.times())
    }

    fn times(&self) -> MutexGuard<'_, BTreeMap<&'static str, KernelTime>> {
        // Sums are never half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::tape::Tape;
    use crate::tensor::Tensor;

    #[test]
    fn kernels_are_timed_once_somebody_asks() {
        let device = Device::new(1);
        let tape = Tape::inference(&device);
        let product = || {
            let x = tape.constant(Tensor::zeros(&device, &[8, 4]));
            drop(x.linear(&tape.constant(Tensor::zeros(&device, &[3, 4])), None));
        };
        product();
        assert!(device.take_kernel_times().is_empty(), "nobody has asked");
        product();
        product();
        let times = device.take_kernel_times();
        assert_eq!(times["multiply_into"].calls, 2, "{times:?}");
        assert!(times["multiply_into"].time > Duration::ZERO);
        assert!(device.take_kernel_times().is_empty(), "those were told");
        assert_eq!(["multiply_into", "linear"].map(KernelKind::of), [KernelKind::Product; 2]);
        assert_eq!(KernelKind::of("attention_back"), KernelKind::Attention);
        assert_eq!(KernelKind::of("rms_norm"), KernelKind::Other);
    }
}
