//! The tape: ops record how to go back; backward runs the record in reverse.
//!
//! An op computes its value at once and pushes one closure. The closure owns what backward needs and is consumed by
//! it, so every activation is given back the moment its gradient is done. Gradients of intermediate values live
//! between their last contribution and their own closure; gradients of parameters are added straight into the
//! parameter's buffer.

mod recompute;
mod var;

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

pub use recompute::{Kept, Part, Recompute};
pub use var::{Input, Var};

use crate::books::Phase;
use crate::device::Device;
use crate::gradients::{Gradients, Slot};
use crate::parameter::{Gradient, Parameter};
use crate::tensor::Tensor;
use crate::value::Value;
use recompute::{Again, SegmentRun};
use var::Made;

/// Why an op could not go back: a collective that failed, for ops that have one.
pub type BackwardError = Box<dyn std::error::Error + Send + Sync>;

/// What is to be done where backward passes, whatever gradients there are.
type Passage = Box<dyn FnOnce() -> Result<(), BackwardError>>;

type Backward = Box<dyn FnOnce(Tensor, &mut Gradients) -> Result<(), BackwardError>>;

/// Who is told of complete gradients.
type Complete<'a> = dyn FnMut(&Gradient) -> Result<(), BackwardError> + 'a;

/// A record of ops. Clones share it.
#[derive(Clone)]
pub struct Tape {
    inner: Rc<Inner>,
}

struct Inner {
    settings: TapeSettings,
    records: bool,
    recompute: Recompute,
    run: SegmentRun,
    nodes: RefCell<Vec<Node>>,
    scope: RefCell<Rc<str>>,
    ops: Cell<u64>,
}

/// What the tapes of a forward and of its segments have in common.
#[derive(Clone)]
struct TapeSettings {
    device: Arc<Device>,
    checks: bool,
    non_finite: Rc<RefCell<Option<NonFinite>>>,
}

struct Node {
    op: &'static str,
    scope: Rc<str>,
    kind: NodeKind,
}

enum NodeKind {
    Leaf,
    Parameter(Gradient),
    Op(Backward),
    Passage(Passage),
    Segment(Again),
}

/// What there is to do where backward passes a node.
enum BackwardStep {
    Op(Backward),
    Passage(Passage),
    /// At the first use of a parameter: nothing before it can add to its gradient.
    Complete(Gradient),
    /// A segment, and the parameters that are first used in it.
    Segment(Again, HashSet<*const ()>),
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

impl Tape {
    /// A tape that records.
    pub fn new(device: &Arc<Device>) -> Tape {
        Tape::with(TapeSettings::new(device, false), true, SegmentRun::Only)
    }

    /// A tape that records nothing: values only.
    pub fn inference(device: &Arc<Device>) -> Tape {
        Tape::with(TapeSettings::new(device, false), false, SegmentRun::Only)
    }

    /// A tape that also looks at every value and gradient for the first NaN or infinity. Slower; for finding where
    /// a step went wrong by running it again.
    pub fn checking(device: &Arc<Device>) -> Tape {
        Tape::with(TapeSettings::new(device, true), true, SegmentRun::Only)
    }

    fn with(settings: TapeSettings, records: bool, run: SegmentRun) -> Tape {
        let inner = Inner {
            settings,
            records,
            recompute: Recompute::default(),
            run,
            nodes: RefCell::default(),
            scope: RefCell::new("".into()),
            ops: Cell::new(0),
        };
        Tape { inner: Rc::new(inner) }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.inner.settings.device
    }

    pub fn is_recording(&self) -> bool {
        self.inner.records
    }

    /// Names the part of the model that the following ops belong to.
    pub fn set_scope(&self, scope: impl Into<Rc<str>>) {
        let scope = scope.into();
        self.device().set_scope(&scope);
        *self.inner.scope.borrow_mut() = scope;
    }

    /// The first non-finite value a checking tape has seen.
    pub fn non_finite(&self) -> Option<NonFinite> {
        self.inner.settings.non_finite.borrow().clone()
    }

    /// Ops recorded so far.
    pub fn ops(&self) -> u64 {
        self.inner.ops.get()
    }

    /// A value without a gradient.
    pub fn constant(&self, value: Tensor) -> Var {
        Var::new(self, Made::Known(value), None)
    }

    /// A value whose gradient [`Gradients::of`] returns after backward.
    pub fn leaf(&self, value: Tensor) -> Var {
        self.enter("leaf", value, None, NodeKind::Leaf)
    }

    /// A parameter, whose gradient is added into its own buffer; a frozen one has none.
    pub fn parameter(&self, parameter: &Parameter) -> Var {
        if parameter.is_frozen() {
            return self.frozen(parameter.stored().clone());
        }
        if let SegmentRun::First(segment) = &self.inner.run {
            segment.uses(parameter.gradient());
        }
        let (stored, gradient) = (parameter.stored().clone(), parameter.gradient().clone());
        self.enter("parameter", parameter.value(), Some(stored), NodeKind::Parameter(gradient))
    }

    /// The value of a frozen parameter.
    fn frozen(&self, value: Value) -> Var {
        Var::new(self, Made::Known(value.whole()), None).stored_as(Some(value))
    }

    fn enter(&self, name: &'static str, value: Tensor, stored: Option<Value>, kind: NodeKind) -> Var {
        let node = self.inner.records.then(|| self.push(name, kind));
        Var::new(self, Made::Known(value), node).stored_as(stored)
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
        backward: impl FnOnce(Tensor, &mut Gradients) -> Result<(), BackwardError> + 'static,
    ) -> Var {
        self.consuming_op(op, value, &self.places(inputs), backward)
    }

    /// The same for an op that has used its inputs' memory up: only their places on the tape are left.
    pub fn consuming_op(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[Input],
        backward: impl FnOnce(Tensor, &mut Gradients) -> Result<(), BackwardError> + 'static,
    ) -> Var {
        let backward = move |gradient: Tensor, gradients: &mut Gradients| backward(gradient.into_f32(), gradients);
        self.consuming_stored_op(op, value, inputs, backward)
    }

    /// The same for an op that takes the value's gradient in f32 or as it came, which may be in less.
    pub fn consuming_stored_op(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[Input],
        backward: impl FnOnce(Tensor, &mut Gradients) -> Result<(), BackwardError> + 'static,
    ) -> Var {
        self.record(op, Made::Known(value), inputs, Box::new(backward))
    }

    fn record(&self, op: &'static str, value: Made, inputs: &[Input], backward: Backward) -> Var {
        self.inner.ops.set(self.inner.ops.get() + 1);
        if let (true, Made::Known(value)) = (self.inner.settings.checks, &value) {
            self.check(op, &self.inner.scope.borrow(), value, false);
        }
        let needed = inputs.iter().any(|input| input.0.is_some());
        let node = needed.then(|| self.push(op, NodeKind::Op(backward)));
        Var::new(self, value, node)
    }

    /// Has `passage` called when backward comes back to here, whether or not a gradient does.
    pub fn on_the_way_back(&self, passage: impl FnOnce() -> Result<(), BackwardError> + 'static) {
        if self.inner.records {
            self.push("passage", NodeKind::Passage(Box::new(passage)));
        }
    }

    /// Where on this tape the inputs of an op are.
    #[track_caller]
    fn places(&self, inputs: &[&Var]) -> Vec<Input> {
        let here = |input: &Var| input.node.is_none() || Rc::ptr_eq(&input.tape().inner, &self.inner);
        assert!(inputs.iter().all(|input| here(input)), "an input is on another tape");
        inputs.iter().map(|input| input.input()).collect()
    }

    fn scope(&self) -> Rc<str> {
        self.inner.scope.borrow().clone()
    }

    fn push(&self, op: &'static str, kind: NodeKind) -> usize {
        let mut nodes = self.inner.nodes.borrow_mut();
        nodes.push(Node { op, scope: self.scope(), kind });
        nodes.len() - 1
    }

    /// Goes back from `loss`, a scalar, whose own gradient is 1.
    ///
    /// # Errors
    /// The first failure of an op on the way; parameters' gradients are then incomplete.
    #[track_caller]
    pub fn try_backward(&self, loss: &Var) -> Result<Gradients, BackwardError> {
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
        complete: &mut dyn FnMut(&Gradient) -> Result<(), BackwardError>,
    ) -> Result<Gradients, BackwardError> {
        assert_eq!(loss.value().len(), 1, "backward starts at a scalar, not at shape {:?}", loss.shape());
        let one = Tensor::from_slice(self.device(), loss.shape(), &[1.0]);
        self.go_back(vec![(loss.input(), one)], complete)
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
    pub fn try_backward_from(&self, output: &Var, gradient: Tensor) -> Result<Gradients, BackwardError> {
        self.go_back(vec![(output.input(), gradient)], &mut |_| Ok(()))
    }

    /// Goes back from several values at once.
    fn go_back(&self, starts: Vec<(Input, Tensor)>, complete: &mut Complete) -> Result<Gradients, BackwardError> {
        let before = self.device().set_phase(Phase::Backward);
        let gone = self.through(starts, complete);
        self.device().set_phase(before);
        gone
    }

    fn through(&self, starts: Vec<(Input, Tensor)>, complete: &mut Complete) -> Result<Gradients, BackwardError> {
        let nodes = self.inner.nodes.take();
        let mut gradients = Gradients::with_capacity(nodes.len());
        let (mut steps, mut used) = (Vec::with_capacity(nodes.len()), HashSet::new());
        for node in nodes {
            let (slot, step) = match node.kind {
                NodeKind::Op(backward) => (Slot::Intermediate(None), BackwardStep::Op(backward)),
                NodeKind::Passage(passage) => (Slot::Intermediate(None), BackwardStep::Passage(passage)),
                NodeKind::Leaf => (Slot::Intermediate(None), BackwardStep::Pass),
                NodeKind::Parameter(gradient) => {
                    let first_use = used.insert(gradient.address());
                    let step = if first_use { BackwardStep::Complete(gradient.clone()) } else { BackwardStep::Pass };
                    (Slot::Parameter(gradient), step)
                }
                NodeKind::Segment(again) => {
                    let first_used =
                        again.parameters.iter().map(Gradient::address).filter(|&p| used.insert(p)).collect();
                    (Slot::Intermediate(None), BackwardStep::Segment(again, first_used))
                }
            };
            gradients.push(slot);
            steps.push((node.op, node.scope, step));
        }
        if !steps.is_empty() {
            starts.into_iter().for_each(|(output, gradient)| gradients.add(output, gradient));
        }
        while let Some((name, scope, step)) = steps.pop() {
            self.device().set_scope(&scope);
            let slot = gradients.slot(steps.len());
            if self.inner.settings.checks {
                slot.look(|gradient| self.check(name, &scope, gradient, true));
            }
            match step {
                BackwardStep::Op(backward) => {
                    if let Some(gradient) = slot.take() {
                        backward(gradient, &mut gradients)?;
                    }
                }
                BackwardStep::Passage(passage) => passage()?,
                BackwardStep::Complete(gradient) => complete(&gradient)?,
                BackwardStep::Segment(again, first_used) => {
                    let arrived = slot.take().is_some();
                    again.step(arrived, &first_used, &mut gradients, complete)?;
                }
                BackwardStep::Pass => {}
            }
        }
        Ok(gradients)
    }

    fn check(&self, op: &'static str, scope: &str, value: &Tensor, in_backward: bool) {
        let mut found = self.inner.settings.non_finite.borrow_mut();
        if found.is_none() && value.to_vec().iter().any(|x| !x.is_finite()) {
            *found = Some(NonFinite { scope: scope.to_owned(), op, in_backward });
        }
    }
}

impl TapeSettings {
    fn new(device: &Arc<Device>, checks: bool) -> TapeSettings {
        TapeSettings { device: device.clone(), checks, non_finite: Rc::default() }
    }
}
