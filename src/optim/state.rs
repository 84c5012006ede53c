//! Optimizer state, and the step over all weights.

use std::sync::Arc;

use guildhall_tensor::ops::AdamW;
use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use crate::parallel::{Parameters, Weight};

/// AdamW's constants; the learning rate comes with each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// One weight's state.
#[derive(Debug)]
pub struct Slot {
    /// The weight in f32, when it is stored in less.
    pub master: Option<Tensor>,
    pub m: Tensor,
    pub v: Tensor,
}

/// State of all weights, in the order of [`Parameters::visit`].
#[derive(Debug)]
pub struct Optimizer {
    hyper: Hyper,
    pub slots: Vec<Slot>,
}

impl Optimizer {
    /// Zero moments, and masters where weights are not f32.
    pub fn new(device: &Arc<Device>, model: &mut dyn Parameters, hyper: Hyper) -> Optimizer {
        let _charge = device.charge(Cause::Optimizer);
        let mut slots = Vec::new();
        model.visit(&mut |weight| {
            let value = weight.parameter.value();
            let zeros = || Tensor::zeros(device, value.shape());
            let master = (value.dtype() != Dtype::F32).then(|| value.to_f32());
            slots.push(Slot { master, m: zeros(), v: zeros() });
        });
        Optimizer { hyper, slots }
    }

    /// Begins anew with the weights as they now are.
    pub fn restart(&mut self, model: &mut dyn Parameters) {
        let mut slots = self.slots.iter_mut();
        model.visit(&mut |weight| {
            let slot = slots.next().expect("a slot for every weight");
            slot.m.f32s_mut().fill(0.0);
            slot.v.f32s_mut().fill(0.0);
            if let Some(master) = &mut slot.master {
                master.f32s_mut().copy_from_slice(weight.parameter.value().to_f32().f32s());
            }
        });
    }

    /// Updates every weight from its gradient, times `gradient_scale`, and forgets the gradient. `step` counts from 1.
    pub fn step(&mut self, model: &mut dyn Parameters, step: u64, lr: f64, gradient_scale: f64) {
        let mut slots = self.slots.iter_mut();
        let rule = AdamW {
            lr: lr as f32,
            beta1: self.hyper.beta1 as f32,
            beta2: self.hyper.beta2 as f32,
            eps: self.hyper.eps as f32,
            weight_decay: self.hyper.weight_decay as f32,
            step,
            gradient_scale: gradient_scale as f32,
        };
        model.visit(&mut |weight| {
            let slot = slots.next().expect("a slot for every weight");
            let rule = AdamW { weight_decay: if weight.decays { rule.weight_decay } else { 0.0 }, ..rule };
            update(weight, slot, &rule);
            weight.parameter.clear_gradient();
        });
    }
}

fn update(weight: &mut Weight, slot: &mut Slot, rule: &AdamW) {
    weight.parameter.with_value_and_gradient(|value, gradient| {
        let device = value.device().clone();
        let (m, v) = (slot.m.f32s_mut(), slot.v.f32s_mut());
        match &mut slot.master {
            None => rule.update(&device, value.f32s_mut(), gradient.f32s(), m, v),
            Some(master) => {
                rule.update(&device, master.f32s_mut(), gradient.f32s(), m, v);
                let rounded = master.cast(value.dtype());
                value.bf16s_mut().copy_from_slice(rounded.bf16s());
            }
        }
    });
}
