//! The work of the benchmarks of whole training steps: the decoders that `peers/pytorch/{gpt,decoder}.py` train, their
//! tokens, and trainers for them.

#![allow(dead_code, reason = "not every benchmark uses all of it")]

use anyhow::{Result, anyhow};
use guildhall::data::{Batch, IGNORE, Row, StepBatches};
use guildhall::launch::{self, Rank};
use guildhall::model::{Config, Family, Sizes};
use guildhall::moe::{self, Layers};
use guildhall::optim::{Decay, Hyper, LearningRate};
use guildhall::parallel::{self, Bucketing, Mesh};
use guildhall::train::{Error, Trainer};
use guildhall_tensor::Dtype;

pub(crate) const ROWS: usize = 16;
pub(crate) const SEQ: usize = 128;
pub(crate) const VOCAB: usize = 4096;
pub(crate) const BALANCE_WEIGHT: f32 = 0.01;

/// Dense, in GPT-2's style.
pub(crate) fn gpt() -> Sizes {
    sizes(Family::Gpt2, None)
}

/// Sparse, in Mixtral's style.
pub(crate) fn mixtral() -> Sizes {
    let moe = moe::Config {
        d_expert: Some(1024),
        layers: Layers::All,
        balance_weight: BALANCE_WEIGHT,
        ..moe::Config::of(8, 2)
    };
    sizes(Family::Mixtral, Some(moe))
}

fn sizes(family: Family, moe: Option<moe::Config>) -> Sizes {
    let model = Config {
        family,
        vocab: VOCAB,
        d_model: 256,
        layers: 4,
        encoder_layers: None,
        decoder_layers: None,
        heads: 4,
        kv_heads: None,
        head_dim: None,
        query_rank: None,
        kv_rank: None,
        content_dim: None,
        rotary_dim: None,
        value_dim: None,
        window: None,
        rope_factor: None,
        rope_pretrained: None,
        d_ff: Some(1024),
        seq: SEQ,
        source_seq: None,
        segment: None,
        memory: None,
        dropout: 0.0,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tie_embeddings: false,
        init_std: 0.02,
    };
    Sizes { model, moe, lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 0, frozen: Vec::new() }
}

/// Runs `f` on every rank; the first failure ends the benchmark.
pub(crate) fn on_ranks<T: Send>(config: &parallel::Config, f: impl Fn(Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
    launch::first_cause(launch::run(config, f), |_| false).map_err(|failure| anyhow!("{failure}"))
}

/// A trainer whose experts are spread over `expert` ranks.
pub(crate) fn trainer(rank: &Rank, sizes: &Sizes, expert: usize, bucketing: Bucketing) -> Result<Trainer, Error> {
    let mesh = Mesh::new(rank.world.clone(), expert)?;
    let hyper = Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rate = LearningRate { peak: 1e-3, decay: Decay::Constant, warmup_steps: 0, steps: 0, end: 1.0 };
    Ok(Trainer::new(&rank.device, mesh, sizes, hyper, rate, 0.0, bucketing)?)
}

/// Each step's time on the rank that took longest, of times by rank and step.
pub(crate) fn slowest(ms: &[&[f64]]) -> Vec<f64> {
    (0..ms[0].len()).map(|step| ms.iter().map(|rank| rank[step]).fold(0.0, f64::max)).collect()
}

/// `[rank][step]`: each rank's share of the rows of every step.
pub(crate) fn batches(steps: usize, ranks: usize) -> Vec<Vec<StepBatches>> {
    batches_of((ROWS, SEQ), steps, ranks)
}

/// The same of steps of other rows.
pub(crate) fn batches_of((rows, seq): (usize, usize), steps: usize, ranks: usize) -> Vec<Vec<StepBatches>> {
    let tokens = stream(steps * rows * seq);
    let share = rows / ranks;
    let of = |rank: usize, step: usize| {
        let mut batch = Batch::empty(seq, (rank * share) as u64);
        let begin = (step * rows + rank * share) * seq;
        tokens[begin..][..share * seq].chunks(seq).for_each(|tokens| batch.push(&row(tokens)));
        StepBatches { step: step as u64, micro: vec![batch] }
    };
    (0..ranks).map(|rank| (0..steps).map(|step| of(rank, step)).collect()).collect()
}

/// One document; its last token predicts nothing.
fn row(tokens: &[u32]) -> Row {
    let targets = tokens[1..].iter().copied().chain([IGNORE]).collect();
    Row {
        tokens: tokens.to_vec(),
        targets,
        segments: vec![0; tokens.len()],
        positions: (0..tokens.len() as u32).collect(),
        ..Row::default()
    }
}

/// The token stream of `peers/pytorch/common.py`: a walk modulo 251 with two random bits a token.
fn stream(length: usize) -> Vec<u32> {
    let (mut state, mut token) = (1u64, 0u64);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        token = (5 * token + 7 + (state >> 62)) % 251;
        token as u32
    };
    (0..length).map(next).collect()
}
