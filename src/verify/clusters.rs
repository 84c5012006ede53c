//! Where two runs condensed tokens differently, and whether rounding explains it.
//!
//! Clusters are a pure function of similarities and of a threshold. So different ones are rounding if the similarities of
//! the two runs agree up to the order of sums, and the recipe's own rule makes this run's clusters of this run's
//! similarities. Where two runs routed all tokens alike, they compare the same pairs.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::routing::Verdict;
use crate::config::Config;
use crate::moe::condensation::{ComparedRoutes, representatives};
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
            let of = representatives(&*policy, set, threshold);
            let pairs = set.routes.iter().zip(of).map(|(&route, of)| (u64::from(route), u64::from(set.routes[of])));
            pairs.filter(|(route, of)| route != of).collect::<Vec<_>>()
        };
        self.members == self.sets.iter().flat_map(of_set).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One layer, three tokens of a causal stack with one route each, which go to one expert. `cosines` are of the pairs
    /// 1-0, 2-0 and 2-1.
    fn seen(cosines: [f32; 3], representatives: [u64; 3]) -> SeenClusters {
        let [a, b, c] = cosines;
        let set = ComparedRoutes::known((0..3).collect(), vec![1.0, 0.0, 0.0, a, 1.0, 0.0, b, c, 1.0]);
        let place = (1, 0, 0);
        SeenClusters {
            representatives: [(place, representatives.to_vec())].into(),
            compared: [(place, set)].into(),
            thresholds: [((1, 0), 0.8)].into(),
            contradicted: Vec::new(),
        }
    }

    fn judge(got: &SeenClusters, want: &SeenClusters) -> Verdict {
        let text = "[run]\ndir = \"r\"\n[train]\nsteps = 1\nbatch_tokens = 3\nlr = 1.0\n[model]\nvocab = 300\n\
                    d_model = 4\nlayers = 1\nheads = 1\nseq = 3\n[moe]\nexperts = 1\ntop_k = 1\n\
                    condense = \"static\"\n[data]\nsources = [\"t\"]\n[parallel]\n[memory]\n[metrics]\n";
        condensed([got, want], (1, 0), &toml::from_str(text).expect("a recipe"))
    }

    fn is_wrong(verdict: &Verdict, word: &str) -> bool {
        matches!(verdict, Verdict::Wrong(why) if why.contains(word))
    }

    #[test]
    fn rounding_is_told_from_wrong_clusters() {
        // The last digit decides whether token 1 is as similar to token 0 as the threshold says.
        let (below, above) = ([0.799_999_95, 0.1, 0.9], [0.8, 0.1, 0.9]);
        let (want, other) = (seen(below, [0, 1, 1]), seen(above, [0, 0, 2]));
        assert_eq!(judge(&want, &want), Verdict::Same);
        let told = "2 routes of layer 0, step 1, share other rows, by similarities 6e-8 apart";
        assert_eq!(judge(&other, &want), Verdict::Rounding(told.to_owned()));
        // The same similarities do not decide so, and neither do those of token 2.
        let astray = "not as similarity decides";
        assert!(is_wrong(&judge(&seen(below, [0, 0, 2]), &want), astray));
        assert!(is_wrong(&judge(&seen(above, [0, 0, 0]), &want), astray));
        assert!(is_wrong(&judge(&seen([0.85, 0.1, 0.9], [0, 0, 2]), &want), "5.0e-2 apart"));
        let same = SeenClusters { thresholds: [((1, 0), 0.79)].into(), ..seen(below, [0, 0, 2]) };
        assert!(is_wrong(&judge(&same, &want), "1.0e-2 apart"), "another threshold is no rounding");
    }

    /// A threshold that nothing reaches, and no condensation at all: no route shares a row.
    #[test]
    fn clusters_of_one_are_none() {
        let (none, alone) = (SeenClusters::default(), seen([0.9; 3], [0, 1, 2]));
        assert_eq!([judge(&none, &alone), judge(&alone, &none)], [Verdict::Same, Verdict::Same]);
        assert!(is_wrong(&judge(&seen([0.9; 3], [0, 0, 0]), &none), "inf apart"));
        let followed = SeenClusters { representatives: [((1, 0, 0), vec![0, 0, 2])].into(), ..none };
        assert!(is_wrong(&judge(&followed, &alone), "inf apart"), "nothing was compared that explains it");
        let twice = SeenClusters { contradicted: vec![(1, 0, 0)], ..alone.clone() };
        assert!(is_wrong(&judge(&twice, &alone), "twice"));
    }
}
