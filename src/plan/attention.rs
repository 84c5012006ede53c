//! Linear layers and attention of any family, of sizes: as `src/model/{linear,attention,relative_attention}.rs` have them.

use guildhall_tensor::Part as Segment;
use guildhall_tensor::ops::reach;

use super::model::{Builder, Weight, on};
use super::moves::Stream;
use super::sketch::Array;
use super::tape::Tape;
use super::var::Var;
use crate::model::{Positions, Sizes};
use crate::parallel::Axis;

pub(super) struct Linear {
    weight: Weight,
    bias: Option<Weight>,
}

impl Linear {
    /// `[out, in]`, of which `outputs` are here.
    pub(super) fn of_outputs(builder: &Builder, (outputs, inputs): (u64, u64), has_bias: bool) -> Linear {
        let size = (outputs, inputs);
        let weight = builder.common(size, false);
        Linear { weight, bias: has_bias.then(|| builder.common((1, outputs), false)) }
    }

    pub(super) fn forward(&self, x: &Var) -> Var {
        let weight = on(&x.tape, &self.weight);
        x.linear(&weight, self.bias.as_ref().map(|bias| on(&x.tape, bias)).as_ref())
    }

    /// Weight and bias of a layer with cut inputs.
    pub(super) fn parts(&self, tape: &Tape, stream: &Stream) -> Vec<Var> {
        let bias = self.bias.as_ref().map(|bias| stream.once(on(tape, bias)));
        [on(tape, &self.weight)].into_iter().chain(bias).collect()
    }

    /// The outputs of this layer and, after them, `rows` of those of `other`; neither has a bias.
    pub(super) fn forward_with(&self, x: &Var, other: &Linear, rows: u64) -> Var {
        let [own, other] = [self, other].map(|linear| on(&x.tape, &linear.weight));
        x.linear(&Var::concat_rows(vec![own, other.gather_rows(rows)]), None)
    }
}

/// x times what [`Linear::parts`] gave.
pub(super) fn product(x: &Var, weights: &[Var]) -> Var {
    x.linear(&weights[0], weights.get(1))
}

pub(super) enum Attention {
    Absolute(Box<Absolute>),
    Relative(Box<Relative>),
}

/// Queries, keys and values from one product; the way out.
pub(super) struct Absolute {
    own: Linear,
    /// Where heads of keys and values are fewer than ranks: those of all heads, and outputs of theirs used here.
    shared: Option<(Linear, u64)>,
    out: Linear,
}

pub(super) struct Relative {
    queries: Linear,
    keys_values: Linear,
    distances: Linear,
    out: Linear,
    biases: [Weight; 2],
}

impl Attention {
    pub(super) fn new(builder: &Builder) -> Attention {
        let sizes = &builder.task.sizes;
        let (d, heads) = (sizes.model.d_model as u64, sizes.model.heads as u64);
        let head_dim = d / heads;
        let own = builder.cut(heads) * head_dim;
        let linear = |outputs, inputs, bias: bool| Linear::of_outputs(builder, (outputs, inputs), bias);
        if sizes.model.family.positions() == Positions::Relative {
            let (queries, keys_values) = (linear(own, d, false), linear(2 * own, d, false));
            let (distances, out) = (linear(own, d, false), linear(d, own, false));
            let biases = [(); 2].map(|()| builder.common((own / head_dim, head_dim), false));
            return Attention::Relative(Box::new(Relative { queries, keys_values, distances, out, biases }));
        }
        let (biases, kv_heads, ranks) = (sizes.attention_has_biases(), sizes.kv_heads() as u64, builder.ranks());
        let out = linear(d, own, biases);
        if kv_heads.is_multiple_of(ranks) {
            let own = linear(own + 2 * builder.cut(kv_heads) * head_dim, d, biases);
            return Attention::Absolute(Box::new(Absolute { own, shared: None, out }));
        }
        let shared = builder.weight((2 * kv_heads * head_dim, d), sizes.dtype, Axis::World);
        let shared = Some((Linear { weight: shared, bias: None }, 2 * head_dim));
        Attention::Absolute(Box::new(Absolute { own: linear(own, d, biases), shared, out }))
    }

    pub(super) fn forward(&self, sizes: &Sizes, x: &Var, (stream, spans): (&Stream, &[Array])) -> Var {
        let (model, spans) = (&sizes.model, spans.to_vec());
        let (heads, seq) = (stream.group.share(model.heads as u64), model.seq as f64);
        match self {
            Attention::Absolute(absolute) => {
                let keys = if model.family.is_causal() { (seq + 1.0) / 2.0 } else { seq };
                let x = &stream.parts_of(x);
                let qkv = match &absolute.shared {
                    None => absolute.own.forward(x),
                    Some((shared, rows)) => absolute.own.forward_with(x, shared, *rows),
                };
                let (out, shape) = (absolute.out.parts(&x.tape, stream), (heads, (model.d_model / model.heads) as u64));
                let attend = move |qkv: &Var, out: &[Var]| product(&qkv.attention(shape, keys, &spans), out);
                stream.sum_of_parts(x.tape.segment(Segment::Attention, &qkv, &out, attend))
            }
            Attention::Relative(relative) => {
                let Relative { queries, keys_values, distances, out, biases } = &**relative;
                let (segment, memory) = sizes.segment_and_memory();
                let reach = reach(model.seq, segment, memory) as u64;
                let x = &stream.parts_of(x);
                let waves = x.tape.constant(x.value().f32(reach, model.d_model as u64).cast(x.dtype()));
                let distances = distances.forward(&waves);
                drop(waves);
                let [own, remembered] = x.linear_twice(&on(&x.tape, &keys_values.weight));
                let [u, v] = biases.each_ref().map(|bias| on(&x.tape, bias));
                let out = out.parts(&x.tape, stream);
                let shape = (heads, stream.tokens / model.seq as u64);
                let keys = ((segment as f64 + 1.0) / 2.0 + memory as f64).min(seq);
                let inputs: Vec<Var> = [own, remembered, distances, u, v].into_iter().chain(out).collect();
                let attend = move |queries: &Var, inputs: &[Var]| {
                    let [own, remembered, distances, u, v, out @ ..] = inputs else {
                        panic!("{} inputs", inputs.len())
                    };
                    let relative = [distances, u, v];
                    product(&queries.relative_attention([own, remembered], relative, shape, (keys, &spans)), out)
                };
                stream.sum_of_parts(x.tape.segment(Segment::Attention, &queries.forward(x), &inputs, attend))
            }
        }
    }
}
