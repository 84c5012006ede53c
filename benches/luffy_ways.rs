//! Measures training steps of plain expert parallelism, experts that travel (EXT), shadowing (HYT), Luffy, and each of
//! Luffy's techniques alone, over links that charge for messages: seconds a step, those spent in collectives, and the
//! others.
//!
//! ```text
//! cargo bench --bench luffy_ways -- [--ranks 2] [--gbytes-per-s 0.02] [--latency-us 50] [--steps 30] [--rounds 3]
//! ```
//!
//! The GPT-2-like model of `benches/condensation/base.toml`, one expert a rank as in the paper. Ways take turns; each trains
//! anew, and the second half of its steps counts, since similarities and routers are not those of a trained model at first.
//! The links are an emulation: these are not times of a network.

#![allow(clippy::print_stdout)]

#[allow(dead_code, reason = "not every benchmark uses all of it")]
mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use common::{Flags, median};
use serde_json::{Value, json};

const WAYS: [(&str, &[&str]); 7] = [
    ("Vanilla", &[]),
    ("EXT", &["parallel.exchange=experts"]),
    ("HYT", &["moe.shadowing=auto"]),
    ("Luffy", &["moe.condense=static", "parallel.migrate=auto"]),
    ("condensation alone", &["moe.condense=static"]),
    ("migration alone", &["parallel.migrate=auto"]),
    ("migration forced", &["parallel.migrate=force"]),
];

/// Of the counted steps: each one's seconds, and those in collectives, the mean over ranks.
#[derive(Default)]
struct Steps {
    seconds: Vec<f64>,
    waiting: Vec<f64>,
    /// Of the last run.
    summary: Value,
}

fn main() -> Result<()> {
    let flags = Flags::read();
    let (ranks, steps): (usize, usize) = (flags.get("--ranks", 2), flags.get("--steps", 30));
    let link = (flags.get("--latency-us", 50.0), flags.get("--gbytes-per-s", 0.02));
    let mut ways: Vec<Steps> = WAYS.iter().map(|_| Steps::default()).collect();
    for _ in 0..flags.get("--rounds", 3) {
        for ((_, set), way) in WAYS.iter().zip(&mut ways) {
            train(way, set, (ranks, steps), link)?;
        }
    }
    let plain = median(&ways[0].seconds);
    for ((name, _), Steps { seconds, waiting, summary }) in WAYS.iter().zip(&ways) {
        let computing: Vec<f64> = seconds.iter().zip(waiting).map(|(all, waits)| all - waits).collect();
        let milliseconds = |values: &[f64]| (median(values) * 1e3).round();
        let line = json!({
            "way": name,
            "ranks": ranks,
            "gbytes_per_s": link.1,
            "ms_per_step": milliseconds(seconds),
            "ms_in_collectives": milliseconds(waiting),
            "ms_computing": milliseconds(&computing),
            "times_vanilla": (plain / median(seconds) * 100.0).round() / 100.0,
            "uncomputed_share": summary["condensed"]["uncomputed_share"],
            "migrated": summary["migrated"],
            "shadowed": summary["shadowed"],
        });
        println!("{line}");
    }
    Ok(())
}

fn train(way: &mut Steps, set: &[&str], (ranks, steps): (usize, usize), link: (f64, f64)) -> Result<()> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("luffy_ways");
    let _ = fs::remove_dir_all(folder.join("run"));
    let own = [
        format!("run.dir={}", folder.join("run").display()),
        format!("data.cache={}", folder.join("cache").display()),
        format!("parallel.expert={ranks}"),
        format!("moe.experts={ranks}"),
        format!("train.steps={steps}"),
        format!("parallel.link={{ latency_us = {:?}, gbytes_per_s = {:?} }}", link.0, link.1),
        "moe.d_expert=384".to_owned(),
        "train.warmup_steps=5".to_owned(),
        "train.eval_every=0".to_owned(),
    ];
    let mut program = Command::new(env!("CARGO_BIN_EXE_guildhall"));
    program.current_dir(env!("CARGO_MANIFEST_DIR")).args(["train", "benches/condensation/base.toml", "--ranks"]);
    program.arg(ranks.to_string());
    let sets = own.iter().map(String::as_str).chain(set.iter().copied());
    sets.for_each(|set| {
        program.args(["--set", set]);
    });
    let output = program.output()?;
    ensure!(output.status.success(), "{program:?}: {}", String::from_utf8_lossy(&output.stderr));
    let metrics = fs::read_to_string(folder.join("run/metrics.jsonl"))?;
    let lines = metrics.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    for pair in lines.windows(2).skip(steps / 2) {
        let seconds = |line: &Value| line["seconds"].as_f64().context("a step without its time");
        let waits = pair[1]["waiting_s"].as_array().context("a step without waits")?;
        let waited: f64 = waits.iter().filter_map(Value::as_f64).sum();
        way.seconds.push(seconds(&pair[1])? - seconds(&pair[0])?);
        way.waiting.push(waited / ranks as f64);
    }
    way.summary = serde_json::from_str(&fs::read_to_string(folder.join("run/summary.json"))?)?;
    Ok(())
}
