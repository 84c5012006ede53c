//! What a step sums over micro-batches and ranks, in one vector so that one collective carries it.

use std::sync::Arc;

use guildhall_comm::{ElementKind, Error, Payload, Reduce, Request};
use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use crate::metrics::{CondensedRecord, Imbalance, MigratedSequences, MoeRecord, SentRows, UnsentRecord, share};
use crate::model::{Forward, LayerLoad, Sizes};
use crate::moe::migration::MovedSequences;
use crate::moe::{CondensedCounts, Config, Counts};
use crate::parallel::{Axis, Exchange, Mesh};

/// Scalars, then the counts of every MoE layer. Counts stay exact: an f64 holds every integer below 2^53.
pub(super) struct Totals {
    /// Cross-entropy, balance, z, shadowed experts.
    scalars: [f64; SCALARS],
    /// By micro-batch its losses, on the device until the host looks at all that a step made.
    losses: Tensor,
    /// Micro-batches so far.
    micro: usize,
    /// By MoE layer.
    layers: Vec<LayerTotals>,
    /// By rank: an even share of the routes of a layer and a micro-batch; those that every rank would have if all experts got
    /// as many as its own, or if all had as many to send, on average over layers; and the same in one layer. The most of
    /// each. Of other ranks 0, until the sum.
    routes: Vec<f64>,
    /// Ranks that send the routes of the same tokens, each a share.
    lanes: usize,
    /// Whether sequences may migrate; otherwise nothing is summed of them.
    migrates: bool,
    /// Routes that a token has on average where experts choose, and of one rank's tokens may choose more than of another's.
    chosen: Option<f64>,
}

struct LayerTotals {
    index: usize,
    /// The rows sent are this rank's own until the sum, then those of rank after rank.
    counts: Counts,
    /// Ranks of an expert group.
    group: usize,
    /// All ranks of an expert group shadow the same experts, in every slice: whether this is the one that counts.
    counts_shadows: bool,
    /// Of all rows of the group, the share that this rank computes if all experts get equally many.
    own: f64,
}

const LOSSES: usize = Forward::LOSSES;
const SCALARS: usize = LOSSES + 1;
/// Numbers a rank.
const ROUTES: usize = 3;

impl Totals {
    /// For a step of so many micro-batches, on a mesh on which sequences may migrate or not.
    pub(super) fn new(
        device: &Arc<Device>,
        micro_batches: usize,
        sizes: &Sizes,
        (mesh, migrates): (&Mesh, bool),
    ) -> Totals {
        let layer = |index| {
            let (moe, group) = (sizes.moe_of(index)?, sizes.expert_degree(index, mesh.degrees()));
            let condensed = moe.condensation().map(|_| CondensedCounts::default());
            let counts = Counts { load: vec![0; moe.experts], sent: vec![0; group], condensed, ..Counts::default() };
            let counts_shadows = mesh.group(Axis::Expert(group)).rank() == 0 && mesh.expert_tensor.rank() == 0;
            let at = mesh.at(group);
            let own = match mesh.exchange() {
                Exchange::Tokens => at.expert_table(moe.experts).of(at.expert.rank()).len() as f64 / moe.experts as f64,
                Exchange::Experts => 1.0 / group as f64,
            };
            Some(LayerTotals { index, counts, group, counts_shadows, own })
        };
        let layers: Vec<LayerTotals> = (0..sizes.model.layers).filter_map(layer).collect();
        let routes = vec![0.0; if layers.is_empty() { 0 } else { ROUTES * mesh.world.size() }];
        let drops = sizes.moe.as_ref().is_some_and(|moe| moe.drop_duplicates);
        let share = mesh.is_sequence_parallel() || drops || mesh.expert_tensor.size() == 1;
        let lanes = if share { mesh.tensor.size() } else { 1 };
        let _charge = device.charge(Cause::Other);
        let losses = Tensor::stale(device, &[micro_batches, LOSSES], Dtype::F32);
        let chosen = sizes.moe.as_ref().and_then(Config::chosen_per_token);
        Totals { scalars: [0.0; SCALARS], losses, micro: 0, layers, routes, lanes, migrates, chosen }
    }

    /// Of a micro-batch, of which `tokens` are this rank's.
    pub(super) fn add(&mut self, forward: &Forward, tokens: usize, mesh: &Mesh) {
        // All ranks of a tensor group saw the same tokens: one of them counts, but for the rows that each sent.
        let counts_tokens = mesh.tensor.rank() == 0;
        self.losses.copy_part(self.micro * LOSSES, &forward.losses, 0..LOSSES);
        self.micro += 1;
        self.add_routes(forward, tokens, mesh.world.rank());
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

    fn add_routes(&mut self, forward: &Forward, tokens: usize, rank: usize) {
        let lanes = self.lanes as f64;
        let sent = |load: &LayerLoad| load.counts.routes as f64 / lanes;
        let even = |load: &LayerLoad| self.chosen.map_or(sent(load), |of_token| of_token * tokens as f64 / lanes);
        let share = forward.loads.iter().map(even).fold(0.0, f64::max);
        let most = |(layer, load): (&LayerTotals, &LayerLoad)| {
            let came = load.counts.computed as f64 / (layer.own * layer.group as f64);
            // Rows that are sent are kept too; no plan takes more than all of a group to be on one rank.
            self.chosen.map_or(came, |_| came.max(sent(load).min(share * layer.group as f64)))
        };
        let most: Vec<f64> = self.layers.iter().zip(&forward.loads).map(most).collect();
        let mean = most.iter().sum::<f64>() / most.len().max(1) as f64;
        let now = [share, mean, most.into_iter().fold(0.0, f64::max)];
        let own = self.routes.chunks_exact_mut(ROUTES).skip(rank).take(1).flatten();
        own.zip(now).for_each(|(most, now)| *most = most.max(now));
    }

    /// Those of all micro-batches, for the host.
    pub(super) fn losses_on_device(&self) -> &Tensor {
        &self.losses
    }

    /// With the losses as the host found them. Collective over the world.
    pub(super) fn sum_over(&mut self, losses: &[f32], mesh: &Mesh) -> Result<(), Error> {
        for losses in losses.chunks_exact(LOSSES).filter(|_| mesh.tensor.rank() == 0) {
            self.scalars.iter_mut().zip(losses).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let (rank, ranks) = (mesh.world.rank(), mesh.world.size());
        if !self.losses.device().has_data() {
            return self.send_size(mesh);
        }
        for LayerTotals { counts, group, .. } in &mut self.layers {
            let own = std::mem::replace(&mut counts.sent, vec![0; ranks * *group]);
            counts.sent[rank * *group..][..*group].copy_from_slice(&own);
        }
        let migrates = self.migrates;
        let numbers = self.layers.iter().flat_map(|layer| numbers(&layer.counts, migrates)).map(|&n| n as f64);
        let routes = self.routes.iter().copied();
        let mut values: Vec<f64> = self.scalars.into_iter().chain(routes).chain(numbers).collect();
        mesh.world.sum_f64(&mut values)?;
        let (scalars, rest) = values.split_at(SCALARS);
        let (routes, counts) = rest.split_at(self.routes.len());
        self.scalars.copy_from_slice(scalars);
        self.routes.copy_from_slice(routes);
        let own = self.layers.iter_mut().flat_map(|layer| numbers_mut(&mut layer.counts, migrates));
        own.zip(counts).for_each(|(own, &sum)| *own = sum as u64);
        Ok(())
    }

    /// The collective alone, where nobody looks at its result: a table of all ranks' rows is large in a large world.
    fn send_size(&self, mesh: &Mesh) -> Result<(), Error> {
        let of_layer =
            |layer: &LayerTotals| numbers(&layer.counts, self.migrates).count() + (mesh.world.size() - 1) * layer.group;
        let numbers = SCALARS + self.routes.len() + self.layers.iter().map(of_layer).sum::<usize>();
        mesh.world.start(Request::all_reduce(Reduce::Sum, Payload::Opaque(ElementKind::F64, numbers)))?.wait().map(drop)
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

    /// Rows that a rank received in some micro-batch, or sent where experts choose, over an even share of them; 1 without
    /// experts. At most the ranks of an expert group, as in a plan: lanes round their shares up, and of a table's ranks one
    /// may hold few experts.
    pub(super) fn imbalance(&self) -> Imbalance {
        let ranks = self.layers.iter().map(|layer| layer.group).max().unwrap_or(1) as f64;
        let most = |which: usize| self.routes.iter().skip(which).step_by(ROUTES).copied().fold(0.0, f64::max);
        let over = |which| if most(0) > 0.0 { (most(which) / most(0)).clamp(1.0, ranks) } else { 1.0 };
        Imbalance { mean: over(1), most: over(2) }
    }

    /// What is trained on: without a value of its own, an auxiliary loss counts too.
    pub(super) fn loss(&self) -> f64 {
        self.losses().iter().sum()
    }

    /// What of the layers' sequences went on elsewhere; nothing if they may not.
    pub(super) fn migrated(&self) -> Vec<MigratedSequences> {
        let record = |LayerTotals { index, counts, .. }: &LayerTotals| {
            let MovedSequences { sequences, tokens, residual_rows, results_if_stayed, results } = counts.moved;
            MigratedSequences { layer: *index, sequences, tokens, residual_rows, results_if_stayed, results }
        };
        self.layers.iter().filter(|_| self.migrates).map(record).collect()
    }

    /// What the layers' routers did, and the rows that went between ranks.
    pub(super) fn records(self) -> (Vec<MoeRecord>, Vec<SentRows>) {
        let record = |LayerTotals { index, counts, group, .. }: LayerTotals| {
            let rows = counts.sent.chunks(group).map(<[u64]>::to_vec).collect();
            let condensed = counts.condensed.as_ref().map(condensed_record);
            let moe = MoeRecord::new(index, counts.load, counts.routes, counts.dropped);
            let moe = MoeRecord { condensed, ..moe };
            (moe, SentRows { layer: index, rows, condensed: counts.condensed.as_ref().map(unsent_record) })
        };
        self.layers.into_iter().map(record).unzip()
    }
}

fn numbers(counts: &Counts, migrates: bool) -> impl Iterator<Item = &u64> {
    let condensed = counts.condensed.iter().flat_map(CondensedCounts::numbers);
    let moved = counts.moved.numbers().into_iter().filter(move |_| migrates);
    let routes = [&counts.routes, &counts.dropped];
    counts.load.iter().chain(routes).chain(condensed).chain(&counts.sent).chain(moved)
}

fn numbers_mut(counts: &mut Counts, migrates: bool) -> impl Iterator<Item = &mut u64> {
    let condensed = counts.condensed.iter_mut().flat_map(CondensedCounts::numbers_mut);
    let moved = counts.moved.numbers_mut().into_iter().filter(move |_| migrates);
    let routes = [&mut counts.routes, &mut counts.dropped];
    counts.load.iter_mut().chain(routes).chain(condensed).chain(&mut counts.sent).chain(moved)
}

fn condensed_record(counts: &CondensedCounts) -> CondensedRecord {
    let &CondensedCounts { routes, uncomputed, pairs, .. } = counts;
    CondensedRecord {
        routes,
        uncomputed,
        uncomputed_share: share(uncomputed as f64, routes),
        similarity: pairs.compared.to_vec(),
        remembered: pairs.remembered,
    }
}

fn unsent_record(&CondensedCounts { travelling: routes, unsent, .. }: &CondensedCounts) -> UnsentRecord {
    UnsentRecord { routes, unsent, unsent_share: share(unsent as f64, routes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank with one expert of four and all rows has four times its share; lanes round theirs up. No plan gives a rank
    /// more than all rows of its group.
    #[test]
    fn a_rank_has_no_more_than_all_rows_of_its_group() {
        let imbalance = |group, routes| {
            let layer = LayerTotals { index: 0, counts: Counts::default(), group, counts_shadows: true, own: 0.25 };
            let losses = Tensor::zeros(&Device::new(1), &[0]);
            let (layers, migrates) = (vec![layer], false);
            Totals { scalars: [0.0; SCALARS], losses, micro: 0, layers, routes, lanes: 1, migrates, chosen: None }
                .imbalance()
        };
        let of_two_ranks = vec![8.0, 12.0, 32.0, 8.0, 4.0, 4.0];
        assert_eq!(imbalance(2, of_two_ranks), Imbalance { mean: 1.5, most: 2.0 });
        assert_eq!(imbalance(1, vec![8.5, 9.0, 9.0]), Imbalance::EVEN);
    }
}
