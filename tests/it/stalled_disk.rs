//! [A disk](crate::disk) that hangs for a rank that writes its part of a checkpoint, and one that is slow for a rank that reads.

use std::fs;
use std::time::{Duration, Instant};

use crate::disk::Disk;
use crate::program::{Finished, PROGRAM, RECIPE, Workshop, damage, wait_until};

/// The recipe on two ranks in many small steps, with two seconds for the disk, which a busy one does not take for a file of
/// some kilobytes, and a minute for ranks.
const OPTIONS: &str = "--ranks 2 --set parallel.expert=2 --set parallel.threads=1 --set train.checkpoint_timeout_s=2 \
                       --set parallel.timeout_s=60 --set train.eval_every=0 --set train.checkpoint_every=20";

/// The program over this disk, `while_it_runs`.
fn trained(shop: &Workshop, disk: &Disk, options: &str, while_it_runs: impl FnOnce()) -> Finished {
    let disk = disk.setting();
    let run = shop.start_shell(&format!("{disk} exec {PROGRAM} train {RECIPE} {OPTIONS} {options} 2>log"));
    while_it_runs();
    let ended = run.wait();
    Finished { err: shop.read("log"), ..ended }
}

/// The run goes on without, and has the checkpoint when the disk answers again: of a rank that flushes its part, and of
/// rank 0, which gives the folder its name.
#[test]
fn a_disk_that_hangs_costs_a_checkpoint_and_not_the_run() {
    for (rank, call, manner) in [(1, "fsync", ""), (0, "rename", ""), (1, "fsync", "--set train.checkpoint_async=true")]
    {
        let shop = Workshop::new();
        shop.succeeds(&format!(
            "train {RECIPE} {OPTIONS} --set train.steps=600 --set train.checkpoint_timeout_s=300 --set run.dir=whole"
        ));
        let log = || fs::read_to_string(shop.path("log")).unwrap_or_default();
        let disk = Disk::new(&shop);
        let hanging = disk.hangs(&format!("checkpoint {rank}"), call);
        let mut ended = None;
        let finished = trained(&shop, &disk, &format!("--set train.steps=600 {manner}"), || {
            wait_until("two warnings", || log().matches("warning: no checkpoint of step ").count() >= 2);
            ended = Some(hanging.end());
        });
        assert_eq!(finished.code, Some(0), "{}", finished.err);
        let told = format!("rank {rank} could not write the checkpoint");
        let why = "its file system has not answered for 2 s (train.checkpoint_timeout_s)";
        assert!(finished.err.contains(&told) && finished.err.contains(why), "{call}: {}", finished.err);
        assert!(finished.err.contains("is written, the first since step 20"), "{call}: {}", finished.err);
        assert_eq!(damage(&shop.checkpoint("runs/tiny", 600)), None);
        assert!(shop.tensors("runs/tiny", 600) == shop.tensors("whole", 600), "{call} {manner}: other weights");
    }
}

/// A run whose last checkpoint cannot be written fails, and does not wait for the disk to end.
#[test]
fn a_disk_that_hangs_to_the_end_fails_the_run() {
    let shop = Workshop::new();
    let disk = Disk::new(&shop);
    let _hanging = disk.hangs("checkpoint 1", "fsync");
    let finished = trained(&shop, &disk, "--set train.steps=30", || {});
    finished.failed(1, &["rank 1 could not write the checkpoint", "train.checkpoint_timeout_s"]);
    assert_eq!(shop.series("runs/tiny", "step").len(), 30);
}

/// The others wait for a rank that reads its part of a checkpoint slowly, however long that takes.
#[test]
fn a_disk_that_is_slow_to_read_is_waited_for() {
    let shop = Workshop::new();
    shop.succeeds(&format!("train {RECIPE} {OPTIONS} --set train.steps=4 --set train.checkpoint_timeout_s=300"));
    let disk = Disk::new(&shop);
    disk.lags("rank 1", "pread64", 100);
    let begun = Instant::now();
    let options = "--set train.steps=6 --set parallel.timeout_s=1 --set train.checkpoint_timeout_s=5 --resume";
    let finished = trained(&shop, &disk, options, || {});
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    assert!(begun.elapsed() > Duration::from_secs(2), "it was not slow: {:?}", begun.elapsed());
    assert_eq!(shop.series("runs/tiny", "step").len(), 6);
}

/// Before the first step nothing can be put off: a run that is blocked in one operation ends, and says for whom.
#[test]
fn a_disk_that_hangs_before_the_first_step_ends_the_run() {
    let shop = Workshop::new();
    shop.succeeds(&format!("train {RECIPE} {OPTIONS} --set train.steps=4 --set train.checkpoint_timeout_s=300"));
    let why = "its file system has not answered for 2 s (train.checkpoint_timeout_s)";
    for (thread, call, options, who) in [
        // Of the recipe's threads: the program's own, which makes folders, and those of ranks, which read the checkpoint.
        ("guildhall", "mkdir", "--set train.steps=4 --set run.dir=other", "error: its"),
        ("rank 1", "pread64", "--set train.steps=6 --resume", "error: rank 1: its"),
    ] {
        let disk = Disk::new(&shop);
        let hanging = disk.hangs(thread, call);
        trained(&shop, &disk, options, || {}).failed(1, &[who, why]);
        drop(hanging.end());
    }
    assert_eq!(damage(&shop.checkpoint("runs/tiny", 4)), None);
}

/// So does a command that reads a checkpoint to use it.
#[test]
fn a_disk_that_hangs_ends_an_evaluation() {
    let shop = Workshop::new();
    shop.succeeds(&format!("train {RECIPE} {OPTIONS} --set train.steps=4 --set train.checkpoint_timeout_s=300"));
    let disk = Disk::new(&shop);
    let _hanging = disk.hangs("rank 1", "pread64");
    let setting = disk.setting();
    let run = shop.start_shell(&format!(
        "{setting} exec {PROGRAM} evaluate runs/tiny/checkpoints/latest --set train.checkpoint_timeout_s=2 2>log"
    ));
    let ended = run.wait();
    let finished = Finished { err: shop.read("log"), ..ended };
    finished.failed(1, &["error: rank 1: its file system has not answered for 2 s"]);
}
