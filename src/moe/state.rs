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
    /// How far a bias moves in one step; absent if it stays where it is.
    rate: Option<f32>,
    /// One more element than experts: whether there has been a step.
    load: Option<Buffer>,
    experts: usize,
}

/// What a layer remembers, on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Known {
    /// `[E]`: what is added to the scores for choosing.
    pub(super) bias: Vec<f32>,
    /// Routes of each expert in the step before; empty before the first.
    pub(super) previous_load: Vec<f32>,
}

impl GateState {
    /// What `gate` and `scope` need, under names that begin with `name`.
    pub fn new(device: &Arc<Device>, name: &str, experts: usize, gate: &dyn Gate, scope: BalanceScope) -> GateState {
        let buffer = |part: &str, len: usize| {
            let placement = Placement::new(Spread::Replicated, [(format!("{name}.{part}"), vec![len])]);
            Buffer { placement, value: Tensor::zeros(device, &[len]) }
        };
        GateState {
            bias: gate.bias_rate().map(|_| buffer("e_score_correction_bias", experts)),
            rate: gate.bias_rate(),
            load: (scope == BalanceScope::GlobalBatch).then(|| buffer("previous_load", experts + 1)),
            experts,
        }
    }

    /// The bias and the loads of the step before, where there are any.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.bias.iter().chain(&self.load).map(|buffer| &buffer.value)
    }

    /// What a gate and its losses go by, from the elements of [`GateState::tensors`].
    pub(super) fn known(&self, elements: Vec<Vec<f32>>) -> Known {
        let mut elements = elements.into_iter();
        let mut next = |buffer: &Option<Buffer>| buffer.as_ref().map(|_| elements.next().expect("one a tensor"));
        let (bias, load) = (next(&self.bias), next(&self.load));
        let load = load.filter(|load| load[self.experts] > 0.0).map(|load| load[..self.experts].to_vec());
        Known { bias: bias.unwrap_or_else(|| vec![0.0; self.experts]), previous_load: load.unwrap_or_default() }
    }

    /// The bias stays as it is from now on. The loads of the step before are a fact, and go on.
    pub fn freeze(&mut self) {
        self.rate = None;
    }

    /// Learns the loads of a whole optimizer step, over all ranks and micro-batches: `b_e += rate sign(mean - load_e)`
    /// (DeepSeek-V3).
    pub fn end_step(&mut self, load: &[u64]) {
        if let (Some(Buffer { value, .. }), Some(rate)) = (&mut self.bias, self.rate) {
            let sum: u64 = load.iter().sum();
            let direction = |n: u64| (sum as i128 - n as i128 * load.len() as i128).signum() as f32;
            let directions: Vec<f32> = load.iter().map(|&n| direction(n)).collect();
            let directions = Tensor::from_slice(value.device(), &[load.len()], &directions);
            value.add_scaled(&directions, rate);
        }
        if let Some(Buffer { value, .. }) = &mut self.load {
            let known: Vec<f32> = load.iter().map(|&n| n as f32).chain([1.0]).collect();
            let known = Tensor::from_slice(value.device(), &[known.len()], &known);
            value.copy_part(0, &known, 0..known.len());
        }
    }

    pub(super) fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.bias.iter_mut().for_each(&mut *f);
        self.load.iter_mut().for_each(f);
    }
}
