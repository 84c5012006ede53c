//! A dense model becomes a Mixture-of-Experts model.
//!
//! *Upcycling* (Komatsuzaki et al. 2022): every expert begins as a copy of the layer's feed-forward, the router is new.
//! With weights of the chosen that sum to one the model then computes what it did, whatever the router says. Experts of
//! *equal compute* (`moe.equal_compute`; FastMoE) are narrower than the feed-forward, and a slice of it is not what it
//! computes, so they begin with new values.

use std::slice;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::Error;
use super::graft::{TensorOrigin, graft, within_layer};
use crate::model::{Model, Sizes, dense_name};
use crate::moe;
use crate::parallel::Mesh;

/// The model that `config` makes of a dense one, this rank's share. What is new is drawn by `seed`, all else is copied;
/// every rank of any mesh has what its share is made of, so nothing is sent.
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
    let origin = |name: &str| match config.equal_compute && within_layer(name).is_some() {
        true => TensorOrigin::New,
        false => dense_name(&blueprint, name).map_or(TensorOrigin::New, |name| TensorOrigin::Copy(0, name)),
    };
    Ok(graft(device, &sizes, mesh, slice::from_mut(dense), &origin))
}

fn check(dense: &Sizes, config: &moe::Config) -> Result<(), Error> {
    let (d_ff, d_expert) = (dense.d_ff(), config.expert_width(dense.d_ff()));
    match &dense.moe {
        Some(moe) => Err(Error::AlreadyMoe { experts: moe.experts.clone() }),
        None if config.equal_compute => Ok(()),
        None if d_expert != d_ff => Err(Error::Width { d_expert, d_ff }),
        None if config.shared_experts > 0 => Err(Error::Shared(config.shared_experts)),
        None => Ok(()),
    }
}
