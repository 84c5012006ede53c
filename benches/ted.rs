//! Times DeepSpeed-TED's step over links that charge for messages: blocks run again in backward, experts and all else
//! in slices; as it is, with duplicates dropped, with what came from other ranks kept, and with both.
//!
//! ```text
//! cargo bench --bench ted -- [--within 50] [--between 4.2] [--slower 1400] [--latency-us 140] [--steps 5]
//! ```
//!
//! Eight ranks, two a node: slices within a node, experts between nodes. `--within` and `--between` are gigabytes a second
//! of each rank of the machine that is imitated, a node of Summit: NVLink of a V100, and its sixth of two EDR ports. A
//! V100 computes about `--slower` times as much in a second as a rank here does, so links are that much slower too. The four ways take turns. The links are an emulation: these are not times of a network.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/workload.rs"]
mod workload;

use std::sync::Arc;

use anyhow::Result;
use common::{Flags, Measured, WARM_UP, median, milliseconds};
use guildhall::data::StepBatches;
use guildhall::launch::Rank;
use guildhall::model::{Config, Family, Sizes};
use guildhall::moe::{self, Layers};
use guildhall::optim::{Decay, Hyper, LearningRate};
use guildhall::parallel::{self, LinkCost, Mesh, NodeLink};
use guildhall::train::Trainer;
use guildhall_comm::Collective;
use guildhall_tensor::{Dtype, Part, Recompute};
use serde_json::json;
use workload::{ROWS, SEQ, VOCAB, on_ranks, slowest};

const TENSOR: usize = 2;
const EXPERT: usize = 4;
const RANKS: usize = TENSOR * EXPERT;
const WAYS: [(&str, bool, bool); 4] = [
    ("baseline", false, false),
    ("duplicates dropped", true, false),
    ("communication kept", false, true),
    ("both", true, true),
];

fn main() -> Result<()> {
    let flags = Flags::read();
    let slower = flags.get("--slower", 1400.0);
    let latency_us = flags.get("--latency-us", 140.0);
    let [within, between] = [("--within", 50.0), ("--between", 4.2)].map(|(name, gbytes)| flags.get(name, gbytes));
    let config = parallel::Config {
        tensor: TENSOR,
        threads: Some(1),
        link: Some(LinkCost { message_us: 0.0, latency_us, gbytes_per_s: within / slower }),
        node_link: Some(NodeLink {
            ranks_per_node: TENSOR,
            message_us: 0.0,
            latency_us,
            gbytes_per_s: between / slower,
        }),
        ..parallel::Config::of(RANKS, EXPERT)
    };
    let batches = workload::batches(WARM_UP + flags.steps(), EXPERT);
    let ranks = on_ranks(&config, |rank| train(&rank, &config, &batches))?;
    let ms = |way: usize| slowest(&ranks.iter().map(|runs| &runs[way].ms[WARM_UP..]).collect::<Vec<_>>());
    let baseline = median(&ms(0));
    for (way, (name, drops, keeps)) in WAYS.into_iter().enumerate() {
        let ms = ms(way);
        let measured = Measured {
            workload: &format!("gpt2 d256 L4 F1024 E8/2 k1 V{VOCAB} b{ROWS}x{SEQ} bf16 x{RANKS}, TED, {name}"),
            tokens: ROWS * SEQ,
            ms: &ms,
            losses: &[],
            notes: format!("emulated links of {within} and {between} GB/s over {slower}, {latency_us} us"),
        };
        let of = |sum: fn(&Run) -> u64| ranks.iter().map(|runs| sum(&runs[way])).sum::<u64>() as f64 / 1e6;
        measured.print(json!({
            "drop_duplicates": drops,
            "keep_communication": keeps,
            "speed_up": baseline / median(&ms),
            "mb_all_to_all": of(|run| run.all_to_all),
            "mb_within_nodes": of(|run| run.within),
        }));
    }
    Ok(())
}

/// One way's steps on one rank, and the bytes of its last.
#[derive(Default)]
struct Run {
    ms: Vec<f64>,
    all_to_all: u64,
    within: u64,
}

fn train(rank: &Rank, config: &parallel::Config, batches: &[Vec<StepBatches>]) -> Result<[Run; 4]> {
    let mesh = Mesh::of(rank.world.clone(), config.shape())?;
    let batches = &batches[mesh.data.rank()];
    let mut trainers = Vec::new();
    for (_, drops, keep_communication) in WAYS {
        let mut trainer = trainer(rank, &mesh, drops, config)?;
        trainer.recompute = Recompute::of(vec![Part::Block], keep_communication);
        trainers.push(trainer);
    }
    let mut runs: [Run; 4] = Default::default();
    let turns = batches.iter().enumerate().flat_map(|turn| (0..WAYS.len()).map(move |way| (turn, way)));
    for ((step, batch), way) in turns {
        // So that no rank's lateness in one step is another's in the next.
        rank.world.barrier()?;
        let before = sent(rank);
        let (ms, report) = milliseconds(|| trainers[way].step(batch, step as u64 + 1));
        report?;
        let after = sent(rank);
        runs[way].ms.push(ms);
        (runs[way].all_to_all, runs[way].within) = (after[0] - before[0], after[1] - before[1]);
    }
    Ok(runs)
}

/// Bytes so far: of all-to-alls, and within tensor groups.
fn sent(rank: &Rank) -> [u64; 2] {
    let (mut all_to_all, mut within) = (0, 0);
    for ((group, kind), traffic) in rank.ledger.snapshot() {
        match (group.as_str(), kind) {
            (_, Collective::AllToAll) => all_to_all += traffic.bytes,
            ("tensor" | "expert_tensor", _) => within += traffic.bytes,
            _ => {}
        }
    }
    [all_to_all, within]
}

fn trainer(rank: &Rank, mesh: &Mesh, drop_duplicates: bool, config: &parallel::Config) -> Result<Trainer> {
    let moe = moe::Config {
        d_expert: Some(1024),
        layers: Layers::Every(2),
        balance_weight: 0.01,
        drop_duplicates,
        ..moe::Config::of(8, 1)
    };
    let model =
        Config { family: Family::Gpt2, kv_heads: None, d_ff: Some(1024), ..Config::of(VOCAB, (256, 4, 4), SEQ) };
    let sizes = Sizes {
        model,
        moe: Some(moe),
        lora: None,
        dtype: Dtype::Bf16,
        gradients: Dtype::F32,
        seed: 0,
        frozen: Vec::new(),
    };
    let hyper = Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rate = LearningRate { peak: 1e-4, decay: Decay::Constant, warmup_steps: 0, steps: 0, end: 1.0 };
    let device: &Arc<_> = &rank.device;
    Ok(Trainer::new(device, mesh.clone(), &sizes, hyper, rate, 1.0, config.bucketing())?)
}
