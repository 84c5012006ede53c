//! Sigmoid scores, chosen with a balancing bias and within the best groups of experts (DeepSeek-V3).

use super::choose::{sigmoid, top_k};
use super::{Gate, Tokens};
use crate::moe::Weighting;

#[derive(Clone, Copy, Debug)]
pub struct Sigmoid {
    pub k: usize,
    /// Equal, consecutive groups of experts; 1 means no grouping.
    pub groups: usize,
    /// Groups whose experts a token may choose.
    pub top_groups: usize,
    /// How many of a group's best scores make the group's.
    pub group_score: usize,
    /// Factor on the weights.
    pub scale: f32,
}

impl Sigmoid {
    fn choose_one(&self, scores: &[f32]) -> Vec<u32> {
        if self.groups == 1 {
            return top_k(scores, self.k, |_| true);
        }
        let size = scores.len() / self.groups;
        let of_group = |group: &[f32]| -> f32 {
            top_k(group, self.group_score.min(size), |_| true).iter().map(|&e| group[e as usize]).sum()
        };
        let groups: Vec<f32> = scores.chunks_exact(size).map(of_group).collect();
        let best = top_k(&groups, self.top_groups, |_| true);
        top_k(scores, self.k, |e| best.contains(&((e / size) as u32)))
    }
}

impl Gate for Sigmoid {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let score = |(l, b): (&f32, &f32)| sigmoid(f64::from(*l)) + b;
        let of_token = |t| {
            let scores: Vec<f32> = tokens.row(t).iter().zip(tokens.bias).map(score).collect();
            self.choose_one(&scores)
        };
        (0..tokens.len()).flat_map(of_token).collect()
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        Weighting::Sigmoid { scale: self.scale }
    }

    fn has_bias(&self) -> bool {
        true
    }
}
