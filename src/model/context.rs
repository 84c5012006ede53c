//! What a forward pass needs besides its batch, and the sizes from which a model is built.

use std::sync::Arc;

use guildhall_tensor::{Draws, Dtype, Purpose};

use super::{Blueprint, Config, HeadsKind, NormPlace, Role};
use crate::data::{Batch, IGNORE, PAD};
use crate::lora::{self, AdapterSizes};
use crate::moe::migration::FollowingWork;
use crate::moe::{self, Routings, StepFacts};
use crate::parallel::{Init, Mesh, PerLayer};

/// The context of a forward pass. Random draws depend only on it, on the place of the draw, and on token numbers.
#[derive(Clone)]
pub struct Context {
    pub mesh: Mesh,
    pub facts: StepFacts,
    /// Number of valid tokens of the whole step, over all ranks and micro-batches; the loss is divided by it.
    pub valid_tokens: u64,
    /// Number of tokens of the whole step that count in auxiliary losses; these losses are divided by it.
    pub counted_tokens: u64,
    /// Number of tokens of the whole step that an encoder reads for a decoder; the encoder's auxiliary losses are
    /// divided by it.
    pub source_tokens: u64,
    /// Whether the losses of rows are told apart.
    pub tells_rows: bool,
}

impl Context {
    /// For inference.
    pub fn of_inference(mesh: &Mesh, valid_tokens: u64) -> Context {
        let (mesh, facts) = (mesh.clone(), StepFacts::of_inference());
        let (counted_tokens, source_tokens) = (valid_tokens, valid_tokens);
        Context { mesh, facts, valid_tokens, counted_tokens, source_tokens, tells_rows: false }
    }

    /// For writing a text: no token goes without its experts because others came first.
    pub fn of_decoding(mesh: &Mesh) -> Context {
        let facts = StepFacts { unlimited: true, ..StepFacts::of_inference() };
        Context { facts, ..Context::of_inference(mesh, 1) }.without_migration()
    }

    /// For a training step of a model without an encoder before its decoder, if the tokens that count in auxiliary
    /// losses are as many as the valid ones.
    pub fn of_training(mesh: &Mesh, facts: StepFacts, valid_tokens: u64) -> Context {
        Context { facts, source_tokens: 0, ..Context::of_inference(mesh, valid_tokens) }
    }

    /// The same context for a pass in which sequences stay on their ranks.
    pub(super) fn without_migration(&self) -> Context {
        let routings = Routings { migration: None, ..(*self.facts.routings).clone() };
        Context { facts: StepFacts { routings: Arc::new(routings), ..self.facts.clone() }, ..self.clone() }
    }

    /// Random draws for the model's dropout with number `place`.
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

    /// The weight of one token in the auxiliary losses of an encoder that a decoder follows.
    pub fn per_source_token(&self) -> f32 {
        1.0 / self.source_tokens.max(1) as f32
    }
}

/// For each token, given its target and its segment, whether it counts in auxiliary losses. In a causal model the tokens
/// with a target count. In an encoder all tokens count, since each helps to predict the masked ones. In the dialects of
/// other systems all tokens count. Padding never does.
pub fn counted(sizes: &Sizes, targets: &[u32], segments: &[u32]) -> Vec<bool> {
    match sizes.model.is_causal() && !sizes.moe.as_ref().is_some_and(moe::Config::counts_rows) {
        true => targets.iter().map(|&target| target != IGNORE).collect(),
        false => present(segments),
    }
}

/// For each token, given its segment, whether it is not padding.
pub(super) fn present(segments: &[u32]) -> Vec<bool> {
    segments.iter().map(|&segment| segment != PAD).collect()
}

/// Tokens of a text to read that are not padding.
pub fn counted_of_source(source: &Batch) -> u64 {
    match source.counted {
        Some(_) => source.len() as u64,
        None => source.segments.iter().filter(|&&segment| segment != PAD).count() as u64,
    }
}

/// The position of a block in the model.
pub(super) struct LayerPlace {
    /// Index of the layer in the model.
    pub(super) index: usize,
    pub(super) stack: u32,
    /// Prefix of the names of its tensors.
    pub(super) name: String,
}

/// Everything that determines a model's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    pub model: Config,
    pub moe: Option<moe::Config>,
    /// Adapters, which are trained alone.
    pub lora: Option<lora::Config>,
    /// Storage type of parameters and activations.
    pub dtype: Dtype,
    /// Storage type of the gradients of parameters that are not f32.
    pub gradients: Dtype,
    /// Seed of the initial values.
    pub seed: u64,
    /// Parts that keep the values with which training begins.
    pub frozen: Vec<Role>,
}

impl Sizes {
    /// The storage type of a weight's gradient.
    pub fn gradient_of(&self, weight: Dtype) -> Dtype {
        if weight == Dtype::F32 { Dtype::F32 } else { self.gradients }
    }

    /// What adapters are made from, if there are any.
    pub(super) fn adapters(&self) -> Option<AdapterSizes> {
        self.lora.clone().map(|config| AdapterSizes { config, dtype: self.dtype, seed: self.seed })
    }

    /// Initial values of ordinary matrices.
    pub(super) fn init(&self) -> Init {
        Init::Normal { std: self.model.init_std, seed: self.seed }
    }

    /// Initial values of matrices whose products are added to the residual stream. They are smaller if the stream
    /// itself is not normalized, so that its variance does not grow with depth (GPT-2).
    pub(super) fn residual_init(&self) -> Init {
        let depth = match self.blueprint().norm_place {
            NormPlace::Before => 2.0 * self.model.layers as f32,
            NormPlace::After => 1.0,
        };
        Init::Normal { std: self.model.init_std / depth.sqrt(), seed: self.seed }
    }

    /// The blueprint that the family makes of the sizes.
    pub fn blueprint(&self) -> Blueprint {
        self.model.blueprint()
    }

    /// The attention heads.
    pub(super) fn heads(&self) -> HeadsKind {
        self.blueprint().heads
    }

    /// Number of tokens of a segment, and number of tokens remembered before it. Without segments, a row is the segment
    /// and nothing is remembered.
    pub fn segment_and_memory(&self) -> (usize, usize) {
        (self.model.segment.unwrap_or(self.model.seq), self.model.memory.unwrap_or(0))
    }

    /// Multiply-adds of an attention's scores and weighted values, on one of so many ranks. With segments a token attends
    /// to no more than its own and what is remembered.
    pub(super) fn work_of_pairs(&self, ranks: usize) -> FollowingWork {
        let heads = self.heads();
        let of_pair = (heads.heads * (heads.head_dim + heads.value_dim()) / ranks) as u64;
        if !self.blueprint().is_segmented() {
            return FollowingWork { per_pair: of_pair, ..FollowingWork::default() };
        }
        let (segment, memory) = self.segment_and_memory();
        FollowingWork { per_token: (segment + memory) as u64 * of_pair, ..FollowingWork::default() }
    }

    /// Inner width of dense feed-forwards.
    pub fn d_ff(&self) -> usize {
        self.model.d_ff.unwrap_or(4 * self.model.d_model)
    }

    /// The MoE section, if layer `index` is MoE.
    pub fn moe_of(&self, index: usize) -> Option<moe::LayerConfig<'_>> {
        self.moe.as_ref()?.of_layer(index)
    }

    /// The MoE layers, each with its index and what the section says of it.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, moe::LayerConfig<'_>)> {
        (0..self.model.layers).filter_map(|index| Some((index, self.moe_of(index)?)))
    }

    /// Number of pairs of experts that are counted in each MoE layer.
    pub fn pairs(&self) -> Vec<usize> {
        let counted = |moe: &moe::LayerConfig| if moe.pairs_every > 0 { moe.pairs() } else { 0 };
        self.moe_layers().map(|(_, moe)| counted(&moe)).collect()
    }

    /// Number of ranks over which the experts of layer `index` are distributed.
    ///
    /// # Panics
    /// If a list is too short; the configuration is checked before.
    pub fn expert_degree(&self, index: usize, degrees: &PerLayer) -> usize {
        degrees.at(self.moe.as_ref().map_or(0, |moe| moe.layers.before(index)))
    }

    /// Inner width of one expert.
    pub fn d_expert(&self, moe: &moe::Config) -> usize {
        moe.expert_width(self.d_ff())
    }
}
