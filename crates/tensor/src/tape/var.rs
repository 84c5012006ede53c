//! A value on a tape, which in a segment's second run may be one that nobody asks for.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;

use super::Tape;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;
use crate::value::{KeptValue, Value};

/// A value on a tape. Clones are cheap.
#[derive(Clone)]
pub struct Var {
    tape: Tape,
    value: Made,
    /// Of a parameter: where its value is looked up.
    parameter: Option<Value>,
    pub(crate) node: Option<usize>,
}

/// What a backward closure keeps of an input: its place on the tape, if it has one.
#[derive(Clone, Copy, Debug)]
pub struct Input(pub(crate) Option<usize>);

impl Input {
    /// Whether a gradient can come to it.
    pub(crate) fn is_on_tape(self) -> bool {
        self.0.is_some()
    }
}

#[derive(Clone)]
pub(super) enum Made {
    Known(Tensor),
    /// To be computed when somebody asks for it.
    Later(Rc<Later>),
}

pub(super) struct Later {
    shape: Vec<usize>,
    dtype: Dtype,
    made: OnceCell<Tensor>,
    make: Cell<Option<Box<dyn FnOnce() -> Tensor>>>,
}

impl Later {
    pub(super) fn new(shape: &[usize], dtype: Dtype, make: impl FnOnce() -> Tensor + 'static) -> Later {
        Later { shape: shape.to_vec(), dtype, made: OnceCell::new(), make: Cell::new(Some(Box::new(make))) }
    }

    fn tensor(&self) -> &Tensor {
        self.made.get_or_init(|| self.make.take().expect("a value is made once")())
    }
}

impl Var {
    pub(super) fn new(tape: &Tape, value: Made, node: Option<usize>) -> Var {
        Var { tape: tape.clone(), value, parameter: None, node }
    }

    pub(super) fn stored_as(self, parameter: Option<Value>) -> Var {
        Var { parameter, ..self }
    }

    /// Where the value of a parameter is looked up.
    pub(super) fn stored(&self) -> Option<&Value> {
        self.parameter.as_ref()
    }

    /// What a backward closure keeps of the value.
    pub(crate) fn kept(&self) -> KeptValue {
        let tensor = || KeptValue::Tensor(self.value().clone());
        self.parameter.as_ref().map_or_else(tensor, |value| KeptValue::Parameter(value.clone()))
    }

    pub fn tape(&self) -> &Tape {
        &self.tape
    }

    pub fn device(&self) -> &Arc<Device> {
        self.tape.device()
    }

    pub fn value(&self) -> &Tensor {
        match &self.value {
            Made::Known(tensor) => tensor,
            Made::Later(later) => later.tensor(),
        }
    }

    /// The value, without its place on the tape.
    pub fn into_value(self) -> Tensor {
        match self.value {
            Made::Known(tensor) => tensor,
            Made::Later(later) => later.tensor().clone(),
        }
    }

    pub fn shape(&self) -> &[usize] {
        match &self.value {
            Made::Known(tensor) => tensor.shape(),
            Made::Later(later) => &later.shape,
        }
    }

    /// Length of the last dim.
    #[track_caller]
    pub fn cols(&self) -> usize {
        *self.shape().last().expect("a value with at least one dim")
    }

    /// Product of all dims but the last.
    pub fn rows(&self) -> usize {
        self.shape()[..self.shape().len().saturating_sub(1)].iter().product()
    }

    pub fn dtype(&self) -> Dtype {
        match &self.value {
            Made::Known(tensor) => tensor.dtype(),
            Made::Later(later) => later.dtype,
        }
    }

    /// The handle that a backward closure keeps.
    pub fn input(&self) -> Input {
        Input(self.node)
    }
}
