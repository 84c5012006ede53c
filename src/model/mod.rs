//! The decoder, assembled from parts that two families share.
//!
//! ```text
//!  tokens -> embedding -> block x L -> norm -> head -> loss
//!                          | x + attention(norm(x))
//!                          | x + feed_forward(norm(x))     dense, or moe::MoeLayer
//! ```

mod attention;
mod block;
mod config;
mod context;
mod count;
mod decoder;
mod embedding;
mod feed_forward;
mod generate;
mod linear;
mod norm;

pub use config::{Config, Family};
pub use context::{Context, Sizes};
pub use count::{Counts, count};
pub use decoder::{Decoder, Forward, LayerLoad};
pub use feed_forward::dense_name;
pub use generate::{Caches, Sampling, sample};
