//! Micro-batches for every gate, drawn by counter: sizes that divide nothing, ties, one expert for all, no tokens, one
//! expert, capacities that bite, and scores that are no numbers.

use guildhall::moe::gates::GateDraws;
use guildhall::moe::gates::{SigmoidKeys, TopologyKeys};
use guildhall::moe::{self, BalanceScope, Dialect, GateChoice, GateKind};
use guildhall_tensor::{Draws, Purpose};

use super::choices::Batch;
use crate::gates::of_workers;
use crate::gates::{GATES, OVERFLOWS};

pub(super) const DIALECTS: [Option<Dialect>; 5] =
    [None, Some(Dialect::Hf), Some(Dialect::Megatron), Some(Dialect::Deepseek), Some(Dialect::Fastmoe)];

const SCOPES: [BalanceScope; 3] = [BalanceScope::Sequence, BalanceScope::MicroBatch, BalanceScope::GlobalBatch];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scores {
    Random,
    /// Tokens are copies of a few, with scores in whole halves: ties between experts and between tokens.
    Tied,
    /// Everybody likes expert 0 best.
    OneExpert,
    /// Ties, and among them NaN, minus infinity and both zeros.
    Special,
}

/// Numbers as from dice, one after the other.
pub(super) struct Dice {
    draws: Draws,
    thrown: u64,
}

impl Dice {
    pub(super) fn new(step: u64, layer: u32) -> Dice {
        Dice { draws: Draws::new(41, Purpose::Test, step, layer), thrown: 0 }
    }

    pub(super) fn of<T: Copy>(&mut self, values: &[T]) -> T {
        self.thrown += 1;
        values[self.draws.bits(self.thrown) as usize % values.len()]
    }

    /// One is seldom what it falls on.
    pub(super) fn divisor(&mut self, of: usize) -> usize {
        let real: Vec<usize> = (2..=of).filter(|n| of.is_multiple_of(*n)).collect();
        if real.is_empty() || self.of(&[true, false, false, false]) { 1 } else { self.of(&real) }
    }

    pub(super) fn normal(&mut self) -> f32 {
        self.thrown += 1;
        self.draws.normal(self.thrown)
    }

    /// A normal number, rounded to a whole number of parts.
    pub(super) fn rounded(&mut self, parts: f32) -> f32 {
        (self.normal() * parts).round() / parts
    }
}

/// Any configuration that a recipe could have for this gate.
pub(super) fn config(gate: GateKind, dice: &mut Dice) -> moe::Config {
    let least = gate.only_top_k().unwrap_or(1);
    let sizes: Vec<usize> = [1, 2, 4, 6, 8].into_iter().filter(|&experts| experts >= least).collect();
    let experts = dice.of(&sizes);
    let top_k = gate.only_top_k().unwrap_or_else(|| dice.of(&[1, 2, 3]).min(experts));
    let groups = dice.divisor(experts);
    let fewest = top_k.div_ceil(experts / groups);
    let dialect = dice.of(&DIALECTS);
    let fits = |n: &usize| gate != GateKind::Sigmoid || dialect != Some(Dialect::Megatron) || top_k.is_multiple_of(*n);
    let open: Vec<usize> = (fewest..=groups).filter(fits).collect();
    let (groups, top_groups) = if open.is_empty() { (1, 1) } else { (groups, dice.of(&open)) };
    let keys = SigmoidKeys { groups, top_groups, ..SigmoidKeys::default() };
    let mut config = moe::Config {
        dialect,
        // Of 25 tokens the third is a whole number of places and a rounding error.
        capacity_factor: dice.of(&[None, Some(0.1), Some(0.56), Some(1.0), Some(1.12)]),
        overflow: dice.of(&OVERFLOWS),
        group_tokens: dice.of(&[None, Some(1), Some(5), Some(10), Some(12)]),
        ..moe::Config::of(experts, top_k)
    };
    config.eval_capacity_factor = config.capacity_factor.map(|factor| 2.0 * factor);
    let workers = dice.divisor(experts);
    config.logical_nodes = dice.divisor(experts);
    let keys = SigmoidKeys { route_scale: dice.of(&[1.0, 2.5]), normalised: dice.of(&[true, false]), ..keys };
    let outside = dice.of(&[0.0, 0.14, 0.3, 1.0]);
    config.balance_scope = Some(dice.of(&SCOPES));
    config.gate = match gate {
        GateKind::Sigmoid => GateChoice::Sigmoid(keys),
        GateKind::Topology => GateChoice::Topology(TopologyKeys { outside }),
        gate => of_workers(gate, workers),
    };
    config
}

/// The keys of the sigmoid gate.
pub(super) fn sigmoid_keys(config: &moe::Config) -> &SigmoidKeys {
    let GateChoice::Sigmoid(keys) = &config.gate else { panic!("{:?}", config.gate) };
    keys
}

/// The workers that the gate knows.
pub(super) fn workers(config: &moe::Config) -> usize {
    match &config.gate {
        GateChoice::Swipe(keys) => keys.workers,
        GateChoice::DistributedCapacity(keys) => keys.workers,
        other => panic!("{other:?} knows no workers"),
    }
}

/// One case for selection.
fn batch(index: usize, gate: GateKind, scores: Scores, trains: bool) -> Batch {
    let dice = &mut Dice::new(1, index as u32);
    let config = config(gate, dice);
    let tokens = dice.of(&[0, 1, 12, 25, 25, 31, 31]);
    let palette: Vec<Vec<f32>> =
        (0..3).map(|_| (0..config.experts.largest()).map(|_| dice.rounded(2.0)).collect()).collect();
    let logits = (0..tokens).map(|_| logits(scores, &palette, dice)).collect();
    let bias = match gate {
        GateKind::Sigmoid => (0..config.experts.largest()).map(|_| dice.rounded(4.0) / 4.0).collect(),
        _ => vec![0.0; config.experts.largest()],
    };
    let draws = GateDraws { seed: 7, step: index as u64, layer: dice.of(&[0, 3]), trains };
    Batch {
        logits,
        ids: (0..tokens).map(|_| dice.of(&[0, 1, 17, 50_256, 4_000_000_000])).collect(),
        bias,
        first: dice.of(&[0, 1000, 1 << 40]),
        draws,
        config,
    }
}

fn logits(scores: Scores, palette: &[Vec<f32>], dice: &mut Dice) -> Vec<f32> {
    let experts = palette[0].len();
    match scores {
        Scores::Random => (0..experts).map(|_| 1.5 * dice.normal()).collect(),
        Scores::OneExpert => (0..experts).map(|e| dice.normal() + if e == 0 { 6.0 } else { 0.0 }).collect(),
        Scores::Tied => palette[dice.of(&[0, 1, 2])].clone(),
        Scores::Special => {
            let values = [f32::NAN, f32::NEG_INFINITY, 0.0, -0.0, 1.0];
            palette[0].iter().map(|&x| if dice.of(&[true, false, false]) { dice.of(&values) } else { x }).collect()
        }
    }
}

/// Seeds that each gate has for cases of its own.
pub(super) const CASES_OF_GATE: usize = 64;

/// Every gate with all kinds of scores, in training and in evaluation.
pub(super) fn batches() -> Vec<Batch> {
    let mut all = Vec::new();
    for (place, &gate) in GATES.iter().enumerate() {
        for round in 0..8 {
            for scores in [Scores::Random, Scores::Tied, Scores::OneExpert, Scores::Special] {
                // Two of three in training, where there is more to go wrong. A further gate moves no case of these.
                let index = CASES_OF_GATE * place + 4 * round + scores as usize;
                all.push(batch(index, gate, scores, round % 3 != 2));
            }
        }
    }
    all
}
