//! `train --restarts`: a run that is killed goes on by itself, and nothing is left running.

use std::fs;

use crate::program::{RECIPE, RUN, Running, Workshop, send_signal, wait_until};

const LONG: &str = "--set train.steps=2000 --set train.checkpoint_every=50 --set train.eval_every=0";

fn supervised(shop: &Workshop, restarts: usize) -> Running {
    shop.start_logged(&format!("train {RECIPE} {LONG} --restarts {restarts}"), "log")
}

/// The process that trains, if there is one.
fn ward(supervisor: &str) -> Option<String> {
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    children.split_whitespace().next().map(str::to_owned)
}

fn is_alive(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_run_that_is_killed_goes_on() {
    let shop = Workshop::new();
    let run = supervised(&shop, 3);
    for kill in 1..=3 {
        wait_until("another checkpoint", || shop.metrics(RUN).len() > 200 * kill);
        send_signal("KILL", &ward(&run.pid()).expect("a process trains"));
        wait_until("a restart", || shop.read("log").matches("note: restart ").count() == kill);
    }
    let finished = run.wait();
    let log = shop.read("log");
    assert_eq!(finished.code, Some(0), "{log}");
    assert!(log.contains("note: restart 3 of 3: the run was killed by signal 9"), "{log}");
    shop.succeeds(&format!("train {RECIPE} {LONG} --set run.dir=whole"));
    assert!(shop.tensors(RUN, 2000) == shop.tensors("whole", 2000), "other weights");
    assert_eq!(shop.series(RUN, "loss"), shop.series("whole", "loss"));
}

#[test]
fn nothing_is_left_running() {
    let shop = Workshop::new();
    let begun = |run: &Running| {
        wait_until("a step", || !shop.metrics(RUN).is_empty());
        ward(&run.pid()).expect("a process trains")
    };
    let run = supervised(&shop, 3);
    let trains = begun(&run);
    drop(run);
    wait_until("the end of who trained for a killed one", || !is_alive(&trains));
    fs::remove_dir_all(shop.path(RUN)).unwrap();
    let run = supervised(&shop, 3);
    let trains = begun(&run);
    run.signal("TERM");
    assert_eq!(run.wait().code, Some(0), "a stop that was asked for is no failure");
    assert!(!is_alive(&trains));
    assert!(shop.read("log").contains("stopped  after ") && !shop.read("log").contains("restart"));
}

/// Who trains is killed after the user has asked for a stop that it did not come to.
#[test]
fn nothing_is_started_after_a_stop_was_asked_for() {
    let shop = Workshop::new();
    let run = supervised(&shop, 3);
    wait_until("a step", || !shop.metrics(RUN).is_empty());
    let trains = ward(&run.pid()).expect("a process trains");
    let status = |says: &str| {
        let status = fs::read_to_string(format!("/proc/{trains}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with(says))
    };
    send_signal("STOP", &trains);
    wait_until("the standstill", || status("State:\tT"));
    run.signal("TERM");
    // It is passed on at once, and waits: the fifteenth bit.
    wait_until("the stop", || status("ShdPnd:\t0000000000004000"));
    send_signal("KILL", &trains);
    let finished = run.wait();
    assert!(finished.code != Some(0) && !shop.read("log").contains("restart"), "{finished:?}: {}", shop.read("log"));
}

#[test]
fn a_run_is_restarted_as_often_as_said_and_a_wrong_request_never() {
    let shop = Workshop::new();
    let failing = "--set train.lr=1e30 --set train.clip=0 --set train.checkpoint_every=1";
    for resume in ["", "--resume"] {
        let finished = shop.run(&format!("train {RECIPE} {failing} {resume} --restarts 2"));
        let notes = finished.err.matches("the run ended with exit code 1; it goes on").count();
        assert_eq!((finished.code, notes), (Some(1), 2), "{}", finished.err);
        assert_eq!(finished.err.matches("error: ").count(), 3, "each says why: {}", finished.err);
    }
    shop.fails(&format!("train {RECIPE} --set train.steps=no --restarts 2"), 2, &["train.steps"]);
    shop.fails("train nowhere.toml --restarts 2", 2, &["nowhere.toml"]);
    let launched = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 exec $GUILDHALL train tiny.toml --restarts 2";
    shop.shell(launched).failed(2, &["--restarts looks after one process, and mpirun has started several"]);
}

/// What the user has asked for, the process that trains is asked for.
#[test]
fn who_trains_has_the_ranks_and_the_run_that_were_asked_for() {
    let shop = Workshop::new();
    let options = "--ranks 2 --set train.schedule=constant";
    shop.train(&format!("{options} --set train.steps=3"));
    let said = shop.train(&format!("{options} --resume --restarts 1")).err;
    assert!(said.contains("steps 4 to 6"), "{said}");
    assert!(!shop.path(RUN).join("previous-1").exists(), "the earlier run was set aside");
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(shop.summary(RUN)["ranks"], 2, "{said}");
}
