//! The value of a parameter, which need not be in memory as a whole all the time.

use std::cell::{RefCell, RefMut};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use crate::account::Cause;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// The value of one parameter: the whole of it, or a part that is kept while the rest comes and goes. Clones are handles
/// on the same one, which the parameter, tapes and whoever gathers values share.
#[derive(Clone, Debug)]
pub struct Value(Rc<RefCell<StoredValue>>);

#[derive(Debug)]
struct StoredValue {
    device: Arc<Device>,
    shape: Vec<usize>,
    dtype: Dtype,
    whole: Option<Tensor>,
    part: Option<HeldPart>,
}

/// Consecutive elements, row-major.
#[derive(Debug)]
struct HeldPart {
    first: usize,
    tensor: Tensor,
}

/// What a backward closure keeps of an input's value: that of a parameter is looked up when it is needed, since it may
/// be elsewhere in the meantime.
#[derive(Clone, Debug)]
pub(crate) enum KeptValue {
    Tensor(Tensor),
    Parameter(Value),
}

impl KeptValue {
    #[track_caller]
    pub(crate) fn tensor(&self) -> Tensor {
        match self {
            KeptValue::Tensor(tensor) => tensor.clone(),
            KeptValue::Parameter(value) => value.whole(),
        }
    }
}

impl StoredValue {
    #[track_caller]
    fn whole(&mut self) -> &mut Tensor {
        self.whole.as_mut().expect("the value of a parameter of which only a part is here")
    }
}

impl Value {
    pub(crate) fn new(whole: Tensor) -> Value {
        let (device, shape, dtype) = (whole.device().clone(), whole.shape().to_vec(), whole.dtype());
        Value(Rc::new(RefCell::new(StoredValue { device, shape, dtype, whole: Some(whole), part: None })))
    }

    pub fn device(&self) -> Arc<Device> {
        self.0.borrow().device.clone()
    }

    pub fn shape(&self) -> Vec<usize> {
        self.0.borrow().shape.clone()
    }

    pub fn dtype(&self) -> Dtype {
        self.0.borrow().dtype
    }

    /// Number of elements of the whole.
    pub fn len(&self) -> usize {
        self.0.borrow().shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The whole value. Panics where it is not here.
    #[track_caller]
    pub fn whole(&self) -> Tensor {
        self.0.borrow().whole.clone().expect("the value of a parameter of which only a part is here")
    }

    #[track_caller]
    pub(crate) fn whole_mut(&self) -> RefMut<'_, Tensor> {
        RefMut::map(self.0.borrow_mut(), StoredValue::whole)
    }

    /// Takes the whole value out, to be put back: for collectives that own their buffers.
    #[track_caller]
    pub fn take(&self) -> Tensor {
        self.0.borrow_mut().whole.take().expect("the value of a parameter of which only a part is here")
    }

    /// Makes `tensor` the whole value.
    #[track_caller]
    pub fn put(&self, tensor: Tensor) {
        let mut stored = self.0.borrow_mut();
        assert_eq!((tensor.shape(), tensor.dtype()), (&stored.shape[..], stored.dtype), "a value keeps its kind");
        stored.whole = Some(tensor);
    }

    /// Keeps the elements `range`, and lets go of the others until they are put back.
    #[track_caller]
    pub fn keep_part(&self, range: Range<usize>) {
        let mut stored = self.0.borrow_mut();
        let whole = stored.whole.take().expect("the value of a parameter of which only a part is here");
        let device = stored.device.clone();
        let _charge = device.charge(Cause::Parameters);
        let mut tensor = Tensor::stale(&device, &[range.len()], stored.dtype);
        tensor.copy_part(0, &whole, range.clone());
        stored.part = Some(HeldPart { first: range.start, tensor });
    }

    /// Whether only a part is kept, the whole being here for a while or not at all.
    pub fn is_parted(&self) -> bool {
        self.0.borrow().part.is_some()
    }

    /// Lets go of all but the part that is kept.
    #[track_caller]
    pub fn release(&self) {
        let mut stored = self.0.borrow_mut();
        assert!(stored.part.is_some(), "no part of this value is kept apart");
        stored.whole = None;
    }

    /// Calls `f` with memory that holds elements that are kept, and the first of them.
    pub fn with_kept<R>(&self, f: impl FnOnce(&mut Tensor, usize) -> R) -> R {
        let mut stored = self.0.borrow_mut();
        match &mut *stored {
            StoredValue { part: Some(HeldPart { first, tensor }), .. } => f(tensor, *first),
            StoredValue { whole, .. } => f(whole.as_mut().expect("a value without a part is whole"), 0),
        }
    }
}
