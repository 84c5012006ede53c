//! What a layer remembers from step to step besides its weights: it takes no gradient, and checkpoints hold it.

use std::sync::Arc;

use guildhall_tensor::{Device, Tensor};

use super::BalanceScope;
use super::gates::Gate;
use crate::parallel::{Buffer, Placement, Spread};

/// The balancing bias, and the loads of the step before, where a recipe asks for them.
#[derive(Debug, Default)]
pub struct GateState {
    bias: Option<Buffer>,
    /// How far a bias moves in one step.
    rate: f32,
    /// One more element than experts: whether there has been a step.
    load: Option<Buffer>,
    experts: usize,
}

impl GateState {
    /// What `gate` and `scope` need, under names that begin with `name`.
    pub fn new(
        device: &Arc<Device>,
        name: &str,
        experts: usize,
        (gate, rate): (&dyn Gate, f32),
        scope: BalanceScope,
    ) -> GateState {
        let buffer = |part: &str, len: usize| {
            let placement = Placement::new(Spread::Replicated, [(format!("{name}.{part}"), vec![len])]);
            Buffer { placement, value: Tensor::zeros(device, &[len]) }
        };
        GateState {
            bias: gate.has_bias().then(|| buffer("e_score_correction_bias", experts)),
            rate,
            load: (scope == BalanceScope::GlobalBatch).then(|| buffer("previous_load", experts + 1)),
            experts,
        }
    }

    /// `[E]`: what is added to the scores for choosing.
    pub fn bias(&self) -> Vec<f32> {
        self.bias.as_ref().map_or_else(|| vec![0.0; self.experts], |bias| bias.value.f32s().to_vec())
    }

    /// Routes of each expert in the step before; empty before the first.
    pub fn previous_load(&self) -> Vec<f32> {
        let load = self.load.as_ref().map(|load| load.value.f32s()).filter(|load| load[self.experts] > 0.0);
        load.map_or_else(Vec::new, |load| load[..self.experts].to_vec())
    }

    /// Learns the loads of a whole optimizer step, over all ranks and micro-batches: `b_e += rate sign(mean - load_e)`
    /// (DeepSeek-V3).
    pub fn end_step(&mut self, load: &[u64]) {
        if let Some(bias) = &mut self.bias {
            let sum: u64 = load.iter().sum();
            for (b, &n) in bias.value.f32s_mut().iter_mut().zip(load) {
                let direction = (sum as i128 - n as i128 * load.len() as i128).signum();
                *b += self.rate * direction as f32;
            }
        }
        if let Some(previous) = &mut self.load {
            let values = previous.value.f32s_mut();
            values.iter_mut().zip(load).for_each(|(v, &n)| *v = n as f32);
            values[self.experts] = 1.0;
        }
    }

    pub(super) fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.bias.iter_mut().for_each(&mut *f);
        self.load.iter_mut().for_each(f);
    }
}
