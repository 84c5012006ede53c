//! What a step sums over micro-batches and ranks, in one vector so that one collective carries it.

use guildhall_comm::Error;

use crate::metrics::{MoeRecord, SentRows};
use crate::model::{Forward, Sizes};
use crate::moe::Counts;
use crate::parallel::{Axis, Mesh};

/// Scalars, then the counts of every MoE layer. Counts stay exact: an f64 holds every integer below 2^53.
pub(super) struct Totals {
    /// Cross-entropy, balance, z, shadowed experts.
    scalars: [f64; SCALARS],
    /// By MoE layer.
    layers: Vec<Layer>,
}

struct Layer {
    index: usize,
    /// The rows sent are this rank's own until the sum, then those of rank after rank.
    counts: Counts,
    /// Ranks of an expert group.
    group: usize,
    /// All ranks of an expert group shadow the same experts, in every slice: whether this is the one that counts.
    counts_shadows: bool,
}

const LOSSES: usize = 3;
const SCALARS: usize = LOSSES + 1;

impl Totals {
    pub(super) fn new(sizes: &Sizes, mesh: &Mesh) -> Totals {
        let layer = |index| {
            let (moe, group) = (sizes.moe_of(index)?, sizes.expert_degree(index, mesh.degrees()));
            let counts =
                Counts { load: vec![0; moe.experts], routes: 0, dropped: 0, pairs: Vec::new(), sent: vec![0; group] };
            let counts_shadows = mesh.group(Axis::Expert(group)).rank() == 0 && mesh.expert_tensor.rank() == 0;
            Some(Layer { index, counts, group, counts_shadows })
        };
        let layers = (0..sizes.model.layers).filter_map(layer).collect();
        Totals { scalars: [0.0; SCALARS], layers }
    }

    pub(super) fn add(&mut self, forward: &Forward, mesh: &Mesh) {
        // All ranks of a tensor group saw the same tokens: one of them counts, but for the rows that each sent.
        let counts_tokens = mesh.tensor.rank() == 0;
        let losses = [forward.cross_entropy, forward.balance, forward.z];
        if counts_tokens {
            self.scalars.iter_mut().zip(losses).for_each(|(sum, x)| *sum += f64::from(x));
        }
        for (layer, load) in self.layers.iter_mut().zip(&forward.loads) {
            match counts_tokens {
                true => layer.counts.add(&Counts { pairs: Vec::new(), ..load.counts.clone() }),
                false => layer.counts.add(&Counts { sent: load.counts.sent.clone(), ..Counts::default() }),
            }
            if layer.counts_shadows {
                self.scalars[LOSSES] += load.shadowed as f64;
            }
        }
    }

    /// Collective over the world.
    pub(super) fn sum_over(&mut self, mesh: &Mesh) -> Result<(), Error> {
        let (rank, ranks) = (mesh.world.rank(), mesh.world.size());
        for Layer { counts, group, .. } in &mut self.layers {
            let own = std::mem::replace(&mut counts.sent, vec![0; ranks * *group]);
            counts.sent[rank * *group..][..*group].copy_from_slice(&own);
        }
        let numbers = self.layers.iter().flat_map(|layer| numbers(&layer.counts)).map(|&n| n as f64);
        let mut values: Vec<f64> = self.scalars.into_iter().chain(numbers).collect();
        mesh.world.sum_f64(&mut values)?;
        let (scalars, counts) = values.split_at(SCALARS);
        self.scalars.copy_from_slice(scalars);
        let own = self.layers.iter_mut().flat_map(|layer| numbers_mut(&mut layer.counts));
        own.zip(counts).for_each(|(own, &sum)| *own = sum as u64);
        Ok(())
    }

    /// Cross-entropy, balance, z.
    pub(super) fn losses(&self) -> [f64; LOSSES] {
        let [cross_entropy, balance, z, _] = self.scalars;
        [cross_entropy, balance, z]
    }

    /// Experts that visited other ranks.
    pub(super) fn shadowed(&self) -> u64 {
        self.scalars[LOSSES] as u64
    }

    /// What is trained on: without a value of its own, an auxiliary loss counts too.
    pub(super) fn loss(&self) -> f64 {
        self.losses().iter().sum()
    }

    /// What the layers' routers did, and the rows that went between ranks.
    pub(super) fn records(self) -> (Vec<MoeRecord>, Vec<SentRows>) {
        let record = |Layer { index, counts, group, .. }: Layer| {
            let rows = counts.sent.chunks(group).map(<[u64]>::to_vec).collect();
            let moe = MoeRecord::new(index, counts.load, counts.routes, counts.dropped);
            (moe, SentRows { layer: index, rows })
        };
        self.layers.into_iter().map(record).unzip()
    }
}

fn numbers(counts: &Counts) -> impl Iterator<Item = &u64> {
    counts.load.iter().chain([&counts.routes, &counts.dropped]).chain(&counts.sent)
}

fn numbers_mut(counts: &mut Counts) -> impl Iterator<Item = &mut u64> {
    counts.load.iter_mut().chain([&mut counts.routes, &mut counts.dropped]).chain(&mut counts.sent)
}
