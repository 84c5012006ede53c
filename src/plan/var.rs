//! A value on a tape of sizes, which in a segment's second run may be one that nobody asks for.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;

use guildhall_tensor::Dtype;

use super::sketch::Array;
use super::tape::Tape;

/// A value on a tape.
#[derive(Clone)]
pub(super) struct Var {
    pub(super) tape: Tape,
    value: Made,
    pub(super) node: Option<usize>,
}

#[derive(Clone)]
pub(super) enum Made {
    Known(Array),
    /// To be made when somebody asks for it.
    Later(Rc<Later>),
}

type Make = Box<dyn FnOnce() -> Array>;

pub(super) struct Later {
    size: (u64, u64),
    dtype: Dtype,
    made: OnceCell<Array>,
    make: Cell<Option<Make>>,
}

impl Later {
    pub(super) fn new((size, dtype): ((u64, u64), Dtype), make: impl FnOnce() -> Array + 'static) -> Later {
        Later { size, dtype, made: OnceCell::new(), make: Cell::new(Some(Box::new(make))) }
    }
}

impl Var {
    pub(super) fn new(tape: &Tape, value: Made, node: Option<usize>) -> Var {
        Var { tape: tape.clone(), value, node }
    }

    pub(super) fn value(&self) -> &Array {
        match &self.value {
            Made::Known(value) => value,
            Made::Later(later) => later.made.get_or_init(|| later.make.take().expect("a value is made once")()),
        }
    }

    pub(super) fn into_value(self) -> Array {
        match self.value {
            Made::Known(value) => value,
            Made::Later(_) => self.value().clone(),
        }
    }

    pub(super) fn size(&self) -> (u64, u64) {
        match &self.value {
            Made::Known(value) => value.size(),
            Made::Later(later) => later.size,
        }
    }

    pub(super) fn dtype(&self) -> Dtype {
        match &self.value {
            Made::Known(value) => value.dtype,
            Made::Later(later) => later.dtype,
        }
    }
}
