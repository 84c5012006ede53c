//! Tensors and gradients of sizes, with the memory they take and no numbers.
//!
//! An [`Array`] is a tensor without elements: clones share its bytes, and the last one gives them back. What an op's
//! closure owns, a gradient between its last contribution and its own op, a buffer that is still shared: all of it lives
//! here exactly as long as there, because the walk over the model is written as the model is.

use std::cell::RefCell;
use std::rc::Rc;

use guildhall_tensor::{Cause, Dtype};

use super::books::Books;

/// A tensor's size and its share of memory.
#[derive(Clone, Debug)]
pub(super) struct Array {
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) dtype: Dtype,
    memory: Rc<Memory>,
}

#[derive(Debug)]
struct Memory {
    books: Rc<Books>,
    cause: Cause,
    bytes: u64,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.books.remove(self.cause, self.bytes);
    }
}

impl Array {
    pub(super) fn new(books: &Rc<Books>, cause: Cause, (rows, cols): (u64, u64), dtype: Dtype) -> Array {
        let bytes = rows.saturating_mul(cols).saturating_mul(dtype.bytes() as u64);
        books.add(cause, bytes);
        Array { rows, cols, dtype, memory: Rc::new(Memory { books: books.clone(), cause, bytes }) }
    }

    /// An array whose memory is someone else's account.
    pub(super) fn elsewhere(books: &Rc<Books>, (rows, cols): (u64, u64), dtype: Dtype) -> Array {
        let memory = Memory { books: books.clone(), cause: Cause::Parameters, bytes: 0 };
        Array { rows, cols, dtype, memory: Rc::new(memory) }
    }

    /// What an op has that holds on to a weight after its turn: memory of its own, where the weight's is let go of.
    pub(super) fn held(&self) -> Array {
        match self.memory.bytes {
            0 => Array::new(self.books(), Cause::Parameters, self.size(), self.dtype),
            _ => self.clone(),
        }
    }

    pub(super) fn books(&self) -> &Rc<Books> {
        &self.memory.books
    }

    /// An f32 array of other sizes beside this one.
    pub(super) fn f32(&self, rows: u64, cols: u64) -> Array {
        Array::new(self.books(), Cause::Activations, (rows, cols), Dtype::F32)
    }

    pub(super) fn f32_like(&self) -> Array {
        self.f32(self.rows, self.cols)
    }

    pub(super) fn size(&self) -> (u64, u64) {
        (self.rows, self.cols)
    }

    pub(super) fn len(&self) -> u64 {
        self.rows * self.cols
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    pub(super) fn cast(&self, dtype: Dtype) -> Array {
        match self.dtype == dtype {
            true => self.clone(),
            false => Array::new(self.books(), Cause::Activations, (self.rows, self.cols), dtype),
        }
    }

    pub(super) fn to_f32(&self) -> Array {
        self.cast(Dtype::F32)
    }

    pub(super) fn into_dtype(self, dtype: Dtype) -> Array {
        if self.dtype == dtype { self } else { self.cast(dtype) }
    }

    pub(super) fn into_f32(self) -> Array {
        self.into_dtype(Dtype::F32)
    }

    fn is_unique(&self) -> bool {
        Rc::strong_count(&self.memory) == 1
    }

    fn make_unique(&mut self) {
        if !self.is_unique() {
            *self = Array::new(self.books(), Cause::Activations, (self.rows, self.cols), self.dtype);
        }
    }

    /// Becomes a collective's buffer, held for `cause` until it is dropped; copied first if others hold it.
    pub(super) fn depart(mut self, cause: Cause) -> Array {
        self.make_unique();
        let (books, size, dtype) = (self.books().clone(), self.size(), self.dtype);
        drop(self);
        Array::new(&books, cause, size, dtype)
    }
}

/// The gradient buffer of one weight.
#[derive(Clone, Debug)]
pub(super) struct Gradient(Rc<Buffer>);

#[derive(Debug)]
struct Buffer {
    books: Rc<Books>,
    size: (u64, u64),
    dtype: Dtype,
    array: RefCell<Option<Array>>,
}

impl Gradient {
    pub(super) fn new(books: &Rc<Books>, size: (u64, u64), dtype: Dtype) -> Gradient {
        Gradient(Rc::new(Buffer { books: books.clone(), size, dtype, array: RefCell::default() }))
    }

    pub(super) fn is(&self, other: &Gradient) -> bool {
        self.address() == other.address()
    }

    /// Tells gradients apart.
    pub(super) fn address(&self) -> *const () {
        Rc::as_ptr(&self.0).cast()
    }

    pub(super) fn len(&self) -> u64 {
        self.0.size.0 * self.0.size.1
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.0.dtype
    }

    /// Memory for it, from the first contribution on.
    pub(super) fn contribute(&self) {
        let Buffer { books, size, dtype, array } = &*self.0;
        array.borrow_mut().get_or_insert_with(|| Array::new(books, Cause::Gradients, *size, *dtype));
    }

    /// Takes the memory out, or puts some in.
    pub(super) fn replace(&self, array: Option<Array>) -> Option<Array> {
        self.0.array.replace(array)
    }
}

pub(super) enum Slot {
    Intermediate(Option<Array>),
    Parameter(Gradient),
}

/// Gradients on their way back.
pub(super) struct Gradients {
    slots: Vec<Slot>,
    books: Rc<Books>,
}

impl Gradients {
    pub(super) fn new(books: &Rc<Books>, slots: Vec<Slot>) -> Gradients {
        Gradients { slots, books: books.clone() }
    }

    /// The gradient of an intermediate value, for its op to use up.
    pub(super) fn take(&mut self, node: usize) -> Option<Array> {
        match &mut self.slots[node] {
            Slot::Intermediate(gradient) => gradient.take(),
            Slot::Parameter(_) => None,
        }
    }

    /// Adds `gradient` to the input's.
    pub(super) fn add(&mut self, to: Option<usize>, gradient: Array) {
        let Some(index) = to else { return };
        let gradient = gradient.into_f32();
        match &mut self.slots[index] {
            Slot::Intermediate(slot @ None) => *slot = Some(gradient),
            Slot::Intermediate(Some(sum)) if sum.is_unique() || !gradient.is_unique() => sum.make_unique(),
            Slot::Intermediate(Some(sum)) => *sum = gradient,
            Slot::Parameter(gradient) => gradient.contribute(),
        }
    }

    /// Has the input's gradient of a size written in place, while `f` keeps what it needs for that.
    pub(super) fn write<T>(&mut self, to: Option<usize>, size: (u64, u64), f: impl FnOnce() -> T) {
        let Some(index) = to else { return };
        match &mut self.slots[index] {
            Slot::Intermediate(slot) => {
                let new = || Array::new(&self.books, Cause::Activations, size, Dtype::F32);
                slot.get_or_insert_with(new).make_unique();
            }
            Slot::Parameter(gradient) => gradient.contribute(),
        }
        f();
    }

    pub(super) fn wants(&self, to: Option<usize>) -> bool {
        to.is_some()
    }
}
