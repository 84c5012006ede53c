//! The experts of one rank: two-layer networks whose weights are stacked, so that one grouped product runs them all.

use std::sync::Arc;

use guildhall_tensor::{Device, Dtype, Var};

use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// What is between an expert's two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU, with biases.
    Gelu,
    /// `silu(gate) * up`, without.
    SwiGlu,
}

/// Sizes of a stack of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Global numbers of the experts held here.
    pub local: std::ops::Range<usize>,
    pub d_model: usize,
    pub d_expert: usize,
    pub activation: Activation,
    /// [`Spread::Expert`], or [`Spread::Replicated`] for experts that every rank holds.
    pub spread: Spread,
}

/// A rank's experts, whatever they are: rows in, rows out. Always all of them at once, so that one can be grouped.
pub trait Expert: Parameters + std::fmt::Debug {
    /// Rows `[R, D]` sorted by local expert, `counts[e]` of each; gives `[R, D]` in the same order.
    fn forward(&self, rows: &Var, counts: &[usize]) -> Var;
}

/// Experts of several kinds in one layer: each entry runs the next `n` local experts.
#[derive(Debug)]
pub struct Mixed(pub Vec<(usize, Box<dyn Expert>)>);

impl Expert for Mixed {
    fn forward(&self, rows: &Var, counts: &[usize]) -> Var {
        let all = rows.value().rows();
        let (mut expert, mut first, mut sum) = (0, 0, None::<Var>);
        for (n, kind) in &self.0 {
            let counts = &counts[expert..expert + n];
            let own: Vec<u32> = (first..first + counts.iter().sum::<usize>()).map(|row| row as u32).collect();
            let y = kind.forward(&rows.gather_rows(&own), counts).scatter_add_rows(&own, all);
            sum = Some(sum.map_or(y.clone(), |sum| sum.add(&y)));
            (expert, first) = (expert + n, first + own.len());
        }
        sum.expect("a layer has experts")
    }
}

impl Parameters for Mixed {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.iter_mut().for_each(|(_, kind)| kind.visit(f));
    }
}

/// A rank's experts, all of one kind.
#[derive(Debug)]
pub struct Experts {
    activation: Activation,
    /// `[L, F or 2 F, D]`: for SwiGLU, each expert's gate above its up.
    first: Weight,
    first_bias: Option<Weight>,
    /// `[L, D, F]`.
    second: Weight,
    second_bias: Option<Weight>,
}

impl Experts {
    /// Weights named `<name>.<expert>.{w1,w3,w2}.weight` (SwiGLU, as Mixtral's) or `.{fc_in,fc_out}.{weight,bias}`.
    pub fn new(device: &Arc<Device>, name: &str, shape: &ExpertsShape, dtype: Dtype, inits: [Init; 2]) -> Experts {
        let (d, f, count) = (shape.d_model, shape.d_expert, shape.local.len());
        let stack = |parts: &[(&str, Vec<usize>)]| {
            let parts: Vec<_> = parts.to_vec();
            let of = |e: usize| {
                let named = parts.iter().map(move |(part, shape)| (format!("{name}.{e}.{part}"), shape.clone()));
                named.collect::<Vec<_>>()
            };
            Placement::new(shape.spread, shape.local.clone().flat_map(of).collect::<Vec<_>>())
        };
        match shape.activation {
            Activation::SwiGlu => {
                let gate_up = stack(&[("w1.weight", vec![f, d]), ("w3.weight", vec![f, d])]);
                Experts {
                    activation: shape.activation,
                    first: Weight::new(device, gate_up, &[count, 2 * f, d], dtype, inits[0]),
                    first_bias: None,
                    second: Weight::new(device, stack(&[("w2.weight", vec![d, f])]), &[count, d, f], dtype, inits[1]),
                    second_bias: None,
                }
            }
            Activation::Gelu => {
                let bias = |part, width| {
                    Weight::new(device, stack(&[(part, vec![width])]), &[count, width], dtype, Init::Zeros)
                };
                Experts {
                    activation: shape.activation,
                    first: Weight::new(device, stack(&[("fc_in.weight", vec![f, d])]), &[count, f, d], dtype, inits[0]),
                    first_bias: Some(bias("fc_in.bias", f)),
                    second: Weight::new(
                        device,
                        stack(&[("fc_out.weight", vec![d, f])]),
                        &[count, d, f],
                        dtype,
                        inits[1],
                    ),
                    second_bias: Some(bias("fc_out.bias", d)),
                }
            }
        }
    }
}

impl Expert for Experts {
    fn forward(&self, rows: &Var, counts: &[usize]) -> Var {
        let tape = rows.tape();
        let (first, second) = (tape.parameter(&self.first.parameter), tape.parameter(&self.second.parameter));
        match self.activation {
            Activation::SwiGlu => rows.grouped_swiglu(&first, &second, counts),
            Activation::Gelu => {
                let on_tape = |bias: &Option<Weight>| bias.as_ref().map(|bias| tape.parameter(&bias.parameter));
                let (first_bias, second_bias) = (on_tape(&self.first_bias), on_tape(&self.second_bias));
                let hidden = rows.grouped_linear(&first, first_bias.as_ref(), counts);
                hidden.gelu().grouped_linear(&second, second_bias.as_ref(), counts)
            }
        }
    }
}

impl Parameters for Experts {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.first);
        self.first_bias.iter_mut().for_each(&mut *f);
        f(&mut self.second);
        self.second_bias.iter_mut().for_each(f);
    }
}
