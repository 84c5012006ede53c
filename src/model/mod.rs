//! The model, assembled from parts that the families share.
//!
//! ```text
//!  tokens -> embedding -> block x L -> norm -> head -> loss
//!                          | x + attention(norm(x))
//!                          | x + feed_forward(norm(x))     dense, or moe::MoeLayer
//! ```
//!
//! BERT and Transformer-XL have their norms after each sum, `norm(x + attention(x))`, and none before the head.

mod attention;
mod block;
mod blueprint;
mod config;
mod context;
mod count;
mod decoder;
mod embedding;
mod feed_forward;
mod generate;
mod head;
mod linear;
mod norm;
mod relative_attention;

pub use blueprint::{
    AttentionKind, Blueprint, EmbeddingKind, ExpertsKind, FeedForwardKind, HeadKind, HeadsKind, LatentKind, NormKind,
    NormNames, NormPlace, Positions, QueryKeyNorm, RotaryScaling, Stacks, SubLayerKind, Window,
};
pub use config::{Config, Family};
pub use context::{Context, Sizes, counted};
pub use count::{Counts, count};
pub use decoder::{Decoder, Forward, LayerLoad};
pub use feed_forward::dense_name;
pub use generate::{Caches, Sampling, sample};
