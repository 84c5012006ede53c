//! Times a training step whose gradients travel after backward, and one whose gradients travel during it, over links
//! that charge for messages.
//!
//! ```text
//! cargo bench --bench overlap -- [--ranks 2] [--expert 1] [--latency-us 20] [--gbytes-per-s B] [--steps 9]
//! ```
//!
//! The Mixtral-like decoder of the `step` benchmark; steps of both kinds take turns. Without `--gbytes-per-s` the links
//! are as slow as is interesting: a few steps over free links are timed first, and what a step sends then takes half as
//! long as such a step, which is about the time of its backward. The links are an emulation: these are not times of a
//! network.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/workload.rs"]
mod workload;

use anyhow::{Result, ensure};
use common::{Flags, Measured, WARM_UP, median, milliseconds};
use guildhall::data::StepBatches;
use guildhall::launch::Rank;
use guildhall::parallel::{self, Bucketing, LinkCost, SyncPlan};
use serde_json::json;
use workload::{BALANCE_WEIGHT, ROWS, SEQ, batches, mixtral, on_ranks, slowest};

/// Of a step over free links, what messages are to take.
const SHARE: f64 = 0.5;

fn main() -> Result<()> {
    let flags = Flags::read();
    let (ranks, expert): (usize, usize) = (flags.get("--ranks", 2), flags.get("--expert", 1));
    ensure!(ranks > 1 && ROWS.is_multiple_of(ranks), "--ranks is more than 1 and divides {ROWS}");
    let threads = (flags.get("--threads", 2) / ranks).max(1);
    let free = parallel::Config { threads: Some(threads), ..parallel::Config::of(ranks, expert) };
    let batches = batches(2 * (WARM_UP + flags.steps()), ranks);

    let [_, without] = timed(&free, &batches, WARM_UP)?;
    let latency_us = flags.get("--latency-us", 20.0);
    let gbytes_per_s = flags.get("--gbytes-per-s", without.bytes_per_step / (SHARE * median(&without.ms) * 1e6));
    let charged = parallel::Config { link: Some(LinkCost { message_us: 0.0, latency_us, gbytes_per_s }), ..free };
    for (run, overlap) in timed(&charged, &batches, flags.steps())?.iter().zip(["off", "on"]) {
        let measured = Measured {
            workload: &format!("moe d256 L4 F1024 E8 k2 V4096 b16x128 f32 x{ranks}, overlap {overlap}"),
            tokens: ROWS * SEQ,
            ms: &run.ms,
            losses: &run.losses,
            notes: format!("emulated link of {latency_us} us and {gbytes_per_s:.3} GB/s, {ranks} x {threads} threads"),
        };
        measured.print(json!({
            "overlap": overlap == "on",
            "ms_over_free_links": median(&without.ms),
            "mb_per_step": run.bytes_per_step / 1e6,
        }));
    }
    Ok(())
}

/// The timed steps of one kind.
#[derive(Default)]
struct Run {
    ms: Vec<f64>,
    losses: Vec<f64>,
    /// What a rank sends.
    bytes_per_step: f64,
}

/// `steps` steps without overlap and as many with it, in turns, after a warm-up of both.
fn timed(config: &parallel::Config, batches: &[Vec<StepBatches>], steps: usize) -> Result<[Run; 2]> {
    let ranks = on_ranks(config, |rank| train(&rank, config, &batches[rank.world.rank()][..2 * (WARM_UP + steps)]))?;
    Ok([0, 1].map(|kind| {
        let ms = slowest(&ranks.iter().map(|runs| &runs[kind].ms[WARM_UP..]).collect::<Vec<_>>());
        Run { ms, losses: ranks[0][kind].losses.clone(), bytes_per_step: ranks[0][kind].bytes_per_step }
    }))
}

fn train(rank: &Rank, config: &parallel::Config, batches: &[StepBatches]) -> Result<[Run; 2]> {
    let mut trainer = workload::trainer(rank, &mixtral(), config.expert.largest(), config.bucketing())?;
    let bucketing = |overlap| Bucketing { overlap, ..config.bucketing() };
    let plans = [false, true].map(|overlap| SyncPlan::new(&mut trainer.model, bucketing(overlap)));
    let sent = || rank.ledger.snapshot().values().map(|traffic| traffic.bytes).sum::<u64>();
    let (mut runs, before) = ([Run::default(), Run::default()], sent());
    for (step, batch) in batches.iter().enumerate() {
        let run = &mut runs[step % 2];
        trainer.sync = plans[step % 2].clone();
        // So that no rank's lateness in one step is another's in the next.
        rank.world.barrier()?;
        let (ms, report) = milliseconds(|| trainer.step(batch, step as u64 + 1));
        let report = report?;
        run.ms.push(ms);
        run.losses.push(report.loss + f64::from(BALANCE_WEIGHT) * report.balance);
    }
    let bytes_per_step = (sent() - before) as f64 / batches.len() as f64;
    runs.iter_mut().for_each(|run| run.bytes_per_step = bytes_per_step);
    Ok(runs)
}
