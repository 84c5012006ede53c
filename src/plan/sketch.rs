//! A tape of sizes: the ops of `guildhall_tensor` with the memory they take and keep, and no numbers.
//!
//! An [`Array`] is a tensor without elements: clones share its bytes, and the last one gives them back. What an op's
//! closure owns, a gradient between its last contribution and its own op, a buffer that is still shared: all of it lives
//! here exactly as long as there, because the walk over the model is written as the model is.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;

use guildhall_tensor::{Cause, Dtype};

use super::books::{Books, Part, Phase};

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
        let bytes = rows * cols * dtype.bytes() as u64;
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
        Rc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn len(&self) -> u64 {
        self.0.size.0 * self.0.size.1
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

type Backward = Box<dyn FnOnce(Array, &mut Gradients)>;

enum Node {
    Leaf,
    Parameter(Gradient),
    Op(Backward, Part),
    Mark(Box<dyn FnOnce()>),
}

/// What there is to do where backward passes a node.
enum Step {
    Op(Backward, Part),
    Complete(Gradient),
    Mark(Box<dyn FnOnce()>),
    Pass,
}

enum Slot {
    Intermediate(Option<Array>),
    Parameter(Gradient),
}

/// Gradients on their way back.
pub(super) struct Gradients {
    slots: Vec<Slot>,
    books: Rc<Books>,
}

impl Gradients {
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

/// What is told of every gradient that is complete.
pub(super) type Complete = Rc<dyn Fn(&Gradient)>;

/// How values of a collective are had in the two runs of a segment.
#[derive(Clone)]
enum Kept {
    /// There is one run.
    Not,
    First(Rc<RefCell<VecDeque<Array>>>),
    Second(Rc<RefCell<VecDeque<Array>>>),
}

/// A record of ops. Clones share it.
#[derive(Clone)]
pub(super) struct Tape {
    books: Rc<Books>,
    records: bool,
    nodes: Rc<RefCell<Vec<Node>>>,
    complete: Complete,
    kept: Kept,
}

/// A value on a tape.
#[derive(Clone)]
pub(super) struct Var {
    pub(super) tape: Tape,
    pub(super) value: Array,
    pub(super) node: Option<usize>,
}

impl Tape {
    pub(super) fn new(books: &Rc<Books>, complete: Complete) -> Tape {
        let nodes = Rc::default();
        Tape { books: books.clone(), records: true, nodes, complete, kept: Kept::Not }
    }

    fn run(&self, records: bool, kept: Kept) -> Tape {
        Tape { records, kept, nodes: Rc::default(), ..self.clone() }
    }

    pub(super) fn books(&self) -> &Rc<Books> {
        &self.books
    }

    pub(super) fn is_recording(&self) -> bool {
        self.records
    }

    pub(super) fn constant(&self, value: Array) -> Var {
        Var { tape: self.clone(), value, node: None }
    }

    pub(super) fn parameter(&self, value: &Array, gradient: &Gradient) -> Var {
        let node = self.records.then(|| self.push(Node::Parameter(gradient.clone())));
        Var { tape: self.clone(), value: value.clone(), node }
    }

    pub(super) fn op(
        &self,
        value: Array,
        inputs: &[&Var],
        backward: impl FnOnce(Array, &mut Gradients) + 'static,
    ) -> Var {
        let inputs: Vec<_> = inputs.iter().map(|input| input.node).collect();
        self.consuming_op(value, &inputs, backward)
    }

    pub(super) fn consuming_op(
        &self,
        value: Array,
        inputs: &[Option<usize>],
        backward: impl FnOnce(Array, &mut Gradients) + 'static,
    ) -> Var {
        let needed = inputs.iter().any(Option::is_some);
        let node = needed.then(|| self.push(Node::Op(Box::new(backward), self.books.part.get())));
        Var { tape: self.clone(), value, node }
    }

    /// Something to do where backward passes this place.
    pub(super) fn on_the_way_back(&self, f: impl FnOnce() + 'static) {
        if self.records {
            self.push(Node::Mark(Box::new(f)));
        }
    }

    fn push(&self, node: Node) -> usize {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(node);
        nodes.len() - 1
    }

    /// A segment that keeps its input alone, and is run again on the way back.
    ///
    /// What collectives give is kept besides, if `keeps`.
    pub(super) fn checkpoint(&self, x: &Var, keeps: bool, f: impl Fn(&Var) -> Var + 'static) -> Var {
        let kept = Rc::new(RefCell::new(VecDeque::new()));
        let (outer, input, to) = (self.clone(), x.value.clone(), x.node);
        let [first, second] = match keeps {
            true => [Kept::First(kept.clone()), Kept::Second(kept)],
            false => [Kept::Not, Kept::Not],
        };
        let y = f(&self.run(false, first).constant(input.clone()));
        self.op(y.value, &[x], move |gradient, gradients| {
            let inner = outer.run(true, second);
            let x = Var { node: Some(inner.push(Node::Leaf)), ..inner.constant(input) };
            let phase = inner.books.phase.replace(Phase::Again);
            let y = f(&x);
            inner.books.phase.set(phase);
            let (node, leaf) = (y.node, x.node);
            drop((x, y));
            let mut of_inner = inner.go_back(node, gradient);
            if let Some(Slot::Intermediate(Some(gradient))) = leaf.map(|leaf| &mut of_inner.slots[leaf]) {
                gradients.add(to, gradient.clone());
            }
        })
    }

    /// In a segment's second run, what a collective gave in the first.
    pub(super) fn recall(&self) -> Option<Array> {
        match &self.kept {
            Kept::Second(kept) => kept.borrow_mut().pop_front(),
            Kept::Not | Kept::First(_) => None,
        }
    }

    /// In a segment's first run, keeps what a collective gave.
    pub(super) fn store(&self, value: Array) -> Array {
        if let Kept::First(kept) = &self.kept {
            kept.borrow_mut().push_back(value.clone());
        }
        value
    }

    pub(super) fn backward(&self, loss: &Var) {
        let gradient = loss.value.f32(1, 1);
        drop(self.go_back(loss.node, gradient));
    }

    fn go_back(&self, from: Option<usize>, gradient: Array) -> Gradients {
        let (nodes, mut used) = (self.nodes.take(), HashSet::new());
        let (mut slots, mut steps) = (Vec::with_capacity(nodes.len()), Vec::with_capacity(nodes.len()));
        for node in nodes {
            let (slot, step) = match node {
                Node::Leaf => (Slot::Intermediate(None), Step::Pass),
                Node::Op(backward, part) => (Slot::Intermediate(None), Step::Op(backward, part)),
                Node::Mark(f) => (Slot::Intermediate(None), Step::Mark(f)),
                Node::Parameter(gradient) => {
                    let first = used.insert(Rc::as_ptr(&gradient.0));
                    let step = if first { Step::Complete(gradient.clone()) } else { Step::Pass };
                    (Slot::Parameter(gradient), step)
                }
            };
            slots.push(slot);
            steps.push(step);
        }
        let mut gradients = Gradients { slots, books: self.books.clone() };
        gradients.add(from, gradient);
        while let Some(step) = steps.pop() {
            match (step, &mut gradients.slots[steps.len()]) {
                (Step::Op(backward, part), Slot::Intermediate(slot)) => {
                    if let Some(gradient) = slot.take() {
                        self.books.part.set(part);
                        backward(gradient, &mut gradients);
                    }
                }
                (Step::Complete(gradient), _) => (self.complete)(&gradient),
                (Step::Mark(f), _) => f(),
                _ => {}
            }
        }
        gradients
    }
}
