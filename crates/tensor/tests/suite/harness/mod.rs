//! How the ops are held against their references: on every device of the program, over memory full of NaN (an element
//! that an op forgets to write shows), used once and twice (so that gradients are both set and added to), and large
//! enough in some cases that the work is split.

use std::sync::Arc;

use guildhall_tensor::gradcheck::{self, Operand};
use guildhall_tensor::{Device, Draws, Dtype, Gradients, Parameter, Purpose, Tape, Tensor, Var};

/// The tolerance of a result whose longest sum has `terms` terms: f32 rounds each at 2^-24 of the partial sum. The 32
/// more are for elementary functions, good to about 4 x 2^-24 each, and what follows them.
pub(crate) fn rounding(terms: usize) -> f64 {
    (32 + terms) as f64 / f64::from(1 << 24)
}

/// The tolerance of bf16 storage: eight significant bits.
pub(crate) const BF16: f64 = 1.0 / 256.0;

/// Inputs of more elements than this have their gradients compared at samples of them.
const EXHAUSTIVE: usize = 1000;
const SAMPLES: usize = 24;
const STEP: f64 = 1e-5;

pub(crate) fn random(shape: &[usize], stream: u32) -> Operand {
    Operand::random(shape, 1.0, stream)
}

pub(crate) fn tensor(device: &Arc<Device>, operand: &Operand) -> Tensor {
    Tensor::from_slice(device, &operand.shape, &operand.values)
}

/// Fills the memory that is to be reused with NaN. Memory comes in at most eight sizes per doubling, from 256 elements.
pub(crate) fn poison(device: &Arc<Device>) {
    let sizes = (0..).map(|i| 256 << (i / 8)).zip((0..8).cycle());
    let sizes = sizes.map(|(base, part)| base + base * part / 8).take_while(|&len: &usize| len < 1 << 17);
    let held: Vec<Tensor> = sizes
        .flat_map(|len| [len; 4])
        .chain([256; 8])
        .map(|len| Tensor::from_fn(device, &[len], |_| f32::NAN))
        .collect();
    drop(held);
}

/// The first of those that the suite runs on.
pub(crate) fn device() -> Arc<Device> {
    crate::devices().swap_remove(0)
}

pub(crate) fn on_devices(f: impl Fn(&Arc<Device>)) {
    for device in crate::devices() {
        poison(&device);
        f(&device);
    }
}

/// What is tested. Not generic: the suite has hundreds of pairs, and each would be compiled with all that follows.
type Op<'a> = &'a dyn Fn(&[Var]) -> Var;
type Oracle<'a> = &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>;

/// The op against its reference, values and gradients, in every way above.
#[track_caller]
pub(crate) fn check(
    inputs: &[Operand],
    tolerance: f64,
    op: impl Fn(&[Var]) -> Var,
    oracle: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    check_dyn(inputs, tolerance, &op, &oracle);
}

#[track_caller]
fn check_dyn(inputs: &[Operand], tolerance: f64, op: Op, oracle: Oracle) {
    let twice = |v: &[Var]| op(v).add(&op(v));
    if inputs.iter().map(|i| i.values.len()).sum::<usize>() <= EXHAUSTIVE {
        on_devices(|device| {
            gradcheck::check(device, inputs, tolerance, op, oracle);
            poison(device);
            gradcheck::check(device, inputs, tolerance, twice, |v| oracle(v).iter().map(|y| 2.0 * y).collect());
        });
    } else {
        let expected = Expected::new(inputs, oracle);
        on_devices(|device| {
            expected.compare(device, inputs, tolerance, op, 1.0);
            poison(device);
            expected.compare(device, inputs, tolerance, &twice, 2.0);
        });
    }
}

/// The same with every input stored as bf16: the reference sees the rounded numbers.
#[track_caller]
pub(crate) fn check_bf16(inputs: &[Operand], op: impl Fn(&[Var]) -> Var, oracle: impl Fn(&[Vec<f64>]) -> Vec<f64>) {
    check_bf16_chain(1, inputs, op, oracle);
}

/// The same of an op that has so many products one after the other, each with factors rounded to bf16.
#[track_caller]
pub(crate) fn check_bf16_chain(
    products: usize,
    inputs: &[Operand],
    op: impl Fn(&[Var]) -> Var,
    oracle: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    check_bf16_dyn(products, inputs, &op, &oracle);
}

#[track_caller]
fn check_bf16_dyn(products: usize, inputs: &[Operand], op: Op, oracle: Oracle) {
    let rounding = products as f64 * BF16;
    let round = |x: &f32| half::bf16::from_f32(*x).to_f32();
    let inputs = inputs.iter().map(|i| Operand { values: i.values.iter().map(round).collect(), ..i.clone() });
    let inputs: Vec<Operand> = inputs.collect();
    let stored = |v: &[Var]| {
        let v: Vec<Var> = v.iter().map(|v| v.cast(Dtype::Bf16)).collect();
        let y = op(&v);
        assert_eq!(y.dtype(), if y.shape() == [1] { Dtype::F32 } else { Dtype::Bf16 }, "only scalars are f32");
        y.cast(Dtype::F32)
    };
    let expected = Expected::new(&inputs, oracle);
    on_devices(|device| {
        expected.compare(device, &inputs, rounding, &stored, 1.0);
        // Into buffers of bf16, set and added to: each sum is rounded once more.
        poison(device);
        expected.compare_parameters(device, &inputs, rounding + 0.5 * BF16, op, 1);
        poison(device);
        expected.compare_parameters(device, &inputs, rounding + BF16, op, 2);
    });
}

/// What a reference says: values, slopes at some elements of each input, and slopes along random directions, to which
/// every element contributes.
struct Expected {
    value: Vec<f64>,
    direction: Vec<f32>,
    slopes: Vec<Vec<(usize, f64)>>,
    along: Vec<(Vec<f64>, f64)>,
}

impl Expected {
    fn new(inputs: &[Operand], oracle: Oracle) -> Expected {
        let wide: Vec<Vec<f64>> = inputs.iter().map(|i| i.values.iter().map(|&x| f64::from(x)).collect()).collect();
        let value = oracle(&wide);
        let direction = random(&[value.len()], 900).values;
        let slope = |which: usize, steps: &dyn Fn(usize) -> f64| {
            let at = |sign: f64| -> f64 {
                let mut inputs = wide.clone();
                inputs[which].iter_mut().enumerate().for_each(|(i, x)| *x += sign * STEP * steps(i));
                oracle(&inputs).iter().zip(&direction).map(|(y, d)| y * f64::from(*d)).sum()
            };
            (at(1.0) - at(-1.0)) / (2.0 * STEP)
        };
        let draws = Draws::new(13, Purpose::Test, 0, 0);
        let chosen = |len: usize| -> Vec<usize> {
            let all = len <= SAMPLES;
            (0..len.min(SAMPLES)).map(|s| if all { s } else { draws.bits(s as u64) as usize % len }).collect()
        };
        let at = |which: usize, i: usize| (i, slope(which, &|j| f64::from(u8::from(i == j))));
        let slopes = (0..inputs.len()).map(|w| chosen(wide[w].len()).into_iter().map(|i| at(w, i)).collect()).collect();
        let along = (0..inputs.len()).map(|which| {
            let steps: Vec<f64> =
                random(&[wide[which].len()], 901 + which as u32).values.iter().map(|&x| f64::from(x)).collect();
            let slope = slope(which, &|i| steps[i]);
            (steps, slope)
        });
        let along = along.collect();
        Expected { value, direction, slopes, along }
    }

    #[track_caller]
    fn compare(&self, device: &Arc<Device>, inputs: &[Operand], tolerance: f64, op: Op, times: f64) {
        let tape = Tape::new(device);
        let vars: Vec<Var> = inputs.iter().map(|i| tape.leaf(tensor(device, i))).collect();
        let output = op(&vars);
        let all: Vec<(usize, f64)> = self.value.iter().map(|y| y * times).enumerate().collect();
        near("value", &output.value().to_vec(), &all, tolerance);
        let gradients = tape.backward_from(&output, Tensor::from_slice(device, output.shape(), &self.direction));
        let got: Vec<Vec<f32>> = vars.iter().map(|var| gradient_of(&gradients, var)).collect();
        self.compare_gradients(device, &got, tolerance, times);
    }

    /// Gradients of bf16 parameters after `passes` ways back.
    #[track_caller]
    fn compare_parameters(&self, device: &Arc<Device>, inputs: &[Operand], tolerance: f64, op: Op, passes: usize) {
        let parameters: Vec<Parameter> =
            inputs.iter().map(|i| Parameter::new("p", tensor(device, i).cast(Dtype::Bf16))).collect();
        for _ in 0..passes {
            let tape = Tape::new(device);
            let vars: Vec<Var> = parameters.iter().map(|p| tape.parameter(p)).collect();
            let output = op(&vars);
            tape.backward_from(&output, Tensor::from_slice(device, output.shape(), &self.direction));
        }
        let read = |p: &Parameter| {
            p.with_gradient(|gradient| {
                assert_eq!(gradient.dtype(), Dtype::Bf16);
                gradient.to_vec()
            })
        };
        let got: Vec<Vec<f32>> = parameters.iter().map(read).collect();
        self.compare_gradients(device, &got, tolerance, passes as f64);
    }

    #[track_caller]
    fn compare_gradients(&self, device: &Device, gradients: &[Vec<f32>], tolerance: f64, times: f64) {
        for (which, got) in gradients.iter().enumerate() {
            let want: Vec<(usize, f64)> = self.slopes[which].iter().map(|&(i, x)| (i, x * times)).collect();
            let what = format!("gradient of input {which}, {} threads, {times} times", device.threads());
            near(&what, got, &want, tolerance);
            let (steps, want) = &self.along[which];
            let sum: f64 = got.iter().zip(steps).map(|(g, s)| f64::from(*g) * s).sum();
            // Independent errors of the elements add up to a normal number as wide as their norm; four deviations.
            let norm = got.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt().max(1e-3);
            let error = (sum - want * times).abs() / norm;
            assert!(
                error <= 4.0 * tolerance,
                "{what}: along a direction {sum} instead of {} ({error:.1e})",
                want * times
            );
        }
    }
}

/// A leaf's gradient, zeros if nothing contributed.
pub(crate) fn gradient_of(gradients: &Gradients, var: &Var) -> Vec<f32> {
    gradients.of(var).map_or_else(|| vec![0.0; var.value().len()], Tensor::to_vec)
}

/// Some elements against what they should be, relative to the largest magnitude.
#[track_caller]
pub(crate) fn near(what: &str, got: &[f32], want: &[(usize, f64)], tolerance: f64) {
    let largest = got.iter().fold(1e-3, |a: f64, &b| a.max(f64::from(b.abs())));
    for &(i, w) in want {
        let error = (f64::from(got[i]) - w).abs() / largest;
        assert!(error <= tolerance, "{what}, element {i}: {} instead of {w} ({error:.1e} of {largest:.3e})", got[i]);
    }
}

/// The same for all elements.
#[track_caller]
pub(crate) fn all_near(what: &str, got: &[f32], want: &[f32], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    near(what, got, &want.iter().map(|&x| f64::from(x)).enumerate().collect::<Vec<_>>(), tolerance);
}
