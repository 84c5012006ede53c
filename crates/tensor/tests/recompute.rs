//! Segments that run twice: the same bits, the same order of completion, less memory, and nothing twice that is kept.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{
    BackwardError, Cause, Device, Draws, Gradient, Kept, Parameter, Part, Purpose, Recompute, Tape, Tensor, Var,
};

fn random(device: &Arc<Device>, shape: &[usize], stream: u32) -> Tensor {
    let draws = Draws::new(37, Purpose::Test, 0, stream);
    Tensor::from_fn(device, shape, |i| draws.normal(i as u64))
}

fn blocks(keep_communication: bool) -> Recompute {
    Recompute::of(vec![Part::Block], keep_communication)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.f32s().iter().map(|x| x.to_bits()).collect()
}

/// A layer `gelu(x W^T) V^T` of width D.
fn layer(x: &Var, w: &Var, v: &Var) -> Var {
    x.linear(w, None).gelu().linear(v, None)
}

const WIDTH: usize = 16;
const LAYERS: usize = 3;

/// Residual layers, two matrices each; the first layer's first matrix is used once more at the end.
struct Net {
    device: Arc<Device>,
    weights: Rc<Vec<Parameter>>,
    x: Tensor,
}

impl Net {
    fn new() -> Net {
        let device = Device::new(1);
        let matrix = |i: u32| Parameter::new(format!("w{i}"), random(&device, &[WIDTH, WIDTH], i));
        let weights = Rc::new((0..2 * LAYERS as u32).map(matrix).collect());
        Net { x: random(&device, &[64, WIDTH], 99), device, weights }
    }

    fn forward(&self, tape: &Tape) -> (Var, Var) {
        let x = tape.leaf(self.x.clone());
        let mut y = x.clone();
        for i in 0..LAYERS {
            let weights = self.weights.clone();
            let run = move |inputs: &[Var]| {
                let on_tape = |i: usize| inputs[0].tape().parameter(&weights[i]);
                let (w, v) = (on_tape(2 * i), on_tape(2 * i + 1));
                Ok::<_, BackwardError>((vec![inputs[0].add(&layer(&inputs[0], &w, &v))], ()))
            };
            y = tape.checkpoint(Part::Block, &[&y], run).unwrap().0.remove(0);
        }
        let tied = y.linear(&tape.parameter(&self.weights[0]), None);
        (x, tied.dot_constant(random(&self.device, &[64 * WIDTH], 98)))
    }

    /// Names of parameters as they complete.
    fn back(&self, tape: &Tape, loss: &Var) -> Vec<String> {
        let mut told = Vec::new();
        let name = |gradient: &Gradient| {
            self.weights.iter().find(|weight| weight.gradient().is(gradient)).expect("one of ours").name().to_owned()
        };
        let complete = &mut |gradient: &Gradient| {
            told.push(name(gradient));
            Ok(())
        };
        tape.try_backward_telling(loss, complete).unwrap();
        told
    }

    /// Bits of the loss, of the gradients, and the order in which they completed; of two passes that add up.
    fn outcome(&self, recompute: &Recompute) -> (Vec<u32>, Vec<Vec<u32>>, Vec<String>) {
        let mut told = Vec::new();
        let mut losses = Vec::new();
        for _ in 0..2 {
            let tape = Tape::new(&self.device).recomputing(recompute);
            let (_, loss) = self.forward(&tape);
            losses.extend(bits(loss.value()));
            told = self.back(&tape, &loss);
        }
        let gradients = self.weights.iter().map(|weight| weight.with_gradient(|gradient| bits(gradient))).collect();
        self.weights.iter().for_each(Parameter::clear_gradient);
        (losses, gradients, told)
    }
}

#[test]
fn a_second_run_changes_no_bit_and_no_order() {
    let net = Net::new();
    let plain = net.outcome(&Recompute::default());
    assert_eq!(net.outcome(&blocks(true)), plain);
    // w0 is used in the first segment and after the last: it is complete when the first has gone back.
    assert_eq!(plain.2, ["w5", "w4", "w3", "w2", "w1", "w0"]);
}

/// With segments, forward leaves their inputs, the tied product's, which is the last output, and the loss's weights.
#[test]
fn only_inputs_of_segments_stay() {
    let net = Net::new();
    let stays = |recompute: &Recompute| {
        let before = net.device.account().live(Cause::Activations);
        let tape = Tape::new(&net.device).recomputing(recompute);
        let (x, loss) = net.forward(&tape);
        drop(x);
        let kept = net.device.account().live(Cause::Activations) - before;
        net.back(&tape, &loss);
        kept
    };
    let (rows, loss, weights) = (64 * WIDTH as u64 * 4, 4, 64 * WIDTH as u64 * 4);
    // x itself was there before.
    assert_eq!(stays(&blocks(true)), LAYERS as u64 * rows + weights + loss);
    // Besides: what the first product gave and what gelu made of it.
    assert_eq!(stays(&Recompute::default()), 3 * LAYERS as u64 * rows + weights + loss);
}

/// A second run makes the first product of each layer again, but not the second, whose value nobody asks for.
#[test]
fn the_last_product_of_a_segment_is_made_once() {
    let net = Net::new();
    let products = |recompute: &Recompute| {
        let before = net.device.multiply_adds();
        net.outcome(recompute);
        (net.device.multiply_adds() - before) / (64 * WIDTH * WIDTH) as u64
    };
    let plain = 2 * 3 * (2 * LAYERS as u64 + 1);
    assert_eq!(products(&Recompute::default()), plain);
    assert_eq!(products(&blocks(true)), plain + 2 * LAYERS as u64);
}

/// One segment that keeps a decision and something from elsewhere, and how often each was made.
fn counted(keep_communication: bool) -> [u32; 2] {
    let device = Device::new(1);
    let calls: [Rc<Cell<u32>>; 2] = Default::default();
    let tape = Tape::new(&device).recomputing(&blocks(keep_communication));
    let x = tape.leaf(random(&device, &[4], 0));
    let made = calls.clone();
    let run = move |inputs: &[Var]| {
        let (x, tape) = (&inputs[0], inputs[0].tape());
        let again = |which: usize| {
            made[which].set(made[which].get() + 1);
            Ok::<_, BackwardError>(f32::from(made[which].get() as u16))
        };
        let decided = tape.keep(Kept::Decision, || again(0))?;
        let came = tape.keep(Kept::Communication, || again(1))?;
        assert!(!tape.has_kept(Kept::Communication) || keep_communication);
        Ok::<_, BackwardError>((vec![x.scale(decided), x.scale(came)], ()))
    };
    let (outputs, ()) = tape.checkpoint(Part::Block, &[&x], run).unwrap();
    let loss = outputs[0].add(&outputs[1]).dot_constant(random(&device, &[4], 1));
    let gradients = tape.backward(&loss);
    let factor = if keep_communication { 2.0 } else { 3.0 };
    let expected: Vec<f32> = random(&device, &[4], 1).f32s().iter().map(|w| factor * w).collect();
    assert_eq!(gradients.of(&x).unwrap().f32s(), expected);
    calls.map(|calls| calls.get())
}

#[test]
fn decisions_are_never_made_twice_and_communication_as_asked() {
    assert_eq!(counted(true), [1, 1]);
    assert_eq!(counted(false), [1, 2]);
}

/// Of two outputs one is of use; a segment without any is passed by, and its parameters are told of all the same.
#[test]
fn outputs_without_a_gradient_cost_nothing() {
    let device = Device::new(1);
    let weights: Rc<Vec<Parameter>> =
        Rc::new((0..3).map(|i| Parameter::new(format!("w{i}"), random(&device, &[4], i))).collect());
    let runs = Rc::new(RefCell::new(Vec::new()));
    let tape = Tape::new(&device).recomputing(&blocks(true));
    let x = tape.leaf(random(&device, &[4], 9));
    let segment = |name: &'static str, used: &'static [usize]| {
        let (weights, runs) = (weights.clone(), runs.clone());
        let run = move |inputs: &[Var]| {
            runs.borrow_mut().push(name);
            let sums = used.iter().map(|&i| inputs[0].add(&inputs[0].tape().parameter(&weights[i]))).collect();
            Ok::<_, BackwardError>((sums, name))
        };
        tape.checkpoint(Part::Block, &[&x], run).unwrap()
    };
    let (useful, told) = segment("useful", &[0, 1]);
    assert_eq!(told, "useful");
    let _aside = segment("aside", &[2, 1]);
    let mut complete = Vec::new();
    let loss = useful[0].dot_constant(random(&device, &[4], 10));
    let tell = &mut |gradient: &Gradient| {
        complete.push(weights.iter().position(|weight| weight.gradient().is(gradient)).unwrap());
        Ok(())
    };
    let gradients = tape.try_backward_telling(&loss, tell).unwrap();
    assert_eq!(gradients.of(&x).unwrap().f32s(), random(&device, &[4], 10).f32s());
    assert_eq!(complete, [2, 1, 0]);
    assert_eq!(*runs.borrow(), ["useful", "aside", "useful"]);
    assert_eq!(weights[1].with_gradient(|gradient| gradient.to_vec()), [0.0; 4]);
}

/// Where neither x nor a weight is trained there is nothing to go back for. A frozen weight is looked up when it is needed:
/// between the two runs nobody holds it.
#[test]
fn segments_of_frozen_weights_run_as_often_as_they_teach() {
    let (device, runs) = (Device::new(1), Rc::new(Cell::new(0)));
    for (x_is_trained, w_is_trained) in [(false, false), (true, false), (false, true)] {
        runs.set(0);
        let mut w = Parameter::new("w", random(&device, &[WIDTH, WIDTH], 0));
        if !w_is_trained {
            w.freeze();
        }
        let w = Rc::new(w);
        let tape = Tape::new(&device).recomputing(&blocks(true));
        let start = random(&device, &[4, WIDTH], 1);
        let x = if x_is_trained { tape.leaf(start) } else { tape.constant(start) };
        let (counter, used) = (runs.clone(), w.clone());
        let run = move |inputs: &[Var]| {
            counter.set(counter.get() + 1);
            let w = inputs[0].tape().parameter(&used);
            Ok::<_, BackwardError>((vec![inputs[0].linear(&w, None).linear(&inputs[1], None)], ()))
        };
        let y = tape.checkpoint(Part::Block, &[&x, &tape.parameter(&w)], run).unwrap().0.remove(0);
        let mut value = w.stored().take();
        assert!(value.is_unique(), "the tape holds a parameter's value");
        w.stored().put(value);
        let weights = random(&device, &[4 * WIDTH], 2);
        let gradients = tape.backward(&y.dot_constant(weights.clone()));
        assert_eq!(runs.get(), if x_is_trained || w_is_trained { 2 } else { 1 });
        let plain = Tape::new(&device);
        let again = plain.leaf(random(&device, &[4, WIDTH], 1));
        let v = Parameter::new("v", random(&device, &[WIDTH, WIDTH], 0));
        let on_tape = plain.parameter(&v);
        let y = again.linear(&on_tape, None).linear(&on_tape, None);
        let want = plain.backward(&y.dot_constant(weights));
        if x_is_trained {
            assert_eq!(bits(gradients.of(&x).unwrap()), bits(want.of(&again).unwrap()));
        }
        let gradient = w.with_gradient(|gradient| bits(gradient));
        match w_is_trained {
            true => assert_eq!(gradient, v.with_gradient(|gradient| bits(gradient))),
            false => assert!(gradient.iter().all(|&bits| bits == 0)),
        }
    }
}

#[test]
fn a_segment_within_a_segment_is_part_of_it() {
    let (device, runs) = (Device::new(1), Rc::new(Cell::new(0)));
    let tape = Tape::new(&device).recomputing(&blocks(true));
    let x = tape.leaf(random(&device, &[4], 0));
    let counter = runs.clone();
    let outer = move |inputs: &[Var]| {
        let counter = counter.clone();
        let inner = move |inputs: &[Var]| {
            counter.set(counter.get() + 1);
            let factor = inputs[0].tape().keep(Kept::Decision, || Ok::<_, BackwardError>(2.0))?;
            Ok::<_, BackwardError>((vec![inputs[0].scale(factor)], ()))
        };
        inputs[0].tape().checkpoint(Part::Block, &[&inputs[0]], inner)
    };
    let y = tape.checkpoint(Part::Block, &[&x], outer).unwrap().0.remove(0);
    let gradients = tape.backward(&y.dot_constant(random(&device, &[4], 1)));
    assert_eq!(runs.get(), 2);
    assert_eq!(
        gradients.of(&x).unwrap().f32s(),
        random(&device, &[4], 1).f32s().iter().map(|w| 2.0 * w).collect::<Vec<_>>()
    );
}

/// The first run's failure comes at once, the second's from backward.
#[test]
fn failures_of_either_run_are_reported() {
    let device = Device::new(1);
    for fails in [1, 2] {
        let tape = Tape::new(&device).recomputing(&blocks(true));
        let x = tape.leaf(random(&device, &[4], 0));
        let runs = Cell::new(0);
        let run = move |inputs: &[Var]| {
            runs.set(runs.get() + 1);
            if runs.get() == fails {
                Err(BackwardError::from(format!("run {fails}")))
            } else {
                Ok((vec![inputs[0].scale(2.0)], ()))
            }
        };
        let error = match tape.checkpoint(Part::Block, &[&x], run) {
            Err(error) => error,
            Ok((y, ())) => tape.try_backward(&y[0].dot_constant(random(&device, &[4], 1))).err().expect("it fails"),
        };
        assert_eq!(error.to_string(), format!("run {fails}"));
    }
}

/// What is not finite is found in a segment too, under the segment's own scope, in either direction.
#[test]
fn a_checking_tape_looks_into_segments() {
    let device = Device::new(1);
    let ones = |x: f32| Tensor::from_fn(&device, &[2], |_| x);
    for (factor, weight, in_backward) in [(f32::MAX, 1.0, false), (1e30, 1e30, true)] {
        let tape = Tape::checking(&device).recomputing(&blocks(true));
        let run = move |inputs: &[Var]| {
            inputs[0].tape().set_scope("inside");
            Ok::<_, BackwardError>((vec![inputs[0].scale(1.0).scale(factor)], ()))
        };
        let x = if in_backward { ones(1e-30) } else { ones(2.0) };
        let y = tape.checkpoint(Part::Block, &[&tape.leaf(x)], run).unwrap().0.remove(0);
        tape.backward(&y.dot_constant(ones(weight)));
        let found = tape.non_finite().expect("it is not finite");
        assert_eq!((found.scope.as_str(), found.in_backward), ("inside", in_backward));
    }
}

#[test]
#[should_panic(expected = "on another tape")]
fn a_segment_uses_nothing_from_outside() {
    let device = Device::new(1);
    let tape = Tape::new(&device).recomputing(&blocks(true));
    let (x, outside) = (tape.leaf(random(&device, &[4], 0)), tape.leaf(random(&device, &[4], 1)));
    let run = move |inputs: &[Var]| Ok::<_, BackwardError>((vec![inputs[0].add(&outside)], ()));
    let _ = tape.checkpoint(Part::Block, &[&x], run);
}
