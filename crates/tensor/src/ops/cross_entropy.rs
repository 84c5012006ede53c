//! The head and its loss in one op: all logits never exist at once.
//!
//! A block of logits is computed, turned into its own gradients in place, and used up: for the gradients of the inputs
//! and of the weights, which are kept until backward scales them.
//!
//! The classes may be cut into parts. Of each row, a part knows three numbers of its own logits: their largest, the sum of
//! their exponentials below it, and the target's. Joined over the parts, they give every part its share of the softmax.
//!
//! ```text
//!  logits ── own statistics ── join ──┬─ loss
//!    └─ exp(logit - own top) ─────────┴─ softmax - onehot(target)
//! ```

use std::convert::Infallible;
use std::ops::Range;

use super::f32_like;
use super::linear::{common_type, linear_into, multiply, rounded_once, whole};
use crate::cpu::product::{Matrix, Product};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

/// Targets that do not count.
const IGNORE: u32 = u32::MAX;
/// Rows of logits computed before they are turned into gradients: what a processor has in its caches.
const BLOCK_ROWS: usize = 256;
/// Blocks that a wide device takes at once, at most, and their logits. For each block the weights' gradient, which is as large as
/// thousands of rows of logits, is read and written again.
const BLOCKS_AT_ONCE: usize = 16;
const LOGITS_AT_ONCE: usize = 1 << 26;

/// Of rows with so many logits on all ranks.
fn block_rows(device: &Device, classes: usize) -> usize {
    let blocks = LOGITS_AT_ONCE / (BLOCK_ROWS * classes.max(1));
    if device.is_wide() { BLOCK_ROWS * blocks.clamp(1, BLOCKS_AT_ONCE) } else { BLOCK_ROWS }
}

/// The classes that are here: as many as the weight has rows, of `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    pub first: usize,
    pub all: usize,
}

/// Statistics `[rows, 3]` of rows over all classes, from those of parts of them, `[parts, rows, 3]`, in that order.
pub fn join_statistics(parts: &Tensor) -> Tensor {
    let mut joined = Tensor::stale(parts.device(), &parts.shape()[1..], Dtype::F32);
    kernels::join_statistics(&mut joined, parts);
    joined
}

/// The sum of each of `stretches` equally long stretches of losses.
///
/// # Panics
/// If they cannot be equally long.
#[track_caller]
pub fn stretch_sums(losses: &Tensor, stretches: usize) -> Tensor {
    assert!(losses.len().is_multiple_of(stretches.max(1)), "{} losses in {stretches} stretches", losses.len());
    let mut sums = Tensor::stale(losses.device(), &[stretches], Dtype::F32);
    kernels::stretch_sums(&mut sums, losses);
    sums
}

/// A head's weights: w `[V', D]`, and b `[V']` in f32.
struct Weights {
    w: Tensor,
    b: Option<Tensor>,
}

impl Weights {
    fn of(w: &Var, bias: Option<&Var>) -> Weights {
        Weights { w: w.value().clone(), b: bias.map(|bias| bias.value().to_f32()) }
    }

    /// `x W^T + b` of some rows, as the first rows of `block`.
    fn logits(&self, block: &mut Tensor, x: &Tensor, rows: Range<usize>) {
        let read = [Matrix::new(rows, x.cols()), whole(&self.w).t()];
        linear_into(block, x, &self.w, self.b.as_ref(), read);
    }
}

/// The gradients of an unscaled loss, made while the logits are there: far smaller than those, which are then gone. Those
/// alone that are wanted.
struct UnscaledGradients {
    dx: Option<Tensor>,
    dw: Option<Tensor>,
    db: Option<Tensor>,
}

impl UnscaledGradients {
    /// Of x, w and b those that are `wanted`; none if none is.
    fn of(wanted: [bool; 3], x: &Tensor, weights: &Weights) -> Option<UnscaledGradients> {
        let [dx, dw] = [(wanted[0], x), (wanted[1], &weights.w)].map(|(is, of)| is.then(|| f32_like(of)));
        let dw = dw.map(|mut dw| {
            if x.rows() == 0 {
                dw.fill(0.0);
            }
            dw
        });
        let db = weights.b.as_ref().filter(|_| wanted[2]).map(|b| Tensor::zeros(b.device(), b.shape()));
        wanted.contains(&true).then_some(UnscaledGradients { dx, dw, db })
    }

    /// Takes the logits' gradients of some rows in, the first rows of `block`.
    fn add(&mut self, block: &Tensor, x: &Tensor, w: &Tensor, rows: Range<usize>) {
        let logits = Matrix::new(0..rows.len(), w.rows());
        if let Some(db) = &mut self.db {
            kernels::column_sums(db, block, rows.len(), true);
        }
        let are_wanted = [&self.dx, &self.dw].map(Option::is_some);
        let block = &rounded_once(block.clone(), common_type(x, w), are_wanted);
        if let Some(dx) = &mut self.dx {
            let p = Product { a: logits.clone(), b: whole(w), first: rows.start, accumulate: false };
            multiply(dx, block, w, &p);
        }
        if let Some(dw) = &mut self.dw {
            let accumulate = rows.start > 0;
            let p = Product { a: logits.t(), b: Matrix::new(rows.clone(), x.cols()), first: 0, accumulate };
            multiply(dw, block, x, &p);
        }
    }
}

impl Var {
    /// `scale * sum_t -ln softmax(x_t W^T + b)[target_t]` over targets that are not `u32::MAX`: x `[T, D]`, w `[V, D]`,
    /// b `[V]`. Returns the scalar; pass 1 / (valid targets of the whole step) as `scale` to get a mean.
    #[track_caller]
    pub fn linear_cross_entropy<'a>(
        &self,
        w: &Var,
        bias: Option<&Var>,
        targets: impl Into<Index<'a>>,
        scale: f32,
    ) -> Var {
        let classes = Classes { first: 0, all: w.shape()[0] };
        let alone = |own: &Tensor| Ok::<_, Infallible>(own.clone());
        match self.sliced_linear_cross_entropy((w, bias), classes, (targets.into(), scale), alone) {
            Ok((loss, _)) => loss,
        }
    }

    /// [`Var::linear_cross_entropy`] of which only some `classes` are here, w `[V', D]` and b `[V']`. For every block of
    /// rows, `join` turns this part's statistics `[rows, 3]` into those of all classes ([`join_statistics`]), in the same
    /// order of parts everywhere. The value is the whole loss, the gradients of w and b are whole; that of x is this
    /// part's, to be added up. Beside the value are the losses `[T]` of all targets, unscaled and without gradients; they
    /// are 0 where a target does not count.
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
        (targets, scale): (Index, f32),
        mut join: impl FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<(Var, Tensor), E> {
        let (tokens, here) = (self.value().rows(), classes.first..classes.first + w.shape()[0]);
        assert_eq!(targets.len(), tokens, "one target a token");
        let exists = |t: u32| t == IGNORE || (t as usize) < classes.all;
        assert!(targets.all(exists), "a target is outside {} classes", classes.all);
        let (device, x, weights) = (self.device().clone(), self.value().clone(), Weights::of(w, bias));
        let targets = targets.on(&device);
        let stale = |shape: &[usize]| Tensor::stale(&device, shape, Dtype::F32);
        let most = block_rows(&device, classes.all);
        let (mut block, mut losses) = (stale(&[most.min(tokens), here.len()]), stale(&[tokens]));
        let (to_x, to_w, to_b) = (self.input(), w.input(), bias.map(Var::input));
        let wanted = [Some(to_x), Some(to_w), to_b].map(|to| to.is_some_and(Input::is_on_tape));
        let mut kept = UnscaledGradients::of(wanted, &x, &weights);
        device.clone().for_blocks(tokens, most, |rows| {
            weights.logits(&mut block, &x, rows.clone());
            let mut own = stale(&[rows.len(), 3]);
            kernels::to_exponentials(&mut block, &mut own, &targets, rows.clone(), here.clone());
            let joined = join(&own)?;
            kernels::row_losses(&mut losses, &joined, &targets, rows.clone());
            if let Some(kept) = &mut kept {
                kernels::to_gradients(&mut block, &own, &joined, &targets, rows.clone(), here.clone());
                kept.add(&block, &x, &weights.w, rows);
            }
            Ok(())
        })?;
        let mut value = stale(&[1]);
        kernels::total(&mut value, &losses, BLOCK_ROWS, scale);
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        let value = self.tape().op("linear_cross_entropy", value, &inputs, move |g, gradients| {
            let UnscaledGradients { dx, dw, db } = kept.expect("what is not wanted is not on the tape");
            let all = [(Some(to_w), dw), (Some(to_x), dx), (to_b, db)];
            for (to, mut d) in all.into_iter().filter_map(|(to, d)| to.zip(d)) {
                kernels::scale_in_place(&mut d, &g, scale);
                gradients.add(to, d);
            }
        });
        Ok((value, losses))
    }

    /// Logits `x W^T + b` as f32, for those who want to look at them.
    #[track_caller]
    pub fn logits(&self, w: &Var, bias: Option<&Var>) -> Tensor {
        let x = self.value();
        let mut out = Tensor::stale(self.device(), &[x.rows(), w.shape()[0]], Dtype::F32);
        Weights::of(w, bias).logits(&mut out, x, 0..x.rows());
        out
    }
}
