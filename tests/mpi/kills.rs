//! Kills at times by chance, and launchers that outlive their processes.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::{PROGRAM, RECIPE, Workshop, send_signal};
use crate::{LONG, TOLD, launched, processes, ranks};

/// Has the shell's process looked after as `docs/clusters.md` has it, with so many seconds between looks.
fn guarded(seconds: &str) -> String {
    let document = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/clusters.md")).expect("a document");
    let begin = document.find("guard() {").expect("a function");
    let length = document[begin..].find("\n}").expect("its end") + 2;
    format!("{}; (guard $$ {seconds}) >/dev/null 2>&1 & ", &document[begin..begin + length])
}

#[test]
fn a_launcher_that_outlives_its_processes_is_ended() {
    let shop = Workshop::new();
    let begun = Instant::now();
    let launcher = |run: &str, then: &str| {
        let train = format!("{PROGRAM} train {RECIPE} --ranks 2 {LONG} --set run.dir={run} >/dev/null 2>&1");
        shop.write("launcher", &format!("{train} & sleep 3; kill -s KILL $!; {then}"));
        shop.start_shell(&format!("{} exec sh launcher", guarded("0.1"))).wait()
    };
    let patient = launcher("patient", "exit 7");
    assert_eq!(patient.code, Some(7), "with a process it goes on for more than ten looks: {patient:?}");
    let stuck = launcher("stuck", "exec sleep 600");
    assert_eq!(stuck.code, None, "without one it is killed: {stuck:?}");
    assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
}

/// How often each of two runs is killed: one of a process with two threads, one of two processes.
const KILLS: usize = 100;

/// At a time by chance, which may be before the first step or after the last: a process, or a rank of the launcher's, which is
/// told.
fn kill_by_chance(shop: &Workshop, run: &str, options: &str, draws: &mut impl FnMut() -> usize) -> Option<usize> {
    let mut running = match run {
        "processes" => {
            shop.start_shell(&format!("{TOLD} {} exec $MPIRUN -n 2 {PROGRAM} train {RECIPE} {options}", guarded("1")))
        }
        _ => shop.start(&format!("train {RECIPE} --ranks 2 {options}")),
    };
    // Most in the middle of steps and checkpoints, some while the run begins.
    let reached = || shop.metrics(run).len();
    let until = reached() / 20 * 20 + 1 + draws() % 40;
    let patience = Duration::from_millis(if draws().is_multiple_of(5) { 1 } else { 60_000 });
    let begun = Instant::now();
    while running.is_running() && reached() < until && begun.elapsed() < patience {
        sleep(Duration::from_millis(2));
    }
    sleep(Duration::from_micros(draws() as u64 % 30_000));
    let victims = match run {
        "processes" => ranks(run),
        _ => vec![(0, running.pid())],
    };
    let (rank, victim) = victims.get(draws() % victims.len().max(1)).filter(|_| running.is_running())?;
    let (since, _) = (Instant::now(), send_signal("KILL", victim));
    let finished = running.wait();
    assert!(since.elapsed() < Duration::from_secs(30), "it took {:?}", since.elapsed());
    assert_eq!(processes(run), Vec::<String>::new(), "nobody is left");
    assert_ne!(finished.code, Some(0), "{}", finished.err);
    Some(*rank)
}

#[test]
#[ignore = "takes minutes"]
#[expect(clippy::print_stderr, reason = "figures, for who asks for them")]
fn a_hundred_kills_lose_nothing() {
    let shop = Workshop::new();
    let long = LONG.replace("4000", "3000").replace("every=100", "every=20");
    shop.succeeds(&format!("train {RECIPE} {long} --ranks 2 --set run.dir=whole"));
    let mut state = 1u64;
    let mut draws = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for run in ["threads", "processes"] {
        let options = format!("--resume {long} --set run.dir={}", shop.path(run).display());
        let mut killed = [0; 2];
        for _ in 0..4 * KILLS {
            if let Some(rank) = kill_by_chance(&shop, run, &options, &mut draws) {
                killed[rank] += 1;
            }
            if killed.iter().sum::<usize>() == KILLS {
                break;
            }
        }
        let reached = shop.metrics(run).len();
        assert!(killed.iter().sum::<usize>() == KILLS && reached < 3000, "killed {killed:?} times, {reached} steps");
        assert!(run == "threads" || killed.iter().all(|&times| times > KILLS / 4), "of each rank: {killed:?}");
        let resumed = match run {
            "processes" => launched(&shop, 2, &options),
            _ => shop.run(&format!("train {RECIPE} --ranks 2 {options}")),
        };
        assert_eq!(resumed.code, Some(0), "{}", resumed.err);
        assert!(shop.tensors(run, 3000) == shop.tensors("whole", 3000), "other weights after {run}");
        eprintln!("{run}: killed {killed:?} times by rank, the last time after {reached} steps");
    }
}
