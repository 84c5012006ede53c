//! Softmax and log-sum-exp, row by row.

use super::math::exp;
use super::rows::{dot, for_rows, largest, sum};
use crate::device::Device;

pub(crate) fn softmax(device: &Device, out: &mut [f32], x: &[f32], width: usize) {
    for_rows(
        device,
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                softmax_row(line, &x[(first + i) * width..][..width]);
            }
        },
    );
}

pub(crate) fn softmax_back(device: &Device, dx: &mut [f32], y: &[f32], g: &[f32], width: usize, accumulate: bool) {
    for_rows(
        device,
        dx,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let at = (first + i) * width;
                let (y, g) = (&y[at..][..width], &g[at..][..width]);
                let inner = dot(y, g);
                for ((o, y), g) in line.iter_mut().zip(y).zip(g) {
                    let d = y * (g - inner);
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

pub(crate) fn log_sum_exp(device: &Device, lse: &mut [f32], x: &[f32], width: usize) {
    for_rows(
        device,
        lse,
        1,
        64,
        #[inline(always)]
        |first, run| {
            for (lse, x) in run.iter_mut().zip(x[first * width..].chunks_exact(width)) {
                let top = largest(x, f32::NEG_INFINITY);
                let mut sum = 0.0;
                for x in x {
                    sum += exp(x - top);
                }
                *lse = top + sum.ln();
            }
        },
    );
}

pub(crate) fn weighted_squares(_: &Device, out: &mut [f32], lse: &[f32], weights: &[f32]) {
    let total: f64 = lse.iter().zip(weights).map(|(l, w)| f64::from(*l) * f64::from(*l) * f64::from(*w)).sum();
    out[0] = total as f32;
}

pub(crate) fn weighted_squares_back(
    device: &Device,
    dx: &mut [f32],
    x: &[f32],
    lse: &[f32],
    weights: &[f32],
    g: &[f32],
    width: usize,
    accumulate: bool,
) {
    for_rows(
        device,
        dx,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let r = first + i;
                let factor = 2.0 * lse[r] * weights[r] * g[0];
                for (o, x) in line.iter_mut().zip(&x[r * width..]) {
                    let d = factor * exp(x - lse[r]);
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

#[inline(always)]
fn softmax_row(out: &mut [f32], x: &[f32]) {
    let top = largest(x, f32::NEG_INFINITY);
    out.iter_mut().zip(x).for_each(|(o, x)| *o = exp(x - top));
    let inverse = 1.0 / sum(out);
    out.iter_mut().for_each(|o| *o *= inverse);
}
