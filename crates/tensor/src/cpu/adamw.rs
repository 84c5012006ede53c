//! The optimizer's arithmetic: one pass over weights, gradient and moments, in place; and sums of squares.

use std::iter;
use std::ops::Range;

use half::bf16;

use super::rows::{for_rows, look_ahead, put_line, simd};
use super::stored::Stored;
use crate::device::Device;

/// Elements handled between two looks ahead.
const LINE: usize = 32;

/// One AdamW step's constants (Loshchilov and Hutter 2019).
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    /// Decoupled decay: weights shrink by `lr * weight_decay` first.
    pub weight_decay: f32,
    /// Steps taken, this one included; corrects the moments' bias.
    pub step: u64,
    /// Factor on the gradient, such as clipping's.
    pub gradient_scale: f32,
}

impl AdamW {
    /// The factors that correct the moments' bias: they began as zeros.
    pub(crate) fn corrections(&self) -> [f32; 2] {
        [self.beta1, self.beta2].map(|beta| 1.0 / (1.0 - f64::from(beta).powf(self.step as f64)) as f32)
    }
}

/// Sequences of as many elements each within one tensor, equally far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Where the first begins.
    pub first: usize,
    /// From the beginning of one to that of the next.
    pub stride: usize,
    pub count: usize,
    /// Elements of each.
    pub len: usize,
}

impl Strips {
    /// The elements of one of them in the tensor.
    #[track_caller]
    pub fn range(&self, strip: usize) -> Range<usize> {
        assert!(strip < self.count, "strip {strip} of {}", self.count);
        let start = self.first + strip * self.stride;
        start..start + self.len
    }

    /// The strips of a tensor's elements.
    #[track_caller]
    fn cut(self, elements: &mut [f32]) -> impl Iterator<Item = &mut [f32]> {
        let Strips { first, stride, count, len } = self;
        elements[first..].chunks_mut(stride).take(count).map(move |strip| &mut strip[..len])
    }
}

/// The weights from `first` on, by the gradient's elements from `from` on.
#[track_caller]
pub(crate) fn adamw(
    device: &Device,
    weights: Stored,
    state: &mut [f32],
    gradient: &[f32],
    rule: &AdamW,
    [first, from]: [usize; 2],
    strips: Strips,
) {
    let mut strips: Vec<&mut [f32]> = strips.cut(state).collect();
    update_stored(device, rule, weights, first, &gradient[from..], &mut strips);
}

/// The same where the gradient is the last strip.
#[track_caller]
pub(crate) fn adamw_of_strip(
    device: &Device,
    weights: Stored,
    state: &mut [f32],
    rule: &AdamW,
    first: usize,
    strips: Strips,
) {
    let mut strips: Vec<&mut [f32]> = strips.cut(state).collect();
    let (gradient, own) = strips.split_last_mut().expect("a gradient");
    update_stored(device, rule, weights, first, gradient, own);
}

#[track_caller]
fn update_stored(
    device: &Device,
    rule: &AdamW,
    weights: Stored,
    first: usize,
    gradient: &[f32],
    strips: &mut [&mut [f32]],
) {
    match (weights, strips) {
        (Stored::F32(weights), [m, v]) => {
            let range = first..first + m.len();
            update(device, rule, [&mut weights[range.clone()], m, v], &gradient[..range.len()], None);
        }
        (Stored::Bf16(weights), [m, v, master]) => {
            let range = first..first + m.len();
            update(device, rule, [master, m, v], &gradient[..range.len()], Some(&mut weights[range]));
        }
        (_, strips) => panic!("state of {} strips", strips.len()),
    }
}

/// `rounded` becomes the new weights in bf16. All slices are of one length.
#[track_caller]
fn update(
    device: &Device,
    rule: &AdamW,
    [weights, m, v]: [&mut [f32]; 3],
    gradient: &[f32],
    rounded: Option<&mut [bf16]>,
) {
    let len = rounded.as_ref().map_or(weights.len(), |rounded| rounded.len());
    assert!([gradient.len(), m.len(), v.len(), len] == [weights.len(); 4], "slices of different lengths");
    let parts = device.threads().min(weights.len() / 4096).max(1);
    let length = weights.len().div_ceil(parts).max(1);
    let mut rounded = rounded.map(|rounded| rounded.chunks_mut(length));
    let rounded = iter::repeat_with(|| rounded.as_mut().and_then(Iterator::next));
    let runs = weights.chunks_mut(length).zip(m.chunks_mut(length)).zip(v.chunks_mut(length));
    device.share(runs.zip(gradient.chunks(length)).zip(rounded), |((((weights, m), v), gradient), rounded)| {
        simd(
            #[inline(always)]
            || match rounded {
                Some(rounded) => update_and_round(rule, [weights, m, v], gradient, rounded),
                None => update_run(rule, [weights, m, v], gradient),
            },
        );
    });
}

/// A piece after the other, each rounded while it is in the cache.
#[inline(always)]
fn update_and_round(rule: &AdamW, [weights, m, v]: [&mut [f32]; 3], gradient: &[f32], rounded: &mut [bf16]) {
    const PIECE: usize = 1 << 10;
    let pieces = weights.chunks_mut(PIECE).zip(m.chunks_mut(PIECE)).zip(v.chunks_mut(PIECE));
    for ((((w, m), v), g), rounded) in pieces.zip(gradient.chunks(PIECE)).zip(rounded.chunks_mut(PIECE)) {
        update_run(rule, [w, m, v], g);
        put_line(rounded, w, false);
    }
}

#[inline(always)]
fn update_run(rule: &AdamW, [weights, m, v]: [&mut [f32]; 3], gradient: &[f32]) {
    let AdamW { lr, beta1, beta2, eps, weight_decay, gradient_scale, .. } = *rule;
    let [correct1, correct2] = rule.corrections();
    let keep = 1.0 - lr * weight_decay;
    let lines = weights.chunks_mut(LINE).zip(gradient.chunks(LINE)).zip(m.chunks_mut(LINE).zip(v.chunks_mut(LINE)));
    for ((w, g), (m, v)) in lines {
        look_ahead(w);
        look_ahead(g);
        look_ahead(m);
        look_ahead(v);
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * gradient_scale;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            let update = *m * correct1 / ((*v * correct2).sqrt() + eps);
            *w = *w * keep - lr * update;
        }
    }
}

/// Adds the squares of `x[range]` to the f64 whose halves `sums` has at `place`: the sum of a tile, then that of the next.
pub(crate) fn add_squares(
    device: &Device,
    sums: &mut [u32],
    x: &[f32],
    place: usize,
    range: Range<usize>,
    tile: usize,
) {
    let [low, high] = &mut sums.as_chunks_mut().0[place];
    let mut sum = f64::from_bits(u64::from(*high) << 32 | u64::from(*low));
    for blocks in block_squares(device, &x[range]).chunks(tile / SQUARES) {
        sum += blocks.iter().sum::<f64>();
    }
    (*low, *high) = (sum.to_bits() as u32, (sum.to_bits() >> 32) as u32);
}

/// Elements whose squares are summed by themselves, on any engine. Tiles are whole blocks of them.
pub(crate) const SQUARES: usize = 1 << 14;

/// Of each block, in f64: the same bits for the same elements whatever the threads.
fn block_squares(device: &Device, x: &[f32]) -> Vec<f64> {
    let blocks = x.len().div_ceil(SQUARES);
    let mut sums = vec![0.0f64; blocks];
    for_rows(
        device,
        &mut sums,
        1,
        4,
        #[inline(always)]
        |first, run| {
            for (i, sum) in run.iter_mut().enumerate() {
                let start = (first + i) * SQUARES;
                *sum = squares(&x[start..(start + SQUARES).min(x.len())]);
            }
        },
    );
    sums
}

#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    let chunks = x.chunks_exact(16);
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    for chunk in chunks {
        look_ahead(chunk);
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    rest + lanes.iter().sum::<f64>()
}
