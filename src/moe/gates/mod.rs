//! Gates: from scores to choices, integers only. `docs/gates.md` defines each of them exactly.
//!
//! A gate is a pure function of the tokens it is shown. Most decide for each token by itself and see this rank's; a gate
//! whose tokens compete ([`Scope`]) learns of the others of a routing group, the same on every rank. Gradients do not
//! pass here: the weights of what was chosen are read again from the scores on the tape ([`Weighting`]).

mod balanced;
mod choice;
mod choose;
mod distributed_capacity;
mod expert_choice;
mod gshard;
mod hash;
mod naive;
mod noisy;
mod sigmoid;
mod sinkhorn;
mod softmax;
mod swipe;
mod switch;
mod topology;

use std::ops::Range;

use guildhall_tensor::{Draws, Purpose, RowIds};

pub use choice::*;
pub use choose::top_k;

use super::Dialect;
use super::weighting::Weighting;

/// Consecutive tokens and their scores.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// `[T, E]`: what is chosen by; empty where the largest are known.
    pub logits: &'a [f32],
    /// What is known in place of the logits of a gate that asks for nothing else ([`Gate::goes_by_largest`]).
    pub largest: Option<Largest<'a>>,
    pub experts: usize,
    /// The first token's index within the step, over all ranks and micro-batches: what draws are keyed by.
    pub first: u64,
    /// The tokens' numbers in the vocabulary; empty for a routing group.
    pub ids: &'a [u32],
    /// `[E]`: added to the scores where a gate balances by a bias.
    pub bias: &'a [f32],
    /// The numbers of those that are padding, ascending: they go nowhere. Others of the step may be among them.
    pub padding: &'a [Range<u64>],
    pub draws: GateDraws,
}

/// The experts of the k largest logits of each token, as [`top_k`] orders them.
#[derive(Clone, Copy, Debug)]
pub struct Largest<'a> {
    /// `[T, k]`.
    pub experts: &'a [u32],
    pub k: usize,
}

impl<'a> Tokens<'a> {
    /// The same tokens as runs of consecutive ones, where these are their numbers within the step. At least one run, which
    /// may be empty.
    pub fn runs(&self, numbers: &RowIds) -> Vec<Tokens<'a>> {
        let (mut rest, mut start) = (numbers.runs().to_vec(), 0);
        if rest.is_empty() {
            rest.push(0..0);
        }
        let of_run = |run: Range<u64>| {
            let here = start..start + (run.end - run.start) as usize;
            start = here.end;
            let ids = if self.ids.is_empty() { self.ids } else { &self.ids[here.clone()] };
            Tokens { first: run.start, ids, ..self.part(here) }
        };
        rest.into_iter().map(of_run).collect()
    }

    /// The numbers of the tokens within the step.
    pub(super) fn numbers(&self) -> Range<u64> {
        self.first..self.first + self.len() as u64
    }

    /// Whether token t is not padding.
    pub fn is_present(&self, t: usize) -> bool {
        let number = self.first + t as u64;
        self.present(number..number + 1) == 1
    }

    /// How many of these numbers are not of padding.
    pub(super) fn present(&self, numbers: Range<u64>) -> usize {
        present(self.padding, numbers)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.largest.map_or(self.logits.len() / self.experts, |largest| largest.experts.len() / largest.k)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The scores of token t.
    pub fn row(&self, t: usize) -> &[f32] {
        &self.logits[t * self.experts..][..self.experts]
    }

    /// Some of them as a routing group, or a part of one.
    pub(super) fn part(&self, tokens: Range<usize>) -> Self {
        let largest = self.largest.map(|Largest { experts, k }| {
            let experts = &experts[tokens.start * k..tokens.end * k];
            Largest { experts, k }
        });
        let logits = match largest {
            Some(_) => self.logits,
            None => &self.logits[tokens.start * self.experts..tokens.end * self.experts],
        };
        Tokens { logits, largest, first: self.first + tokens.start as u64, ids: &[], ..*self }
    }
}

/// How many of these numbers are in none of the ranges, which ascend.
pub(super) fn present(padding: &[Range<u64>], numbers: Range<u64>) -> usize {
    let first = padding.partition_point(|padding| padding.end <= numbers.start);
    let here = padding[first..].iter().take_while(|padding| padding.start < numbers.end);
    let absent: u64 = here.map(|padding| padding.end.min(numbers.end) - padding.start.max(numbers.start)).sum();
    (numbers.end - numbers.start - absent) as usize
}

/// The draws of one gate in one step.
#[derive(Clone, Copy, Debug)]
pub struct GateDraws {
    pub seed: u64,
    pub step: u64,
    pub layer: u32,
    /// Outside training gates take their deterministic form.
    pub trains: bool,
}

/// What a draw is for; one stream each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// Index: token.
    SecondChoice,
    /// Index: token * E + expert.
    RandomSelection,
    /// Index: token * D + feature.
    Jitter,
    /// Index: token * E + expert.
    Noise,
}

impl Draw {
    /// Streams of a layer.
    const PER_LAYER: u32 = 4;
}

impl GateDraws {
    pub fn of(&self, draw: Draw) -> Draws {
        assert!((draw as u32) < Draw::PER_LAYER, "{draw:?} would draw as another layer does");
        Draws::new(self.seed, Purpose::Gate, self.step, self.layer * Draw::PER_LAYER + draw as u32)
    }

    /// For which routes' results are skipped. Index: token * K + choice.
    pub fn output_mask(&self) -> Draws {
        Draws::new(self.seed, Purpose::OutputMask, self.step, self.layer)
    }
}

/// What a gate must know of the other tokens of a routing group to decide about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Nothing.
    Token,
    /// What they would choose by themselves: [`Gate::arrange`] makes the group's choices of them.
    Choices,
    /// Their scores: [`Gate::choose`] is shown the whole group.
    Scores,
}

/// What the router does to its scores in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Perturbation {
    None,
    /// The router's input is multiplied by uniform numbers in `1 - eps .. 1 + eps`.
    Jitter(f32),
    /// Normal noise of learned size is added to the logits.
    Noise,
}

/// Which auxiliary loss keeps a gate's experts busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalanceKind {
    /// `E sum_e f_e P_e` with f over all choices.
    AllChoices,
    /// The same with f over first choices.
    FirstChoices,
    /// `E sum_e F_e P_e` of the tokens of all MoE layers together, F in routes a token: top_k when even (transformers).
    AllLayers,
    /// Squared variations of importance and load.
    ImportanceAndLoad,
}

/// What a gate is in a causal model, whose tokens must know nothing of later ones. It says so of itself, without a
/// capacity: what that does is the same for every gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Causality {
    /// No choice depends on later tokens.
    Kept,
    /// Some do, by a limit that is shared: how, is announced.
    Bent(&'static str),
    /// All do, and why: refused.
    Broken(&'static str),
}

/// Decides which experts tokens go to.
pub trait Gate: std::fmt::Debug + Send + Sync {
    /// The experts of every token, best first: `[T, slots]`, all different within a token, [`super::Routing::DROPPED`] for a
    /// choice that is not made.
    fn choose(&self, tokens: &Tokens) -> Vec<u32>;

    /// Choices per token.
    fn slots(&self) -> usize;

    /// Whether a token's choices are the experts of its largest logits, whatever else is known: then an accelerator finds
    /// them, and only they come to the host.
    fn goes_by_largest(&self) -> bool {
        false
    }

    /// How the chosen experts' results are weighted.
    fn weighting(&self) -> Weighting;

    /// Routes that `tokens` tokens ask for, of which it `made` so many choices: what is not sent of them was dropped.
    fn asked(&self, tokens: usize, _made: usize) -> usize {
        tokens * self.slots()
    }

    fn scope(&self) -> Scope {
        Scope::Token
    }

    /// Whether tokens that are padding have no part in what it decides about others. Those of [`Scope::Token`] need not
    /// look: what they say of padding is not heard.
    fn skips_padding(&self) -> bool {
        self.scope() == Scope::Token
    }

    /// Changes the choices of all tokens of a routing group, the same on every rank that has some of them; of `group`,
    /// there are no scores. For [`Scope::Choices`] alone.
    fn arrange(&self, _chosen: &mut [u32], _group: &Tokens) {}

    /// Gives up some of what `choose` said: they become [`super::Routing::DROPPED`], the others keep their weights. Not for
    /// [`Scope::Choices`].
    fn thin(&self, _kept: &mut [u32], _tokens: &Tokens) {}

    fn perturbation(&self) -> Perturbation {
        Perturbation::None
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::AllChoices
    }

    /// How far the bias that balances the experts moves in one step, where the gate has one ([`super::GateState`]).
    fn bias_rate(&self) -> Option<f32> {
        None
    }

    /// Whether the gate asks the dialect for anything.
    fn heeds(&self, _dialect: Dialect) -> bool {
        true
    }

    /// Routes that a token has on average where experts choose among tokens; absent where tokens choose.
    fn chosen_per_token(&self) -> Option<f64> {
        None
    }

    /// Whether loads are even by construction.
    fn is_even(&self) -> bool {
        false
    }

    fn causality(&self) -> Causality {
        Causality::Kept
    }

    /// Routes an expert takes of a group of `tokens` at most, with capacity factor `factor`.
    fn capacity(&self, factor: f64, tokens: usize, experts: usize) -> usize {
        super::capacity::share(factor, tokens * self.slots(), experts)
    }
}
