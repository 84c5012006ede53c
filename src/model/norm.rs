//! The family's norm: layer norm (GPT-2) or RMS norm (Mixtral).

use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::{Family, Sizes};
use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// Norm over the residual stream's width.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Weight,
    /// Layer norm has one.
    bias: Option<Weight>,
    eps: f32,
}

impl Norm {
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes) -> Norm {
        let d = sizes.model.d_model;
        let vector = |part: &str, init| {
            let placement = Placement::new(Spread::Replicated, [(format!("{name}.{part}"), vec![d])]);
            Weight::new(device, placement, &[d], sizes.dtype, init)
        };
        let bias = (sizes.model.family == Family::Gpt2).then(|| vector("bias", Init::Zeros));
        Norm { weight: vector("weight", Init::Ones), bias, eps: sizes.model.norm_eps }
    }

    pub(super) fn forward(&self, x: &Var) -> Var {
        let tape = x.tape();
        let weight = tape.parameter(&self.weight.parameter);
        match &self.bias {
            Some(bias) => x.layer_norm(&weight, &tape.parameter(&bias.parameter), self.eps),
            None => x.rms_norm(&weight, self.eps),
        }
    }
}

impl Parameters for Norm {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(f);
    }
}
