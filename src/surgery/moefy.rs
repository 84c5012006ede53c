//! A dense model becomes a Mixture-of-Experts model.
//!
//! *Upcycling* (Komatsuzaki et al. 2022): every expert begins as a copy of the layer's feed-forward, the router is new.
//! With weights of the chosen that sum to one the model then computes what it did, whatever the router says. Experts of
//! *equal compute* (`moe.equal_compute`; FastMoE) are narrower than the feed-forward, and a slice of it is not what it
//! computes, so they begin with new values.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall_tensor::{Device, Tensor};

use super::Error;
use crate::model::{Model, Sizes, dense_name};
use crate::moe;
use crate::parallel::{Mesh, Parameters, Piece};

/// The model that `config` makes of a dense one, this rank's share. What is new is drawn by `seed`, all else is copied;
/// every rank of any mesh has the whole dense model, so nothing is sent.
///
/// # Errors
/// A model that is not dense; copies that would not fit or would not compute the same.
///
/// # Panics
/// If the mesh's expert group does not divide the experts.
pub fn moefy(
    device: &Arc<Device>,
    dense: &mut Model,
    config: &moe::Config,
    seed: u64,
    mesh: &Mesh,
) -> Result<Model, Error> {
    check(dense.sizes(), config)?;
    let blueprint = dense.sizes().blueprint();
    let sizes = Sizes { moe: Some(config.clone()), seed, ..dense.sizes().clone() };
    let tensors = tensors(dense);
    let mut model = Model::new(device, &sizes, mesh);
    model.visit(&mut |weight| {
        for piece in &weight.placement.pieces {
            let from =
                if config.equal_compute { Some(piece.name.clone()) } else { dense_name(&blueprint, &piece.name) };
            if let Some(from) = from.and_then(|name| tensors.get(&name)) {
                copy(from, &mut weight.parameter.value_mut(), piece);
            }
        }
    });
    Ok(model)
}

fn check(dense: &Sizes, config: &moe::Config) -> Result<(), Error> {
    let (d_ff, d_expert) = (dense.d_ff(), config.expert_width(dense.d_ff()));
    match &dense.moe {
        Some(moe) => Err(Error::AlreadyMoe { experts: moe.experts }),
        None if config.equal_compute => Ok(()),
        None if d_expert != d_ff => Err(Error::Width { d_expert, d_ff }),
        None if config.shared_experts > 0 => Err(Error::Shared(config.shared_experts)),
        None => Ok(()),
    }
}

/// The tensors of a model by global name: where they are.
fn tensors(model: &mut Model) -> BTreeMap<String, (Tensor, Piece)> {
    let mut tensors = BTreeMap::new();
    model.visit(&mut |weight| {
        let value = weight.parameter.value();
        let named = weight.placement.pieces.iter().map(|piece| (piece.name.clone(), (value.clone(), piece.clone())));
        tensors.extend(named);
    });
    tensors
}

#[track_caller]
fn copy((from, source): &(Tensor, Piece), to: &mut Tensor, target: &Piece) {
    assert_eq!(source.shape, target.shape, "{} as {}", source.name, target.name);
    to.copy_part(target.offset, from, source.offset..source.offset + source.len());
}
