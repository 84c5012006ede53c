//! The feed-forward sub-layer: dense, or a MoE layer.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Var};

use super::linear::{Linear, Outputs};
use super::{Context, Family, Sizes};
use crate::moe::{self, Activation, Experts, ExpertsShape, Importance, LayerOutput, MoeLayer, Router};
use crate::parallel::{Mesh, Parameters, Weight};

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
    Dense(Dense),
    Moe(MoeLayer),
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
            Some(moe) => FeedForward::Moe(moe_layer(device, &format!("{name}.block_sparse_moe"), moe, sizes, mesh)),
            None => FeedForward::Dense(Dense::new(device, &format!("{name}.mlp"), sizes)),
        }
    }

    /// x `[T, D]`. Collective if the layer is MoE.
    pub(super) fn forward(&self, x: &Var, importance: &Importance, context: &Context) -> Result<Output, Error> {
        Ok(match self {
            FeedForward::Dense(dense) => Output { y: dense.forward(x), moe: None },
            FeedForward::Moe(layer) => {
                let output = layer.forward(x, importance, context.mesh)?;
                Output { y: output.y.clone(), moe: Some(output) }
            }
        })
    }
}

fn activation(sizes: &Sizes) -> Activation {
    match sizes.model.family {
        Family::Gpt2 => Activation::Gelu,
        Family::Mixtral => Activation::SwiGlu,
    }
}

fn moe_layer(device: &Arc<Device>, name: &str, moe: &moe::Config, sizes: &Sizes, mesh: &Mesh) -> MoeLayer {
    let shape = ExpertsShape {
        local: mesh.local_experts(moe.experts),
        d_model: sizes.model.d_model,
        d_expert: sizes.d_expert(moe),
        activation: activation(sizes),
    };
    let inits = [sizes.init(), sizes.residual_init()];
    MoeLayer {
        router: Router::new(device, &format!("{name}.gate"), (moe.experts, shape.d_model), sizes.init()),
        experts: Experts::new(device, &format!("{name}.experts"), &shape, sizes.dtype, inits),
        top_k: moe.top_k,
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
}
