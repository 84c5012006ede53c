//! The largest of a row, ties by index.

use guildhall_tensor::ops::{comparable, largest_of};

use crate::moe::Routing;

/// The k largest of `scores` among `allowed`, best first; of equals the lower index; NaN counts as minus infinity.
/// Missing ones are [`Routing::DROPPED`].
pub fn top_k(scores: &[f32], k: usize, allowed: impl Fn(usize) -> bool) -> Vec<u32> {
    let mut chosen = vec![Routing::DROPPED; k];
    largest_of(scores, &mut chosen, allowed);
    chosen
}

/// Rounded once, so that every program that computes it in f64 decides alike.
pub(super) fn sigmoid(x: f64) -> f32 {
    (1.0 / (1.0 + (-x).exp())) as f32
}

/// The top k of every token.
pub(super) fn top_k_of_each(tokens: &super::Tokens, k: usize) -> Vec<u32> {
    if let Some(largest) = tokens.largest {
        assert_eq!(largest.k, k, "as many as are chosen");
        return largest.experts.to_vec();
    }
    (0..tokens.len()).flat_map(|t| top_k(tokens.row(t), k, |_| true)).collect()
}

/// Tokens by their score, best first; of equals the earlier.
pub(super) fn by_score(mut tokens: Vec<usize>, score: impl Fn(usize) -> f32) -> Vec<usize> {
    tokens.sort_by(|&a, &b| comparable(score(b)).total_cmp(&comparable(score(a))).then(a.cmp(&b)));
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_nan_comes_last() {
        assert_eq!(top_k(&[1.0, 3.0, 3.0, f32::NAN], 3, |_| true), [1, 2, 0]);
        assert_eq!(top_k(&[1.0, 3.0, 3.0, f32::NAN], 2, |e| e == 3), [3, Routing::DROPPED]);
        assert_eq!(top_k(&[f32::NEG_INFINITY, f32::NAN], 2, |_| true), [0, 1]);
        assert_eq!(top_k(&[0.0, -0.0], 1, |_| true), [0]);
    }
}
