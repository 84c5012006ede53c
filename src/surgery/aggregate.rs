//! Models with experts become one model with the experts of all (aggregation of experts, Kim et al. 2021).
//!
//! ```text
//!  shared weights   mean of the models'
//!  experts          those of the first, then those of the second, ...
//!  gate rows        likewise, each model's multiplied by one factor: they are of the same size then
//! ```
//!
//! Scores of models that were trained apart are of different size, and the larger would take all tokens.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::graft::{SourceRow, TensorOrigin, graft, within_expert, within_layer};
use super::scores::gates;
use crate::model::{Model, Sizes};
use crate::moe;
use crate::parallel::Mesh;

/// What the gate rows of each model were multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub struct GateFactors {
    pub layer: usize,
    /// By model.
    pub factors: Vec<f64>,
}

/// The model that `config` makes of several: its experts are theirs, in their order.
///
/// # Panics
/// If experts are spread over ranks; if the models do not have the tensors that `config` asks for.
pub fn aggregate(
    device: &Arc<Device>,
    models: &mut [Model],
    config: &moe::Config,
    mesh: &Mesh,
) -> (Model, Vec<GateFactors>) {
    assert_eq!(mesh.expert.size(), 1, "experts of all models change places");
    let sizes = Sizes { moe: Some(config.clone()), ..models[0].sizes().clone() };
    let counts: Vec<usize> =
        models.iter().map(|model| model.sizes().moe.as_ref().map_or(0, |moe| moe.experts)).collect();
    assert_eq!(counts.iter().sum::<usize>(), config.experts, "the experts of all models");
    let factors = factors(models);
    let rows = |factors: Option<&GateFactors>| {
        let factor = |model: usize| factors.map_or(1.0, |of| of.factors[model]);
        let of_model =
            |model: usize| (0..counts[model]).map(move |row| SourceRow { model, row, factor: factor(model) });
        (0..counts.len()).flat_map(of_model).collect::<Vec<SourceRow>>()
    };
    let origin = |name: &str| {
        let Some((layer, part)) = within_layer(name) else { return TensorOrigin::Mean(name.to_owned()) };
        match (within_expert(part), part) {
            (Some((expert, part)), _) => {
                let (model, own) = owner(&counts, expert);
                TensorOrigin::Copy(model, format!("{layer}.block_sparse_moe.experts.{own}.{part}"))
            }
            (None, "gate.weight") => TensorOrigin::Rows(name.to_owned(), rows(factors.get(layer))),
            (None, "gate.noise.weight" | "gate.e_score_correction_bias") => {
                TensorOrigin::Rows(name.to_owned(), rows(None))
            }
            // No step of the new model has been.
            (None, "gate.previous_load") => TensorOrigin::New,
            _ => TensorOrigin::Mean(name.to_owned()),
        }
    };
    let model = graft(device, &sizes, mesh, models, &origin);
    let mut factors: Vec<GateFactors> = factors.into_values().collect();
    factors.sort_by_key(|of| of.layer);
    (model, factors)
}

/// The model that an expert of the new one is from, and its number there.
fn owner(counts: &[usize], expert: usize) -> (usize, usize) {
    let mut own = expert;
    for (model, &count) in counts.iter().enumerate() {
        match own.checked_sub(count) {
            None => return (model, own),
            Some(beyond) => own = beyond,
        }
    }
    panic!("{expert} of {counts:?} experts")
}

/// By the names of MoE layers, what makes the root mean square of each model's gate the mean of those of all. Rows that
/// are all zero stay so.
fn factors(models: &mut [Model]) -> BTreeMap<String, GateFactors> {
    let all: Vec<_> = models.iter_mut().map(gates).collect();
    let of_layer = |place: usize| {
        let sizes: Vec<f64> = all.iter().map(|gates| gates[place].root_mean_square()).collect();
        let mean = sizes.iter().sum::<f64>() / sizes.len() as f64;
        let factors = sizes.iter().map(|&size| if size > 0.0 { mean / size } else { 1.0 }).collect();
        let first = &all[0][place];
        (first.name.clone(), GateFactors { layer: first.layer, factors })
    };
    (0..all[0].len()).map(of_layer).collect()
}
