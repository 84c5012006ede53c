//! The inverse of a norm: a row's moments, and the row from its normalised form and its moments.
//!
//! Whoever has only the normalised row can rebuild the row itself from two numbers. The gradients of a norm and of its
//! inverse add up to those of the row.

use crate::dtype::Dtype;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

/// What a norm divides by: with or without subtracting the mean first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormMoments {
    /// Of layer norm: the mean and `sqrt(variance + eps)`.
    Centred,
    /// Of RMS norm: 0 and `sqrt(mean(x^2) + eps)`.
    Plain,
}

impl Var {
    /// The two moments of each row, as f32 `[R, 2]`: x `[R, D]`.
    #[track_caller]
    pub fn row_moments(&self, kind: NormMoments, eps: f32) -> Var {
        let (x, width) = (self.value().clone(), self.cols());
        let mut out = Tensor::stale(self.device(), &[x.rows(), 2], Dtype::F32);
        kernels::row_moments(&mut out, &x.to_f32(), width, kind, eps);
        let (moments, to, device) = (out.clone(), self.input(), self.device().clone());
        self.tape().op("row_moments", out, &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::row_moments_back(dx, &x.to_f32(), &moments, &g, width, kind, accumulate);
            });
        })
    }

    /// The rows whose norm these are: `(x - bias) / weight * m[1] + m[0]`, with x `[R, D]`, moments m `[R, 2]`, weight and
    /// bias `[D]`. No weight may be 0.
    #[track_caller]
    pub fn denormalise(&self, moments: &Var, weight: &Var, bias: Option<&Var>) -> Var {
        let (rows, width) = (self.value().rows(), self.cols());
        assert_eq!(moments.shape(), [rows, 2], "two moments a row");
        assert_eq!(weight.shape(), [width], "weight of a norm over {width}");
        let device = self.device().clone();
        let b = bias.map_or_else(|| Tensor::zeros(&device, &[width]), |bias| bias.value().to_f32());
        let (x, m, w) = (self.value().clone(), moments.value().clone(), weight.value().to_f32());
        let mut out = Tensor::stale(&device, &[rows, width], Dtype::F32);
        kernels::denormalise(&mut out, &x.to_f32(), &m, &w, &b);
        let [to_x, to_m, to_w] = [self, moments, weight].map(Var::input);
        let to_b = bias.map(Var::input);
        let inputs: Vec<&Var> = [self, moments, weight].into_iter().chain(bias).collect();
        self.tape().op("denormalise", out.cast(self.dtype()), &inputs, move |g, gradients| {
            let x = x.to_f32();
            let vector = || Tensor::stale(&device, &[width], Dtype::F32);
            let (mut dm, mut dw, mut db) = (Tensor::stale(&device, &[rows, 2], Dtype::F32), vector(), vector());
            kernels::denormalise_back_moments(&mut dm, &x, &w, &b, &g);
            kernels::denormalise_back_affine(&mut dw, &mut db, &x, &m, &w, &b, &g);
            gradients.add(to_m, dm);
            gradients.add(to_w, dw);
            if let Some(to_b) = to_b {
                gradients.add(to_b, db);
            }
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                kernels::denormalise_back(dx, &m, &w, &g, accumulate);
            });
        })
    }
}
