//! Contiguous, row-major, reference-counted tensors of f32, bf16 or integers.
//!
//! Elements are reached in two ways. Kernels ([`crate::kernels`]) work on them wherever they are; [`crate::to_host`] waits
//! until all kernels before it are done and copies them to the host ([`crate::crossing`]). `f32s` and its like look at host
//! memory directly: tests and the host's own kernels may, whatever is to run on accelerators may not.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::cpu::gather::Width;
use crate::cpu::stored::{Stored, StoredRef};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::gpu::{DeviceElements, DeviceMemory};
use crate::index::Index;
use crate::kernels;
use crate::pool::{ALIGN_BYTES, aligned_window};
use crate::storage::Allocation;

/// A shape and a share of a buffer. Clones are cheap and share memory; writing needs the only handle.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    buffer: Arc<Allocation>,
}

impl Tensor {
    fn of(shape: &[usize], buffer: Allocation) -> Tensor {
        Tensor { shape: shape.to_vec(), buffer: Arc::new(buffer) }
    }

    /// Memory for `shape` with whatever it last held. For kernels that write every element.
    pub fn stale(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Tensor {
        Tensor::of(shape, Allocation::stale(device, dtype, shape.iter().product()))
    }

    /// All zeros, f32.
    pub fn zeros(device: &Arc<Device>, shape: &[usize]) -> Tensor {
        Tensor::filled(device, shape, 0.0)
    }

    /// Zeros of the host, f32, that are kept and not taken again: in memory for exactly so many, which may be most of the machine's.
    ///
    /// # Errors
    /// If the system does not give it.
    pub fn zeros_to_keep(host: &Arc<Device>, len: usize) -> io::Result<Tensor> {
        if !host.has_data() {
            return Ok(Tensor::zeros(host, &[len]));
        }
        let (mut memory, capacity) = (Vec::new(), len + ALIGN_BYTES / size_of::<f32>());
        memory.try_reserve_exact(capacity).map_err(io::Error::other)?;
        memory.resize(capacity, 0.0);
        let window = aligned_window(&memory, len);
        Ok(Tensor::from_window(host, &[len], Elements::F32(memory), window))
    }

    /// All elements the same, f32.
    pub fn filled(device: &Arc<Device>, shape: &[usize], value: f32) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        tensor.fill(value);
        tensor
    }

    /// A copy of `values` as f32. Does not wait.
    #[track_caller]
    pub fn from_slice(device: &Arc<Device>, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        assert_eq!(tensor.len(), values.len(), "shape {shape:?} does not hold {} values", values.len());
        tensor.write(0, StoredRef::F32(values));
        tensor
    }

    /// A copy of integers. Does not wait.
    #[track_caller]
    pub fn from_index<'a>(device: &Arc<Device>, index: impl Into<Index<'a>>) -> Tensor {
        index.into().on(device)
    }

    /// Element `i` is `f(i)`, i counting in row-major order. Where there are no elements `f` is not called.
    pub fn from_fn(device: &Arc<Device>, shape: &[usize], f: impl FnMut(usize) -> f32) -> Tensor {
        let mut tensor = Tensor::stale(device, shape, Dtype::F32);
        tensor.write_from_fn(f);
        tensor
    }

    /// The values that `make` gives. Where there are no elements it is not called.
    #[track_caller]
    pub fn from_values(device: &Arc<Device>, shape: &[usize], make: impl FnOnce() -> Vec<f32>) -> Tensor {
        match device.has_data() {
            true => Tensor::from_slice(device, shape, &make()),
            false => Tensor::stale(device, shape, Dtype::F32),
        }
    }

    /// Wraps memory that came back from a collective; `window` is the part that holds the elements.
    #[track_caller]
    pub fn from_window(device: &Arc<Device>, shape: &[usize], elements: Elements, window: Range<usize>) -> Tensor {
        let len: usize = shape.iter().product();
        assert_eq!(len, window.len(), "shape {shape:?} does not hold a window of {}", window.len());
        Tensor::of(shape, Allocation::of_window(device, elements, window))
    }

    /// What a collective returned that moved sizes.
    pub fn from_size(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Tensor {
        Tensor::of(shape, Allocation::sized(device, dtype, shape.iter().product()))
    }

    /// Hands the memory out, for a collective that owns its buffers while in flight; `None` where there are only sizes.
    /// Copies only if shared.
    pub fn into_window(self) -> Option<(Elements, Range<usize>)> {
        self.into_allocation().into_window()
    }

    /// What stands behind it: its own, or a copy if another handle shares it.
    pub(crate) fn into_allocation(self) -> Allocation {
        match Arc::try_unwrap(self.buffer) {
            Ok(buffer) => buffer,
            Err(shared) => Tensor { shape: self.shape, buffer: shared }.to_owned_copy().into_allocation(),
        }
    }

    #[track_caller]
    pub(crate) fn from_allocation(shape: &[usize], buffer: Allocation) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), buffer.len(), "the elements of shape {shape:?}");
        Tensor::of(shape, buffer)
    }

    pub fn device(&self) -> &Arc<Device> {
        self.buffer.device()
    }

    pub fn dtype(&self) -> Dtype {
        self.buffer.dtype()
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.buffer.len()
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

    /// The elements as they are stored.
    #[track_caller]
    pub(crate) fn stored_ref(&self) -> StoredRef<'_> {
        self.buffer.stored_ref()
    }

    /// The elements as they are stored, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub(crate) fn stored(&mut self) -> Stored<'_> {
        self.only().stored()
    }

    pub(crate) fn buffer(&self) -> &Allocation {
        &self.buffer
    }

    /// The only handle of the memory.
    #[track_caller]
    pub(crate) fn only(&mut self) -> &mut Allocation {
        Arc::get_mut(&mut self.buffer).expect("writing needs the only handle of a tensor")
    }

    #[track_caller]
    pub(crate) fn assert_unique(&mut self) {
        self.only();
    }

    /// An accelerator's memory.
    #[track_caller]
    pub(crate) fn memory(&self) -> &DeviceMemory {
        self.buffer.memory()
    }

    /// Its elements in an accelerator's memory.
    #[track_caller]
    pub(crate) fn device_elements(&self) -> DeviceElements {
        DeviceElements::new(self.memory(), self.dtype(), self.len())
    }

    /// The elements of an f32 tensor in host memory.
    #[track_caller]
    pub fn f32s(&self) -> &[f32] {
        match self.stored_ref() {
            StoredRef::F32(data) => data,
            _ => panic!("expected an f32 tensor, got {:?} of shape {:?}", self.dtype(), self.shape),
        }
    }

    /// The elements of an f32 tensor in host memory, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        let (dtype, shape) = (self.dtype(), self.shape.clone());
        match self.stored() {
            Stored::F32(data) => data,
            _ => panic!("expected an f32 tensor, got {dtype:?} of shape {shape:?}"),
        }
    }

    /// The elements of a bf16 tensor in host memory.
    #[track_caller]
    pub fn bf16s(&self) -> &[bf16] {
        match self.stored_ref() {
            StoredRef::Bf16(data) => data,
            _ => panic!("expected a bf16 tensor, got {:?} of shape {:?}", self.dtype(), self.shape),
        }
    }

    /// The elements of a bf16 tensor in host memory, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub fn bf16s_mut(&mut self) -> &mut [bf16] {
        let (dtype, shape) = (self.dtype(), self.shape.clone());
        match self.stored() {
            Stored::Bf16(data) => data,
            _ => panic!("expected a bf16 tensor, got {dtype:?} of shape {shape:?}"),
        }
    }

    /// The elements of an integer tensor in host memory.
    #[track_caller]
    pub fn u32s(&self) -> &[u32] {
        match self.stored_ref() {
            StoredRef::U32(data) => data,
            _ => panic!("expected a tensor of integers, got {:?} of shape {:?}", self.dtype(), self.shape),
        }
    }

    /// The elements of an integer tensor in host memory, to write. Panics if another handle shares the memory.
    #[track_caller]
    pub fn u32s_mut(&mut self) -> &mut [u32] {
        let (dtype, shape) = (self.dtype(), self.shape.clone());
        match self.stored() {
            Stored::U32(data) => data,
            _ => panic!("expected a tensor of integers, got {dtype:?} of shape {shape:?}"),
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
        kernels::convert(&mut out, self, 0, 0..self.len());
        out
    }

    /// Shorthand for `cast(Dtype::F32)`.
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

    /// Sets every element to `value`.
    pub fn fill(&mut self, value: f32) {
        self.fill_part(0..self.len(), value);
    }

    /// Sets the elements `range` to `value`.
    #[track_caller]
    pub fn fill_part(&mut self, range: Range<usize>, value: f32) {
        kernels::fill(self, value, range);
    }

    /// Adds `factor` times `x`, both f32.
    #[track_caller]
    pub fn add_scaled(&mut self, x: &Tensor, factor: f32) {
        assert_eq!(self.len(), x.len(), "as many elements");
        kernels::scale(self, x, factor, true);
    }

    /// Writes elements `range` of `from` over those from `first` on, converted to what is stored here.
    #[track_caller]
    pub fn copy_part(&mut self, first: usize, from: &Tensor, range: Range<usize>) {
        match Device::share_memory(self.device(), from.device()) {
            true => kernels::convert(self, from, first, range),
            false => self.store(first, from.elements(range).stored_ref()),
        }
    }

    /// Copies parts of `from`, each to where it begins here; together they are `elements`. Where there are no elements,
    /// nobody looks at the parts one by one.
    #[track_caller]
    pub fn copy_parts(&mut self, from: &Tensor, elements: usize, parts: impl Iterator<Item = (usize, Range<usize>)>) {
        match self.device().has_data() {
            true => parts.for_each(|(first, range)| self.copy_part(first, from, range)),
            false => self.copy_part(0, from, 0..elements),
        }
    }

    /// Adds elements `range` of `from` to all of these, in f32.
    #[track_caller]
    pub fn add_part(&mut self, from: &Tensor, range: Range<usize>) {
        assert_eq!(self.len(), range.len(), "as many elements");
        self.add_to_part(0, from, range);
    }

    /// Adds elements `range` of `from` to those from `first` on, in f32.
    #[track_caller]
    pub fn add_to_part(&mut self, first: usize, from: &Tensor, range: Range<usize>) {
        if from.dtype() == Dtype::F32 {
            return kernels::add_range(self, from, first, range);
        }
        let mut wide = Tensor::stale(self.device(), &[range.len()], Dtype::F32);
        wide.copy_part(0, from, range);
        kernels::add_range(self, &wide, first, 0..wide.len());
    }

    /// A copy with memory of its own.
    pub fn to_owned_copy(&self) -> Tensor {
        let mut out = Tensor::stale(self.device(), &self.shape, self.dtype());
        out.copy_part(0, self, 0..self.len());
        out
    }

    /// `out[i] = self[index[i]]`, as f32.
    pub fn gathered_rows<'a>(&self, index: impl Into<Index<'a>>) -> Tensor {
        let index = index.into();
        let mut out = Tensor::stale(self.device(), &[index.len(), self.cols()], Dtype::F32);
        let index = index.on(self.device());
        kernels::gather(&mut out, self, &index, self.cols(), false);
        out
    }

    /// `out[t] = sum_j weights[t, j] * self[places[t * K + j]]`: self `[R, D]`, weights `[T, K]`, gives `[T, D]` as f32. A
    /// route without a place (`u32::MAX`) contributes nothing.
    pub fn weighted_row_sums<'a>(&self, weights: &Tensor, places: impl Into<Index<'a>>) -> Tensor {
        let (places, width) = (places.into(), Width { k: weights.cols(), row: self.cols() });
        assert_eq!(places.len(), weights.len(), "one place a route");
        let mut out = Tensor::stale(self.device(), &[weights.rows(), self.cols()], Dtype::F32);
        let places = places.on(self.device());
        kernels::weighted_sum(&mut out, self, &weights.to_f32(), &places, width);
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
}
