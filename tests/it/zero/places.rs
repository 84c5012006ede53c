//! The program with state in shares and elsewhere, what it says of places where state cannot be kept, and weights that are
//! loaded without any state.

use std::fs;
use std::process::Command;

use guildhall::launch::{self, Rank};
use guildhall::train::{self, Error};
use guildhall::{checkpoint, config};
use guildhall_tensor::Cause;

use crate::errors::limited;
use crate::program::{Finished, RECIPE, RUN, Workshop, skipped, wait_until};

const FILE: &str = "--set memory.offload=\"file\"";

/// Begun at one stage with state in files, interrupted by its last step, continued at another; evaluated and sampled on
/// ranks that share and on one that cannot.
#[test]
fn the_program_shares_resumes_evaluates_and_generates() {
    let shop = Workshop::new();
    // A rate that does not depend on how long a run was meant to be.
    let with = "--set train.schedule=\"constant\" --set train.batch_tokens=128 --set train.micro_batch=4";
    shop.train(&format!("{with} --ranks 2 --set run.dir=runs/whole"));
    let shared = format!("{with} --ranks 2 --set run.dir=runs/shared");
    let begun = shop.train(&format!("{shared} --set train.steps=4 --set parallel.zero=2 {FILE} --set memory.tile=500"));
    let line = begun.err.lines().find(|line| line.starts_with("state ")).expect("a line about state");
    let words = ["in shares (ZeRO 2)", "kB in files in runs/shared/offload", "updated 500 elements at a time"];
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
    let offload = shop.summary("runs/shared")["offload"].clone();
    assert!(offload["moved_bytes"].as_u64().unwrap() > 0 && offload["host_bytes"] == 0, "{offload}");
    shop.train(&format!("{shared} --resume --set parallel.zero=3 --set memory.offload=\"host\""));
    assert!(shop.summary("runs/shared")["offload"]["host_bytes"].as_u64().unwrap() > 0);
    assert!(shop.tensors("runs/shared", 6) == shop.tensors("runs/whole", 6), "other weights or state");
    assert_eq!(shop.series("runs/shared", "eval_loss"), shop.series("runs/whole", "eval_loss"));
    assert!(shop.summary("runs/whole").get("offload").is_none());
    let said = |run: &str| shop.succeeds(&format!("generate {run}/checkpoints/latest --prompt the --tokens 5")).out;
    assert_eq!(said("runs/shared"), said("runs/whole"));
    shop.succeeds("evaluate runs/shared/checkpoints/latest --ranks 1");
    // A checkpoint whose recipe keeps state in files: who only reads weights makes no place for it.
    fs::remove_dir_all(shop.path("runs/shared/offload")).unwrap();
    for command in ["evaluate", "generate --prompt the --tokens 2"] {
        shop.succeeds(&format!("{command} runs/shared/checkpoints/step-000004"));
    }
    assert!(!shop.path("runs/shared/offload").exists());
    shop.fails("train tiny.toml --set parallel.zero=1 --ranks 1", 2, &["nobody to share with"]);
}

/// What reads weights alone holds weights alone.
#[test]
fn weights_are_loaded_without_state() {
    let shop = Workshop::new();
    shop.train("--ranks 2 --set parallel.zero=1");
    let folder = shop.checkpoint(RUN, 6);
    let config = config::load(&folder.join("config.toml"), &[], Some(1)).unwrap().config;
    let source = checkpoint::open(&folder).unwrap();
    let results = launch::run(&config.parallel, |rank: Rank| {
        let (model, _) = train::trained(&rank, &config, &source)?;
        let account = rank.device.account();
        let weights = model.sizes().dtype.bytes() as u64 * guildhall::model::count(model.sizes()).total;
        assert_eq!((account.live_total(), account.peak(Cause::Parameters)), (weights, weights));
        assert_eq!([Cause::Optimizer, Cause::Gradients].map(|cause| account.peak(cause)), [0, 0]);
        Ok::<_, Error>(())
    });
    assert!(results.iter().all(Result::is_ok));
}

// --- what cannot be kept ----------------------------------------------------------------------------------------

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    fs::write(shop.path("taken"), "a file, not a folder").unwrap();
    for (folder, reason) in [("taken", "exists"), ("taken/below", "Not a directory"), ("/proc/none/below", "No such")] {
        for ranks in [1, 2] {
            let remedies = ["name a folder that can be written", "memory.offload to \"host\""];
            let words = [&["memory.offload_dir = ", folder, reason], &remedies[..]].concat();
            for run in [RUN, "runs/fresh"] {
                let place = format!("--set memory.offload_dir={folder} --set run.dir={run}");
                shop.fails(&format!("train {RECIPE} --ranks {ranks} {FILE} {place}"), 2, &words);
            }
        }
    }
    assert!(shop.checkpoint(RUN, 2).exists(), "a run that is refused leaves an earlier one where it is");
    assert!(!shop.path("runs/fresh/metrics.jsonl").exists() && !shop.path("runs/fresh/summary.json").exists());
}

/// What a run that could not make room leaves behind: a folder in which the next one can.
fn left_nothing(shop: &Workshop, run: &str) {
    assert_eq!(fs::read_dir(shop.path(run).join("offload")).unwrap().count(), 0, "a file of state is left");
    let is_there = |name: &str| shop.path(run).join(name).exists();
    assert!(!["checkpoints", "metrics.jsonl", "summary.json"].into_iter().any(is_there), "a run that never began");
}

/// Bytes of state and gradients of each rank, of the recipe on one rank or of its shares on two.
fn state_bytes(ranks: u64) -> String {
    let toml = Workshop::new();
    let config = config::load(&toml.path(RECIPE), &[], None).unwrap().config;
    let bytes = 12 * guildhall::model::count(&train::sizes(&config)).total / ranks;
    format!("its {bytes} bytes of optimizer state")
}

const NO_CHECKPOINT: &str = "--set train.checkpoint_every=0";

#[test]
fn a_disk_without_room_for_state_is_found_out_before_the_first_step() {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    for (ranks, bytes) in [(1, state_bytes(1)), (2, state_bytes(2))] {
        let zero = if ranks == 1 { "" } else { "--set parallel.zero=1" };
        let finished = limited(&shop, 50, &format!("{FILE} {NO_CHECKPOINT} --ranks {ranks} {zero}"));
        let words =
            ["rank ", "could not make room for ", &bytes, "runs/tiny/offload: File too large", "memory.offload_dir"];
        finished.failed(2, &words);
        left_nothing(&shop, RUN);
    }
    shop.train(&format!("{FILE} --set train.steps=2"));
}

/// A disk that is really full, where the system lets a user mount one for himself.
#[test]
fn a_full_disk_is_found_out_before_the_first_step() {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    fs::create_dir(shop.path("disk")).unwrap();
    let train = format!("\"$GUILDHALL\" train {RECIPE} {FILE} --set run.dir=disk/run");
    let script = format!(
        "mount -t tmpfs -o size=160k none disk || exit 77; {train} 2>train.log; echo $? >code; cp -a disk/run left"
    );
    shop.write("script", &script);
    let finished = shop.shell("unshare --map-root-user --mount sh script");
    if !shop.path("code").exists() {
        return skipped("no user may mount a disk for himself here");
    }
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let code = shop.read("code").trim().parse().ok();
    let first = Finished { code, out: String::new(), err: shop.read("train.log") };
    first.failed(2, &["rank 0 could not make room for ", &state_bytes(1), "disk/run/offload: No space left on device"]);
    left_nothing(&shop, "left");
}

/// A place that fails while training: files of the running program may no longer be as large as its state is.
#[test]
fn state_that_can_no_longer_be_written_fails_the_run() {
    if Command::new("prlimit").arg("--version").output().is_err() {
        return skipped("there is no prlimit");
    }
    let shop = Workshop::new();
    let options = format!("{FILE} {NO_CHECKPOINT} --set train.steps=100000 --set train.eval_every=0 --ranks 2");
    let mut running = shop.start_shell(&format!("trap '' XFSZ; exec \"$GUILDHALL\" train {RECIPE} {options}"));
    wait_until("a step", || !running.is_running() || !shop.metrics(RUN).is_empty());
    let limited = Command::new("prlimit").args(["--fsize=100000", "--pid", &running.pid()]).status().unwrap();
    assert!(limited.success());
    let words = ["could not move ", &state_bytes(1), "runs/tiny/offload: File too large", "no checkpoint had been"];
    running.wait().failed(1, &words);
    assert_eq!(fs::read_dir(shop.path(RUN).join("offload")).unwrap().count(), 0, "a file of state is left");
}
