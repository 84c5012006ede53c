//! A rank whose disk takes nothing, hangs or is slow while the others' do not.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use super::refusals::says;
use super::{LONG, collected, helping_nobody, launched, processes, start_each, without_help};
use crate::disk::Disk;
use crate::program::{PROGRAM, RECIPE, Running, Workshop, damage, skipped, wait_until};

/// From now on no file that a process writes may have more bytes than these.
fn limit_files(pid: &str, bytes: Option<u64>) {
    let pid = Pid::from_raw(pid.parse().expect("a number"));
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).expect("one's own process");
}

/// Two ranks, of which rank 1 cannot write from its first checkpoint on, until rank 0 has said so.
fn obstructed(shop: &Workshop, run: &str, options: &str) -> Running {
    // Whose file grows too large is to be told, and not to be ended by a signal.
    let script = format!("trap \"\" XFSZ; exec {PROGRAM} train {RECIPE} {options}");
    let running = start_each(&helping_nobody(shop), shop, 2, &script);
    wait_until("a checkpoint", || shop.checkpoint(run, 100).exists());
    limit_files(&processes(run)[1], Some(1024));
    wait_until("a warning", || shop.read("err.0").contains("warning: no checkpoint of step "));
    running
}

/// The run goes on without checkpoints, and tries again; it has failed only if there is none at its end, and goes on from
/// the last there is.
#[test]
fn a_rank_that_cannot_write_ends_no_run() {
    let shop = Workshop::new();
    let long = LONG.replace("4000", "800");
    shop.succeeds(&format!("train {RECIPE} {long} --ranks 2 --set run.dir=whole"));
    let mut ends = vec![true, false];
    if without_help(&shop).is_none() {
        // One that ends the others leaves no time for all to say why.
        ends.truncate(1);
        skipped("the launcher ends the others when one has failed: no run that stays without checkpoints");
    }
    for manner in ["", "--set train.checkpoint_async=true"] {
        for &is_mended in &ends {
            let run = format!("run{}{is_mended}", manner.len());
            let options = format!("{long} {manner} --set run.dir={}", shop.path(&run).display());
            let running = obstructed(&shop, &run, &options);
            if is_mended {
                limit_files(&processes(&run)[1], None);
            }
            let ended = collected(&shop, 2, running);
            let log = &ended[0].err;
            let mut told = vec!["File too large", "training goes on, and tries again after step "];
            told.extend(is_mended.then_some("is written, the first since step "));
            told.iter().for_each(|words| assert!(log.contains(words), "{run}: no {words}: {log}"));
            let warning = log.lines().find(|line| line.starts_with("warning: no checkpoint of step "));
            assert!(warning.is_some_and(|line| line.contains("rank 1 could not write the checkpoint")), "{run}: {log}");
            if is_mended {
                assert!(ended.iter().all(|rank| rank.code == Some(0)) && ended[1].err.is_empty(), "{run}: {ended:?}");
            } else {
                ended.iter().enumerate().for_each(|(rank, ended)| says(rank, ended, 1, "could not write"));
                assert!(log.contains("--resume continues from"), "{run}: {log}");
                assert!(!shop.checkpoint(&run, 800).exists());
                let resumed = launched(&shop, 2, &format!("--resume {options}"));
                assert_eq!(resumed.code, Some(0), "{run}: {}", resumed.err);
            }
            assert_eq!(damage(&shop.checkpoint(&run, 800)), None, "{run}");
            assert!(shop.tensors(&run, 800) == shop.tensors("whole", 800), "{run}: other weights");
        }
    }
}

/// Two ranks in many small steps, with two seconds for a disk.
const SHORT: &str = "--set parallel.expert=2 --set parallel.threads=1 --set train.eval_every=0 --set train.checkpoint_every=20 \
                     --set train.checkpoint_timeout_s=2 --set parallel.timeout_s=60";

/// Begins two ranks that have this disk.
fn over(shop: &Workshop, disk: &Disk, options: &str) -> Running {
    let script = format!("{} exec {PROGRAM} train {RECIPE} {SHORT} {options}", disk.setting());
    start_each(&helping_nobody(shop), shop, 2, &script)
}

/// Of a rank that flushes its part of a checkpoint, and of the one that gives the folder its name: all go on without.
#[test]
fn a_disk_that_hangs_costs_processes_a_checkpoint_and_not_the_run() {
    for (rank, call, manner) in [(1, "fsync", ""), (0, "rename", "--set train.checkpoint_async=true")] {
        let shop = Workshop::new();
        let options = format!("--set train.steps=600 {manner}");
        shop.succeeds(&format!("train {RECIPE} {SHORT} {options} --ranks 2 --set run.dir=whole"));
        let disk = Disk::new(&shop);
        let hanging = disk.hangs(&format!("checkpoint {rank}"), call);
        let running = over(&shop, &disk, &options);
        let log = || fs::read_to_string(shop.path("err.0")).unwrap_or_default();
        wait_until("two warnings", || log().matches("warning: no checkpoint of step ").count() >= 2);
        let _ended = hanging.end();
        let ended = collected(&shop, 2, running);
        assert!(ended.iter().all(|rank| rank.code == Some(0)) && ended[1].err.is_empty(), "{call}: {ended:?}");
        let told = [
            &format!("rank {rank} could not write the checkpoint"),
            "its file system has not answered for 2 s (train.checkpoint_timeout_s)",
            "is written, the first since step 20",
        ];
        told.iter().for_each(|words| assert!(ended[0].err.contains(*words), "{call}: no {words}: {}", ended[0].err));
        assert_eq!(damage(&shop.checkpoint("runs/tiny", 600)), None, "{call}");
        assert!(shop.tensors("runs/tiny", 600) == shop.tensors("whole", 600), "{call} {manner}: other weights");
    }
}

/// Before the first step, and while a checkpoint is read, the run cannot go on without the rank: the others end, and say why.
#[test]
fn a_rank_whose_disk_hangs_before_the_first_step_is_named() {
    let shop = Workshop::new();
    if without_help(&shop).is_none() {
        return skipped("the launcher ends a rank that hangs, when another has failed");
    }
    shop.succeeds(&format!("train {RECIPE} {SHORT} --set train.steps=4 --ranks 2"));
    // Of rank 1 alone, since the main threads of both make the same calls.
    for (thread, call, options) in [("rank 1", "pread64", "--resume"), ("guildhall", "mkdir", "--set run.dir=new")] {
        let disk = Disk::new(&shop);
        let hanging = disk.hangs(thread, call);
        let script = format!(
            "if [ $RANK = 1 ]; then export {}; fi; exec {PROGRAM} train {RECIPE} {SHORT} --set train.steps=6 \
             --set parallel.timeout_s=5 {options}",
            disk.setting()
        );
        let running = start_each(&helping_nobody(&shop), &shop, 2, &script);
        wait_until("an end", || shop.path("code.0").exists());
        // Rank 1 cannot end before.
        let _ended = hanging.end();
        let ended = collected(&shop, 2, running);
        says(0, &ended[0], 1, "rank 1 ");
        assert!(
            ended[0].err.contains("its file system has not answered for ") && ended[1].code == Some(1),
            "{call}: {ended:?}"
        );
    }
}

/// All ranks meet while one writes for longer than they wait for one another.
#[test]
fn a_disk_that_is_slow_times_no_process_out() {
    let shop = Workshop::new();
    let options = "--set train.steps=40 --set train.checkpoint_every=40 --set parallel.timeout_s=3 --set train.checkpoint_timeout_s=60";
    shop.succeeds(&format!("train {RECIPE} {SHORT} {options} --ranks 2 --set run.dir=whole"));
    let disk = Disk::new(&shop);
    disk.lags("checkpoint 1", "fsync", 5000);
    let begun = Instant::now();
    let ended = collected(&shop, 2, over(&shop, &disk, options));
    assert!(ended.iter().all(|rank| rank.code == Some(0)) && ended[1].err.is_empty(), "{ended:?}");
    assert!(begun.elapsed() > Duration::from_secs(5), "it was not slow: {:?}", begun.elapsed());
    let told = "warning: all ranks have waited 3 s for rank 1 to write its part of the checkpoint of step ";
    assert!(ended[0].err.contains(told), "{}", ended[0].err);
    assert!(shop.tensors("runs/tiny", 40) == shop.tensors("whole", 40), "other weights");
}
