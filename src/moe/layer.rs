//! The MoE layer on one page: the five verbs, and the losses that come of the first.

use guildhall_comm::Error;
use guildhall_tensor::Var;

use super::{BalanceLoss, Experts, Importance, Plan, Router, combine, dispatch, softmax_top_k};
use crate::parallel::{Mesh, Parameters, Weight};

/// A router and this rank's share of the experts.
#[derive(Debug)]
pub struct MoeLayer {
    pub router: Router,
    pub experts: Experts,
    pub top_k: usize,
}

/// What a MoE layer gives.
pub struct LayerOutput {
    /// `[T, D]`.
    pub y: Var,
    pub losses: BalanceLoss,
    /// Routes of this rank's tokens to each expert of all ranks.
    pub load: Vec<u64>,
    /// Routes that were not sent.
    pub dropped: u64,
}

impl MoeLayer {
    /// x `[T, D]`. Collective over the mesh's expert group; T may be zero.
    ///
    /// # Errors
    /// What the group reports.
    pub fn forward(&self, x: &Var, importance: &Importance, mesh: &Mesh) -> Result<LayerOutput, Error> {
        let logits = self.router.logits(x);
        let probabilities = logits.softmax();
        let routing = softmax_top_k(probabilities.value(), self.top_k);
        let weights = probabilities.select_normalised(&routing.expert, routing.k);

        let plan = Plan::new(&routing).exchange(&mesh.expert)?;
        let rows = dispatch(x, &plan, &mesh.expert)?;
        let rows = self.experts.forward(&rows, &plan.rows_per_local_expert);
        let y = combine(&rows, &plan, &mesh.expert, &weights)?;

        let losses = BalanceLoss::new(&logits, &probabilities, &routing, importance);
        let load = routing.load();
        let dropped = routing.expert.len() as u64 - load.iter().sum::<u64>();
        Ok(LayerOutput { y, losses, load, dropped })
    }
}

impl Parameters for MoeLayer {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.router.visit(f);
        self.experts.visit(f);
    }
}
