//! Contiguous, row-major, reference-counted tensors of f32 or bf16.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::account::Cause;
use crate::cpu::stored::{Stored, round_all, widen_all};
use crate::device::{Device, aligned_window};
use crate::dtype::Dtype;

/// Elements in memory; the last handle gives the memory back to the device for reuse.
#[derive(Debug)]
struct Buffer {
    storage: Elements,
    window: Range<usize>,
    cause: Cause,
    device: Arc<Device>,
}

/// A tensor's memory, by what is stored in it.
#[derive(Debug)]
pub enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Elements {
    fn take(&mut self) -> Elements {
        match self {
            Elements::F32(data) => Elements::F32(std::mem::take(data)),
            Elements::Bf16(data) => Elements::Bf16(std::mem::take(data)),
        }
    }
}

impl Buffer {
    fn new(device: &Arc<Device>, storage: Elements, window: Range<usize>) -> Buffer {
        let cause = device.account().current();
        let buffer = Buffer { storage, window, cause, device: device.clone() };
        device.account().add(cause, buffer.bytes());
        buffer
    }

    fn bytes(&self) -> u64 {
        let dtype = match self.storage {
            Elements::F32(_) => Dtype::F32,
            Elements::Bf16(_) => Dtype::Bf16,
        };
        (self.window.len() * dtype.bytes()) as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.account().remove(self.cause, self.bytes());
        match &mut self.storage {
            // An empty vector is one whose memory was handed out by `into_window`.
            Elements::F32(data) if !data.is_empty() => self.device.give_f32(std::mem::take(data)),
            Elements::Bf16(data) if !data.is_empty() => self.device.give_bf16(std::mem::take(data)),
            _ => {}
        }
    }
}

/// A shape and a share of a buffer. Clones are cheap and share memory; writing needs the only handle.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    buffer: Arc<Buffer>,
}

impl Tensor {
    /// Memory for `shape` with whatever it last held. For kernels that write every element.
    pub fn stale(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Tensor {
        let len = shape.iter().product();
        let (storage, window) = match dtype {
            Dtype::F32 => {
                let data = device.take_f32(len);
                let window = aligned_window(&data, len);
                (Elements::F32(data), window)
            }
            Dtype::Bf16 => {
                let data = device.take_bf16(len);
                let window = aligned_window(&data, len);
                (Elements::Bf16(data), window)
            }
        };
        Tensor { shape: shape.to_vec(), buffer: Arc::new(Buffer::new(device, storage, window)) }
    }

    /// All zeros, f32.
    pub fn zeros(device: &Arc<Device>, shape: &[usize]) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        tensor.f32s_mut().fill(0.0);
        tensor
    }

    /// A copy of `values` as f32.
    #[track_caller]
    pub fn from_slice(device: &Arc<Device>, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        assert_eq!(tensor.len(), values.len(), "shape {shape:?} does not hold {} values", values.len());
        tensor.f32s_mut().copy_from_slice(values);
        tensor
    }

    /// Element `i` is `f(i)`, i counting in row-major order.
    pub fn from_fn(device: &Arc<Device>, shape: &[usize], mut f: impl FnMut(usize) -> f32) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        for (i, value) in tensor.f32s_mut().iter_mut().enumerate() {
            *value = f(i);
        }
        tensor
    }

    /// Wraps memory that came back from a collective; `window` is the part that holds the elements.
    #[track_caller]
    pub fn from_window(device: &Arc<Device>, shape: &[usize], storage: Elements, window: Range<usize>) -> Tensor {
        let len: usize = shape.iter().product();
        assert_eq!(len, window.len(), "shape {shape:?} does not hold a window of {}", window.len());
        Tensor { shape: shape.to_vec(), buffer: Arc::new(Buffer::new(device, storage, window)) }
    }

    /// Hands the memory out, for a collective that owns its buffers while in flight. Copies only if shared.
    pub fn into_window(self) -> (Elements, Range<usize>) {
        match Arc::try_unwrap(self.buffer) {
            Ok(mut buffer) => (buffer.storage.take(), buffer.window.clone()),
            Err(shared) => Tensor { shape: self.shape, buffer: shared }.to_owned_copy().into_window(),
        }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.buffer.device
    }

    pub fn dtype(&self) -> Dtype {
        match self.buffer.storage {
            Elements::F32(_) => Dtype::F32,
            Elements::Bf16(_) => Dtype::Bf16,
        }
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.buffer.window.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length of the last dim.
    #[track_caller]
    pub fn cols(&self) -> usize {
        *self.shape.last().expect("a tensor with at least one dim")
    }

    /// Product of all dims but the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The elements of an f32 tensor.
    #[track_caller]
    pub fn f32s(&self) -> &[f32] {
        match &self.buffer.storage {
            Elements::F32(data) => &data[self.buffer.window.clone()],
            Elements::Bf16(_) => panic!("expected an f32 tensor, got bf16 of shape {:?}", self.shape),
        }
    }

    /// The elements of an f32 tensor, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        let buffer = Arc::get_mut(&mut self.buffer).expect("writing needs the only handle of a tensor");
        match &mut buffer.storage {
            Elements::F32(data) => &mut data[buffer.window.clone()],
            Elements::Bf16(_) => panic!("expected an f32 tensor, got bf16 of shape {:?}", self.shape),
        }
    }

    /// The elements of a bf16 tensor.
    #[track_caller]
    pub fn bf16s(&self) -> &[bf16] {
        match &self.buffer.storage {
            Elements::Bf16(data) => &data[self.buffer.window.clone()],
            Elements::F32(_) => panic!("expected a bf16 tensor, got f32 of shape {:?}", self.shape),
        }
    }

    /// The elements of a bf16 tensor, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub fn bf16s_mut(&mut self) -> &mut [bf16] {
        let buffer = Arc::get_mut(&mut self.buffer).expect("writing needs the only handle of a tensor");
        match &mut buffer.storage {
            Elements::Bf16(data) => &mut data[buffer.window.clone()],
            Elements::F32(_) => panic!("expected a bf16 tensor, got f32 of shape {:?}", self.shape),
        }
    }

    /// The elements as they are stored, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub(crate) fn stored(&mut self) -> Stored<'_> {
        match self.dtype() {
            Dtype::F32 => Stored::F32(self.f32s_mut()),
            Dtype::Bf16 => Stored::Bf16(self.bf16s_mut()),
        }
    }

    /// Whether no other handle shares the memory.
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.buffer).is_some()
    }

    /// The same elements stored as `dtype`: itself if it already is.
    pub fn cast(&self, dtype: Dtype) -> Tensor {
        if self.dtype() == dtype {
            return self.clone();
        }
        let mut out = Tensor::stale(self.device(), &self.shape, dtype);
        match dtype {
            Dtype::F32 => widen_all(self.device(), self.bf16s(), out.f32s_mut()),
            Dtype::Bf16 => round_all(self.device(), self.f32s(), out.bf16s_mut()),
        }
        out
    }

    /// Shorthand for `cast(Dtype::F32)`: what every kernel computes on.
    pub fn to_f32(&self) -> Tensor {
        self.cast(Dtype::F32)
    }

    /// The same elements stored as `dtype`, without a second handle on memory that is so already.
    pub fn into_dtype(self, dtype: Dtype) -> Tensor {
        if self.dtype() == dtype { self } else { self.cast(dtype) }
    }

    /// Shorthand for `into_dtype(Dtype::F32)`.
    pub fn into_f32(self) -> Tensor {
        self.into_dtype(Dtype::F32)
    }

    /// Calls `f` with some of the elements, in row-major order; of a bf16 tensor, with a copy of those as f32.
    #[track_caller]
    pub fn with_f32s<R>(&self, range: Range<usize>, f: impl FnOnce(&[f32]) -> R) -> R {
        match self.dtype() {
            Dtype::F32 => f(&self.f32s()[range]),
            Dtype::Bf16 => {
                let mut copy = Tensor::stale(self.device(), &[range.len()], Dtype::F32);
                widen_all(self.device(), &self.bf16s()[range], copy.f32s_mut());
                f(copy.f32s())
            }
        }
    }

    /// Writes `values` over the elements from `first` on, rounded to what is stored.
    #[track_caller]
    pub fn store_f32s(&mut self, first: usize, values: &[f32]) {
        match self.dtype() {
            Dtype::F32 => self.f32s_mut()[first..][..values.len()].copy_from_slice(values),
            Dtype::Bf16 => {
                let device = self.device().clone();
                round_all(&device, values, &mut self.bf16s_mut()[first..][..values.len()]);
            }
        }
    }

    /// Copies elements `range` of `from`, which is stored alike, over those from `first` on.
    #[track_caller]
    pub fn copy_part(&mut self, first: usize, from: &Tensor, range: Range<usize>) {
        match self.dtype() {
            Dtype::F32 => self.f32s_mut()[first..][..range.len()].copy_from_slice(&from.f32s()[range]),
            Dtype::Bf16 => self.bf16s_mut()[first..][..range.len()].copy_from_slice(&from.bf16s()[range]),
        }
    }

    /// Adds elements `range` of `from` to all of these, in f32.
    #[track_caller]
    pub fn add_part(&mut self, from: &Tensor, range: Range<usize>) {
        let device = self.device().clone();
        from.with_f32s(range, |x| self.stored().put(&device, x, true));
    }

    /// A copy with memory of its own.
    pub fn to_owned_copy(&self) -> Tensor {
        let mut out = Tensor::stale(self.device(), &self.shape, self.dtype());
        match self.dtype() {
            Dtype::F32 => out.f32s_mut().copy_from_slice(self.f32s()),
            Dtype::Bf16 => out.bf16s_mut().copy_from_slice(self.bf16s()),
        }
        out
    }

    /// `out[i] = self[index[i]]`, as f32.
    pub fn gathered_rows(&self, index: &[u32]) -> Tensor {
        let mut out = Tensor::stale(self.device(), &[index.len(), self.cols()], Dtype::F32);
        crate::ops::rows::gather(self, index, out.f32s_mut(), false);
        out
    }

    /// A copy of some rows.
    #[track_caller]
    pub fn rows_of(&self, rows: Range<usize>) -> Tensor {
        let width: usize = self.shape()[1..].iter().product();
        let shape = [&[rows.len()], &self.shape()[1..]].concat();
        let mut copy = Tensor::stale(self.device(), &shape, self.dtype());
        copy.copy_part(0, self, rows.start * width..rows.end * width);
        copy
    }

    /// The same elements under another shape.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        let len: usize = shape.iter().product();
        assert_eq!(len, self.len(), "{:?} cannot become {shape:?}", self.shape);
        Tensor { shape: shape.to_vec(), buffer: self.buffer.clone() }
    }

    /// The elements as f32, copied out.
    pub fn to_vec(&self) -> Vec<f32> {
        self.to_f32().f32s().to_vec()
    }

    /// The one element of a one-element tensor.
    #[track_caller]
    pub fn scalar(&self) -> f32 {
        assert_eq!(self.len(), 1, "expected one element, got shape {:?}", self.shape);
        self.to_f32().f32s()[0]
    }
}
