//! What of a blueprint nobody has built yet, by name.

use super::{AttentionKind, Blueprint, HeadKind, HeadsKind, Positions, QueryKeyNorm, RotaryScaling, Window};

impl Blueprint {
    /// The parts that are not built yet; none in a model that can be made.
    pub fn missing(&self) -> Vec<&'static str> {
        let attention = match &self.attention {
            AttentionKind::Heads(heads) => of_heads(heads),
            AttentionKind::Latent(_) => vec![Some("multi-head latent attention")],
        };
        let rest = [
            of_positions(self.positions),
            match self.window {
                Window::Full => None,
                Window::Alternating { .. } => Some("sliding windows in every other block"),
            },
            match (self.feed_forward.biases == self.feed_forward.activation.has_biases(), self.is_gated()) {
                (true, _) => None,
                (false, true) => Some("biases in gated feed-forwards"),
                (false, false) => Some("feed-forwards without biases"),
            },
            self.feed_forward.clamp.map(|_| "clamped activations"),
            (self.experts.first_dense > 0).then_some("dense blocks at the bottom"),
            self.experts.gated_shared.then_some("gated shared experts"),
            self.experts.router_bias.then_some("a bias of the router"),
            match self.head {
                HeadKind::Linear | HeadKind::Masked => None,
                HeadKind::ScaledIfTied => Some("a scaled head"),
            },
        ];
        attention.into_iter().chain(rest).flatten().collect()
    }
}

fn of_heads(heads: &HeadsKind) -> Vec<Option<&'static str>> {
    vec![
        match heads.query_key_norm {
            QueryKeyNorm::None | QueryKeyNorm::Head => None,
            QueryKeyNorm::Width => Some("norms of the queries and keys of all heads together"),
        },
        (heads.biases != heads.out_bias).then_some("biases of queries, keys and values alone"),
        (!heads.scaled).then_some("attention scores that are not scaled"),
        heads.sinks.then_some("attention sinks"),
    ]
}

fn of_positions(positions: Positions) -> Option<&'static str> {
    match positions {
        Positions::Learned
        | Positions::Sinusoidal { .. }
        | Positions::Relative
        | Positions::Rotary { scaling: RotaryScaling::None, .. } => None,
        Positions::Rotary { scaling: RotaryScaling::Yarn { .. }, .. } => Some("YaRN scaling of rotary positions"),
        Positions::RelativeBias { .. } => Some("relative position biases"),
    }
}
