//! ReLU, GELU, sigmoid, softplus, and SiLU-gated products.

use super::stale_like;
use crate::cpu::activation::Pointwise;
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
        let mut out = stale_like(&x);
        kernels::activate(&mut out, &x, f);
        self.tape().op(name, out, &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                kernels::activate_back(dx, &x, &g, f, accumulate);
            });
        })
    }

    /// `silu(gate) * up` (SwiGLU, Shazeer 2020), where each row is `[gate | up]`: `[.., 2 F]` gives `[.., F]`.
    #[track_caller]
    pub fn swiglu(&self) -> Var {
        self.gated("swiglu", kernels::swiglu, kernels::swiglu_back)
    }

    /// `gate sigmoid(1.702 gate) (up + 1)` (GPT-OSS) of gates up to `limit` and of ups from `-limit` to `limit`, rows as
    /// for [`Var::swiglu`].
    #[track_caller]
    pub fn clamped_swiglu(&self, limit: f32) -> Var {
        let forward = move |out: &mut Tensor, x: &Tensor, width| kernels::clamped_swiglu(out, x, width, limit);
        let backward = move |dx: &mut Tensor, x: &Tensor, g: &Tensor, width, accumulate| {
            kernels::clamped_swiglu_back(dx, x, g, width, limit, accumulate);
        };
        self.gated("clamped_swiglu", forward, backward)
    }

    #[track_caller]
    fn gated(
        &self,
        name: &'static str,
        forward: impl Fn(&mut Tensor, &Tensor, usize),
        backward: impl Fn(&mut Tensor, &Tensor, &Tensor, usize, bool) + 'static,
    ) -> Var {
        let (device, x, to, both) = (self.device().clone(), self.value().clone(), self.input(), self.cols());
        assert!(both.is_multiple_of(2), "gate and up are of one width, got {both} together");
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("a last dim") = both / 2;
        let mut out = Tensor::stale(&device, &shape, self.dtype());
        forward(&mut out, &x, both / 2);
        self.tape().op(name, out, &[self], move |g, gradients| {
            gradients.write(&device, to, x.shape(), |dx, accumulate| {
                backward(dx, &x, &g, both / 2, accumulate);
            });
        })
    }
}
