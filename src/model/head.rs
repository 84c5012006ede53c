//! The head: from features to one logit for every entry of the vocabulary, and the loss. The vocabulary is cut over the
//! tensor group: the ranks make logits of different entries, and tell each other three numbers a row.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::ops::{Classes, join_statistics};
use guildhall_tensor::{Device, Dtype, Index, Indices, Tensor, Var};

use super::embedding::vocabulary_rows;
use super::linear::{Cut, Linear, LinearShape};
use super::norm::Norm;
use super::{HeadKind, Sizes};
use crate::data::IGNORE;
use crate::moe::migration::{FollowingWork, products};
use crate::parallel::operands::{all_gather, whole_to_parts};
use crate::parallel::{Init, Mesh, Parameters, Placement, Slice, Spread, Stream, Weight};

/// What a head is asked for: a target a token, of which `valid` count, each with the weight `scale`.
pub(super) struct Wanted<'a> {
    pub(super) targets: Index<'a>,
    pub(super) valid: usize,
    pub(super) scale: f32,
}

/// The tokens that have a target, and their targets.
fn with_target(targets: &Index, valid: usize) -> (Indices, Indices) {
    if let Index::Counted(_) = targets {
        return (Indices::Counted(valid), Indices::Counted(valid));
    }
    let chosen: Vec<u32> = (0..targets.len() as u32).filter(|&t| targets.at(t as usize) != IGNORE).collect();
    let targets = chosen.iter().map(|&t| targets.at(t as usize)).collect();
    (Indices::Known(chosen), Indices::Known(targets))
}

/// What stands between the last block and the loss.
#[derive(Debug)]
pub(super) struct Head {
    transform: Option<Transform>,
    /// Factor on features before the product.
    scale: Option<f32>,
    /// `[V, D]`, some rows; absent when the token table serves.
    weight: Option<Weight>,
    /// `[V]`, some elements.
    bias: Option<Weight>,
    classes: Classes,
}

/// `norm(gelu(W x + b))`, which turns BERT's features into what is compared with the tokens' vectors. The same on every
/// rank.
#[derive(Debug)]
struct Transform {
    dense: Linear,
    norm: Norm,
}

impl Head {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> Head {
        let vocab = sizes.model.vocab;
        let slice = mesh.slice(0, vocab);
        let masked = sizes.blueprint().head == HeadKind::Masked;
        let name = if masked { "lm_head.decoder.weight" } else { "lm_head.weight" };
        let bias = || {
            let tensor = ("lm_head.bias".to_owned(), vec![vocab], Some(slice));
            let placement = Placement::sliced(Spread::Tensor, [tensor]);
            Weight::new(device, placement, &[slice.len], sizes.dtype, Init::Zeros)
        };
        Head {
            transform: masked.then(|| Transform::new(device, sizes)),
            scale: (sizes.blueprint().head == HeadKind::ScaledIfTied && sizes.model.tie_embeddings)
                .then(|| 1.0 / (sizes.model.d_model as f32).sqrt()),
            weight: (!sizes.model.tie_embeddings).then(|| vocabulary_rows(device, name, sizes, mesh)),
            bias: masked.then(bias),
            classes: Classes { first: slice.start, all: vocab },
        }
    }

    /// What it does with a token, if `tokens` is the table that a tied head shares. Of a masked model's tokens few have a
    /// target, and it does nothing with the others.
    pub(super) fn work(&self, tokens: &Weight, lanes: usize) -> FollowingWork {
        let weight = self.weight.as_ref().unwrap_or(tokens);
        let per_token = if self.transform.is_some() { 0 } else { products(weight, lanes) };
        FollowingWork { per_token, ..FollowingWork::default() }
    }

    /// `scale` times the summed cross-entropy of features `[T', D]`, with `tokens` the table that a tied head shares; and
    /// the cross-entropy of each token, 0 without a target, or of a masked model of each that has one. The same on all
    /// ranks of a tensor group, over which it is collective.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn loss(
        &self,
        x: &Var,
        tokens: &Weight,
        Wanted { targets, valid, scale }: Wanted,
        stream: &Stream,
    ) -> Result<(Var, Tensor), Error> {
        let (weight, bias) = self.on_tape(x, tokens);
        let x = &self.scaled(x);
        let join = |own: &Tensor| join(own, stream.group());
        let loss = |x: &Var, targets: Index| {
            x.sliced_linear_cross_entropy((&weight, bias.as_ref()), self.classes, (targets, scale), join)
        };
        let Some(transform) = &self.transform else { return loss(&stream.to_parts(x)?, targets) };
        // Few tokens of a masked model have a target, and only for those is there anything to transform.
        let (chosen, targets) = with_target(&targets, valid);
        let x = transform.forward(&stream.to_whole(x)?.gather_rows(&chosen));
        loss(&whole_to_parts(x, stream.group())?, Index::from(&targets))
    }

    /// Logits `[T, V]` of features `[T', D]` as f32, on every rank. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn logits(&self, x: &Var, tokens: &Weight, stream: &Stream) -> Result<Tensor, Error> {
        let (weight, bias) = self.on_tape(x, tokens);
        let x = stream.to_whole(&self.scaled(x))?;
        let x = self.transform.as_ref().map_or(x.clone(), |transform| transform.forward(&x));
        gather_columns(&x.logits(&weight, bias.as_ref()), self.classes.all, stream.group())
    }

    fn scaled(&self, x: &Var) -> Var {
        self.scale.map_or_else(|| x.clone(), |scale| x.scale(scale))
    }

    fn on_tape(&self, x: &Var, tokens: &Weight) -> (Var, Option<Var>) {
        let tape = x.tape();
        let weight = tape.parameter(&self.weight.as_ref().unwrap_or(tokens).parameter);
        (weight, self.bias.as_ref().map(|bias| tape.parameter(&bias.parameter)))
    }
}

/// Statistics of rows over all classes, joined in the order of ranks.
fn join(own: &Tensor, group: &Arc<dyn Communicator>) -> Result<Tensor, Error> {
    let (rows, ranks) = (own.rows(), group.size());
    let all = all_gather(own.to_owned_copy(), &vec![rows; ranks], group)?;
    Ok(join_statistics(&all.reshape(&[ranks, rows, own.cols()])))
}

/// The columns `[T, V]` of which every rank has its slice, `[T, V']`, on every rank.
fn gather_columns(own: &Tensor, width: usize, group: &Arc<dyn Communicator>) -> Result<Tensor, Error> {
    let (rows, ranks) = (own.rows(), group.size());
    let slices: Vec<Slice> = (0..ranks).map(|rank| Slice::share(1, width, (rank, ranks))).collect();
    let counts: Vec<usize> = slices.iter().map(|slice| rows * slice.len).collect();
    let all = all_gather(own.reshape(&[own.len(), 1]).to_owned_copy(), &counts, group)?;
    let (mut out, mut first) = (Tensor::stale(own.device(), &[rows, width], Dtype::F32), 0);
    for slice in slices {
        for row in 0..rows {
            let from = first + row * slice.len;
            out.copy_part(row * width + slice.start, &all, from..from + slice.len);
        }
        first += rows * slice.len;
    }
    Ok(out)
}

impl Parameters for Head {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        if let Some(Transform { dense, norm }) = &mut self.transform {
            dense.visit(f);
            norm.visit(f);
        }
        self.weight.iter_mut().for_each(&mut *f);
        self.bias.iter_mut().for_each(f);
    }
}

impl Transform {
    fn new(device: &Arc<Device>, sizes: &Sizes) -> Transform {
        let d = sizes.model.d_model;
        let shape = LinearShape { outputs: &[("lm_head.dense".to_owned(), d)], inputs: d, cut: Cut::Not };
        Transform {
            dense: Linear::new(device, shape, sizes, (sizes.init(), true)),
            norm: Norm::new(device, "lm_head.layer_norm", sizes, false),
        }
    }

    fn forward(&self, x: &Var) -> Var {
        self.norm.forward(&self.dense.forward(x).gelu())
    }
}
