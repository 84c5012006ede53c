//! The MoE feed-forward in a transformer block of one's own: only the layer, the optimizer and the gradients' sums are
//! the library's.
//!
//! ```text
//! cargo run --release --example moe_feed_forward
//! ```
//!
//! The task: repeat a random word of four tokens again and again. The block is plain: a norm, attention, a norm, and the
//! MoE layer where a feed-forward would be. Two ranks hold two of four experts each.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use guildhall::launch::{self, Rank};
use guildhall::moe::{self, Activation, Facts, History, Homes, Importance, LayerSizes, MoeLayer, StepFacts};
use guildhall::optim::{Hyper, Optimizer};
use guildhall::parallel::{self, Init, Mesh, Parameters, Rows, Stream, Weight, sync_gradients};
use guildhall_tensor::ops::{AttentionShape, AttentionSpans, causal_keys, rotary_tables};
use guildhall_tensor::{Device, Draws, Dtype, Purpose, Tape, Var};

const VOCAB: usize = 12;
const WORD: usize = 4;
const D: usize = 32;
const SEQ: usize = 16;
const ROWS: usize = 16;
const STEPS: u64 = 100;
const HEADS: AttentionShape = AttentionShape { heads: 2, kv_heads: 2, head_dim: D / 2 };

/// A language model of one block.
struct Model {
    embedding: Weight,
    norms: [Weight; 3],
    qkv: Weight,
    out: Weight,
    moe: MoeLayer,
    head: Weight,
}

impl Model {
    fn new(device: &Arc<Device>, mesh: &Mesh) -> Model {
        let init = Init::Normal { std: 0.1, seed: 1 };
        let matrix = |name: &str, shape: [usize; 2]| Weight::replicated(device, name, &shape, Dtype::F32, init);
        let norm = |name: &str| Weight::replicated(device, name, &[D], Dtype::F32, Init::Ones);
        let sizes = LayerSizes {
            d_model: D,
            d_ff: 2 * D,
            activation: Activation::SwiGlu,
            gates_shared: false,
            router_bias: false,
            dtype: Dtype::F32,
            adapters: None,
            inits: [init; 2],
        };
        Model {
            embedding: matrix("embedding", [VOCAB, D]),
            norms: ["norm.attention", "norm.moe", "norm.head"].map(norm),
            qkv: matrix("qkv", [3 * D, D]),
            out: matrix("out", [D, D]),
            // Everything a recipe's [moe] section can say is a field of this.
            moe: MoeLayer::new(device, ("moe", 0), moe::Config::of(4, 2).widest(), &sizes, mesh),
            head: matrix("head", [VOCAB, D]),
        }
    }

    /// What to go back from, and the cross-entropy in it: this rank's parts of means over all tokens of the step.
    fn loss(
        &self,
        tape: &Tape,
        (stream, targets): (&Stream, &[u32]),
        facts: &Facts,
        mesh: &Mesh,
    ) -> Result<(Var, f32)> {
        let tokens = &stream.rows().ids;
        let on = |weight: &Weight| tape.parameter(&weight.parameter);
        let norm = |x: &Var, which: usize| x.rms_norm(&on(&self.norms[which]), 1e-5);
        let positions: Vec<u32> = (0..tokens.len()).map(|t| (t % SEQ) as u32).collect();
        let rotary = rotary_tables(tape.device(), &positions, HEADS.head_dim, 10_000.0);
        let spans = AttentionSpans::new(tape.device(), SEQ, &causal_keys(&vec![0; tokens.len()], SEQ), Some(rotary));
        let x = on(&self.embedding).embed(tokens, Dtype::F32);
        let attended = norm(&x, 0).linear(&on(&self.qkv), None).attention(HEADS, &spans);
        let x = x.add(&attended.linear(&on(&self.out), None));
        let output = self.moe.forward(&norm(&x, 1), stream, facts, mesh)?;
        let features = norm(&x.add(&output.y), 2);
        let cross_entropy = features.linear_cross_entropy(&on(&self.head), None, targets, 1.0 / (ROWS * SEQ) as f32);
        let loss = cross_entropy.add(&output.losses.balance.scale(0.01));
        Ok((loss, cross_entropy.value().scalar()))
    }
}

impl Parameters for Model {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        [&mut self.embedding, &mut self.qkv, &mut self.out, &mut self.head].into_iter().for_each(&mut *f);
        self.norms.iter_mut().for_each(&mut *f);
        self.moe.visit(f);
    }
}

/// Tokens of the rows at these places of a step, and what follows each.
fn rows(step: u64, places: std::ops::Range<usize>) -> (Vec<u32>, Vec<u32>) {
    let token =
        |row: usize, i: usize| Draws::new(1, Purpose::Test, step, row as u32).bits((i % WORD) as u64) % VOCAB as u32;
    let shifted = |by: usize| places.clone().flat_map(move |row| (by..by + SEQ).map(move |i| token(row, i))).collect();
    (shifted(0), shifted(1))
}

fn train(rank: &Rank) -> Result<Vec<f64>> {
    let mesh = Mesh::new(rank.world.clone(), 2)?;
    let mut model = Model::new(&rank.device, &mesh);
    let hyper = Hyper { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(&rank.device, &mut model, &mesh, hyper)?;
    let share = ROWS / rank.world.size();
    let mine = rank.world.rank() * share..(rank.world.rank() + 1) * share;
    let (here, per_token) = (share * SEQ, 1.0 / (ROWS * SEQ) as f32);
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        let (tokens, targets) = rows(step, mine.clone());
        let importance = Importance::new(&vec![0; here], SEQ, vec![true; here], per_token);
        let stream = mesh.stream(Rows::of_ids((mine.start * SEQ) as u64, &tokens));
        let (homes, step_facts) = (Homes::gather(&stream.numbers(), &mesh.data)?, StepFacts::of_training(1, step));
        let facts = Facts { importance: &importance, homes: &homes, history: &History::default(), step: &step_facts };
        let tape = Tape::new(&rank.device);
        let (loss, cross_entropy) = model.loss(&tape, (&stream, &targets), &facts, &mesh)?;
        tape.try_backward(&loss).map_err(|failure| anyhow!("{failure}"))?;
        sync_gradients(&mut model, &mesh)?;
        optimizer.step(&mut model, step, 5e-3, 1.0)?;
        let mut sum = [f64::from(cross_entropy)];
        rank.world.sum_f64(&mut sum)?;
        losses.push(sum[0]);
    }
    Ok(losses)
}

pub(crate) fn main() -> Result<()> {
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
    let runs = launch::first_cause(launch::run(&config, |rank| train(&rank)), |_| false);
    let losses = runs.map_err(|failure| anyhow!("{failure}"))?.remove(0);
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 20 == 0 || *step + 1 == losses.len()) {
        println!("step {:>3}   loss {loss:.4}", step + 1);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    ensure!(last < 0.7 * first, "the loss should fall: {first} to {last}");
    Ok(())
}
