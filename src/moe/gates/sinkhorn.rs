//! Sinkhorn routing (Clark et al. 2022): choices by a matrix whose rows and columns are evened out.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::{top_k, top_k_of_each};
use super::{Causality, Gate, GateKeys, Scope, Tokens};
use crate::moe::{Dialect, LayerConfig, Weighting};

/// Mean change of the column factors at which the evening ends, and the rounds it may take.
const ENOUGH: f64 = 1e-4;
const ROUNDS: usize = 100;
const TINY: f64 = 1e-8;

/// `moe.gate = "sinkhorn"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SinkhornKeys {}

impl GateKeys for SinkhornKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Sinkhorn { k: moe.top_k })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Sinkhorn {
    pub k: usize,
}

impl Gate for Sinkhorn {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        if !tokens.draws.trains {
            return top_k_of_each(tokens, self.k);
        }
        let evened = even_out(tokens);
        evened.chunks_exact(tokens.experts).flat_map(|row| top_k(row, self.k, |_| true)).collect()
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        if self.k == 1 { Weighting::PlainSigmoid } else { Weighting::Probability }
    }

    fn causality(&self) -> Causality {
        Causality::Bent(
            "in training a matrix over all tokens of a group is evened out; evaluation chooses token by token",
        )
    }

    fn heeds(&self, _dialect: Dialect) -> bool {
        false
    }

    fn scope(&self) -> Scope {
        Scope::Scores
    }
}

/// `K_te a_t b_e` with a and b such that rows sum to 1 / G and columns to 1 / E: computed in f64 and rounded once.
fn even_out(tokens: &Tokens) -> Vec<f32> {
    let (count, experts) = (tokens.len(), tokens.experts);
    let power = |t: usize| {
        let top = f64::from(tokens.row(t).iter().copied().fold(f32::NEG_INFINITY, f32::max));
        tokens.row(t).iter().map(move |&l| (f64::from(l) - top).exp())
    };
    let kernel: Vec<f64> = (0..count).flat_map(power).collect();
    let (mut a, mut b) = (vec![1.0f64; count], vec![1.0f64; experts]);
    for _ in 0..ROUNDS {
        for (a, row) in a.iter_mut().zip(kernel.chunks_exact(experts)) {
            let sum: f64 = row.iter().zip(&b).map(|(k, b)| k * b).sum();
            *a = 1.0 / count as f64 / (sum + TINY);
        }
        let mut sums = vec![0.0; experts];
        for (a, row) in a.iter().zip(kernel.chunks_exact(experts)) {
            sums.iter_mut().zip(row).for_each(|(sum, k)| *sum += k * a);
        }
        let mut change = 0.0;
        for (b, sum) in b.iter_mut().zip(&sums) {
            let next = 1.0 / experts as f64 / (sum + TINY);
            change += (next - *b).abs() / experts as f64;
            *b = next;
        }
        if change <= ENOUGH {
            break;
        }
    }
    let evened = |(t, row): (usize, &[f64])| {
        let a = a[t];
        row.iter().zip(&b).map(move |(k, b)| (k * a * b) as f32).collect::<Vec<_>>()
    };
    kernel.chunks_exact(experts).enumerate().flat_map(evened).collect()
}
