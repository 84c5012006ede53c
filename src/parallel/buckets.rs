//! Which gradients travel together, decided once, as integers.
//!
//! Trained weights are taken in reverse visiting order, which is the order in which backward completes their gradients. Small
//! ones of the same group and type share a bucket; a large one is a bucket by itself, since what joining it to others saves in
//! latency is less than the copy costs. Each group has a queue of its own, in which a bucket's place is that of the
//! member that completes last. So a group's queue depends on nothing but what all its ranks have: those of other groups
//! may hold more or larger experts.
//!
//! ```text
//!  visited:       embedding  norm  up  down  norm  head       all but the norms are large; up and down are experts
//!  completed:     head  norm  down  up  norm  embedding
//!  replicated:    [head] [norm norm] [embedding]
//!  experts:       [down] [up]
//! ```

use std::cmp::Reverse;

use guildhall_tensor::Dtype;

use super::{Axis, Bucketing, Parameters};

/// Bytes from which a gradient travels alone, in its own memory.
const LARGE: usize = 1 << 20;

/// Gradients that are summed by one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Numbers of trained weights in visiting order, the one that completes first in front.
    pub weights: Vec<usize>,
    /// How all of them are stored.
    dtype: Dtype,
    bytes: usize,
}

/// The buckets of one group, in the order in which all its ranks start them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The axis of the group.
    pub holders: Axis,
    pub buckets: Vec<Bucket>,
}

/// All buckets of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncPlan {
    pub queues: Vec<Queue>,
    /// Whether a bucket starts while backward goes on.
    pub overlap: bool,
}

impl SyncPlan {
    pub fn new(model: &mut dyn Parameters, bucketing: Bucketing) -> SyncPlan {
        let mut weights = Vec::new();
        model.visit_trained(&mut |weight| {
            let gradient = weight.parameter.gradient();
            weights.push((weight.placement.holders(), gradient.dtype(), gradient.len() * gradient.dtype().bytes()));
        });
        SyncPlan::of(&weights, bucketing)
    }

    /// Of weights given by their holders and the types and bytes of their gradients, in visiting order.
    pub fn of(weights: &[(Axis, Dtype, usize)], bucketing: Bucketing) -> SyncPlan {
        SyncPlan { queues: queues(weights, bucketing.bytes), overlap: bucketing.overlap }
    }
}

impl SyncPlan {
    /// Every bucket, with the axis of its group.
    pub fn buckets(&self) -> impl Iterator<Item = (&Bucket, Axis)> {
        self.queues.iter().flat_map(|queue| queue.buckets.iter().map(|bucket| (bucket, queue.holders)))
    }
}

/// Queues of weights given by their holders, types and bytes, in visiting order.
fn queues(weights: &[(Axis, Dtype, usize)], bytes_max: usize) -> Vec<Queue> {
    let mut queues = Vec::<Queue>::new();
    for (number, &(holders, dtype, bytes)) in weights.iter().enumerate().rev() {
        let alone = Bucket { weights: vec![number], dtype, bytes };
        match queues.iter_mut().find(|queue| queue.holders == holders) {
            Some(queue) => queue.add(alone, bytes_max),
            None => queues.push(Queue { holders, buckets: vec![alone] }),
        }
    }
    queues.iter_mut().for_each(|queue| queue.buckets.sort_by_key(|bucket| Reverse(bucket.weights.last().copied())));
    queues
}

impl Queue {
    /// Takes a bucket of one weight in: into the last of its type that has room, or as it is.
    fn add(&mut self, one: Bucket, bytes_max: usize) {
        let mut open = self.buckets.iter_mut().rev().filter(|bucket| !bucket.is_one_large());
        match open.find(|bucket| bucket.dtype == one.dtype) {
            Some(bucket) if one.bytes < LARGE && bucket.bytes + one.bytes <= bytes_max => {
                bucket.weights.extend(one.weights);
                bucket.bytes += one.bytes;
            }
            _ => self.buckets.push(one),
        }
    }
}

impl Bucket {
    fn is_one_large(&self) -> bool {
        self.weights.len() == 1 && self.bytes >= LARGE
    }
}

#[cfg(test)]
mod tests {
    use Dtype::{Bf16, F32};

    use super::Axis::Data;
    use super::*;

    const EXPERTS: Axis = Axis::ExpertData(2);

    /// The weights of each bucket of each queue.
    fn check(weights: &[(Axis, Dtype, usize)], bytes_max: usize, expected: &[(Axis, &[&[usize]])]) {
        let queues = queues(weights, bytes_max);
        let got: Vec<(Axis, Vec<&[usize]>)> = queues
            .iter()
            .map(|queue| (queue.holders, queue.buckets.iter().map(|bucket| bucket.weights.as_slice()).collect()))
            .collect();
        let expected: Vec<_> = expected.iter().map(|(holders, buckets)| (*holders, buckets.to_vec())).collect();
        assert_eq!(got, expected, "{weights:?} in buckets of {bytes_max}");
    }

    fn check_one(bytes: &[usize], bytes_max: usize, expected: &[&[usize]]) {
        let weights: Vec<_> = bytes.iter().map(|&bytes| (EXPERTS, F32, bytes)).collect();
        check(&weights, bytes_max, &[(EXPERTS, expected)]);
    }

    #[test]
    fn buckets_fill_up_in_the_order_of_backward() {
        check_one(&[4; 5], 1, &[&[4], &[3], &[2], &[1], &[0]]);
        check_one(&[4; 5], 8, &[&[4, 3], &[2, 1], &[0]]);
        check_one(&[4; 5], 11, &[&[4, 3], &[2, 1], &[0]]);
        check_one(&[4; 5], usize::MAX, &[&[4, 3, 2, 1, 0]]);
        check_one(&[4, 100, 4], 8, &[&[2], &[1], &[0]]);
        check(&[], 8, &[]);
    }

    #[test]
    fn groups_do_not_mix() {
        let mixed = [Data, EXPERTS, Data, EXPERTS, EXPERTS].map(|holders| (holders, F32, 4));
        check(&mixed, usize::MAX, &[(EXPERTS, &[&[4, 3, 1]]), (Data, &[&[2, 0]])]);
        check(&mixed, 8, &[(EXPERTS, &[&[4, 3], &[1]]), (Data, &[&[2, 0]])]);
    }

    /// One collective carries one kind; the queue stays one, since ranks must agree on the order.
    #[test]
    fn types_do_not_mix() {
        let mixed = [Bf16, F32, Bf16, Bf16, F32].map(|dtype| (Data, dtype, 4));
        check(&mixed, usize::MAX, &[(Data, &[&[4, 1], &[3, 2, 0]])]);
        check(&mixed, 8, &[(Data, &[&[3, 2], &[4, 1], &[0]])]);
    }

    #[test]
    fn large_weights_travel_alone_and_do_not_wait_for_small_ones() {
        let bytes = [4, LARGE, 4, LARGE - 1, 4];
        check_one(&bytes, usize::MAX, &[&[1], &[4, 3, 2, 0]]);
        check_one(&bytes, LARGE + 3, &[&[4, 3], &[1], &[2, 0]]);
    }
}
