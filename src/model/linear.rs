//! A linear layer, `y = x W^T + b`, whole or cut over the ranks of a tensor group.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Dtype, Var};

use crate::parallel::{Init, Mesh, Parameters, Placement, Slice, Spread, Stream, Weight};

/// Weight `[out, in]`, possibly several global tensors one above the other, and maybe a bias.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Weight,
    bias: Option<Weight>,
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

/// x times what [`Linear::parts`] gave.
pub(super) fn product(x: &Var, weights: &[Var]) -> Var {
    x.linear(&weights[0], weights.get(1))
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
        dtype: Dtype,
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
            Weight::new(device, placement, &shape, dtype, init)
        };
        Linear { weight: stack(weights.collect(), init), bias: has_bias.then(|| stack(biases.collect(), Init::Zeros)) }
    }

    /// x `[T, in]`. The result of a layer with cut outputs is this rank's.
    pub(super) fn forward(&self, x: &Var) -> Var {
        x.linear(&x.tape().parameter(&self.weight.parameter), self.bias_for(x).as_ref())
    }

    /// The outputs of this layer and, after them, those `rows` of the outputs of `other`, which has a bias if this has.
    pub(super) fn forward_with(&self, x: &Var, other: &Linear, rows: &[u32]) -> Var {
        let both = |own: Var, other: Var| Var::concat_rows(vec![own, other]);
        let weight = both(x.tape().parameter(&self.weight.parameter), other.weight_rows(x, rows));
        let bias = self.bias_for(x).zip(other.bias_rows(x, rows)).map(|(own, other)| {
            let column = own.reshape(&[own.value().len(), 1]);
            vector(both(column, other))
        });
        x.linear(&weight, bias.as_ref())
    }

    /// Those `rows` of the outputs.
    pub(super) fn forward_rows(&self, x: &Var, rows: &[u32]) -> Var {
        x.linear(&self.weight_rows(x, rows), self.bias_rows(x, rows).map(vector).as_ref())
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

    /// Weight and bias of a layer with cut inputs, on x's tape: the products of all ranks then sum up to the result.
    pub(super) fn parts(&self, x: &Var, stream: &Stream) -> Vec<Var> {
        let bias = self.bias_for(x).map(|bias| stream.once(bias));
        [x.tape().parameter(&self.weight.parameter)].into_iter().chain(bias).collect()
    }

    /// The product twice, for a layer without a bias: through the second value no gradient goes to x.
    pub(super) fn forward_twice(&self, x: &Var) -> [Var; 2] {
        assert!(self.bias.is_none(), "a product that is remembered has no bias");
        x.linear_twice(&x.tape().parameter(&self.weight.parameter))
    }

    fn bias_for(&self, x: &Var) -> Option<Var> {
        self.bias.as_ref().map(|bias| x.tape().parameter(&bias.parameter))
    }
}

impl Parameters for Linear {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(f);
    }
}
