//! The model, assembled from parts that the families share.
//!
//! ```text
//!  tokens -> embedding -> block x L -> norm -> head -> loss
//!                          | x + attention(norm(x))
//!                          | x + feed_forward(norm(x))     dense, or moe::MoeLayer
//! ```
//!
//! BERT and Transformer-XL have their norms after each sum, `norm(x + attention(x))`, and none before the head.

mod adapted;
mod attention;
mod beam;
mod block;
mod blueprint;
mod cache;
mod config;
mod context;
mod count;
mod decode;
mod distances;
mod embedding;
mod feed_forward;
mod generate;
mod head;
mod heads;
mod language_model;
mod latent;
mod linear;
mod norm;
mod projections;
mod relative_attention;
mod rotary;
mod spans;
mod stack;
mod stream_facts;

pub use adapted::Projection;
pub use beam::{BeamOptions, Hypothesis, search};
pub use blueprint::{
    Blueprint, EmbeddingKind, ExpertsKind, HeadKind, HeadsKind, LatentKind, ModelShape, NormKind, NormNames, NormPlace,
    Positions, QueryKeyNorm, RotaryScaling, Sharpening, StackBlueprint, SubLayerKind, Window,
};
pub use config::{Config, Family, Role};
pub use context::{Context, Sizes, counted, counted_of_source};
pub use count::{ParameterCounts, count};
pub use decode::{Encoded, Translator};
pub use feed_forward::dense_name;
pub use generate::{Caches, Sampling, sample};
pub use language_model::{Forward, LayerLoad, Model, RowLosses};
