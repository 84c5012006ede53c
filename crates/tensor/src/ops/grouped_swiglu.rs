//! SwiGLU experts in one op: `y = (silu(x G^T) * (x U^T)) D^T` for rows sorted by expert.
//!
//! A block of rows goes through both products while its hidden values are still in cache. Only the gate and up
//! values are kept; backward computes their product again, which costs an exponential an element and saves a third
//! of an MoE layer's activations.

use super::grouped::{TASK_ROWS, Task, pieces, run_tasks, take, tasks, weight_gradient};
use crate::cpu::gemm::{SET, View, gemm_serial, set_or_add};
use crate::cpu::math::sigmoid;
use crate::cpu::rows::prefetch;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Sizes of the experts.
#[derive(Clone, Copy)]
struct Widths {
    outer: usize,
    inner: usize,
}

impl Var {
    /// Rows `[R, D]` sorted by expert, `counts[e]` of each; gate_up `[E, 2 F, D]`, each expert's gate above its up;
    /// down `[E, D, F]`; gives `[R, D]` (Shazeer 2020, one expert a group).
    #[track_caller]
    pub fn grouped_swiglu(&self, gate_up: &Var, down: &Var, counts: &[usize]) -> Var {
        let [experts, both, outer] = *gate_up.shape() else { panic!("gate_up of shape {:?}", gate_up.shape()) };
        let widths = Widths { outer, inner: both / 2 };
        assert_eq!(down.shape(), [experts, outer, widths.inner], "down against gate_up {:?}", gate_up.shape());
        assert!(experts == counts.len() && self.cols() == outer, "x {:?}, {counts:?}", self.shape());
        assert_eq!(self.value().rows(), counts.iter().sum::<usize>(), "rows against {counts:?}");
        let (device, counts) = (self.device().clone(), counts.to_vec());
        let (x, first, second) = (self.value().clone(), gate_up.kept(), down.kept());
        let mut kept = Tensor::stale(&device, &[x.rows(), both], Dtype::F32);
        let mut y = (!self.tape().is_late()).then(|| Tensor::stale(&device, &[x.rows(), outer], Dtype::F32));
        let weights = [gate_up, down].map(|w| w.value().to_f32());
        forward(&device, [&x.to_f32(), &weights[0], &weights[1]], (&mut kept, y.as_mut()), &counts, widths);
        let (shape, dtype) = ([x.rows(), outer], self.dtype());
        let make: Box<dyn FnOnce() -> Tensor> = match y {
            Some(y) => Box::new(move || y.cast(dtype)),
            None => {
                let (kept, second, counts) = (kept.clone(), down.value().clone(), counts.clone());
                Box::new(move || from_kept(&kept, &second.to_f32(), &counts, widths).cast(dtype))
            }
        };
        let kept = kept.cast(self.dtype());
        let (to_x, to_first, to_second) = (self.input(), gate_up.input(), down.input());
        self.tape().late_op("grouped_swiglu", (&shape, dtype), &[self, gate_up, down], make, move |g, gradients| {
            let (x, mut kept) = (x.to_f32(), kept.into_f32());
            let (first, second) = (first.tensor(), second.tensor());
            let mut hidden = Tensor::stale(&device, &[x.rows(), widths.inner], Dtype::F32);
            let mut go_back = |dx: &mut [f32], accumulate| {
                let weights = [&first.to_f32(), &second.to_f32()];
                backward(&device, &g, weights, (&mut kept, &mut hidden, dx), accumulate, &counts);
            };
            if gradients.wants(to_x) {
                gradients.write(&device, to_x, x.shape(), go_back);
            } else {
                // The weights' gradients need what going back leaves in `kept` and `hidden`.
                go_back(Tensor::stale(&device, x.shape(), Dtype::F32).f32s_mut(), false);
            }
            gradients.write_stored(&device, to_second, second.shape(), |dw, accumulate| {
                weight_gradient(&device, dw, &g, &hidden, &counts, accumulate);
            });
            gradients.write_stored(&device, to_first, first.shape(), |dw, accumulate| {
                weight_gradient(&device, dw, &kept, &x, &counts, accumulate);
            });
        })
    }
}

/// Fills `kept` with gate and up, and `y`, if it is wanted now, with the result.
fn forward(
    device: &Device,
    [x, first, second]: [&Tensor; 3],
    (kept, y): (&mut Tensor, Option<&mut Tensor>),
    counts: &[usize],
    widths: Widths,
) {
    let Widths { outer, inner } = widths;
    let tasks = tasks(counts, TASK_ROWS);
    device.count_product(x.rows(), outer, 2 * inner);
    let kept = pieces(kept.f32s_mut(), 2 * inner, &tasks);
    let y = y.map(|y| {
        device.count_product(x.rows(), inner, outer);
        pieces(y.f32s_mut(), outer, &tasks)
    });
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let Task { expert, rows } = &tasks[i];
            let mut kept = take(&kept[i]);
            let count = rows.len();
            let x = View::new(&x.f32s()[rows.start * outer..], count, outer, outer);
            let w = View::new(&first.f32s()[expert * 2 * inner * outer..], 2 * inner, outer, outer);
            gemm_serial(&mut kept, 2 * inner, x, w.t(), SET);
            if let Some(y) = &y {
                second_product(device, &mut take(&y[i]), &kept, &second.f32s()[expert * inner * outer..], widths);
            }
        },
    );
}

/// The result from gate and up alone: the same products of the same blocks of rows.
fn from_kept(kept: &Tensor, second: &Tensor, counts: &[usize], widths: Widths) -> Tensor {
    let (device, Widths { outer, inner }) = (kept.device(), widths);
    let mut y = Tensor::stale(device, &[kept.rows(), outer], Dtype::F32);
    device.count_product(kept.rows(), inner, outer);
    let tasks = tasks(counts, TASK_ROWS);
    let pieces = pieces(y.f32s_mut(), outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let Task { expert, rows } = &tasks[i];
            let kept = &kept.f32s()[rows.start * 2 * inner..rows.end * 2 * inner];
            second_product(device, &mut take(&pieces[i]), kept, &second.f32s()[expert * inner * outer..], widths);
        },
    );
    drop(pieces);
    y
}

/// `y = (silu(gate) * up) w^T` for one block of rows and its expert's w `[outer, inner]`.
#[inline(always)]
fn second_product(device: &Device, y: &mut [f32], kept: &[f32], w: &[f32], Widths { outer, inner }: Widths) {
    let count = kept.len() / (2 * inner);
    let mut hidden = device.take_f32(count * inner);
    for (h, line) in hidden.chunks_exact_mut(inner).zip(kept.chunks_exact(2 * inner)) {
        gated(h, line);
    }
    let w = View::new(w, outer, inner, inner);
    gemm_serial(y, outer, View::new(&hidden, count, inner, inner), w.t(), SET);
    device.give_f32(hidden);
}

/// Turns `kept` into its own gradient, fills `hidden` with the gated products and `dx` with the rows' gradient.
fn backward(
    device: &Device,
    g: &Tensor,
    [first, second]: [&Tensor; 2],
    (kept, hidden, dx): (&mut Tensor, &mut Tensor, &mut [f32]),
    accumulate: bool,
    counts: &[usize],
) {
    let (outer, inner) = (g.cols(), hidden.cols());
    device.count_product(g.rows(), outer, inner);
    device.count_product(g.rows(), 2 * inner, outer);
    let tasks = tasks(counts, TASK_ROWS);
    let (kept, hidden) = (pieces(kept.f32s_mut(), 2 * inner, &tasks), pieces(hidden.f32s_mut(), inner, &tasks));
    let dx = pieces(dx, outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let Task { expert, rows } = &tasks[i];
            let (mut kept, mut hidden, mut dx) = (take(&kept[i]), take(&hidden[i]), take(&dx[i]));
            let count = rows.len();
            let g = View::new(&g.f32s()[rows.start * outer..], count, outer, outer);
            let w = View::new(&second.f32s()[expert * inner * outer..], outer, inner, inner);
            gemm_serial(&mut hidden, inner, g, w, SET);
            for (h, line) in hidden.chunks_exact_mut(inner).zip(kept.chunks_exact_mut(2 * inner)) {
                gated_gradient(h, line);
            }
            let w = View::new(&first.f32s()[expert * 2 * inner * outer..], 2 * inner, outer, outer);
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
