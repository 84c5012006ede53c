//! The router: one linear score per expert, in f32 whatever the model is stored in.

use guildhall_tensor::{Device, Dtype, Var};
use std::sync::Arc;

use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// Scores tokens for experts.
#[derive(Debug)]
pub struct Router {
    weight: Weight,
}

impl Router {
    /// `experts` scores from `d_model` features; the weight is named `<name>.weight`.
    pub fn new(device: &Arc<Device>, name: &str, (experts, d_model): (usize, usize), init: Init) -> Router {
        let placement = Placement::new(Spread::Replicated, [(format!("{name}.weight"), vec![experts, d_model])]);
        Router { weight: Weight::new(device, placement, &[experts, d_model], Dtype::F32, init) }
    }

    /// Logits `[T, E]` of tokens `[T, D]`.
    pub fn logits(&self, x: &Var) -> Var {
        x.cast(Dtype::F32).linear(&x.tape().parameter(&self.weight.parameter), None)
    }
}

impl Parameters for Router {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
    }
}
