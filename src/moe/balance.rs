//! Auxiliary losses that keep experts busy and logits small.
//!
//! Both are sums over tokens that count, divided by the step's global number of them: like the main loss, they do not
//! depend on the mesh, on micro-batches, on packing or on padding. The balance loss compares loads within each
//! sequence (a document's part of a row), never within whatever a rank happens to hold.

use guildhall_tensor::{Tensor, Var};

use super::Routing;

/// Which tokens count, which sequence each belongs to, and how much one token weighs.
#[derive(Clone, Debug)]
pub struct Importance {
    /// Runs of tokens of one sequence, in order: the first token of each, and the end.
    starts: Vec<usize>,
    /// Whether a token counts: it has a target.
    counts: Vec<bool>,
    /// 1 / (valid tokens of the whole step).
    per_token: f32,
}

impl Importance {
    /// `segments` and `valid` have one entry a token; rows are `seq` long.
    pub fn new(segments: &[u32], seq: usize, valid: Vec<bool>, per_token: f32) -> Importance {
        assert_eq!(segments.len(), valid.len(), "one segment and one flag a token");
        let begins = |t: usize| t.is_multiple_of(seq) || segments[t] != segments[t - 1];
        let mut starts: Vec<usize> = (0..segments.len()).filter(|&t| begins(t)).collect();
        starts.push(segments.len());
        Importance { starts, counts: valid, per_token }
    }

    fn sequences(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// The weight of every token in a loss that is a mean over tokens.
    fn weights(&self) -> Vec<f32> {
        self.counts.iter().map(|&counts| if counts { self.per_token } else { 0.0 }).collect()
    }
}

/// The auxiliary losses of one layer, unweighted, on the tape.
pub struct BalanceLoss {
    /// 1 when every sequence spreads its routes evenly, up to E when all go to one expert.
    pub balance: Var,
    /// Mean square of the logits' log-sum-exp.
    pub z: Var,
}

impl BalanceLoss {
    /// `balance = sum_s (n_s / N) E sum_e f_se P_se` with f the share of the sequence's routes and P its mean
    /// probability (Fedus et al. 2021, eq. 4, per sequence); the gradient passes through P alone.
    /// `z = sum_t lse(logits_t)^2 / N` (Zoph et al. 2022).
    pub fn new(logits: &Var, probabilities: &Var, routing: &Routing, importance: &Importance) -> BalanceLoss {
        let coefficients = balance_coefficients(routing, importance);
        let coefficients = Tensor::from_slice(logits.device(), probabilities.shape(), &coefficients);
        BalanceLoss {
            balance: probabilities.dot_constant(coefficients),
            z: logits.weighted_square_log_sum_exp(&importance.weights()),
        }
    }
}

/// What multiplies each token's probability of each expert in the balance loss: `E f_se / N`, zero for tokens that do
/// not count. `[T, E]`.
fn balance_coefficients(routing: &Routing, importance: &Importance) -> Vec<f32> {
    let (k, experts) = (routing.k, routing.experts);
    let mut coefficients = vec![0.0; importance.counts.len() * experts];
    for sequence in importance.sequences() {
        let tokens: Vec<usize> = sequence.filter(|&t| importance.counts[t]).collect();
        let mut load = vec![0.0f32; experts];
        for route in tokens.iter().flat_map(|&t| &routing.expert[t * k..(t + 1) * k]) {
            if *route != Routing::DROPPED {
                load[*route as usize] += 1.0;
            }
        }
        let factor = experts as f32 * importance.per_token / (tokens.len() * k).max(1) as f32;
        for t in tokens {
            let line = &mut coefficients[t * experts..(t + 1) * experts];
            line.iter_mut().zip(&load).for_each(|(c, load)| *c = factor * load);
        }
    }
    coefficients
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_loads_give_equal_coefficients_and_padding_none() {
        let routing = Routing { expert: vec![0, 1, 0, 1, 1, 1], k: 1, experts: 2 };
        let importance = Importance::new(&[0, 0, 0, 0, 1, 1], 6, vec![true, true, true, true, true, false], 0.2);
        let got = balance_coefficients(&routing, &importance);
        assert_eq!(got, [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.0, 0.4, 0.0, 0.0]);
    }
}
