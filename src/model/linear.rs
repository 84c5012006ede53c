//! A dense linear layer: `y = x W^T + b`.

use std::sync::Arc;

use guildhall_tensor::{Device, Dtype, Var};

use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// Weight `[out, in]`, possibly several global tensors one above the other, and maybe a bias.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Weight,
    bias: Option<Weight>,
}

/// The outputs of a linear layer: named parts, one above the other.
pub(super) struct Outputs<'a>(pub(super) &'a [(String, usize)]);

impl Linear {
    /// `inner` inputs; part p of the outputs is the global tensor `<p's name>.weight`.
    pub(super) fn new(
        device: &Arc<Device>,
        outputs: Outputs,
        inner: usize,
        dtype: Dtype,
        (init, has_bias): (Init, bool),
    ) -> Linear {
        let outer: usize = outputs.0.iter().map(|(_, width)| width).sum();
        let weights = outputs.0.iter().map(|(name, width)| (format!("{name}.weight"), vec![*width, inner]));
        let biases = outputs.0.iter().map(|(name, width)| (format!("{name}.bias"), vec![*width]));
        let bias = || Weight::new(device, Placement::new(Spread::Replicated, biases), &[outer], dtype, Init::Zeros);
        Linear {
            weight: Weight::new(device, Placement::new(Spread::Replicated, weights), &[outer, inner], dtype, init),
            bias: has_bias.then(bias),
        }
    }

    pub(super) fn forward(&self, x: &Var) -> Var {
        let tape = x.tape();
        let bias = self.bias.as_ref().map(|bias| tape.parameter(&bias.parameter));
        x.linear(&tape.parameter(&self.weight.parameter), bias.as_ref())
    }

    /// The product twice, for a layer without a bias: through the second value no gradient goes to x.
    pub(super) fn forward_twice(&self, x: &Var) -> [Var; 2] {
        assert!(self.bias.is_none(), "a product that is remembered has no bias");
        x.linear_twice(&x.tape().parameter(&self.weight.parameter))
    }
}

impl Parameters for Linear {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(f);
    }
}
