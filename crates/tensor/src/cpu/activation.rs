//! Functions of one element, and SiLU-gated products.

use super::math::{gelu, gelu_slope, sigmoid as sigmoid_of};
use super::rows::{for_rows, map, zip};
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

pub(crate) fn activate(device: &Device, out: &mut [f32], x: &[f32], f: Pointwise) {
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

pub(crate) fn activate_back(device: &Device, dx: &mut [f32], x: &[f32], g: &[f32], f: Pointwise, accumulate: bool) {
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

pub(crate) fn swiglu(device: &Device, out: &mut [f32], x: &[f32], width: usize) {
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
                    *o = a * sigmoid_of(*a) * b;
                }
            }
        },
    );
}

pub(crate) fn swiglu_back(device: &Device, dx: &mut [f32], x: &[f32], g: &[f32], width: usize, accumulate: bool) {
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
                    let (a, b, g) = (gate[j], up[j], g[j]);
                    let s = sigmoid_of(a);
                    d_gate[j] += g * b * s * (1.0 + a * (1.0 - s));
                    d_up[j] += g * a * s;
                }
            }
        },
    );
}

/// The factor on gates within the sigmoid of GPT-OSS's activation.
const STEEPNESS: f32 = 1.702;

pub(crate) fn clamped_swiglu(device: &Device, out: &mut [f32], x: &[f32], width: usize, limit: f32) {
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
                    let (a, b) = (a.min(limit), b.max(-limit).min(limit));
                    *o = a * sigmoid_of(STEEPNESS * a) * (b + 1.0);
                }
            }
        },
    );
}

pub(crate) fn clamped_swiglu_back(
    device: &Device,
    dx: &mut [f32],
    x: &[f32],
    g: &[f32],
    width: usize,
    limit: f32,
    accumulate: bool,
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
                    let (a, b, g) = (gate[j].min(limit), up[j].max(-limit).min(limit), g[j]);
                    let s = sigmoid_of(STEEPNESS * a);
                    // What is clamped passes nothing; at the limit itself it does.
                    if gate[j] <= limit {
                        d_gate[j] += g * (b + 1.0) * s * (1.0 + STEEPNESS * a * (1.0 - s));
                    }
                    if up[j].abs() <= limit {
                        d_up[j] += g * a * s;
                    }
                }
            }
        },
    );
}
