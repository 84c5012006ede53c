//! Whole layers, the program's against the oracle's: output, losses, loads, and slopes along features and router.

use guildhall::launch::Rank;
use guildhall::moe::gates::{BalanceKind, GateDraws};
use guildhall::moe::{
    BalanceLoss, BalanceScope, Facts, GateKind, History, Homes, Importance, LayerSizes, MoeLayer, StepFacts,
};
use guildhall::parallel::{Init, Mesh, Rows};
use guildhall_tensor::{Dtype, Tape, Tensor};

use super::layer::Output;
use super::layers::{D, F, LayerCase, SEQ, layers};
use crate::tiny::{Tensors, Tolerance, gradients, near, set};
use crate::world::{ONE, on_mesh};

/// Weights of the auxiliary losses: as large as the output's, so that an error in them shows.
const BALANCE: f32 = 0.7;
const Z: f32 = 0.3;
/// Sums of at most 30 terms, each rounded at 2^-24 (6e-8), one behind the other: a product, a softmax, an activation,
/// another product. The floor is for gradients that nearly cancel; terms are of order one to ten.
const ROUNDING: Tolerance = Tolerance { relative: 4e-6, floor: 1e-6 };

/// Scores of up to twenty are rounded to within 2e-6, a few roundings apart.
const GAP: f32 = 1e-5;

/// What the names of the layer's tensors begin with.
const NAME: &str = "layer";

/// What the program gives.
struct Outcome {
    y: Vec<f32>,
    losses: [f32; 2],
    load: Vec<u64>,
    dropped: u64,
    /// Of x and of the weights.
    gradients: Tensors,
}

fn program(rank: &Rank, mesh: &Mesh, case: &LayerCase) -> Outcome {
    let mut layer = program_layer(rank, mesh, case);
    let (tape, batch, counting) = (Tape::new(&rank.device), &case.layer.unscored, &case.layer.counting);
    let own = |values: &[f32]| Tensor::from_slice(&rank.device, &[case.tokens(), D], values);
    let x = tape.leaf(own(&case.values["x"]));
    let importance = Importance::new(&case.segments, SEQ, counting.valid.clone(), 1.0 / counting.all as f32);
    let GateDraws { seed, step, trains, .. } = batch.draws;
    let step = StepFacts { trains, ..StepFacts::of_training(seed, step) };
    let stream = mesh.stream(Rows { ids: batch.ids.clone(), ..Rows::consecutive(batch.first, case.tokens()) });
    let facts = Facts {
        importance: &importance,
        homes: &Homes::alone(batch.first..batch.first + case.tokens() as u64),
        history: &History::default(),
        step: &step,
    };
    let output = layer.forward(&x, &stream, &facts, mesh).expect("an output");
    let (mut balance, z) = (output.losses.balance.clone(), &output.losses.z);
    if layer.balance == BalanceKind::AllLayers {
        let (loads, k) = ([&output.counts.load[..]], batch.config.top_k);
        balance = BalanceLoss::of_all_layers(&[balance], &loads, k, &mesh.data).expect("a sum over one rank");
    }
    let loss = output.y.dot_constant(own(&case.direction)).add(&balance.scale(BALANCE)).add(&z.scale(Z));
    let back = tape.backward(&loss);
    let part = |name: &str| name[NAME.len() + 1..].to_owned();
    let mut gradients: Tensors =
        gradients(&mut layer).into_iter().map(|(name, values)| (part(&name), values)).collect();
    gradients.insert("x".to_owned(), back.of(&x).map_or_else(Vec::new, Tensor::to_vec));
    Outcome {
        y: output.y.value().to_vec(),
        losses: [balance.value().scalar(), z.value().scalar()],
        load: output.counts.load,
        dropped: output.counts.dropped,
        gradients,
    }
}

fn program_layer(rank: &Rank, mesh: &Mesh, case: &LayerCase) -> MoeLayer {
    let (config, draws) = (&case.layer.unscored.config, case.layer.unscored.draws);
    let sizes = LayerSizes {
        d_model: D,
        d_ff: F,
        activation: case.layer.activation,
        gates_shared: false,
        router_bias: false,
        dtype: Dtype::F32,
        adapters: None,
        inits: [Init::Zeros; 2],
    };
    let mut layer = MoeLayer::new(&rank.device, (NAME, draws.layer as usize), config.widest(), &sizes, mesh);
    if let Some(load) = &case.history {
        layer.state.end_step(load);
    }
    let named = case.values.iter().map(|(name, values)| (format!("{NAME}.{name}"), values.clone()));
    set(&mut layer, &named.collect());
    layer
}

fn check(index: usize, case: &LayerCase, got: &Outcome) {
    let config = &case.layer.unscored.config;
    let what = |part: &str| {
        let trains = case.layer.unscored.draws.trains;
        format!(
            "{part} of layer {index}, {} tokens, history {:?}, trains {trains}, {config:?}",
            case.tokens(),
            case.history
        )
    };
    let numbers = case.numbers();
    let routes = case.layer.batch(&numbers).route();
    let mut load = vec![0; config.experts.largest()];
    routes.wanted.iter().flatten().flatten().for_each(|&e| load[e] += 1);
    let sent = routes.kept.iter().flatten().flatten().count() as u64;
    // Every token asks for its top_k experts, but experts that choose their tokens owe them nothing.
    let asked = if config.gate == GateKind::ExpertChoice { sent } else { (case.tokens() * config.top_k) as u64 };
    assert_eq!((&got.load, got.dropped), (&load, asked - sent), "{}", what("loads"));
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let want = case.layer.forward(&numbers, &routes);
    near(&what("output"), &got.y, &narrow(&want.y), ROUNDING);
    near(&what("balance loss"), &got.losses[..1], &narrow(&[want.balance]), ROUNDING);
    near(&what("z loss"), &got.losses[1..], &narrow(&[want.z]), ROUNDING);
    let direction: Vec<f64> = case.direction.iter().map(|&x| f64::from(x)).collect();
    let objective = |out: &Output| {
        let along: f64 = out.y.iter().zip(&direction).map(|(y, d)| y * d).sum();
        along + f64::from(BALANCE) * out.balance + f64::from(Z) * out.z
    };
    for name in ["x", "gate.weight", "gate.noise.weight"] {
        let Some(gradient) = got.gradients.get(name) else { continue };
        let slopes = narrow(&case.layer.slopes(&numbers, &routes, name, objective));
        near(&what(&format!("slope along {name}")), gradient, &slopes, ROUNDING);
    }
}

#[test]
fn every_gate_weighs_and_learns_as_its_definition_says() {
    let cases = layers();
    let outcomes = on_mesh(ONE, |rank, mesh| cases.iter().map(|case| program(rank, mesh, case)).collect::<Vec<_>>());
    for (index, (case, outcome)) in cases.iter().zip(&outcomes[0]).enumerate() {
        check(index, case, outcome);
    }
}

/// The cases reach what they are for: every scope and dialect, losses that are there, and a first step.
#[test]
fn the_layers_bite() {
    let cases = layers();
    let some = |holds: &dyn Fn(&LayerCase) -> bool| cases.iter().filter(|case| holds(case)).count() > 20;
    for scope in [BalanceScope::Sequence, BalanceScope::MicroBatch, BalanceScope::GlobalBatch] {
        assert!(
            some(&|case| case.layer.unscored.config.balance_scope == Some(scope) && case.tokens() > 0),
            "{scope:?}"
        );
    }
    for dialect in super::cases::DIALECTS {
        assert!(some(&|case| case.layer.unscored.config.dialect == dialect && case.tokens() > 0), "{dialect:?}");
    }
    for case in cases.iter().filter(|case| case.layer.unscored.draws.trains) {
        // What is drawn is not exact in f32, so a choice must not hang on its rounding.
        if let GateKind::Noisy | GateKind::Switch = case.layer.unscored.config.gate.kind() {
            let gap = |row: &Vec<f32>| {
                let mut row = row.clone();
                row.sort_by(f32::total_cmp);
                row.windows(2).map(|pair| pair[1] - pair[0]).filter(|gap| *gap > 0.0).fold(1.0, f32::min)
            };
            assert!(case.layer.batch(&case.numbers()).logits.iter().all(|row| gap(row) > GAP));
        }
    }
    assert!(some(&|case| case.history.is_none()) && some(&|case| case.history.is_some()));
}
