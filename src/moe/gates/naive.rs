//! The k largest logits, weighed by a softmax among themselves (FastMoE's naive gate).

use super::choose::top_k_of_each;
use super::{Gate, Tokens};
use crate::moe::Weighting;

#[derive(Clone, Copy, Debug)]
pub struct Naive {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Naive {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        top_k_of_each(tokens, self.k)
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }
}
