//! The decision of a layer: which routes of a micro-batch share a row.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{Cause, Held, Tensor};

use super::clusters::Representatives;
use super::similarity::{counted_together, rehearse, routes_together, table_bytes};
use super::{
    ClusterPolicy, ClusterRule, Clusters, Condensation, CondenseGradient, LossTrend, Pairs, Similarities,
    condense_groups,
};
use crate::moe::Routing;
use crate::parallel::Rows;

/// The similarities that the layer before found among a stream's tokens, for a shortcut in the next
/// (`moe.condense_history`), and what they take of memory. In a simulated step that memory alone.
#[derive(Debug, Default)]
pub struct History(RefCell<Option<(Rc<Similarities>, Held)>>);

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
    /// decided by: the tables of pairs are as large as the squares of sets, so they are `kept` only for who asks.
    pub fn decide(
        &self,
        x: &Tensor,
        routing: &Routing,
        rows: &Rows,
        (at, kept): (&Circumstances, bool),
    ) -> (Condensed, Rc<Similarities>) {
        let together = routes_together(routing, &self.groups(rows), self.most);
        let held = self.hold(x, &together.iter().map(Vec::len).collect::<Vec<_>>());
        let before = at.history.0.take();
        let history = self.history.map(|bounds| (before.as_ref().map(|(before, _)| &**before), bounds));
        let threshold = self.threshold.at(at.step, at.trend.as_ref());
        let policy = self.policy_of(at.is_causal);
        let mut representatives = Representatives::none(routing);
        let similarities = Similarities::new(x, routing, together, history, |set| {
            representatives.add(set, &*policy, threshold);
            kept || self.history.is_some()
        });
        let (similarities, clusters) = (Rc::new(similarities), representatives.clusters());
        self.keep(at.history, similarities.clone(), held);
        (Condensed { clusters, gradient: self.gradient, pairs: similarities.pairs, threshold }, similarities)
    }

    /// Counts the memory of tables for sets of so many routes: with a history of all, otherwise of the largest.
    fn hold(&self, x: &Tensor, together: &[usize]) -> Held {
        let all = together.iter().copied();
        let bytes = if self.history.is_some() { table_bytes(all) } else { table_bytes(all.max().into_iter()) };
        x.device().hold(Cause::Other, bytes)
    }

    /// Leaves the tables for the next layer, if it asks for them.
    fn keep(&self, history: &History, similarities: Rc<Similarities>, held: Held) {
        if self.history.is_some() {
            history.0.replace(Some((similarities, held)));
        }
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
    pub fn rehearsed(
        &self,
        x: &Tensor,
        compared: &[usize],
        history: &History,
        clusters: Option<Clusters>,
    ) -> Condensed {
        let (held, before) = (self.hold(x, compared), history.0.take());
        rehearse(x, compared);
        drop(before);
        self.keep(history, Rc::default(), held);
        self.told(clusters)
    }

    /// Clusters that were decided elsewhere, so that nothing is compared here.
    pub fn told(&self, clusters: Option<Clusters>) -> Condensed {
        Condensed { clusters, gradient: self.gradient, pairs: Pairs::default(), threshold: 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::{Condense, Config};
    use guildhall_tensor::Device;

    /// 64 routes of one group and expert, all compared, and a smaller set before.
    #[test]
    fn tables_of_similarities_are_counted() {
        let routing = Routing::new([vec![0; 64], vec![1; 64]].concat(), 1, 2);
        let (of_64, of_all) = (5 * 64 * 64, 5 * 2 * 64 * 64);
        for (condense_history, least, left) in [(None, of_64, 0), (Some(vec![0.8, 0.2]), of_all, of_all)] {
            let section = Config { condense: Condense::Static, condense_history, ..Config::of(2, 1) };
            let condensation = section.condensation().expect("it condenses");
            let rows = Rows::consecutive(0, 128);
            let held = |device: Arc<Device>, decide: &dyn Fn(&Tensor, &History)| {
                let (history, x) = (History::default(), Tensor::zeros(&device, &[128, 4]));
                decide(&x, &history);
                let account = device.account();
                let held = [account.peak(Cause::Other), account.live(Cause::Other)];
                drop(history);
                assert_eq!(account.live(Cause::Other), 0);
                held
            };
            let real = held(Device::new(1), &|x, history| {
                let at = Circumstances { step: 1, trend: None, is_causal: true, history };
                let (_, similarities) = condensation.decide(x, &routing, &rows, (&at, false));
                assert_eq!(similarities.compared.len(), if left > 0 { 2 } else { 0 });
            });
            assert_eq!(real, [least, left]);
            let rehearsed = |x: &Tensor, history: &History| drop(condensation.rehearsed(x, &[64, 64], history, None));
            assert_eq!(real, held(Device::sizes(1), &rehearsed));
        }
    }
}
