//! The optimizer's arithmetic: one pass over weights, gradient and moments, in place.

use crate::cpu::rows::{prefetch_run, simd};
use crate::device::Device;

/// Elements handled between two looks ahead, and how far those look: four streams at once, a page each.
const LINE: usize = 32;
const AHEAD: usize = 512;

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
    /// Updates `weights` and the moments `m`, `v` in place. All slices are of one length.
    #[track_caller]
    pub fn update(&self, device: &Device, weights: &mut [f32], gradient: &[f32], m: &mut [f32], v: &mut [f32]) {
        assert!([gradient.len(), m.len(), v.len()] == [weights.len(); 3], "slices of different lengths");
        let parts = device.threads().min(weights.len() / 4096).max(1);
        if parts == 1 {
            return simd(
                #[inline(always)]
                || self.update_run(weights, gradient, m, v),
            );
        }
        let length = weights.len().div_ceil(parts);
        rayon::scope(|scope| {
            let runs = weights.chunks_mut(length).zip(gradient.chunks(length));
            for (i, ((w, g), (m, v))) in runs.zip(m.chunks_mut(length).zip(v.chunks_mut(length))).enumerate() {
                if i + 1 == parts {
                    simd(
                        #[inline(always)]
                        || self.update_run(w, g, m, v),
                    );
                } else {
                    scope.spawn(move |_| {
                        simd(
                            #[inline(always)]
                            || self.update_run(w, g, m, v),
                        )
                    });
                }
            }
        });
    }

    #[inline(always)]
    fn update_run(&self, weights: &mut [f32], gradient: &[f32], m: &mut [f32], v: &mut [f32]) {
        let correct1 = 1.0 / (1.0 - f64::from(self.beta1).powf(self.step as f64)) as f32;
        let correct2 = 1.0 / (1.0 - f64::from(self.beta2).powf(self.step as f64)) as f32;
        let (beta1, beta2, keep) = (self.beta1, self.beta2, 1.0 - self.lr * self.weight_decay);
        let lines = weights.chunks_mut(LINE).zip(gradient.chunks(LINE)).zip(m.chunks_mut(LINE).zip(v.chunks_mut(LINE)));
        for ((w, g), (m, v)) in lines {
            for place in [w.as_ptr(), g.as_ptr(), m.as_ptr(), v.as_ptr()] {
                prefetch_run(place.wrapping_add(AHEAD), LINE);
            }
            for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                let g = g * self.gradient_scale;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                let update = *m * correct1 / ((*v * correct2).sqrt() + self.eps);
                *w = *w * keep - self.lr * update;
            }
        }
    }
}

/// The sum of squares of all elements, in f64: the same bits for the same elements whatever the threads.
pub fn sum_of_squares(device: &Device, x: &[f32]) -> f64 {
    const BLOCK: usize = 1 << 14;
    let blocks = x.len().div_ceil(BLOCK);
    let mut sums = vec![0.0f64; blocks];
    crate::cpu::rows::for_rows(
        device,
        &mut sums,
        1,
        4,
        #[inline(always)]
        |first, run| {
            for (i, sum) in run.iter_mut().enumerate() {
                let start = (first + i) * BLOCK;
                *sum = squares(&x[start..(start + BLOCK).min(x.len())]);
            }
        },
    );
    sums.iter().sum()
}

#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    let chunks = x.chunks_exact(16);
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    rest + lanes.iter().sum::<f64>()
}
