//! What `guildhall plan` says of recipes against what their first steps take: time on this machine, and the fullest
//! rank's memory, with the imbalance that was measured and with the one that is taken before any is.
//!
//! ```text
//! cargo bench --bench plan -- --steps 30 [--only NAME]
//! ```
//!
//! A line of JSON each: recipes of the repository as they are, and with other seeds, widths, ranks, and several
//! micro-batches. The corpus is prepared once, in `target/tmp`.

#![allow(clippy::print_stdout)]

#[allow(dead_code, reason = "not every benchmark uses all of it")]
mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use common::{Flags, WARM_UP, median};
use serde_json::{Value, json};

/// A name, the recipe, its ranks, and what is set.
type Case = (&'static str, &'static str, usize, &'static [&'static str]);

const CASES: [Case; 12] = [
    ("quickstart", "quickstart", 2, &[]),
    ("gpt2", "gpt2", 2, &[]),
    ("mixtral", "mixtral", 2, &[]),
    ("bert", "bert", 2, &[]),
    ("transformer_xl", "transformer_xl", 2, &[]),
    ("compare_experts", "compare_experts", 2, &[]),
    ("quickstart, 4 ranks", "quickstart", 4, &["parallel.expert=4"]),
    ("quickstart, 4 micro-batches", "quickstart", 2, &["train.micro_batch=4"]),
    ("gpt2, 4 ranks, 4 micro-batches", "gpt2", 4, &["parallel.expert=4", "train.micro_batch=4"]),
    ("wide experts", "quickstart", 2, &["model.d_model=128", "moe.d_expert=512", "train.seed=7"]),
    ("few experts", "gpt2", 4, &["parallel.expert=4", "moe.experts=4", "train.seed=11"]),
    ("no balance loss", "mixtral", 2, &["train.lr=5e-3", "moe.balance_weight=0.0", "train.seed=23"]),
];

fn main() -> Result<()> {
    let flags = Flags::read();
    let (steps, only) = (flags.get("--steps", 30), flags.get("--only", String::new()));
    for case in CASES.iter().filter(|case| case.0.contains(&only)) {
        println!("{}", compared(case, steps)?);
    }
    Ok(())
}

fn compared((name, recipe, ranks, set): &Case, steps: usize) -> Result<Value> {
    let run = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plan");
    let recipe = format!("{}/recipes/{recipe}.toml", env!("CARGO_MANIFEST_DIR"));
    let short = format!("train.steps={steps}");
    let warm_up = format!("train.warmup_steps={}", steps / 2);
    let sets = set.iter().copied().chain([short.as_str(), &warm_up]);
    let mut common = vec![recipe, "--ranks".to_owned(), ranks.to_string()];
    sets.for_each(|set| common.extend(["--set".to_owned(), set.to_owned()]));
    let plan = |more: &[&str]| -> Result<Value> { Ok(serde_json::from_str(&program("plan", &common, more)?)?) };
    let planned = plan(&["--json"])?;

    let _ = fs::remove_dir_all(run.join("run"));
    let places =
        [format!("run.dir={}", run.join("run").display()), format!("data.cache={}", run.join("cache").display())];
    let quiet = ["--set", "train.eval_every=0", "--set", "train.checkpoint_every=0"];
    program("train", &common, &[&quiet[..], &["--set", &places[0], "--set", &places[1]]].concat())?;
    let metrics = fs::read_to_string(run.join("run/metrics.jsonl"))?;
    let seconds: Vec<f64> = metrics.lines().map(seconds_of).collect::<Result<_>>()?;
    let taken: Vec<f64> = seconds.windows(2).map(|pair| pair[1] - pair[0]).skip(WARM_UP).collect();
    let summary: Value = serde_json::from_str(&fs::read_to_string(run.join("run/summary.json"))?)?;

    let [mean, most] = ["mean", "most"].map(|which| summary["imbalance"][which].as_f64().unwrap_or(1.0));
    let up = |times: f64| (times * 100.0).ceil() / 100.0;
    let measured = plan(&["--json", "--imbalance", &format!("{},{}", up(mean), up(most).min(*ranks as f64))])?;
    let held = summary["peak_bytes_by_rank"].as_array().context("ranks")?.iter();
    let held = held.filter_map(|rank| rank["total"].as_f64()).fold(0.0, f64::max);
    let of_held = |plan: &Value, key: &str| (plan[key].as_f64().unwrap_or(0.0) / held * 1e3).round() / 1e3;
    let (said, took) = (planned["seconds_total"].as_f64().unwrap_or(0.0), median(&taken));
    Ok(json!({
        "workload": name,
        "ms_planned": said * 1e3,
        "ms_per_step": took * 1e3,
        "time_planned_of_measured": (said / took * 100.0).round() / 100.0,
        "imbalance": [up(mean), up(most)],
        "accounted_mb": held / 1e6,
        "even_of_accounted": of_held(&planned, "bytes_total"),
        "skewed_of_accounted": of_held(&planned, "bytes_total_skewed"),
        "measured_of_accounted": of_held(&measured, "bytes_total_skewed"),
    }))
}

fn seconds_of(line: &str) -> Result<f64> {
    serde_json::from_str::<Value>(line)?["seconds"].as_f64().context("a step without its time")
}

/// What the program says on standard output.
fn program(command: &str, common: &[String], more: &[&str]) -> Result<String> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_guildhall"));
    program.current_dir(env!("CARGO_MANIFEST_DIR")).arg(command).args(common).args(more);
    let output = program.output()?;
    ensure!(output.status.success(), "{program:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
