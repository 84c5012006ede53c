//! The inverse of a norm, row by row.

use super::rows::{dot, for_rows, squares_about, sum, sum_over_rows};
use crate::device::Device;
use crate::ops::NormMoments;

/// Least rows a thread takes.
const LEAST_ROWS: usize = 64;

pub(crate) fn row_moments(device: &Device, out: &mut [f32], x: &[f32], width: usize, kind: NormMoments, eps: f32) {
    for_rows(
        device,
        out,
        2,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, moments) in run.chunks_exact_mut(2).enumerate() {
                let x = &x[(first + i) * width..][..width];
                let mean = match kind {
                    NormMoments::Centred => sum(x) / width as f32,
                    NormMoments::Plain => 0.0,
                };
                let squares = match kind {
                    NormMoments::Centred => squares_about(x, mean),
                    NormMoments::Plain => dot(x, x),
                };
                moments[0] = mean;
                moments[1] = (squares / width as f32 + eps).sqrt();
            }
        },
    );
}

/// d mean / dx is 1 / D, and d deviation / dx is (x - mean) / (D deviation).
pub(crate) fn row_moments_back(
    device: &Device,
    dx: &mut [f32],
    x: &[f32],
    moments: &[f32],
    g: &[f32],
    width: usize,
    kind: NormMoments,
    accumulate: bool,
) {
    for_rows(
        device,
        dx,
        width,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let row = first + i;
                let (m, g, x) = (&moments[2 * row..][..2], &g[2 * row..][..2], &x[row * width..][..width]);
                let of_mean = if kind == NormMoments::Centred { g[0] / width as f32 } else { 0.0 };
                let of_deviation = g[1] / (width as f32 * m[1]);
                for (o, x) in line.iter_mut().zip(x) {
                    let d = of_mean + of_deviation * (x - m[0]);
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

pub(crate) fn denormalise(device: &Device, out: &mut [f32], x: &[f32], moments: &[f32], w: &[f32], b: &[f32]) {
    let width = w.len();
    for_rows(
        device,
        out,
        width,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let row = first + i;
                let (m, x) = (&moments[2 * row..][..2], &x[row * width..][..width]);
                for (((o, x), w), b) in line.iter_mut().zip(x).zip(w).zip(b) {
                    *o = (x - b) / w * m[1] + m[0];
                }
            }
        },
    );
}

pub(crate) fn denormalise_back(
    device: &Device,
    dx: &mut [f32],
    moments: &[f32],
    w: &[f32],
    g: &[f32],
    accumulate: bool,
) {
    let width = w.len();
    for_rows(
        device,
        dx,
        width,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let (deviation, g) = (moments[2 * (first + i) + 1], &g[(first + i) * width..][..width]);
                for ((o, w), g) in line.iter_mut().zip(w).zip(g) {
                    let d = g * deviation / w;
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

pub(crate) fn denormalise_back_moments(device: &Device, dm: &mut [f32], x: &[f32], w: &[f32], b: &[f32], g: &[f32]) {
    let width = w.len();
    for_rows(
        device,
        dm,
        2,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, dm) in run.chunks_exact_mut(2).enumerate() {
                let at = (first + i) * width;
                let (x, g) = (&x[at..][..width], &g[at..][..width]);
                dm[0] = g.iter().sum();
                dm[1] = x.iter().zip(w).zip(b).zip(g).map(|(((x, w), b), g)| g * (x - b) / w).sum();
            }
        },
    );
}

pub(crate) fn denormalise_back_affine(
    device: &Device,
    dw: &mut [f32],
    db: &mut [f32],
    x: &[f32],
    moments: &[f32],
    w: &[f32],
    b: &[f32],
    g: &[f32],
) {
    let width = w.len();
    let sums = sum_over_rows(
        device,
        moments.len() / 2,
        2 * width,
        #[inline(always)]
        |rows, sum| {
            let (dw, db) = sum.split_at_mut(width);
            for row in rows {
                let (deviation, x, g) = (moments[2 * row + 1], &x[row * width..][..width], &g[row * width..][..width]);
                for i in 0..width {
                    let d = g[i] * deviation / w[i];
                    db[i] -= d;
                    dw[i] -= d * (x[i] - b[i]) / w[i];
                }
            }
        },
    );
    dw.copy_from_slice(&sums[..width]);
    db.copy_from_slice(&sums[width..]);
}
