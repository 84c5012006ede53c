//! What ranks hold of a checkpoint's tensors, and the layout of all of them together.

use std::collections::BTreeMap;

use guildhall_tensor::Dtype;

use super::Error;
use super::layout::FileLayout;
use crate::optim::{Optimizer, Strip};
use crate::parallel::{Mesh, Parameters, Placement, gather_bytes};

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// A tensor this rank has a part in, with the prefix of its names in the file.
pub(super) struct Local {
    pub(super) file: &'static str,
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
        let mut add = |file, prefix, dtype| {
            locals.push(Local { file, prefix, placement: weight.placement.clone(), dtype });
        };
        add(MODEL, "", weight.parameter.dtype());
        let Some(shards) = &mut shards else { return };
        let shard = shards.next().expect("a shard of every weight");
        Strip::ALL[..shard.strips].iter().for_each(|&strip| add(OPTIMIZER, prefix(strip), Dtype::F32));
    });
    model.visit_buffers(&mut |buffer| {
        let (placement, dtype) = (buffer.placement.clone(), buffer.value.dtype());
        locals.push(Local { file: MODEL, prefix: "", placement, dtype });
    });
    locals
}

/// The layout of one file, the same on every rank: each tells the others its tensors' names and shapes. Collective.
///
/// # Errors
/// What the world reports.
pub(super) fn layout(file: &str, locals: &[Local], mesh: &Mesh) -> Result<FileLayout, Error> {
    let own = locals.iter().filter(|local| local.file == file).flat_map(|local| {
        local.placement.pieces.iter().map(move |piece| {
            (format!("{}{}", local.prefix, piece.name), local.dtype == Dtype::Bf16, piece.shape.clone())
        })
    });
    let text = serde_json::to_vec(&own.collect::<Vec<_>>()).expect("names and shapes are plain JSON");
    let mut tensors = BTreeMap::new();
    for part in gather_bytes(text, &mesh.world)? {
        let parts: Vec<(String, bool, Vec<usize>)> = serde_json::from_slice(&part).expect("a rank's own JSON");
        let dtype = |half| if half { Dtype::Bf16 } else { Dtype::F32 };
        tensors.extend(parts.into_iter().map(|(name, half, shape)| (name, (dtype(half), shape))));
    }
    Ok(FileLayout::new(&tensors))
}
