//! A linear layer, `y = x W^T + b`, whole or cut over the ranks of a tensor group.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Var};

use super::Sizes;
pub(super) use crate::lora::product;
use crate::lora::{Adapters, LowRank, MatrixSlice};
use crate::parallel::{Init, Mesh, Parameters, Placement, Slice, Spread, Stream, Weight};

/// Weight `[out, in]`, possibly several global tensors one above the other, maybe a bias, and the adapters of those tensors
/// that the recipe names.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    adapters: Adapters,
}

/// What a linear layer maps to what.
pub(super) struct LinearShape<'a> {
    /// Named parts, one above the other.
    pub(super) outputs: &'a [(String, usize)],
    pub(super) inputs: usize,
    pub(super) cut: Cut<'a>,
}

/// How a layer is cut over the ranks of a tensor group (Shoeybi et al. 2019).
#[derive(Clone, Copy)]
pub(super) enum Cut<'a> {
    /// Every rank has all of it.
    Not,
    /// Each has some outputs of every part ("column-parallel").
    Outputs(&'a Mesh),
    /// Every rank has all of it and uses some outputs, so that gradients are parts of a sum.
    Shared,
    /// Each has some inputs, so that results are parts of a sum ("row-parallel"); the bias is whole.
    Inputs(&'a Mesh),
}

impl Cut<'_> {
    /// What this rank holds of the outputs of a part, and of the inputs.
    fn slices(self, outputs: usize, inputs: usize) -> [Option<Slice>; 2] {
        match self {
            Cut::Not | Cut::Shared => [None, None],
            Cut::Outputs(mesh) => [Some(mesh.slice(0, outputs)), None],
            Cut::Inputs(mesh) => [None, Some(mesh.slice(1, inputs))],
        }
    }
}

fn vector(column: Var) -> Var {
    let len = column.value().len();
    column.reshape(&[len])
}

impl Linear {
    /// Part p of the outputs is the global tensor `<p's name>.weight`.
    pub(super) fn new(
        device: &Arc<Device>,
        LinearShape { outputs, inputs, cut }: LinearShape,
        sizes: &Sizes,
        (init, has_bias): (Init, bool),
    ) -> Linear {
        let weights = outputs.iter().map(|(name, width)| {
            let [outer, inner] = cut.slices(*width, inputs);
            (format!("{name}.weight"), vec![*width, inputs], outer.or(inner))
        });
        let biases = outputs.iter().map(|(name, width)| {
            let [outer, _] = cut.slices(*width, inputs);
            (format!("{name}.bias"), vec![*width], outer)
        });
        let stack = |tensors: Vec<(String, Vec<usize>, Option<Slice>)>, init| {
            let is_cut = tensors.iter().any(|(_, _, slice)| slice.is_some());
            let spread = if is_cut { Spread::Tensor } else { Spread::Replicated };
            let placement = Placement::sliced(spread, tensors).partial(matches!(cut, Cut::Shared));
            let mut shape = placement.pieces[0].local_shape();
            shape[0] = placement.pieces.iter().map(|piece| piece.local_shape()[0]).sum();
            Weight::new(device, placement, &shape, sizes.dtype, init)
        };
        let matrices = outputs.iter().map(|(name, width)| {
            let [outer, inner] = cut.slices(*width, inputs);
            let target = name.rsplit('.').next().unwrap_or(name);
            let shared = matches!(cut, Cut::Shared);
            MatrixSlice { name: name.clone(), target, shape: [*width, inputs], slice: outer.or(inner), shared }
        });
        Linear {
            adapters: Adapters::new(device, sizes.adapters().as_ref(), &matrices.collect::<Vec<_>>()),
            weight: stack(weights.collect(), init),
            bias: has_bias.then(|| stack(biases.collect(), Init::Zeros)),
        }
    }

    /// x `[T, in]`. The result of a layer with cut outputs is this rank's.
    pub(super) fn forward(&self, x: &Var) -> Var {
        product(x, &self.values(x, self.bias_for(x)))
    }

    /// Weight, bias and adapters on x's tape, as [`product`] takes them.
    fn values(&self, x: &Var, bias: Option<Var>) -> Vec<Var> {
        values(x.tape().parameter(&self.weight.parameter), bias, self.adapters.on_tape(x.tape()))
    }

    /// The outputs of this layer and, after them, those `rows` of the outputs of `other`, which has a bias if this has.
    pub(super) fn forward_with(&self, x: &Var, other: &Linear, rows: &[u32]) -> Var {
        let both = |own: Var, other: Var| Var::concat_rows(vec![own, other]);
        let weight = both(x.tape().parameter(&self.weight.parameter), other.weight_rows(x, rows));
        let bias = self.bias_for(x).zip(other.bias_rows(x, rows)).map(|(own, other)| {
            let column = own.reshape(&[own.value().len(), 1]);
            vector(both(column, other))
        });
        let terms =
            [(self.adapters.on_tape(x.tape()), self.adapters.outputs()), (other.term_rows(x, rows), rows.len())];
        product(x, &values(weight, bias, LowRank::stacked(x.tape(), terms.into())))
    }

    /// Those `rows` of the outputs.
    pub(super) fn forward_rows(&self, x: &Var, rows: &[u32]) -> Var {
        product(x, &values(self.weight_rows(x, rows), self.bias_rows(x, rows).map(vector), self.term_rows(x, rows)))
    }

    fn term_rows(&self, x: &Var, rows: &[u32]) -> Option<LowRank> {
        self.adapters.on_tape(x.tape()).map(|term| term.rows(rows))
    }

    fn weight_rows(&self, x: &Var, rows: &[u32]) -> Var {
        x.tape().parameter(&self.weight.parameter).gather_rows(rows)
    }

    /// One below the other.
    fn bias_rows(&self, x: &Var, rows: &[u32]) -> Option<Var> {
        self.bias_for(x).map(|bias| bias.reshape(&[bias.value().len(), 1]).gather_rows(rows))
    }

    /// Of a layer with cut inputs: this rank's x `[T, in]` gives the sum over the ranks, in the stream.
    ///
    /// # Errors
    /// What the tensor group reports.
    pub(super) fn forward_parts(&self, x: &Var, stream: &Stream) -> Result<Var, Error> {
        stream.from_parts(product(x, &self.parts(x, stream)))
    }

    /// Weight, bias and adapters of a layer with cut inputs, on x's tape: the products of all ranks then sum up to the result.
    pub(super) fn parts(&self, x: &Var, stream: &Stream) -> Vec<Var> {
        self.values(x, self.bias_for(x).map(|bias| stream.once(bias)))
    }

    /// The product twice, for a layer without a bias: through the second value no gradient goes to x.
    pub(super) fn forward_twice(&self, x: &Var) -> [Var; 2] {
        assert!(self.bias.is_none(), "a product that is remembered has no bias");
        let both = x.linear_twice(&x.tape().parameter(&self.weight.parameter));
        let Some(LowRank { a, b }) = self.adapters.on_tape(x.tape()) else { return both };
        let [[y, again], [inner, inner_again]] = [both, x.linear_twice(&a)];
        [(y, inner), (again, inner_again)].map(|(y, inner)| y.add(&inner.linear(&b, None)))
    }

    fn bias_for(&self, x: &Var) -> Option<Var> {
        self.bias.as_ref().map(|bias| x.tape().parameter(&bias.parameter))
    }
}

/// What [`product`] takes.
fn values(weight: Var, bias: Option<Var>, term: Option<LowRank>) -> Vec<Var> {
    let term = term.into_iter().flat_map(|LowRank { a, b }| [a, b]);
    [weight].into_iter().chain(bias).chain(term).collect()
}

impl Parameters for Linear {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(&mut *f);
        self.adapters.visit(f);
    }
}
