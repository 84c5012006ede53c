//! What a forward pass is told besides its batch, and what a model is built from.

use guildhall_tensor::{Draws, Dtype, Purpose};

use crate::moe::{self, Routings};
use crate::parallel::{Init, Mesh};

use super::{Config, Family};

/// A forward pass's circumstances. Draws depend on nothing else.
#[derive(Clone)]
pub struct Context<'a> {
    pub mesh: &'a Mesh,
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Whether dropout applies.
    pub trains: bool,
    /// Valid tokens of the whole step, over all ranks and micro-batches: what losses are divided by.
    pub valid_tokens: u64,
    /// Routings to follow or to keep instead of, or besides, the gates'.
    pub routings: &'a Routings,
}

impl Context<'_> {
    /// Draws for dropout at `place`, a number that tells the model's dropouts apart.
    pub fn dropout(&self, place: u32) -> Draws {
        Draws::new(self.seed, Purpose::Dropout, self.step, place)
    }

    /// The weight of one token in a loss.
    pub fn per_token(&self) -> f32 {
        1.0 / self.valid_tokens.max(1) as f32
    }
}

/// Everything that fixes a model's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    pub model: Config,
    pub moe: Option<moe::Config>,
    /// Storage of parameters and activations.
    pub dtype: Dtype,
    /// Seed of the initial values.
    pub seed: u64,
}

impl Sizes {
    /// Initial values of ordinary matrices.
    pub(super) fn init(&self) -> Init {
        Init::Normal { std: self.model.init_std, seed: self.seed }
    }

    /// Initial values of matrices whose products are added to the residual stream: smaller, so that its variance does
    /// not grow with depth (GPT-2).
    pub(super) fn residual_init(&self) -> Init {
        let std = self.model.init_std / (2.0 * self.model.layers as f32).sqrt();
        Init::Normal { std, seed: self.seed }
    }

    pub(super) fn has_biases(&self) -> bool {
        self.model.family == Family::Gpt2
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        self.model.kv_heads.unwrap_or(self.model.heads)
    }

    /// Inner width of dense feed-forwards.
    pub fn d_ff(&self) -> usize {
        self.model.d_ff.unwrap_or(4 * self.model.d_model)
    }

    /// The MoE section, if layer `index` is MoE.
    pub fn moe_of(&self, index: usize) -> Option<&moe::Config> {
        self.moe.as_ref().filter(|moe| moe.layers.contains(index))
    }

    /// Inner width of one expert.
    pub fn d_expert(&self, moe: &moe::Config) -> usize {
        moe.expert_width(self.d_ff())
    }
}
