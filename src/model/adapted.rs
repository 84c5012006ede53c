//! Which projections a model has, by the names that adapters know them by.

use super::{Config, LatentKind};
use crate::lora::Target;
use crate::moe;

/// A matrix of which some layer has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    pub target: Target,
    pub outputs: usize,
    pub inputs: usize,
}

impl Config {
    /// The projections of attention, of dense feed-forwards, and of networks beside experts; of each kind the narrowest.
    pub fn projections(&self, moe: Option<&moe::Config>) -> Vec<Projection> {
        let (blueprint, d) = (self.blueprint(), self.d_model);
        let of = |target, outputs, inputs| Projection { target, outputs, inputs };
        let heads = blueprint.heads;
        let (queries, keys) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
        let to_heads: Vec<Projection> = match heads.latent {
            None => vec![of(Target::QProj, queries, d), of(Target::KProj, keys, d), of(Target::VProj, keys, d)],
            Some(LatentKind { query_rank, kv_rank, content_dim, rotary_dim, value_dim }) => {
                let of_queries = match query_rank {
                    None => vec![of(Target::QProj, queries, d)],
                    Some(rank) => vec![of(Target::QAProj, rank, d), of(Target::QBProj, queries, rank)],
                };
                let narrow = of(Target::KvAProjWithMqa, kv_rank + rotary_dim, d);
                let wide = of(Target::KvBProj, heads.heads * (content_dim + value_dim), kv_rank);
                of_queries.into_iter().chain([narrow, wide]).collect()
            }
        };
        let distances = blueprint.is_segmented().then(|| of(Target::RProj, d, d));
        let back = of(Target::OProj, d, heads.heads * heads.value_dim());
        let attention = to_heads.into_iter().chain([back]).chain(distances);
        let is_dense = |layer| moe.is_none_or(|moe| !moe.layers.contains(layer));
        let d_ff = self.d_ff.unwrap_or(4 * d);
        let dense = (0..self.layers).any(is_dense).then_some(d_ff);
        let beside = moe.and_then(|moe| match (moe.residual, moe.shared_experts) {
            (true, _) => Some(moe.expert_width(d_ff)),
            (false, 0) => None,
            (false, shared) => Some(shared * moe.expert_width(d_ff)),
        });
        let feed_forward = dense.into_iter().chain(beside).min().map(|width| match blueprint.is_gated() {
            true => {
                vec![of(Target::GateProj, width, d), of(Target::UpProj, width, d), of(Target::DownProj, d, width)]
            }
            false => vec![of(Target::FcIn, width, d), of(Target::FcOut, d, width)],
        });
        attention.chain(feed_forward.into_iter().flatten()).collect()
    }
}
