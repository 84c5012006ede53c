//! One training step, on one page.

use std::sync::Arc;

use guildhall_comm::Error as CommError;
use guildhall_tensor::{Device, Tape};

use super::error::Error;
use super::locate;
use crate::data::StepBatches;
use crate::metrics::MoeRecord;
use crate::model::{Context, Decoder, Forward, Sizes};
use crate::optim::{Hyper, LearningRate, Optimizer};
use crate::parallel::{Mesh, global_gradient_norm, sync_gradients};

/// A rank's model, optimizer and place in the mesh.
pub struct Trainer {
    pub device: Arc<Device>,
    pub mesh: Mesh,
    pub model: Decoder,
    pub optimizer: Optimizer,
    pub learning_rate: LearningRate,
    /// Largest gradient norm; 0 means none.
    pub clip: f64,
    pub seed: u64,
}

/// What a step did, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    pub step: u64,
    /// Mean cross-entropy per valid token.
    pub loss: f64,
    /// Summed over MoE layers, unweighted.
    pub balance: f64,
    pub z: f64,
    pub gradient_norm: f64,
    pub lr: f64,
    pub valid_tokens: u64,
    /// Experts shadowed, summed over MoE layers, micro-batches and expert groups.
    pub shadowed: u64,
    pub moe: Vec<MoeRecord>,
}

impl Trainer {
    /// A model with initial values on this rank.
    pub fn new(
        device: &Arc<Device>,
        mesh: Mesh,
        sizes: &Sizes,
        hyper: Hyper,
        rate: LearningRate,
        clip: f64,
    ) -> Trainer {
        let mut model = Decoder::new(device, sizes, &mesh);
        let optimizer = Optimizer::new(device, &mut model, hyper);
        Trainer { device: device.clone(), mesh, model, optimizer, learning_rate: rate, clip, seed: sizes.seed }
    }

    /// One optimizer step, counted from 1, over this rank's micro-batches. Collective.
    ///
    /// # Errors
    /// What a group reports, or where a number stopped being finite; the weights are then as before the step.
    pub fn step(&mut self, batches: &StepBatches, step: u64) -> Result<StepReport, Error> {
        let valid_tokens = self.sum_over_ranks(batches.valid() as u64)?;
        let mesh = self.mesh.clone();
        let context = Context { mesh: &mesh, seed: self.seed, step, trains: true, valid_tokens };
        let mut totals = Totals::new(self.model.sizes());
        for batch in &batches.micro {
            let tape = Tape::new(&self.device);
            let forward = self.model.forward(&tape, batch, &context)?;
            totals.add(&forward, &mesh);
            tape.try_backward(&forward.loss).map_err(Error::Backward)?;
        }
        totals.sum_over(&mesh)?;
        if !totals.loss().is_finite() {
            return Err(locate::non_finite(self, batches, &context, "the loss"));
        }
        sync_gradients(&mut self.model, &mesh)?;
        let gradient_norm = global_gradient_norm(&mut self.model, &mesh)?;
        if !gradient_norm.is_finite() {
            return Err(locate::non_finite(self, batches, &context, "the gradient"));
        }
        let lr = self.learning_rate.at(step);
        let scale = if self.clip > 0.0 { (self.clip / (gradient_norm + 1e-6)).min(1.0) } else { 1.0 };
        self.optimizer.step(&mut self.model, step, lr, scale);
        self.device.trim();
        let report = totals.report(step, gradient_norm, lr, valid_tokens);
        report.moe.iter().for_each(|layer| self.model.end_step(layer.layer, &layer.load));
        Ok(report)
    }

    fn sum_over_ranks(&self, n: u64) -> Result<u64, CommError> {
        Ok(self.mesh.world.all_gather_u64(&[n])?.iter().sum())
    }
}

/// Sums over micro-batches and ranks, in one vector so that one collective carries them.
struct Totals {
    /// Cross-entropy, balance, z, shadowed experts, then per MoE layer the routes of each expert and the dropped ones.
    values: Vec<f64>,
    layers: Vec<usize>,
    experts: usize,
}

const LOSSES: usize = 3;
const SCALARS: usize = LOSSES + 1;

impl Totals {
    fn new(sizes: &Sizes) -> Totals {
        let moe = sizes.moe.as_ref();
        let layers: Vec<usize> =
            (0..sizes.model.layers).filter(|&layer| moe.is_some_and(|moe| moe.layers.contains(layer))).collect();
        let experts = moe.map_or(0, |moe| moe.experts);
        Totals { values: vec![0.0; SCALARS + layers.len() * (experts + 1)], layers, experts }
    }

    fn add(&mut self, forward: &Forward, mesh: &Mesh) {
        let losses = [forward.cross_entropy, forward.balance, forward.z];
        self.values.iter_mut().zip(losses).for_each(|(sum, x)| *sum += f64::from(x));
        // All ranks of an expert group shadow the same experts: one of them counts.
        if mesh.expert.rank() == 0 {
            self.values[LOSSES] += forward.shadowed as f64;
        }
        for (load, sums) in forward.loads.iter().zip(self.values[SCALARS..].chunks_mut(self.experts + 1)) {
            let counts = load.routes.iter().chain([&load.dropped]);
            sums.iter_mut().zip(counts).for_each(|(sum, &n)| *sum += n as f64);
        }
    }

    fn sum_over(&mut self, mesh: &Mesh) -> Result<(), CommError> {
        mesh.world.sum_f64(&mut self.values)
    }

    /// What is trained on: without a value of its own, an auxiliary loss counts too.
    fn loss(&self) -> f64 {
        self.values[..LOSSES].iter().sum()
    }

    fn report(&self, step: u64, gradient_norm: f64, lr: f64, valid_tokens: u64) -> StepReport {
        let layer = |(&layer, sums): (&usize, &[f64])| {
            let load = sums[..self.experts].iter().map(|&n| n as u64).collect();
            MoeRecord::new(layer, load, sums[self.experts] as u64)
        };
        let moe = self.layers.iter().zip(self.values[SCALARS..].chunks(self.experts + 1)).map(layer).collect();
        let [loss, balance, z] = [self.values[0], self.values[1], self.values[2]];
        let shadowed = self.values[LOSSES] as u64;
        StepReport { step, loss, balance, z, gradient_norm, lr, valid_tokens, shadowed, moe }
    }
}
