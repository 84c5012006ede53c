//! Elements on their way between the host and wherever a tensor has them: copies, of which those to the host wait.

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::rows::for_rows;
use crate::cpu::stored::{self, Stored, StoredRef};
use crate::device::{Device, Engine};
use crate::dtype::Dtype;
use crate::elements::{Elements, ElementsMut, HostElements};
use crate::tensor::Tensor;

/// Elements that cross over at once where many do, and those that are worth a thread.
const CROSSING_BLOCK: usize = 1 << 22;
const THREAD_LEAST: usize = 1 << 12;

impl Tensor {
    /// Elements `range` on the host: of an accelerator's tensor, copies, for which it waits; zeros where there are no
    /// elements.
    #[track_caller]
    pub fn elements(&self, range: Range<usize>) -> HostElements<'_> {
        self.buffer().elements(range)
    }

    /// Writes elements of the host over those from `first` on.
    #[track_caller]
    pub(crate) fn write(&mut self, first: usize, elements: StoredRef) {
        self.only().write(first, elements);
    }

    /// A copy on a device of the host, for who checks results: nothing is ordered by it.
    pub(crate) fn seen_by(&self, host: &Arc<Device>) -> Tensor {
        let mut copy = Tensor::stale(host, self.shape(), self.dtype());
        copy.write(0, self.buffer().seen().stored_ref());
        copy
    }

    /// Calls `f` with some of the elements in host memory, in row-major order; of a bf16 tensor, with a copy of those as
    /// f32.
    #[track_caller]
    pub fn with_f32s<R>(&self, range: Range<usize>, f: impl FnOnce(&[f32]) -> R) -> R {
        match self.dtype() {
            Dtype::F32 => f(self.elements(range).f32s()),
            _ => {
                let mut copy = Tensor::stale(self.device(), &[range.len()], Dtype::F32);
                copy.copy_part(0, self, range);
                f(copy.elements(0..copy.len()).f32s())
            }
        }
    }

    /// Writes `values` over the elements from `first` on, rounded to what is stored. Does not wait.
    #[track_caller]
    pub fn store_f32s(&mut self, first: usize, values: &[f32]) {
        self.store(first, StoredRef::F32(values));
    }

    /// Writes elements of the host over those from `first` on, converted to what is stored.
    #[track_caller]
    pub(crate) fn store(&mut self, first: usize, values: StoredRef) {
        let (device, all) = (self.device().clone(), 0..values.len());
        match device.engine() {
            Engine::Accelerator(_) if self.dtype() == values.dtype() => self.write(first, values),
            _ => {
                self.write_stored(first..first + values.len(), |to| stored::convert(&device, to, values, 0, all));
            }
        }
    }

    /// Sets element `i` to `f(i)`, rounded to what is stored. Where there are no elements `f` is not called.
    pub fn write_from_fn(&mut self, mut f: impl FnMut(usize) -> f32) {
        self.write_stored(0..self.len(), |mut to| to.write_from_fn(&mut f));
    }

    /// Lets `f` write all of elements `range`, in host memory: those of the tensor, or what is copied there. Where there are
    /// no elements `f` is not called.
    #[track_caller]
    pub fn write_elements<R>(&mut self, range: Range<usize>, f: impl FnOnce(ElementsMut<'_>) -> R) -> Option<R> {
        self.write_stored(range, |to| f(to.into()))
    }

    #[track_caller]
    fn write_stored<R>(&mut self, range: Range<usize>, f: impl FnOnce(Stored<'_>) -> R) -> Option<R> {
        let device = self.device().clone();
        match device.engine() {
            Engine::Host => Some(f(self.stored().part(range))),
            Engine::Accelerator(_) => {
                let mut elements = Elements::zeros(self.dtype(), range.len());
                let result = f(elements.stored());
                self.write(range.start, elements.stored_ref());
                Some(result)
            }
            Engine::Sizes(_) => None,
        }
    }

    /// The same of an f32 tensor.
    #[track_caller]
    pub fn write_f32s<R>(&mut self, range: Range<usize>, f: impl FnOnce(&mut [f32]) -> R) -> Option<R> {
        self.write_elements(range, |elements| f(elements.into_f32s()))
    }

    /// Lets `f` write all elements of an f32 tensor, on all threads of the device: it is told where those begin that it is
    /// given. What crosses over to an accelerator does so by blocks, so that the host has little of it at a time. Where there
    /// are no elements `f` is not called.
    #[track_caller]
    pub fn write_f32s_by_threads(&mut self, f: impl Fn(usize, &mut [f32]) + Sync) {
        let device = self.device().clone();
        match device.engine() {
            Engine::Host => for_rows(&device, self.f32s_mut(), 1, THREAD_LEAST, f),
            Engine::Accelerator(_) => {
                let mut block = vec![0.0; CROSSING_BLOCK.min(self.len())];
                for first in (0..self.len()).step_by(CROSSING_BLOCK) {
                    let len = block.len().min(self.len() - first);
                    for_rows(&device, &mut block[..len], 1, THREAD_LEAST, |start, part| f(first + start, part));
                    self.write(first, StoredRef::F32(&block[..len]));
                }
            }
            Engine::Sizes(_) => {}
        }
    }

    /// The elements as f32, on the host. Waits, as [`to_host`].
    pub fn to_vec(&self) -> Vec<f32> {
        to_host(&[&self.to_f32()]).remove(0).into_f32s()
    }

    /// Elements `range` of an f32 tensor, on the host. Waits, as [`to_host`].
    #[track_caller]
    pub fn part_to_vec(&self, range: Range<usize>) -> Vec<f32> {
        self.device().count_crossing();
        self.elements(range).into_owned().into_f32s()
    }

    /// The one element of a one-element tensor. Waits, as [`to_host`].
    #[track_caller]
    pub fn scalar(&self) -> f32 {
        assert_eq!(self.len(), 1, "expected one element, got shape {:?}", self.shape());
        self.to_vec()[0]
    }
}

/// Copies of tensors' elements on the host. Waits once for all kernels before it, however many tensors: nothing else
/// waits, and [`Device::crossings`] counts it. Where there are no elements, zeros.
pub fn to_host(tensors: &[&Tensor]) -> Vec<Elements> {
    if let Some(first) = tensors.first() {
        first.device().count_crossing();
    }
    tensors.iter().map(|tensor| tensor.elements(0..tensor.len()).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_write_all_elements_and_are_told_where() {
        let device = Device::simulated(2).expect("a C++ compiler");
        for (device, len) in [(Device::new(3), 20_001), (device.clone(), CROSSING_BLOCK + 5), (device, 0)] {
            let mut tensor = Tensor::filled(&device, &[len], -1.0);
            tensor.write_f32s_by_threads(|first, part| {
                part.iter_mut().zip(first..).for_each(|(x, i)| *x = i as f32);
            });
            assert!(tensor.to_vec().into_iter().eq((0..len).map(|i| i as f32)), "{len} on {device:?}");
        }
    }
}
