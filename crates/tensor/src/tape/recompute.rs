//! Segments of a forward that run twice: without a record when the value is wanted, and again, on a record of their
//! own, when backward arrives (Chen et al. 2016). In between, only a segment's inputs are alive, and what
//! [`Tape::keep`] stored.
//!
//! ```text
//!  forward    x ── segment, no record ── y       keep: stores
//!                                        :
//!  backward   x ── segment, on a record ─┘       keep: takes
//!             dx ◀─ that record, in reverse ─ dy
//! ```
//!
//! The store belongs to one segment of one forward, so layers, micro-batches and calls cannot be mistaken for each
//! other. What is kept is found again by its order: both runs do the same.
//!
//! In the second run a value may be computed late ([`Tape::late_op`]), hence never: the last product before a result
//! that is kept, or before the segment's end.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;

use super::var::{Later, Made};
use super::{BackwardError, Complete, Inner, Input, NodeKind, Tape, TapeSettings, Var};
use crate::books::Phase;
use crate::dtype::Dtype;
use crate::gradients::Gradients;
use crate::parameter::Gradient;
use crate::tensor::Tensor;
use crate::value::Value;

/// Which segments run twice, and what their second run takes from the first. By default none does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    pub parts: Vec<Part>,
    /// What second runs take from first ones. A gate that may choose otherwise when it is asked again makes a second run
    /// without [`Kept::Decision`] wrong.
    pub keeps: Vec<Kept>,
}

/// Parts of a network that may be segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All between two sums that go from layer to layer.
    Block,
    /// Scores, their sum over values, and the product that follows.
    Attention,
    /// What is between two products, and the second of them.
    Activation,
    /// Experts, from their rows to their results.
    Experts,
}

/// Something that a segment's second run might take from its first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Never made twice: a decision, or a fact it rests on.
    Decision,
    /// Activations that came from other ranks.
    Communication,
    /// Whatever was made here: never kept.
    Own,
}

impl Recompute {
    /// Parts that decide nothing twice, and get what came from other ranks from their first run or again.
    pub fn of(parts: Vec<Part>, keep_communication: bool) -> Recompute {
        let communication = keep_communication.then_some(Kept::Communication);
        Recompute { parts, keeps: [Kept::Decision].into_iter().chain(communication).collect() }
    }

    fn keeps(&self, what: Kept) -> bool {
        self.keeps.contains(&what)
    }
}

/// Which run of which segment a tape is for.
pub(super) enum SegmentRun {
    /// None: what runs here runs once.
    Only,
    First(Rc<Segment>),
    Second(Rc<Segment>),
}

/// What the two runs of a segment share.
pub(super) struct Segment {
    recompute: Recompute,
    kept: RefCell<VecDeque<Box<dyn Any>>>,
    /// In the order of first use.
    parameters: RefCell<Vec<Gradient>>,
}

impl Segment {
    pub(super) fn uses(&self, gradient: &Gradient) {
        self.parameters.borrow_mut().push(gradient.clone());
    }
}

/// What is on the tape in the place of a segment.
pub(super) struct Again {
    pub(super) parameters: Vec<Gradient>,
    pub(super) go_back: GoBack,
}

type GoBack = Box<dyn FnOnce(&mut Gradients, &mut Complete) -> Result<(), BackwardError>>;

/// How an input enters the second run.
enum Entrance {
    Constant(Tensor),
    Leaf(Tensor, Input),
    /// The value is looked up when it is needed: it may be elsewhere in the meantime.
    Parameter(Value, Gradient),
    /// The same without a gradient.
    Frozen(Value),
}

impl Tape {
    /// The same tape, still empty, with segments that run twice.
    ///
    /// # Panics
    /// If the tape is shared already.
    pub fn recomputing(mut self, recompute: &Recompute) -> Tape {
        Rc::get_mut(&mut self.inner).expect("a tape nobody uses yet").recompute = recompute.clone();
        self
    }

    /// The outputs of `segment(inputs)`. If `part` is one that runs twice, this tape holds the inputs alone: `segment` runs
    /// once now, and once more when backward arrives. It gets its inputs on another tape, and uses nothing else that is
    /// on one; what it says besides its outputs is what the first run said. Within another segment, and where nothing is
    /// recorded, it runs like anything else. Where there is nothing to learn, neither in it nor before it, it runs once.
    ///
    /// # Errors
    /// Those of the first run here; those of the second come from backward.
    pub fn checkpoint<T, E: Into<BackwardError>>(
        &self,
        part: Part,
        inputs: &[&Var],
        segment: impl Fn(&[Var]) -> Result<(Vec<Var>, T), E> + 'static,
    ) -> Result<(Vec<Var>, T), E> {
        let Inner { records, recompute, run, .. } = &*self.inner;
        if !records || !recompute.parts.contains(&part) || !matches!(run, SegmentRun::Only) {
            return segment(&inputs.iter().map(|&input| input.clone()).collect::<Vec<_>>());
        }
        let recompute = recompute.clone();
        let shared = Rc::new(Segment { recompute, kept: RefCell::default(), parameters: RefCell::default() });
        let first = Tape::with(self.inner.settings.clone(), false, SegmentRun::First(shared.clone()));
        first.set_scope(self.scope());
        let values: Vec<Var> = inputs.iter().map(|input| first.constant(input.value().clone())).collect();
        let (outputs, told) = segment(&values)?;
        if inputs.iter().all(|input| input.node.is_none()) && shared.parameters.borrow().is_empty() {
            return Ok((outputs.into_iter().map(|output| self.constant(output.into_value())).collect(), told));
        }

        let arrived = Rc::new(RefCell::new(vec![None; outputs.len()]));
        let entered = inputs.iter().map(|input| self.entrance(input)).collect();
        let run = move |inputs: &[Var]| Ok(segment(inputs).map_err(Into::into)?.0);
        let again = Again::new((self.inner.settings.clone(), self.scope()), shared, entered, run, arrived.clone());
        let mark = Input(Some(self.push("segment", NodeKind::Segment(again))));
        let output = |(i, output): (usize, Var)| {
            let arrived = arrived.clone();
            self.consuming_op("segment", output.into_value(), &[mark], move |gradient, gradients| {
                // The segment goes back once, whichever of its outputs were of use.
                gradients.add(mark, Tensor::zeros(gradient.device(), &[0]));
                arrived.borrow_mut()[i] = Some(gradient);
                Ok(())
            })
        };
        Ok((outputs.into_iter().enumerate().map(output).collect(), told))
    }

    /// [`Tape::checkpoint`] of `segment(x, weights)`, which gives one value and cannot fail.
    pub fn segment(
        &self,
        part: Part,
        x: &Var,
        weights: &[Var],
        segment: impl Fn(&Var, &[Var]) -> Var + 'static,
    ) -> Var {
        let inputs: Vec<&Var> = [x].into_iter().chain(weights).collect();
        let run = move |inputs: &[Var]| Ok::<_, BackwardError>((vec![segment(&inputs[0], &inputs[1..])], ()));
        let (mut outputs, ()) = self.checkpoint(part, &inputs, run).expect("a segment of local ops");
        outputs.remove(0)
    }

    /// What a segment's second run takes from its first: `compute`'s result is stored in the first run, and in the second
    /// `compute` is not called. Outside of segments, and for what this segment does not keep, it is called every time.
    ///
    /// # Errors
    /// Those of `compute`.
    pub fn keep<T: Clone + 'static, E>(&self, what: Kept, compute: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        match &self.inner.run {
            SegmentRun::First(segment) if segment.recompute.keeps(what) => {
                let value = compute()?;
                segment.kept.borrow_mut().push_back(Box::new(value.clone()));
                Ok(value)
            }
            SegmentRun::Second(segment) if segment.recompute.keeps(what) => {
                let kept = segment.kept.borrow_mut().pop_front();
                let value = kept.and_then(|value| value.downcast::<T>().ok());
                Ok(*value.expect("both runs of a segment keep the same"))
            }
            _ => compute(),
        }
    }

    /// Whether [`Tape::keep`] has such results already: a collective need not even start.
    pub fn has_kept(&self, what: Kept) -> bool {
        matches!(&self.inner.run, SegmentRun::Second(segment) if segment.recompute.keeps(what))
    }

    /// An op like [`Tape::op`] whose backward needs its inputs but not its value: in a segment's second run the value is
    /// made when somebody asks for it. `make` gives it in `dtype`; from inputs that may themselves come late it takes
    /// values inside.
    pub fn late_op(
        &self,
        op: &'static str,
        (shape, dtype): (&[usize], Dtype),
        inputs: &[&Var],
        make: impl FnOnce() -> Tensor + 'static,
        backward: impl FnOnce(Tensor, &mut Gradients) + 'static,
    ) -> Var {
        self.late_stored_op(op, (shape, dtype), inputs, make, move |gradient, gradients| {
            backward(gradient.into_f32(), gradients);
        })
    }

    /// The same for an op that takes the value's gradient in f32 or as it came, which may be in less.
    pub fn late_stored_op(
        &self,
        op: &'static str,
        (shape, dtype): (&[usize], Dtype),
        inputs: &[&Var],
        make: impl FnOnce() -> Tensor + 'static,
        backward: impl FnOnce(Tensor, &mut Gradients) + 'static,
    ) -> Var {
        let value = match self.is_late() {
            true => Made::Later(Rc::new(Later::new(shape, dtype, make))),
            false => Made::Known(make()),
        };
        let backward = move |gradient: Tensor, gradients: &mut Gradients| {
            backward(gradient, gradients);
            Ok(())
        };
        self.record(op, value, &self.places(inputs), Box::new(backward))
    }

    /// Whether values may wait until somebody asks. Who checks looks at every value.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self.inner.run, SegmentRun::Second(_)) && !self.inner.settings.checks
    }

    fn entrance(&self, input: &Var) -> Entrance {
        let Some(node) = input.node else {
            let constant = || Entrance::Constant(input.value().clone());
            return input.stored().cloned().map_or_else(constant, Entrance::Frozen);
        };
        match (&self.inner.nodes.borrow()[node].kind, input.stored()) {
            (NodeKind::Parameter(gradient), Some(value)) => Entrance::Parameter(value.clone(), gradient.clone()),
            _ => Entrance::Leaf(input.value().clone(), input.input()),
        }
    }
}

impl Again {
    /// Goes back through the segment whose outputs' gradients have `arrived`.
    fn new(
        (settings, scope): (TapeSettings, Rc<str>),
        segment: Rc<Segment>,
        entered: Vec<Entrance>,
        run: impl FnOnce(&[Var]) -> Result<Vec<Var>, BackwardError> + 'static,
        arrived: Rc<RefCell<Vec<Option<Tensor>>>>,
    ) -> Again {
        let parameters = segment.parameters.take();
        let go_back = move |gradients: &mut Gradients, complete: &mut Complete| {
            let tape = Tape::with(settings, true, SegmentRun::Second(segment));
            tape.set_scope(scope);
            let (mut inputs, mut leaves) = (Vec::new(), Vec::new());
            for entrance in entered {
                inputs.push(match entrance {
                    Entrance::Constant(value) => tape.constant(value),
                    Entrance::Frozen(value) => tape.frozen(value),
                    Entrance::Parameter(value, gradient) => {
                        tape.enter("parameter", value.whole(), Some(value), NodeKind::Parameter(gradient))
                    }
                    Entrance::Leaf(value, to) => {
                        let leaf = tape.leaf(value);
                        leaves.push((leaf.input(), to));
                        leaf
                    }
                });
            }
            let before = tape.device().set_phase(Phase::Recompute);
            let outputs = run(&inputs);
            tape.device().set_phase(before);
            let (outputs, arrived) = (outputs?, arrived.take());
            let starts = outputs.iter().zip(arrived).filter_map(|(output, gradient)| Some((output.input(), gradient?)));
            let mut starts: Vec<_> = starts.collect();
            // What an input has from later uses is added to in place, as it would be without a segment: the same order of sums.
            for &(leaf, to) in &leaves {
                starts.extend(gradients.take(to).map(|gradient| (leaf, gradient)));
            }
            // From here on the record alone holds what its ops need.
            drop((inputs, outputs));
            let mut found = tape.go_back(starts, complete)?;
            for (leaf, to) in leaves {
                if let Some(gradient) = found.take(leaf) {
                    gradients.add(to, gradient);
                }
            }
            Ok(())
        };
        Again { parameters, go_back: Box::new(go_back) }
    }

    /// Goes back, or if nothing arrived passes by; either way tells of those of the segment's parameters that are
    /// `first_used` in it.
    pub(super) fn step(
        self,
        arrived: bool,
        first_used: &HashSet<*const ()>,
        gradients: &mut Gradients,
        complete: &mut Complete,
    ) -> Result<(), BackwardError> {
        let mut tell = |gradient: &Gradient| match first_used.contains(&gradient.address()) {
            true => complete(gradient),
            false => Ok(()),
        };
        if arrived {
            return (self.go_back)(gradients, &mut tell);
        }
        self.parameters.iter().rev().try_for_each(tell)
    }
}
