//! Times whole training steps of the two decoders that `peers/pytorch/{gpt,decoder}.py` train.
//!
//! ```text
//! cargo bench --bench step -- --workload gpt
//! cargo bench --bench step -- --workload moe --ranks 1|2
//! cargo bench --bench step -- --workload gpt|moe --tape-overhead
//! ```
//!
//! Built with `--features mpi`, its ranks may be processes: `mpirun -n 2 target/release/deps/step-* --ranks 2`.
//!
//! `--threads N` are those of the whole run (2), `--steps N` those timed (9); `--smart` exchanges rows in the steps of the
//! smart schedule, `--dtype bf16` stores weights and activations so, `--bucket-kib N` sums small gradients in messages of so
//! many KiB, `--shapes 16x128,1x2048` takes steps of so many rows of so many tokens, one shape after the other. `--backend cuda`
//! computes on a GPU; `--width`, `--inner`, `--layers`, `--heads`, `--vocab`, `--experts` and `--k` make the model another, and
//! `--capacity F` drops routes beyond F times an even share. Two ranks share the experts (expert parallel) and the rows. A
//! step's time is its slowest rank's, the loss that of the whole batch with the weighted balance loss, which is what the peers
//! report.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/workload.rs"]
mod workload;

use anyhow::{Result, anyhow};
use common::{Flags, Measured, WARM_UP, dtype_name, median, milliseconds};
use guildhall::commands::give_up;
use guildhall::data::StepBatches;
use guildhall::launch::{Joined, Rank};
use guildhall::model::{Context, Sizes, count};
use guildhall::moe::{ScheduleKind, StepFacts};
use guildhall::parallel::{self, Parameters};
use guildhall::train::{Error, Trainer};
use guildhall_tensor::{Device, Dtype, Tape, Tensor};
use serde_json::json;
use workload::{BALANCE_WEIGHT, ROWS, SEQ, batches, batches_of, gpt, mixtral, on_ranks, slowest};

fn main() -> Result<()> {
    let flags = Flags::read();
    let workload: String = flags.get("--workload", "moe".to_owned());
    let mut sizes = match workload.as_str() {
        "gpt" => gpt(),
        "moe" => mixtral(),
        other => return Err(anyhow!("--workload is gpt or moe, not {other:?}")),
    };
    let name = sized(&mut sizes, &flags);
    let shapes: String = flags.get("--shapes", format!("{ROWS}x{SEQ}"));
    if let Some(moe) = sizes.moe.as_mut().filter(|_| flags.has("--smart")) {
        moe.schedule = ScheduleKind::Smart;
    }
    let ranks: usize = flags.get("--ranks", 1);
    let threads = (flags.get("--threads", 2) / ranks).max(1);
    let mut mesh =
        parallel::Config { threads: Some(threads), backend: flags.backend(), ..parallel::Config::of(ranks, ranks) };
    mesh.bucket_bytes = flags.get("--bucket-kib", mesh.bucket_bytes >> 10) << 10;
    (sizes.dtype, sizes.gradients) = (flags.dtype(), Dtype::F32);
    if flags.has("--tape-overhead") {
        let name = format!("{name} b{ROWS}x{SEQ} {} x{ranks}", dtype_name(sizes.dtype));
        return tape_overhead(&mesh, &sizes, &batches(WARM_UP + flags.steps(), ranks), &name);
    }
    let joined = Joined::of(&mesh, give_up).map_err(|refusal| anyhow!("{}", refusal.text))?;
    for shape in shapes.split(',') {
        let (rows, seq) = shape.split_once('x').ok_or_else(|| anyhow!("--shapes {shape}: write 16x128"))?;
        let (rows, seq) = (rows.parse()?, seq.parse()?);
        sizes.model.seq = seq;
        let batches = batches_of((rows, seq), WARM_UP + flags.steps(), ranks);
        let runs = joined.process.run(&mesh, |rank| train(&rank, &sizes, &mesh, &batches[rank.world.rank()]));
        let runs = runs.map_err(|failure| anyhow!("{failure}"))?;
        if joined.process.leads() {
            let name = format!("{name} b{shape} {} x{ranks}", dtype_name(sizes.dtype));
            print(&name, rows * seq, &sizes, (ranks, threads), &runs);
        }
    }
    joined.leave(give_up).map_err(|error| anyhow!(error))
}

/// Takes the sizes that flags give. The model's name.
fn sized(sizes: &mut Sizes, flags: &Flags) -> String {
    let model = &mut sizes.model;
    let inner = flags.get("--inner", 1024);
    model.d_ff = Some(inner);
    for (size, flag) in [
        (&mut model.d_model, "--width"),
        (&mut model.layers, "--layers"),
        (&mut model.heads, "--heads"),
        (&mut model.vocab, "--vocab"),
    ] {
        *size = flags.get(flag, *size);
    }
    let (width, layers, vocab) = (model.d_model, model.layers, model.vocab);
    let Some(moe) = &mut sizes.moe else { return format!("gpt d{width} L{layers} F{inner} V{vocab}") };
    let (experts, k) = (flags.get("--experts", 8), flags.get("--k", moe.top_k));
    (moe.experts, moe.top_k, moe.d_expert) = (experts.into(), k, Some(inner));
    moe.capacity_factor = Some(flags.get("--capacity", 0.0)).filter(|factor| *factor > 0.0);
    let capacity = moe.capacity_factor.map_or(String::new(), |factor| format!(" c{factor}"));
    format!("moe d{width} L{layers} F{inner} E{experts} k{k} V{vocab}{capacity}")
}

fn print(name: &str, tokens: usize, sizes: &Sizes, (ranks, threads): (usize, usize), runs: &[Run]) {
    let parameters = count(sizes).total as f64 / 1e6;
    let kept = match sizes.moe.as_ref().map(|moe| moe.capacity_factor) {
        None => String::new(),
        Some(None) => ", nothing dropped".to_owned(),
        Some(Some(factor)) => format!(", capacity factor {factor}"),
    };
    let rotary = if sizes.blueprint().is_rotary() { ", rotary (peers: learned positions)" } else { "" };
    let notes = format!("{parameters:.1}M params, {ranks} x {threads} threads{kept}{rotary}");
    let ms = times(runs);
    let measured = Measured { workload: name, tokens, ms: &ms[WARM_UP..], losses: &runs[0].losses, notes };
    let mib = |of: fn(&Run) -> u64| runs.iter().map(of).sum::<u64>() >> 20;
    measured.print(json!({ "live_mb": mib(|run| run.live), "free_mb": mib(|run| run.free) }));
}

/// One rank's steps.
struct Run {
    ms: Vec<f64>,
    losses: Vec<f64>,
    /// The most bytes that tensors held at once, and the bytes that waited for reuse at the end.
    live: u64,
    free: u64,
}

fn trainer(rank: &Rank, sizes: &Sizes, mesh: &parallel::Config) -> Result<Trainer, Error> {
    workload::trainer(rank, sizes, rank.world.size(), mesh.bucketing())
}

fn train(rank: &Rank, sizes: &Sizes, mesh: &parallel::Config, batches: &[StepBatches]) -> Result<Run, Error> {
    let mut trainer = trainer(rank, sizes, mesh)?;
    let mut run = Run { ms: Vec::new(), losses: Vec::new(), live: 0, free: 0 };
    for (step, batch) in (1..).zip(batches) {
        let (ms, report) = milliseconds(|| {
            let report = trainer.step(batch, step);
            rank.device.wait();
            report
        });
        let report = report?;
        run.ms.push(ms);
        run.losses.push(report.loss + f64::from(BALANCE_WEIGHT) * report.balance);
    }
    (run.live, run.free) = (rank.device.account().peak_total(), rank.device.free_bytes());
    Ok(run)
}

fn times(runs: &[Run]) -> Vec<f64> {
    slowest(&runs.iter().map(|run| run.ms.as_slice()).collect::<Vec<_>>())
}

/// What the tape costs: ops of a step, times what one recorded op costs forward and backward when its kernel has
/// nothing to do, against the step's time. A parameter's place on the tape is counted as an op, too.
fn tape_overhead(mesh: &parallel::Config, sizes: &Sizes, batches: &[Vec<StepBatches>], name: &str) -> Result<()> {
    let of_rank = |rank: Rank| {
        let batches = &batches[rank.world.rank()];
        let run = train(&rank, sizes, mesh, batches)?;
        let ops = ops_of_step(&mut trainer(&rank, sizes, mesh)?, &batches[0])?;
        let ns_per_op = (0..9).map(|_| ns_per_op(&rank.device)).collect::<Vec<_>>();
        Ok((run, ops, median(&ns_per_op)))
    };
    let (runs, costs): (Vec<_>, Vec<_>) =
        on_ranks(mesh, of_rank)?.into_iter().map(|(run, ops, ns)| (run, (ops, ns))).unzip();
    let (ms, (ops, ns)) = (times(&runs), costs[0]);
    let percent = ops as f64 * ns / 1e4 / median(&ms[WARM_UP..]);
    let measured = Measured {
        workload: &format!("tape overhead, {name}"),
        tokens: ROWS * SEQ,
        ms: &ms[WARM_UP..],
        losses: &runs[0].losses,
        notes: format!("{ops} ops a step at {ns:.0} ns forward and backward: {percent:.3} % of a step"),
    };
    measured.print(json!({ "tape_ops": ops, "ns_per_op": ns, "tape_percent": percent }));
    Ok(())
}

fn ops_of_step(trainer: &mut Trainer, batches: &StepBatches) -> Result<u64> {
    let mut weights = 0;
    trainer.model.visit(&mut |_| weights += 1);
    let valid_tokens = batches.valid() as u64;
    let context = Context::of_training(&trainer.mesh, StepFacts::of_training(0, 1), valid_tokens);
    let mut ops = 0;
    for batch in &batches.micro {
        let tape = Tape::new(&trainer.device);
        let forward = trainer.model.forward(&tape, batch, &context)?;
        ops += tape.ops() + weights;
        tape.try_backward(&forward.loss).map_err(|failure| anyhow!("{failure}"))?;
    }
    Ok(ops)
}

fn ns_per_op(device: &std::sync::Arc<Device>) -> f64 {
    const OPS: usize = 20_000;
    let (ms, ()) = milliseconds(|| {
        let tape = Tape::new(device);
        let first = tape.leaf(Tensor::zeros(device, &[1]));
        let last = (0..OPS).fold(first, |x, _| x.scale(1.0));
        tape.backward(&last);
    });
    ms * 1e6 / OPS as f64
}
