//! A tape of sizes: ops that keep what the real ones keep until backward, and segments that run twice, as
//! `crates/tensor/src/tape.rs` and the files beside it have them.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;

use guildhall_tensor::{Dtype, Kept, Part as Segment, Recompute};

use super::books::{Books, Part, Phase};
use super::moves::Group;
use super::sketch::{Array, Gradient, Gradients, Slot};
use super::var::{Later, Made, Var};

type Backward = Box<dyn FnOnce(Array, &mut Gradients)>;

/// What is told of every gradient that is complete.
pub(super) type Complete = Rc<dyn Fn(&Gradient)>;

enum Node {
    Leaf,
    Parameter(Array, Gradient),
    Op(Backward, Part),
    Mark(Box<dyn FnOnce()>),
    Segment(Again),
}

/// What there is to do where backward passes a node.
enum Step {
    Op(Backward, Part),
    Complete(Gradient),
    Mark(Box<dyn FnOnce()>),
    /// With the parameters that are first used in it.
    Segment(Again, HashSet<*const ()>),
    Pass,
}

/// A segment on a tape: the parameters it uses by itself, and how to go back through it.
struct Again {
    parameters: Vec<Gradient>,
    go_back: Box<dyn FnOnce(&mut Gradients, Complete)>,
}

/// What the two runs of a segment share.
#[derive(Default)]
struct Shared {
    kept: RefCell<VecDeque<Array>>,
    parameters: RefCell<Vec<Gradient>>,
}

#[derive(Clone)]
enum Run {
    Only,
    First(Rc<Shared>),
    Second(Rc<Shared>),
}

/// How an input enters a segment's second run.
enum Entrance {
    Constant(Array),
    Leaf(Array, usize),
    Parameter(Array, Gradient),
}

/// A record of ops. Clones share it.
#[derive(Clone)]
pub(super) struct Tape {
    books: Rc<Books>,
    records: bool,
    recompute: Rc<Recompute>,
    run: Run,
    nodes: Rc<RefCell<Vec<Node>>>,
    complete: Complete,
}

impl Tape {
    pub(super) fn new(books: &Rc<Books>, recompute: Recompute, complete: Complete) -> Tape {
        let (recompute, nodes) = (Rc::new(recompute), Rc::default());
        Tape { books: books.clone(), records: true, recompute, run: Run::Only, nodes, complete }
    }

    fn of_run(&self, run: Run, complete: Complete) -> Tape {
        let records = matches!(run, Run::Second(_));
        Tape { records, run, complete, nodes: Rc::default(), ..self.clone() }
    }

    pub(super) fn books(&self) -> &Rc<Books> {
        &self.books
    }

    pub(super) fn is_recording(&self) -> bool {
        self.records
    }

    pub(super) fn constant(&self, value: Array) -> Var {
        Var::new(self, Made::Known(value), None)
    }

    pub(super) fn parameter(&self, value: &Array, gradient: &Gradient) -> Var {
        if let Run::First(shared) = &self.run {
            shared.parameters.borrow_mut().push(gradient.clone());
        }
        self.enter(value.clone(), Node::Parameter(value.clone(), gradient.clone()))
    }

    fn enter(&self, value: Array, node: Node) -> Var {
        Var::new(self, Made::Known(value), self.records.then(|| self.push(node)))
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

    /// An op that has used its inputs' memory up.
    pub(super) fn consuming_op(
        &self,
        value: Array,
        inputs: &[Option<usize>],
        backward: impl FnOnce(Array, &mut Gradients) + 'static,
    ) -> Var {
        Var::new(self, Made::Known(value), self.record(inputs, backward))
    }

    /// An op whose value is made, in a segment's second run, when somebody asks for it.
    pub(super) fn late_op(
        &self,
        shape: ((u64, u64), Dtype),
        inputs: &[&Var],
        make: impl FnOnce() -> Array + 'static,
        backward: impl FnOnce(Array, &mut Gradients) + 'static,
    ) -> Var {
        let value = match self.is_again() {
            true => Made::Later(Rc::new(Later::new(shape, make))),
            false => Made::Known(make()),
        };
        let inputs: Vec<_> = inputs.iter().map(|input| input.node).collect();
        Var::new(self, value, self.record(&inputs, backward))
    }

    fn record(
        &self,
        inputs: &[Option<usize>],
        backward: impl FnOnce(Array, &mut Gradients) + 'static,
    ) -> Option<usize> {
        let needed = inputs.iter().any(Option::is_some);
        needed.then(|| self.push(Node::Op(Box::new(backward), self.books.part.get())))
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

    /// Whether this is a segment's second run: decisions, and the facts they rest on, are there already.
    pub(super) fn is_again(&self) -> bool {
        matches!(self.run, Run::Second(_))
    }

    /// Whether a segment's second run takes what this group gave in the first.
    pub(super) fn has_kept(&self, group: Group) -> bool {
        self.is_again() && self.keeps(group)
    }

    fn keeps(&self, group: Group) -> bool {
        self.recompute.keeps.contains(&Kept::Communication) && group.size > 1
    }

    /// What a group gives: kept by a segment's first run, and taken by its second.
    pub(super) fn keep(&self, group: Group, receive: impl FnOnce() -> Array) -> Array {
        match &self.run {
            Run::First(shared) if self.keeps(group) => {
                let value = receive();
                shared.kept.borrow_mut().push_back(value.clone());
                value
            }
            Run::Second(shared) if self.keeps(group) => {
                shared.kept.borrow_mut().pop_front().expect("both runs of a segment keep the same")
            }
            _ => receive(),
        }
    }

    /// The outputs of a segment, which keeps its inputs alone and runs again on the way back, if it is one that does.
    pub(super) fn checkpoint(
        &self,
        part: Segment,
        inputs: &[&Var],
        segment: impl Fn(&[Var]) -> Vec<Var> + 'static,
    ) -> Vec<Var> {
        if !self.records || !self.recompute.parts.contains(&part) || !matches!(self.run, Run::Only) {
            return segment(&inputs.iter().map(|&input| input.clone()).collect::<Vec<_>>());
        }
        let shared = Rc::new(Shared::default());
        let first = self.of_run(Run::First(shared.clone()), self.complete.clone());
        let values: Vec<Var> = inputs.iter().map(|input| first.constant(input.value().clone())).collect();
        let outputs = segment(&values);
        drop(values);

        let arrived = Rc::new(RefCell::new(vec![None; outputs.len()]));
        let entered = inputs.iter().map(|input| self.entrance(input)).collect();
        let mark = self.push(Node::Segment(self.again(shared, entered, segment, arrived.clone())));
        let output = |(i, output): (usize, Var)| {
            let arrived = arrived.clone();
            self.consuming_op(output.into_value(), &[Some(mark)], move |gradient, gradients| {
                gradients.add(Some(mark), gradient.f32(0, 0));
                arrived.borrow_mut()[i] = Some(gradient);
            })
        };
        outputs.into_iter().enumerate().map(output).collect()
    }

    /// A segment of one value and weights, which gives one value.
    pub(super) fn segment(
        &self,
        part: Segment,
        x: &Var,
        weights: &[Var],
        segment: impl Fn(&Var, &[Var]) -> Var + 'static,
    ) -> Var {
        let inputs: Vec<&Var> = [x].into_iter().chain(weights).collect();
        self.checkpoint(part, &inputs, move |inputs| vec![segment(&inputs[0], &inputs[1..])]).remove(0)
    }

    fn entrance(&self, input: &Var) -> Entrance {
        let Some(node) = input.node else { return Entrance::Constant(input.value().clone()) };
        match &self.nodes.borrow()[node] {
            Node::Parameter(value, gradient) => Entrance::Parameter(value.clone(), gradient.clone()),
            // Of a weight that is let go of meanwhile, this is memory of its own.
            _ => Entrance::Leaf(input.value().held(), node),
        }
    }

    fn again(
        &self,
        shared: Rc<Shared>,
        entered: Vec<Entrance>,
        segment: impl FnOnce(&[Var]) -> Vec<Var> + 'static,
        arrived: Rc<RefCell<Vec<Option<Array>>>>,
    ) -> Again {
        let (parameters, outer) = (shared.parameters.take(), self.clone());
        let go_back = move |gradients: &mut Gradients, complete: Complete| {
            let tape = outer.of_run(Run::Second(shared), complete);
            let (mut inputs, mut leaves) = (Vec::new(), Vec::new());
            for entrance in entered {
                inputs.push(match entrance {
                    Entrance::Constant(value) => tape.constant(value),
                    Entrance::Parameter(value, gradient) => tape.enter(value.clone(), Node::Parameter(value, gradient)),
                    Entrance::Leaf(value, to) => {
                        let leaf = tape.enter(value, Node::Leaf);
                        leaves.extend(leaf.node.map(|node| (node, to)));
                        leaf
                    }
                });
            }
            let phase = tape.books.phase.replace(Phase::Again);
            let outputs = segment(&inputs);
            tape.books.phase.set(phase);
            let starts = outputs.iter().zip(arrived.take()).map(|(output, gradient)| (output.node, gradient));
            let mut starts: Vec<_> = starts.collect();
            for &(leaf, to) in &leaves {
                starts.extend(gradients.take(to).map(|gradient| (Some(leaf), Some(gradient))));
            }
            drop((inputs, outputs));
            let mut found = tape.go_back(starts);
            for (leaf, to) in leaves {
                if let Some(gradient) = found.take(leaf) {
                    gradients.add(Some(to), gradient);
                }
            }
        };
        Again { parameters, go_back: Box::new(go_back) }
    }

    pub(super) fn backward(&self, loss: &Var) {
        let one = loss.value().f32(1, 1);
        drop(self.go_back(vec![(loss.node, Some(one))]));
    }

    fn go_back(&self, starts: Vec<(Option<usize>, Option<Array>)>) -> Gradients {
        let (nodes, mut used) = (self.nodes.take(), HashSet::new());
        let (mut slots, mut steps) = (Vec::with_capacity(nodes.len()), Vec::with_capacity(nodes.len()));
        for node in nodes {
            let (slot, step) = match node {
                Node::Leaf => (Slot::Intermediate(None), Step::Pass),
                Node::Op(backward, part) => (Slot::Intermediate(None), Step::Op(backward, part)),
                Node::Mark(f) => (Slot::Intermediate(None), Step::Mark(f)),
                Node::Parameter(_, gradient) => {
                    let first = used.insert(gradient.address());
                    let step = if first { Step::Complete(gradient.clone()) } else { Step::Pass };
                    (Slot::Parameter(gradient), step)
                }
                Node::Segment(again) => {
                    let parameters = again.parameters.iter().map(Gradient::address);
                    let first = parameters.filter(|&parameter| used.insert(parameter)).collect();
                    (Slot::Intermediate(None), Step::Segment(again, first))
                }
            };
            slots.push(slot);
            steps.push(step);
        }
        let mut gradients = Gradients::new(&self.books, slots);
        for (node, gradient) in starts {
            gradient.into_iter().for_each(|gradient| gradients.add(node, gradient));
        }
        while let Some(step) = steps.pop() {
            let node = steps.len();
            match step {
                Step::Op(backward, part) => {
                    if let Some(gradient) = gradients.take(node) {
                        self.books.part.set(part);
                        backward(gradient, &mut gradients);
                    }
                }
                Step::Complete(gradient) => (self.complete)(&gradient),
                Step::Mark(f) => f(),
                Step::Segment(again, first) => {
                    let (arrived, complete) = (gradients.take(node).is_some(), self.complete.clone());
                    let tell = move |gradient: &Gradient| {
                        if first.contains(&gradient.address()) {
                            complete(gradient);
                        }
                    };
                    match arrived {
                        true => (again.go_back)(&mut gradients, Rc::new(tell)),
                        false => again.parameters.iter().rev().for_each(tell),
                    }
                }
                Step::Pass => {}
            }
        }
        gradients
    }
}
