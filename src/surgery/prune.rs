//! A model keeps some of its experts (expert pruning, Kim et al. 2021): the others go with their rows of the gate.

use std::slice;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::graft::{SourceRow, TensorOrigin, graft, within_expert, within_layer};
use super::scores::gates;
use crate::model::{Model, Sizes};
use crate::parallel::Mesh;

/// The model with the experts `kept` in each of its MoE layers, ascending and equally many in all. All else is copied.
///
/// # Panics
/// If experts are spread over ranks; if `kept` is not of the model's layers and experts.
pub fn prune(device: &Arc<Device>, model: &mut Model, kept: &[Vec<usize>], mesh: &Mesh) -> Model {
    assert_eq!(mesh.expert.size(), 1, "experts that are kept change places");
    let mut moe = model.sizes().moe.clone().expect("a model with experts");
    let before = std::mem::replace(&mut moe.experts, kept[0].len());
    assert!(kept.iter().all(|of_layer| of_layer.len() == moe.experts), "equally many in all layers: {kept:?}");
    let layers: Vec<String> = gates(model).into_iter().map(|gate| gate.name).collect();
    assert_eq!(layers.len(), kept.len(), "experts of every layer");
    let sizes = Sizes { moe: Some(moe), ..model.sizes().clone() };
    let origin = |name: &str| {
        let place = |layer: &str| layers.iter().position(|other| other == layer).expect("a MoE layer has a gate");
        let Some((layer, part)) = within_layer(name) else { return TensorOrigin::Copy(0, name.to_owned()) };
        let kept = &kept[place(layer)];
        let rows =
            |of: &[usize]| TensorOrigin::Rows(name.to_owned(), of.iter().map(|&row| SourceRow::of(0, row)).collect());
        match (within_expert(part), part) {
            (Some((expert, part)), _) => {
                TensorOrigin::Copy(0, format!("{layer}.block_sparse_moe.experts.{}.{part}", kept[expert]))
            }
            (None, "gate.weight" | "gate.noise.weight" | "gate.e_score_correction_bias") => rows(kept),
            // Behind the loads stands whether there has been a step.
            (None, "gate.previous_load") => rows(&[&kept[..], &[before]].concat()),
            _ => TensorOrigin::Copy(0, name.to_owned()),
        }
    };
    graft(device, &sizes, mesh, slice::from_mut(model), &origin)
}
