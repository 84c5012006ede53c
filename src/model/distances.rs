//! Relative position biases: a number for each head and each bucket of distances, shared by the blocks of a stack (Raffel
//! et al. 2020).

use std::ops::Range;
use std::sync::Arc;

use guildhall_tensor::{Device, Dtype, Tape, Var};

use super::{Positions, Sizes, StackBlueprint};
use crate::parallel::{Mesh, Parameters, Placement, Spread, Weight};

/// Of one stack.
#[derive(Debug)]
pub(super) struct DistanceBiases {
    /// `[buckets, heads]`, this rank's heads.
    weight: Weight,
    buckets: Buckets,
}

/// How distances are put together.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    count: usize,
    /// Distances from here on are in the last bucket.
    furthest: usize,
    /// Whether tokens see later ones, which then have half of the buckets.
    both_ways: bool,
}

impl DistanceBiases {
    /// Those of a stack, if it has any.
    pub(super) fn of_stack(
        device: &Arc<Device>,
        stack: &StackBlueprint,
        sizes: &Sizes,
        mesh: &Mesh,
    ) -> Option<DistanceBiases> {
        let Positions::RelativeBias { buckets, furthest } = sizes.blueprint().positions else { return None };
        let slice = mesh.slice(1, sizes.heads().heads);
        let name = format!("{}.relative_attention_bias.weight", stack.name);
        let placement = Placement::sliced(Spread::Tensor, [(name, vec![buckets, sizes.heads().heads], Some(slice))]);
        let weight = Weight::new(device, placement, &[buckets, slice.len], sizes.dtype, sizes.init());
        Some(DistanceBiases { weight, buckets: Buckets { count: buckets, furthest, both_ways: !stack.is_causal } })
    }

    /// `[distances, heads]`, f32: of keys that are so much farther in their row than the query.
    pub(super) fn of(&self, tape: &Tape, distances: Range<i64>) -> Var {
        let buckets: Vec<u32> = distances.map(|distance| self.buckets.of(distance)).collect();
        tape.parameter(&self.weight.parameter).gather_rows(&buckets).cast(Dtype::F32)
    }
}

impl Buckets {
    /// Half of the buckets of a direction have one distance each, the others ever more.
    fn of(self, distance: i64) -> u32 {
        let (first, count, far) = match self.both_ways {
            true => (if distance > 0 { self.count / 2 } else { 0 }, self.count / 2, distance.unsigned_abs() as usize),
            false => (0, self.count, distance.min(0).unsigned_abs() as usize),
        };
        let exact = count / 2;
        if far < exact {
            return (first + far) as u32;
        }
        // In f32, as those have it who trained the published tables.
        let share = (far as f32 / exact as f32).ln() / (self.furthest as f64 / exact as f64).ln() as f32;
        let bucket = exact + (share * (count - exact) as f32) as usize;
        (first + bucket.min(count - 1)) as u32
    }
}

impl Parameters for DistanceBiases {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that T5's own function gives for 32 buckets up to 128.
    #[test]
    fn buckets_are_t5s() {
        let of = |both_ways, distances: &[i64]| {
            let buckets = Buckets { count: 32, furthest: 128, both_ways };
            distances.iter().map(|&distance| buckets.of(distance)).collect::<Vec<_>>()
        };
        assert_eq!(
            of(false, &[5, 0, -1, -15, -16, -18, -19, -127, -128, -5000]),
            [0, 0, 1, 15, 16, 16, 17, 31, 31, 31]
        );
        assert_eq!(of(true, &[0, -7, -8, -12, -200, 1, 7, 8, 12, 127, 200]), [0, 7, 8, 9, 15, 17, 23, 24, 25, 31, 31]);
    }
}
