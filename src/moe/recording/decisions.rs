//! What routings were decided from, kept in memory by whoever compares runs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::Site;
use super::clusters::{RouteNumbers, representative};
use crate::moe::condensation::{ComparedRoutes, Similarities};
use crate::moe::gates::Tokens;
use crate::moe::{Condensed, Routing};
use crate::parallel::Rows;

/// Some tokens' scores in one layer of one step, and where they went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// `[T, E]`: what was chosen by.
    pub logits: Vec<f32>,
    /// The tokens' numbers in the vocabulary.
    pub ids: Vec<u32>,
    /// `[E]`: what balances the experts, where something does.
    pub bias: Vec<f32>,
    /// The numbers of the tokens that are padding; others of the step may be among them.
    pub padding: Vec<Range<u64>>,
    pub routing: Routing,
}

/// Step, layer, and the index within the step of the first token.
pub type DecisionPlace = (u64, u32, u64);

/// All decisions of a run. Clones are handles on the same ones, which ranks share.
#[derive(Clone, Debug, Default)]
pub struct Decisions {
    seen: Arc<Mutex<Seen>>,
}

/// What has been noted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    pub decisions: BTreeMap<DecisionPlace, Decision>,
    /// Places where the same tokens were decided on again, by another rank or a second forward, and otherwise.
    pub contradicted: Vec<DecisionPlace>,
    pub clusters: SeenClusters,
}

/// Which routes shared rows, and what was decided from. Routes have their numbers in the step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SeenClusters {
    /// By the first route of a sequence: for each of its routes, the route whose row it shares, or itself.
    pub representatives: BTreeMap<DecisionPlace, Vec<u64>>,
    /// By its first route: a set of routes that were compared. None where clusters were not decided but followed.
    pub compared: BTreeMap<DecisionPlace, ComparedRoutes>,
    /// By step and layer: the similarity from which rows were shared.
    pub thresholds: BTreeMap<(u64, u32), f64>,
    /// Places where another rank decided otherwise about the same sequence.
    pub contradicted: Vec<DecisionPlace>,
}

impl Seen {
    /// Adds what another process has noted.
    pub fn absorb(&mut self, other: Seen) {
        other.decisions.into_iter().for_each(|(place, decision)| self.put(place, decision));
        self.contradicted.extend(other.contradicted);
        let SeenClusters { representatives, compared, thresholds, contradicted } = other.clusters;
        representatives.into_iter().for_each(|(place, shared)| self.clusters.put(place, shared));
        self.clusters.compared.extend(compared);
        self.clusters.thresholds.extend(thresholds);
        self.clusters.contradicted.extend(contradicted);
    }

    fn put(&mut self, place: DecisionPlace, decision: Decision) {
        let first = self.decisions.entry(place).or_insert_with(|| decision.clone());
        if first.routing != decision.routing {
            self.contradicted.push(place);
        }
    }
}

impl SeenClusters {
    fn put(&mut self, place: DecisionPlace, representatives: Vec<u64>) {
        if *self.representatives.entry(place).or_insert_with(|| representatives.clone()) != representatives {
            self.contradicted.push(place);
        }
    }
}

impl Decisions {
    pub(super) fn note(&self, tokens: &Tokens, routing: &Routing) {
        let decision = Decision {
            logits: tokens.logits.to_vec(),
            ids: tokens.ids.to_vec(),
            bias: tokens.bias.to_vec(),
            padding: tokens.padding.to_vec(),
            routing: routing.clone(),
        };
        let place = (tokens.draws.step, tokens.draws.layer, tokens.first);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // A rank without rows stands where another begins.
        if tokens.is_empty() {
            return;
        }
        seen.put(place, decision);
    }

    /// Notes which routes of some tokens share rows.
    pub(super) fn note_clusters(
        &self,
        site: &Site,
        (tokens, routing): (&Rows, &Routing),
        condensed: &Condensed,
        similarities: Option<&Similarities>,
    ) {
        let numbers = RouteNumbers { tokens, slots: routing.k };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = &mut seen.clusters;
        let routes = (tokens.seq * routing.k) as u32;
        for row in 0..tokens.sequences.len() as u32 {
            let of = |route| numbers.number(representative(condensed.clusters.as_ref(), route));
            let representatives: Vec<u64> = (row * routes..(row + 1) * routes).map(of).collect();
            let place = (site.step, site.layer, numbers.number(row * routes));
            seen.put(place, representatives);
        }
        let Some(similarities) = similarities else { return };
        seen.thresholds.insert((site.step, site.layer), condensed.threshold);
        for set in &similarities.compared {
            let set = set.renumbered(|route| numbers.number(route) as u32);
            seen.compared.insert((site.step, site.layer, u64::from(set.routes[0])), set);
        }
    }

    /// What has been noted so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
