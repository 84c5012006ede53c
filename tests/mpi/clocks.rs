//! Machines whose clocks are apart.

use std::fs;
use std::process::Command;

use super::{LONG, each_by_itself};
use crate::program::{PROGRAM, RECIPE, Workshop};

/// Takes 400 days from the time of the day, and leaves clocks that only go on as they are.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int ended = ((__typeof__(&clock_gettime))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
    if (clock == CLOCK_REALTIME) {
        now->tv_sec -= 400 * 86400;
        fclose(fopen("asked", "w"));
    }
    return ended;
}
"#;

/// Nothing is decided by comparing times of two machines: a run with checkpoints, one that goes on from them, and one that
/// looks for text that was prepared already come to the weights of threads.
#[test]
fn clocks_of_machines_need_not_agree() {
    let shop = Workshop::new();
    shop.write("clock.c", LIBRARY);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(shop.path("clock.so")).arg(shop.path("clock.c")).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    // A schedule that does not go by the number of steps.
    let long = format!("{LONG} --set train.schedule=constant").replace("4000", "40").replace("every=100", "every=10");
    shop.succeeds(&format!("train {RECIPE} {long} --ranks 2 --set run.dir=whole"));
    for rank in [0, 1] {
        let apart = format!("if [ $RANK = {rank} ]; then export LD_PRELOAD=$PWD/clock.so; fi");
        for steps in [20, 40] {
            let options =
                format!("{long} --resume --set run.dir=apart{rank}").replace("steps=40", &format!("steps={steps}"));
            let ended = each_by_itself(&shop, 2, &format!("{apart}; exec {PROGRAM} train {RECIPE} {options}"));
            assert!(ended.iter().all(|ended| ended.code == Some(0)), "{ended:?}");
        }
        assert!(shop.tensors(&format!("apart{rank}"), 40) == shop.tensors("whole", 40), "rank {rank}: other weights");
        // Rank 0 alone has use for the time of the day.
        assert_eq!(fs::remove_file(shop.path("asked")).is_ok(), rank == 0, "rank {rank}");
    }
}
