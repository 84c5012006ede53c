//! The feed-forward sub-layer: dense, or a MoE layer.

use std::sync::Arc;

use guildhall_tensor::{Device, Part, Var};

use super::context::LayerPlace;
use super::linear::{Cut, Linear, LinearShape, product};
use super::stream_facts::StreamFacts;
use super::{Blueprint, Context, Role, Sizes};
use crate::moe::migration::FollowingWork;
use crate::moe::{Activation, Error, LayerOutput, LayerSizes, MoeLayer, ResidualStream};
use crate::parallel::{Buffer, Mesh, Parameters, Stream, Weight};

/// Two products with an activation between them; this rank's share of the inner width.
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
    pub(super) fn new(device: &Arc<Device>, place: &LayerPlace, sizes: &Sizes, mesh: &Mesh) -> FeedForward {
        let LayerPlace { name, index, stack } = place;
        match sizes.moe_of(*index) {
            Some(moe) => {
                let name = format!("{name}.block_sparse_moe");
                let mesh = mesh.at(sizes.expert_degree(*index, mesh.degrees()));
                let layer = MoeLayer::new(device, (&name, *index), moe, &layer_sizes(sizes), &mesh);
                let is_causal = sizes.blueprint().stacks()[*stack as usize].is_causal;
                FeedForward::Moe(Box::new(MoeLayer { stack: *stack, is_causal, ..layer }))
            }
            None => FeedForward::Dense(Box::new(Dense::new(device, &format!("{name}.mlp"), sizes, mesh))),
        }
    }

    /// x `[T, D]` in the stream. `residual` is the stream to which the output is added, if it is added as it is.
    /// Collective.
    pub(super) fn forward(
        &self,
        x: &Var,
        residual: Option<&ResidualStream>,
        facts: &StreamFacts,
        context: &Context,
    ) -> Result<Output, Error> {
        Ok(match self {
            FeedForward::Dense(dense) => Output { y: dense.forward(x, &facts.stream)?, moe: None },
            FeedForward::Moe(layer) => {
                let (stream, layer_facts) = (&facts.stream, facts.of_layer(context));
                let output = layer.forward_around(x, residual, stream, &layer_facts, &context.mesh)?;
                Output { y: output.y.clone(), moe: Some(output) }
            }
        })
    }
}

impl FeedForward {
    /// Tells a MoE layer what follows it; returns what follows the sub-layer before.
    pub(super) fn foresee(&mut self, behind: FollowingWork, lanes: usize) -> FollowingWork {
        match self {
            FeedForward::Dense(_) => behind.with_products(self, lanes),
            FeedForward::Moe(layer) => {
                layer.following = behind.with_products(&mut layer.beside, lanes);
                FollowingWork { exchanges: true, ..FollowingWork::default() }
            }
        }
    }

    pub(super) fn moe_layer(&mut self) -> Option<&mut MoeLayer> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Moe(layer) => Some(layer),
        }
    }
}

/// The tensors of a feed-forward: in a dense layer, and in an expert.
fn parts(activation: Activation) -> &'static [(&'static str, &'static str)] {
    match activation {
        Activation::Gelu | Activation::Relu => &[
            ("fc_in.weight", "fc_in.weight"),
            ("fc_in.bias", "fc_in.bias"),
            ("fc_out.weight", "fc_out.weight"),
            ("fc_out.bias", "fc_out.bias"),
        ],
        Activation::PlainRelu => &[("fc_in.weight", "fc_in.weight"), ("fc_out.weight", "fc_out.weight")],
        Activation::SwiGlu => {
            &[("gate_proj.weight", "w1.weight"), ("up_proj.weight", "w3.weight"), ("down_proj.weight", "w2.weight")]
        }
        Activation::ClampedSwiGlu => &[
            ("gate_proj.weight", "w1.weight"),
            ("gate_proj.bias", "w1.bias"),
            ("up_proj.weight", "w3.weight"),
            ("up_proj.bias", "w3.bias"),
            ("down_proj.weight", "w2.weight"),
            ("down_proj.bias", "w2.bias"),
        ],
    }
}

/// The tensor of a dense model that stands where the tensor `name` of a MoE model with the same blueprint does: of an
/// expert, and of the network beside a residual layer's experts, the feed-forward's. None for what only MoE layers have.
pub fn dense_name(blueprint: &Blueprint, name: &str) -> Option<String> {
    let Some((layer, within)) = name.split_once(".block_sparse_moe.") else { return Some(name.to_owned()) };
    let (network, rest) = within.split_once('.')?;
    let (_, part) = rest.split_once('.').filter(|_| matches!(network, "experts" | "mlp"))?;
    let (dense, _) = parts(blueprint.activation).iter().find(|(_, expert)| *expert == part)?;
    Some(format!("{layer}.mlp.{dense}"))
}

fn layer_sizes(sizes: &Sizes) -> LayerSizes {
    LayerSizes {
        d_model: sizes.model.d_model,
        d_ff: sizes.d_ff(),
        activation: sizes.blueprint().activation,
        gates_shared: sizes.blueprint().experts.gated_shared,
        router_bias: sizes.blueprint().experts.router_bias,
        dtype: sizes.dtype,
        adapters: sizes.adapters(),
        inits: [sizes.init(), sizes.residual_init()],
    }
}

impl Dense {
    fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> Dense {
        let (d, f) = (sizes.model.d_model, sizes.d_ff());
        let named = |part: &str, width| (format!("{name}.{part}"), width);
        let activation = sizes.blueprint().activation;
        let (first, second) = match activation.is_gated() {
            false => (vec![named("fc_in", f)], named("fc_out", d)),
            true => (vec![named("gate_proj", f), named("up_proj", f)], named("down_proj", d)),
        };
        let biases = activation.has_biases();
        let first = LinearShape { outputs: &first, inputs: d, cut: Cut::Outputs(mesh) };
        let second = LinearShape { outputs: &[second], inputs: f, cut: Cut::Inputs(mesh) };
        Dense {
            first: Linear::new(device, first, sizes, (sizes.init(), biases)),
            second: Linear::new(device, second, sizes, (sizes.residual_init(), biases)),
            activation,
        }
    }

    fn forward(&self, x: &Var, stream: &Stream) -> Result<Var, Error> {
        let hidden = self.first.forward(&stream.to_parts(x)?);
        let (second, activation) = (self.second.parts(x, stream), self.activation);
        let parts = x.tape().segment(Part::Activation, &hidden, &second, move |hidden, second| {
            product(&activation.forward(hidden), second)
        });
        Ok(stream.from_parts(parts)?)
    }
}

impl FeedForward {
    pub(super) fn visit_roles(&mut self, f: &mut dyn FnMut(Role, &mut Weight)) {
        match self {
            FeedForward::Dense(dense) => {
                let Dense { first, second, .. } = &mut **dense;
                [first, second].into_iter().for_each(|linear| linear.visit(&mut |weight| f(Role::FeedForward, weight)));
            }
            FeedForward::Moe(layer) => {
                layer.router.visit(&mut |weight| f(Role::Router, weight));
                layer.experts.visit(&mut |weight| f(Role::Experts, weight));
                layer.beside.visit(&mut |weight| f(Role::SharedExperts, weight));
            }
        }
    }
}

impl Parameters for FeedForward {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit_roles(&mut |_, weight| f(weight));
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        if let FeedForward::Moe(layer) = self {
            layer.visit_buffers(f);
        }
    }
}
