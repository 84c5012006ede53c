//! Upcycling: a dense model is trained for a while, becomes a Mixture-of-Experts model that computes the same, and
//! trains on.
//!
//! ```text
//! cargo run --release --example upcycle
//! ```
//!
//! `guildhall surgery moefy` does the same from checkpoint to checkpoint. Two ranks hold two of four experts each.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use guildhall::data::{Batch, Row, StepBatches};
use guildhall::launch::{self, Rank};
use guildhall::model::{self, Context, Model, Sizes};
use guildhall::moe::{self, Routings};
use guildhall::optim::{Decay, Hyper, LearningRate, Optimizer};
use guildhall::parallel::{self, Mesh, SyncPlan};
use guildhall::surgery::moefy;
use guildhall::train::{PairSums, RowSums, Trainer};
use guildhall_tensor::{Draws, Dtype, Purpose, Recompute, Tape};

const VOCAB: u32 = 16;
const SEQ: usize = 16;
const ROWS: usize = 16;
const DENSE_STEPS: u64 = 20;
const MOE_STEPS: u64 = 40;

/// This rank's rows: documents in which every token is a function of the two before it.
fn batch(mesh: &Mesh, step: u64) -> Batch {
    let share = ROWS / mesh.world.size();
    let first = mesh.world.rank() * share;
    let mut batch = Batch::empty(SEQ, first as u64);
    for place in first..first + share {
        let draws = Draws::new(1, Purpose::Test, step, place as u32);
        let mut tokens = vec![draws.bits(0) % VOCAB, draws.bits(1) % VOCAB];
        for i in 2..SEQ {
            tokens.push((3 * tokens[i - 2] + 5 * tokens[i - 1] + 1) % VOCAB);
        }
        batch.push(&Row::of_document(&tokens));
    }
    batch
}

fn trainer(rank: &Rank, mesh: &Mesh, mut model: Model) -> Result<Trainer> {
    let hyper = Hyper { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let optimizer = Optimizer::new(&rank.device, &mut model, mesh, hyper)?;
    let learning_rate = LearningRate { peak: 1e-2, decay: Decay::Constant, warmup_steps: 0, steps: 1, end: 1.0 };
    let sync = SyncPlan::new(&mut model, parallel::Config::of(2, 2).bucketing());
    let (device, mesh, routings) = (rank.device.clone(), mesh.clone(), Arc::new(Routings::NONE));
    let (recompute, pairs) = (Recompute::default(), PairSums::new(&rank.device, model.sizes()));
    Ok(Trainer {
        device,
        mesh,
        model,
        optimizer,
        sync,
        learning_rate,
        clip: 1.0,
        seed: 1,
        routings,
        recompute,
        trend: None,
        pairs,
        rows: RowSums::default(),
        replacing: None,
    })
}

fn train(trainer: &mut Trainer, steps: u64) -> Result<Vec<f64>> {
    let mesh = trainer.mesh.clone();
    let one = |step| Ok(trainer.step(&StepBatches { step, micro: vec![batch(&mesh, step)] }, step)?.loss);
    (1..=steps).map(one).collect()
}

fn logits(rank: &Rank, mesh: &Mesh, model: &Model) -> Result<Vec<f32>> {
    let context = Context::of_inference(mesh, 1);
    Ok(model.logits(&Tape::inference(&rank.device), &batch(mesh, 0), &context)?.to_vec())
}

/// Losses of the dense model, the largest change of a logit, losses of the Mixture-of-Experts model.
fn upcycle(rank: &Rank) -> Result<(Vec<f64>, f32, Vec<f64>)> {
    let mesh = Mesh::new(rank.world.clone(), 2)?;
    let model = model::Config::of(VOCAB as usize, (32, 2, 2), SEQ);
    let sizes =
        Sizes { model, moe: None, lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 1, frozen: Vec::new() };
    let mut dense = trainer(rank, &mesh, Model::new(&rank.device, &sizes, &mesh))?;
    let before = train(&mut dense, DENSE_STEPS)?;
    let of_dense = logits(rank, &mesh, &dense.model)?;

    let experts = moefy(&rank.device, &mut dense.model, &moe::Config::of(4, 2), 2, &mesh)?;

    let of_moe = logits(rank, &mesh, &experts)?;
    let change = of_dense.iter().zip(&of_moe).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let after = train(&mut trainer(rank, &mesh, experts)?, MOE_STEPS)?;
    Ok((before, change, after))
}

pub(crate) fn main() -> Result<()> {
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
    let runs = launch::first_cause(launch::run(&config, |rank| upcycle(&rank)), |_| false);
    let (before, change, after) = runs.map_err(|failure| anyhow!("{failure}"))?.remove(0);
    let (first, last) = (before[0], before[before.len() - 1]);
    println!("dense         loss {first:.4} to {last:.4}");
    println!("moefied       largest change of a logit {change:.1e}");
    let (again, end) = (after[0], after[after.len() - 1]);
    println!("4 experts     loss {again:.4} to {end:.4}");
    ensure!(change < 1e-4, "the function should not change");
    ensure!(end < last && end < again, "the loss should fall on");
    Ok(())
}
