//! What every token passes through besides its chosen experts.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Dtype, Index, Var};

use super::Expert;
use crate::parallel::{Init, Parameters, Stream, Weight};

/// Nothing, or one network that every rank holds: an `Expert` that gets all tokens.
#[derive(Debug)]
pub enum Beside {
    Nothing,
    /// Its result is added (DeepSeek's shared experts).
    Shared(Box<dyn Expert>),
    /// Its result is multiplied by the sigmoid of one score a token and added (Qwen2's).
    GatedShared(Box<dyn Expert>, Box<SharedGate>),
    /// Its result and the chosen experts' share each token (residual MoE, Rajbhandari et al. 2022).
    Residual(Box<dyn Expert>, Box<Proportions>),
}

/// The score whose sigmoid a shared expert's result is multiplied by, in f32 whatever the model is stored in.
#[derive(Debug)]
pub struct SharedGate {
    /// `[1, D]`.
    weight: Weight,
}

impl SharedGate {
    /// Of `d_model` features; the tensor is named `<name>.weight`. `partial` if this rank sees some tokens of its tensor
    /// group alone.
    pub fn new(device: &Arc<Device>, name: &str, d_model: usize, init: Init, partial: bool) -> SharedGate {
        let weight = Weight::replicated(device, &format!("{name}.weight"), &[1, d_model], Dtype::F32, init);
        SharedGate { weight: weight.partial(partial) }
    }

    /// `sigmoid(W x) beside`; both `[T, D]`.
    fn of(&self, x: &Var, beside: &Var) -> Var {
        let open = x.cast(Dtype::F32).linear(&x.tape().parameter(&self.weight.parameter), None).sigmoid();
        beside.weighted_sum_rows(&open, 0..x.value().rows() as u32)
    }
}

/// How much of a token comes from the chosen experts and how much from the network beside them: a softmax over two
/// scores, in f32 whatever the model is stored in.
#[derive(Debug)]
pub struct Proportions {
    /// `[2, D]`: of the experts, of the network (the order of DeepSpeed's `coefficient`).
    weight: Weight,
    bias: Weight,
}

impl Proportions {
    /// Scores from `d_model` features; tensors are named `<name>.weight` and `<name>.bias`.
    pub fn new(device: &Arc<Device>, name: &str, d_model: usize, init: Init) -> Proportions {
        let tensor = |part: &str, shape: &[usize], init| {
            Weight::replicated(device, &format!("{name}.{part}"), shape, Dtype::F32, init)
        };
        Proportions { weight: tensor("weight", &[2, d_model], init), bias: tensor("bias", &[2], Init::Zeros) }
    }

    /// The same for a rank that sees some tokens of its tensor group alone, if `partial`.
    pub fn partial(self, partial: bool) -> Proportions {
        Proportions { weight: self.weight.partial(partial), bias: self.bias.partial(partial) }
    }

    /// `c_0 routed + c_1 beside` with `c = softmax(W x + b)`; all `[T, D]`.
    fn mix(&self, x: &Var, routed: &Var, beside: &Var) -> Var {
        let (tape, tokens) = (x.tape(), x.value().rows());
        let (weight, bias) = (tape.parameter(&self.weight.parameter), tape.parameter(&self.bias.parameter));
        let proportions = x.cast(Dtype::F32).linear(&weight, Some(&bias)).softmax();
        let part = |rows: &Var, which: u32| {
            rows.weighted_sum_rows(&proportions.select(Index::Cycle(tokens, which..which + 1), 1), 0..tokens as u32)
        };
        part(routed, 0).add(&part(beside, 1))
    }
}

impl Beside {
    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Beside::Nothing)
    }

    /// The layer's result `[T, D]` from its input and from what the chosen experts gave.
    ///
    /// # Errors
    /// What the tensor group reports, over which the network may be sliced.
    pub(super) fn join(&self, x: &Var, routed: Var, stream: &Stream) -> Result<Var, Error> {
        let of_all = |network: &dyn Expert| match network.slices() {
            1 => Ok(network.forward(x, &[x.value().rows()])),
            _ => {
                let x = stream.to_parts(x)?;
                let rows = [x.value().rows()];
                stream.from_parts(network.forward(&x, &rows))
            }
        };
        Ok(match self {
            Beside::Nothing => routed,
            Beside::Shared(network) => routed.add(&of_all(&**network)?),
            Beside::GatedShared(network, gate) => routed.add(&gate.of(x, &of_all(&**network)?)),
            Beside::Residual(network, proportions) => proportions.mix(x, &routed, &of_all(&**network)?),
        })
    }
}

impl Parameters for Beside {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        match self {
            Beside::Nothing => {}
            Beside::Shared(network) => network.visit(f),
            Beside::GatedShared(network, gate) => {
                network.visit(f);
                f(&mut gate.weight);
            }
            Beside::Residual(network, proportions) => {
                network.visit(f);
                f(&mut proportions.weight);
                f(&mut proportions.bias);
            }
        }
    }
}
