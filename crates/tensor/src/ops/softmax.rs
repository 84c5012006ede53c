//! Softmax over the last dim, and the log-sum-exp a router's z-loss is made of.

use super::f32_like;
use super::rows::dot;
use crate::cpu::math::exp;
use crate::cpu::rows::for_rows;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `exp(x) / sum exp(x)` over the last dim, computed without overflow.
    pub fn softmax(&self) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        let mut out = f32_like(&x);
        for_rows(
            self.device(),
            out.f32s_mut(),
            width,
            64,
            #[inline(always)]
            |first, run| {
                for (i, line) in run.chunks_exact_mut(width).enumerate() {
                    softmax_row(line, &x.f32s()[(first + i) * width..][..width]);
                }
            },
        );
        let y = out.cast(self.dtype());
        let saved = y.clone();
        self.tape().op("softmax", y, &[self], move |g, gradients| {
            let (device, y) = (g.device().clone(), saved.to_f32());
            gradients.write(&device, to, y.shape(), |dx, accumulate| {
                for_rows(
                    &device,
                    dx,
                    width,
                    64,
                    #[inline(always)]
                    |first, run| {
                        for (i, line) in run.chunks_exact_mut(width).enumerate() {
                            let at = (first + i) * width;
                            let (y, g) = (&y.f32s()[at..][..width], &g.f32s()[at..][..width]);
                            let inner = dot(y, g);
                            for ((o, y), g) in line.iter_mut().zip(y).zip(g) {
                                let d = y * (g - inner);
                                *o = if accumulate { *o + d } else { d };
                            }
                        }
                    },
                );
            });
        })
    }

    /// `sum_r weights[r] * logsumexp(x[r])^2`: the router z-loss (Zoph et al. 2022) with a weight a row. Scalar.
    #[track_caller]
    pub fn weighted_square_log_sum_exp(&self, weights: &[f32]) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(weights.len(), x.rows(), "one weight a row");
        let lse = log_sum_exp_rows(&x);
        let total: f64 = lse.iter().zip(weights).map(|(l, w)| f64::from(*l) * f64::from(*l) * f64::from(*w)).sum();
        let (device, weights) = (self.device().clone(), weights.to_vec());
        let value = Tensor::from_slice(&device, &[1], &[total as f32]);
        self.tape().op("weighted_square_log_sum_exp", value, &[self], move |g, gradients| {
            let g = g.scalar();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                for_rows(
                    &device,
                    dx,
                    width,
                    64,
                    #[inline(always)]
                    |first, run| {
                        for (i, line) in run.chunks_exact_mut(width).enumerate() {
                            let r = first + i;
                            let factor = 2.0 * lse[r] * weights[r] * g;
                            for (o, x) in line.iter_mut().zip(&x.f32s()[r * width..]) {
                                let d = factor * exp(x - lse[r]);
                                *o = if accumulate { *o + d } else { d };
                            }
                        }
                    },
                );
            });
        })
    }
}

#[inline(always)]
fn softmax_row(out: &mut [f32], x: &[f32]) {
    let top = x.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let mut sum = 0.0;
    for (o, x) in out.iter_mut().zip(x) {
        *o = exp(x - top);
        sum += *o;
    }
    let inverse = 1.0 / sum;
    out.iter_mut().for_each(|o| *o *= inverse);
}

/// `ln sum exp(x[r])` for every row of an f32 tensor.
pub fn log_sum_exp_rows(x: &Tensor) -> Vec<f32> {
    let width = x.cols();
    let row = |x: &[f32]| {
        let top = x.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        top + x.iter().map(|x| exp(x - top)).sum::<f32>().ln()
    };
    x.f32s().chunks_exact(width).map(row).collect()
}
