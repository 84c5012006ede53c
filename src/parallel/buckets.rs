//! Which gradients travel together, decided once, as integers.
//!
//! Weights are taken in reverse visiting order, which is the order in which backward completes their gradients. Small
//! ones of the same group share a bucket; a large one is a bucket by itself, since what joining it to others saves in
//! latency is less than the copy costs.
//!
//! ```text
//!  visited:     embedding  norm  up  down  norm  head        up, down and the tables are large
//!  completed:   head  norm  down  up  norm  embedding
//!  buckets:     [head] [down] [up] [norm norm] [embedding]   by the member that completes last
//! ```

use std::cmp::Reverse;

use super::{Bucketing, Parameters, Spread};

/// Bytes from which a gradient travels alone, in its own memory.
const LARGE: usize = 1 << 20;

/// Gradients that are summed by one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub spread: Spread,
    /// Numbers of weights in visiting order, the one that completes first in front.
    pub weights: Vec<usize>,
    bytes: usize,
}

/// All buckets of a model in the order in which every rank starts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncPlan {
    pub buckets: Vec<Bucket>,
    /// Whether a bucket starts while backward goes on.
    pub overlap: bool,
}

impl SyncPlan {
    pub fn new(model: &mut dyn Parameters, bucketing: Bucketing) -> SyncPlan {
        let mut weights = Vec::new();
        model.visit(&mut |weight| weights.push((weight.placement.spread, weight.parameter.len() * size_of::<f32>())));
        SyncPlan { buckets: buckets(&weights, bucketing.bytes), overlap: bucketing.overlap }
    }
}

/// Buckets of weights given by spread and bytes, in visiting order.
fn buckets(weights: &[(Spread, usize)], bytes_max: usize) -> Vec<Bucket> {
    let mut buckets = Vec::<Bucket>::new();
    for (number, &(spread, bytes)) in weights.iter().enumerate().rev() {
        let gathers = |bucket: &&mut Bucket| bucket.spread == spread && !bucket.is_one_large();
        match buckets.iter_mut().rev().find(gathers) {
            Some(bucket) if bytes < LARGE && bucket.bytes + bytes <= bytes_max => {
                bucket.weights.push(number);
                bucket.bytes += bytes;
            }
            _ => buckets.push(Bucket { spread, weights: vec![number], bytes }),
        }
    }
    buckets.sort_by_key(|bucket| Reverse(bucket.weights.last().copied()));
    buckets
}

impl Bucket {
    fn is_one_large(&self) -> bool {
        self.weights.len() == 1 && self.bytes >= LARGE
    }
}

#[cfg(test)]
mod tests {
    use super::Spread::{Expert, Replicated};
    use super::*;

    /// The weights of each bucket.
    fn check(weights: &[(Spread, usize)], bytes_max: usize, expected: &[&[usize]]) {
        let buckets = buckets(weights, bytes_max);
        let got: Vec<&[usize]> = buckets.iter().map(|bucket| bucket.weights.as_slice()).collect();
        assert_eq!(got, expected, "{weights:?} in buckets of {bytes_max}");
        for bucket in &buckets {
            assert!(bucket.weights.iter().all(|&weight| weights[weight].0 == bucket.spread));
        }
    }

    #[test]
    fn buckets_fill_up_in_the_order_of_backward() {
        let same = [(Replicated, 4); 5];
        check(&same, 1, &[&[4], &[3], &[2], &[1], &[0]]);
        check(&same, 8, &[&[4, 3], &[2, 1], &[0]]);
        check(&same, 11, &[&[4, 3], &[2, 1], &[0]]);
        check(&same, usize::MAX, &[&[4, 3, 2, 1, 0]]);
        check(&[(Replicated, 4), (Replicated, 100), (Replicated, 4)], 8, &[&[2], &[1], &[0]]);
        check(&[], 8, &[]);
    }

    #[test]
    fn groups_do_not_mix_and_the_bucket_that_is_complete_first_goes_first() {
        let mixed = [(Replicated, 4), (Expert, 4), (Replicated, 4), (Expert, 4), (Expert, 4)];
        check(&mixed, usize::MAX, &[&[4, 3, 1], &[2, 0]]);
        check(&mixed, 8, &[&[4, 3], &[1], &[2, 0]]);
    }

    #[test]
    fn large_weights_travel_alone_and_do_not_wait_for_small_ones() {
        let weights = [(Replicated, 4), (Replicated, LARGE), (Replicated, 4), (Replicated, LARGE - 1), (Replicated, 4)];
        check(&weights, usize::MAX, &[&[1], &[4, 3, 2, 0]]);
        check(&weights, LARGE + 3, &[&[4, 3], &[1], &[2, 0]]);
    }
}
