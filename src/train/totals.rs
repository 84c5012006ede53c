//! What a step sums over micro-batches and ranks, in one vector so that one collective carries it.

use guildhall_comm::Error;

use crate::metrics::{Imbalance, MoeRecord, SentRows};
use crate::model::{Forward, LayerLoad, Sizes};
use crate::moe::{Config, Counts};
use crate::parallel::{Axis, Mesh};

/// Scalars, then the counts of every MoE layer. Counts stay exact: an f64 holds every integer below 2^53.
pub(super) struct Totals {
    /// Cross-entropy, balance, z, shadowed experts.
    scalars: [f64; SCALARS],
    /// By MoE layer.
    layers: Vec<Layer>,
    /// By rank: an even share of the routes of a layer and a micro-batch; those that every rank would have if all experts got
    /// as many as its own, or if all had as many to send, on average over layers; and the same in one layer. The most of
    /// each. Of other ranks 0, until the sum.
    routes: Vec<f64>,
    /// Ranks that send the routes of the same tokens, each a share.
    lanes: usize,
    /// Routes that a token has on average where experts choose, and of one rank's tokens may choose more than of another's.
    chosen: Option<f64>,
}

struct Layer {
    index: usize,
    /// The rows sent are this rank's own until the sum, then those of rank after rank.
    counts: Counts,
    /// Ranks of an expert group.
    group: usize,
    /// All ranks of an expert group shadow the same experts, in every slice: whether this is the one that counts.
    counts_shadows: bool,
    /// Of all experts, the share that is this rank's.
    own: f64,
}

const LOSSES: usize = 3;
const SCALARS: usize = LOSSES + 1;
/// Numbers a rank.
const ROUTES: usize = 3;

impl Totals {
    pub(super) fn new(sizes: &Sizes, mesh: &Mesh) -> Totals {
        let layer = |index| {
            let (moe, group) = (sizes.moe_of(index)?, sizes.expert_degree(index, mesh.degrees()));
            let counts = Counts { load: vec![0; moe.experts], sent: vec![0; group], ..Counts::default() };
            let counts_shadows = mesh.group(Axis::Expert(group)).rank() == 0 && mesh.expert_tensor.rank() == 0;
            let at = mesh.at(group);
            let own = at.expert_table(moe.experts).of(at.expert.rank()).len() as f64 / moe.experts as f64;
            Some(Layer { index, counts, group, counts_shadows, own })
        };
        let layers: Vec<Layer> = (0..sizes.model.layers).filter_map(layer).collect();
        let routes = vec![0.0; if layers.is_empty() { 0 } else { ROUTES * mesh.world.size() }];
        let drops = sizes.moe.as_ref().is_some_and(|moe| moe.drop_duplicates);
        let share = mesh.is_sequence_parallel() || drops || mesh.expert_tensor.size() == 1;
        let chosen = sizes.moe.as_ref().and_then(Config::chosen_per_token);
        Totals { scalars: [0.0; SCALARS], layers, routes, lanes: if share { mesh.tensor.size() } else { 1 }, chosen }
    }

    /// Of a micro-batch, of which `tokens` are this rank's.
    pub(super) fn add(&mut self, forward: &Forward, tokens: usize, mesh: &Mesh) {
        // All ranks of a tensor group saw the same tokens: one of them counts, but for the rows that each sent.
        let counts_tokens = mesh.tensor.rank() == 0;
        let losses = [forward.cross_entropy, forward.balance, forward.z];
        if counts_tokens {
            self.scalars.iter_mut().zip(losses).for_each(|(sum, x)| *sum += f64::from(x));
        }
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
        let most = |(layer, load): (&Layer, &LayerLoad)| {
            let came = load.counts.received as f64 / (layer.own * layer.group as f64);
            // Rows that are sent are kept too; no plan takes more than all of a group to be on one rank.
            self.chosen.map_or(came, |_| came.max(sent(load).min(share * layer.group as f64)))
        };
        let most: Vec<f64> = self.layers.iter().zip(&forward.loads).map(most).collect();
        let mean = most.iter().sum::<f64>() / most.len().max(1) as f64;
        let now = [share, mean, most.into_iter().fold(0.0, f64::max)];
        let own = self.routes.chunks_exact_mut(ROUTES).skip(rank).take(1).flatten();
        own.zip(now).for_each(|(most, now)| *most = most.max(now));
    }

    /// Collective over the world.
    pub(super) fn sum_over(&mut self, mesh: &Mesh) -> Result<(), Error> {
        let (rank, ranks) = (mesh.world.rank(), mesh.world.size());
        for Layer { counts, group, .. } in &mut self.layers {
            let own = std::mem::replace(&mut counts.sent, vec![0; ranks * *group]);
            counts.sent[rank * *group..][..*group].copy_from_slice(&own);
        }
        let numbers = self.layers.iter().flat_map(|layer| numbers(&layer.counts)).map(|&n| n as f64);
        let routes = self.routes.iter().copied();
        let mut values: Vec<f64> = self.scalars.into_iter().chain(routes).chain(numbers).collect();
        mesh.world.sum_f64(&mut values)?;
        let (scalars, rest) = values.split_at(SCALARS);
        let (routes, counts) = rest.split_at(self.routes.len());
        self.scalars.copy_from_slice(scalars);
        self.routes.copy_from_slice(routes);
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

    /// Rows that a rank received in some micro-batch, or sent where experts choose, over an even share of them; 1 without
    /// experts.
    pub(super) fn imbalance(&self) -> Imbalance {
        let most = |which: usize| self.routes.iter().skip(which).step_by(ROUTES).copied().fold(0.0, f64::max);
        let over = |which| if most(0) > 0.0 { (most(which) / most(0)).max(1.0) } else { 1.0 };
        Imbalance { mean: over(1), most: over(2) }
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
