//! Where two runs condensed tokens differently, and whether rounding explains it.
//!
//! Clusters are a pure function of similarities and of a threshold. So different ones are rounding if the similarities of
//! the two runs agree up to the order of sums, and the recipe's own rule makes this run's clusters of this run's
//! similarities. Where two runs routed all tokens alike, they compare the same pairs.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::routing::Verdict;
use crate::config::Config;
use crate::moe::condensation::ComparedRoutes;
use crate::moe::recording::{DecisionPlace, SeenClusters};

/// Of a cosine, and of a threshold that follows the loss: some layers of sums, each off by about 1e-6.
const APART: f64 = 1e-5;

/// Compares the clusters of a layer in a step.
pub(super) fn condensed(seen: [&SeenClusters; 2], (step, layer): (u64, u32), config: &Config) -> Verdict {
    let of = (step, layer, 0)..=(step, layer, u64::MAX);
    let [mine, theirs] = seen.map(|seen| Condensing::of(seen, &of));
    if let Some((_, _, first)) = seen[0].contradicted.iter().find(|place| of.contains(place)) {
        return Verdict::Wrong(format!(
            "the routes from {first} on of layer {layer}, step {step}, were condensed twice, and differently"
        ));
    }
    let routes = mine.members.iter().filter(|(route, of)| theirs.members.get(*route) != Some(*of));
    let routes = routes.count() + theirs.members.keys().filter(|route| !mine.members.contains_key(route)).count();
    if routes == 0 {
        return Verdict::Same;
    }
    let told = format!("{routes} routes of layer {layer}, step {step}, share other rows");
    let apart = mine.apart(&theirs);
    if !matches!(apart.partial_cmp(&APART), Some(std::cmp::Ordering::Less)) {
        return Verdict::Wrong(format!("{told}, by similarities that are {apart:.1e} apart"));
    }
    match mine.follows_from_similarities(layer, config) {
        true if apart == 0.0 => Verdict::Wrong(format!("{told}, by the same similarities")),
        true => Verdict::Rounding(format!("{told}, by similarities {apart:.0e} apart")),
        false => Verdict::Wrong(format!("{told}, and not as similarity decides")),
    }
}

/// One layer of one step in one run. All of it is empty where tokens are not condensed.
struct Condensing<'a> {
    /// The routes that share another's row, with that route.
    members: BTreeMap<u64, u64>,
    sets: Vec<&'a ComparedRoutes>,
    threshold: Option<f64>,
}

impl Condensing<'_> {
    fn of<'a>(seen: &'a SeenClusters, of: &RangeInclusive<DecisionPlace>) -> Condensing<'a> {
        let (step, layer, _) = *of.start();
        let mut members = BTreeMap::new();
        for ((_, _, first), representatives) in seen.representatives.range(of.clone()) {
            members.extend((*first..).zip(representatives.iter().copied()).filter(|(route, of)| route != of));
        }
        let sets = seen.compared.range(of.clone()).map(|(_, set)| set).collect();
        Condensing { members, sets, threshold: seen.thresholds.get(&(step, layer)).copied() }
    }

    /// How far similarities and thresholds are apart; infinitely, if not the same pairs were compared.
    fn apart(&self, other: &Condensing) -> f64 {
        let thresholds = match (self.threshold, other.threshold) {
            (Some(own), Some(other)) => (own - other).abs(),
            _ => f64::INFINITY,
        };
        if self.sets.len() != other.sets.len() {
            return f64::INFINITY;
        }
        let sets = self.sets.iter().zip(&other.sets).map(|(own, other)| own.apart(other));
        sets.chain([thresholds]).max_by(f64::total_cmp).expect("the thresholds")
    }

    /// Whether the rule of `config` makes these clusters of these similarities.
    fn follows_from_similarities(&self, layer: u32, config: &Config) -> bool {
        let condensation = config.moe.as_ref().and_then(|moe| moe.condensation());
        let Some((condensation, threshold)) = condensation.zip(self.threshold) else { return false };
        let stacks = config.model.blueprint().stacks();
        let stack = stacks.iter().find(|stack| stack.layers.contains(&(layer as usize))).expect("a stack of the layer");
        let policy = condensation.policy_of(stack.is_causal);
        let of_set = |set: &&ComparedRoutes| {
            let of = policy.representatives(set, threshold);
            let pairs = set.routes.iter().zip(of).map(|(&route, of)| (u64::from(route), u64::from(set.routes[of])));
            pairs.filter(|(route, of)| route != of).collect::<Vec<_>>()
        };
        self.members == self.sets.iter().flat_map(of_set).collect()
    }
}
