//! The head and its loss in one op: all logits never exist at once.
//!
//! A block of logits is computed, turned into its own gradients in place, and used up: for the gradients of the inputs
//! and of the weights, which are kept until backward scales them.
//!
//! The classes may be cut into parts. Of each row, a part knows [`RowStatistics`] of its own logits; joined over the
//! parts, they give every part its share of the softmax.
//!
//! ```text
//!  logits ── own statistics ── join ──┬─ loss
//!    └─ exp(logit - own top) ─────────┴─ softmax - onehot(target)
//! ```

use std::convert::Infallible;
use std::ops::Range;

use super::f32_like;
use super::linear::{column_sums, fill_rows};
use crate::cpu::gemm::{ADD, SET, View, gemm, set_or_add};
use crate::cpu::math::exp;
use crate::cpu::rows::{for_rows, for_rows2};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Targets that do not count.
const IGNORE: u32 = u32::MAX;
/// Rows of logits computed before they are turned into gradients.
const BLOCK_ROWS: usize = 256;

/// What some classes' logits of a row say about its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowStatistics {
    /// The largest logit.
    pub top: f32,
    /// Of `exp(logit - top)`.
    pub sum: f32,
    /// The target's logit; 0 where the target is another part's.
    pub target: f32,
}

impl RowStatistics {
    /// Of no classes.
    const NONE: RowStatistics = RowStatistics { top: f32::NEG_INFINITY, sum: 0.0, target: 0.0 };

    /// Those of both parts' classes together.
    pub fn join(self, other: RowStatistics) -> RowStatistics {
        let top = self.top.max(other.top);
        let sum = self.sum_below(top) + other.sum_below(top);
        RowStatistics { top, sum, target: self.target + other.target }
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

/// The classes that are here: as many as the weight has rows, of `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    pub first: usize,
    pub all: usize,
}

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

/// Some rows' targets, which count from the first of all classes, and the first class that is here.
#[derive(Clone, Copy)]
struct Targets<'a>(&'a [u32], usize);

impl Targets<'_> {
    /// Whether the row counts.
    #[inline(always)]
    fn counts(self, row: usize) -> bool {
        self.0[row] != IGNORE
    }

    /// Counted from the first class here; beyond the last one here if the target is another part's.
    #[inline(always)]
    fn place(self, row: usize) -> usize {
        (self.0[row] as usize).wrapping_sub(self.1)
    }
}

/// Logits of some rows become `exp(logit - top)` in place; those of rows that do not count are left.
fn to_exponentials(device: &Device, block: &mut [f32], targets: Targets, classes: usize) -> Vec<RowStatistics> {
    let RowStatistics { top, sum, target } = RowStatistics::NONE;
    let mut statistics = [top, sum, target].repeat(targets.0.len());
    for_rows2(
        device,
        (block, classes),
        (&mut statistics, 3),
        8,
        #[inline(always)]
        |start, run, statistics| {
            let lines = run.chunks_exact_mut(classes.max(1)).zip(statistics.as_chunks_mut().0);
            for (row, (line, [top, sum, target])) in (start..).zip(lines) {
                if targets.counts(row) {
                    *target = line.get(targets.place(row)).copied().unwrap_or(0.0);
                    (*top, *sum) = to_exponential(line);
                }
            }
        },
    );
    let of = |&[top, sum, target]: &[f32; 3]| RowStatistics { top, sum, target };
    statistics.as_chunks().0.iter().map(of).collect()
}

/// `exp(logit - own top)` become the gradients of the rows' losses, in place; of rows that do not count, zeros.
fn to_gradients(
    device: &Device,
    (block, classes): (&mut [f32], usize),
    targets: Targets,
    (own, joined): (&[RowStatistics], &[RowStatistics]),
) {
    for_rows(
        device,
        block,
        classes,
        8,
        #[inline(always)]
        |start, run| {
            for (row, line) in (start..).zip(run.chunks_exact_mut(classes.max(1))) {
                if !targets.counts(row) {
                    line.fill(0.0);
                    continue;
                }
                let factor = 1.0 / joined[row].sum * (own[row].top - joined[row].top).exp();
                line.iter_mut().for_each(|x| *x *= factor);
                if let Some(x) = line.get_mut(targets.place(row)) {
                    *x -= 1.0;
                }
            }
        },
    );
}

impl Var {
    /// `scale * sum_t -ln softmax(x_t W^T + b)[target_t]` over targets that are not `u32::MAX`: x `[T, D]`, w `[V, D]`,
    /// b `[V]`. Returns the scalar; pass 1 / (valid targets of the whole step) as `scale` to get a mean.
    #[track_caller]
    pub fn linear_cross_entropy(&self, w: &Var, bias: Option<&Var>, targets: &[u32], scale: f32) -> Var {
        let classes = Classes { first: 0, all: w.shape()[0] };
        let alone = |own: &[RowStatistics]| Ok::<_, Infallible>(own.to_vec());
        match self.sliced_linear_cross_entropy((w, bias), classes, (targets, scale), alone) {
            Ok(loss) => loss,
        }
    }

    /// [`Var::linear_cross_entropy`] of which only some `classes` are here, w `[V', D]` and b `[V']`. For every block of
    /// rows, `join` turns this part's statistics into those of all classes, in the same order of parts everywhere. The
    /// value is the whole loss, the gradients of w and b are whole; that of x is this part's, to be added up.
    ///
    /// # Errors
    /// Those of `join`.
    ///
    /// # Panics
    /// On a target outside the classes.
    #[track_caller]
    pub fn sliced_linear_cross_entropy<E>(
        &self,
        (w, bias): (&Var, Option<&Var>),
        classes: Classes,
        (targets, scale): (&[u32], f32),
        mut join: impl FnMut(&[RowStatistics]) -> Result<Vec<RowStatistics>, E>,
    ) -> Result<Var, E> {
        let (tokens, width, here) = (self.value().rows(), self.value().cols(), w.shape()[0]);
        assert_eq!(targets.len(), tokens, "one target a token");
        let exists = |&t: &u32| t == IGNORE || (t as usize) < classes.all;
        assert!(targets.iter().all(exists), "a target is outside {} classes", classes.all);
        let device = self.device().clone();
        let (x, weight) = (self.value().to_f32(), w.value().to_f32());
        let b = bias.map(|bias| bias.value().to_f32());
        let mut block = Tensor::stale(&device, &[BLOCK_ROWS.min(tokens), here], Dtype::F32);
        let mut kept = self.tape().is_recording().then(|| Kept::new(&x, &weight, b.as_ref()));
        let mut total = 0.0f64;
        for first in (0..tokens).step_by(BLOCK_ROWS) {
            let rows = first..tokens.min(first + BLOCK_ROWS);
            let block = &mut block.f32s_mut()[..rows.len() * here];
            let x_rows = View::new(&x.f32s()[first * width..], rows.len(), width, width);
            let weight = View::new(weight.f32s(), here, width, width);
            let targets = Targets(&targets[rows.clone()], classes.first);
            logits_of(&device, block, x_rows, weight, b.as_ref());
            let own = to_exponentials(&device, block, targets, here);
            let joined = join(&own)?;
            let counted = (0..rows.len()).filter(|&row| targets.counts(row));
            total += counted.map(|row| f64::from(joined[row].loss())).sum::<f64>();
            if let Some(kept) = &mut kept {
                to_gradients(&device, (block, here), targets, (&own, &joined));
                kept.add(&device, block, (x_rows, weight), rows);
            }
        }
        let value = Tensor::from_slice(&device, &[1], &[(total * f64::from(scale)) as f32]);
        let (to_x, to_w, to_b) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        Ok(self.tape().op("linear_cross_entropy", value, &inputs, move |g, gradients| {
            let Kept { dx, dw, db } = kept.expect("a recording tape goes back");
            let alpha = scale * g.scalar();
            for (to, mut d) in [(to_w, dw), (to_x, dx)].into_iter().chain(to_b.zip(db)) {
                for_rows(
                    &device,
                    d.f32s_mut(),
                    1,
                    1 << 14,
                    #[inline(always)]
                    |_, run| run.iter_mut().for_each(|d| *d *= alpha),
                );
                gradients.add(to, d);
            }
        }))
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

/// Logits become `exp(logit - top)` in place; returns the top and the sum.
#[inline(always)]
fn to_exponential(line: &mut [f32]) -> (f32, f32) {
    let mut tops = [f32::NEG_INFINITY; 16];
    let mut chunks = line.chunks_exact(16);
    for chunk in &mut chunks {
        for (top, x) in tops.iter_mut().zip(chunk) {
            *top = if *x > *top { *x } else { *top };
        }
    }
    let top = tops.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |a, &b| a.max(b));
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
