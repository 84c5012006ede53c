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
    let layers = joined(models);
    assert_eq!(layers.len(), sizes.moe_layers().count(), "the layers of all models");
    let origin = |name: &str| {
        let Some((layer, part)) = within_layer(name) else { return TensorOrigin::Mean(name.to_owned()) };
        let joined = layers.get(layer).expect("a MoE layer has a gate");
        match (within_expert(part), part) {
            (Some((expert, part)), _) => {
                let (model, own) = owner(&joined.experts, expert);
                TensorOrigin::Copy(model, format!("{layer}.block_sparse_moe.experts.{own}.{part}"))
            }
            (None, "gate.weight" | "gate.bias") => {
                TensorOrigin::Rows(name.to_owned(), joined.rows(&joined.gate.factors))
            }
            (None, "gate.noise.weight" | "gate.e_score_correction_bias") => {
                TensorOrigin::Rows(name.to_owned(), joined.rows(&vec![1.0; joined.experts.len()]))
            }
            // No step of the new model has been.
            (None, "gate.previous_load") => TensorOrigin::New,
            _ => TensorOrigin::Mean(name.to_owned()),
        }
    };
    let model = graft(device, &sizes, mesh, models, &origin);
    let mut factors: Vec<GateFactors> = layers.into_values().map(|layer| layer.gate).collect();
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

/// What becomes one layer.
struct JoinedLayer {
    /// How many experts each model has there.
    experts: Vec<usize>,
    gate: GateFactors,
}

impl JoinedLayer {
    /// The rows of all experts, those of each model multiplied by a factor.
    fn rows(&self, factors: &[f64]) -> Vec<SourceRow> {
        let of_model = |(model, (&count, &factor)): (usize, (&usize, &f64))| {
            (0..count).map(move |row| SourceRow { model, row, factor })
        };
        self.experts.iter().zip(factors).enumerate().flat_map(of_model).collect()
    }
}

/// By their names, the MoE layers of all models. The factors make the root mean square of each model's gate the mean of
/// those of all. Rows that are all zero stay so.
fn joined(models: &mut [Model]) -> BTreeMap<String, JoinedLayer> {
    let all: Vec<_> = models.iter_mut().map(gates).collect();
    let of_layer = |place: usize| {
        let sizes: Vec<f64> = all.iter().map(|gates| gates[place].root_mean_square()).collect();
        let mean = sizes.iter().sum::<f64>() / sizes.len() as f64;
        let factors = sizes.iter().map(|&size| if size > 0.0 { mean / size } else { 1.0 }).collect();
        let (first, experts) = (&all[0][place], all.iter().map(|gates| gates[place].experts).collect());
        (first.name.clone(), JoinedLayer { experts, gate: GateFactors { layer: first.layer, factors } })
    };
    (0..all[0].len()).map(of_layer).collect()
}
