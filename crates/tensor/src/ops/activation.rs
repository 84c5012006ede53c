//! ReLU, GELU, sigmoid, softplus, and SiLU-gated products.

use super::f32_like;
use crate::cpu::activation::Pointwise;
use crate::dtype::Dtype;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `max(x, 0)`, element by element; at 0 the slope is 0.
    pub fn relu(&self) -> Var {
        self.pointwise("relu", Pointwise::Relu)
    }

    /// GELU in its tanh form, element by element.
    pub fn gelu(&self) -> Var {
        self.pointwise("gelu", Pointwise::Gelu)
    }

    /// `1 / (1 + e^-x)`, element by element.
    pub fn sigmoid(&self) -> Var {
        self.pointwise("sigmoid", Pointwise::Sigmoid)
    }

    /// `ln(1 + e^x)`, element by element.
    pub fn softplus(&self) -> Var {
        self.pointwise("softplus", Pointwise::Softplus)
    }

    fn pointwise(&self, name: &'static str, f: Pointwise) -> Var {
        let (device, x, to) = (self.device().clone(), self.value().clone(), self.input());
        let mut out = f32_like(&x);
        kernels::activate(&mut out, &x.to_f32(), f);
        self.tape().op(name, out.cast(self.dtype()), &[self], move |g, gradients| {
            let x = x.to_f32();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::activate_back(dx, &x, &g, f, accumulate);
            });
        })
    }

    /// `silu(gate) * up` (SwiGLU, Shazeer 2020), where each row is `[gate | up]`: `[.., 2 F]` gives `[.., F]`.
    #[track_caller]
    pub fn swiglu(&self) -> Var {
        let (device, x, to, both) = (self.device().clone(), self.value().clone(), self.input(), self.cols());
        assert!(both.is_multiple_of(2), "gate and up are of one width, got {both} together");
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("a last dim") = both / 2;
        let mut out = Tensor::stale(&device, &shape, Dtype::F32);
        kernels::swiglu(&mut out, &x.to_f32(), both / 2);
        self.tape().op("swiglu", out.cast(self.dtype()), &[self], move |g, gradients| {
            let x = x.to_f32();
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::swiglu_back(dx, &x, &g, both / 2, accumulate);
            });
        })
    }
}
