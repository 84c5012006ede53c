//! A gate with something wrong.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::moe::Weighting;
use crate::moe::gates::{BalanceKind, Gate, Perturbation, Scope, Tokens};

/// A gate that decides otherwise about tokens it has been asked about before: each goes where the one from the other end
/// should, so that loads stay what they were and nothing but the result tells.
#[derive(Debug)]
pub(super) struct Forgetful {
    gate: Arc<dyn Gate>,
    /// Steps and first tokens.
    asked: Mutex<HashSet<(u64, u64)>>,
}

impl Forgetful {
    pub(super) fn new(gate: Arc<dyn Gate>) -> Forgetful {
        Forgetful { gate, asked: Mutex::default() }
    }
}

impl Gate for Forgetful {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let chosen = self.gate.choose(tokens);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if !tokens.draws.trains || asked.insert((tokens.draws.step, tokens.first)) {
            return chosen;
        }
        chosen.chunks(self.slots()).rev().flatten().copied().collect()
    }

    fn slots(&self) -> usize {
        self.gate.slots()
    }

    fn weighting(&self) -> Weighting {
        self.gate.weighting()
    }

    fn scope(&self) -> Scope {
        self.gate.scope()
    }

    fn skips_padding(&self) -> bool {
        self.gate.skips_padding()
    }

    fn thin(&self, kept: &mut [u32], tokens: &Tokens) {
        self.gate.thin(kept, tokens);
    }

    fn perturbation(&self) -> Perturbation {
        self.gate.perturbation()
    }

    fn balance(&self) -> BalanceKind {
        self.gate.balance()
    }

    fn asked(&self, tokens: usize, made: usize) -> usize {
        self.gate.asked(tokens, made)
    }

    fn arrange(&self, chosen: &mut [u32], group: &Tokens) {
        self.gate.arrange(chosen, group);
    }

    fn bias_rate(&self) -> Option<f32> {
        self.gate.bias_rate()
    }

    fn capacity(&self, factor: f64, tokens: usize, experts: usize) -> usize {
        self.gate.capacity(factor, tokens, experts)
    }
}
