//! The `[model]` section of a recipe: the model's family and sizes.

use serde::{Deserialize, Serialize};

use super::{Blueprint, HeadKind, ModelShape, StackBlueprint};
use crate::moe;

/// Which published architecture the parts are assembled into; `blueprint/families.rs` says which parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Gpt2,
    Llama,
    Mixtral,
    /// An encoder that predicts hidden tokens.
    Bert,
    /// Segments that remember those before them.
    TransformerXl,
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
    DeepseekV3,
    GptOss,
    /// An encoder and a decoder of M2M100's kind, dense or with experts.
    M2m,
    /// The same, by the name of the published models with experts.
    NllbMoe,
    /// An encoder and a decoder of T5's kind.
    Switch,
}

impl Family {
    pub const ALL: [Family; 13] = [
        Family::Gpt2,
        Family::Llama,
        Family::Mixtral,
        Family::Bert,
        Family::TransformerXl,
        Family::Olmoe,
        Family::Qwen2Moe,
        Family::Qwen3Moe,
        Family::DeepseekV3,
        Family::GptOss,
        Family::M2m,
        Family::NllbMoe,
        Family::Switch,
    ];

    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Family::Gpt2 => "gpt2",
            Family::Llama => "llama",
            Family::Mixtral => "mixtral",
            Family::Bert => "bert",
            Family::TransformerXl => "transformer_xl",
            Family::Olmoe => "olmoe",
            Family::Qwen2Moe => "qwen2_moe",
            Family::Qwen3Moe => "qwen3_moe",
            Family::DeepseekV3 => "deepseek_v3",
            Family::GptOss => "gpt_oss",
            Family::M2m => "m2m",
            Family::NllbMoe => "nllb_moe",
            Family::Switch => "switch",
        }
    }
}

/// What a weight of the model is for: the parts of it that can be frozen. Every weight is of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Tables of tokens and positions, and the norm behind them.
    Embedding,
    /// All of attention: projections, norms of queries and keys, sinks, biases of distances.
    Attention,
    /// Norms of the residual stream.
    Norms,
    /// Scores of tokens for experts, and the bias that balances them.
    Router,
    /// Those that a router chooses among.
    Experts,
    /// What every token passes through beside its experts, and by how much it counts.
    SharedExperts,
    /// Feed-forwards of layers without experts.
    FeedForward,
    /// All behind the last norm of the residual stream; a tied one shares the embedding's table, which is the embedding's.
    Head,
}

impl Role {
    pub const ALL: [Role; 8] = [
        Role::Embedding,
        Role::Attention,
        Role::Norms,
        Role::Router,
        Role::Experts,
        Role::SharedExperts,
        Role::FeedForward,
        Role::Head,
    ];

    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Role::Embedding => "embedding",
            Role::Attention => "attention",
            Role::Norms => "norms",
            Role::Router => "router",
            Role::Experts => "experts",
            Role::SharedExperts => "shared_experts",
            Role::FeedForward => "feed_forward",
            Role::Head => "head",
        }
    }
}

/// Sizes of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(default = "default_family")]
    pub family: Family,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks, over both stacks of an encoder and a decoder.
    pub layers: usize,
    /// How many of them are the encoder's, where there is a decoder too; absent means those that the decoder leaves, or
    /// half.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_layers: Option<usize>,
    /// How many of them are the decoder's, where there is an encoder too; absent means those that the encoder leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_layers: Option<usize>,
    pub heads: usize,
    /// Heads of keys and values; absent means as many as `heads`.
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Width of a head's queries and keys, in families where `d_model` does not say it; absent means the published one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Width of the vector that a token's queries come from, in families that have one; 0 means that they come from the
    /// residual stream, absent the published number. So for the four that follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_rank: Option<usize>,
    /// Width of the vector that a token's keys and values come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_rank: Option<usize>,
    /// Width of the part of a head's queries and keys without positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_dim: Option<usize>,
    /// Width of the part with rotary positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_dim: Option<usize>,
    /// Width of a head's values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Tokens that a token sees in blocks with a window, itself among them; absent means the published number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// How much longer rows are than those for which rotary positions were made, and how long these were; absent means
    /// the published numbers, in `llama` a factor of 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_factor: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_pretrained: Option<usize>,
    /// Inner width of dense feed-forward layers; absent means `4 * d_model`.
    #[serde(default)]
    pub d_ff: Option<usize>,
    /// Tokens in a row; of an encoder and a decoder, in a row of the decoder.
    pub seq: usize,
    /// Tokens in a row of an encoder that a decoder follows; absent means as many as in a row of the decoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_seq: Option<usize>,
    /// Tokens of a segment, in families that remember: a token sees the earlier ones of its segment, and memory.
    #[serde(default)]
    pub segment: Option<usize>,
    /// Tokens before a segment that its tokens see besides.
    #[serde(default)]
    pub memory: Option<usize>,
    /// Probability of zeroing an element after the embedding and after each sub-layer.
    #[serde(default)]
    pub dropout: f32,
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f32,
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f32,
    /// The head shares the embedding's weight.
    #[serde(default)]
    pub tie_embeddings: bool,
    /// Standard deviation of initial weights; where norms stand before sub-layers, projections into the
    /// residual stream get it divided by the square root of `2 * layers`.
    #[serde(default = "default_init_std")]
    pub init_std: f32,
}

impl Config {
    /// What the family makes of these sizes.
    pub fn blueprint(&self) -> Blueprint {
        Blueprint::new(self)
    }

    /// Whether a token is predicted from earlier ones alone.
    pub fn is_causal(&self) -> bool {
        self.blueprint().is_causal()
    }

    /// Layers of an encoder and of the decoder that follows it.
    pub fn stack_layers(&self) -> Option<[usize; 2]> {
        match self.blueprint().shape {
            ModelShape::EncoderDecoder { encoder, decoder } => Some([encoder, decoder]),
            ModelShape::Decoder { .. } | ModelShape::Encoder { .. } => None,
        }
    }

    /// Fills in what is absent of two stacks.
    pub(crate) fn derive_stacks(&mut self) {
        if let Some([encoder, _]) = self.stack_layers() {
            self.encoder_layers.get_or_insert(encoder);
            self.source_seq.get_or_insert(self.seq);
        }
    }

    /// Tokens in a row of each stack, in order.
    pub fn row_lengths(&self) -> Vec<usize> {
        let source = self.blueprint().reads_a_source().then(|| self.source_seq.unwrap_or(self.seq));
        source.into_iter().chain([self.seq]).collect()
    }

    /// Tokens in a row of the stack that has a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn row_length_of(&self, layer: usize) -> usize {
        let stacks = self.blueprint().stacks();
        let has_layer = |(stack, _): &(&StackBlueprint, usize)| stack.layers.contains(&layer);
        stacks.iter().zip(self.row_lengths()).find(has_layer).expect("a layer of the model").1
    }

    /// Tokens in the longest row of any stack.
    pub fn longest_row(&self) -> usize {
        self.seq.max(self.row_lengths()[0])
    }

    /// Whether a token that sees no later ones goes through experts.
    pub fn has_causal_experts(&self, moe: &moe::Config) -> bool {
        let of_stack = |stack: &StackBlueprint| stack.is_causal && stack.layers.clone().any(|l| moe.layers.contains(l));
        self.blueprint().stacks().iter().any(of_stack)
    }

    /// Why a model of these sizes has no weights of a role, if it has none.
    pub fn lacks(&self, role: Role, moe: Option<&moe::Config>) -> Option<&'static str> {
        let is_dense = |layer| moe.is_none_or(|moe| !moe.layers.contains(layer));
        let (lacks, because) = match role {
            Role::Embedding | Role::Attention | Role::Norms => (false, ""),
            Role::Router | Role::Experts => (moe.is_none(), "the recipe has no [moe] section"),
            Role::SharedExperts => {
                let has_any = moe.is_some_and(|moe| moe.residual || moe.shared_experts > 0);
                (!has_any, "no token passes through anything but its experts (moe.shared_experts, moe.residual)")
            }
            Role::FeedForward => (!(0..self.layers).any(is_dense), "every layer has experts (moe.layers)"),
            Role::Head => {
                let shares_all = self.tie_embeddings && self.blueprint().head != HeadKind::Masked;
                (shares_all, "model.tie_embeddings = true: the table is the embedding's")
            }
        };
        lacks.then_some(because)
    }

    /// What of the model so many ranks do not cut evenly, by key: attention is cut by heads, dense feed-forwards by their
    /// inner width. A vocabulary need not divide. `moe` says which layers are dense.
    pub fn uneven_over(&self, tensor: usize, moe: Option<&moe::Config>) -> Vec<(&'static str, usize)> {
        let is_dense = |layer| moe.is_none_or(|moe| !moe.layers.contains(layer));
        let dense = (0..self.layers).any(is_dense).then_some(self.d_ff).flatten();
        let divides = |size: &usize| size.is_multiple_of(tensor);
        // A head of keys and values may serve the queries of several ranks.
        let serves = |kv_heads: &usize| divides(kv_heads) || tensor.is_multiple_of(*kv_heads);
        let heads = (!divides(&self.heads)).then_some(("model.heads", self.heads));
        let kv_heads = self.kv_heads.filter(|kv_heads| !serves(kv_heads)).map(|size| ("model.kv_heads", size));
        let d_ff = dense.filter(|d_ff| !divides(d_ff)).map(|size| ("model.d_ff", size));
        [heads, kv_heads, d_ff].into_iter().flatten().collect()
    }

    /// A decoder of these sizes, and defaults for the rest.
    pub fn of(vocab: usize, (d_model, layers, heads): (usize, usize, usize), seq: usize) -> Config {
        Config {
            family: default_family(),
            vocab,
            d_model,
            layers,
            encoder_layers: None,
            decoder_layers: None,
            heads,
            kv_heads: None,
            head_dim: None,
            query_rank: None,
            kv_rank: None,
            content_dim: None,
            rotary_dim: None,
            value_dim: None,
            window: None,
            rope_factor: None,
            rope_pretrained: None,
            d_ff: None,
            seq,
            source_seq: None,
            segment: None,
            memory: None,
            dropout: 0.0,
            rope_theta: default_rope_theta(),
            norm_eps: default_norm_eps(),
            tie_embeddings: false,
            init_std: default_init_std(),
        }
    }
}

fn default_family() -> Family {
    Family::Mixtral
}

fn default_rope_theta() -> f32 {
    10_000.0
}

fn default_norm_eps() -> f32 {
    1e-5
}

fn default_init_std() -> f32 {
    0.02
}
