//! A rank whose disk takes nothing while that of rank 0 does.

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use super::refusals::says;
use super::{LONG, collected, helping_nobody, launched, processes, start_each, without_help};
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
    let long = LONG.replace("4000", "400");
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
                assert!(!shop.checkpoint(&run, 400).exists());
                let resumed = launched(&shop, 2, &format!("--resume {options}"));
                assert_eq!(resumed.code, Some(0), "{run}: {}", resumed.err);
            }
            assert_eq!(damage(&shop.checkpoint(&run, 400)), None, "{run}");
            assert!(shop.tensors(&run, 400) == shop.tensors("whole", 400), "{run}: other weights");
        }
    }
}
