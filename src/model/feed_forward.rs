//! The feed-forward sub-layer: dense, or a MoE layer.

use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::linear::{Linear, Outputs};
use super::{Context, Family, Sizes};
use crate::moe::{
    self, Activation, Error, Experts, ExpertsShape, Facts, GateState, LayerOutput, MoeLayer, Router, Transport,
};
use crate::parallel::{Buffer, Mesh, Parameters, Spread, Weight};

/// Two products with an activation between them.
#[derive(Debug)]
pub(super) struct Dense {
    first: Linear,
    second: Linear,
    activation: Activation,
}

/// The feed-forward of one block.
#[derive(Debug)]
pub(super) enum FeedForward {
    Dense(Box<Dense>),
    Moe(Box<MoeLayer>),
}

/// A feed-forward's value, and what a MoE layer says besides.
pub(super) struct Output {
    pub(super) y: Var,
    pub(super) moe: Option<LayerOutput>,
}

impl FeedForward {
    /// Layer `index`, whose tensors' names begin with `name`.
    pub(super) fn new(device: &Arc<Device>, name: &str, index: usize, sizes: &Sizes, mesh: &Mesh) -> FeedForward {
        match sizes.moe_of(index) {
            Some(moe) => {
                let name = format!("{name}.block_sparse_moe");
                FeedForward::Moe(Box::new(moe_layer(device, (&name, index), moe, sizes, mesh)))
            }
            None => FeedForward::Dense(Box::new(Dense::new(device, &format!("{name}.mlp"), sizes))),
        }
    }

    /// x `[T, D]`. Collective if the layer is MoE.
    pub(super) fn forward(&self, x: &Var, facts: &Facts, context: &Context) -> Result<Output, Error> {
        Ok(match self {
            FeedForward::Dense(dense) => Output { y: dense.forward(x), moe: None },
            FeedForward::Moe(layer) => {
                let output = layer.forward(x, facts, context.mesh)?;
                Output { y: output.y.clone(), moe: Some(output) }
            }
        })
    }
}

impl FeedForward {
    /// Tells a MoE layer the loads of a whole optimizer step, over all ranks.
    pub(super) fn end_step(&mut self, load: &[u64]) {
        if let FeedForward::Moe(layer) = self {
            layer.state.end_step(load);
        }
    }
}

fn activation(sizes: &Sizes) -> Activation {
    match sizes.model.family {
        Family::Gpt2 => Activation::Gelu,
        Family::Mixtral => Activation::SwiGlu,
    }
}

fn moe_layer(
    device: &Arc<Device>,
    (name, index): (&str, usize),
    moe: &moe::Config,
    sizes: &Sizes,
    mesh: &Mesh,
) -> MoeLayer {
    let transport = Transport {
        table: mesh.expert_table(moe.experts),
        groups: moe.schedule_groups(mesh.expert.size()),
        shadowing: moe.shadowing(),
    };
    let shape = ExpertsShape {
        local: transport.table.of(mesh.expert.rank()).to_vec(),
        d_model: sizes.model.d_model,
        d_expert: sizes.d_expert(moe),
        activation: activation(sizes),
        spread: Spread::Expert,
    };
    let inits = [sizes.init(), sizes.residual_init()];
    let experts = |name: &str, shape: &ExpertsShape| Experts::new(device, name, shape, sizes.dtype, inits);
    let selector = moe.selector();
    let (gate, gate_name) = (selector.gate.clone(), format!("{name}.gate"));
    let shared = || {
        let d_expert = moe.shared_experts * shape.d_expert;
        let shape = ExpertsShape { local: vec![0], d_expert, spread: Spread::Replicated, ..shape.clone() };
        experts(&format!("{name}.shared_experts"), &shape)
    };
    MoeLayer {
        index: index as u32,
        router: Router::new(device, &gate_name, (moe.experts, shape.d_model), sizes.init(), gate.perturbation()),
        experts: Box::new(experts(&format!("{name}.experts"), &shape)),
        transport,
        shared: (moe.shared_experts > 0).then(shared),
        balance_scope: moe.balance_scope,
        state: GateState::new(device, &gate_name, moe.experts, (&*gate, moe.bias_rate), moe.balance_scope),
        selector,
    }
}

impl Dense {
    fn new(device: &Arc<Device>, name: &str, sizes: &Sizes) -> Dense {
        let (d, f, dtype) = (sizes.model.d_model, sizes.d_ff(), sizes.dtype);
        let named = |part: &str, width| (format!("{name}.{part}"), width);
        let (first, second) = match sizes.model.family {
            Family::Gpt2 => (vec![named("fc_in", f)], named("fc_out", d)),
            Family::Mixtral => (vec![named("gate_proj", f), named("up_proj", f)], named("down_proj", d)),
        };
        let biases = sizes.has_biases();
        Dense {
            first: Linear::new(device, Outputs(&first), d, dtype, (sizes.init(), biases)),
            second: Linear::new(device, Outputs(&[second]), f, dtype, (sizes.residual_init(), biases)),
            activation: activation(sizes),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        let hidden = self.first.forward(x);
        self.second.forward(&match self.activation {
            Activation::Gelu => hidden.gelu(),
            Activation::SwiGlu => hidden.swiglu(),
        })
    }
}

impl Parameters for FeedForward {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        match self {
            FeedForward::Dense(dense) => {
                dense.first.visit(f);
                dense.second.visit(f);
            }
            FeedForward::Moe(layer) => layer.visit(f),
        }
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        if let FeedForward::Moe(layer) = self {
            layer.visit_buffers(f);
        }
    }
}
