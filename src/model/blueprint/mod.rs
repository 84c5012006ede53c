//! What a model is made of, as values: a family and the recipe's sizes, resolved. `families.rs` is the one place that
//! reads a [`Family`](super::Family); everything else reads the blueprint.

mod families;

use std::ops::Range;

use crate::moe::Activation;

/// The architecture of a model, without its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Blueprint {
    pub shape: ModelShape,
    pub norm: NormKind,
    pub norm_place: NormPlace,
    pub norm_names: NormNames,
    pub positions: Positions,
    pub embedding: EmbeddingKind,
    /// Of self-attention and cross-attention.
    pub heads: HeadsKind,
    pub window: Window,
    /// What is between the products of a feed-forward, dense or an expert.
    pub activation: Activation,
    pub experts: ExpertsKind,
    pub head: HeadKind,
}

/// The stacks of blocks that a model consists of, with their layers. An encoder looks both ways, a decoder back only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelShape {
    Decoder {
        layers: usize,
    },
    Encoder {
        layers: usize,
    },
    /// A decoder that reads, in every block, what an encoder made of another row.
    EncoderDecoder {
        encoder: usize,
        decoder: usize,
    },
}

/// Blocks that run one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackBlueprint {
    /// Among the stacks of the model.
    pub number: u32,
    /// What the names of its tensors begin with.
    pub name: &'static str,
    /// Layers are numbered on from stack to stack.
    pub layers: Range<usize>,
    /// Whether a token sees no later ones.
    pub is_causal: bool,
    /// Of every block, in order.
    pub sub_layers: &'static [SubLayerKind],
    /// Where dropout begins to count its places: at the embedding, then in every sub-layer.
    pub first_place: u32,
    /// The norm behind the last block, if there is one.
    pub norm: Option<&'static str>,
}

impl StackBlueprint {
    /// The place of dropout of the first sub-layer of a layer.
    pub fn place(&self, layer: usize) -> u32 {
        self.first_place + 1 + ((layer - self.layers.start) * self.sub_layers.len()) as u32
    }
}

/// What norms compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance, weight and bias.
    Layer,
    /// Mean square, weight.
    Rms,
}

/// Where a sub-layer's norm stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlace {
    /// Of the sub-layer's input; what is added up is never normed, but for the last norm before the head.
    Before,
    /// Of the sum (Vaswani et al. 2017).
    After,
}

/// What the norms of a block are called in checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormNames {
    /// `input_layernorm`, `cross_attention_layernorm`, `post_attention_layernorm`.
    Llama,
    /// `self_attn_layer_norm`, `encoder_attn_layer_norm`, `final_layer_norm`.
    Fairseq,
}

/// How a token learns where it stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// A table, added to the embedding.
    Learned,
    /// Sines and cosines, added to the embedding; position 0 reads row `first`.
    Sinusoidal { first: u32 },
    /// Queries and keys are rotated.
    Rotary { theta: f32, scaling: RotaryScaling },
    /// Attention scores depend on distances and on the two tokens (Dai et al. 2019).
    Relative,
    /// Attention scores have a learned bias for each bucket of distances, shared by the blocks of a stack (Raffel et al.
    /// 2020).
    RelativeBias { buckets: usize, furthest: usize },
}

/// How rotary angles are stretched for contexts longer than those of pretraining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    None,
    /// YaRN (Peng et al. 2023): slow pairs turn slower by `factor`, fast ones as they did.
    Yarn {
        factor: f32,
        pretrained: usize,
        fast: f32,
        slow: f32,
        /// Whether the first and the last pair that are stretched in part are whole numbers.
        truncates: bool,
        sharpening: Sharpening,
    },
    /// Llama 3.1's: pairs that turn less than `slow` times within the context of pretraining turn slower by `factor`, those
    /// that turn more than `fast` times as they did, and between them shares go by the number of turns.
    Llama {
        factor: f32,
        pretrained: usize,
        fast: f32,
        slow: f32,
    },
}

/// How attention over longer contexts stays as sharp: by m = 0.1 ln(factor) + 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharpening {
    /// What turns of queries and of keys is multiplied by m.
    Turned,
    /// Scores are multiplied by m squared.
    Scores,
}

/// What happens to token vectors before the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingKind {
    /// They are multiplied by the root of the width, so that they outweigh what the first block adds.
    pub scaled: bool,
    /// A norm follows.
    pub normed: bool,
}

/// Attention with queries, keys and values for each head, or for each group of heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadsKind {
    pub heads: usize,
    pub kv_heads: usize,
    /// Whether the family may have fewer heads of keys and values than of queries.
    pub may_group: bool,
    /// Of queries and keys.
    pub head_dim: usize,
    /// Whether `head_dim` is the family's own, whatever the width of the residual stream.
    pub own_dim: bool,
    /// Of the projections to queries, keys and values.
    pub biases: bool,
    /// Of the projection back.
    pub out_bias: bool,
    pub query_key_norm: QueryKeyNorm,
    /// Whether scores are divided by the root of `head_dim`.
    pub scaled: bool,
    /// A learned score a head that no token has and that takes part in the softmax.
    pub sinks: bool,
    /// Keys and values of all heads come from one narrow vector a token, if they do.
    pub latent: Option<LatentKind>,
}

impl HeadsKind {
    /// Width of a head's values.
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// How much of a head's queries and keys turns with positions, in families that rotate them: the last numbers.
    pub fn rotary_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.rotary_dim)
    }
}

/// Norms of queries and keys before they are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    None,
    /// Of each head by itself.
    Head,
    /// Of all heads together.
    Width,
}

/// Widths of multi-head latent attention (DeepSeek-V2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentKind {
    /// Of the vector that queries come from, if there is one.
    pub query_rank: Option<usize>,
    /// Of the vector that keys and values come from.
    pub kv_rank: usize,
    /// Of a head's queries and keys: without, and with, rotary positions. The latter part of keys is the same for all heads.
    pub content_dim: usize,
    pub rotary_dim: usize,
    pub value_dim: usize,
}

/// How far back a token sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    Full,
    /// `tokens` in every other block, the first among them; everything in the others.
    Alternating {
        tokens: usize,
    },
}

/// What a family says of its MoE layers; which they are and how many experts they have, the recipe says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsKind {
    /// What shared experts give is multiplied by a learned sigmoid.
    pub gated_shared: bool,
    /// The router has a bias.
    pub router_bias: bool,
}

/// What stands between the last block and the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// One product.
    Linear,
    /// One product; a tied one is of features divided by the root of the width.
    ScaledIfTied,
    /// BERT's: a dense layer, GELU, a norm, one product and a bias.
    Masked,
}

/// One sub-layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubLayerKind {
    SelfAttention,
    /// To what the stack before made of another row.
    CrossAttention,
    FeedForward,
}

const OWN: &[SubLayerKind] = &[SubLayerKind::SelfAttention, SubLayerKind::FeedForward];
const READING: &[SubLayerKind] =
    &[SubLayerKind::SelfAttention, SubLayerKind::CrossAttention, SubLayerKind::FeedForward];

impl Blueprint {
    /// Whether a token is predicted from earlier ones alone.
    pub fn is_causal(&self) -> bool {
        match self.shape {
            ModelShape::Decoder { .. } | ModelShape::EncoderDecoder { .. } => true,
            ModelShape::Encoder { .. } => false,
        }
    }

    /// Whether there are rows of another text to read.
    pub fn reads_a_source(&self) -> bool {
        matches!(self.shape, ModelShape::EncoderDecoder { .. })
    }

    /// One, or the encoder and the decoder.
    pub fn stacks(&self) -> Vec<StackBlueprint> {
        let of = |name, layers, is_causal, sub_layers| StackBlueprint {
            number: 0,
            name,
            layers,
            is_causal,
            sub_layers,
            first_place: 0,
            norm: match self.norm_place {
                NormPlace::Before if name == "model" => Some("norm"),
                NormPlace::Before => Some("layer_norm"),
                NormPlace::After => None,
            },
        };
        match self.shape {
            ModelShape::Decoder { layers } => vec![of("model", 0..layers, true, OWN)],
            ModelShape::Encoder { layers } => vec![of("model", 0..layers, false, OWN)],
            ModelShape::EncoderDecoder { encoder, decoder } => {
                let first = of("model.encoder", 0..encoder, false, OWN);
                let second = of("model.decoder", encoder..encoder + decoder, true, READING);
                let behind = StackBlueprint { number: 1, first_place: first.place(encoder), ..second };
                vec![first, behind]
            }
        }
    }

    /// What the norm of a block's sub-layer is called.
    pub fn norm_name(&self, of: SubLayerKind) -> &'static str {
        match (self.norm_names, of) {
            (NormNames::Llama, SubLayerKind::SelfAttention) => "input_layernorm",
            (NormNames::Llama, SubLayerKind::CrossAttention) => "cross_attention_layernorm",
            (NormNames::Llama, SubLayerKind::FeedForward) => "post_attention_layernorm",
            (NormNames::Fairseq, SubLayerKind::SelfAttention) => "self_attn_layer_norm",
            (NormNames::Fairseq, SubLayerKind::CrossAttention) => "encoder_attn_layer_norm",
            (NormNames::Fairseq, SubLayerKind::FeedForward) => "final_layer_norm",
        }
    }

    /// Whether positions are added to the embedding from a table that is trained.
    pub fn has_position_table(&self) -> bool {
        self.positions == Positions::Learned
    }

    /// How many tokens a token of a layer sees, itself among them, if not all before it.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        match self.window {
            Window::Alternating { tokens } if layer.is_multiple_of(2) => Some(tokens),
            Window::Alternating { .. } | Window::Full => None,
        }
    }

    /// Whether tokens of some layers see a window of those before them alone.
    pub fn has_windows(&self) -> bool {
        self.window != Window::Full
    }

    /// Whether rotary positions are stretched for longer contexts than those of pretraining.
    pub fn stretches_positions(&self) -> bool {
        matches!(self.positions, Positions::Rotary { scaling, .. } if scaling != RotaryScaling::None)
    }

    /// Whether experts make their activations again in backward as it is.
    pub fn fuses_experts(&self) -> bool {
        self.activation == Activation::SwiGlu
    }

    pub fn is_rotary(&self) -> bool {
        matches!(self.positions, Positions::Rotary { .. })
    }

    /// Whether rows are read in segments that remember those before them.
    pub fn is_segmented(&self) -> bool {
        self.positions == Positions::Relative
    }

    /// Whether feed-forwards have two matrices into their inner width.
    pub fn is_gated(&self) -> bool {
        self.activation.is_gated()
    }
}
