//! Which projections a model has, by the names that adapters know them by.

use super::{AttentionKind, Config};
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
        let attention: Vec<Projection> = match blueprint.attention {
            AttentionKind::Heads(heads) => {
                let (queries, keys) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
                let own = [(Target::QProj, queries), (Target::KProj, keys), (Target::VProj, keys)];
                let distances = blueprint.is_segmented().then(|| of(Target::RProj, d, d));
                let own = own.map(|(target, outputs)| of(target, outputs, d));
                own.into_iter().chain([of(Target::OProj, d, queries)]).chain(distances).collect()
            }
            AttentionKind::Latent(_) => Vec::new(),
        };
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
        attention.into_iter().chain(feed_forward.into_iter().flatten()).collect()
    }
}
