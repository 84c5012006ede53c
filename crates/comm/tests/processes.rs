//! Ranks that are processes, which share no memory: agreement, naming and failures over a control lane of sockets.
//!
//! Each rank is this very program, run anew for the one test that plays a rank. Data does not travel: a world of sizes
//! stands in for it.

use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::control::Doorway;
use guildhall_comm::wrap::{Agreement, Patience};
use guildhall_comm::{Communicator, Error, Reduce, SystemClock, sizes};

/// What ranks write begins so; the test runner writes other lines.
const MARK: &str = "rank says: ";

/// Long enough for any correct run on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a test does to the ranks.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Process {
    /// Plays `part` as rank `rank` of `size`; waits `timeout_ms` for others.
    fn start(rank: usize, size: usize, part: &str, timeout_ms: u64) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        command.args(["--exact", "plays_a_rank", "--ignored", "--nocapture"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be run again");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        let mut hears = child.stdin.take().expect("piped");
        writeln!(hears, "{rank} {size} {part} {timeout_ms}").expect("it listens");
        Process { child, says, hears }
    }

    /// The next thing it says.
    fn next(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.says.read_line(&mut line).expect("it writes text"), 0, "it ended without a word");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.child.wait().expect("it was started here");
    }
}

/// Starts a rank for each of `parts`, and tells all where the others are.
fn ranks(parts: &[&str], timeout_ms: u64) -> Vec<Process> {
    let start = |(rank, part): (usize, &&str)| Process::start(rank, parts.len(), part, timeout_ms);
    let mut ranks: Vec<Process> = parts.iter().enumerate().map(start).collect();
    let addresses: Vec<String> = ranks.iter_mut().map(Process::next).collect();
    for rank in &mut ranks {
        writeln!(rank.hears, "{}", addresses.join(" ")).expect("it listens");
    }
    ranks
}

fn say(text: &str) {
    // Past the test runner, which may be asked to capture what is printed.
    writeln!(stdout(), "\n{MARK}{text}").expect("its parent listens");
}

fn hear() -> String {
    let mut line = String::new();
    stdin().read_line(&mut line).expect("its parent speaks text");
    line
}

/// One rank, as its parent says on standard input; without a parent, none.
#[test]
#[ignore = "the other tests of this file run it as a process of its own"]
fn plays_a_rank() {
    let line = hear();
    let [rank, size, part, timeout_ms] = line.split_whitespace().collect::<Vec<_>>()[..] else { return };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let (rank, size) = (number(rank) as usize, number(size) as usize);
    let doorway = Doorway::open("127.0.0.1:0").expect("a free port");
    say(&doorway.address().expect("it is open").to_string());
    let addresses: Vec<SocketAddr> = hear().split_whitespace().map(|text| text.parse().expect("an address")).collect();
    let lane = doorway.pass(rank, &addresses, PATIENCE).expect("all come");
    let patience = Patience { timeout: Duration::from_millis(number(timeout_ms)), clock: SystemClock::new() };
    let comm = Agreement::wrap(sizes::world(rank, size, Arc::new(|_, _| ()), Arc::new(|_, _| None)), lane, patience);
    match play(part, &comm) {
        Ok(()) => say("done"),
        Err(error) => say(&error.to_string()),
    }
}

fn play(part: &str, comm: &Arc<dyn Communicator>) -> Result<(), Error> {
    comm.barrier()?;
    say("after the first");
    match part {
        "reduces" => comm.all_reduce(Reduce::Sum, vec![0f32; 5]).map(drop),
        "gathers" => comm.all_gather_u64(&[1, 2]).map(drop),
        "stays" => {
            hear();
            Ok(())
        }
        "aborts" => {
            hear();
            comm.abort("the disk is full");
            Ok(())
        }
        _ => comm.barrier(),
    }
}

/// The last word of each.
fn ends(ranks: &mut [Process]) -> Vec<String> {
    ranks.iter_mut().map(Process::next).collect()
}

fn started(parts: &[&str], timeout_ms: u64) -> Vec<Process> {
    let mut ranks = ranks(parts, timeout_ms);
    assert!(ends(&mut ranks).iter().all(|said| said == "after the first"));
    ranks
}

#[test]
fn processes_that_agree_go_on() {
    assert_eq!(ends(&mut started(&["reduces"; 3], 60_000)), ["done"; 3]);
}

#[test]
fn processes_that_disagree_are_named_with_both_call_sites() {
    for text in ends(&mut started(&["reduces", "reduces", "gathers"], 60_000)) {
        let needles = ["communicator 'world': operation 1 differs", "processes.rs:"];
        let parties =
            ["rank 0 is in all_reduce(Sum, 5 x f32) at ", "rank 2 is in all_gather(counts [2, 2, 2] of u64) at "];
        assert!(needles.iter().chain(&parties).all(|needle| text.contains(needle)), "{text}");
    }
}

#[test]
fn a_process_that_is_killed_is_named_to_the_others() {
    let mut ranks = started(&["waits", "waits", "stays"], 60_000);
    ranks[2].child.kill().expect("it runs");
    for text in ends(&mut ranks[..2]) {
        assert!(text.starts_with("rank 2 aborted the world: its control connection"), "{text}");
    }
}

#[test]
fn a_process_that_does_not_come_is_named_with_where_it_was_last() {
    let mut ranks = started(&["waits", "stays", "waits"], 700);
    for text in [ranks[0].next(), ranks[2].next()] {
        assert!(text.contains("for rank(s) [1] (rank 1 was last in barrier at "), "{text}");
    }
}

#[test]
fn a_process_that_aborts_says_why() {
    let mut ranks = started(&["waits", "aborts", "waits"], 60_000);
    writeln!(ranks[1].hears, "now").expect("it listens");
    let texts = ends(&mut ranks);
    assert_eq!(texts[1], "done");
    for text in [&texts[0], &texts[2]] {
        assert!(text.starts_with("rank 1 aborted the world: the disk is full"), "{text}");
    }
}
