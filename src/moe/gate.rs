//! Gates: from scores to routings, integers only. One so far: the k most probable experts, nothing dropped.

use guildhall_tensor::Tensor;
use guildhall_tensor::ops::top_k;

/// Who goes where: route `t * k + j` is token t's j-th choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    /// The expert of every route, or [`Routing::DROPPED`].
    pub expert: Vec<u32>,
    /// Choices per token.
    pub k: usize,
    /// Experts there are.
    pub experts: usize,
}

impl Routing {
    /// A route that is not sent.
    pub const DROPPED: u32 = u32::MAX;

    /// Routes of each expert.
    pub fn load(&self) -> Vec<u64> {
        let mut load = vec![0; self.experts];
        for &expert in self.expert.iter().filter(|&&expert| expert != Routing::DROPPED) {
            load[expert as usize] += 1;
        }
        load
    }
}

/// The k most probable experts of every token: probabilities `[T, E]`.
pub fn softmax_top_k(probabilities: &Tensor, k: usize) -> Routing {
    Routing { expert: top_k(probabilities, k).index, k, experts: probabilities.cols() }
}
