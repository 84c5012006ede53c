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
    /// Of a layer; 0 if pairs are not counted.
    pairs: usize,
    _held: Held,
}

impl PairSums {
    /// Zeros, held on `device`.
    pub fn new(device: &Arc<Device>, sizes: &Sizes) -> PairSums {
        let (pairs, all) = sizes.pairs();
        PairSums { tokens: vec![0; all], pairs, _held: device.hold(Cause::Other, all as u64 * 8) }
    }

    /// Adds what one micro-batch's tokens chose.
    pub(super) fn add(&mut self, forward: &Forward, mesh: &Mesh) {
        // All ranks of a tensor group saw the same tokens.
        if self.pairs == 0 || mesh.tensor.rank() > 0 {
            return;
        }
        for (tokens, load) in self.tokens.chunks_exact_mut(self.pairs).zip(&forward.loads) {
            load.counts.pairs.iter().for_each(|&pair| tokens[pair as usize] += 1);
        }
    }

    /// The tokens of all ranks since the last time, a table for each MoE layer; counting begins anew. Collective over the
    /// world.
    pub(super) fn sum_over(&mut self, mesh: &Mesh) -> Result<Vec<Vec<u64>>, Error> {
        if self.pairs == 0 {
            return Ok(Vec::new());
        }
        let own = std::mem::take(&mut self.tokens);
        let all = mesh.world.all_reduce(Reduce::Sum, own)?.into_u64();
        let layers = all.chunks_exact(self.pairs).map(<[u64]>::to_vec).collect();
        self.tokens = all;
        self.tokens.fill(0);
        Ok(layers)
    }
}
