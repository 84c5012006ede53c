//! Functions of one element, and SiLU-gated products.

use super::math::{gelu, gelu_slope, sigmoid as sigmoid_of};
use super::rows::{for_rows, map, zip};
use super::stored::{Stored, StoredNumber, StoredRef, as_numbers};
use crate::device::Device;

/// A function of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pointwise {
    /// At 0 the slope is 0.
    Relu,
    /// In its tanh form.
    Gelu,
    Sigmoid,
    Softplus,
}

pub(crate) fn activate(device: &Device, out: Stored, x: StoredRef, f: Pointwise) {
    as_numbers!(Stored(out), StoredRef(x) => activate_all(device, out, x, f));
}

fn activate_all<O: StoredNumber, X: StoredNumber>(device: &Device, out: &mut [O], x: &[X], f: Pointwise) {
    match f {
        Pointwise::Relu => map(
            device,
            out,
            x,
            false,
            #[inline(always)]
            |x| if x < 0.0 { 0.0 } else { x },
        ),
        Pointwise::Gelu => map(device, out, x, false, gelu),
        // For small tensors: these loops are not vectors.
        Pointwise::Sigmoid => map(device, out, x, false, sigmoid_of as fn(f32) -> f32),
        Pointwise::Softplus => map(device, out, x, false, |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p()),
    }
}

pub(crate) fn activate_back(device: &Device, dx: &mut [f32], x: StoredRef, g: &[f32], f: Pointwise, accumulate: bool) {
    as_numbers!(StoredRef(x) => activate_all_back(device, dx, x, g, f, accumulate));
}

fn activate_all_back<X: StoredNumber>(
    device: &Device,
    dx: &mut [f32],
    x: &[X],
    g: &[f32],
    f: Pointwise,
    accumulate: bool,
) {
    match f {
        Pointwise::Relu => zip(
            device,
            dx,
            x,
            g,
            accumulate,
            #[inline(always)]
            |x, g| if x > 0.0 { g } else { 0.0 },
        ),
        Pointwise::Gelu => zip(
            device,
            dx,
            x,
            g,
            accumulate,
            #[inline(always)]
            |x, g| gelu_slope(x) * g,
        ),
        Pointwise::Sigmoid => zip(device, dx, x, g, accumulate, |x, g| {
            let s = sigmoid_of(x);
            g * s * (1.0 - s)
        }),
        Pointwise::Softplus => zip(device, dx, x, g, accumulate, |x, g| g * sigmoid_of(x)),
    }
}

pub(crate) fn swiglu(device: &Device, out: Stored, x: StoredRef, width: usize) {
    as_numbers!(Stored(out), StoredRef(x) => gate(
        device,
        out,
        x,
        width,
        #[inline(always)]
        |a, b| a * sigmoid_of(a) * b,
    ));
}

pub(crate) fn swiglu_back(device: &Device, dx: &mut [f32], x: StoredRef, g: &[f32], width: usize, accumulate: bool) {
    as_numbers!(StoredRef(x) => gate_back(
        device,
        dx,
        (x, g),
        width,
        accumulate,
        #[inline(always)]
        |a, b, g| {
            let s = sigmoid_of(a);
            [g * b * s * (1.0 + a * (1.0 - s)), g * a * s]
        },
    ));
}

/// The factor on gates within the sigmoid of GPT-OSS's activation.
const STEEPNESS: f32 = 1.702;

pub(crate) fn clamped_swiglu(device: &Device, out: Stored, x: StoredRef, width: usize, limit: f32) {
    as_numbers!(Stored(out), StoredRef(x) => gate(
        device,
        out,
        x,
        width,
        #[inline(always)]
        |a, b| {
            let (a, b) = (a.min(limit), b.max(-limit).min(limit));
            a * sigmoid_of(STEEPNESS * a) * (b + 1.0)
        },
    ));
}

pub(crate) fn clamped_swiglu_back(
    device: &Device,
    dx: &mut [f32],
    x: StoredRef,
    g: &[f32],
    width: usize,
    limit: f32,
    accumulate: bool,
) {
    as_numbers!(StoredRef(x) => gate_back(
        device,
        dx,
        (x, g),
        width,
        accumulate,
        #[inline(always)]
        |gate, up, g| {
            let (a, b) = (gate.min(limit), up.max(-limit).min(limit));
            let s = sigmoid_of(STEEPNESS * a);
            // What is clamped passes nothing; at the limit itself it does.
            let of_gate = if gate <= limit { g * (b + 1.0) * s * (1.0 + STEEPNESS * a * (1.0 - s)) } else { 0.0 };
            let of_up = if up.abs() <= limit { g * a * s } else { 0.0 };
            [of_gate, of_up]
        },
    ));
}

/// `out = f(gate, up)`, rows of x being `[gate | up]`, each of `width`.
fn gate<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    width: usize,
    f: impl Fn(f32, f32) -> f32 + Sync,
) {
    for_rows(
        device,
        out,
        width,
        16,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let (gate, up) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
                for ((o, a), b) in line.iter_mut().zip(gate).zip(up) {
                    *o = O::of(f(a.wide(), b.wide()));
                }
            }
        },
    );
}

/// `dx (+)= f(gate, up, g)`, the gradients of gate and up.
fn gate_back<X: StoredNumber>(
    device: &Device,
    dx: &mut [f32],
    (x, g): (&[X], &[f32]),
    width: usize,
    accumulate: bool,
    f: impl Fn(f32, f32, f32) -> [f32; 2] + Sync,
) {
    for_rows(
        device,
        dx,
        2 * width,
        16,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(2 * width).enumerate() {
                let (gate, up) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
                let g = &g[(first + i) * width..][..width];
                let (d_gate, d_up) = line.split_at_mut(width);
                if !accumulate {
                    d_gate.fill(0.0);
                    d_up.fill(0.0);
                }
                for j in 0..width {
                    let [of_gate, of_up] = f(gate[j].wide(), up[j].wide(), g[j]);
                    d_gate[j] += of_gate;
                    d_up[j] += of_up;
                }
            }
        },
    );
}
