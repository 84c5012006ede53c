//! ReLU, GELU, sigmoid, softplus, and SiLU-gated products.

use super::f32_like;
use crate::cpu::math::{gelu, gelu_slope, sigmoid};
use crate::cpu::rows::{for_rows, map, zip};
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `max(x, 0)`, element by element; at 0 the slope is 0.
    pub fn relu(&self) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().clone(), self.input());
        let mut out = f32_like(&x);
        map(
            &device,
            out.f32s_mut(),
            x.to_f32().f32s(),
            false,
            #[inline(always)]
            |x| if x < 0.0 { 0.0 } else { x },
        );
        self.tape().op("relu", out.cast(self.dtype()), &[self], move |g, gradients| {
            let x = x.to_f32();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                zip(
                    &device,
                    dx,
                    x.f32s(),
                    g.f32s(),
                    accumulate,
                    #[inline(always)]
                    |x, g| if x > 0.0 { g } else { 0.0 },
                );
            });
        })
    }

    /// GELU in its tanh form, element by element.
    pub fn gelu(&self) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().clone(), self.input());
        let mut out = f32_like(&x);
        map(&device, out.f32s_mut(), x.to_f32().f32s(), false, gelu);
        self.tape().op("gelu", out.cast(self.dtype()), &[self], move |g, gradients| {
            let x = x.to_f32();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                zip(
                    &device,
                    dx,
                    x.f32s(),
                    g.f32s(),
                    accumulate,
                    #[inline(always)]
                    |x, g| gelu_slope(x) * g,
                );
            });
        })
    }

    /// `1 / (1 + e^-x)`, element by element.
    pub fn sigmoid(&self) -> Var {
        self.pointwise("sigmoid", sigmoid, |x, g| {
            let s = sigmoid(x);
            g * s * (1.0 - s)
        })
    }

    /// `ln(1 + e^x)`, element by element.
    pub fn softplus(&self) -> Var {
        self.pointwise("softplus", |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), |x, g| g * sigmoid(x))
    }

    /// An elementary function and its derivative times the gradient. For small tensors: these loops are not vectors.
    fn pointwise(&self, name: &'static str, f: fn(f32) -> f32, slope: fn(f32, f32) -> f32) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().to_f32(), self.input());
        let mut out = f32_like(&x);
        map(&device, out.f32s_mut(), x.f32s(), false, f);
        self.tape().op(name, out.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                zip(&device, dx, x.f32s(), g.f32s(), accumulate, slope);
            });
        })
    }

    /// `silu(gate) * up` (SwiGLU, Shazeer 2020), where each row is `[gate | up]`: `[.., 2 F]` gives `[.., F]`.
    #[track_caller]
    pub fn swiglu(&self) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().clone(), self.input());
        assert!(x.cols().is_multiple_of(2), "gate and up are of one width, got {} together", x.cols());
        let out = swiglu_forward(&x);
        self.tape().op("swiglu", out.cast(self.dtype()), &[self], move |g, gradients| {
            let x = x.to_f32();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                swiglu_backward(&device, dx, accumulate, x.f32s(), g.f32s(), x.cols() / 2);
            });
        })
    }
}

fn swiglu_forward(x: &Tensor) -> Tensor {
    let (x32, width) = (x.to_f32(), x.cols() / 2);
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("a last dim") = width;
    let mut out = Tensor::stale(x.device(), &shape, Dtype::F32);
    let x = x32.f32s();
    for_rows(
        x32.device(),
        out.f32s_mut(),
        width,
        16,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let (gate, up) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
                for ((o, a), b) in line.iter_mut().zip(gate).zip(up) {
                    *o = a * sigmoid(*a) * b;
                }
            }
        },
    );
    out
}

fn swiglu_backward(device: &crate::Device, dx: &mut [f32], accumulate: bool, x: &[f32], g: &[f32], width: usize) {
    for_rows(
        device,
        dx,
        2 * width,
        16,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(2 * width).enumerate() {
                let (gate, up) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
                let g = &g[(first + i) * width..][..width];
                let (d_gate, d_up) = line.split_at_mut(width);
                if !accumulate {
                    d_gate.fill(0.0);
                    d_up.fill(0.0);
                }
                for j in 0..width {
                    let (a, b, g) = (gate[j], up[j], g[j]);
                    let s = sigmoid(a);
                    d_gate[j] += g * b * s * (1.0 + a * (1.0 - s));
                    d_up[j] += g * a * s;
                }
            }
        },
    );
}
