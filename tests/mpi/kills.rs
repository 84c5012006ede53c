//! Kills at times by chance, and launchers that outlive their processes.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::{Finished, PROGRAM, RECIPE, Workshop, send_signal};
use crate::{LONG, TOLD, launched, processes, ranks};

/// What of `docs/clusters.md` begins so, until that.
fn documented(begin: &str, end: &str) -> String {
    let document = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/clusters.md")).expect("a document");
    let (_, from) = document.split_once(begin).expect("where it begins");
    let (text, _) = from.split_once(end).expect("where it ends");
    format!("{begin}{text}{end}")
}

/// The documented loop, whose launcher first has a child for more than ten looks, then none.
#[test]
fn a_launcher_that_outlives_its_processes_is_started_again() {
    const COMMAND: &str = "mpirun -n 8 target/release/guildhall train RECIPE --resume";
    let shop = Workshop::new();
    shop.write("launcher", "echo begun >>log; [ -e stuck ] && exit 2; sleep 3; touch stuck; exec sleep 600");
    let restarts = documented("trap ", "exit $code");
    assert!([COMMAND, " 30)", "sleep 10"].iter().all(|part| restarts.contains(part)), "{restarts}");
    let restarts = restarts.replace(COMMAND, "sh launcher").replace(" 30)", " 0.1)").replace("sleep 10", "sleep 0.1");
    shop.write("restarts", &restarts);
    let begun = Instant::now();
    let ended = shop.start_shell("exec bash restarts").wait();
    assert_eq!(ended.code, Some(2), "that of the last launcher: {ended:?}");
    assert_eq!(shop.read("log"), "begun\nbegun\n", "the first was ended once, and not while it had a child");
    assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
}

/// How often each of two runs is killed: one of a process with two threads, one of two processes.
const KILLS: usize = 100;

/// At a time by chance, which may be before the first step or after the last: a process, or a rank of the launcher's. Told are
/// the rank and how all ended.
fn kill_by_chance(
    shop: &Workshop,
    run: &str,
    options: &str,
    draws: &mut impl FnMut() -> usize,
) -> Option<(usize, Finished)> {
    let guard = documented("guard() {", "\n}\n");
    let mut running = match run {
        "processes" => shop.start_shell(&format!(
            "{TOLD} {guard} (guard $$ 1) >/dev/null 2>&1 & exec $MPIRUN -n 2 {PROGRAM} train {RECIPE} {options}"
        )),
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
    Some((*rank, finished))
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
        let (mut killed, mut stood_still) = ([0; 2], 0);
        for _ in 0..4 * KILLS {
            if let Some((rank, finished)) = kill_by_chance(&shop, run, &options, &mut draws) {
                killed[rank] += 1;
                // Launchers have a code of their own but when they are killed.
                stood_still += usize::from(run == "processes" && finished.code.is_none());
            }
            if killed.iter().sum::<usize>() == KILLS {
                break;
            }
        }
        let reached = shop.metrics(run).len();
        assert!(killed.iter().sum::<usize>() == KILLS && reached < 3000, "killed {killed:?} times, {reached} steps");
        assert!(stood_still <= KILLS / 20, "{stood_still} launchers outlived their processes");
        assert!(run == "threads" || killed.iter().all(|&times| times > KILLS / 4), "of each rank: {killed:?}");
        let resumed = match run {
            "processes" => launched(&shop, 2, &options),
            _ => shop.run(&format!("train {RECIPE} --ranks 2 {options}")),
        };
        assert_eq!(resumed.code, Some(0), "{}", resumed.err);
        assert!(shop.tensors(run, 3000) == shop.tensors("whole", 3000), "other weights after {run}");
        eprintln!(
            "{run}: killed {killed:?} times by rank, the last time after {reached} steps; {stood_still} launchers stood still"
        );
    }
}
