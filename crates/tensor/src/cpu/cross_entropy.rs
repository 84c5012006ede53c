//! From logits to losses and their gradients, block by block of rows. Of each row a part of the classes knows its own
//! top, sum and target's logit; joined over the parts, they give every part its share of the softmax.

use std::ops::Range;

use super::math::exp;
use super::rows::{for_rows, for_rows2, largest};
use crate::device::Device;

/// Targets that do not count.
const IGNORE: u32 = u32::MAX;

/// What some classes' logits of a row say about its loss.
#[derive(Clone, Copy)]
struct Statistics {
    /// The largest logit.
    top: f32,
    /// Of `exp(logit - top)`.
    sum: f32,
    /// The target's logit; 0 where the target is another part's.
    target: f32,
}

impl Statistics {
    /// Of no classes.
    const NONE: [f32; 3] = [f32::NEG_INFINITY, 0.0, 0.0];

    fn of(&[top, sum, target]: &[f32; 3]) -> Statistics {
        Statistics { top, sum, target }
    }

    /// Those of both parts' classes together.
    fn join(self, other: Statistics) -> Statistics {
        let top = self.top.max(other.top);
        let sum = self.sum_below(top) + other.sum_below(top);
        Statistics { top, sum, target: self.target + other.target }
    }

    /// The sum of `exp(logit - top)` for another top.
    fn sum_below(self, top: f32) -> f32 {
        if self.sum == 0.0 { 0.0 } else { self.sum * (self.top - top).exp() }
    }

    fn loss(self) -> f32 {
        // The difference first: both may be large.
        self.sum.ln() + (self.top - self.target)
    }
}

/// Where a target is among the classes here, counted from the first of them; beyond the last if it is another part's.
#[inline(always)]
fn place(target: u32, classes: &Range<usize>) -> usize {
    (target as usize).wrapping_sub(classes.start)
}

/// Rows that do not count are left as they are.
pub(crate) fn to_exponentials(
    device: &Device,
    block: &mut [f32],
    statistics: &mut [f32],
    targets: &[u32],
    rows: Range<usize>,
    classes: Range<usize>,
) {
    let (width, targets) = (classes.len(), &targets[rows]);
    for_rows2(
        device,
        (&mut block[..targets.len() * width], width),
        (&mut *statistics, 3),
        8,
        #[inline(always)]
        |start, run, statistics| {
            let lines = run.chunks_exact_mut(width.max(1)).zip(statistics.as_chunks_mut::<3>().0);
            for (&t, (line, row)) in targets[start..].iter().zip(lines) {
                *row = Statistics::NONE;
                if t != IGNORE {
                    row[2] = line.get(place(t, &classes)).copied().unwrap_or(0.0);
                    (row[0], row[1]) = to_exponential(line);
                }
            }
        },
    );
    if width == 0 {
        statistics.as_chunks_mut().0.fill(Statistics::NONE);
    }
}

/// In the order of parts.
pub(crate) fn join_statistics(_: &Device, joined: &mut [f32], parts: &[f32]) {
    let (joined, parts) = (joined.as_chunks_mut::<3>().0, parts.as_chunks().0);
    let rows = joined.len();
    for (row, joined) in joined.iter_mut().enumerate() {
        let all = parts[row..].iter().step_by(rows).map(Statistics::of);
        let Statistics { top, sum, target } = all.reduce(Statistics::join).expect("a part");
        *joined = [top, sum, target];
    }
}

/// Zero for rows that do not count.
pub(crate) fn row_losses(_: &Device, losses: &mut [f32], joined: &[f32], targets: &[u32], rows: Range<usize>) {
    let of = losses[rows.clone()].iter_mut().zip(joined.as_chunks().0).zip(&targets[rows]);
    for ((loss, joined), &target) in of {
        *loss = if target == IGNORE { 0.0 } else { Statistics::of(joined).loss() };
    }
}

/// Zeros for rows that do not count.
pub(crate) fn to_gradients(
    device: &Device,
    block: &mut [f32],
    own: &[f32],
    joined: &[f32],
    targets: &[u32],
    rows: Range<usize>,
    classes: Range<usize>,
) {
    let (width, targets) = (classes.len(), &targets[rows]);
    let (own, joined) = (own.as_chunks::<3>().0, joined.as_chunks::<3>().0);
    for_rows(
        device,
        &mut block[..targets.len() * width],
        width,
        8,
        #[inline(always)]
        |start, run| {
            for (row, line) in (start..).zip(run.chunks_exact_mut(width.max(1))) {
                if targets[row] == IGNORE {
                    line.fill(0.0);
                    continue;
                }
                let [own_top, _, _] = own[row];
                let [top, sum, _] = joined[row];
                let factor = 1.0 / sum * (own_top - top).exp();
                line.iter_mut().for_each(|x| *x *= factor);
                if let Some(x) = line.get_mut(place(targets[row], &classes)) {
                    *x -= 1.0;
                }
            }
        },
    );
}

/// In f64.
pub(crate) fn stretch_sums(_: &Device, sums: &mut [f32], losses: &[f32]) {
    let len = losses.len() / sums.len().max(1);
    for (sum, losses) in sums.iter_mut().zip(losses.chunks(len.max(1))) {
        *sum = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() as f32;
    }
}

pub(crate) fn total(_: &Device, out: &mut [f32], losses: &[f32], block: usize, scale: f32) {
    let of_block = |losses: &[f32]| losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
    let total: f64 = losses.chunks(block).map(of_block).fold(0.0, |total, x| total + x);
    out[0] = (total * f64::from(scale)) as f32;
}

/// Logits become `exp(logit - top)` in place; returns the top and the sum.
#[inline(always)]
fn to_exponential(line: &mut [f32]) -> (f32, f32) {
    let top = largest(line, f32::NEG_INFINITY);
    let mut lanes = [0.0f32; 16];
    let mut chunks = line.chunks_exact_mut(16);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - top);
            *lane += *x;
        }
    }
    let mut sum: f32 = lanes.iter().sum();
    for x in chunks.into_remainder() {
        *x = exp(*x - top);
        sum += *x;
    }
    (top, sum)
}
