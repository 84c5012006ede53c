//! The `[model]` section of a recipe: the decoder's family and sizes.

use serde::{Deserialize, Serialize};

/// Which published architecture the parts are assembled into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Layer norm, learned positions, GELU, biases.
    Gpt2,
    /// RMS norm, rotary positions, grouped-query heads, SwiGLU, no biases.
    Mixtral,
}

impl Family {
    /// Whether a token is predicted from earlier ones alone.
    pub fn is_causal(self) -> bool {
        match self {
            Family::Gpt2 | Family::Mixtral => true,
        }
    }
}

/// Sizes of the decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(default = "default_family")]
    pub family: Family,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    pub layers: usize,
    pub heads: usize,
    /// Heads of keys and values; absent means as many as `heads`.
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Inner width of dense feed-forward layers; absent means `4 * d_model`.
    #[serde(default)]
    pub d_ff: Option<usize>,
    /// Tokens in a row.
    pub seq: usize,
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
    /// Standard deviation of initial weights; projections into the residual stream get it divided by
    /// the square root of `2 * layers`.
    #[serde(default = "default_init_std")]
    pub init_std: f32,
}

impl Config {
    /// A decoder of these sizes, and defaults for the rest.
    pub fn of(vocab: usize, (d_model, layers, heads): (usize, usize, usize), seq: usize) -> Config {
        Config {
            family: default_family(),
            vocab,
            d_model,
            layers,
            heads,
            kv_heads: None,
            d_ff: None,
            seq,
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
