//! The balance losses of other systems, by `moe.dialect`, against what these systems compute (`oracle/auxiliary.py`): values,
//! and slopes along router logits, on one rank and on several.

use guildhall::launch::Rank;
use guildhall::moe::gates::{BalanceKind, GateDraws, Tokens};
use guildhall::moe::{self, BalanceLoss, Dialect, GateKind, Homes, Importance, Layers, LossInputs, Peers, Scores};
use guildhall::parallel::Mesh;
use guildhall_tensor::{Tape, Tensor, Var};

use crate::golden::Golden;
use crate::tiny::{Recipe, Tolerance, gpt2, near};
use crate::world::{ONE, Shape, on_mesh, shape};

const LAYERS: usize = 3;
const ROWS: usize = 4;
const SEQ: usize = 6;
const EXPERTS: usize = 5;
const TOP_K: usize = 2;
/// Sums of 24 tokens of three layers in f32, in other orders than PyTorch's: some roundings of 2^-24 (6e-8).
const ROUNDING: Tolerance = Tolerance { relative: 2e-6, floor: 1e-9 };

/// One layer's part of the loss, its load, and the logits it is of.
fn layer(rank: &Rank, tape: &Tape, config: &moe::Config, (logits, first): (&[f32], usize)) -> (Var, Vec<u64>, Var) {
    let here = logits.len() / EXPERTS;
    let logits = tape.leaf(Tensor::from_slice(&rank.device, &[here, EXPERTS], logits));
    let draws = GateDraws { seed: 0, step: 1, layer: 0, trains: true };
    let bias = [0.0; EXPERTS];
    let shown = logits.value().to_vec();
    let tokens = Tokens {
        logits: &shown,
        largest: None,
        experts: EXPERTS,
        first: first as u64,
        ids: &[],
        bias: &bias,
        padding: &[],
        draws,
    };
    let peers = Peers { group: &rank.world, homes: &Homes::default(), device: &rank.device };
    let (selector, scores) = (config.widest().selector(), Scores { logits: logits.clone(), noise: None });
    let routing = selector.route(&[tokens], &peers).expect("a routing");
    let weighting = selector.gate.weighting();
    let probabilities = weighting.probabilities(&logits);
    let inputs = LossInputs {
        scores: &scores,
        weights: &weighting.weights(&logits, &probabilities, &routing.weighed(), routing.k),
        probabilities: &probabilities,
        routing: &routing,
        importance: &Importance::new(&vec![0; here], SEQ, vec![true; here], 1.0 / (ROWS * SEQ) as f32),
        kind: config.balance(),
        scope: config.scope(),
        previous_load: &[],
    };
    let loss = BalanceLoss::new(&inputs, &rank.world).expect("a loss").balance;
    (loss, routing.load(), logits)
}

/// This rank's part of the loss over all layers, and the slopes along its logits, layer by layer.
fn part(rank: &Rank, mesh: &Mesh, (golden, dialect): (&Golden, Dialect)) -> (f32, Vec<Vec<f32>>) {
    let config = moe::Config { dialect: Some(dialect), ..moe::Config::of(EXPERTS, TOP_K) };
    let bound = |place: usize| ROWS * place / mesh.world.size() * SEQ;
    let mine = bound(mesh.world.rank())..bound(mesh.world.rank() + 1);
    let (tape, logits) = (Tape::new(&rank.device), golden.f32s("logits"));
    let layers: Vec<(Var, Vec<u64>, Var)> = logits
        .chunks_exact(ROWS * SEQ * EXPERTS)
        .map(|of_layer| &of_layer[mine.start * EXPERTS..mine.end * EXPERTS])
        .map(|logits| layer(rank, &tape, &config, (logits, mine.start)))
        .collect();
    let parts: Vec<Var> = layers.iter().map(|(part, ..)| part.clone()).collect();
    let loss = if config.balance() == BalanceKind::AllLayers {
        let loads: Vec<&[u64]> = layers.iter().map(|(_, load, _)| &load[..]).collect();
        BalanceLoss::of_all_layers(&parts, &loads, TOP_K, &rank.world).expect("a loss")
    } else {
        parts.into_iter().reduce(|sum, part| sum.add(&part)).expect("layers")
    };
    let back = tape.backward(&loss);
    let slopes = layers.iter().map(|(_, _, logits)| back.of(logits).map_or_else(Vec::new, Tensor::to_vec));
    (loss.value().scalar(), slopes.collect())
}

fn check(golden: &Golden, shape: Shape, (name, dialect): (&str, Dialect)) {
    let what = format!("{name} on {} ranks", shape.ranks);
    let parts = on_mesh(shape, |rank, mesh| part(rank, mesh, (golden, dialect)));
    let loss = parts.iter().map(|(loss, _)| loss).sum();
    near(&what, &[loss], &golden.f32s(name), ROUNDING);
    let slopes: Vec<f32> =
        (0..LAYERS).flat_map(|layer| parts.iter().flat_map(move |(_, slopes)| slopes[layer].clone())).collect();
    near(&format!("slopes of {what}"), &slopes, &golden.f32s(&format!("{name}/slope")), ROUNDING);
}

/// A dialect's losses look at all tokens of whole rows, whatever documents these hold and whatever is to be predicted: so of
/// one layer, one choice a token and one row a micro-batch, where the systems' formulas are one, they are the same.
#[test]
fn in_all_dialects_rows_are_sequences_and_all_tokens_count() {
    let losses = |dialect| {
        let mut sizes = gpt2();
        sizes.model.layers = 1;
        let moe = sizes.moe.as_mut().expect("experts");
        (moe.layers, moe.top_k, moe.gate, moe.dialect) = (Layers::All, 1, GateKind::Softmax.into(), dialect);
        let recipe = Recipe { sizes, rows: 4, micro_batch: 1 };
        let mut all = on_mesh(ONE, |rank, mesh| recipe.train(&mut recipe.trainer(rank, mesh), 1..=1));
        let report = all.swap_remove(0).swap_remove(0);
        [report.balance as f32, report.z as f32]
    };
    let want = losses(Some(Dialect::Megatron));
    for dialect in [Dialect::Hf, Dialect::Deepseek, Dialect::Fastmoe] {
        near(&format!("{dialect:?}"), &losses(Some(dialect)), &want, ROUNDING);
    }
    let without = losses(None);
    assert!([0, 1].iter().all(|&i| (without[i] - want[i]).abs() > 1e-3 * want[i]), "documents: {without:?}, {want:?}");
}

#[test]
fn every_dialect_has_the_loss_of_its_system() {
    let golden = Golden::read("auxiliary");
    for shape in [ONE, shape(2, 1), shape(5, 1)] {
        for (name, dialect) in [
            ("hf", Dialect::Hf),
            ("megatron", Dialect::Megatron),
            ("deepseek", Dialect::Deepseek),
            ("fastmoe", Dialect::Fastmoe),
        ] {
            check(&golden, shape, (name, dialect));
        }
    }
}
