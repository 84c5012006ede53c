//! What the `[moe]` section says of one layer: layers may have different numbers of experts.

use std::ops::Deref;
use std::sync::Arc;

use super::gates::Gate;
use super::{Capacity, Config, Counts, Selector};
use crate::limits::{Finding, common_divisor, divisors, nearest_of};

/// The section as a layer with so many experts has it. Whatever depends on their number is asked of it, and not of the
/// section, whose `experts` are those of all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig<'a> {
    pub experts: usize,
    section: &'a Config,
}

impl Deref for LayerConfig<'_> {
    type Target = Config;

    fn deref(&self) -> &Config {
        self.section
    }
}

impl Config {
    /// What it says of layer `index` of the model, if that is MoE.
    ///
    /// # Panics
    /// If a list of experts is too short; the configuration is checked before.
    pub fn of_layer(&self, index: usize) -> Option<LayerConfig<'_>> {
        let experts = || self.experts.at(self.layers.before(index));
        self.layers.contains(index).then(|| LayerConfig { experts: experts(), section: self })
    }

    /// What it says of each MoE layer of a model of so many `layers`, with the layer's index; of fewer where a list of
    /// experts is too short.
    pub fn of_layers(&self, layers: usize) -> Vec<(usize, LayerConfig<'_>)> {
        let with_experts: Vec<usize> = (0..layers).filter(|&index| self.layers.contains(index)).collect();
        let experts = self.experts.of_layers(with_experts.len());
        let of_layer = |(index, experts)| (index, LayerConfig { experts, section: self });
        with_experts.into_iter().zip(experts).map(of_layer).collect()
    }

    /// What it says of the layers with most experts, for questions whose answer is the same for all.
    pub fn widest(&self) -> LayerConfig<'_> {
        LayerConfig { experts: self.experts.largest(), section: self }
    }

    /// The largest number that divides the experts of every layer.
    pub fn shared_divisor(&self) -> usize {
        self.experts.distinct().into_iter().fold(0, common_divisor)
    }

    /// What is wrong with so many workers, nodes or groups, of which each has equally many of a layer's experts.
    pub fn equal_shares(&self, what: &str, number: usize) -> Option<Finding> {
        let shared = self.shared_divisor();
        if number > 0 && shared.is_multiple_of(number) {
            return None;
        }
        let (experts, each) = (&self.experts, if self.experts.list().is_some() { " of every layer" } else { "" });
        let wrong =
            format!("{what} have equal shares of the experts{each}, but it does not divide moe.experts = {experts}");
        Some(Finding::new(wrong, nearest_of(number, &divisors(shared))))
    }

    /// Whether tokens choose experts together in some layer that somebody could count.
    pub fn has_pairs(&self) -> bool {
        self.experts.distinct().into_iter().any(|experts| LayerConfig { experts, section: self }.pairs() > 0)
    }
}

impl LayerConfig<'_> {
    /// The gate with its limits.
    pub fn selector(&self) -> Selector {
        let gate = self.gate();
        let factor = self.capacity_factor.filter(|_| gate.chosen_per_token().is_none());
        Selector {
            gate,
            capacity: factor.map(|factor| Capacity {
                factor,
                eval_factor: self.eval_capacity_factor.unwrap_or(factor),
                overflow: self.overflow,
                nodes: self.logical_nodes,
            }),
            group_tokens: self.group_tokens,
        }
    }

    /// Choices per token, as the gate has them.
    pub fn slots(&self) -> usize {
        self.gate().slots()
    }

    /// Pairs of experts that tokens may choose together; 0 if nobody could count them.
    pub fn pairs(&self) -> usize {
        Counts::pairs_len(self.experts, self.slots())
    }

    pub(super) fn gate(&self) -> Arc<dyn Gate> {
        self.section.gate.keys().gate(self)
    }
}
