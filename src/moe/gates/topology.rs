//! Limited traffic between nodes (FasterMoE's topology-aware gate): only the tokens that want it most may leave theirs.

use super::choose::{by_score, top_k};
use super::{BalanceKind, Gate, Scope, Tokens};
use crate::moe::Weighting;

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

    fn scope(&self) -> Scope {
        Scope::Scores
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::FirstChoices
    }
}
