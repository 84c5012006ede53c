//! Checks an op against an f64 oracle: its value against the oracle's, its gradients against central differences of
//! the oracle. Differences of an f32 function cannot see errors under about 1e-3; differences of an f64 one see 1e-8,
//! so what remains is the op's own rounding.

use std::sync::Arc;

use crate::device::Device;
use crate::draws::{Draws, Purpose};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// One input of the checked op.
#[derive(Clone, Debug)]
pub struct Operand {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Operand {
    /// Normal numbers of the given spread; `stream` tells operands apart.
    pub fn random(shape: &[usize], spread: f32, stream: u32) -> Operand {
        let draws = Draws::new(11, Purpose::Test, 0, stream);
        let len = shape.iter().product::<usize>() as u64;
        Operand { shape: shape.to_vec(), values: (0..len).map(|i| draws.normal(i) * spread).collect() }
    }
}

/// Compares `op` with `oracle` at the given inputs. Errors are relative to the largest magnitude of the compared
/// tensor (with a floor of 1e-3 of magnitude, since some gradients are truly zero).
///
/// Panics naming the operand, the element and both numbers when an error exceeds `tolerance`.
#[track_caller]
pub fn check(
    device: &Arc<Device>,
    inputs: &[Operand],
    tolerance: f64,
    op: impl Fn(&[Var]) -> Var,
    oracle: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    check_dyn(device, inputs, tolerance, &op, &oracle);
}

/// One for all ops, which a caller may have hundreds of.
#[track_caller]
fn check_dyn(
    device: &Arc<Device>,
    inputs: &[Operand],
    tolerance: f64,
    op: &dyn Fn(&[Var]) -> Var,
    oracle: &dyn Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let tape = Tape::new(device);
    let vars: Vec<Var> = inputs.iter().map(|i| tape.leaf(Tensor::from_slice(device, &i.shape, &i.values))).collect();
    let output = op(&vars);
    let wide: Vec<Vec<f64>> = inputs.iter().map(|i| i.values.iter().map(|&x| f64::from(x)).collect()).collect();
    compare("value", &output.value().to_vec(), &oracle(&wide), tolerance);

    // A fixed random direction in the space of outputs makes one scalar of them all.
    let draws = Draws::new(12, Purpose::Test, 0, 0);
    let direction: Vec<f32> = (0..output.value().len() as u64).map(|i| draws.normal(i)).collect();
    let along =
        |inputs: &[Vec<f64>]| -> f64 { oracle(inputs).iter().zip(&direction).map(|(y, d)| y * f64::from(*d)).sum() };
    let gradients = tape.backward_from(&output, Tensor::from_slice(device, output.shape(), &direction));
    for (which, var) in vars.iter().enumerate() {
        let got = gradients.of(var).map_or_else(|| vec![0.0; var.value().len()], Tensor::to_vec);
        let mut shifted = wide.clone();
        let want: Vec<f64> = (0..got.len())
            .map(|i| {
                let (x, h) = (wide[which][i], 1e-5);
                let mut at = |x: f64| {
                    shifted[which][i] = x;
                    along(&shifted)
                };
                let slope = (at(x + h) - at(x - h)) / (2.0 * h);
                at(x);
                slope
            })
            .collect();
        compare(&format!("gradient of input {which}"), &got, &want, tolerance);
    }
}

#[track_caller]
fn compare(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let largest = want.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(g) - w).abs() / largest;
        assert!(
            error <= tolerance,
            "{what}, element {i}: {g} instead of {w} ({error:.1e} of the largest, {largest:.3e})"
        );
    }
}
