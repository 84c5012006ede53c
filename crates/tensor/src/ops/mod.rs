//! The ops, one file each, forward beside backward. Most are methods of [`crate::Var`].
//!
//! Every op computes in f32, whatever its inputs are stored in, and stores its value in its first input's type. Gradients
//! between ops are f32; a parameter's is stored as the parameter is. What backward needs is kept in the type it was stored in.

mod activation;
mod adamw;
mod attention;
mod columns;
mod cross_entropy;
mod denorm;
mod elementwise;
mod embedding;
mod grouped;
mod grouped_swiglu;
mod linear;
mod norm;
mod relative_attention;
mod rotary;
mod rows;
mod select;
mod softmax;
mod variation;

pub use crate::cpu::adamw::{AdamW, Strips};
pub use crate::cpu::select::{NOWHERE, comparable, largest_of};
pub use crate::cpu::variation::RowGroup;
pub use adamw::SquareSums;
pub use attention::{
    AttentionShape, AttentionSpans, CachedTerms, KvCache, ScoreTerms, TurningPairs, attend_cached, causal_keys,
    cross_keys, segment_keys, side_by_side, within_window,
};
pub use cross_entropy::{Classes, join_statistics, stretch_sums};
pub use denorm::NormMoments;
pub use relative_attention::{Relative, Stretches, reach, relative_attend_cached, sinusoids};
pub use rotary::{rotary_speeds, rotary_tables, turning_tables};
pub use softmax::log_sum_exp_rows;

use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Memory for a result shaped and stored like `like`.
fn stale_like(like: &Tensor) -> Tensor {
    Tensor::stale(like.device(), like.shape(), like.dtype())
}

/// Memory for an op's f32 result, shaped like `like`.
fn f32_like(like: &Tensor) -> Tensor {
    Tensor::stale(like.device(), like.shape(), Dtype::F32)
}
