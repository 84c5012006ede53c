//! RMS norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), over the last dim.
//!
//! The forward keeps one or two numbers a row; the backward computes the normalised values again from the input.

use super::f32_like;
use super::rows::dot;
use crate::cpu::rows::{for_rows, for_rows2, sum_over_rows};
use crate::tape::Var;
use crate::tensor::Tensor;

/// Least rows a thread takes.
const LEAST_ROWS: usize = 64;

impl Var {
    /// `x / sqrt(mean(x^2) + eps) * weight`: x `[.., D]`, weight `[D]`.
    #[track_caller]
    pub fn rms_norm(&self, weight: &Var, eps: f32) -> Var {
        let width = self.value().cols();
        assert_eq!(weight.shape(), [width], "weight of a norm over {width}");
        let (device, x, w) = (self.device().clone(), self.value().clone(), weight.kept());
        let mut out = f32_like(&x);
        let mut inverse = vec![0.0f32; x.rows()];
        {
            let (x, w) = (x.to_f32(), weight.value().to_f32());
            let (x, w) = (x.f32s(), w.f32s());
            for_rows2(
                &device,
                (out.f32s_mut(), width),
                (&mut inverse, 1),
                LEAST_ROWS,
                #[inline(always)]
                |first, run, inverse| {
                    for (i, line) in run.chunks_exact_mut(width).enumerate() {
                        let x = &x[(first + i) * width..][..width];
                        let r = 1.0 / (dot(x, x) / width as f32 + eps).sqrt();
                        inverse[i] = r;
                        line.iter_mut().zip(x).zip(w).for_each(|((o, x), w)| *o = x * r * w);
                    }
                },
            );
        }
        let (to_x, to_w) = (self.input(), weight.input());
        self.tape().op("rms_norm", out.cast(self.dtype()), &[self, weight], move |g, gradients| {
            let (x32, w) = (x.to_f32(), w.tensor().to_f32());
            let (x, w, g) = (x32.f32s(), w.f32s(), g.f32s());
            let dw = sum_over_rows(
                &device,
                inverse.len(),
                width,
                #[inline(always)]
                |rows, sum| {
                    for r in rows {
                        let (x, g) = (&x[r * width..][..width], &g[r * width..][..width]);
                        sum.iter_mut().zip(x).zip(g).for_each(|((s, x), g)| *s += x * inverse[r] * g);
                    }
                },
            );
            gradients.add(to_w, Tensor::from_slice(&device, &[width], &dw));
            gradients.write(&device, to_x, x32.shape(), |dx, accumulate| {
                for_rows(
                    &device,
                    dx,
                    width,
                    LEAST_ROWS,
                    #[inline(always)]
                    |first, run| {
                        for (i, line) in run.chunks_exact_mut(width).enumerate() {
                            let at = (first + i) * width;
                            let (x, g, r) = (&x[at..][..width], &g[at..][..width], inverse[first + i]);
                            // d/dx of x r w: r (w g - x r^2 mean(x w g)).
                            let mean = dot3(x, w, g) / width as f32 * r * r;
                            for (((o, x), w), g) in line.iter_mut().zip(x).zip(w).zip(g) {
                                let d = r * (w * g - x * mean);
                                *o = if accumulate { *o + d } else { d };
                            }
                        }
                    },
                );
            });
        })
    }

    /// `(x - mean) / sqrt(variance + eps) * weight + bias`: x `[.., D]`, weight and bias `[D]`.
    #[track_caller]
    pub fn layer_norm(&self, weight: &Var, bias: &Var, eps: f32) -> Var {
        let width = self.value().cols();
        assert!(weight.shape() == [width] && bias.shape() == [width], "parameters of a norm over {width}");
        let (device, x, w) = (self.device().clone(), self.value().clone(), weight.kept());
        let mut out = f32_like(&x);
        // Mean and inverse deviation of each row.
        let mut moments = vec![0.0f32; x.rows() * 2];
        {
            let (x, w, b) = (x.to_f32(), weight.value().to_f32(), bias.value().to_f32());
            let (x, w, b) = (x.f32s(), w.f32s(), b.f32s());
            for_rows2(
                &device,
                (out.f32s_mut(), width),
                (&mut moments, 2),
                LEAST_ROWS,
                #[inline(always)]
                |first, run, moments| {
                    for (i, line) in run.chunks_exact_mut(width).enumerate() {
                        let x = &x[(first + i) * width..][..width];
                        let mean = x.iter().sum::<f32>() / width as f32;
                        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / width as f32;
                        let r = 1.0 / (variance + eps).sqrt();
                        (moments[2 * i], moments[2 * i + 1]) = (mean, r);
                        for (((o, x), w), b) in line.iter_mut().zip(x).zip(w).zip(b) {
                            *o = (x - mean) * r * w + b;
                        }
                    }
                },
            );
        }
        let (to_x, to_w, to_b) = (self.input(), weight.input(), bias.input());
        self.tape().op("layer_norm", out.cast(self.dtype()), &[self, weight, bias], move |g, gradients| {
            super::linear::add_bias_gradient(gradients, to_b, &g);
            let (x32, w) = (x.to_f32(), w.tensor().to_f32());
            let (x, w, g) = (x32.f32s(), w.f32s(), g.f32s());
            let dw = sum_over_rows(
                &device,
                moments.len() / 2,
                width,
                #[inline(always)]
                |rows, sum| {
                    for row in rows {
                        let (mean, r) = (moments[2 * row], moments[2 * row + 1]);
                        let (x, g) = (&x[row * width..][..width], &g[row * width..][..width]);
                        sum.iter_mut().zip(x).zip(g).for_each(|((s, x), g)| *s += (x - mean) * r * g);
                    }
                },
            );
            gradients.add(to_w, Tensor::from_slice(&device, &[width], &dw));
            gradients.write(&device, to_x, x32.shape(), |dx, accumulate| {
                for_rows(
                    &device,
                    dx,
                    width,
                    LEAST_ROWS,
                    #[inline(always)]
                    |first, run| {
                        for (i, line) in run.chunks_exact_mut(width).enumerate() {
                            let row = first + i;
                            let (mean, r) = (moments[2 * row], moments[2 * row + 1]);
                            let (x, g) = (&x[row * width..][..width], &g[row * width..][..width]);
                            // With n the normalised row: r (w g - mean(w g) - n mean(w g n)).
                            let plain = dot(w, g) / width as f32;
                            let along = (dot3(x, w, g) - mean * plain * width as f32) * r / width as f32;
                            for (((o, x), w), g) in line.iter_mut().zip(x).zip(w).zip(g) {
                                let d = r * (w * g - plain - (x - mean) * r * along);
                                *o = if accumulate { *o + d } else { d };
                            }
                        }
                    },
                );
            });
        })
    }
}

/// `sum_i x_i y_i z_i` in sixteen independent sums.
#[inline(always)]
fn dot3(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let n = x.len() / 16 * 16;
    for i in (0..n).step_by(16) {
        for lane in 0..16 {
            lanes[lane] = (x[i + lane] * y[i + lane]).mul_add(z[i + lane], lanes[lane]);
        }
    }
    let rest: f32 = (n..x.len()).map(|i| x[i] * y[i] * z[i]).sum();
    rest + lanes.iter().sum::<f32>()
}
