//! A trainable tensor with a gradient buffer of its own, or a frozen one without.

use std::cell::{RefCell, RefMut};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use crate::account::Cause;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;
use crate::value::Value;

/// A named tensor that training changes. Its gradient lives from the first contribution until it is cleared: backward adds
/// into it where it is needed, in f32. It is stored in the tensor's own type, and rounded when it is put down, unless
/// [`Gradient::store_as`] chose another. A frozen one stays as it is: nothing contributes to its gradient.
#[derive(Debug)]
pub struct Parameter {
    name: String,
    value: Value,
    gradient: Gradient,
    is_frozen: bool,
}

/// The gradient of one parameter. Clones are handles on the same one, which tapes, collectives and the parameter share.
#[derive(Clone, Debug)]
pub struct Gradient(Rc<RefCell<GradientBuffer>>);

#[derive(Debug)]
struct GradientBuffer {
    device: Arc<Device>,
    shape: Vec<usize>,
    dtype: Dtype,
    /// Absent before the first contribution, and while the gradient is taken out.
    tensor: Option<Tensor>,
    /// The elements that `tensor` holds: all of them, but for what [`Gradient::put_part`] left.
    held: Range<usize>,
}

impl Parameter {
    /// A parameter named `name` that starts as `value`.
    pub fn new(name: impl Into<String>, value: Tensor) -> Parameter {
        let (device, shape, dtype) = (value.device().clone(), value.shape().to_vec(), value.dtype());
        let buffer = GradientBuffer { device, shape, dtype, tensor: None, held: 0..value.len() };
        let gradient = Gradient(Rc::new(RefCell::new(buffer)));
        Parameter { name: name.into(), value: Value::new(value), gradient, is_frozen: false }
    }

    /// From now on tapes take it for a constant, which is looked up where it is needed as a parameter is.
    pub fn freeze(&mut self) {
        self.is_frozen = true;
    }

    pub fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value. Panics where only a part of it is held.
    #[track_caller]
    pub fn value(&self) -> Tensor {
        self.value.whole()
    }

    /// The value, to change. Panics where only a part of it is held; changing it panics if a tape still holds it.
    #[track_caller]
    pub fn value_mut(&mut self) -> RefMut<'_, Tensor> {
        self.value.whole_mut()
    }

    /// A handle on the value, whether or not it is here.
    pub fn stored(&self) -> &Value {
        &self.value
    }

    pub fn shape(&self) -> Vec<usize> {
        self.value.shape()
    }

    pub fn dtype(&self) -> Dtype {
        self.value.dtype()
    }

    pub fn len(&self) -> usize {
        self.value.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    /// Calls `f` with the gradient: zeros if nothing has contributed since [`Parameter::clear_gradient`].
    pub fn with_gradient<R>(&self, f: impl FnOnce(&mut Tensor) -> R) -> R {
        f(self.gradient.0.borrow_mut().whole().or_zeros())
    }

    /// Forgets the gradient and gives its memory back, for the next forward's activations to use.
    pub fn clear_gradient(&self) {
        self.gradient.0.borrow_mut().forget();
    }
}

impl Gradient {
    /// Has it stored in another type from now on.
    ///
    /// # Panics
    /// If anything has contributed: what was put down stays as it is.
    #[track_caller]
    pub fn store_as(&self, dtype: Dtype) {
        let mut buffer = self.0.borrow_mut();
        assert!(buffer.tensor.is_none(), "a gradient that is there already");
        buffer.dtype = dtype;
    }

    /// Whether both are handles on the gradient of one parameter.
    pub fn is(&self, other: &Gradient) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Takes the gradient out, to be put back by [`Gradient::put`]: for collectives that own their buffers. Zeros if
    /// nothing has contributed.
    pub fn take(&self) -> Tensor {
        let mut buffer = self.0.borrow_mut();
        buffer.whole().or_zeros();
        buffer.tensor.take().expect("there are at least zeros")
    }

    /// Makes `tensor` the gradient.
    #[track_caller]
    pub fn put(&self, tensor: Tensor) {
        let mut buffer = self.0.borrow_mut();
        assert_eq!(tensor.shape(), buffer.shape, "a gradient has its parameter's shape");
        assert_eq!(tensor.dtype(), buffer.dtype, "a gradient keeps its type");
        buffer.held = 0..tensor.len();
        buffer.tensor = Some(tensor);
    }

    /// Makes `tensor` the elements from `first` on; the others are then held elsewhere, until the gradient is
    /// cleared.
    #[track_caller]
    pub fn put_part(&self, first: usize, tensor: Tensor) {
        let mut buffer = self.0.borrow_mut();
        let (held, len) = (first..first + tensor.len(), buffer.len());
        assert!(held.end <= len, "elements {held:?} of {len}");
        assert_eq!(tensor.dtype(), buffer.dtype, "a gradient keeps its type");
        buffer.held = held;
        buffer.tensor = Some(tensor);
    }

    /// Calls `f` with the elements `range`, in row-major order: zeros if nothing has contributed.
    #[track_caller]
    pub fn with_part<R>(&self, range: Range<usize>, f: impl FnOnce(&[f32]) -> R) -> R {
        if range.is_empty() {
            return f(&[]);
        }
        let len = range.len();
        self.with_held(range, |tensor, first| tensor.with_f32s(first..first + len, f))
    }

    /// Calls `f` with a tensor that holds the elements `range`, and the place in it where they begin: zeros if nothing has
    /// contributed.
    #[track_caller]
    pub fn with_held<R>(&self, range: Range<usize>, f: impl FnOnce(&Tensor, usize) -> R) -> R {
        let mut buffer = self.0.borrow_mut();
        let held = buffer.held.clone();
        assert!(held.start <= range.start && range.end <= held.end, "elements {range:?} where {held:?} are held");
        f(buffer.or_zeros(), range.start - held.start)
    }

    /// The elements that are here: all, unless [`Gradient::put_part`] left others elsewhere.
    pub fn held(&self) -> Range<usize> {
        self.0.borrow().held.clone()
    }

    pub fn shape(&self) -> Vec<usize> {
        self.0.borrow().shape.clone()
    }

    /// How it is stored.
    pub fn dtype(&self) -> Dtype {
        self.0.borrow().dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn device(&self) -> Arc<Device> {
        self.0.borrow().device.clone()
    }

    /// What tells the gradients of parameters apart: the same for all handles on one.
    pub(crate) fn address(&self) -> *const () {
        Rc::as_ptr(&self.0).cast()
    }

    /// Calls `f` with the gradient if anything has contributed to it.
    pub(crate) fn look(&self, f: impl FnOnce(&Tensor)) {
        if let Some(tensor) = &self.0.borrow().tensor {
            f(tensor);
        }
    }

    /// Calls `f` with the memory and whether to add to what it holds.
    pub(crate) fn contribute(&self, f: impl FnOnce(&mut Tensor, bool)) {
        let mut buffer = self.0.borrow_mut();
        let accumulate = buffer.tensor.is_some();
        f(buffer.whole().or_stale(), accumulate);
    }
}

impl GradientBuffer {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Itself, of which no part is held elsewhere.
    #[track_caller]
    fn whole(&mut self) -> &mut GradientBuffer {
        assert_eq!(self.held, 0..self.len(), "only a part of this gradient is held here");
        self
    }

    fn forget(&mut self) {
        (self.tensor, self.held) = (None, 0..self.len());
    }

    fn or_zeros(&mut self) -> &mut Tensor {
        let absent = self.tensor.is_none();
        let tensor = self.or_stale();
        if absent {
            tensor.fill(0.0);
        }
        tensor
    }

    fn or_stale(&mut self) -> &mut Tensor {
        self.tensor.get_or_insert_with(|| {
            let _charge = self.device.charge(Cause::Gradients);
            Tensor::stale(&self.device, &self.shape, self.dtype)
        })
    }
}
