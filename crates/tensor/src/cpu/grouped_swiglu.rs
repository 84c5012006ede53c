//! SwiGLU experts in one kernel: a block of rows goes through both products while its hidden values are still in cache.
//!
//! Gate, up and hidden values are of the type of the rows; the gradient of hidden values, which lives within a task, is
//! f32.

use half::bf16;

use super::gemm::{Numbers, SET, SumElement, View, gemm_serial, set_or_add};
use super::grouped::{ExpertRows, TASK_ROWS, pieces, run_tasks, take, tasks};
use super::math::sigmoid;
use super::rows::prefetch;
use super::stored::{Stored, StoredNumber, StoredRef};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::elements::Elements;

/// Sizes of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Widths {
    pub(crate) outer: usize,
    pub(crate) inner: usize,
}

/// A type of gate, up and hidden values.
trait SwigluValue: StoredNumber + SumElement {
    fn numbers(values: &[Self]) -> Numbers<'_>;

    /// Memory for at least so many, to be given back.
    fn take(device: &Device, len: usize) -> Vec<Self>;

    fn give(device: &Device, values: Vec<Self>);
}

impl SwigluValue for f32 {
    fn numbers(values: &[f32]) -> Numbers<'_> {
        Numbers::F32(values)
    }

    fn take(device: &Device, len: usize) -> Vec<f32> {
        device.take_f32(len)
    }

    fn give(device: &Device, values: Vec<f32>) {
        device.give_f32(values);
    }
}

impl SwigluValue for bf16 {
    fn numbers(values: &[bf16]) -> Numbers<'_> {
        Numbers::Bf16(values)
    }

    fn take(device: &Device, len: usize) -> Vec<bf16> {
        match device.take(Dtype::Bf16, len) {
            Elements::Bf16(values) => values,
            _ => unreachable!("memory is of the type that was asked for"),
        }
    }

    fn give(device: &Device, values: Vec<bf16>) {
        device.give(Elements::Bf16(values));
    }
}

#[cold]
fn not_of_one_type() -> ! {
    panic!("gate, up and hidden values and results are of one type")
}

pub(crate) fn gate_and_up(
    device: &Device,
    kept: Stored,
    x: StoredRef,
    first: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    let factors = [x.into(), first.into()];
    match kept {
        Stored::F32(kept) => forward(device, (kept, None), factors, counts, widths),
        Stored::Bf16(kept) => forward(device, (kept, None), factors, counts, widths),
        Stored::U32(_) => not_of_one_type(),
    }
}

pub(crate) fn swiglu_experts(
    device: &Device,
    kept: Stored,
    y: Stored,
    x: StoredRef,
    first: StoredRef,
    second: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    let (factors, second) = ([x.into(), first.into()], second.into());
    match (kept, y) {
        (Stored::F32(kept), Stored::F32(y)) => forward(device, (kept, Some((y, second))), factors, counts, widths),
        (Stored::Bf16(kept), Stored::Bf16(y)) => forward(device, (kept, Some((y, second))), factors, counts, widths),
        _ => not_of_one_type(),
    }
}

/// Fills `kept` with gate and up, and `y`, if it is wanted now, with the result by the second weights.
fn forward<T: SwigluValue>(
    device: &Device,
    (kept, y): (&mut [T], Option<(&mut [T], Numbers)>),
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
            gemm_serial(device, &mut kept, 2 * inner, x, w.t(), SET);
            if let Some((y, second)) = &y {
                second_product(device, &mut take(&y[i]), &kept, second.tail(expert * inner * outer), widths);
            }
        },
    );
}

/// The same products of the same blocks of rows as in [`swiglu_experts`].
pub(crate) fn from_gate_and_up(
    device: &Device,
    y: Stored,
    kept: StoredRef,
    second: StoredRef,
    counts: &[usize],
    widths: Widths,
) {
    match (y, kept) {
        (Stored::F32(y), StoredRef::F32(kept)) => results(device, y, kept, second.into(), counts, widths),
        (Stored::Bf16(y), StoredRef::Bf16(kept)) => results(device, y, kept, second.into(), counts, widths),
        _ => not_of_one_type(),
    }
}

fn results<T: SwigluValue>(
    device: &Device,
    y: &mut [T],
    kept: &[T],
    second: Numbers,
    counts: &[usize],
    widths: Widths,
) {
    let Widths { outer, inner } = widths;
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
fn second_product<T: SwigluValue>(
    device: &Device,
    y: &mut [T],
    kept: &[T],
    w: Numbers,
    Widths { outer, inner }: Widths,
) {
    let count = kept.len() / (2 * inner);
    let mut hidden = T::take(device, count * inner);
    for (h, line) in hidden.chunks_exact_mut(inner).zip(kept.chunks_exact(2 * inner)) {
        gated(h, line);
    }
    let w = View::of(w, outer, inner, inner);
    gemm_serial(device, y, outer, View::of(T::numbers(&hidden), count, inner, inner), w.t(), SET);
    T::give(device, hidden);
}

pub(crate) fn swiglu_experts_back(
    device: &Device,
    kept: Stored,
    hidden: Stored,
    dx: &mut [f32],
    g: StoredRef,
    first: StoredRef,
    second: StoredRef,
    counts: &[usize],
    widths: Widths,
    accumulate: bool,
) {
    let (g, weights) = (g.into(), [first.into(), second.into()]);
    match (kept, hidden) {
        (Stored::F32(kept), Stored::F32(hidden)) => {
            backward(device, (kept, hidden, dx), g, weights, counts, widths, accumulate);
        }
        (Stored::Bf16(kept), Stored::Bf16(hidden)) => {
            backward(device, (kept, hidden, dx), g, weights, counts, widths, accumulate);
        }
        _ => not_of_one_type(),
    }
}

fn backward<T: SwigluValue>(
    device: &Device,
    (kept, hidden, dx): (&mut [T], &mut [T], &mut [f32]),
    g: Numbers,
    [first, second]: [Numbers; 2],
    counts: &[usize],
    Widths { outer, inner }: Widths,
    accumulate: bool,
) {
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
            let g = View::of(g.tail(rows.start * outer), count, outer, outer);
            let w = View::of(second.tail(expert * inner * outer), outer, inner, inner);
            let mut slopes = device.take_f32(count * inner);
            gemm_serial(device, &mut slopes, inner, g, w, SET);
            let lines = hidden.chunks_exact_mut(inner).zip(kept.chunks_exact_mut(2 * inner));
            for ((h, line), slopes) in lines.zip(slopes.chunks_exact(inner)) {
                gated_gradient(h, line, slopes);
            }
            device.give_f32(slopes);
            let w = View::of(first.tail(expert * 2 * inner * outer), 2 * inner, outer, outer);
            let kept = View::of(T::numbers(&kept), count, 2 * inner, 2 * inner);
            gemm_serial(device, &mut dx, outer, kept, w, set_or_add(accumulate));
        },
    );
}

/// `h = silu(gate) * up`.
#[inline(always)]
fn gated<T: StoredNumber>(h: &mut [T], line: &[T]) {
    let (gate, up) = line.split_at(h.len());
    for ((h, a), b) in h.iter_mut().zip(gate).zip(up) {
        let a = a.wide();
        *h = T::of(a * sigmoid(a) * b.wide());
    }
}

/// `h` becomes the hidden values, of which `slopes` is the gradient; gate and up become their gradients.
#[inline(always)]
fn gated_gradient<T: StoredNumber>(h: &mut [T], line: &mut [T], slopes: &[f32]) {
    let (gate, up) = line.split_at_mut(h.len());
    let next = 2 * h.len();
    let blocks = h.chunks_mut(32).zip(slopes.chunks(32)).zip(gate.chunks_mut(32).zip(up.chunks_mut(32)));
    for ((h, slopes), (a, b)) in blocks {
        for half in (0..32).step_by(64 / size_of::<T>()) {
            prefetch(a.as_ptr().wrapping_add(next + half).cast());
            prefetch(b.as_ptr().wrapping_add(next + half).cast());
        }
        for ((h, dh), (a, b)) in h.iter_mut().zip(slopes).zip(a.iter_mut().zip(b)) {
            let (x, y) = (a.wide(), b.wide());
            let s = sigmoid(x);
            *h = T::of(x * s * y);
            *a = T::of(dh * y * s * (1.0 + x * (1.0 - s)));
            *b = T::of(dh * x * s);
        }
    }
}
