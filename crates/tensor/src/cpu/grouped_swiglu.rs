//! SwiGLU experts in one kernel: a block of rows goes through both products while its hidden values are still in cache.

use super::gemm::{Numbers, SET, View, gemm_serial, set_or_add};
use super::grouped::{ExpertRows, TASK_ROWS, pieces, run_tasks, take, tasks};
use super::math::sigmoid;
use super::rows::prefetch;
use super::stored::StoredRef;
use crate::device::Device;

/// Sizes of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Widths {
    pub(crate) outer: usize,
    pub(crate) inner: usize,
}

pub(crate) fn gate_and_up(
    device: &Device,
    kept: &mut [f32],
    x: StoredRef,
    first: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    forward(device, (kept, None), [x.into(), first.into()], counts, widths);
}

pub(crate) fn swiglu_experts(
    device: &Device,
    kept: &mut [f32],
    y: &mut [f32],
    x: StoredRef,
    first: StoredRef,
    second: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    forward(device, (kept, Some((y, second.into()))), [x.into(), first.into()], counts, widths);
}

/// Fills `kept` with gate and up, and `y`, if it is wanted now, with the result by the second weights.
fn forward(
    device: &Device,
    (kept, y): (&mut [f32], Option<(&mut [f32], Numbers)>),
    [x, first]: [Numbers; 2],
    counts: &[usize],
    widths: Widths,
) {
    let Widths { outer, inner } = widths;
    let tasks = tasks(counts, TASK_ROWS);
    let kept = pieces(kept, 2 * inner, &tasks);
    let y = y.map(|(y, second)| (pieces(y, outer, &tasks), second));
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let ExpertRows { expert, rows } = &tasks[i];
            let mut kept = take(&kept[i]);
            let count = rows.len();
            let x = View::of(x.tail(rows.start * outer), count, outer, outer);
            let w = View::of(first.tail(expert * 2 * inner * outer), 2 * inner, outer, outer);
            gemm_serial(&mut kept, 2 * inner, x, w.t(), SET);
            if let Some((y, second)) = &y {
                second_product(device, &mut take(&y[i]), &kept, second.tail(expert * inner * outer), widths);
            }
        },
    );
}

/// The same products of the same blocks of rows as in [`swiglu_experts`].
pub(crate) fn from_gate_and_up(
    device: &Device,
    y: &mut [f32],
    kept: &[f32],
    second: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    let (Widths { outer, inner }, second) = (widths, Numbers::from(second));
    let tasks = tasks(counts, TASK_ROWS);
    let pieces = pieces(y, outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let ExpertRows { expert, rows } = &tasks[i];
            let kept = &kept[rows.start * 2 * inner..rows.end * 2 * inner];
            second_product(device, &mut take(&pieces[i]), kept, second.tail(expert * inner * outer), widths);
        },
    );
}

/// `y = (silu(gate) * up) w^T` for one block of rows and its expert's w `[outer, inner]`.
#[inline(always)]
fn second_product(device: &Device, y: &mut [f32], kept: &[f32], w: Numbers, Widths { outer, inner }: Widths) {
    let count = kept.len() / (2 * inner);
    let mut hidden = device.take_f32(count * inner);
    for (h, line) in hidden.chunks_exact_mut(inner).zip(kept.chunks_exact(2 * inner)) {
        gated(h, line);
    }
    let w = View::of(w, outer, inner, inner);
    gemm_serial(y, outer, View::new(&hidden, count, inner, inner), w.t(), SET);
    device.give_f32(hidden);
}

pub(crate) fn swiglu_experts_back(
    device: &Device,
    kept: &mut [f32],
    hidden: &mut [f32],
    dx: &mut [f32],
    g: &[f32],
    first: StoredRef,
    second: StoredRef,
    counts: &[usize],
    Widths { outer, inner }: Widths,
    accumulate: bool,
) {
    let (first, second) = (Numbers::from(first), Numbers::from(second));
    let tasks = tasks(counts, TASK_ROWS);
    let (kept, hidden) = (pieces(kept, 2 * inner, &tasks), pieces(hidden, inner, &tasks));
    let dx = pieces(dx, outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let ExpertRows { expert, rows } = &tasks[i];
            let (mut kept, mut hidden, mut dx) = (take(&kept[i]), take(&hidden[i]), take(&dx[i]));
            let count = rows.len();
            let g = View::new(&g[rows.start * outer..], count, outer, outer);
            let w = View::of(second.tail(expert * inner * outer), outer, inner, inner);
            gemm_serial(&mut hidden, inner, g, w, SET);
            for (h, line) in hidden.chunks_exact_mut(inner).zip(kept.chunks_exact_mut(2 * inner)) {
                gated_gradient(h, line);
            }
            let w = View::of(first.tail(expert * 2 * inner * outer), 2 * inner, outer, outer);
            gemm_serial(&mut dx, outer, View::new(&kept, count, 2 * inner, 2 * inner), w, set_or_add(accumulate));
        },
    );
}

/// `h = silu(gate) * up`.
#[inline(always)]
fn gated(h: &mut [f32], line: &[f32]) {
    let (gate, up) = line.split_at(h.len());
    for ((h, a), b) in h.iter_mut().zip(gate).zip(up) {
        *h = a * sigmoid(*a) * b;
    }
}

/// `h` comes as its gradient and becomes the value; gate and up become their gradients.
#[inline(always)]
fn gated_gradient(h: &mut [f32], line: &mut [f32]) {
    let (gate, up) = line.split_at_mut(h.len());
    let next = 2 * h.len();
    for ((h, a), b) in h.chunks_mut(32).zip(gate.chunks_mut(32)).zip(up.chunks_mut(32)) {
        for half in [0, 16] {
            prefetch(a.as_ptr().wrapping_add(next + half));
            prefetch(b.as_ptr().wrapping_add(next + half));
        }
        for ((h, a), b) in h.iter_mut().zip(a).zip(b) {
            let (x, y, dh) = (*a, *b, *h);
            let s = sigmoid(x);
            *h = x * s * y;
            *a = dh * y * s * (1.0 + x * (1.0 - s));
            *b = dh * x * s;
        }
    }
}
