//! The experts of one rank: two-layer networks whose weights are stacked, so that one grouped product runs them all.

use std::sync::Arc;

use guildhall_tensor::{Device, Dtype, Tape, Var};

use crate::parallel::{Init, Parameters, Placement, Spread, Weight};

/// What is between an expert's two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU, with biases.
    Gelu,
    /// ReLU, with biases.
    Relu,
    /// `silu(gate) * up`, without.
    SwiGlu,
}

impl Activation {
    pub fn has_biases(self) -> bool {
        match self {
            Activation::Gelu | Activation::Relu => true,
            Activation::SwiGlu => false,
        }
    }

    /// From the first product, `[T, F]` or for SwiGLU `[T, 2 F]`, to the second, `[T, F]`.
    pub fn forward(self, hidden: &Var) -> Var {
        match self {
            Activation::Gelu => hidden.gelu(),
            Activation::Relu => hidden.relu(),
            Activation::SwiGlu => hidden.swiglu(),
        }
    }
}

/// Sizes of a stack of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Global numbers of the experts held here.
    pub local: Vec<usize>,
    pub d_model: usize,
    pub d_expert: usize,
    pub activation: Activation,
    /// [`Spread::Expert`], or [`Spread::Replicated`] for experts that every rank holds.
    pub spread: Spread,
}

/// A rank's experts, whatever they are: rows in, rows out. Always all of them at once, so that one can be grouped.
pub trait Expert: Parameters + std::fmt::Debug {
    /// The weights on the tape, each with one entry an expert along its first dim.
    fn weights(&self, tape: &Tape) -> Vec<Var>;

    /// What experts with these weights make of rows `[R, D]` sorted by expert, `counts[e]` of each; gives `[R, D]` in the
    /// same order. The weights are this rank's own, or those of experts that visit it.
    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var;

    /// Whether experts differ in nothing but their weights, so that any rank can run those of another.
    fn are_alike(&self) -> bool {
        true
    }

    /// [`Expert::apply`] with this rank's own weights.
    fn forward(&self, rows: &Var, counts: &[usize]) -> Var {
        self.apply(&self.weights(rows.tape()), rows, counts)
    }
}

/// Experts of several kinds in one layer: each entry runs the next `n` local experts.
#[derive(Debug)]
pub struct Mixed(pub Vec<(usize, Box<dyn Expert>)>);

impl Expert for Mixed {
    /// Those of every kind, one kind after the other.
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        self.0.iter().flat_map(|(_, kind)| kind.weights(tape)).collect()
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        let (mut expert, mut row, mut weight) = (0, 0, 0);
        let part = |(n, kind): &(usize, Box<dyn Expert>)| {
            let counts = &counts[expert..expert + n];
            let own: Vec<u32> = (row..row + counts.iter().sum::<usize>()).map(|row| row as u32).collect();
            let weights = &weights[weight..weight + kind.weights(rows.tape()).len()];
            (expert, row, weight) = (expert + n, row + own.len(), weight + weights.len());
            kind.apply(weights, &rows.gather_rows(&own), counts)
        };
        Var::concat_rows(self.0.iter().map(part).collect())
    }

    fn are_alike(&self) -> bool {
        false
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
            let of = |&e: &usize| {
                let named = parts.iter().map(move |(part, shape)| (format!("{name}.{e}.{part}"), shape.clone()));
                named.collect::<Vec<_>>()
            };
            Placement::new(shape.spread, shape.local.iter().flat_map(of).collect::<Vec<_>>())
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
            Activation::Gelu | Activation::Relu => {
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
    /// The matrices, then the biases if there are any.
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        let biases = [&self.first_bias, &self.second_bias].into_iter().flatten();
        [&self.first, &self.second].into_iter().chain(biases).map(|w| tape.parameter(&w.parameter)).collect()
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        match (self.activation, weights) {
            (Activation::SwiGlu, [first, second]) => rows.grouped_swiglu(first, second, counts),
            (activation, [first, second, first_bias, second_bias]) if activation.has_biases() => {
                let hidden = rows.grouped_linear(first, Some(first_bias), counts);
                activation.forward(&hidden).grouped_linear(second, Some(second_bias), counts)
            }
            (activation, weights) => panic!("{} weights for {activation:?}", weights.len()),
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
