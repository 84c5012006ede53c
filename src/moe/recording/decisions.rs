//! What routings were decided from, kept in memory by whoever compares runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::moe::Routing;
use crate::moe::gates::Tokens;

/// Some tokens' scores in one layer of one step, and where they went.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// `[T, E]`: what was chosen by.
    pub logits: Vec<f32>,
    /// The tokens' numbers in the vocabulary.
    pub ids: Vec<u32>,
    /// `[E]`: what balances the experts, where something does.
    pub bias: Vec<f32>,
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
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub decisions: BTreeMap<DecisionPlace, Decision>,
    /// Places where the same tokens were decided on again, by another rank or a second forward, and otherwise.
    pub contradicted: Vec<DecisionPlace>,
}

impl Decisions {
    pub(super) fn note(&self, tokens: &Tokens, routing: &Routing) {
        let decision = Decision {
            logits: tokens.logits.to_vec(),
            ids: tokens.ids.to_vec(),
            bias: tokens.bias.to_vec(),
            routing: routing.clone(),
        };
        let place = (tokens.draws.step, tokens.draws.layer, tokens.first);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // A rank without rows stands where another begins.
        if tokens.is_empty() {
            return;
        }
        let first = seen.decisions.entry(place).or_insert_with(|| decision.clone());
        if first.routing != decision.routing {
            seen.contradicted.push(place);
        }
    }

    /// What has been noted so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
