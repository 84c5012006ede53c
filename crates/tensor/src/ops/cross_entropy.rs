//! The head and its loss in one op: logits never exist twice.
//!
//! Blocks of logits are computed, turned into their own gradients in place while in cache, and kept: one `[T, V]`
//! matrix in all, where separate ops would hold logits, probabilities and gradients.

use crate::cpu::gemm::{Into, SET, View, gemm};
use crate::cpu::math::exp;
use crate::cpu::rows::for_rows2;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Targets that do not count.
const IGNORE: u32 = u32::MAX;
/// Rows of logits computed before they are turned into gradients.
const BLOCK_ROWS: usize = 512;

impl Var {
    /// `scale * sum_t -ln softmax(x_t W^T)[target_t]` over targets that are not `u32::MAX`: x `[T, D]`, w `[V, D]`.
    /// Returns the scalar; pass 1 / (valid targets of the whole step) as `scale` to get a mean.
    #[track_caller]
    pub fn linear_cross_entropy(&self, w: &Var, targets: &[u32], scale: f32) -> Var {
        let (tokens, width, vocab) = (self.value().rows(), self.value().cols(), w.shape()[0]);
        assert_eq!(targets.len(), tokens, "one target a token");
        assert!(targets.iter().all(|&t| t == IGNORE || (t as usize) < vocab), "a target is outside {vocab} classes");
        let (device, x, weight) = (self.device().clone(), self.value().clone(), w.value().clone());
        let records = self.tape().is_recording();
        let kept_rows = if records { tokens } else { BLOCK_ROWS.min(tokens) };
        let mut gradient = Tensor::stale(&device, &[kept_rows, vocab], Dtype::F32);
        let mut total = 0.0f64;
        {
            let (x, weight) = (x.to_f32(), weight.to_f32());
            let weight = View::new(weight.f32s(), vocab, width, width).t();
            for first in (0..tokens).step_by(BLOCK_ROWS) {
                let rows = BLOCK_ROWS.min(tokens - first);
                let at = if records { first * vocab } else { 0 };
                let block = &mut gradient.f32s_mut()[at..][..rows * vocab];
                gemm(&device, block, vocab, View::new(&x.f32s()[first * width..], rows, width, width), weight, SET);
                let mut losses = vec![0.0f32; rows];
                for_rows2(
                    &device,
                    (block, vocab),
                    (&mut losses, 1),
                    8,
                    #[inline(always)]
                    |start, run, losses| {
                        for (i, line) in run.chunks_exact_mut(vocab).enumerate() {
                            losses[i] = to_gradient(line, targets[first + start + i]);
                        }
                    },
                );
                total += losses.iter().map(|&l| f64::from(l)).sum::<f64>();
            }
        }
        let value = Tensor::from_slice(&device, &[1], &[(total * f64::from(scale)) as f32]);
        let (to_x, to_w) = (self.input(), w.input());
        self.tape().op("linear_cross_entropy", value, &[self, w], move |g, gradients| {
            let alpha = scale * g.scalar();
            let logits = || View::new(gradient.f32s(), tokens, vocab, vocab);
            gradients.write(&device, to_w, weight.shape(), |dw, accumulate| {
                let x = x.to_f32();
                let x = View::new(x.f32s(), tokens, width, width);
                gemm(&device, dw, width, logits().t(), x, Into { alpha, accumulate });
            });
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                let weight = weight.to_f32();
                let weight = View::new(weight.f32s(), vocab, width, width);
                gemm(&device, dx, width, logits(), weight, Into { alpha, accumulate });
            });
        })
    }

    /// Logits `x W^T` as f32, for those who want to look at them.
    #[track_caller]
    pub fn logits(&self, w: &Var) -> Tensor {
        let x = self.value().to_f32();
        let (width, vocab) = (x.cols(), w.shape()[0]);
        let mut out = Tensor::stale(self.device(), &[x.rows(), vocab], Dtype::F32);
        let weight = w.value().to_f32();
        let weight = View::new(weight.f32s(), vocab, width, width).t();
        gemm(self.device(), out.f32s_mut(), vocab, View::new(x.f32s(), x.rows(), width, width), weight, SET);
        out
    }
}

/// Logits become `softmax - onehot(target)` in place (zeros if ignored); returns the loss.
#[inline(always)]
fn to_gradient(line: &mut [f32], target: u32) -> f32 {
    if target == IGNORE {
        line.fill(0.0);
        return 0.0;
    }
    let mut tops = [f32::NEG_INFINITY; 16];
    let mut chunks = line.chunks_exact(16);
    for chunk in &mut chunks {
        for (top, x) in tops.iter_mut().zip(chunk) {
            *top = if *x > *top { *x } else { *top };
        }
    }
    let top = tops.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let own = line[target as usize];
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
    let inverse = 1.0 / sum;
    line.iter_mut().for_each(|x| *x *= inverse);
    line[target as usize] -= 1.0;
    // The difference first: both may be large.
    sum.ln() + (top - own)
}
