//! The MoE layer on one page: the five verbs, and the losses that come of the first.

use guildhall_tensor::Var;

use super::gates::{GateDraws, Tokens};
use super::{
    BalanceLoss, BalanceScope, Counts, Error, Expert, Experts, GateState, Importance, LossInputs, Router, Routings,
    Selector, Transport, combine, through_experts,
};
use crate::parallel::{Buffer, Mesh, Parameters, Weight};

/// A router, a gate, and this rank's share of the experts.
#[derive(Debug)]
pub struct MoeLayer {
    /// Tells the layers' draws apart.
    pub index: u32,
    pub router: Router,
    pub selector: Selector,
    pub experts: Box<dyn Expert>,
    pub transport: Transport,
    /// An expert that every token passes through.
    pub shared: Option<Experts>,
    pub balance_scope: BalanceScope,
    pub state: GateState,
}

/// What a layer is told about the tokens besides their features.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    pub importance: &'a Importance,
    /// Numbers in the vocabulary.
    pub ids: &'a [u32],
    /// Index within the step, over all ranks and micro-batches, of the first token.
    pub first: u64,
    pub seed: u64,
    pub step: u64,
    pub trains: bool,
    /// Routings to follow or to keep.
    pub routings: &'a Routings,
}

/// What a MoE layer gives.
pub struct LayerOutput {
    /// `[T, D]`.
    pub y: Var,
    pub losses: BalanceLoss,
    /// Of this rank's tokens.
    pub counts: Counts,
    /// Experts that visited every rank of the expert group.
    pub shadowed: Vec<usize>,
}

impl MoeLayer {
    /// x `[T, D]`. Collective over the mesh's expert group, and over its world if tokens compete; T may be zero.
    ///
    /// # Errors
    /// What a group reports; a gate that gives no routing; a recording that cannot be followed or written.
    pub fn forward(&self, x: &Var, facts: &Facts, mesh: &Mesh) -> Result<LayerOutput, Error> {
        let draws = GateDraws { seed: facts.seed, step: facts.step, layer: self.index, trains: facts.trains };
        let scores = self.router.scores(x, facts.first, &draws);
        let logits = scores.logits.value().to_f32();
        let bias = self.state.bias();
        let tokens = Tokens {
            logits: logits.f32s(),
            experts: logits.cols(),
            first: facts.first,
            ids: facts.ids,
            bias: &bias,
            draws,
        };
        let routing = facts.routings.of(&tokens, || self.selector.route(&tokens, &mesh.world))?;
        let weighting = self.selector.gate.weighting();
        let probabilities = weighting.probabilities(&scores.logits);
        let weights = weighting.weights(&scores.logits, &probabilities, &routing.chosen, routing.k);

        let experts = (&*self.experts, &*self.experts.weights(x.tape()));
        let plan = self.transport.plan(&routing, experts, (mesh, facts.trains))?;
        let home = through_experts(x, &plan, experts, &mesh.expert)?;
        let mut y = combine(home, &plan, &weights);
        if let Some(shared) = &self.shared {
            y = y.add(&shared.forward(x, &[x.value().rows()]));
        }

        let inputs = LossInputs {
            scores: &scores,
            probabilities: &probabilities,
            weights: &weights,
            routing: &routing,
            importance: facts.importance,
            kind: self.selector.gate.balance(),
            scope: self.balance_scope,
            previous_load: &self.state.previous_load(),
        };
        let losses = BalanceLoss::new(&inputs, &mesh.world)?;
        let counts = Counts::new(&routing, &plan.sent(mesh.expert.rank()));
        Ok(LayerOutput { y, losses, counts, shadowed: plan.plan.layout.shadowed })
    }
}

impl Parameters for MoeLayer {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.router.visit(f);
        self.experts.visit(f);
        self.shared.iter_mut().for_each(|shared| shared.visit(f));
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.state.visit_buffers(f);
    }
}
