//! Tokens become vectors; with learned positions, positions do too. With relative ones, the vectors are longer instead.
//! The head may share the token table.

use std::sync::Arc;

use guildhall_tensor::{Device, Tape, Var};

use super::norm::{Norm, NormPlace};
use super::{Positions, Sizes};
use crate::parallel::{Parameters, Placement, Spread, Weight};

/// Token table `[V, D]` and, for learned positions, position table `[S, D]`.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) tokens: Weight,
    positions: Option<Weight>,
    /// Where norms follow sums, one follows the first sum.
    norm: Option<Norm>,
    /// Of the tokens' vectors: sqrt(D), so that they outweigh what the first layer adds (Vaswani et al. 2017).
    scale: Option<f32>,
}

impl Embedding {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes) -> Embedding {
        let model = &sizes.model;
        let table = |name: &str, rows| {
            let shape = [rows, model.d_model];
            let placement = Placement::new(Spread::Replicated, [(name.to_owned(), shape.to_vec())]);
            Weight::new(device, placement, &shape, sizes.dtype, sizes.init())
        };
        let learned = model.family.positions() == Positions::Learned;
        let normed = learned && sizes.norms() == NormPlace::After;
        Embedding {
            tokens: table("model.embed_tokens.weight", model.vocab),
            positions: learned.then(|| table("model.embed_positions.weight", model.seq)),
            scale: (model.family.positions() == Positions::Relative).then(|| (model.d_model as f32).sqrt()),
            norm: normed.then(|| Norm::new(device, "model.layernorm_embedding", sizes)),
        }
    }

    /// `[T, D]` from T tokens and their positions.
    pub(super) fn forward(&self, tape: &Tape, tokens: &[u32], positions: &[u32]) -> Var {
        let dtype = self.tokens.parameter.value().dtype();
        let x = tape.parameter(&self.tokens.parameter).embed(tokens, dtype);
        let x = self.scale.map_or(x.clone(), |scale| x.scale(scale));
        let x = match &self.positions {
            Some(table) => x.add(&tape.parameter(&table.parameter).embed(positions, dtype)),
            None => x,
        };
        self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x))
    }
}

impl Parameters for Embedding {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.tokens);
        self.positions.iter_mut().for_each(&mut *f);
        self.norm.iter_mut().for_each(|norm| norm.visit(f));
    }
}
