//! What a forward pass is told besides its batch, and what a model is built from.

use guildhall_tensor::{Draws, Dtype, Purpose};

use super::{Blueprint, Config, HeadsKind, NormPlace};
use crate::data::IGNORE;
use crate::moe::{self, StepFacts};
use crate::parallel::{Degrees, Init, Mesh};

/// A forward pass's circumstances. Draws depend on nothing else.
#[derive(Clone)]
pub struct Context {
    pub mesh: Mesh,
    pub facts: StepFacts,
    /// Valid tokens of the whole step, over all ranks and micro-batches: what the loss is divided by.
    pub valid_tokens: u64,
    /// Tokens of the whole step that count in auxiliary losses: what those are divided by.
    pub counted_tokens: u64,
    /// Tokens of the whole step that an encoder reads for a decoder: its auxiliary losses are divided by these.
    pub source_tokens: u64,
}

impl Context {
    /// Where nothing is learned.
    pub fn of_inference(mesh: &Mesh, valid_tokens: u64) -> Context {
        let (mesh, facts) = (mesh.clone(), StepFacts::of_inference());
        Context { mesh, facts, valid_tokens, counted_tokens: valid_tokens, source_tokens: valid_tokens }
    }

    /// A step of training of a model without an encoder before its decoder, in which as many tokens count in the auxiliary
    /// losses as are valid.
    pub fn of_training(mesh: &Mesh, facts: StepFacts, valid_tokens: u64) -> Context {
        Context { mesh: mesh.clone(), facts, valid_tokens, counted_tokens: valid_tokens, source_tokens: 0 }
    }

    /// Draws for dropout at `place`, a number that tells the model's dropouts apart.
    pub fn dropout(&self, place: u32) -> Draws {
        Draws::new(self.facts.seed, Purpose::Dropout, self.facts.step, place)
    }

    /// The weight of one valid token in the loss.
    pub fn per_valid_token(&self) -> f32 {
        1.0 / self.valid_tokens.max(1) as f32
    }

    /// The weight of one token in the auxiliary losses.
    pub fn per_counted_token(&self) -> f32 {
        1.0 / self.counted_tokens.max(1) as f32
    }

    /// The same in an encoder that a decoder reads.
    pub fn per_source_token(&self) -> f32 {
        1.0 / self.source_tokens.max(1) as f32
    }
}

/// Which tokens with these targets count in auxiliary losses: in a causal model those that predict something, in an encoder
/// all, as each helps to predict the hidden ones; in the dialects of other systems, all.
pub fn counted(sizes: &Sizes, targets: &[u32]) -> Vec<bool> {
    match sizes.model.is_causal() && !sizes.moe.as_ref().is_some_and(moe::Config::counts_rows) {
        true => targets.iter().map(|&target| target != IGNORE).collect(),
        false => vec![true; targets.len()],
    }
}

/// Where a block stands.
pub(super) struct LayerPlace {
    /// Of the model.
    pub(super) index: usize,
    pub(super) stack: u32,
    /// What the names of its tensors begin with.
    pub(super) name: String,
}

/// Everything that fixes a model's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    pub model: Config,
    pub moe: Option<moe::Config>,
    /// Storage of parameters and activations.
    pub dtype: Dtype,
    /// Storage of the gradients of parameters that are not f32.
    pub gradients: Dtype,
    /// Seed of the initial values.
    pub seed: u64,
}

impl Sizes {
    /// How the gradient of a weight is stored.
    pub fn gradient_of(&self, weight: Dtype) -> Dtype {
        if weight == Dtype::F32 { Dtype::F32 } else { self.gradients }
    }

    /// Initial values of ordinary matrices.
    pub(super) fn init(&self) -> Init {
        Init::Normal { std: self.model.init_std, seed: self.seed }
    }

    /// Initial values of matrices whose products are added to the residual stream: smaller where nothing norms the
    /// stream, so that its variance does not grow with depth (GPT-2).
    pub(super) fn residual_init(&self) -> Init {
        let depth = match self.blueprint().norm_place {
            NormPlace::Before => 2.0 * self.model.layers as f32,
            NormPlace::After => 1.0,
        };
        Init::Normal { std: self.model.init_std / depth.sqrt(), seed: self.seed }
    }

    /// What the family makes of the sizes.
    pub fn blueprint(&self) -> Blueprint {
        self.model.blueprint()
    }

    /// Heads of attention.
    ///
    /// # Panics
    /// Where keys and values are latent: such a model has been refused.
    pub(super) fn heads(&self) -> HeadsKind {
        self.blueprint().heads().expect("a model of heads")
    }

    /// Tokens of a segment, and tokens remembered before it; without segments, a row and none.
    pub fn segment_and_memory(&self) -> (usize, usize) {
        (self.model.segment.unwrap_or(self.model.seq), self.model.memory.unwrap_or(0))
    }

    /// Inner width of dense feed-forwards.
    pub fn d_ff(&self) -> usize {
        self.model.d_ff.unwrap_or(4 * self.model.d_model)
    }

    /// The MoE section, if layer `index` is MoE.
    pub fn moe_of(&self, index: usize) -> Option<&moe::Config> {
        self.moe.as_ref().filter(|moe| moe.layers.contains(index))
    }

    /// Pairs of experts that are counted in a MoE layer, and in all of them.
    pub fn pairs(&self) -> (usize, usize) {
        let counted = self.moe.as_ref().filter(|moe| moe.pairs_every > 0);
        let pairs = counted.map_or(0, |moe| moe::Counts::pairs_len(moe.experts, moe.slots()));
        (pairs, pairs * (0..self.model.layers).filter(|&layer| self.moe_of(layer).is_some()).count())
    }

    /// Over how many ranks the experts of layer `index` are spread.
    ///
    /// # Panics
    /// If a list is too short: configuration has been checked before.
    pub fn expert_degree(&self, index: usize, degrees: &Degrees) -> usize {
        match degrees {
            Degrees::Same(degree) => *degree,
            Degrees::Each(list) => list[(0..index).filter(|&before| self.moe_of(before).is_some()).count()],
        }
    }

    /// Inner width of one expert.
    pub fn d_expert(&self, moe: &moe::Config) -> usize {
        moe.expert_width(self.d_ff())
    }
}
