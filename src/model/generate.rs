//! Writing text: caches of what layers computed, and the choice of the next token.

use guildhall_tensor::{Draws, Purpose};

use super::cache::Cache;

/// What the tokens so far left behind in every layer.
#[derive(Clone, Debug)]
pub struct Caches {
    layers: Vec<Cache>,
    length: usize,
}

impl Caches {
    /// Empty caches for a model of `layers` layers.
    pub fn new(layers: usize) -> Caches {
        Caches { layers: vec![Cache::default(); layers], length: 0 }
    }

    /// Tokens seen.
    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub(super) fn layers(&mut self) -> impl Iterator<Item = &mut Cache> {
        self.layers.iter_mut()
    }

    /// The positions of the next `count` tokens.
    pub(super) fn advance(&mut self, count: usize) -> Vec<u32> {
        let positions = (self.length..self.length + count).map(|p| p as u32).collect();
        self.length += count;
        positions
    }
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Only the k most probable tokens; 0 means all.
    pub top_k: usize,
    /// Only the most probable tokens that together have this probability; 1 means all.
    pub top_p: f32,
    pub seed: u64,
}

/// The token chosen from `logits`, drawing number `index` of the seed.
///
/// # Panics
/// On no logits.
pub fn sample(logits: &[f32], sampling: &Sampling, index: u64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Ties go to the lower token, NaN last, so that the choice is a function of the numbers alone.
    order.sort_by(|&a, &b| sort_key(logits[b as usize]).total_cmp(&sort_key(logits[a as usize])).then(a.cmp(&b)));
    if sampling.temperature == 0.0 {
        return order[0];
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let top = logits[order[0] as usize];
    let weight = |&token: &u32| f64::from((logits[token as usize] - top) / sampling.temperature).exp();
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let kept = nucleus(&weights, f64::from(sampling.top_p));
    let total: f64 = weights[..kept].iter().sum();
    let mut left = f64::from(Draws::new(sampling.seed, Purpose::Sample, 0, 0).uniform(index)) * total;
    for (token, weight) in order.iter().zip(&weights[..kept]) {
        if left < *weight {
            return *token;
        }
        left -= weight;
    }
    order[kept - 1]
}

fn sort_key(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// How many of these falling weights it takes to reach the share `p` of their sum.
fn nucleus(weights: &[f64], p: f64) -> usize {
    let mut left = p * weights.iter().sum::<f64>();
    for (i, weight) in weights.iter().enumerate() {
        left -= weight;
        if left <= 0.0 {
            return i + 1;
        }
    }
    weights.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampling: Sampling) -> Vec<f64> {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
        let mut counts = vec![0.0; 4];
        for i in 0..20_000 {
            counts[sample(&logits, &sampling, i) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn draws_follow_the_probabilities() {
        // Standard error at most 0.0036; five of them.
        let check = |sampling, expected: [f64; 4]| {
            let got = frequencies(sampling);
            assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 0.018), "{got:?} instead of {expected:?}");
        };
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3 };
        check(all, [0.5, 0.25, 0.125, 0.125]);
        check(Sampling { top_k: 2, ..all }, [2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        check(Sampling { top_p: 0.8, ..all }, [0.5 / 0.875, 0.25 / 0.875, 0.125 / 0.875, 0.0]);
        check(Sampling { temperature: 0.5, ..all }, [0.25, 0.0625, 0.015625, 0.015625].map(|x| x / 0.34375));
        check(Sampling { temperature: 0.0, ..all }, [1.0, 0.0, 0.0, 0.0]);
    }
}
