//! What of a blueprint nobody has built yet, by name.

use super::{AttentionKind, Blueprint};

impl Blueprint {
    /// The parts that are not built yet; none in a model that can be made.
    pub fn missing(&self) -> Vec<&'static str> {
        let parts = [
            match &self.attention {
                AttentionKind::Heads(_) => None,
                AttentionKind::Latent(_) => Some("multi-head latent attention"),
            },
            (self.experts.first_dense > 0).then_some("dense blocks at the bottom"),
        ];
        parts.into_iter().flatten().collect()
    }
}
