//! Runs whose ranks are in several processes. Each process is a closure with everything of its own: it reads the recipe,
//! opens the folder, prepares the text and keeps the score for itself, and shares nothing with the others but the
//! communicator and a control lane. Data travels between threads here; the lanes are queues or TCP.

use std::fs;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use guildhall::commands::{CommandFailure, train};
use guildhall::config;
use guildhall::launch::{Member, Process, Rank, Refusal, RunFailure, Tellable};
use guildhall::parallel;
use guildhall::train::Job;
use guildhall_comm::control::Doorway;
use guildhall_comm::control::{ControlLane, Signal, mailbox};
use guildhall_comm::threads::{self, Options};
use guildhall_comm::{Error, Reduce};

#[cfg(not(feature = "mpi"))]
use crate::program::skipped;
use crate::program::{RECIPE, RUN, TENSORS, Workshop};

const PATIENCE: Duration = Duration::from_secs(120);
/// Two ranks, one, and one.
const PARTS: [Range<usize>; 3] = [0..2, 2..3, 3..4];

fn parallel() -> parallel::Config {
    patient(PATIENCE)
}

fn patient(timeout: Duration) -> parallel::Config {
    parallel::Config { threads: Some(1), timeout_s: timeout.as_secs(), ..parallel::Config::of(4, 2) }
}

/// Lanes over TCP, in rank order.
fn sockets(size: usize) -> Vec<Arc<dyn ControlLane>> {
    let doorways: Vec<Doorway> = (0..size).map(|_| Doorway::open("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<SocketAddr> = doorways.iter().map(|doorway| doorway.address().unwrap()).collect();
    thread::scope(|scope| {
        let pass = |(rank, doorway): (usize, Doorway)| {
            let addresses = &addresses;
            scope.spawn(move || doorway.pass(rank, addresses, PATIENCE).unwrap())
        };
        let lanes: Vec<_> = doorways.into_iter().enumerate().map(pass).collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
    })
}

/// The members of each process.
fn members(lanes: Vec<Arc<dyn ControlLane>>) -> Vec<Vec<Member>> {
    let worlds = threads::world(lanes.len(), Options { timeout: PATIENCE });
    let mut all = worlds.into_iter().zip(lanes).map(|(world, lane)| Member { world, lane });
    PARTS.iter().map(|part| all.by_ref().take(part.len()).collect()).collect()
}

/// What each process makes of its part; `f` is called with the process's number.
fn on_processes<T: Send>(
    lanes: Vec<Arc<dyn ControlLane>>,
    f: impl Fn(usize, Result<Process, Refusal>) -> T + Sync,
) -> Vec<T> {
    on_patient_processes(PATIENCE, lanes, f)
}

/// The same where nobody is waited for longer than `timeout`.
fn on_patient_processes<T: Send>(
    timeout: Duration,
    lanes: Vec<Arc<dyn ControlLane>>,
    f: impl Fn(usize, Result<Process, Refusal>) -> T + Sync,
) -> Vec<T> {
    let f = &f;
    thread::scope(|scope| {
        let start = |(number, members): (usize, Vec<Member>)| {
            scope.spawn(move || f(number, Process::of(members, &patient(timeout))))
        };
        let processes: Vec<_> = members(lanes).into_iter().enumerate().map(start).collect();
        processes.into_iter().map(|process| process.join().unwrap()).collect()
    })
}

/// An error that says where it came from.
#[derive(Debug)]
struct Planned(Result<u64, Error>);

impl std::fmt::Display for Planned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Ok(number) => write!(f, "planned: {number}"),
            Err(error) => error.fmt(f),
        }
    }
}

impl Tellable for Planned {
    type Kind = Option<u64>;

    fn kind(&self) -> Option<u64> {
        self.0.as_ref().ok().copied()
    }

    fn is_consequence(&self) -> bool {
        matches!(self.0, Err(Error::Aborted { .. }))
    }
}

/// All ranks meet, rank 3 ends as `last` says, and the others wait for it.
fn ends(last: impl Fn() -> Result<(), Planned> + Sync) -> impl Fn(Rank) -> Result<u64, Planned> + Sync {
    move |rank| {
        let meet = || rank.world.all_reduce(Reduce::Sum, vec![1u64]).map_err(|error| Planned(Err(error)));
        meet()?;
        if rank.world.rank() == 3 {
            last()?;
        }
        Ok(meet()?.into_u64()[0])
    }
}

#[test]
fn every_process_knows_how_the_run_ended() {
    for lanes in [mailbox::lanes, sockets] {
        let all = |last: &(dyn Fn() -> Result<(), Planned> + Sync)| {
            on_processes(lanes(4), |_, process| process.unwrap().run(&parallel(), ends(last)))
        };
        let done = all(&|| Ok(()));
        assert_eq!(
            done.iter().map(|own| own.as_ref().unwrap().clone()).collect::<Vec<_>>(),
            [vec![4, 4], vec![4], vec![4]]
        );
        let failed = all(&|| Err(Planned(Ok(7))));
        let want = RunFailure { rank: 3, kind: Some(Some(7)), text: "planned: 7".to_owned() };
        assert!(failed.iter().all(|own| own.as_ref() == Err(&want)), "{failed:?}");
        let panicked = all(&|| panic!("as planned"));
        let want = RunFailure { rank: 3, kind: None, text: "rank 3 panicked: as planned".to_owned() };
        assert!(panicked.iter().all(|own| own.as_ref() == Err(&want)), "{panicked:?}");
    }
}

/// Another may wait in its last collective for the timeout before it can tell for whom.
#[test]
fn who_ends_later_than_the_timeout_is_waited_for() {
    let timeout = Duration::from_secs(4);
    let late = |rank: Rank| {
        if rank.world.rank() == 3 {
            thread::sleep(timeout * 3 / 2);
        }
        Ok::<_, Planned>(rank.world.rank() as u64)
    };
    let ended =
        on_patient_processes(timeout, mailbox::lanes(4), |_, process| process.unwrap().run(&patient(timeout), late));
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

/// A process that ends without a word is named by the others, which do not wait for it.
#[test]
fn a_process_that_is_gone_is_named() {
    for lanes in [mailbox::lanes, sockets] {
        let results = on_processes(lanes(4), |number, process| {
            let process = process.unwrap();
            (number != 2).then(|| process.run(&parallel(), |_| Ok::<_, Planned>(())))
        });
        for own in results.into_iter().flatten() {
            let failure = own.unwrap_err();
            assert!(failure.rank == 3 && failure.kind.is_none() && failure.text.contains("rank 3"), "{failure:?}");
        }
    }
}

/// A recipe, or the list of a checkpoint's files, may be longer than what a lane carries at once.
#[test]
fn long_contents_are_compared_to_their_ends() {
    for lanes in [mailbox::lanes, sockets] {
        for differs in [false, true] {
            let results = on_processes(lanes(4), |number, process| {
                let last = if differs && number == 2 { "b" } else { "a" };
                process.unwrap().same("recipes", &("a".repeat(100_000) + last))
            });
            assert!(results.iter().all(|same| same.is_err() == differs), "{results:?}");
        }
    }
}

/// What one process is refused is refused in all.
#[test]
fn a_refusal_anywhere_is_one_everywhere() {
    let results = on_processes(mailbox::lanes(4), |number, process| {
        let process = process.unwrap();
        process.in_turn(|| match number {
            1 => Err(Refusal { is_request: true, text: "no room\non this node".to_owned() }),
            _ => Ok(()),
        })
    });
    // The second process has rank 2: the others say so.
    let refusal = |of: &str| Err(Refusal { is_request: true, text: format!("{of}no room\non this node") });
    assert_eq!(results, [refusal("rank 2: "), refusal(""), refusal("rank 2: ")]);
}

/// The first process is first, and nobody goes on before all have done it.
#[test]
fn processes_do_things_in_turn() {
    let (first, done) = (AtomicBool::new(false), Mutex::new(0));
    on_processes(mailbox::lanes(4), |number, process| {
        let process = process.unwrap();
        assert_eq!((process.leads(), process.neighbours()), (number == 0, 4));
        let done_here = process.in_turn(|| {
            if process.leads() {
                thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(first.swap(true, Ordering::SeqCst), !process.leads());
            *done.lock().unwrap() += 1;
            Ok(())
        });
        assert_eq!(done_here, Ok(()));
        assert_eq!(*done.lock().unwrap(), 3);
    });
}

/// A process that is kept in one operation does not count as one that works.
#[test]
fn before_the_first_step_a_process_that_waits_for_its_disk_is_named() {
    let timeout = Duration::from_secs(60);
    let begun = Instant::now();
    let results = on_patient_processes(timeout, mailbox::lanes(4), |number, process| {
        let mut process = process.unwrap();
        process.wait_for_disks(Duration::from_millis(500), |why| panic!("there are others: {why}"));
        let worked = process.in_turn(|| {
            // Its thread does not run meanwhile.
            thread::sleep(Duration::from_secs(if number == 1 { 3 } else { 0 }));
            Ok(())
        });
        (number, worked)
    });
    assert!(begun.elapsed() < timeout / 2, "nobody waits for the timeout");
    for (number, worked) in results.into_iter().filter(|(number, _)| *number != 1) {
        let refusal = worked.expect_err("no other process goes on");
        let named = "rank 2 is gone: its file system has not answered for ";
        assert!(!refusal.is_request && refusal.text.contains(named), "process {number}: {refusal:?}");
    }
}

/// Whoever is at work is waited for, whatever the timeout; whoever says nothing is named after it.
#[test]
fn before_the_first_step_a_process_that_stands_still_is_named() {
    let (timeout, is_over) = (Duration::from_secs(1), AtomicBool::new(false));
    let results = on_patient_processes(timeout, mailbox::lanes(4), |number, process| {
        let process = process.unwrap();
        let worked = process.in_turn(|| {
            thread::sleep(if number == 1 { 3 * timeout } else { Duration::ZERO });
            Ok(())
        });
        assert_eq!(worked, Ok(()), "process {number}");
        if number == 2 {
            // Alive, since its lane is open, and silent.
            while !is_over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(10));
            }
            return None;
        }
        let refused = process.same("recipes", "one").unwrap_err();
        if number == 0 {
            is_over.store(true, Ordering::SeqCst);
        }
        Some(refused)
    });
    for refusal in results.into_iter().flatten() {
        assert!(!refusal.is_request, "{refusal:?}");
        assert!(refusal.text.contains("rank 3 is gone: its process has said nothing for 1 s"), "{refusal:?}");
    }
}

/// Rank 0 tells one process of a failure, and no other any more; who is told passes it on, so that all name the same.
#[test]
fn a_failure_that_one_process_is_told_of_is_known_to_all() {
    let (timeout, are_over) = (Duration::from_secs(5), AtomicUsize::new(0));
    let lanes = mailbox::lanes(4);
    let teller = lanes[0].clone();
    let results = on_patient_processes(timeout, lanes, |number, process| {
        if number == 0 {
            process.as_ref().unwrap();
            teller.send(2, &Signal::Failed { rank: 1, reason: "as planned".to_owned(), site: None });
            // Silent, but there: else the third process would hear that it has left.
            let since = Instant::now();
            while are_over.load(Ordering::SeqCst) < 2 && since.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(10));
            }
            return None;
        }
        // The first has met both; they may not have met each other, and learn of the failure while they wait for that.
        let refused = process.and_then(|process| process.same("recipes", "one"));
        are_over.fetch_add(1, Ordering::SeqCst);
        refused.err()
    });
    let known = Some(Refusal { is_request: false, text: "rank 1 is gone: as planned".to_owned() });
    assert_eq!(results, [None, known.clone(), known]);
}

/// Signals that are not for processes change nothing.
#[test]
fn other_signals_are_passed_over() {
    let lanes = mailbox::lanes(4);
    lanes[3].send(
        0,
        &Signal::Arrived(guildhall_comm::control::Arrival {
            group: 0,
            sequence: 0,
            collective: guildhall_comm::Collective::Barrier,
            digest: 0,
            sent: 0,
            expected: 0,
            operation: String::new(),
            site: guildhall_comm::CallSite { file: "x".into(), line: 1, column: 1 },
        }),
    );
    let ends = on_processes(lanes, |_, process| process.unwrap().run(&parallel(), |_| Ok::<_, Planned>(())).is_ok());
    assert_eq!(ends, [true; 3]);
}

/// Trains the tiny recipe in several processes, of which `interrupted` may stop itself; how each ended.
fn train(shop: &Workshop, run: &str, more: &[&str], interrupted: Option<usize>) -> Vec<Result<(), CommandFailure>> {
    started(shop, run, more, |number| Beginning { stops: interrupted == Some(number), resumes: false })
}

/// How a process begins.
struct Beginning {
    stops: bool,
    resumes: bool,
}

/// The same, each process as `begun` says for its number.
fn started(
    shop: &Workshop,
    run: &str,
    more: &[&str],
    begun: impl Fn(usize) -> Beginning + Sync,
) -> Vec<Result<(), CommandFailure>> {
    let path = |name: &str| shop.path(name).display().to_string();
    let mut set = vec![
        format!("run.dir={}", path(run)),
        format!("data.cache={}", path("cache")),
        format!("data.sources=[{:?}]", path("corpus")),
        "parallel.ranks=4".to_owned(),
        "parallel.expert=2".to_owned(),
        "parallel.threads=1".to_owned(),
    ];
    set.extend(more.iter().map(ToString::to_string));
    on_processes(sockets(4), |number, process| {
        let loaded = config::load(&shop.path(RECIPE), &set, None).unwrap_or_else(|problems| panic!("{problems}"));
        let (stops, Beginning { stops: asks, resumes }) = (AtomicBool::new(false), begun(number));
        let listen = || {
            stops.store(asks, Ordering::Relaxed);
            Ok(())
        };
        let manner = train::Manner { resume: resumes, is_quiet: false, interrupted: &stops };
        train::conduct(&mut process.unwrap(), loaded, manner, listen)
    })
}

#[test]
fn a_run_of_several_processes_is_a_run_of_one() {
    let shop = Workshop::new();
    let set = "--set parallel.ranks=4 --set parallel.expert=2 --set parallel.threads=1";
    shop.train(&format!("{set} --set run.dir=whole --set moe.record=whole.routes"));
    let record = format!("moe.record={}", shop.path("parts.routes").display());
    let ends = train(&shop, "parts", &[&record], None);
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    assert_eq!(shop.tensors("parts", 6), shop.tensors("whole", 6));
    let routes = |name| fs::read(shop.path(name)).unwrap();
    assert!(routes("parts.routes") == routes("whole.routes"));
    for field in ["loss", "eval_loss", "grad_norm"] {
        assert_eq!(shop.series("parts", field), shop.series("whole", field), "{field}");
    }
    let (parts, whole) = (shop.summary("parts"), shop.summary("whole"));
    assert_eq!(parts["status"], "done");
    assert_eq!(parts["traffic"], whole["traffic"]);
    assert_eq!(parts["peak_bytes_by_rank"].as_array().unwrap().len(), 4);
    assert_eq!(parts["dead_experts"], whole["dead_experts"]);
}

/// A process that would go on from elsewhere, as one that sees older files would.
#[test]
fn processes_start_from_the_same_state_or_not_at_all() {
    let shop = Workshop::new();
    let ends = train(&shop, "parts", &["train.steps=3", "train.schedule=constant"], None);
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    let before = shop.tensors("parts", 3);
    let ends = started(&shop, "parts", &["train.schedule=constant"], |number| Beginning {
        stops: false,
        resumes: number != 1,
    });
    for end in ends {
        let Err(CommandFailure::Request(error)) = end else { panic!("{end:?}") };
        assert!(error.to_string().contains("rank 2 has read other states to start from"), "{error}");
    }
    assert!(shop.tensors("parts", 3) == before, "the earlier run is where it was");
}

/// One process is asked to stop: all do, before the same step.
#[test]
fn an_interrupted_process_stops_all() {
    let shop = Workshop::new();
    let ends = train(&shop, "parts", &["train.steps=100000", "train.eval_every=0"], Some(1));
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    assert_eq!(shop.summary("parts")["status"], "interrupted");
}

/// What only the first process can find out is an answer of all.
#[test]
fn a_folder_in_use_is_refused_in_every_process() {
    let shop = Workshop::new();
    fs::create_dir_all(shop.path("parts")).unwrap();
    let lock = fs::File::create(shop.path("parts/.lock")).unwrap();
    lock.lock().unwrap();
    for end in train(&shop, "parts", &[], None) {
        let Err(CommandFailure::Request(error)) = end else { panic!("{end:?}") };
        assert!(error.to_string().contains("is in use by another run"), "{error}");
    }
}

/// Ranks fail after steps: the text is the same everywhere, and what kind of failure it was comes along, for none proposes to
/// repeat the steps that led to it.
#[test]
fn a_failure_of_the_numbers_is_known_as_one_in_every_process() {
    let shop = Workshop::new();
    for end in train(&shop, "parts", &["train.lr=1e30", "train.clip=0", "train.eval_every=0"], None) {
        let Err(CommandFailure::Run(error)) = end else { panic!("{end:?}") };
        assert!(error.to_string().contains("is not finite"), "{error}");
        assert!(!error.to_string().contains("--resume"), "{error}");
    }
    assert_eq!(shop.summary("parts")["status"], "failed");
}

/// Several processes that know nothing of each other would be as many runs in one folder.
#[test]
#[cfg(not(feature = "mpi"))]
fn a_launcher_of_a_program_without_mpi_is_told_so() {
    let shop = Workshop::new();
    for (by, rank, size) in [
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpirun", "PMI_RANK", "PMI_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ] {
        let train = format!("{rank}=0 {size}=2 exec {} train {RECIPE}", crate::program::PROGRAM);
        let refused = shop.shell(&train);
        refused.failed(2, &[&format!("{by} has started 2 processes"), "without MPI", "--features mpi"]);
        assert!(!shop.path("runs").exists(), "nothing was begun");
    }
    // One that tells the number to its library alone.
    for command in ["train", "plan", "simulate"] {
        let refused = shop.shell(&format!("PMIX_RANK=1 exec {} {command} {RECIPE}", crate::program::PROGRAM));
        refused.failed(2, &["PMIX_RANK is set", "start it by mpirun or srun"]);
    }
}

/// By launchers that are there, not by their variables.
#[test]
#[cfg(not(feature = "mpi"))]
fn a_program_without_mpi_refuses_to_be_launched() {
    let launchers = ["mpirun.openmpi", "mpirun.mpich", "mpirun"];
    let shop = Workshop::new();
    let there = launchers.into_iter().filter(|by| shop.shell(&format!("command -v {by}")).code == Some(0));
    let there: Vec<&str> = there.collect();
    if there.is_empty() {
        return skipped("no launcher of MPI is installed");
    }
    let told = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1";
    for by in there {
        for (command, why) in [("train", "without MPI"), ("plan", "only train runs in more than one")] {
            let refused = shop.shell(&format!("{told}; exec {by} -n 2 {} {command} {RECIPE}", crate::program::PROGRAM));
            let says = |line: &str| line.contains("error: mpirun has started 2 processes") && line.contains(why);
            assert!(refused.code == Some(2) && refused.err.lines().any(says), "{by} {command}: {refused:?}");
            assert!(!shop.path("runs").exists() && !shop.path("cache").exists(), "nothing was begun");
        }
    }
}

/// One process reads every byte of the checkpoints; the others go on from what it found, and read none of them twice.
#[test]
fn who_follows_takes_the_leaders_word_for_what_is_whole() {
    let shop = Workshop::new();
    shop.train("");
    let open = |leads| {
        let run = format!("run.dir={}", shop.path(RUN).display());
        Job::open(config::load(&shop.path(RECIPE), &[run], None).unwrap().config, true, leads, &|_| ())
    };
    let damage = |step: u64| {
        let file = shop.checkpoint(RUN, step).join(TENSORS[0]);
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(file, bytes).unwrap();
    };
    damage(6);
    let leader = open(true).unwrap();
    // What is damaged from now on nobody looks for.
    damage(4);
    let follower = open(false).unwrap();
    assert_eq!((leader.steps_done(), leader.origin(), &leader.mark), (4, follower.origin(), &follower.mark));
    drop((leader, follower));
    assert_eq!(open(true).unwrap().steps_done(), 2);
    fs::remove_dir_all(shop.path(RUN).join("checkpoints")).unwrap();
    let leader = open(true).unwrap();
    assert_eq!((leader.steps_done(), leader.origin()), (0, open(false).unwrap().origin()));
}
