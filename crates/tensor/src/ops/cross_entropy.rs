//! The head and its loss in one op: all logits never exist at once.
//!
//! A block of logits is computed, turned into its own gradients in place, and used up: for the gradients of the inputs
//! and of the weights, which are kept until backward scales them.

use std::ops::Range;

use super::f32_like;
use super::linear::{column_sums, fill_rows};
use crate::cpu::gemm::{ADD, SET, View, gemm, set_or_add};
use crate::cpu::math::exp;
use crate::cpu::rows::{for_rows2, map};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Targets that do not count.
const IGNORE: u32 = u32::MAX;
/// Rows of logits computed before they are turned into gradients.
const BLOCK_ROWS: usize = 256;

/// The gradients of an unscaled loss, made while the logits are there: far smaller than those, which are then gone.
struct Kept {
    dx: Tensor,
    dw: Tensor,
    db: Option<Tensor>,
}

impl Kept {
    fn new(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Kept {
        let mut dw = f32_like(weight);
        if x.rows() == 0 {
            dw.f32s_mut().fill(0.0);
        }
        Kept { dx: f32_like(x), dw, db: bias.map(|bias| Tensor::zeros(bias.device(), bias.shape())) }
    }

    /// Takes the logits' gradients of some rows in.
    fn add(&mut self, device: &Device, logits: &[f32], (x, weight): (View, View), rows: Range<usize>) {
        let (width, classes, first) = (self.dx.cols(), self.dw.rows(), rows.start);
        let dx = &mut self.dx.f32s_mut()[first * width..rows.end * width];
        gemm(device, dx, width, View::new(logits, rows.len(), classes, classes), weight, SET);
        let transposed = View::new(logits, rows.len(), classes, classes).t();
        gemm(device, self.dw.f32s_mut(), width, transposed, x, set_or_add(first > 0));
        if let Some(db) = &mut self.db {
            let sums = column_sums(device, logits, classes);
            db.f32s_mut().iter_mut().zip(sums).for_each(|(sum, x)| *sum += x);
        }
    }
}

/// `x W^T + b` of some rows.
fn logits_of(device: &Device, block: &mut [f32], x: View, weight: View, bias: Option<&Tensor>) {
    let classes = weight.rows();
    match bias {
        None => gemm(device, block, classes, x, weight.t(), SET),
        Some(bias) => {
            fill_rows(device, block, bias.f32s());
            gemm(device, block, classes, x, weight.t(), ADD);
        }
    }
}

/// Logits of some rows become their own gradients; gives the sum of the rows' losses.
fn to_gradients(device: &Device, block: &mut [f32], targets: &[u32], vocab: usize) -> f64 {
    let mut losses = vec![0.0f32; targets.len()];
    for_rows2(
        device,
        (block, vocab),
        (&mut losses, 1),
        8,
        #[inline(always)]
        |start, run, losses| {
            for (i, line) in run.chunks_exact_mut(vocab).enumerate() {
                losses[i] = to_gradient(line, targets[start + i]);
            }
        },
    );
    losses.iter().map(|&l| f64::from(l)).sum()
}

impl Var {
    /// `scale * sum_t -ln softmax(x_t W^T + b)[target_t]` over targets that are not `u32::MAX`: x `[T, D]`, w `[V, D]`,
    /// b `[V]`. Returns the scalar; pass 1 / (valid targets of the whole step) as `scale` to get a mean.
    #[track_caller]
    pub fn linear_cross_entropy(&self, w: &Var, bias: Option<&Var>, targets: &[u32], scale: f32) -> Var {
        let (tokens, width, vocab) = (self.value().rows(), self.value().cols(), w.shape()[0]);
        assert_eq!(targets.len(), tokens, "one target a token");
        assert!(targets.iter().all(|&t| t == IGNORE || (t as usize) < vocab), "a target is outside {vocab} classes");
        let device = self.device().clone();
        let (x, weight) = (self.value().to_f32(), w.value().to_f32());
        let b = bias.map(|bias| bias.value().to_f32());
        let mut block = Tensor::stale(&device, &[BLOCK_ROWS.min(tokens), vocab], Dtype::F32);
        let mut kept = self.tape().is_recording().then(|| Kept::new(&x, &weight, b.as_ref()));
        let mut total = 0.0f64;
        for first in (0..tokens).step_by(BLOCK_ROWS) {
            let rows = first..tokens.min(first + BLOCK_ROWS);
            let block = &mut block.f32s_mut()[..rows.len() * vocab];
            let x_rows = View::new(&x.f32s()[first * width..], rows.len(), width, width);
            let weight = View::new(weight.f32s(), vocab, width, width);
            logits_of(&device, block, x_rows, weight, b.as_ref());
            total += to_gradients(&device, block, &targets[rows.clone()], vocab);
            if let Some(kept) = &mut kept {
                kept.add(&device, block, (x_rows, weight), rows);
            }
        }
        let value = Tensor::from_slice(&device, &[1], &[(total * f64::from(scale)) as f32]);
        let (to_x, to_w, to_b) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape().op("linear_cross_entropy", value, &inputs, move |g, gradients| {
            let Kept { dx, dw, db } = kept.expect("a recording tape goes back");
            let alpha = scale * g.scalar();
            for (to, d) in [(to_w, dw), (to_x, dx)].into_iter().chain(to_b.zip(db)) {
                gradients.write(&device, to, d.shape(), |out, accumulate| {
                    map(
                        &device,
                        out,
                        d.f32s(),
                        accumulate,
                        #[inline(always)]
                        |d| alpha * d,
                    );
                });
            }
        })
    }

    /// Logits `x W^T + b` as f32, for those who want to look at them.
    #[track_caller]
    pub fn logits(&self, w: &Var, bias: Option<&Var>) -> Tensor {
        let x = self.value().to_f32();
        let (width, vocab) = (x.cols(), w.shape()[0]);
        let mut out = Tensor::stale(self.device(), &[x.rows(), vocab], Dtype::F32);
        let weight = w.value().to_f32();
        let (x, weight) = (View::new(x.f32s(), x.rows(), width, width), View::new(weight.f32s(), vocab, width, width));
        let bias = bias.map(|bias| bias.value().to_f32());
        logits_of(self.device(), out.f32s_mut(), x, weight, bias.as_ref());
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
