//! The tape: ops record how to go back; backward runs the record in reverse.
//!
//! An op computes its value at once and pushes one closure. The closure owns what backward needs and is consumed by
//! it, so every activation is given back the moment its gradient is done. Gradients of intermediate values live
//! between their last contribution and their own closure; gradients of parameters are added straight into the
//! parameter's buffer.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::Dtype;
use crate::gradients::{Gradients, Slot};
use crate::parameter::{Gradient, Parameter};
use crate::tensor::Tensor;
use crate::value::{Kept, Value};

/// Why an op could not go back: a collective that failed, for ops that have one.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What is to be done where backward passes, whatever gradients there are.
type Passage = Box<dyn FnOnce() -> Result<(), Failure>>;

type Backward = Box<dyn FnOnce(Tensor, &mut Gradients) -> Result<(), Failure>>;

/// A record of ops. Clones share it.
#[derive(Clone)]
pub struct Tape {
    inner: Rc<Inner>,
}

struct Inner {
    device: Arc<Device>,
    records: bool,
    checks: bool,
    nodes: RefCell<Vec<Node>>,
    scope: RefCell<Rc<str>>,
    non_finite: RefCell<Option<NonFinite>>,
    ops: Cell<u64>,
}

struct Node {
    op: &'static str,
    scope: Rc<str>,
    kind: Kind,
}

enum Kind {
    Leaf,
    Parameter(Gradient),
    Op(Backward),
    Passage(Passage),
}

/// What there is to do where backward passes a node.
enum Step {
    Op(Backward),
    Passage(Passage),
    /// At the first use of a parameter: nothing before it can add to its gradient.
    Complete(Gradient),
    Pass,
}

/// Where a NaN or an infinity first appeared on a checking tape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The scope the model had set, such as `layer 3`.
    pub scope: String,
    pub op: &'static str,
    /// Whether it is the op's gradient rather than its value.
    pub in_backward: bool,
}

/// A value on a tape. Clones are cheap.
#[derive(Clone)]
pub struct Var {
    tape: Tape,
    value: Tensor,
    parameter: Option<Value>,
    pub(crate) node: Option<usize>,
}

/// What a backward closure keeps of an input: its place on the tape, if it has one.
#[derive(Clone, Copy, Debug)]
pub struct Input(pub(crate) Option<usize>);

impl Tape {
    /// A tape that records.
    pub fn new(device: &Arc<Device>) -> Tape {
        Tape::with(device, true, false)
    }

    /// A tape that records nothing: values only.
    pub fn inference(device: &Arc<Device>) -> Tape {
        Tape::with(device, false, false)
    }

    /// A tape that also looks at every value and gradient for the first NaN or infinity. Slower; for finding where
    /// a step went wrong by running it again.
    pub fn checking(device: &Arc<Device>) -> Tape {
        Tape::with(device, true, true)
    }

    fn with(device: &Arc<Device>, records: bool, checks: bool) -> Tape {
        let inner = Inner {
            device: device.clone(),
            records,
            checks,
            nodes: RefCell::default(),
            scope: RefCell::new("".into()),
            non_finite: RefCell::default(),
            ops: Cell::new(0),
        };
        Tape { inner: Rc::new(inner) }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.inner.device
    }

    pub fn is_recording(&self) -> bool {
        self.inner.records
    }

    /// Names the part of the model that the following ops belong to.
    pub fn set_scope(&self, scope: impl Into<Rc<str>>) {
        *self.inner.scope.borrow_mut() = scope.into();
    }

    /// The first non-finite value a checking tape has seen.
    pub fn non_finite(&self) -> Option<NonFinite> {
        self.inner.non_finite.borrow().clone()
    }

    /// Ops recorded so far.
    pub fn ops(&self) -> u64 {
        self.inner.ops.get()
    }

    /// A value without a gradient.
    pub fn constant(&self, value: Tensor) -> Var {
        Var { tape: self.clone(), value, parameter: None, node: None }
    }

    /// A value whose gradient [`Gradients::of`] returns after backward.
    pub fn leaf(&self, value: Tensor) -> Var {
        let node = self.inner.records.then(|| self.push("leaf", Kind::Leaf));
        Var { tape: self.clone(), value, parameter: None, node }
    }

    /// A parameter, whose gradient is added into its own buffer.
    pub fn parameter(&self, parameter: &Parameter) -> Var {
        let kind = || Kind::Parameter(parameter.gradient().clone());
        let node = self.inner.records.then(|| self.push("parameter", kind()));
        Var { tape: self.clone(), value: parameter.value(), parameter: Some(parameter.stored().clone()), node }
    }

    /// Records an op: its value, its inputs, and the closure that turns the value's gradient (f32) into
    /// contributions to the inputs'. Ops outside this crate are written with this too.
    pub fn op(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[&Var],
        backward: impl FnOnce(Tensor, &mut Gradients) + 'static,
    ) -> Var {
        self.fallible_op(op, value, inputs, move |gradient, gradients| {
            backward(gradient, gradients);
            Ok(())
        })
    }

    /// The same for an op whose way back may fail.
    pub fn fallible_op(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[&Var],
        backward: impl FnOnce(Tensor, &mut Gradients) -> Result<(), Failure> + 'static,
    ) -> Var {
        let inputs: Vec<Input> = inputs.iter().map(|input| input.input()).collect();
        self.consuming_op(op, value, &inputs, backward)
    }

    /// The same for an op that has used its inputs' memory up: only their places on the tape are left.
    pub fn consuming_op(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[Input],
        backward: impl FnOnce(Tensor, &mut Gradients) -> Result<(), Failure> + 'static,
    ) -> Var {
        self.inner.ops.set(self.inner.ops.get() + 1);
        if self.inner.checks {
            self.check(op, &self.inner.scope.borrow(), &value, false);
        }
        let needed = inputs.iter().any(|input| input.0.is_some());
        let node = needed.then(|| self.push(op, Kind::Op(Box::new(backward))));
        Var { tape: self.clone(), value, parameter: None, node }
    }

    /// Has `passage` called when backward comes back to here, whether or not a gradient does.
    pub fn on_the_way_back(&self, passage: impl FnOnce() -> Result<(), Failure> + 'static) {
        if self.inner.records {
            self.push("passage", Kind::Passage(Box::new(passage)));
        }
    }

    fn push(&self, op: &'static str, kind: Kind) -> usize {
        let mut nodes = self.inner.nodes.borrow_mut();
        nodes.push(Node { op, scope: self.inner.scope.borrow().clone(), kind });
        nodes.len() - 1
    }

    /// Goes back from `loss`, a scalar, whose own gradient is 1.
    ///
    /// # Errors
    /// The first failure of an op on the way; parameters' gradients are then incomplete.
    #[track_caller]
    pub fn try_backward(&self, loss: &Var) -> Result<Gradients, Failure> {
        self.try_backward_telling(loss, &mut |_| Ok(()))
    }

    /// [`Tape::try_backward`] that calls `complete` with every parameter's gradient as soon as this tape adds no more to
    /// it: when it has gone back past the parameter's first use, whether or not anything was added. So the order is that
    /// of first uses, last one first, on every rank with the same ops. Of parameters that are not on the tape it says
    /// nothing.
    ///
    /// # Errors
    /// The first failure of an op or of `complete`; parameters' gradients are then incomplete.
    #[track_caller]
    pub fn try_backward_telling(
        &self,
        loss: &Var,
        complete: &mut dyn FnMut(&Gradient) -> Result<(), Failure>,
    ) -> Result<Gradients, Failure> {
        assert_eq!(loss.value.len(), 1, "backward starts at a scalar, not at shape {:?}", loss.value.shape());
        self.go_back(loss, Tensor::from_slice(self.device(), loss.shape(), &[1.0]), complete)
    }

    /// [`Tape::try_backward`] where no op can fail.
    #[track_caller]
    pub fn backward(&self, loss: &Var) -> Gradients {
        self.try_backward(loss).expect("local ops do not fail")
    }

    /// [`Tape::try_backward_from`] where no op can fail.
    #[track_caller]
    pub fn backward_from(&self, output: &Var, gradient: Tensor) -> Gradients {
        self.try_backward_from(output, gradient).expect("local ops do not fail")
    }

    /// Goes back from `output` with a gradient given from outside. The tape is consumed: a second call finds nothing.
    ///
    /// # Errors
    /// As [`Tape::try_backward`].
    pub fn try_backward_from(&self, output: &Var, gradient: Tensor) -> Result<Gradients, Failure> {
        self.go_back(output, gradient, &mut |_| Ok(()))
    }

    fn go_back(
        &self,
        output: &Var,
        gradient: Tensor,
        complete: &mut dyn FnMut(&Gradient) -> Result<(), Failure>,
    ) -> Result<Gradients, Failure> {
        let nodes = self.inner.nodes.take();
        let mut gradients = Gradients::with_capacity(nodes.len());
        let (mut steps, mut used) = (Vec::with_capacity(nodes.len()), HashSet::new());
        for node in nodes {
            let (slot, step) = match node.kind {
                Kind::Op(backward) => (Slot::Intermediate(None), Step::Op(backward)),
                Kind::Passage(passage) => (Slot::Intermediate(None), Step::Passage(passage)),
                Kind::Leaf => (Slot::Intermediate(None), Step::Pass),
                Kind::Parameter(gradient) => {
                    let first_use = used.insert(gradient.address());
                    let step = if first_use { Step::Complete(gradient.clone()) } else { Step::Pass };
                    (Slot::Parameter(gradient), step)
                }
            };
            gradients.push(slot);
            steps.push((node.op, node.scope, step));
        }
        if !steps.is_empty() {
            gradients.add(output.input(), gradient);
        }
        while let Some((name, scope, step)) = steps.pop() {
            let slot = gradients.slot(steps.len());
            if self.inner.checks {
                slot.look(|gradient| self.check(name, &scope, gradient, true));
            }
            match step {
                Step::Op(backward) => {
                    if let Some(gradient) = slot.take() {
                        backward(gradient, &mut gradients)?;
                    }
                }
                Step::Passage(passage) => passage()?,
                Step::Complete(gradient) => complete(&gradient)?,
                Step::Pass => {}
            }
        }
        Ok(gradients)
    }

    fn check(&self, op: &'static str, scope: &str, value: &Tensor, in_backward: bool) {
        let mut found = self.inner.non_finite.borrow_mut();
        if found.is_none() && value.to_f32().f32s().iter().any(|x| !x.is_finite()) {
            *found = Some(NonFinite { scope: scope.to_owned(), op, in_backward });
        }
    }
}

impl Var {
    pub fn tape(&self) -> &Tape {
        &self.tape
    }

    pub fn device(&self) -> &Arc<Device> {
        self.tape.device()
    }

    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// What a backward closure keeps of the value.
    pub(crate) fn kept(&self) -> Kept {
        self.parameter.as_ref().map_or_else(|| Kept::Tensor(self.value.clone()), |value| Kept::Parameter(value.clone()))
    }

    /// The value, without its place on the tape.
    pub fn into_value(self) -> Tensor {
        self.value
    }

    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    pub fn dtype(&self) -> Dtype {
        self.value.dtype()
    }

    /// The handle that a backward closure keeps.
    pub fn input(&self) -> Input {
        Input(self.node)
    }
}
