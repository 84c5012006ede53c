//! Grouped products: rows sorted by expert, each run of rows times its own expert's weights.
//!
//! Rows of expert e are contiguous and experts come in order, `counts[e]` rows each (possibly none). Work is cut into
//! (expert, block of rows) tasks that threads take as they become free, since ragged experts never divide evenly.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::cpu::gemm::{View, gemm, gemm_serial, set_or_add};
use crate::cpu::rows::simd;
use crate::cpu::stored::Stored;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Rows of one task: enough that packing the expert's weights for it is a few percent.
pub(super) const TASK_ROWS: usize = 512;

/// The rows of one expert, or a block of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) expert: usize,
    pub(super) rows: Range<usize>,
}

/// Where each expert's rows lie.
fn ranges(counts: &[usize]) -> Vec<Range<usize>> {
    counts
        .iter()
        .scan(0, |start, &count| {
            let range = *start..*start + count;
            *start += count;
            Some(range)
        })
        .collect()
}

pub(super) fn tasks(counts: &[usize], block: usize) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (expert, range) in ranges(counts).into_iter().enumerate() {
        let parts = range.len().div_ceil(block);
        let cut = |part: usize| range.start + range.len() * part / parts.max(1);
        tasks.extend((0..parts).map(|part| Task { expert, rows: cut(part)..cut(part + 1) }));
    }
    // Large tasks first: the last ones to finish are then small.
    tasks.sort_by_key(|task| std::cmp::Reverse(task.rows.len()));
    tasks
}

/// Runs every task once, threads taking the next as they become free. Tasks write disjoint memory, so which thread
/// runs which does not change a bit.
pub(super) fn run_tasks(device: &Device, count: usize, f: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    device.for_ranges(device.threads().min(count), 1, |_| {
        simd(
            #[inline(always)]
            || {
                loop {
                    let task = next.fetch_add(1, Ordering::Relaxed);
                    if task >= count {
                        break;
                    }
                    f(task);
                }
            },
        );
    });
}

/// Memory cut into one exclusive piece a task.
pub(super) fn pieces<'a>(data: &'a mut [f32], width: usize, tasks: &[Task]) -> Vec<Mutex<&'a mut [f32]>> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&i| tasks[i].rows.start);
    let mut slots: Vec<Option<&mut [f32]>> = tasks.iter().map(|_| None).collect();
    let (mut rest, mut at) = (data, 0);
    for i in order {
        let Task { rows, .. } = &tasks[i];
        let (_, tail) = std::mem::take(&mut rest).split_at_mut((rows.start - at) * width);
        let (piece, tail) = tail.split_at_mut(rows.len() * width);
        (slots[i], rest, at) = (Some(piece), tail, rows.end);
    }
    slots.into_iter().map(|piece| Mutex::new(piece.expect("every task has a piece"))).collect()
}

/// A task's own piece: nobody else asks for it.
#[inline(always)]
pub(super) fn take<T>(piece: &Mutex<T>) -> MutexGuard<'_, T> {
    piece.try_lock().expect("each task runs once")
}

/// `y[rows of e] = x[rows of e] * (W_e or W_e^T)`.
fn multiply(device: &Device, y: &mut [f32], x: &Tensor, w: &Tensor, counts: &[usize], by_transpose: bool, add: bool) {
    let (inner, outer) = if by_transpose { (w.shape()[2], w.shape()[1]) } else { (w.shape()[1], w.shape()[2]) };
    let size = inner * outer;
    device.count_product(x.rows(), inner, outer);
    let tasks = tasks(counts, TASK_ROWS);
    let pieces = pieces(y, outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let Task { expert, rows } = &tasks[i];
            let mut piece = take(&pieces[i]);
            let x = View::new(&x.f32s()[rows.start * inner..], rows.len(), inner, inner);
            let w = &w.f32s()[expert * size..][..size];
            let w =
                if by_transpose { View::new(w, outer, inner, inner).t() } else { View::new(w, inner, outer, outer) };
            gemm_serial(&mut piece, outer, x, w, set_or_add(add));
        },
    );
}

/// `dW_e (+)= g[rows of e]^T x[rows of e]`; zeros for an expert without rows.
pub(super) fn weight_gradient(
    device: &Arc<Device>,
    dw: Stored,
    g: &Tensor,
    x: &Tensor,
    counts: &[usize],
    accumulate: bool,
) {
    let (outer, inner) = (g.cols(), x.cols());
    let ranges = ranges(counts);
    let one = |together: bool, e: usize, dw: &mut Stored| {
        let rows = &ranges[e];
        if rows.is_empty() {
            if !accumulate {
                dw.set_to_zero();
            }
            return;
        }
        let g = View::new(&g.f32s()[rows.start * outer..], rows.len(), outer, outer).t();
        let x = View::new(&x.f32s()[rows.start * inner..], rows.len(), inner, inner);
        dw.by_rows(device, inner, accumulate, |rows, dw| {
            let (g, how) = (g.at_rows(rows), set_or_add(accumulate));
            if together {
                gemm(device, dw, inner, g, x, how);
            } else {
                device.count_product(g.rows(), x.rows(), inner);
                gemm_serial(dw, inner, g, x, how);
            }
        });
    };
    // Large experts: every thread works on each in turn. The others: an expert a thread.
    let (together, alone) = shared_out(counts, device.threads());
    let slots: Vec<_> = dw.pieces(outer * inner).into_iter().map(Mutex::new).collect();
    together.iter().for_each(|&e| one(true, e, &mut take(&slots[e])));
    run_tasks(
        device,
        alone.len(),
        #[inline(always)]
        |i| one(false, alone[i], &mut take(&slots[alone[i]])),
    );
}

/// Experts that all threads work on together, and experts that one thread does, largest first. Working together costs
/// waiting for each other, so it is for what would otherwise keep one thread busy while others have nothing to do.
fn shared_out(counts: &[usize], threads: usize) -> (Vec<usize>, Vec<usize>) {
    let (all, mut busy) = (counts.iter().sum::<usize>(), vec![0; threads]);
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&e| std::cmp::Reverse(counts[e]));
    for &e in &order {
        let least = busy.iter_mut().min().expect("there is a thread");
        *least += counts[e];
    }
    let longest = busy.into_iter().max().unwrap_or(0);
    // A tenth longer than an even share is less than what working together costs.
    if longest * threads * 10 <= all * 11 {
        return (Vec::new(), order);
    }
    order.into_iter().partition(|&e| counts[e] * threads * 2 > all)
}

impl Var {
    /// `y[rows of e] = x[rows of e] W_e^T + b_e`: x `[R, in]` sorted by expert, w `[E, out, in]`, b `[E, out]`,
    /// `counts[e]` rows of expert e; gives `[R, out]` (Gale et al. 2022; FastMoE, 3.2).
    #[track_caller]
    pub fn grouped_linear(&self, w: &Var, bias: Option<&Var>, counts: &[usize]) -> Var {
        let [experts, outer, inner] = *w.shape() else { panic!("expert weights have three dims, got {:?}", w.shape()) };
        assert!(experts == counts.len() && inner == self.cols(), "x {:?}, w {:?}", self.shape(), w.shape());
        assert_eq!(self.value().rows(), counts.iter().sum::<usize>(), "rows against {counts:?}");
        if let Some(bias) = bias {
            assert_eq!(bias.shape(), [experts, outer], "biases of {experts} experts with {outer} outputs");
        }
        let (device, counts) = (self.device().clone(), counts.to_vec());
        let (x, weight) = (self.value().clone(), w.kept());
        let make = {
            let (x, weight, bias) = (x.clone(), w.value().clone(), bias.map(|bias| bias.value().clone()));
            let (counts, dtype) = (counts.clone(), self.dtype());
            move || product(&x, &weight, bias.as_ref(), &counts).cast(dtype)
        };
        let (shape, dtype) = ([x.rows(), outer], self.dtype());
        let (to_x, to_w, to_bias) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape().late_op("grouped_linear", (&shape, dtype), &inputs, make, move |g, gradients| {
            let weight = weight.tensor();
            if let Some(to_bias) = to_bias {
                gradients.write(&device, to_bias, &[experts, outer], |db, accumulate| {
                    bias_gradient(db, g.f32s(), outer, &counts, accumulate);
                });
            }
            gradients.write_stored(&device, to_w, weight.shape(), |dw, accumulate| {
                weight_gradient(&device, dw, &g, &x.to_f32(), &counts, accumulate);
            });
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                multiply(&device, dx, &g, &weight.to_f32(), &counts, false, accumulate);
            });
        })
    }
}

/// Each expert's rows times its weights, plus its bias; f32.
fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, counts: &[usize]) -> Tensor {
    let (device, outer) = (x.device(), weight.shape()[1]);
    let mut y = Tensor::stale(device, &[x.rows(), outer], Dtype::F32);
    if let Some(bias) = bias {
        fill_bias(y.f32s_mut(), bias.to_f32().f32s(), outer, counts);
    }
    multiply(device, y.f32s_mut(), &x.to_f32(), &weight.to_f32(), counts, true, bias.is_some());
    y
}

fn fill_bias(y: &mut [f32], bias: &[f32], width: usize, counts: &[usize]) {
    for (expert, rows) in ranges(counts).into_iter().enumerate() {
        let bias = &bias[expert * width..][..width];
        y[rows.start * width..rows.end * width].chunks_exact_mut(width).for_each(|line| line.copy_from_slice(bias));
    }
}

fn bias_gradient(db: &mut [f32], g: &[f32], width: usize, counts: &[usize], accumulate: bool) {
    for (expert, rows) in ranges(counts).into_iter().enumerate() {
        let sum = &mut db[expert * width..][..width];
        if !accumulate {
            sum.fill(0.0);
        }
        for line in g[rows.start * width..rows.end * width].chunks_exact(width) {
            sum.iter_mut().zip(line).for_each(|(s, x)| *s += x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_experts_are_done_together() {
        assert_eq!(shared_out(&[5, 5, 5, 5], 2), (vec![], vec![0, 1, 2, 3]));
        assert_eq!(shared_out(&[5, 50, 4, 5], 2), (vec![1], vec![0, 3, 2]));
        assert_eq!(shared_out(&[6, 4], 2), (vec![0, 1], vec![]));
        assert_eq!(shared_out(&[7], 4), (vec![0], vec![]));
        assert_eq!(shared_out(&[0, 9, 0], 1), (vec![], vec![1, 0, 2]));
        assert_eq!(shared_out(&[0, 0], 3), (vec![], vec![0, 1]));
    }

    #[test]
    fn tasks_cover_every_row_once_largest_first() {
        let tasks = tasks(&[0, 1000, 3, 0, 513], TASK_ROWS);
        let mut covered: Vec<usize> = tasks.iter().flat_map(|task| task.rows.clone()).collect();
        covered.sort_unstable();
        assert_eq!(covered, (0..1516).collect::<Vec<_>>());
        assert!(tasks.windows(2).all(|pair| pair[0].rows.len() >= pair[1].rows.len()));
        assert!(tasks.iter().all(|task| task.expert != 0 && task.expert != 3));
    }
}
