//! Weights of chosen experts, and the losses that keep experts busy, in f64 and token by token.

use std::collections::BTreeMap;

use guildhall::moe::{BalanceScope, Config, Dialect, GateKind};

use super::capacity::Routes;
use super::cases::sigmoid_keys;
use super::choices::{best, sigmoid, softmax};

/// By token, then expert.
pub(super) type Matrix = Vec<Vec<f64>>;

/// What the router makes of a micro-batch.
pub(super) struct Scores {
    /// Before noise; as chosen by but for noisy gates.
    pub(super) clean: Matrix,
    /// What is chosen by.
    pub(super) logits: Matrix,
    /// Of the noise, where there is some.
    pub(super) sigma: Option<Matrix>,
}

/// Which tokens count, and for how much.
pub(super) struct Counting {
    /// Any number that tells sequences apart.
    pub(super) sequence: Vec<u32>,
    pub(super) valid: Vec<bool>,
    /// Valid tokens of the whole step.
    pub(super) all: f64,
    /// Routes by expert of the step before.
    pub(super) before: Option<Vec<f64>>,
}

/// The weights of one token's slots, 0 for one without an expert.
pub(super) fn weights(config: &Config, logits: &[f64], chosen: &[Option<usize>]) -> Vec<f64> {
    let over_all = softmax(logits);
    let sum = |of: &dyn Fn(usize) -> f64| chosen.iter().flatten().map(|&e| of(e)).sum::<f64>();
    let weight = |e: usize| match (config.gate.kind(), dialect(config)) {
        (GateKind::Hash, _) => 1.0 / config.top_k as f64,
        (GateKind::Sinkhorn, _) if config.top_k == 1 => sigmoid(logits[e]),
        (GateKind::Sigmoid, _) => {
            let keys = sigmoid_keys(config);
            let divisor = if keys.normalised { sum(&|e| sigmoid(logits[e])) + 1e-20 } else { 1.0 };
            sigmoid(logits[e]) / divisor * f64::from(keys.route_scale)
        }
        (GateKind::Sinkhorn | GateKind::ExpertChoice, _) | (_, Dialect::Deepseek) => over_all[e],
        (_, Dialect::Hf) => over_all[e] / sum(&|e| over_all[e]),
        (_, Dialect::Megatron | Dialect::Fastmoe) => 1.0 / sum(&|other| (logits[other] - logits[e]).exp()),
    };
    chosen.iter().map(|choice| choice.map_or(0.0, weight)).collect()
}

fn dialect(config: &Config) -> Dialect {
    config.dialect.unwrap_or(match config.gate.kind() {
        GateKind::Switch | GateKind::Balanced => Dialect::Deepseek,
        GateKind::Softmax => Dialect::Hf,
        _ => Dialect::Fastmoe,
    })
}

/// The mean square of the clean logits' log-sum-exp.
pub(super) fn z(scores: &Scores, counting: &Counting) -> f64 {
    let counted = scores.clean.iter().zip(&counting.valid).filter(|(_, valid)| **valid);
    counted.map(|(logits, _)| logits.iter().map(|l| l.exp()).sum::<f64>().ln().powi(2)).sum::<f64>() / counting.all
}

pub(super) fn balance(config: &Config, scores: &Scores, routes: &Routes, counting: &Counting) -> f64 {
    let mut sequences = BTreeMap::<u32, Vec<usize>>::new();
    for t in (0..counting.valid.len()).filter(|&t| counting.valid[t]) {
        sequences.entry(counting.sequence[t]).or_default().push(t);
    }
    let by_sequence: Vec<Vec<usize>> = sequences.into_values().collect();
    if speaks(config, Dialect::Hf) && config.gate != GateKind::Noisy {
        return of_one_layer(config, scores, routes, counting);
    }
    let (scopes, shares) = match (config.balance_scope.expect("drawn"), &counting.before) {
        (BalanceScope::MicroBatch, _) => (vec![by_sequence.concat()], None),
        (BalanceScope::GlobalBatch, Some(routes)) => (vec![by_sequence.concat()], Some(shares(routes))),
        (BalanceScope::Sequence | BalanceScope::GlobalBatch, _) => (by_sequence, None),
    };
    let within = |tokens: &Vec<usize>| match config.gate.kind() {
        GateKind::Noisy => importance_and_load(config, scores, routes, tokens),
        _ => product(config, scores, routes, tokens, shares.as_deref()),
    };
    let weighted = |tokens: &Vec<usize>| tokens.len() as f64 / counting.all * within(tokens);
    scopes.iter().filter(|tokens| !tokens.is_empty()).map(weighted).sum()
}

/// Whether a gate that has no weights of its own speaks a dialect.
fn speaks(config: &Config, dialect: Dialect) -> bool {
    let own = [GateKind::Hash, GateKind::Sinkhorn, GateKind::ExpertChoice, GateKind::Sigmoid];
    let megatron = config.gate == GateKind::Sigmoid && [Dialect::Megatron, Dialect::Deepseek].contains(&dialect);
    config.dialect == Some(dialect) && (megatron || !own.contains(&config.gate.kind()))
}

/// In the dialect of transformers, where there is no other layer: routes are counted by token, so an even load gives top_k.
fn of_one_layer(config: &Config, scores: &Scores, routes: &Routes, counting: &Counting) -> f64 {
    let mut counts = vec![0.0; config.experts.largest()];
    routes.wanted.iter().flatten().flatten().for_each(|&e| counts[e] += 1.0);
    let counted = (0..counting.valid.len()).filter(|&t| counting.valid[t]);
    let likes: Vec<Vec<f64>> = counted.map(|t| softmax(&scores.logits[t])).collect();
    let mean = |e: usize| likes.iter().map(|likes| likes[e]).sum::<f64>() / counting.all;
    let even = (config.experts.largest() * config.top_k) as f64;
    even * shares(&counts).iter().enumerate().map(|(e, share)| share * mean(e)).sum::<f64>()
}

/// Of a sum, if there is any.
fn shares(parts: &[f64]) -> Vec<f64> {
    let sum: f64 = parts.iter().sum();
    parts.iter().map(|part| if sum == 0.0 { 0.0 } else { part / sum }).collect()
}

fn product(config: &Config, scores: &Scores, routes: &Routes, tokens: &[usize], given: Option<&[f64]>) -> f64 {
    let experts = config.experts.largest();
    let first = [GateKind::Gshard, GateKind::DistributedCapacity, GateKind::Topology, GateKind::Switch];
    let all = speaks(config, Dialect::Megatron) || speaks(config, Dialect::Deepseek);
    let one = speaks(config, Dialect::Fastmoe) || (first.contains(&config.gate.kind()) && !all);
    let slots = if one { 1 } else { usize::MAX };
    let mut counts = vec![0.0; experts];
    for &t in tokens {
        routes.wanted[t].iter().take(slots).flatten().for_each(|&e| counts[e] += 1.0);
    }
    let chosen = given.map_or_else(|| shares(&counts), <[f64]>::to_vec);
    let likes = |t: usize| match config.gate.kind() {
        GateKind::Sigmoid => shares(&scores.logits[t].iter().map(|&l| sigmoid(l)).collect::<Vec<_>>()),
        _ => softmax(&scores.logits[t]),
    };
    let mean = |e: usize| tokens.iter().map(|&t| likes(t)[e]).sum::<f64>() / tokens.len() as f64;
    experts as f64 * (0..experts).map(|e| chosen[e] * mean(e)).sum::<f64>()
}

fn importance_and_load(config: &Config, scores: &Scores, routes: &Routes, tokens: &[usize]) -> f64 {
    let (mut importance, mut load) = (vec![0.0; config.experts.largest()], vec![0.0; config.experts.largest()]);
    for &t in tokens {
        let chosen = &routes.chosen[t];
        let wanted = &routes.wanted[t];
        for (e, weight) in chosen.iter().zip(weights(config, &scores.logits[t], chosen)) {
            importance[e.expect("top k")] += weight;
        }
        let chances = chances(config, scores, wanted, t);
        load.iter_mut().zip(chances).for_each(|(load, chance)| *load += chance);
    }
    variation(&importance) + variation(&load)
}

/// How probably each expert were among the k best if its own noise were drawn again.
fn chances(config: &Config, scores: &Scores, wanted: &[Option<usize>], t: usize) -> Vec<f64> {
    let (experts, k, logits) = (config.experts.largest(), config.top_k, &scores.logits[t]);
    let Some(sigma) = scores.sigma.as_ref().filter(|_| k < experts) else {
        return (0..experts).map(|e| f64::from(u8::from(wanted.contains(&Some(e))))).collect();
    };
    let order = best(logits, experts);
    let (outer, inner) = (logits[order[k - 1]], logits[order[k]]);
    let threshold = |e: usize| if logits[e] > inner { inner } else { outer };
    (0..experts).map(|e| below((scores.clean[t][e] - threshold(e)) / sigma[t][e])).collect()
}

/// The normal distribution's mass below x, by its power series: the mass between 0 and x is the density times
/// x + x^3/3 + x^5/(3 5) + ...
fn below(x: f64) -> f64 {
    if x.abs() > 8.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut sum, mut term) = (x, x);
    for n in 1..200 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

/// The squared coefficient of variation.
fn variation(values: &[f64]) -> f64 {
    if values.len() == 1 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let spread = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64;
    spread / (mean * mean + 1e-10)
}
