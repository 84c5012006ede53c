//! How long kernels take, where somebody wants to know.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::books::PRODUCTS;

/// The calls of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelTime {
    pub calls: u64,
    /// From call to return: with all threads of the device, and with waiting for the last of them.
    pub time: Duration,
    /// Of this time, that in products which are a step of the kernel among others, in proportion of what its threads took.
    pub products: Duration,
    /// Multiply-adds of these products.
    pub multiply_adds: u64,
}

impl AddAssign for KernelTime {
    fn add_assign(&mut self, other: KernelTime) {
        self.calls += other.calls;
        self.time += other.time;
        self.products += other.products;
        self.multiply_adds += other.multiply_adds;
    }
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

/// What one thread of a kernel did, or all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InnerTime {
    pub(crate) all: Duration,
    pub(crate) products: Duration,
    pub(crate) multiply_adds: u64,
}

#[derive(Debug, Default)]
struct TimeSums {
    by_kernel: BTreeMap<&'static str, KernelTime>,
    /// Of the kernel that runs.
    inner: InnerTime,
}

/// By kernel.
#[derive(Debug, Default)]
pub(crate) struct KernelTimes(Mutex<TimeSums>);

impl KernelTimes {
    /// What a thread of the kernel that runs did.
    pub(crate) fn add_inner(&self, of_thread: InnerTime) {
        let inner = &mut self.sums().inner;
        inner.all += of_thread.all;
        inner.products += of_thread.products;
        inner.multiply_adds += of_thread.multiply_adds;
    }

    pub(crate) fn add(&self, kernel: &'static str, begun: Instant) {
        let time = begun.elapsed();
        let mut sums = self.sums();
        let inner = std::mem::take(&mut sums.inner);
        let part = inner.products.as_secs_f64() / inner.all.as_secs_f64().max(f64::MIN_POSITIVE);
        let (products, multiply_adds) = (time.mul_f64(part), inner.multiply_adds);
        *sums.by_kernel.entry(kernel).or_default() += KernelTime { calls: 1, time, products, multiply_adds };
    }

    /// Those since the call before.
    pub(crate) fn take(&self) -> BTreeMap<&'static str, KernelTime> {
        std::mem::take(&mut self.sums().by_kernel)
    }

    fn sums(&self) -> MutexGuard<'_, TimeSums> {
        // Sums are never half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::ops::{AttentionShape, AttentionSpans, causal_keys};
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

    #[test]
    fn products_within_attention_are_told_apart() {
        let device = Device::new(2);
        device.take_kernel_times();
        let tape = Tape::new(&device);
        let qkv = tape.leaf(Tensor::zeros(&device, &[64, 3 * 16]));
        let spans = AttentionSpans::new(&device, 32, &causal_keys(&[0; 64], 32), None);
        let y = qkv.attention(AttentionShape { heads: 2, kv_heads: 2, head_dim: 8 }, &spans);
        tape.backward_from(&y, Tensor::filled(&device, &[64, 16], 1.0));
        let times = device.take_kernel_times();
        // Two rows of two heads of one block of 32 by 32 each: scores and weighted values; scores again and four gradients.
        for (name, products) in [("attention", 2), ("attention_back", 5)] {
            let time = times[name];
            assert_eq!(time.multiply_adds, products * 2 * 2 * 32 * 32 * 8, "{name}: {time:?}");
            assert!(Duration::ZERO < time.products && time.products < time.time, "{name}: {time:?}");
        }
        assert!(
            times.iter().all(|(name, time)| KernelKind::of(name) == KernelKind::Attention || time.multiply_adds == 0)
        );
    }
}
