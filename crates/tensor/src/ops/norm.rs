//! RMS norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), over the last dim.
//!
//! The forward keeps one or two numbers a row; the backward computes the normalised values again from the input.

use super::{f32_like, stale_like};
use crate::dtype::Dtype;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `x / sqrt(mean(x^2) + eps) * weight`: x `[.., D]`, weight `[D]`.
    #[track_caller]
    pub fn rms_norm(&self, weight: &Var, eps: f32) -> Var {
        let width = self.value().cols();
        assert_eq!(weight.shape(), [width], "weight of a norm over {width}");
        let (device, x, w) = (self.device().clone(), self.value().clone(), weight.kept());
        let mut out = stale_like(&x);
        let mut inverse = Tensor::stale(&device, &[x.rows()], Dtype::F32);
        kernels::rms_norm(&mut out, &mut inverse, &x, &weight.value().to_f32(), eps);
        let (to_x, to_w) = (self.input(), weight.input());
        self.tape().op("rms_norm", out, &[self, weight], move |g, gradients| {
            let w = w.tensor().to_f32();
            if gradients.wants(to_w) {
                let mut dw = Tensor::stale(&device, &[width], Dtype::F32);
                kernels::rms_norm_back_weight(&mut dw, &x, &g, &inverse);
                gradients.add(to_w, dw);
            }
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                kernels::rms_norm_back(dx, &x, &w, &g, &inverse, accumulate);
            });
        })
    }

    /// The sum of each row's squares: x `[T, W]` gives `[T, 1]`, in f32.
    pub fn square_sums(&self) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().clone(), self.input());
        let mut out = Tensor::stale(&device, &[x.rows(), 1], Dtype::F32);
        kernels::square_sums(&mut out, &x.to_f32());
        self.tape().op("square_sums", out, &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::square_sums_back(dx, &x.to_f32(), &g, accumulate);
            });
        })
    }

    /// [`Var::rms_norm`] of rows of which x `[T, W]` has some of the `columns`; `squares` `[T, 1]` are the sums over all
    /// of them, in f32 ([`Var::square_sums`]), and the weight `[W]` is of those that x has.
    #[track_caller]
    pub fn rms_norm_of(&self, weight: &Var, squares: &Var, columns: usize, eps: f32) -> Var {
        let (device, x, w) = (self.device().clone(), self.value().clone(), weight.kept());
        assert_eq!(weight.shape(), [x.cols()], "weight of a norm over {}", x.cols());
        assert_eq!(squares.shape(), [x.rows(), 1], "a sum for each row");
        let mut out = f32_like(&x);
        let mut inverse = Tensor::stale(&device, &[x.rows()], Dtype::F32);
        let (sums, weight32) = (squares.value().to_f32(), weight.value().to_f32());
        kernels::rms_norm_of(&mut out, &mut inverse, &x.to_f32(), &sums, &weight32, columns, eps);
        let (to_x, to_w, to_squares) = (self.input(), weight.input(), squares.input());
        self.tape().op("rms_norm_of", out.cast(self.dtype()), &[self, weight, squares], move |g, gradients| {
            let (x, w) = (x.to_f32(), w.tensor().to_f32());
            if gradients.wants(to_w) {
                let mut dw = Tensor::stale(&device, w.shape(), Dtype::F32);
                kernels::rms_norm_back_weight(&mut dw, &x, &g, &inverse);
                gradients.add(to_w, dw);
            }
            gradients.write(&device, to_squares, &[x.rows(), 1], |ds, accumulate| {
                kernels::rms_norm_of_back_squares(ds, &x, &w, &g, &inverse, columns, accumulate);
            });
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                kernels::rms_norm_of_back(dx, &w, &g, &inverse, accumulate);
            });
        })
    }

    /// `(x - mean) / sqrt(variance + eps) * weight + bias`: x `[.., D]`, weight and bias `[D]`.
    #[track_caller]
    pub fn layer_norm(&self, weight: &Var, bias: &Var, eps: f32) -> Var {
        let width = self.value().cols();
        assert!(weight.shape() == [width] && bias.shape() == [width], "parameters of a norm over {width}");
        let (device, x, w) = (self.device().clone(), self.value().clone(), weight.kept());
        let mut out = stale_like(&x);
        // Mean and inverse deviation of each row.
        let mut moments = Tensor::stale(&device, &[x.rows(), 2], Dtype::F32);
        let (weight32, bias32) = (weight.value().to_f32(), bias.value().to_f32());
        kernels::layer_norm(&mut out, &mut moments, &x, &weight32, &bias32, eps);
        let (to_x, to_w, to_b) = (self.input(), weight.input(), bias.input());
        self.tape().op("layer_norm", out, &[self, weight, bias], move |g, gradients| {
            super::linear::add_bias_gradient(gradients, to_b, &g);
            let w = w.tensor().to_f32();
            if gradients.wants(to_w) {
                let mut dw = Tensor::stale(&device, &[width], Dtype::F32);
                kernels::layer_norm_back_weight(&mut dw, &x, &g, &moments);
                gradients.add(to_w, dw);
            }
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                kernels::layer_norm_back(dx, &x, &w, &g, &moments, accumulate);
            });
        })
    }
}
