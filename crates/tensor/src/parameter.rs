//! A trainable tensor with a gradient buffer of its own.

use std::cell::RefCell;
use std::rc::Rc;

use crate::account::Cause;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// A named tensor that training changes. Its gradient is f32 and lives from the first contribution until it is cleared:
/// backward adds into it where it is needed, so no second copy of it ever exists.
#[derive(Debug)]
pub struct Parameter {
    name: String,
    value: Tensor,
    gradient: Rc<RefCell<GradientBuffer>>,
}

#[derive(Debug)]
pub(crate) struct GradientBuffer {
    tensor: Option<Tensor>,
    /// The contents are left over from an earlier step: the next contribution overwrites them.
    fresh: bool,
}

impl Parameter {
    /// A parameter named `name` that starts as `value`.
    pub fn new(name: impl Into<String>, value: Tensor) -> Parameter {
        let gradient = GradientBuffer { tensor: None, fresh: true };
        Parameter { name: name.into(), value, gradient: Rc::new(RefCell::new(gradient)) }
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

    /// Calls `f` with the gradient: zeros if nothing has contributed since [`Parameter::clear_gradient`].
    pub fn with_gradient<R>(&self, f: impl FnOnce(&mut Tensor) -> R) -> R {
        let mut gradient = self.gradient.borrow_mut();
        let fresh = std::mem::replace(&mut gradient.fresh, false);
        let tensor = gradient.tensor_for(&self.value);
        if fresh {
            tensor.f32s_mut().fill(0.0);
        }
        f(tensor)
    }

    /// The value and the gradient together, both to change: what an optimizer works on.
    pub fn with_value_and_gradient<R>(&mut self, f: impl FnOnce(&mut Tensor, &mut Tensor) -> R) -> R {
        self.with_gradient(|_| ());
        let mut gradient = self.gradient.borrow_mut();
        let gradient = gradient.tensor.as_mut().expect("with_gradient has allocated it");
        f(&mut self.value, gradient)
    }

    /// Takes the gradient out, to be put back by [`Parameter::put_gradient`]: for collectives that own their buffers.
    pub fn take_gradient(&self) -> Tensor {
        self.with_gradient(|_| ());
        self.gradient.borrow_mut().tensor.take().expect("with_gradient has allocated it")
    }

    /// Makes `gradient` this parameter's gradient.
    #[track_caller]
    pub fn put_gradient(&self, gradient: Tensor) {
        assert_eq!(gradient.shape(), self.value.shape(), "gradient of {}", self.name);
        *self.gradient.borrow_mut() = GradientBuffer { tensor: Some(gradient), fresh: false };
    }

    /// Forgets the gradient and gives its memory back, for the next forward's activations to use.
    pub fn clear_gradient(&self) {
        *self.gradient.borrow_mut() = GradientBuffer { tensor: None, fresh: true };
    }

    pub(crate) fn gradient_buffer(&self) -> Rc<RefCell<GradientBuffer>> {
        self.gradient.clone()
    }
}

impl GradientBuffer {
    fn tensor_for(&mut self, value: &Tensor) -> &mut Tensor {
        self.tensor.get_or_insert_with(|| {
            let _charge = value.device().charge(Cause::Gradients);
            Tensor::stale(value.device(), value.shape(), Dtype::F32)
        })
    }

    /// The gradient, if anything has contributed to it.
    pub(crate) fn current(&self) -> Option<&Tensor> {
        self.tensor.as_ref().filter(|_| !self.fresh)
    }

    /// Calls `f` with the memory and whether to add to what it holds.
    pub(crate) fn contribute(&mut self, value: &Tensor, f: impl FnOnce(&mut Tensor, bool)) {
        let accumulate = !std::mem::replace(&mut self.fresh, false);
        f(self.tensor_for(value), accumulate);
    }
}
