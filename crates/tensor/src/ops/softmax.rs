//! Softmax over the last dim, and the log-sum-exp a router's z-loss is made of.

use super::f32_like;
use crate::dtype::Dtype;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `exp(x) / sum exp(x)` over the last dim, computed without overflow.
    pub fn softmax(&self) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        let mut out = f32_like(&x);
        kernels::softmax(&mut out, &x, width);
        let y = out.cast(self.dtype());
        let saved = y.clone();
        self.tape().op("softmax", y, &[self], move |g, gradients| {
            let y = saved.to_f32();
            gradients.write(g.device(), to, y.shape(), |dx, accumulate| {
                kernels::softmax_back(dx, &y, &g, width, accumulate);
            });
        })
    }

    /// `sum_r weights[r] * logsumexp(x[r])^2`: the router z-loss (Zoph et al. 2022) with a weight a row. Scalar.
    #[track_caller]
    pub fn weighted_square_log_sum_exp(&self, weights: Tensor) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(weights.len(), x.rows(), "one weight a row");
        let device = self.device().clone();
        let (lse, mut value) = (log_sum_exp_rows(&x), Tensor::stale(&device, &[1], Dtype::F32));
        kernels::weighted_squares(&mut value, &lse, &weights);
        self.tape().op("weighted_square_log_sum_exp", value, &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::weighted_squares_back(dx, &x, &lse, &weights, &g, width, accumulate);
            });
        })
    }
}

/// `ln sum exp(x[r])` for every row of an f32 tensor.
pub fn log_sum_exp_rows(x: &Tensor) -> Tensor {
    let mut lse = Tensor::stale(x.device(), &[x.rows()], Dtype::F32);
    kernels::log_sum_exp(&mut lse, x, x.cols());
    lse
}
