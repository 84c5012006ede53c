//! Which experts are chosen together, counted by each rank and added up now and then: pairs grow with the square of the
//! experts, and nobody needs them at once.

use std::sync::Arc;

use guildhall_comm::{Error, Reduce};
use guildhall_tensor::{Cause, Device, Held};

use crate::model::{Forward, Sizes};
use crate::parallel::Mesh;

/// Tokens that chose both of two experts, by MoE layer, since the ranks last added them up.
pub struct PairSums {
    /// Of all layers, one behind the other.
    tokens: Vec<u64>,
    /// How many each layer has; 0 where pairs are not counted.
    pairs: Vec<usize>,
    _held: Held,
}

impl PairSums {
    /// Zeros, held on `device`.
    pub fn new(device: &Arc<Device>, sizes: &Sizes) -> PairSums {
        let pairs = sizes.pairs();
        let all = pairs.iter().sum();
        PairSums { tokens: vec![0; all], pairs, _held: device.hold(Cause::Other, all as u64 * 8) }
    }

    /// Adds what one micro-batch's tokens chose.
    pub(super) fn add(&mut self, forward: &Forward, mesh: &Mesh) {
        // All ranks of a tensor group saw the same tokens.
        if self.tokens.is_empty() || mesh.tensor.rank() > 0 {
            return;
        }
        let mut rest = &mut self.tokens[..];
        for (&pairs, load) in self.pairs.iter().zip(&forward.loads) {
            let (tokens, others) = rest.split_at_mut(pairs);
            rest = others;
            load.counts.pairs.iter().for_each(|&pair| tokens[pair as usize] += 1);
        }
    }

    /// The tokens of all ranks since the last time, a table for each MoE layer; counting begins anew. Collective over the
    /// world.
    pub(super) fn sum_over(&mut self, mesh: &Mesh) -> Result<Vec<Vec<u64>>, Error> {
        if self.tokens.is_empty() {
            return Ok(Vec::new());
        }
        let own = std::mem::take(&mut self.tokens);
        let all = mesh.world.all_reduce(Reduce::Sum, own)?.into_u64();
        let mut rest = &all[..];
        let mut table = |&pairs: &usize| rest.split_off(..pairs).expect("a table of every layer").to_vec();
        let layers = self.pairs.iter().map(&mut table).collect();
        self.tokens = all;
        self.tokens.fill(0);
        Ok(layers)
    }
}
