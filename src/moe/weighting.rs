//! From scores to the weights of chosen experts, on the tape: the only way a main loss reaches the router.

use guildhall_tensor::{Index, Indices, Tensor, Var};

/// How the chosen experts' results are weighted, as if no route had been dropped afterwards (`docs/gates.md`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weighting {
    /// Softmax over all experts, divided by the sum over the chosen (Mixtral).
    Normalised,
    /// Softmax over the chosen logits (FastMoE, Megatron Core).
    AmongChosen,
    /// Softmax over all experts as it is (DeepSeek-V2, Switch).
    Probability,
    /// Sigmoids, divided by their sum over the chosen if `normalised`, times `scale` (DeepSeek-V3).
    Sigmoid { scale: f32, normalised: bool },
    /// The chosen expert's sigmoid as it is.
    PlainSigmoid,
    /// The same for each; no gradient.
    Even,
}

impl Weighting {
    /// What balance losses compare with loads: rows of `[T, E]` that sum to 1.
    pub fn probabilities(self, logits: &Var) -> Var {
        match self {
            Weighting::Sigmoid { .. } => {
                let experts = logits.value().cols();
                logits.sigmoid().select_normalised(Index::Cycle(logits.value().len(), 0..experts as u32), experts)
            }
            _ => logits.softmax(),
        }
    }

    /// Logits and probabilities `[T, E]`, `chosen` `[T, slots]`; gives `[T, slots]`.
    pub fn weights(self, logits: &Var, probabilities: &Var, chosen: &Indices, slots: usize) -> Var {
        match self {
            Weighting::Normalised => probabilities.select_normalised(chosen, slots),
            Weighting::AmongChosen => logits.select_softmax(chosen, slots),
            Weighting::Probability => probabilities.select(chosen, slots),
            Weighting::Sigmoid { scale, normalised: true } => {
                logits.sigmoid().select_normalised(chosen, slots).scale(scale)
            }
            Weighting::Sigmoid { scale, normalised: false } => logits.sigmoid().select(chosen, slots).scale(scale),
            Weighting::PlainSigmoid => logits.sigmoid().select(chosen, slots),
            Weighting::Even => {
                let shape = [chosen.len() / slots, slots];
                logits.tape().constant(Tensor::from_fn(logits.device(), &shape, |_| 1.0 / slots as f32))
            }
        }
    }
}
