//! How many parameters a model has, and how many of them one token uses.

use std::sync::Arc;

use guildhall_comm::sizes;
use guildhall_tensor::Device;

use super::{Model, Sizes};
use crate::parallel::{Mesh, Parameters, Spread};

/// Parameters of the whole model, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterCounts {
    pub total: u64,
    /// All but the experts a token is not sent to.
    pub active: u64,
    /// Those that belong to experts.
    pub experts: u64,
    /// All but the frozen ones.
    pub trained: u64,
}

/// Counts before any memory is taken: of the model itself, on a device that knows sizes alone.
pub fn count(sizes: &Sizes) -> ParameterCounts {
    let alone = sizes::world(0, 1, Arc::new(|_, _| ()), Arc::new(|_, _| None));
    let mesh = Mesh::new(alone, 1).expect("a rank alone agrees with itself");
    let (mut total, mut experts, mut trained) = (0u64, 0u64, 0u64);
    Model::new(&Device::sizes(1), sizes, &mesh).visit(&mut |weight| {
        let len = weight.parameter.len() as u64;
        // Numbers past 64 bits are of models that no machine holds.
        total = total.saturating_add(len);
        if !weight.parameter.is_frozen() {
            trained = trained.saturating_add(len);
        }
        if matches!(weight.placement.spread, Spread::Expert(_) | Spread::ExpertTensor(_)) {
            experts = experts.saturating_add(len);
        }
    });
    // All experts are of one size.
    let layers = sizes.moe_layers();
    let [all, used] = layers.fold([0, 0], |[all, used], (_, moe)| [all + moe.experts as u64, used + moe.top_k as u64]);
    ParameterCounts { total, active: total - experts + experts / all.max(1) * used, experts, trained }
}
