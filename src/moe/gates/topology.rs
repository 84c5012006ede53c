//! Limited traffic between nodes (FasterMoE's topology-aware gate): only the tokens that want it most may leave theirs.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::{by_score, top_k};
use super::{BalanceKind, Causality, Gate, GateKeys, Scope, Tokens};
use crate::limits::{Bounds, Edge, zero_to};
use crate::moe::{Config, LayerConfig, Weighting};

/// `moe.gate = { kind = "topology", outside = 0.14 }`; how many nodes there are says `moe.logical_nodes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TopologyKeys {
    /// Share of tokens that may leave their node.
    pub outside: f64,
}

impl Default for TopologyKeys {
    fn default() -> Self {
        TopologyKeys { outside: 0.14 }
    }
}

impl GateKeys for TopologyKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        let weighting = moe.weighting(Weighting::AmongChosen);
        Arc::new(Topology { nodes: moe.logical_nodes, outside: self.outside, weighting })
    }

    fn bounds(&self) -> &'static [(&'static str, Bounds)] {
        const OUTSIDE: Bounds = zero_to(Edge::Allowed(1.0), 0.14);
        &[("outside", OUTSIDE)]
    }

    fn only_top_k(&self) -> Option<usize> {
        Some(2)
    }

    fn knows_nodes(&self) -> bool {
        true
    }

    fn idle(&self, moe: &Config) -> Option<&'static str> {
        (moe.logical_nodes == 1).then_some(
            "moe.logical_nodes is 1, and nothing leaves the only node; set it to 2 or more, a divisor of moe.experts",
        )
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Topology {
    /// Logical nodes: each has an equal, consecutive share of the experts and of a group's tokens.
    pub nodes: usize,
    /// Share of a group's tokens that may leave their node.
    pub outside: f64,
    pub weighting: Weighting,
}

impl Gate for Topology {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let (count, share) = (tokens.len(), tokens.experts / self.nodes);
        let node = |t: usize| t * self.nodes / count;
        let inside = |t: usize, e: usize| e / share == node(t);
        let plain: Vec<Vec<u32>> = (0..count).map(|t| top_k(tokens.row(t), 2, |_| true)).collect();
        let first = |t: usize| plain[t][0] as usize;
        let leaving: Vec<usize> = (0..count).filter(|&t| !inside(t, first(t))).collect();
        let limit = (count as f64 * self.outside + 1e-9).floor() as usize;
        if leaving.len() < limit {
            return plain.concat();
        }
        let mut chosen: Vec<Vec<u32>> = (0..count).map(|t| top_k(tokens.row(t), 2, |e| inside(t, e))).collect();
        for t in by_score(leaving, |t| tokens.row(t)[first(t)]).into_iter().take(limit) {
            chosen[t][1] = plain[t][0];
        }
        chosen.concat()
    }

    fn slots(&self) -> usize {
        2
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }

    fn causality(&self) -> Causality {
        match self.nodes {
            1 => Causality::Kept,
            _ => Causality::Bent(
                "which tokens may leave their node is decided among all of a group, in evaluation too: what it measures \
                 is not what generation does, which has no later tokens",
            ),
        }
    }

    fn scope(&self) -> Scope {
        Scope::Scores
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::FirstChoices
    }
}
