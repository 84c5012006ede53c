//! Copies between an accelerator and pinned memory of the host, on streams of their own: kernels that are launched meanwhile
//! run beside them.

use std::ops::Range;

use crate::device::{Device, Engine};
use crate::gpu::{Event, PagePin};
use crate::tensor::Tensor;

/// All that a device had been asked for when this was made.
#[derive(Debug)]
pub struct DevicePoint(Option<Event>);

impl Device {
    /// The point that copies wait for which need the kernels launched so far, and none that are launched later.
    pub fn point(&self) -> DevicePoint {
        match self.engine() {
            Engine::Accelerator(gpu) => DevicePoint(Some(gpu.point())),
            Engine::Host | Engine::Sizes(_) => DevicePoint(None),
        }
    }
}

/// A tensor of the host that keeps what a device has no room for. For an accelerator its pages are pinned, so that the device
/// copies by itself.
#[derive(Debug)]
pub struct PinnedTensor {
    // Dropped before the memory is.
    _pin: Option<PagePin>,
    tensor: Tensor,
}

impl PinnedTensor {
    /// Of `tensor`, for copies to and from `device`. Pages that cannot be pinned are a failure of the device, which
    /// [`crate::on_device`] catches.
    ///
    /// # Panics
    /// If another handle shares the tensor's memory.
    pub fn new(device: &Device, tensor: Tensor) -> PinnedTensor {
        let mut tensor = tensor;
        tensor.assert_unique();
        let pin = match device.engine() {
            Engine::Accelerator(gpu) if !tensor.is_empty() => Some(gpu.pin(tensor.stored_ref().bytes())),
            _ => None,
        };
        PinnedTensor { _pin: pin, tensor }
    }

    /// Its elements on the host.
    ///
    /// # Panics
    /// If they are not f32.
    pub fn f32s(&self) -> &[f32] {
        self.tensor.f32s()
    }

    /// Its elements on the host, to write.
    ///
    /// # Panics
    /// If they are not f32.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        self.tensor.f32s_mut()
    }

    /// Copies elements `range` over those of `to` from `first` on, and returns when they are there. Kernels up to `after` may
    /// use what they replace.
    ///
    /// # Panics
    /// If elements lie beyond either tensor, the types differ, or another handle shares `to`'s memory.
    #[track_caller]
    pub fn fetch(&self, to: &mut Tensor, first: usize, range: Range<usize>, after: &DevicePoint) {
        match self.way(to, after) {
            None => to.copy_part(first, &self.tensor, range),
            Some(after) => {
                to.assert_unique();
                assert!(first + range.len() <= to.len(), "{first} + {} elements of {}", range.len(), to.len());
                let bytes = self.tensor.stored_ref().part(range).bytes();
                to.memory().fetch(first * to.dtype().bytes(), bytes, after);
            }
        }
    }

    /// Copies elements `range` of `from`, as kernels up to `after` leave them, over those from `first` on, and returns when
    /// they are there.
    ///
    /// # Panics
    /// If elements lie beyond either tensor, or the types differ.
    #[track_caller]
    pub fn keep(&mut self, first: usize, from: &Tensor, range: Range<usize>, after: &DevicePoint) {
        match self.way(from, after) {
            None => self.tensor.copy_part(first, from, range),
            Some(after) => {
                assert!(range.end <= from.len(), "elements {range:?} of {}", from.len());
                let bytes = self.tensor.stored().part(first..first + range.len()).bytes();
                from.memory().keep(range.start * from.dtype().bytes(), bytes, after);
            }
        }
    }

    /// What a copy comes after, if the other tensor is an accelerator's.
    #[track_caller]
    fn way<'a>(&self, other: &Tensor, DevicePoint(after): &'a DevicePoint) -> Option<&'a Event> {
        if Device::share_memory(self.tensor.device(), other.device()) {
            return None;
        }
        assert_eq!(self.tensor.dtype(), other.dtype(), "bytes are copied, not converted");
        Some(after.as_ref().expect("a point of the device that is copied to or from"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn what_is_kept_comes_back() {
        let (device, host) = (Device::simulated(1).unwrap(), Device::new(1));
        let mut kept = PinnedTensor::new(&device, Tensor::zeros(&host, &[6]));
        let there = Tensor::from_fn(&device, &[4], |i| 1.0 + i as f32);
        kept.keep(1, &there, 1..4, &device.point());
        assert_eq!(kept.f32s(), [0.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
        let mut back = Tensor::zeros(&device, &[3]);
        kept.fetch(&mut back, 1, 2..4, &device.point());
        assert_eq!(back.to_vec(), [0.0, 3.0, 4.0]);
        kept.keep(0, &Tensor::filled(&host, &[2], 7.0), 0..2, &device.point());
        assert_eq!(kept.f32s()[..3], [7.0, 7.0, 3.0]);
    }

    /// A copy that does not wait for the kernels before it is refused.
    #[test]
    #[should_panic(expected = "on stream Keep uses memory that another stream may not be done with")]
    fn what_kernels_write_is_waited_for() {
        let (device, host) = (Device::simulated(1).unwrap(), Device::new(1));
        let (early, there) = (device.point(), Tensor::filled(&device, &[4], 1.0));
        PinnedTensor::new(&device, Tensor::zeros(&host, &[4])).keep(0, &there, 0..4, &early);
    }

    #[test]
    #[should_panic(expected = "on stream Fetch uses memory that another stream may not be done with")]
    fn what_kernels_use_is_not_replaced_before() {
        let (device, host) = (Device::simulated(1).unwrap(), Device::new(1));
        let (early, mut there) = (device.point(), Tensor::filled(&device, &[4], 1.0));
        PinnedTensor::new(&device, Tensor::zeros(&host, &[4])).fetch(&mut there, 0, 0..4, &early);
    }

    #[test]
    #[should_panic(expected = "a copy on stream Fetch of memory that is not pinned")]
    fn only_pinned_memory_is_copied_beside_kernels() {
        let device = Device::simulated(1).unwrap();
        let (DevicePoint(point), there) = (device.point(), Tensor::stale(&device, &[4], Dtype::F32));
        there.memory().fetch(0, &[0; 16], &point.unwrap());
    }
}
