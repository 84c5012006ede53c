//! The k most probable experts (Mixtral; megatron's and DeepSeek-V2's dialects of weighing them).

use super::choose::top_k_of_each;
use super::{Gate, Tokens};
use crate::moe::Weighting;

#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Softmax {
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
