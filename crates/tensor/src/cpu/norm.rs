//! RMS norm and layer norm, row by row.

use super::rows::{dot, for_rows, for_rows2, look_ahead, squares_about, sum, sum_over_rows};
use super::stored::{Stored, StoredNumber, StoredRef, as_numbers};
use crate::device::Device;

/// Least rows a thread takes.
const LEAST_ROWS: usize = 64;

pub(crate) fn rms_norm(device: &Device, out: Stored, inverse: &mut [f32], x: StoredRef, w: &[f32], eps: f32) {
    as_numbers!(Stored(out), StoredRef(x) => rms_norm_rows(device, (out, inverse), x, w, eps));
}

fn rms_norm_rows<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    (out, inverse): (&mut [O], &mut [f32]),
    x: &[X],
    w: &[f32],
    eps: f32,
) {
    let width = w.len();
    for_rows2(
        device,
        (out, width),
        (inverse, 1),
        LEAST_ROWS,
        #[inline(always)]
        |first, run, inverse| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let x = &x[(first + i) * width..][..width];
                look_ahead(x);
                look_ahead(line);
                let r = 1.0 / (dot(x, x) / width as f32 + eps).sqrt();
                inverse[i] = r;
                line.iter_mut().zip(x).zip(w).for_each(|((o, x), w)| *o = O::of(x.wide() * r * w));
            }
        },
    );
}

pub(crate) fn rms_norm_back(
    device: &Device,
    dx: &mut [f32],
    x: StoredRef,
    w: &[f32],
    g: &[f32],
    inverse: &[f32],
    accumulate: bool,
) {
    as_numbers!(StoredRef(x) => rms_norm_rows_back(device, dx, x, w, g, inverse, accumulate));
}

fn rms_norm_rows_back<X: StoredNumber>(
    device: &Device,
    dx: &mut [f32],
    x: &[X],
    w: &[f32],
    g: &[f32],
    inverse: &[f32],
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
                let at = (first + i) * width;
                let (x, g, r) = (&x[at..][..width], &g[at..][..width], inverse[first + i]);
                look_ahead(x);
                look_ahead(g);
                look_ahead(line);
                // d/dx of x r w: r (w g - x r^2 mean(x w g)).
                let mean = dot3(x, w, g) / width as f32 * r * r;
                for (((o, x), w), g) in line.iter_mut().zip(x).zip(w).zip(g) {
                    let d = r * (w * g - x.wide() * mean);
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

pub(crate) fn rms_norm_back_weight(device: &Device, dw: &mut [f32], x: StoredRef, g: &[f32], inverse: &[f32]) {
    as_numbers!(StoredRef(x) => back_weight(
        device,
        dw,
        (x, g),
        inverse.len(),
        #[inline(always)]
        |row| {
            let r = inverse[row];
            #[inline(always)]
            move |x| x * r
        },
    ));
}

/// `dw = sum_r normalised(r)(x[r]) g[r]` over so many rows.
fn back_weight<X: StoredNumber, N: Fn(f32) -> f32>(
    device: &Device,
    dw: &mut [f32],
    (x, g): (&[X], &[f32]),
    rows: usize,
    normalised: impl Fn(usize) -> N + Sync,
) {
    let width = dw.len();
    let sums = sum_over_rows(
        device,
        rows,
        width,
        #[inline(always)]
        |rows, sum| {
            for r in rows {
                let (x, g, normalised) = (&x[r * width..][..width], &g[r * width..][..width], normalised(r));
                look_ahead(x);
                look_ahead(g);
                sum.iter_mut().zip(x).zip(g).for_each(|((s, x), g)| *s += normalised(x.wide()) * g);
            }
        },
    );
    dw.copy_from_slice(&sums);
}

pub(crate) fn square_sums(device: &Device, out: &mut [f32], x: &[f32]) {
    let width = x.len() / out.len().max(1);
    for_rows(
        device,
        out,
        1,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, sum) in run.iter_mut().enumerate() {
                let x = &x[(first + i) * width..][..width];
                *sum = dot(x, x);
            }
        },
    );
}

pub(crate) fn square_sums_back(device: &Device, dx: &mut [f32], x: &[f32], g: &[f32], accumulate: bool) {
    let width = (x.len() / g.len().max(1)).max(1);
    for_rows(
        device,
        dx,
        width,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let (x, g) = (&x[(first + i) * width..][..width], 2.0 * g[first + i]);
                line.iter_mut().zip(x).for_each(|(o, x)| *o = if accumulate { *o + x * g } else { x * g });
            }
        },
    );
}

pub(crate) fn rms_norm_of(
    device: &Device,
    out: &mut [f32],
    inverse: &mut [f32],
    x: &[f32],
    squares: &[f32],
    w: &[f32],
    columns: usize,
    eps: f32,
) {
    let width = w.len();
    for_rows2(
        device,
        (out, width),
        (inverse, 1),
        LEAST_ROWS,
        #[inline(always)]
        |first, run, inverse| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let x = &x[(first + i) * width..][..width];
                let r = 1.0 / (squares[first + i] / columns as f32 + eps).sqrt();
                inverse[i] = r;
                line.iter_mut().zip(x).zip(w).for_each(|((o, x), w)| *o = x * r * w);
            }
        },
    );
}

pub(crate) fn rms_norm_of_back(
    device: &Device,
    dx: &mut [f32],
    w: &[f32],
    g: &[f32],
    inverse: &[f32],
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
                let (g, r) = (&g[(first + i) * width..][..width], inverse[first + i]);
                for ((o, w), g) in line.iter_mut().zip(w).zip(g) {
                    *o = if accumulate { *o + r * w * g } else { r * w * g };
                }
            }
        },
    );
}

pub(crate) fn rms_norm_of_back_squares(
    device: &Device,
    ds: &mut [f32],
    x: &[f32],
    w: &[f32],
    g: &[f32],
    inverse: &[f32],
    columns: usize,
    accumulate: bool,
) {
    let width = w.len();
    for_rows(
        device,
        ds,
        1,
        LEAST_ROWS,
        #[inline(always)]
        |first, run| {
            for (i, o) in run.iter_mut().enumerate() {
                let (at, r) = ((first + i) * width, inverse[first + i]);
                let d = dot3(&x[at..][..width], w, &g[at..][..width]) * (-0.5 / columns as f32) * r * r * r;
                *o = if accumulate { *o + d } else { d };
            }
        },
    );
}

pub(crate) fn layer_norm(
    device: &Device,
    out: Stored,
    moments: &mut [f32],
    x: StoredRef,
    w: &[f32],
    b: &[f32],
    eps: f32,
) {
    as_numbers!(Stored(out), StoredRef(x) => layer_norm_rows(device, (out, moments), x, [w, b], eps));
}

fn layer_norm_rows<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    (out, moments): (&mut [O], &mut [f32]),
    x: &[X],
    [w, b]: [&[f32]; 2],
    eps: f32,
) {
    let width = w.len();
    for_rows2(
        device,
        (out, width),
        (moments, 2),
        LEAST_ROWS,
        #[inline(always)]
        |first, run, moments| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let x = &x[(first + i) * width..][..width];
                look_ahead(x);
                look_ahead(line);
                let mean = sum(x) / width as f32;
                let variance = squares_about(x, mean) / width as f32;
                let r = 1.0 / (variance + eps).sqrt();
                (moments[2 * i], moments[2 * i + 1]) = (mean, r);
                for (((o, x), w), b) in line.iter_mut().zip(x).zip(w).zip(b) {
                    *o = O::of((x.wide() - mean) * r * w + b);
                }
            }
        },
    );
}

pub(crate) fn layer_norm_back(
    device: &Device,
    dx: &mut [f32],
    x: StoredRef,
    w: &[f32],
    g: &[f32],
    moments: &[f32],
    accumulate: bool,
) {
    as_numbers!(StoredRef(x) => layer_norm_rows_back(device, dx, x, w, g, moments, accumulate));
}

fn layer_norm_rows_back<X: StoredNumber>(
    device: &Device,
    dx: &mut [f32],
    x: &[X],
    w: &[f32],
    g: &[f32],
    moments: &[f32],
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
                let row = first + i;
                let (mean, r) = (moments[2 * row], moments[2 * row + 1]);
                let (x, g) = (&x[row * width..][..width], &g[row * width..][..width]);
                look_ahead(x);
                look_ahead(g);
                look_ahead(line);
                // With n the normalised row: r (w g - mean(w g) - n mean(w g n)).
                let plain = dot(w, g) / width as f32;
                let along = (dot3(x, w, g) - mean * plain * width as f32) * r / width as f32;
                for (((o, x), w), g) in line.iter_mut().zip(x).zip(w).zip(g) {
                    let d = r * (w * g - plain - (x.wide() - mean) * r * along);
                    *o = if accumulate { *o + d } else { d };
                }
            }
        },
    );
}

pub(crate) fn layer_norm_back_weight(device: &Device, dw: &mut [f32], x: StoredRef, g: &[f32], moments: &[f32]) {
    as_numbers!(StoredRef(x) => back_weight(
        device,
        dw,
        (x, g),
        moments.len() / 2,
        #[inline(always)]
        |row| {
            let (mean, r) = (moments[2 * row], moments[2 * row + 1]);
            #[inline(always)]
            move |x| (x - mean) * r
        },
    ));
}

/// `sum_i x_i y_i z_i` in sixteen independent sums.
#[inline(always)]
fn dot3<X: StoredNumber>(x: &[X], y: &[f32], z: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let n = x.len() / 16 * 16;
    for i in (0..n).step_by(16) {
        for lane in 0..16 {
            lanes[lane] = (x[i + lane].wide() * y[i + lane]).mul_add(z[i + lane], lanes[lane]);
        }
    }
    let rest: f32 = (n..x.len()).map(|i| x[i].wide() * y[i] * z[i]).sum();
    rest + lanes.iter().sum::<f32>()
}
