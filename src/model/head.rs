//! The head: from features to one logit for every entry of the vocabulary, and the loss.

use std::sync::Arc;

use guildhall_tensor::{Device, Tensor, Var};

use super::linear::{Linear, Outputs};
use super::norm::Norm;
use super::{Family, Sizes};
use crate::data::IGNORE;
use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// What stands between the last block and the loss.
#[derive(Debug)]
pub(super) struct Head {
    transform: Option<Transform>,
    /// `[V, D]`; absent when the token table serves.
    weight: Option<Weight>,
    /// `[V]`.
    bias: Option<Weight>,
}

/// `norm(gelu(W x + b))`, which turns BERT's features into what is compared with the tokens' vectors.
#[derive(Debug)]
struct Transform {
    dense: Linear,
    norm: Norm,
}

impl Head {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes) -> Head {
        let (v, d) = (sizes.model.vocab, sizes.model.d_model);
        let weight = |name: &str, shape: &[usize], init| {
            let placement = Placement::new(Spread::Replicated, [(name.to_owned(), shape.to_vec())]);
            Weight::new(device, placement, shape, sizes.dtype, init)
        };
        let masked = sizes.model.family == Family::Bert;
        let name = if masked { "lm_head.decoder.weight" } else { "lm_head.weight" };
        Head {
            transform: masked.then(|| Transform::new(device, sizes)),
            weight: (!sizes.model.tie_embeddings).then(|| weight(name, &[v, d], sizes.init())),
            bias: masked.then(|| weight("lm_head.bias", &[v], Init::Zeros)),
        }
    }

    /// `scale` times the summed cross-entropy of features `[T, D]`, with `tokens` the table that a tied head shares.
    pub(super) fn loss(&self, x: &Var, tokens: &Weight, targets: &[u32], scale: f32) -> Var {
        let (weight, bias) = self.on_tape(x, tokens);
        let Some(transform) = &self.transform else {
            return x.linear_cross_entropy(&weight, bias.as_ref(), targets, scale);
        };
        // Few tokens of a masked model have a target, and only for those is there anything to transform.
        let chosen: Vec<u32> = (0..targets.len() as u32).filter(|&t| targets[t as usize] != IGNORE).collect();
        let targets: Vec<u32> = chosen.iter().map(|&t| targets[t as usize]).collect();
        let x = transform.forward(&x.gather_rows(&chosen));
        x.linear_cross_entropy(&weight, bias.as_ref(), &targets, scale)
    }

    /// Logits `[T, V]` as f32.
    pub(super) fn logits(&self, x: &Var, tokens: &Weight) -> Tensor {
        let (weight, bias) = self.on_tape(x, tokens);
        match &self.transform {
            Some(transform) => transform.forward(x).logits(&weight, bias.as_ref()),
            None => x.logits(&weight, bias.as_ref()),
        }
    }

    fn on_tape(&self, x: &Var, tokens: &Weight) -> (Var, Option<Var>) {
        let tape = x.tape();
        let weight = tape.parameter(&self.weight.as_ref().unwrap_or(tokens).parameter);
        (weight, self.bias.as_ref().map(|bias| tape.parameter(&bias.parameter)))
    }
}

impl Parameters for Head {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        if let Some(Transform { dense, norm }) = &mut self.transform {
            dense.visit(f);
            norm.visit(f);
        }
        self.weight.iter_mut().for_each(&mut *f);
        self.bias.iter_mut().for_each(f);
    }
}

impl Transform {
    fn new(device: &Arc<Device>, sizes: &Sizes) -> Transform {
        let d = sizes.model.d_model;
        let outputs = [("lm_head.dense".to_owned(), d)];
        Transform {
            dense: Linear::new(device, Outputs(&outputs), d, sizes.dtype, (sizes.init(), true)),
            norm: Norm::new(device, "lm_head.layer_norm", sizes),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        self.norm.forward(&self.dense.forward(x).gelu())
    }
}
