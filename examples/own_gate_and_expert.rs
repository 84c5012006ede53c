//! A gate and an expert of one's own in a MoE layer, trained by a plain loop, without the trainer.
//!
//! ```text
//! cargo run --release --example own_gate_and_expert
//! ```
//!
//! The task: y is one of four matrices times x, and the signs of x's first two features say which. The gate is noisy
//! at first and greedy later; the experts are single matrices. Two thread ranks hold two experts each.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use guildhall::launch::{self, Rank};
use guildhall::moe::gates::{BalanceKind, Gate, Perturbation, Tokens, top_k};
use guildhall::moe::migration::FollowingWork;
use guildhall::moe::{
    BalanceScope, Beside, Expert, Facts, GateState, History, Homes, Importance, MoeLayer, Router, Selector, StepFacts,
    Transport, Weighting,
};
use guildhall::optim::{Hyper, Optimizer};
use guildhall::parallel::{self, Init, Mesh, Parameters, Placement, Rows, Spread, Weight, sync_gradients};
use guildhall_tensor::{Device, Draws, Dtype, Purpose, Tape, Tensor, Var};

const FEATURES: usize = 8;
const EXPERTS: usize = 4;
const TOKENS: usize = 256;
const STEPS: u64 = 400;

/// For the first steps a random expert, so that all learn something; then the best.
#[derive(Debug)]
struct ExploreFirst {
    steps: u64,
}

impl Gate for ExploreFirst {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        // Keyed by the token's index within the step: the same choice on any number of ranks.
        let draws = Draws::new(tokens.draws.seed, Purpose::Gate, tokens.draws.step, 1000);
        let explores = tokens.draws.trains && tokens.draws.step <= self.steps;
        let choice = |t: usize| match explores {
            true => draws.bits(tokens.first + t as u64) % tokens.experts as u32,
            false => top_k(tokens.row(t), 1, |_| true)[0],
        };
        (0..tokens.len()).map(choice).collect()
    }

    fn slots(&self) -> usize {
        1
    }

    fn weighting(&self) -> Weighting {
        Weighting::Probability
    }
}

/// One matrix an expert.
#[derive(Debug)]
struct Matrices {
    weight: Weight,
}

impl Matrices {
    /// Those of one rank; a set of them is on `degree` ranks.
    fn new(device: &Arc<Device>, local: &[usize], degree: usize) -> Matrices {
        let shape = [local.len(), FEATURES, FEATURES];
        // One global tensor per expert: that is what a checkpoint would hold.
        let names = local.iter().map(|e| (format!("experts.{e}.weight"), vec![FEATURES, FEATURES]));
        let placement = Placement::new(Spread::Expert(degree), names.collect::<Vec<_>>());
        Matrices { weight: Weight::new(device, placement, &shape, Dtype::F32, Init::Normal { std: 0.1, seed: 1 }) }
    }
}

impl Expert for Matrices {
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        vec![tape.parameter(&self.weight.parameter)]
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        rows.grouped_linear(&weights[0], None, counts)
    }
}

impl Parameters for Matrices {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
    }
}

/// `scale * sum of squares of y - target`: an op of one's own, forward beside backward.
fn squared_error(y: &Var, target: &Tensor, scale: f32) -> Var {
    let error: Vec<f32> = y.value().f32s().iter().zip(target.f32s()).map(|(y, t)| y - t).collect();
    let value = scale * error.iter().map(|e| e * e).sum::<f32>();
    let (to, shape) = (y.input(), y.shape().to_vec());
    y.tape().op("squared_error", Tensor::from_slice(y.device(), &[1], &[value]), &[y], move |g, gradients| {
        let (device, factor) = (g.device().clone(), 2.0 * scale * g.scalar());
        gradients.add(to, Tensor::from_fn(&device, &shape, |i| factor * error[i]));
    })
}

/// x and y of this rank's tokens in a step.
fn batch(rank: &Rank, step: u64, tokens: std::ops::Range<usize>) -> (Tensor, Tensor) {
    let draws = Draws::new(7, Purpose::Test, step, 0);
    let x: Vec<f32> =
        tokens.flat_map(|t| (0..FEATURES).map(move |i| draws.normal((t * FEATURES + i) as u64))).collect();
    let truth = Draws::new(8, Purpose::Test, 0, 0);
    let y = x.chunks_exact(FEATURES).flat_map(|x| {
        let which = usize::from(x[0] > 0.0) + 2 * usize::from(x[1] > 0.0);
        let entry = move |o: usize, i: usize| truth.normal((which * 64 + o * FEATURES + i) as u64);
        (0..FEATURES).map(move |o| (0..FEATURES).map(|i| entry(o, i) * x[i]).sum::<f32>())
    });
    let y: Vec<f32> = y.collect();
    let tensor = |values: &[f32]| Tensor::from_slice(&rank.device, &[values.len() / FEATURES, FEATURES], values);
    (tensor(&x), tensor(&y))
}

fn train(rank: &Rank) -> Result<Vec<f32>> {
    let mesh = Mesh::new(rank.world.clone(), rank.world.size())?;
    let device = &rank.device;
    let init = Init::Normal { std: 0.1, seed: 0 };
    let transport = Transport::plain(EXPERTS, &mesh);
    let mut layer = MoeLayer {
        index: 0,
        condensation: None,
        is_causal: true,
        following: FollowingWork::default(),
        stack: 0,
        router: Router::new(device, "gate", (EXPERTS, FEATURES), init, Perturbation::None),
        selector: Selector { gate: Arc::new(ExploreFirst { steps: 20 }), capacity: None, group_tokens: None },
        experts: Box::new(Matrices::new(device, transport.table.of(mesh.expert.rank()), mesh.expert.size())),
        transport,
        beside: Beside::Nothing,
        output_masking: 0.0,
        balance: BalanceKind::AllChoices,
        balance_scope: BalanceScope::Sequence,
        state: GateState::default(),
    };
    let hyper = Hyper { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(device, &mut layer, &mesh, hyper)?;
    let share = TOKENS / rank.world.size();
    let mine = rank.world.rank() * share..(rank.world.rank() + 1) * share;
    let per_token = 1.0 / TOKENS as f32;
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        let (x, target) = batch(rank, step, mine.clone());
        let importance = Importance::new(&vec![0; share], share, vec![true; share], per_token);
        let stream = mesh.stream(Rows::consecutive(mine.start as u64, share));
        let (homes, step_facts) = (Homes::gather(&stream.numbers(), &mesh.data)?, StepFacts::of_training(0, step));
        let facts = Facts { importance: &importance, homes: &homes, history: &History::default(), step: &step_facts };
        let tape = Tape::new(device);
        let output = layer.forward(&tape.constant(x), &stream, &facts, &mesh)?;
        let error = squared_error(&output.y, &target, per_token / FEATURES as f32);
        let loss = error.add(&output.losses.balance.scale(0.01));
        let mut sum = [f64::from(error.value().scalar())];
        tape.try_backward(&loss).map_err(|failure| anyhow!("{failure}"))?;
        sync_gradients(&mut layer, &mesh)?;
        optimizer.step(&mut layer, step, 0.02, 1.0)?;
        rank.world.sum_f64(&mut sum)?;
        losses.push(sum[0] as f32);
    }
    Ok(losses)
}

pub(crate) fn main() -> Result<()> {
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
    let runs = launch::first_cause(launch::run(&config, |rank| train(&rank)), |_| false);
    let losses = runs.map_err(|failure| anyhow!("{failure}"))?.remove(0);
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 50 == 0 || *step + 1 == losses.len()) {
        println!("step {:>3}   mean squared error {loss:.4}", step + 1);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    ensure!(last < first / 10.0, "the experts should learn their matrices: {first} to {last}");
    Ok(())
}
