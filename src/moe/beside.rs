//! What every token passes through besides its chosen experts.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Dtype, Index, Var};

use super::Expert;
use crate::parallel::{Init, Migration, Parameters, Stream, Weight};

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

    /// `softmax(W x + b)` of x `[T, D]`, `[T, 2]`.
    fn of(&self, x: &Var) -> Var {
        let tape = x.tape();
        let (weight, bias) = (tape.parameter(&self.weight.parameter), tape.parameter(&self.bias.parameter));
        x.cast(Dtype::F32).linear(&weight, Some(&bias)).softmax()
    }
}

impl Beside {
    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Beside::Nothing)
    }

    /// What tokens x `[T, D]` get besides what their chosen experts give, where their sequences go on. It needs nothing of
    /// these experts, so it can be computed while rows are on their way to them, but where sequences move: it waits for them.
    /// `None` without a network. Collective if there is one and sequences move.
    ///
    /// # Errors
    /// What the tensor group reports, over which the network may be sliced; that of the expert group if sequences move.
    pub(super) fn of(&self, x: &Var, stream: &Stream, moves: Option<&Migration>) -> Result<Option<Besides>, Error> {
        let Some(network) = self.network() else { return Ok(None) };
        let moved = moves.map(|migration| migration.apply(x)).transpose()?;
        let (x, stream) = (moved.as_ref().unwrap_or(x), moves.map_or(stream, Migration::stream));
        let of_all = match network.slices() {
            1 => network.forward(x, &[x.value().rows()]),
            _ => {
                let x = stream.to_parts(x)?;
                stream.from_parts(network.forward(&x, &[x.value().rows()]))?
            }
        };
        Ok(Some(match self {
            Beside::Residual(_, proportions) => Besides::InProportion(of_all, proportions.of(x)),
            Beside::GatedShared(_, gate) => Besides::Added(gate.of(x, &of_all)),
            Beside::Shared(_) | Beside::Nothing => Besides::Added(of_all),
        }))
    }

    fn network(&self) -> Option<&dyn Expert> {
        match self {
            Beside::Nothing => None,
            Beside::Shared(network) | Beside::GatedShared(network, _) | Beside::Residual(network, _) => {
                Some(&**network)
            }
        }
    }
}

/// What tokens get besides what their chosen experts give, `[T, D]`.
pub(super) enum Besides {
    Added(Var),
    /// Each token's shares are `[T, 2]`: of the experts, of this.
    InProportion(Var, Var),
}

impl Besides {
    /// The layer's result `[T, D]`: this, if there is any, with what the chosen experts gave.
    pub(super) fn join(besides: Option<Besides>, routed: Var) -> Var {
        match besides {
            None => routed,
            Some(Besides::Added(besides)) => routed.add(&besides),
            Some(Besides::InProportion(besides, shares)) => {
                let tokens = routed.value().rows();
                let share = |which: u32| shares.select(Index::Cycle(tokens, which..which + 1), 1);
                let part = |rows: &Var, which| rows.weighted_sum_rows(&share(which), 0..tokens as u32);
                part(&routed, 0).add(&part(&besides, 1))
            }
        }
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
