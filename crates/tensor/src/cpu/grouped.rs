//! Grouped products: rows sorted by expert, each run of rows times its own expert's weights.
//!
//! Work is cut into (expert, block of rows) tasks that threads take as they become free, since ragged experts never
//! divide evenly.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use super::gemm::{Numbers, SumElement, View, gemm, gemm_serial, set_or_add};
use super::rows::simd;
use super::stored::{Stored, StoredRef};
use crate::device::Device;

/// Rows of one task: enough that packing the expert's weights for it is a few percent.
pub(crate) const TASK_ROWS: usize = 512;

/// The rows of one expert, or a block of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpertRows {
    pub(crate) expert: usize,
    pub(crate) rows: Range<usize>,
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

pub(crate) fn tasks(counts: &[usize], block: usize) -> Vec<ExpertRows> {
    let mut tasks = Vec::new();
    for (expert, range) in ranges(counts).into_iter().enumerate() {
        let parts = range.len().div_ceil(block);
        let cut = |part: usize| range.start + range.len() * part / parts.max(1);
        tasks.extend((0..parts).map(|part| ExpertRows { expert, rows: cut(part)..cut(part + 1) }));
    }
    // Large tasks first: the last ones to finish are then small.
    tasks.sort_by_key(|task| std::cmp::Reverse(task.rows.len()));
    tasks
}

/// Runs every task once, threads taking the next as they become free. Tasks write disjoint memory, so which thread
/// runs which does not change a bit.
pub(crate) fn run_tasks(device: &Device, count: usize, f: impl Fn(usize) + Sync) {
    device.share(0..count, |task| {
        simd(
            #[inline(always)]
            || f(task),
        );
    });
}

/// Memory cut into one exclusive piece a task.
pub(crate) fn pieces<'a, T>(data: &'a mut [T], width: usize, tasks: &[ExpertRows]) -> Vec<Mutex<&'a mut [T]>> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&i| tasks[i].rows.start);
    let mut slots: Vec<Option<&mut [T]>> = tasks.iter().map(|_| None).collect();
    let (mut rest, mut at) = (data, 0);
    for i in order {
        let ExpertRows { rows, .. } = &tasks[i];
        let (_, tail) = std::mem::take(&mut rest).split_at_mut((rows.start - at) * width);
        let (piece, tail) = tail.split_at_mut(rows.len() * width);
        (slots[i], rest, at) = (Some(piece), tail, rows.end);
    }
    slots.into_iter().map(|piece| Mutex::new(piece.expect("every task has a piece"))).collect()
}

/// A task's own piece: nobody else asks for it.
#[inline(always)]
pub(crate) fn take<T>(piece: &Mutex<T>) -> MutexGuard<'_, T> {
    piece.try_lock().expect("each task runs once")
}

pub(crate) fn grouped_multiply(
    device: &Device,
    y: Stored,
    x: StoredRef,
    w: StoredRef,
    counts: &[usize],
    w_dims: [usize; 2],
    by_transpose: bool,
    accumulate: bool,
) {
    let factors = (x.into(), w.into());
    match y {
        Stored::F32(y) => multiply_groups(device, y, factors, counts, (w_dims, by_transpose), accumulate),
        Stored::Bf16(y) => multiply_groups(device, y, factors, counts, (w_dims, by_transpose), accumulate),
        Stored::U32(_) => unreachable!("products are no indices"),
    }
}

fn multiply_groups<T: SumElement>(
    device: &Device,
    y: &mut [T],
    (x, w): (Numbers, Numbers),
    counts: &[usize],
    ([w_rows, w_cols], by_transpose): ([usize; 2], bool),
    accumulate: bool,
) {
    let (inner, outer) = if by_transpose { (w_cols, w_rows) } else { (w_rows, w_cols) };
    let size = inner * outer;
    let tasks = tasks(counts, TASK_ROWS);
    let pieces = pieces(y, outer, &tasks);
    run_tasks(
        device,
        tasks.len(),
        #[inline(always)]
        |i| {
            let ExpertRows { expert, rows } = &tasks[i];
            let mut piece = take(&pieces[i]);
            let x = View::of(x.tail(rows.start * inner), rows.len(), inner, inner);
            let w = w.tail(expert * size);
            let w = if by_transpose { View::of(w, outer, inner, inner).t() } else { View::of(w, inner, outer, outer) };
            gemm_serial(device, &mut piece, outer, x, w, set_or_add(accumulate));
        },
    );
}

/// Experts of many rows are done by all threads one after the other, the rest an expert a thread, each with a piece of
/// `scratch` of its own.
pub(crate) fn grouped_weight_gradient(
    device: &Device,
    dw: Stored,
    scratch: &mut [f32],
    g: StoredRef,
    x: StoredRef,
    counts: &[usize],
    [outer, inner]: [usize; 2],
    accumulate: bool,
) {
    let (ranges, g, x) = (ranges(counts), Numbers::from(g), Numbers::from(x));
    let one = |together: bool, e: usize, dw: &mut Stored, scratch: &mut [f32]| {
        let rows = &ranges[e];
        if rows.is_empty() {
            if !accumulate {
                dw.set_to_zero();
            }
            return;
        }
        let g = View::of(g.tail(rows.start * outer), rows.len(), outer, outer).t();
        let x = View::of(x.tail(rows.start * inner), rows.len(), inner, inner);
        dw.by_rows(device, (inner, accumulate), scratch, |rows, dw| {
            let (g, how) = (g.at_rows(rows), set_or_add(accumulate));
            if together {
                gemm(device, dw, inner, g, x, how);
            } else {
                gemm_serial(device, dw, inner, g, x, how);
            }
        });
    };
    let (together, alone) = shared_out(counts, device.threads());
    let slots: Vec<_> = dw.pieces(outer * inner).into_iter().map(Mutex::new).collect();
    together.iter().for_each(|&e| one(true, e, &mut take(&slots[e]), scratch));
    let size = scratch.len() / device.threads().min(counts.len()).max(1);
    let free: Mutex<Vec<&mut [f32]>> = Mutex::new(scratch.chunks_mut(size.max(1)).collect());
    let free = || free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    run_tasks(
        device,
        alone.len(),
        #[inline(always)]
        |i| {
            let (e, own) = (alone[i], free().pop());
            let mut dw = take(&slots[e]);
            match own {
                Some(own) => {
                    one(false, e, &mut dw, own);
                    free().push(own);
                }
                None if size == 0 => one(false, e, &mut dw, &mut []),
                // With threads of other ranks there are more than pieces.
                None => {
                    let mut more = device.take_f32(size);
                    one(false, e, &mut dw, &mut more);
                    device.give_f32(more);
                }
            }
        },
    );
}

pub(crate) fn grouped_fill(_: &Device, y: Stored, bias: StoredRef, counts: &[usize]) {
    match (y, bias) {
        (Stored::F32(y), StoredRef::F32(bias)) => fill_groups(y, bias, counts),
        (Stored::Bf16(y), StoredRef::Bf16(bias)) => fill_groups(y, bias, counts),
        _ => unreachable!("biases are of their rows' type"),
    }
}

fn fill_groups<T: Copy>(y: &mut [T], bias: &[T], counts: &[usize]) {
    let width = bias.len() / counts.len().max(1);
    for (expert, rows) in ranges(counts).into_iter().enumerate() {
        let bias = &bias[expert * width..][..width];
        y[rows.start * width..rows.end * width].chunks_exact_mut(width).for_each(|line| line.copy_from_slice(bias));
    }
}

pub(crate) fn grouped_bias_gradient(_: &Device, db: &mut [f32], g: &[f32], counts: &[usize], accumulate: bool) {
    let width = db.len() / counts.len().max(1);
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
