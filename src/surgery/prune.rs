//! A model keeps some of its experts (expert pruning, Kim et al. 2021): the others go with their rows of the gate.

use std::slice;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::graft::{SourceRow, TensorOrigin, graft, within_expert, within_layer};
use super::scores::gates;
use crate::model::{Model, Sizes};
use crate::parallel::{Mesh, PerLayer};

/// The model with the experts `kept` in each of its MoE layers, ascending. All else is copied.
///
/// # Panics
/// If experts are spread over ranks; if `kept` is not of the model's layers and experts.
pub fn prune(device: &Arc<Device>, model: &mut Model, kept: &[Vec<usize>], mesh: &Mesh) -> Model {
    assert_eq!(mesh.expert.size(), 1, "experts that are kept change places");
    let mut moe = model.sizes().moe.clone().expect("a model with experts");
    moe.experts = PerLayer::of_each(kept.iter().map(Vec::len).collect());
    let layers: Vec<(String, usize)> = gates(model).into_iter().map(|gate| (gate.name, gate.experts)).collect();
    assert_eq!(layers.len(), kept.len(), "experts of every layer");
    let sizes = Sizes { moe: Some(moe), ..model.sizes().clone() };
    let origin = |name: &str| {
        let place = |layer: &str| layers.iter().position(|(other, _)| other == layer).expect("a MoE layer has a gate");
        let Some((layer, part)) = within_layer(name) else { return TensorOrigin::Copy(0, name.to_owned()) };
        let (kept, before) = (&kept[place(layer)], layers[place(layer)].1);
        let rows =
            |of: &[usize]| TensorOrigin::Rows(name.to_owned(), of.iter().map(|&row| SourceRow::of(0, row)).collect());
        match (within_expert(part), part) {
            (Some((expert, part)), _) => {
                TensorOrigin::Copy(0, format!("{layer}.block_sparse_moe.experts.{}.{part}", kept[expert]))
            }
            (None, "gate.weight" | "gate.bias" | "gate.noise.weight" | "gate.e_score_correction_bias") => rows(kept),
            // Behind the loads stands whether there has been a step.
            (None, "gate.previous_load") => rows(&[&kept[..], &[before]].concat()),
            _ => TensorOrigin::Copy(0, name.to_owned()),
        }
    };
    graft(device, &sizes, mesh, slice::from_mut(model), &origin)
}
