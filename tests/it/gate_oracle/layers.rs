//! Layers for every gate. Features and router weights are whole sixteenths, so small that scores are exact in f32: what
//! the gate decides by is the same to the bit on both sides, except where it is drawn.

use std::collections::BTreeMap;

use guildhall::moe::gates::GateDraws;
use guildhall::moe::{Activation, BalanceScope, GateChoice, GateKind};

use super::cases::{CASES_OF_GATE, Dice, Scores, config};
use super::choices::{Batch, wide};
use super::layer::Layer;
use super::losses::Counting;
use crate::gates::GATES;
use crate::reference::Numbers;
use crate::tiny::Tensors;

pub(super) const D: usize = 5;
pub(super) const F: usize = 3;
/// Tokens of a row.
pub(super) const SEQ: usize = 6;
/// Step of the sigmoid gate's bias.
const RATE: f32 = 0.125;

pub(super) struct LayerCase {
    pub(super) layer: Layer,
    pub(super) values: Tensors,
    pub(super) segments: Vec<u32>,
    /// Loads of the step before, if there was one.
    pub(super) history: Option<Vec<u64>>,
    /// What the output's gradient is.
    pub(super) direction: Vec<f32>,
}

impl LayerCase {
    fn new(index: usize, gate: GateKind, scores: Scores, trains: bool) -> LayerCase {
        let dice = &mut Dice::new(2, index as u32);
        let mut config = config(gate, dice);
        if let GateChoice::Sigmoid(keys) = &mut config.gate {
            keys.bias_rate = RATE;
        }
        if gate == GateKind::Noisy && config.balance_scope == Some(BalanceScope::GlobalBatch) {
            config.balance_scope = Some(BalanceScope::MicroBatch);
        }
        let experts = config.experts.largest();
        let tokens = dice.of(&[0, 1, 2, 3, 4]) * SEQ;
        let history = dice.of(&[true, true, false]).then(|| (0..experts).map(|_| dice.of(&[0, 1, 5, 6])).collect());
        let segments: Vec<u32> =
            (0..tokens).map(|t| if (t / SEQ).is_multiple_of(2) { 0 } else { (t % SEQ / 2) as u32 }).collect();
        let counting = Counting {
            sequence: segments.iter().enumerate().map(|(t, segment)| (t / SEQ * SEQ) as u32 + segment).collect(),
            valid: (0..tokens).map(|_| dice.of(&[true, true, false])).collect(),
            // Other micro-batches have some, too.
            all: 3.0,
            before: history.as_ref().map(|loads: &Vec<u64>| loads.iter().map(|&n| n as f64).collect()),
        };
        let all = counting.all + counting.valid.iter().filter(|valid| **valid).count() as f64;
        let activation = dice.of(&[Activation::SwiGlu, Activation::Gelu]);
        let unscored = Batch {
            logits: Vec::new(),
            ids: (0..tokens).map(|_| dice.of(&[0, 1, 17, 50_256])).collect(),
            bias: bias(gate, experts, history.as_deref()),
            first: dice.of(&[0, 600]),
            draws: GateDraws { seed: 7, step: index as u64, layer: dice.of(&[0, 3]), trains },
            config,
        };
        let layer = Layer { unscored, counting: Counting { all, ..counting }, activation, d_model: D };
        let values = values(&layer, tokens, scores, dice);
        let direction = (0..tokens * D).map(|_| dice.normal()).collect();
        LayerCase { layer, values, segments, history, direction }
    }

    pub(super) fn tokens(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn numbers(&self) -> Numbers {
        self.values.iter().map(|(name, values)| (name.clone(), wide(values))).collect()
    }
}

/// A first step with these loads moves the bias towards the experts that had less than the mean.
fn bias(gate: GateKind, experts: usize, loads: Option<&[u64]>) -> Vec<f32> {
    let loads = loads.filter(|_| gate == GateKind::Sigmoid).unwrap_or_default();
    let mean = loads.iter().sum::<u64>() as f64 / experts as f64;
    let toward = |&n: &u64| if n as f64 == mean { 0.0 } else { (mean - n as f64).signum() as f32 };
    let moved: Vec<f32> = loads.iter().map(|n| RATE * toward(n)).collect();
    if moved.is_empty() { vec![0.0; experts] } else { moved }
}

fn values(layer: &Layer, tokens: usize, scores: Scores, dice: &mut Dice) -> Tensors {
    let experts = layer.unscored.config.experts.largest();
    let parts = if scores == Scores::Tied { 2.0 } else { 16.0 };
    let mut x: Vec<f32> = (0..tokens * D).map(|_| dice.rounded(parts)).collect();
    let mut gate: Vec<f32> = (0..experts * D).map(|_| dice.rounded(parts)).collect();
    match scores {
        Scores::Tied => {
            // Tokens are copies of three, and the last expert of the first.
            (3..tokens).for_each(|t| x.copy_within(t % 3 * D..(t % 3 + 1) * D, t * D));
            gate.copy_within(..D, (experts - 1) * D);
        }
        Scores::OneExpert => {
            x.chunks_mut(D).for_each(|x| x[0] = 1.0);
            gate[0] = 8.0;
        }
        Scores::Random | Scores::Special => {}
    }
    let mut values = BTreeMap::from([("x".to_owned(), x), ("gate.weight".to_owned(), gate)]);
    if layer.unscored.config.gate == GateKind::Noisy {
        values.insert("gate.noise.weight".to_owned(), (0..experts * D).map(|_| 0.5 * dice.normal()).collect());
    }
    let names: &[(&str, usize)] = match layer.activation {
        Activation::SwiGlu => &[("w1.weight", F * D), ("w2.weight", D * F), ("w3.weight", F * D)],
        Activation::PlainRelu | Activation::ClampedSwiGlu => panic!("loops of {:?}", layer.activation),
        Activation::Gelu | Activation::Relu => {
            &[("fc_in.weight", F * D), ("fc_in.bias", F), ("fc_out.weight", D * F), ("fc_out.bias", D)]
        }
    };
    for expert in 0..experts {
        for (part, len) in names {
            values.insert(format!("experts.{expert}.{part}"), (0..*len).map(|_| 0.7 * dice.normal()).collect());
        }
    }
    values
}

/// Every gate, in training and in evaluation.
pub(super) fn layers() -> Vec<LayerCase> {
    let mut all = Vec::new();
    for (place, &gate) in GATES.iter().enumerate() {
        for round in 0..6 {
            for scores in [Scores::Random, Scores::Tied, Scores::OneExpert] {
                let index = CASES_OF_GATE * place + 4 * round + scores as usize;
                all.push(LayerCase::new(index, gate, scores, round % 3 != 2));
            }
        }
    }
    all
}
