//! The decision of a layer: which routes of a micro-batch share a row.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::Tensor;

use super::similarity::{counted_together, rehearse, routes_together};
use super::{
    ClusterPolicy, ClusterRule, Clusters, Condensation, CondenseGradient, LossTrend, Pairs, Similarities,
    condense_groups,
};
use crate::moe::Routing;
use crate::parallel::Rows;

/// The similarities that the layer before found among a stream's tokens, for a shortcut in the next
/// (`moe.condense_history`).
#[derive(Debug, Default)]
pub struct History(RefCell<Option<Rc<Similarities>>>);

/// What a layer condenses.
#[derive(Clone, Debug, PartialEq)]
pub struct Condensed {
    /// `None`: nothing is similar enough.
    pub clusters: Option<Clusters>,
    pub gradient: CondenseGradient,
    pub pairs: Pairs,
    pub threshold: f64,
}

/// What the decision depends on besides the tokens.
pub struct Circumstances<'a> {
    /// From 1.
    pub step: u64,
    pub trend: Option<LossTrend>,
    /// Whether no token of the stack may know of later ones.
    pub is_causal: bool,
    pub history: &'a History,
}

impl Condensation {
    /// Decides about the routes of all tokens of a stream; x `[T, D]` has their rows. Also gives the similarities that it
    /// decided by.
    pub fn decide(
        &self,
        x: &Tensor,
        routing: &Routing,
        rows: &Rows,
        at: &Circumstances,
    ) -> (Condensed, Rc<Similarities>) {
        let groups = self.groups(rows);
        let before = at.history.0.take();
        let history = self.history.map(|bounds| (before.as_deref(), bounds));
        let similarities = Rc::new(Similarities::new(x, routing, &groups, self.most, history));
        if self.history.is_some() {
            at.history.0.replace(Some(similarities.clone()));
        }
        let threshold = self.threshold.at(at.step, at.trend.as_ref());
        let clusters = Clusters::new(routing, &similarities.compared, &*self.policy_of(at.is_causal), threshold);
        (Condensed { clusters, gradient: self.gradient, pairs: similarities.pairs, threshold }, similarities)
    }

    /// Who represents whom in a stack.
    pub fn policy_of(&self, is_causal: bool) -> Arc<dyn ClusterPolicy> {
        self.policy.clone().unwrap_or_else(|| Arc::new(ClusterRule::of_stack(is_causal)))
    }

    fn groups(&self, rows: &Rows) -> Vec<Range<usize>> {
        condense_groups(rows.numbers().runs(), self.tokens.unwrap_or(rows.seq).max(1))
    }

    /// How many routes each set has that is compared of the routes of a stream's tokens.
    pub fn compared(&self, routing: &Routing, rows: &Rows) -> Vec<usize> {
        let groups = self.groups(rows);
        match routing.counted {
            Some(_) => counted_together(routing, &groups, self.most),
            None => routes_together(routing, &groups, self.most).iter().map(Vec::len).collect(),
        }
    }

    /// A simulated decision: what comparing sets of rows of x costs, and clusters that were decided elsewhere.
    pub fn rehearsed(&self, x: &Tensor, compared: &[usize], clusters: Option<Clusters>) -> Condensed {
        rehearse(x, compared);
        self.told(clusters)
    }

    /// Clusters that were decided elsewhere, so that nothing is compared here.
    pub fn told(&self, clusters: Option<Clusters>) -> Condensed {
        Condensed { clusters, gradient: self.gradient, pairs: Pairs::default(), threshold: 0.0 }
    }
}
