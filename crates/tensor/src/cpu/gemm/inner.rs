//! Products that are a step of a kernel among others: timed apart from the rest of it, where somebody asks for times.

use std::cell::Cell;
use std::time::Instant;

use super::{Into, View, gemm_small};
use crate::device::Device;
use crate::kernel_times::{InnerTime, KernelTimes};

/// The products of one thread of a kernel, which are counted when this is dropped.
pub(crate) struct InnerProducts<'a> {
    counted: Option<(&'a KernelTimes, Instant)>,
    sums: Cell<InnerTime>,
}

impl<'a> InnerProducts<'a> {
    /// At the beginning of what the thread does.
    pub(crate) fn new(device: &'a Device) -> InnerProducts<'a> {
        InnerProducts { counted: device.kernel_times().map(|times| (times, Instant::now())), sums: Cell::default() }
    }

    /// `c (+)= alpha * a * b` on the calling thread, with rows of `c` `stride` apart.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn multiply(&self, c: &mut [f32], stride: usize, a: View, b: View, how: Into) {
        if self.counted.is_none() {
            return gemm_small(c, stride, a, b, how);
        }
        let (begun, multiply_adds) = (Instant::now(), a.rows * a.cols * b.cols);
        gemm_small(c, stride, a, b, how);
        let InnerTime { all, products, multiply_adds: before } = self.sums.get();
        let (products, multiply_adds) = (products + begun.elapsed(), before + multiply_adds as u64);
        self.sums.set(InnerTime { all, products, multiply_adds });
    }
}

impl Drop for InnerProducts<'_> {
    fn drop(&mut self) {
        if let Some((times, begun)) = self.counted {
            times.add_inner(InnerTime { all: begun.elapsed(), ..self.sums.get() });
        }
    }
}
