//! Queries, keys and values by way of narrow vectors, one a token, that all heads share (multi-head latent attention,
//! DeepSeek-V2).
//!
//! ```text
//!  x -> q_a -> norm -> q_b -----------------------------------> queries   of each head, the last part with positions
//!  x -> kv_a -+-> norm -> kv_b -+-> of each head, no positions -> keys
//!             |                 +-> of each head ---------------> values
//!             +-> of all heads, with positions ----------------> keys     the last part
//! ```
//!
//! Every rank of a tensor group makes the narrow vectors of all tokens, and from them queries, keys and values of its own
//! heads, so that the gradients of `q_a`, `kv_a` and the norms are parts of a sum.

use guildhall_tensor::Var;

use super::LatentKind;
use super::linear::{Cut, Linear, LinearShape};
use super::norm::HeadNorm;
use super::projections::Maker;
use crate::parallel::{Parameters, Weight};

/// This rank's heads, and what is before them.
#[derive(Debug)]
pub(super) struct Latent {
    kind: LatentKind,
    /// To the narrow vector that queries come from, if they come from one.
    before_queries: Option<Box<(Linear, HeadNorm)>>,
    queries: Linear,
    /// To the narrow vector of keys and values and, behind it, to the part of keys that all heads share.
    down: Linear,
    norm: HeadNorm,
    /// To keys without positions and values, head by head.
    up: Linear,
}

impl Maker<'_> {
    fn product(&self, part: &str, [outputs, inputs]: [usize; 2], cut: Cut) -> Linear {
        let outputs = [(format!("{}.{part}", self.name), outputs)];
        let shape = LinearShape { outputs: &outputs, inputs, cut };
        Linear::new(self.device, shape, self.sizes, (self.sizes.init(), false))
    }

    fn latent_norm(&self, part: &str, width: usize) -> HeadNorm {
        HeadNorm::of_latent(self.device, &format!("{}.{part}", self.name), width, self.sizes)
    }
}

impl Latent {
    pub(super) fn new(maker: &Maker, kind: LatentKind) -> Latent {
        let (d, heads, own) = (maker.sizes.model.d_model, maker.heads.heads, Cut::Outputs(maker.mesh));
        let LatentKind { query_rank, kv_rank, content_dim, rotary_dim, value_dim } = kind;
        let before_queries = query_rank.map(|rank| {
            let down = maker.product("q_a_proj", [rank, d], Cut::Shared);
            Box::new((down, maker.latent_norm("q_a_layernorm", rank)))
        });
        let (name, inputs) = query_rank.map_or(("q_proj", d), |rank| ("q_b_proj", rank));
        Latent {
            kind,
            before_queries,
            queries: maker.product(name, [heads * (content_dim + rotary_dim), inputs], own),
            down: maker.product("kv_a_proj_with_mqa", [kv_rank + rotary_dim, d], Cut::Shared),
            norm: maker.latent_norm("kv_a_layernorm", kv_rank),
            up: maker.product("kv_b_proj", [heads * (content_dim + value_dim), kv_rank], own),
        }
    }

    /// Of tokens x `[T, D]`: queries and keys `[T, heads here * (content_dim + rotary_dim)]`, values
    /// `[T, heads here * value_dim]`.
    pub(super) fn forward(&self, x: &Var) -> Vec<Var> {
        let LatentKind { kv_rank, content_dim, rotary_dim, value_dim, .. } = self.kind;
        let narrow = self.down.forward(x);
        let both = self.up.forward(&self.norm.forward(&narrow.columns(0..kv_rank)));
        let (tokens, width) = (both.value().rows(), content_dim + value_dim);
        let heads = both.value().cols() / width;
        // A row for each head.
        let both = both.reshape(&[tokens * heads, width]);
        let keys = both.columns(0..content_dim).beside(&narrow.columns(kv_rank..kv_rank + rotary_dim));
        let values = both.columns(content_dim..width);
        let of_tokens = |of: Var, dim| of.reshape(&[tokens, heads * dim]);
        let queries = match self.before_queries.as_deref() {
            None => self.queries.forward(x),
            Some((down, norm)) => self.queries.forward(&norm.forward(&down.forward(x))),
        };
        vec![queries, of_tokens(keys, content_dim + rotary_dim), of_tokens(values, value_dim)]
    }
}

impl Parameters for Latent {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        if let Some((down, norm)) = self.before_queries.as_deref_mut() {
            down.visit(f);
            norm.visit(f);
        }
        self.queries.visit(f);
        self.down.visit(f);
        self.norm.visit(f);
        self.up.visit(f);
    }
}
