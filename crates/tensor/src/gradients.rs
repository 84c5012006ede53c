//! Gradients on their way back: of intermediate values, in f32, between their last contribution and their own op; of
//! parameters in the parameters' own buffers, in the type of these. What a collective brings in a narrower type stays in that
//! type until it is added to or somebody wants f32.

use std::sync::Arc;

use crate::device::Device;
use crate::dtype::Dtype;
use crate::kernels;
use crate::parameter::Gradient;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

/// Gradients during and after backward.
pub struct Gradients {
    /// One a node of the tape.
    slots: Vec<Slot>,
}

pub(crate) enum Slot {
    Intermediate(Option<Tensor>),
    Parameter(Gradient),
}

impl Slot {
    /// The gradient of an op's value, for the op to use up.
    pub(crate) fn take(&mut self) -> Option<Tensor> {
        match self {
            Slot::Intermediate(gradient) => gradient.take(),
            Slot::Parameter(_) => None,
        }
    }

    /// Calls `f` with the gradient, if anything has contributed to it.
    pub(crate) fn look(&self, f: impl FnOnce(&Tensor)) {
        match self {
            Slot::Intermediate(gradient) => gradient.as_ref().map_or((), f),
            Slot::Parameter(gradient) => gradient.look(f),
        }
    }
}

impl Gradients {
    pub(crate) fn with_capacity(nodes: usize) -> Gradients {
        Gradients { slots: Vec::with_capacity(nodes) }
    }

    pub(crate) fn push(&mut self, slot: Slot) {
        self.slots.push(slot);
    }

    pub(crate) fn slot(&mut self, node: usize) -> &mut Slot {
        &mut self.slots[node]
    }

    /// Whether anybody will read this input's gradient.
    pub fn wants(&self, input: Input) -> bool {
        input.is_on_tape()
    }

    /// The gradient of a [`crate::Tape::leaf`]; `None` if nothing depended on it.
    pub fn of(&self, leaf: &Var) -> Option<&Tensor> {
        match self.slots.get(leaf.node?)? {
            Slot::Intermediate(gradient) => gradient.as_ref(),
            Slot::Parameter(_) => None,
        }
    }

    /// The gradient of a [`crate::Tape::leaf`], for the caller alone.
    pub(crate) fn take(&mut self, leaf: Input) -> Option<Tensor> {
        self.slots[leaf.0?].take().map(Tensor::into_f32)
    }

    /// Adds `gradient` to the input's.
    pub fn add(&mut self, input: Input, gradient: Tensor) {
        let Some(index) = input.0 else { return };
        match &mut self.slots[index] {
            Slot::Intermediate(slot @ None) => *slot = Some(gradient),
            Slot::Intermediate(slot) => add_into(widened(slot), gradient.into_f32()),
            Slot::Parameter(sum) => {
                sum.contribute(|sum, accumulate| kernels::put(sum, &gradient.to_f32(), accumulate));
            }
        }
    }

    /// Lets `f` write the input's gradient of `shape` in place, as f32: it is told whether to add to what is there. A
    /// parameter's that is stored in less is written through f32 memory of its size; matrices have
    /// [`Gradients::write_stored`].
    pub fn write(&mut self, device: &Arc<Device>, input: Input, shape: &[usize], f: impl FnOnce(&mut Tensor, bool)) {
        self.write_stored(device, input, shape, |stored, accumulate| {
            if stored.dtype() == Dtype::F32 {
                return f(stored, accumulate);
            }
            let mut wide = match accumulate {
                true => stored.to_f32(),
                false => Tensor::stale(device, shape, Dtype::F32),
            };
            f(&mut wide, accumulate);
            stored.copy_part(0, &wide, 0..wide.len());
        });
    }

    /// Lets `f` write the input's gradient of `shape` as it is stored.
    pub fn write_stored(
        &mut self,
        device: &Arc<Device>,
        input: Input,
        shape: &[usize],
        f: impl FnOnce(&mut Tensor, bool),
    ) {
        let Some(index) = input.0 else { return };
        match &mut self.slots[index] {
            Slot::Intermediate(slot) => {
                let accumulate = slot.is_some();
                slot.get_or_insert_with(|| Tensor::stale(device, shape, Dtype::F32));
                let sum = widened(slot);
                make_unique(sum);
                f(sum, accumulate);
            }
            Slot::Parameter(sum) => sum.contribute(f),
        }
    }
}

/// A gradient that is there, in f32.
fn widened(slot: &mut Option<Tensor>) -> &mut Tensor {
    let sum = slot.take().expect("a gradient that is added to").into_f32();
    slot.insert(sum)
}

fn make_unique(tensor: &mut Tensor) {
    if !tensor.is_unique() {
        *tensor = tensor.to_owned_copy();
    }
}

/// `sum += gradient`, in whichever of the two memories is not shared.
fn add_into(sum: &mut Tensor, gradient: Tensor) {
    let mut gradient = gradient;
    let other = if sum.is_unique() || !gradient.is_unique() {
        make_unique(sum);
        gradient
    } else {
        std::mem::replace(sum, gradient)
    };
    kernels::put(sum, &other, true);
}
