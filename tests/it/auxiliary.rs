//! The balance losses of other systems, by `moe.dialect`, against what these systems compute (`oracle/auxiliary.py`): values,
//! and slopes along router logits, on one rank and on several.

use guildhall::launch::Rank;
use guildhall::moe::gates::{BalanceKind, GateDraws, Tokens};
use guildhall::moe::{self, BalanceLoss, Dialect, Homes, Importance, LossInputs, Peers, Scores};
use guildhall::parallel::Mesh;
use guildhall_tensor::{Tape, Tensor, Var};

use crate::golden::Golden;
use crate::tiny::{Tolerance, near};
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
    let tokens = Tokens { logits: &shown, experts: EXPERTS, first: first as u64, ids: &[], bias: &bias, draws };
    let peers = Peers { group: &rank.world, homes: &Homes::default(), device: &rank.device };
    let (selector, scores) = (config.selector(), Scores { logits: logits.clone(), noise: None });
    let routing = selector.route(&tokens, &peers).expect("a routing");
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
