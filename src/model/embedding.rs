//! Tokens become vectors; with learned positions (GPT-2), positions do too. The head may share the token table.

use std::sync::Arc;

use guildhall_tensor::{Device, Tape, Var};

use super::{Family, Sizes};
use crate::parallel::{Parameters, Placement, Spread, Weight};

/// Token table `[V, D]` and, for learned positions, position table `[S, D]`.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) tokens: Weight,
    positions: Option<Weight>,
}

impl Embedding {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes) -> Embedding {
        let model = &sizes.model;
        let table = |name: &str, rows| {
            let shape = [rows, model.d_model];
            let placement = Placement::new(Spread::Replicated, [(name.to_owned(), shape.to_vec())]);
            Weight::new(device, placement, &shape, sizes.dtype, sizes.init())
        };
        let positions = (model.family == Family::Gpt2).then(|| table("model.embed_positions.weight", model.seq));
        Embedding { tokens: table("model.embed_tokens.weight", model.vocab), positions }
    }

    /// `[T, D]` from T tokens and their positions.
    pub(super) fn forward(&self, tape: &Tape, tokens: &[u32], positions: &[u32]) -> Var {
        let dtype = self.tokens.parameter.value().dtype();
        let x = tape.parameter(&self.tokens.parameter).embed(tokens, dtype);
        match &self.positions {
            Some(table) => x.add(&tape.parameter(&table.parameter).embed(positions, dtype)),
            None => x,
        }
    }
}

impl Parameters for Embedding {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.tokens);
        self.positions.iter_mut().for_each(f);
    }
}
