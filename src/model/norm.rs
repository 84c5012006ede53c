//! The norm, RMS norm or layer norm, and where it stands around a sub-layer.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::ops::NormMoments;
use guildhall_tensor::{Device, Var};

use super::{NormKind, NormPlace, Sizes};
use crate::moe::{ResidualStream, RowNorm};
use crate::parallel::operands::{parts_to_whole, whole_to_parts};
use crate::parallel::{Init, Mesh, Parameters, Placement, Spread, Weight};

/// Norm over the residual stream's width.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Weight,
    /// Layer norm has one.
    bias: Option<Weight>,
    eps: f32,
}

impl Norm {
    /// `partial` if it norms some of the tokens that its tensor group works on.
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, partial: bool) -> Norm {
        let d = sizes.model.d_model;
        let vector = |part: &str, init| {
            let placement = Placement::new(Spread::Replicated, [(format!("{name}.{part}"), vec![d])]).partial(partial);
            Weight::new(device, placement, &[d], sizes.dtype, init)
        };
        let bias = match sizes.blueprint().norm {
            NormKind::Layer => Some(vector("bias", Init::Zeros)),
            NormKind::Rms => None,
        };
        Norm { weight: vector("weight", Init::Ones), bias, eps: sizes.model.norm_eps }
    }

    /// The norm on x's tape, by which rows can be rebuilt.
    fn of_rows(&self, x: &Var) -> RowNorm {
        let on_tape = |vector: &Weight| x.tape().parameter(&vector.parameter);
        let moments = if self.bias.is_some() { NormMoments::Centred } else { NormMoments::Plain };
        RowNorm { moments, eps: self.eps, weight: on_tape(&self.weight), bias: self.bias.as_ref().map(on_tape) }
    }

    pub(super) fn forward(&self, x: &Var) -> Var {
        let tape = x.tape();
        let weight = tape.parameter(&self.weight.parameter);
        match &self.bias {
            Some(bias) => x.layer_norm(&weight, &tape.parameter(&bias.parameter), self.eps),
            None => x.rms_norm(&weight, self.eps),
        }
    }
}

impl Parameters for Norm {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(f);
    }
}

/// Of the norms within multi-head latent attention, whatever the model's others have (transformers' `DeepseekV3Attention`).
const LATENT_EPS: f32 = 1e-6;

/// RMS norm of each head by itself. Ranks have different heads and the same weight, so that its gradients are parts of a
/// sum.
#[derive(Debug)]
pub(super) struct HeadNorm {
    weight: Weight,
    eps: f32,
}

impl HeadNorm {
    pub(super) fn new(device: &Arc<Device>, name: &str, head_dim: usize, sizes: &Sizes) -> HeadNorm {
        let placement = Placement::new(Spread::Replicated, [(format!("{name}.weight"), vec![head_dim])]).partial(true);
        let weight = Weight::new(device, placement, &[head_dim], sizes.dtype, Init::Ones);
        HeadNorm { weight, eps: sizes.model.norm_eps }
    }

    /// The same of a vector that all heads share, with an epsilon of its own.
    pub(super) fn of_latent(device: &Arc<Device>, name: &str, width: usize, sizes: &Sizes) -> HeadNorm {
        HeadNorm { eps: LATENT_EPS, ..HeadNorm::new(device, name, width, sizes) }
    }

    /// x `[T, heads * head_dim]`.
    pub(super) fn forward(&self, x: &Var) -> Var {
        let (weight, shape) = (x.tape().parameter(&self.weight.parameter), x.shape().to_vec());
        let head_dim = weight.value().len();
        let heads = x.reshape(&[x.value().len() / head_dim, head_dim]);
        heads.rms_norm(&weight, self.eps).reshape(&shape)
    }
}

impl Parameters for HeadNorm {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
    }
}

/// RMS norm of all heads together, of which this rank has some.
#[derive(Debug)]
pub(super) struct WidthNorm {
    weight: Weight,
    /// Of all heads.
    columns: usize,
    eps: f32,
}

impl WidthNorm {
    pub(super) fn new(device: &Arc<Device>, name: &str, columns: usize, sizes: &Sizes, mesh: &Mesh) -> WidthNorm {
        let slice = mesh.slice(0, columns);
        let tensor = (format!("{name}.weight"), vec![columns], Some(slice));
        let placement = Placement::sliced(Spread::Tensor, [tensor]);
        let weight = Weight::new(device, placement, &[slice.len], sizes.dtype, Init::Ones);
        WidthNorm { weight, columns, eps: sizes.model.norm_eps }
    }

    /// x `[T, columns of this rank]`. Collective over the group, whose ranks have the other columns.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn forward(&self, x: &Var, group: &Arc<dyn Communicator>) -> Result<Var, Error> {
        let weight = x.tape().parameter(&self.weight.parameter);
        let squares = whole_to_parts(parts_to_whole(x.square_sums(), group)?, group)?;
        Ok(x.rms_norm_of(&weight, &squares, self.columns, self.eps))
    }
}

impl Parameters for WidthNorm {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
    }
}

/// The norm of one sub-layer and the path around it.
#[derive(Debug)]
pub(super) struct Residual {
    pub(super) norm: Norm,
    pub(super) place: NormPlace,
}

impl Residual {
    /// What the sub-layer f works on in `x + f(norm(x))` or `norm(x + f(x))`.
    pub(super) fn before(&self, x: &Var) -> Var {
        match self.place {
            NormPlace::Before => self.norm.forward(x),
            NormPlace::After => x.clone(),
        }
    }

    /// The whole of it, from x and f's result.
    pub(super) fn after(&self, x: &Var, y: &Var) -> Var {
        self.after_sum(x.add(y))
    }

    /// The rest of it, if x has been added to f's result.
    pub(super) fn after_sum(&self, sum: Var) -> Var {
        match self.place {
            NormPlace::Before => sum,
            NormPlace::After => self.norm.forward(&sum),
        }
    }

    /// How f's input arises from x.
    pub(super) fn stream(&self, x: &Var) -> ResidualStream {
        let norm = match self.place {
            NormPlace::Before => Some(self.norm.of_rows(x)),
            NormPlace::After => None,
        };
        ResidualStream { x: x.clone(), norm }
    }
}

impl Parameters for Residual {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.norm.visit(f);
    }
}
