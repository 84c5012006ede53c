//! A disk that stops answering, as a network file system does whose server is gone: for the thread that writes rank 1's part
//! of checkpoints, calls to flush a file do not return while a file `hangs` is there. And one from which rank 1 reads slowly
//! while a file `lags` is there. A library that is loaded before the C library does this, so that it needs neither root nor
//! such a file system.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::program::{Finished, PROGRAM, RECIPE, Workshop, damage, wait_until};

const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static int holds(const char *name, const char *file) {
    char thread[16];
    prctl(PR_GET_NAME, thread);
    return strcmp(thread, name) == 0 && access(file, F_OK) == 0;
}

int fsync(int file) {
    while (holds("checkpoint 1", "hangs"))
        usleep(1000);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

ssize_t pread64(int file, void *to, size_t len, off64_t at) {
    if (holds("rank 1", "lags"))
        usleep(100000);
    return ((ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64"))(file, to, len, at);
}
"#;

/// The recipe on two ranks in many small steps, with two seconds for the disk, which a busy one does not take for a file of
/// some kilobytes, and a minute for ranks.
const OPTIONS: &str = "--ranks 2 --set parallel.expert=2 --set train.checkpoint_timeout_s=2 --set parallel.timeout_s=60 \
                       --set train.eval_every=0 --set train.checkpoint_every=20";

/// The program over such a disk, which `fails` from the start and is mended as `while_it_runs` says.
fn trained(shop: &Workshop, fails: &str, options: &str, while_it_runs: impl FnOnce()) -> Finished {
    shop.write("disk.c", LIBRARY);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([shop.path("disk.so"), shop.path("disk.c")]).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    shop.write(fails, "");
    let library = format!("LD_PRELOAD={}", shop.path("disk.so").display());
    let run = shop.start_shell(&format!("{library} exec {PROGRAM} train {RECIPE} {OPTIONS} {options} 2>log"));
    while_it_runs();
    let ended = run.wait();
    Finished { err: shop.read("log"), ..ended }
}

/// The run goes on without, and has the checkpoint when the disk answers again.
#[test]
fn a_disk_that_hangs_costs_a_checkpoint_and_not_the_run() {
    let told = "rank 1 could not write the checkpoint";
    for manner in ["", "--set train.checkpoint_async=true"] {
        let shop = Workshop::new();
        shop.succeeds(&format!(
            "train {RECIPE} {OPTIONS} --set train.steps=600 --set train.checkpoint_timeout_s=300 --set run.dir=whole"
        ));
        let log = || fs::read_to_string(shop.path("log")).unwrap_or_default();
        let finished = trained(&shop, "hangs", &format!("--set train.steps=600 {manner}"), || {
            wait_until("two warnings", || log().matches("warning: no checkpoint of step ").count() >= 2);
            fs::remove_file(shop.path("hangs")).unwrap();
        });
        assert_eq!(finished.code, Some(0), "{}", finished.err);
        let why = "its file system has not answered for 2 s (train.checkpoint_timeout_s)";
        assert!(finished.err.contains(told) && finished.err.contains(why), "{}", finished.err);
        assert!(finished.err.contains("is written, the first since step 20"), "{}", finished.err);
        assert_eq!(damage(&shop.checkpoint("runs/tiny", 600)), None);
        assert!(shop.tensors("runs/tiny", 600) == shop.tensors("whole", 600), "{manner}: other weights");
    }
}

/// A run whose last checkpoint cannot be written fails, and does not wait for the disk to end.
#[test]
fn a_disk_that_hangs_to_the_end_fails_the_run() {
    let shop = Workshop::new();
    let finished = trained(&shop, "hangs", "--set train.steps=30", || {});
    finished.failed(1, &["rank 1 could not write the checkpoint", "train.checkpoint_timeout_s"]);
    assert!(shop.path("hangs").exists(), "it hangs still");
    assert_eq!(shop.series("runs/tiny", "step").len(), 30);
}

/// The others wait for a rank that reads its part of a checkpoint slowly, however long that takes.
#[test]
fn a_disk_that_is_slow_to_read_is_waited_for() {
    let shop = Workshop::new();
    shop.succeeds(&format!("train {RECIPE} {OPTIONS} --set train.steps=4"));
    let begun = Instant::now();
    let options = "--set train.steps=6 --set parallel.timeout_s=1 --resume";
    let finished = trained(&shop, "lags", options, || {});
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    assert!(begun.elapsed() > Duration::from_secs(2), "it was not slow: {:?}", begun.elapsed());
    assert_eq!(shop.series("runs/tiny", "step").len(), 6);
}
