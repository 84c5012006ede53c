//! A training loop of one's own on two thread ranks, without the trainer: batch, forward, backward, sums over ranks,
//! optimizer.
//!
//! ```text
//! cargo run --release --example training_loop
//! ```
//!
//! The text: documents in which every token is a fixed function of the one before it. Two ranks hold two of four experts
//! each, and each rank trains on half of the rows.

#![allow(clippy::print_stdout)]

use anyhow::{Result, anyhow, ensure};
use guildhall::data::{Batch, Row};
use guildhall::launch::{self, Rank};
use guildhall::model::{self, Context, Model, Sizes};
use guildhall::moe::{self, StepFacts};
use guildhall::optim::{Hyper, Optimizer};
use guildhall::parallel::{self, Mesh, global_gradient_norm, sync_gradients};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape};

const VOCAB: u32 = 16;
const SEQ: usize = 16;
const ROWS: usize = 16;
const STEPS: u64 = 60;

/// A document that its first token decides.
fn row(step: u64, place: usize) -> Row {
    let first = Draws::new(1, Purpose::Test, step, place as u32).bits(0) % VOCAB;
    let tokens = std::iter::successors(Some(first), |token| Some((5 * token + 3) % VOCAB));
    Row::of_document(&tokens.take(SEQ).collect::<Vec<u32>>())
}

/// This rank's rows of a step: the same text on any number of ranks.
fn batch(rank: &Rank, step: u64) -> Batch {
    let share = ROWS / rank.world.size();
    let first = rank.world.rank() * share;
    let mut batch = Batch::empty(SEQ, first as u64);
    (first..first + share).for_each(|place| batch.push(&row(step, place)));
    batch
}

/// Mean cross-entropy of every step.
fn train(rank: &Rank) -> Result<Vec<f64>> {
    let model = model::Config::of(VOCAB as usize, (32, 2, 2), SEQ);
    let sizes = Sizes {
        model,
        moe: Some(moe::Config::of(4, 2)),
        lora: None,
        dtype: Dtype::F32,
        gradients: Dtype::F32,
        seed: 1,
        frozen: Vec::new(),
    };
    let mesh = Mesh::new(rank.world.clone(), 2)?;
    let mut model = Model::new(&rank.device, &sizes, &mesh);
    let hyper = Hyper { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let mut optimizer = Optimizer::new(&rank.device, &mut model, &mesh, hyper)?;
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        let batch = batch(rank, step);
        // Losses are divided by the tokens of all ranks, so that gradients are plain sums.
        let valid_tokens = rank.world.all_gather_u64(&[batch.valid() as u64])?.iter().sum();
        let context = Context::of_training(&mesh, StepFacts::of_training(1, step), valid_tokens);
        let tape = Tape::new(&rank.device);
        let forward = model.forward(&tape, &batch, &context)?;
        tape.try_backward(&forward.loss).map_err(|failure| anyhow!("{failure}"))?;
        sync_gradients(&mut model, &mesh)?;
        let norm = global_gradient_norm(&mut model, &mesh)?;
        optimizer.step(&mut model, step, 1e-2, (1.0 / norm).min(1.0))?;
        let mut loss = [f64::from(forward.cross_entropy())];
        rank.world.sum_f64(&mut loss)?;
        losses.push(loss[0]);
    }
    Ok(losses)
}

pub(crate) fn main() -> Result<()> {
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
    let runs = launch::first_cause(launch::run(&config, |rank| train(&rank)), |_| false);
    let losses = runs.map_err(|failure| anyhow!("{failure}"))?.remove(0);
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 10 == 0 || *step + 1 == losses.len()) {
        println!("step {:>2}   loss {loss:.4}", step + 1);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    ensure!(last < first / 2.0, "the loss should halve: {first} to {last}");
    Ok(())
}
