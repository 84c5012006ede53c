//! What ranks hold of a checkpoint's tensors, and the layout of all of them together.

use guildhall_tensor::Dtype;

use super::Error;
use super::element::ElementType;
use super::file_set::TensorKind;
use super::layout::TensorList;
use crate::optim::{Optimizer, Strip};
use crate::parallel::{Mesh, Parameters, Placement, gather_bytes};

/// A tensor this rank has a part in, with the prefix of its names in the file.
pub(super) struct Local {
    pub(super) kind: TensorKind,
    pub(super) prefix: &'static str,
    pub(super) placement: Placement,
    pub(super) dtype: Dtype,
}

/// The prefix of a strip's names.
pub(super) fn prefix(strip: Strip) -> &'static str {
    match strip {
        Strip::M => "m/",
        Strip::V => "v/",
        Strip::Master => "master/",
    }
}

/// This rank's tensors; those of the optimizer if there is one.
pub(super) fn locals(model: &mut dyn Parameters, optimizer: Option<&Optimizer>) -> Vec<Local> {
    let mut locals = Vec::new();
    let mut shards = optimizer.map(|optimizer| optimizer.shards().iter());
    model.visit(&mut |weight| {
        let mut add = |kind, prefix, dtype| {
            locals.push(Local { kind, prefix, placement: weight.placement.clone(), dtype });
        };
        add(TensorKind::Model, "", weight.parameter.dtype());
        let Some(shards) = shards.as_mut().filter(|_| !weight.parameter.is_frozen()) else { return };
        let shard = shards.next().expect("a shard of every trained weight");
        Strip::ALL[..shard.strips].iter().for_each(|&strip| add(TensorKind::Optimizer, prefix(strip), Dtype::F32));
    });
    model.visit_buffers(&mut |buffer| {
        let (placement, dtype) = (buffer.placement.clone(), buffer.value.dtype());
        locals.push(Local { kind: TensorKind::Model, prefix: "", placement, dtype });
    });
    locals
}

/// The tensors of a kind, the same on every rank: each tells the others the names and shapes of its own. Collective.
///
/// # Errors
/// What the world reports.
pub(super) fn tensors(kind: TensorKind, locals: &[Local], mesh: &Mesh) -> Result<TensorList, Error> {
    let own = locals.iter().filter(|local| local.kind == kind).flat_map(|local| {
        local.placement.pieces.iter().map(move |piece| {
            (format!("{}{}", local.prefix, piece.name), local.dtype == Dtype::Bf16, piece.shape.clone())
        })
    });
    let text = serde_json::to_vec(&own.collect::<Vec<_>>()).expect("names and shapes are plain JSON");
    let mut tensors = TensorList::new();
    for part in gather_bytes(text, &mesh.world)? {
        let parts: Vec<(String, bool, Vec<usize>)> = serde_json::from_slice(&part).expect("a rank's own JSON");
        let dtype = |half| if half { ElementType::Bf16 } else { ElementType::F32 };
        tensors.extend(parts.into_iter().map(|(name, half, shape)| (name, (dtype(half), shape))));
    }
    Ok(tensors)
}
