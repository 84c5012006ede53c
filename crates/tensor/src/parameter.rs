//! A trainable tensor with a gradient buffer of its own.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::account::Cause;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// A named tensor that training changes. Its gradient is f32 and lives from the first contribution until it is cleared:
/// backward adds into it where it is needed.
#[derive(Debug)]
pub struct Parameter {
    name: String,
    value: Tensor,
    gradient: Gradient,
}

/// The gradient of one parameter. Clones are handles on the same one, which tapes, collectives and the parameter share.
#[derive(Clone, Debug)]
pub struct Gradient(Rc<RefCell<Buffer>>);

#[derive(Debug)]
struct Buffer {
    device: Arc<Device>,
    shape: Vec<usize>,
    /// Absent before the first contribution, and while the gradient is taken out.
    tensor: Option<Tensor>,
}

impl Parameter {
    /// A parameter named `name` that starts as `value`.
    pub fn new(name: impl Into<String>, value: Tensor) -> Parameter {
        let buffer = Buffer { device: value.device().clone(), shape: value.shape().to_vec(), tensor: None };
        Parameter { name: name.into(), value, gradient: Gradient(Rc::new(RefCell::new(buffer))) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The value, to change. Panics if a tape still holds it.
    pub fn value_mut(&mut self) -> &mut Tensor {
        &mut self.value
    }

    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    pub fn len(&self) -> usize {
        self.value.len()
    }

    pub fn is_empty(&self) -> bool {
        self.value.is_empty()
    }

    pub fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    /// Calls `f` with the gradient: zeros if nothing has contributed since [`Parameter::clear_gradient`].
    pub fn with_gradient<R>(&self, f: impl FnOnce(&mut Tensor) -> R) -> R {
        f(self.gradient.0.borrow_mut().or_zeros())
    }

    /// The value and the gradient together, both to change: what an optimizer works on.
    pub fn with_value_and_gradient<R>(&mut self, f: impl FnOnce(&mut Tensor, &mut Tensor) -> R) -> R {
        f(&mut self.value, self.gradient.0.borrow_mut().or_zeros())
    }

    /// Forgets the gradient and gives its memory back, for the next forward's activations to use.
    pub fn clear_gradient(&self) {
        self.gradient.0.borrow_mut().tensor = None;
    }
}

impl Gradient {
    /// Whether both are handles on the gradient of one parameter.
    pub fn is(&self, other: &Gradient) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Takes the gradient out, to be put back by [`Gradient::put`]: for collectives that own their buffers. Zeros if
    /// nothing has contributed.
    pub fn take(&self) -> Tensor {
        let mut buffer = self.0.borrow_mut();
        buffer.or_zeros();
        buffer.tensor.take().expect("there are at least zeros")
    }

    /// Makes `tensor`, f32, the gradient.
    #[track_caller]
    pub fn put(&self, tensor: Tensor) {
        let mut buffer = self.0.borrow_mut();
        assert_eq!(tensor.shape(), buffer.shape, "a gradient has its parameter's shape");
        buffer.tensor = Some(tensor);
    }

    pub fn shape(&self) -> Vec<usize> {
        self.0.borrow().shape.clone()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.borrow().shape.iter().product()
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
        f(buffer.or_stale(), accumulate);
    }
}

impl Buffer {
    fn or_zeros(&mut self) -> &mut Tensor {
        let absent = self.tensor.is_none();
        let tensor = self.or_stale();
        if absent {
            tensor.f32s_mut().fill(0.0);
        }
        tensor
    }

    fn or_stale(&mut self) -> &mut Tensor {
        self.tensor.get_or_insert_with(|| {
            let _charge = self.device.charge(Cause::Gradients);
            Tensor::stale(&self.device, &self.shape, Dtype::F32)
        })
    }
}
