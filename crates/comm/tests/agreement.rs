//! What ranks agree on over a control lane is what they agree on in place, in the same words; and a lane alone, without
//! shared memory, suffices.

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use common::{Comm, Means, Outcome, PATIENT, connected};
use guildhall_comm::Failure;
use guildhall_comm::control::{Arrival, ControlLane, Received, Signal, mailbox};
use guildhall_comm::threads::{self, Options};
use guildhall_comm::wrap::{Agreement, Patience, Trace, Wrapper};
use guildhall_comm::{CallSite, Clock, Collective, Error, ManualClock, Reduce, Request, SystemClock};

/// Why each rank's run of `f` ended: the text of the error, whichever rank it was that saw it first.
fn causes(world: Vec<Comm>, f: impl Fn(&Comm) -> Outcome + Sync) -> Vec<String> {
    let cause = |result| match result {
        Err(Failure::Returned(Error::Aborted { reason, .. })) => reason,
        Err(Failure::Returned(error)) => error.to_string(),
        other => panic!("expected an error, got {other:?}"),
    };
    threads::run_on(world, |comm| f(&comm)).into_iter().map(cause).collect()
}

/// What ranks 0, 1, 2 do at their third operation.
struct Disagreement {
    name: &'static str,
    requests: [fn() -> Request; 3],
}

const DISAGREEMENTS: [Disagreement; 8] = [
    Disagreement {
        name: "the last does something else",
        requests: [Request::barrier, Request::barrier, || Request::broadcast(0, vec![0u8; 3])],
    },
    Disagreement {
        name: "the first does something else",
        requests: [|| Request::all_reduce(Reduce::Max, vec![0f32; 3]), Request::barrier, Request::barrier],
    },
    Disagreement {
        name: "all do something else",
        requests: [
            || Request::all_reduce(Reduce::Sum, vec![0f32; 3]),
            || Request::all_reduce(Reduce::Sum, vec![0f64; 3]),
            || Request::all_reduce(Reduce::Max, vec![0f32; 3]),
        ],
    },
    Disagreement {
        name: "another root",
        requests: [
            || Request::broadcast(1, vec![0u8; 3]),
            || Request::broadcast(2, vec![0u8; 3]),
            || Request::broadcast(1, vec![0u8; 3]),
        ],
    },
    Disagreement {
        name: "other counts",
        requests: [
            || Request::all_gather(vec![0u8; 1], vec![0u8; 6], vec![1, 2, 3]),
            || Request::all_gather(vec![0u8; 2], vec![0u8; 6], vec![1, 2, 3]),
            || Request::all_gather(vec![0u8; 2], vec![0u8; 5], vec![1, 2, 2]),
        ],
    },
    Disagreement {
        name: "other kinds of an exchange",
        requests: [
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
            || Request::all_to_all(vec![0u32; 3], vec![1; 3], vec![0u32; 3], vec![1; 3]),
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
        ],
    },
    Disagreement {
        name: "one does not get what it expects",
        requests: [
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 4], vec![1, 1, 2]),
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
        ],
    },
    Disagreement {
        name: "one contradicts itself",
        requests: [
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 3], vec![1; 3]),
            || Request::all_to_all(vec![0u8; 3], vec![1; 3], vec![0u8; 5], vec![1, 1, 3]),
        ],
    },
];

#[test]
fn disagreements_are_told_in_the_words_of_the_check_in_place() {
    for Disagreement { name, requests } in &DISAGREEMENTS {
        let [in_place, rest @ ..] = Means::ALL.map(|means| {
            let causes = causes(means.world(3, PATIENT, SystemClock::new()), |comm| {
                comm.barrier()?;
                let group = comm.split(0, comm.rank())?.named("expert");
                group.barrier()?;
                group.start(requests[comm.rank()]())?.wait()?;
                // Between two ranks that do agree the data may have moved.
                group.barrier()
            });
            causes.into_iter().collect::<BTreeSet<String>>()
        });
        assert_eq!(in_place.len(), 1, "{name}: {in_place:?}");
        assert!(in_place.iter().all(|text| text.contains("communicator 'expert'") && text.contains("agreement.rs:")));
        rest.iter().for_each(|over_lane| assert_eq!(*over_lane, in_place, "{name}"));
    }
}

const TIMEOUT: Duration = Duration::from_secs(30);
const OPTIONS: Options = Options { timeout: TIMEOUT };

/// The cause that ranks 0 and 2 agree on when rank 1, after a barrier, does not come to a reduction.
fn text_of_a_timeout(means: Means) -> String {
    let (clock, gave_up) = (ManualClock::new(), Barrier::new(3));
    let world = means.world(3, OPTIONS, clock.clone());
    let causes = causes(world, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            clock.await_sleepers(2);
            clock.advance(TIMEOUT);
            gave_up.wait();
            return comm.barrier();
        }
        let result = comm.all_reduce(Reduce::Sum, vec![0f32; 8]).map(drop);
        gave_up.wait();
        result
    });
    assert!(causes.iter().all(|text| *text == causes[0]), "{causes:?}");
    causes[0].clone()
}

#[test]
fn a_timeout_over_a_lane_also_says_where_the_missing_rank_was_last() {
    let (in_place, over_lane) = (text_of_a_timeout(Means::InPlace), text_of_a_timeout(Means::Mailboxes));
    assert!(in_place.contains("waited 30.0s for rank(s) [1], and [0, 2] had come to it; see what"), "{in_place}");
    let (before, after) = over_lane.split_once(" (rank 1 was last in barrier at ").expect(&over_lane);
    let (site, rest) = after.split_once(')').expect("a parenthesis");
    assert!(site.contains("tests/agreement.rs:"), "{site}");
    assert_eq!(format!("{before}{rest}"), in_place);
}

/// Rank 0 waits in the world for ranks 1 and 2, of which 1, with more patience, waits in a group without rank 0 for 2,
/// which is busy.
#[test]
fn a_rank_that_waits_in_another_group_is_found_there() {
    let (clock, gave_up) = (ManualClock::new(), Barrier::new(3));
    let dress = |(comm, lane): (Comm, Arc<dyn ControlLane>)| {
        let timeout = TIMEOUT * if comm.rank() == 1 { 2 } else { 1 };
        Agreement::wrap(comm, lane, Patience { timeout, clock: clock.clone() })
    };
    let options = Options { timeout: TIMEOUT * 2 };
    let world = threads::world_by(clock.clone(), 3, options).into_iter().zip(mailbox::lanes(3)).map(dress).collect();
    let there = line!() + 15;
    let causes = causes(world, |comm| {
        let pair = comm.split(comm.rank().min(1), comm.rank())?;
        comm.barrier()?;
        if comm.rank() == 2 {
            clock.await_sleepers(2);
            // Long enough for both to tell where they are, and then for rank 0 alone.
            clock.advance(TIMEOUT / 5);
            clock.await_sleepers(2);
            clock.advance(TIMEOUT);
            gave_up.wait();
            return comm.barrier();
        }
        let result = match comm.rank() {
            0 => comm.broadcast(0, vec![0u8]).map(drop),
            _ => pair.barrier(),
        };
        gave_up.wait();
        result
    });
    let text = &causes[0];
    assert!(
        text.contains("broadcast(root 0, 1 x u8) at ")
            && text.contains("for rank(s) [2] (rank 2 was last in barrier at "),
        "{text}"
    );
    assert!(text.contains(&format!("rank 1 was last in barrier at crates/comm/tests/agreement.rs:{there}:")), "{text}");
    assert!(text.contains("where it waits for rank(s) [2]), and [0] had come to it"), "{text}");
    assert!(causes.iter().all(|cause| cause == text), "{causes:?}");
}

/// A communicator of ranks without shared memory: nobody hears of its abort.
struct Deaf(Comm);

impl Wrapper for Deaf {
    fn inner(&self) -> &Comm {
        &self.0
    }

    fn around(&self, inner: Comm) -> Comm {
        Arc::new(Deaf(inner))
    }

    fn abort(&self, _reason: &str) {}
}

/// Ranks that hear of each other's failures over their lane alone.
fn deaf(lanes: Vec<Arc<dyn ControlLane>>) -> Vec<Comm> {
    let clock: Arc<dyn Clock> = SystemClock::new();
    let patience = Patience { timeout: PATIENT.timeout, clock: clock.clone() };
    let world = threads::world_by(clock, lanes.len(), PATIENT).into_iter().zip(lanes);
    world.map(|(comm, lane)| Agreement::wrap(Arc::new(Deaf(comm)), lane, patience.clone())).collect()
}

#[test]
fn a_failure_reaches_ranks_that_wait_in_other_groups_over_the_lane_alone() {
    for lanes in [mailbox::lanes(4), connected(4)] {
        let causes = causes(deaf(lanes), |comm| {
            let half = comm.split(comm.rank() / 2, comm.rank())?.named("half");
            match comm.rank() {
                3 => half.broadcast(9, vec![0u8]).map(drop),
                0 | 2 => comm.barrier(),
                _ => half.barrier(),
            }
        });
        assert!(causes[3].starts_with("rank 3: bad request broadcast(root 9"), "{causes:?}");
        assert!(causes.iter().all(|cause| *cause == causes[3]), "{causes:?}");
    }
}

#[test]
fn a_rank_that_fails_elsewhere_is_named_over_the_lane_alone() {
    for lanes in [mailbox::lanes(3), connected(3)] {
        let results = threads::run_on(deaf(lanes), |comm| {
            comm.barrier().map_err(|error| error.to_string())?;
            if comm.rank() == 1 {
                return Err("no such file".to_owned());
            }
            comm.barrier().map_err(|error| error.to_string())
        });
        let texts: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
        for rank in [0, 2] {
            let told = &texts[rank];
            assert!(told.starts_with("rank 1 aborted the world: no such file (heard of in barrier at "), "{told}");
            // The third may not have come yet, either.
            assert!(told.contains("of communicator 'world', which lacked rank(s) ["), "{told}");
            assert!(told.contains("rank 1 was last in barrier at "), "{told}");
            assert!(told.contains("had come to it); look for the first error of rank 1"), "{told}");
        }
        assert_eq!(texts[1], "no such file");
    }
}

/// Rank 0 hears of rank 2's failure from rank 1 alone, as if rank 2 had died while it told the others.
#[test]
fn who_hears_of_a_failure_passes_it_on() {
    let mut lanes = mailbox::lanes(3);
    let dying = lanes.pop().expect("three lanes");
    let clock: Arc<dyn Clock> = SystemClock::new();
    let patience = Patience { timeout: PATIENT.timeout, clock: clock.clone() };
    let mut world = threads::world_by(clock, 3, PATIENT);
    // Kept, so that no rank hears of anything but over the lane.
    let _data = world.pop();
    let world: Vec<Comm> = world
        .into_iter()
        .zip(lanes)
        .map(|(comm, lane)| {
            let comm: Comm = Arc::new(Deaf(comm));
            Agreement::wrap(comm, lane, patience.clone())
        })
        .collect();
    let failed = Signal::Failed { rank: 2, reason: "out of memory".to_owned(), site: None };
    dying.send(1, &failed);
    let causes = causes(world, |comm| comm.barrier());
    assert_eq!(causes, ["out of memory"; 2]);
}

/// The others need it, and need not wait for their timeout to know that they wait in vain.
#[test]
fn a_rank_that_has_left_is_not_waited_for() {
    for means in [Means::Mailboxes, Means::Sockets] {
        let results = means.run(3, PATIENT, |comm| {
            comm.barrier()?;
            if comm.rank() == 2 { Ok(()) } else { comm.barrier() }
        });
        assert!(results[2].is_ok());
        for result in &results[..2] {
            let Err(Failure::Returned(Error::Aborted { by: 2, reason, .. })) = result else { panic!("{result:?}") };
            assert!(reason.contains("it has left the world (rank 2 was last in barrier at "), "{reason}");
            assert!(reason.contains("communicator 'world' needs it for barrier at "), "{reason}");
        }
    }
}

/// Rank 1 starts an operation and goes about its own business: rank 0 can wait for another in the meantime.
#[test]
fn announcing_does_not_wait() {
    for means in [Means::Mailboxes, Means::Sockets] {
        let results = means.run(2, PATIENT, |comm| {
            let other = comm.duplicate()?;
            let (first, second) = if comm.rank() == 0 {
                let first = comm.start(Request::barrier())?;
                (first, other.start(Request::barrier())?)
            } else {
                let second = other.start(Request::barrier())?;
                (comm.start(Request::barrier())?, second)
            };
            second.wait()?;
            first.wait().map(drop)
        });
        results.into_iter().for_each(|result| result.expect("they agree"));
    }
}

/// One rank that agrees, and the bare lane of its peer.
fn with_a_bare_peer() -> (Comm, Arc<dyn ControlLane>, Vec<Comm>) {
    let mut lanes = mailbox::lanes(2);
    let bare = lanes.pop().expect("two lanes");
    let clock: Arc<dyn Clock> = SystemClock::new();
    let patience = Patience { timeout: PATIENT.timeout, clock: clock.clone() };
    let mut world = threads::world_by(clock, 2, PATIENT);
    let own = Agreement::wrap(world.remove(0), lanes.remove(0), patience);
    (own, bare, world)
}

#[test]
fn a_rank_says_where_it_is_and_where_it_failed() {
    let (own, bare, _data) = with_a_bare_peer();
    let request = Request::all_to_all(vec![0u8; 5], vec![2, 3], vec![0u8; 1], vec![0, 1]);
    let (operation, site) = (request.operation.to_string(), CallSite::from(request.site));
    drop(own.start(request).expect("announced"));
    let Some(Received { from: 0, signal: Signal::Arrived(arrival) }) = bare.receive() else { panic!("not announced") };
    assert_eq!((arrival.sequence, arrival.sent, arrival.expected), (0, 3, 1));
    assert_eq!((arrival.collective, arrival.operation, arrival.site), (Collective::AllToAll, operation, site));
    let request = Request::broadcast(9, vec![0u8]);
    let at = CallSite::from(request.site);
    assert!(own.start(request).is_err());
    let Some(Received { from: 0, signal: Signal::Failed { rank: 0, reason, site } }) = bare.receive() else {
        panic!("not told")
    };
    assert!(reason.contains("bad request broadcast(root 9") && site == Some(at), "{reason} at {site:?}");
    drop(own);
    assert_eq!(bare.receive().map(|received| received.signal), Some(Signal::Left), "a failure is told once");
}

/// Data moves neither before all agree, nor later than the next start after that.
#[test]
fn operations_begin_when_they_are_agreed_on() {
    let ledgers = Mutex::new(Vec::new());
    let dress = |(comm, lane)| {
        let (comm, ledger) = Trace::wrap(comm);
        ledgers.lock().expect("nobody panics").push(ledger);
        Agreement::wrap(comm, lane, Patience { timeout: PATIENT.timeout, clock: SystemClock::new() })
    };
    let world: Vec<Comm> = threads::world(2, PATIENT).into_iter().zip(mailbox::lanes(2)).map(dress).collect();
    let begun = |rank: usize| {
        let traffic = ledgers.lock().expect("nobody panics")[rank].snapshot();
        traffic.values().map(|traffic| traffic.calls).sum::<u64>()
    };
    let start = |rank: usize, request| world[rank].start(request).expect("announced");
    let first = start(0, Request::barrier());
    assert_eq!((begun(0), begun(1)), (0, 0), "rank 1 has not arrived");
    let peers = start(1, Request::barrier());
    assert_eq!((begun(0), begun(1)), (0, 1), "rank 1 knows that both have");
    let second = start(0, Request::all_reduce(Reduce::Sum, vec![0f32; 4]));
    assert_eq!((begun(0), begun(1)), (1, 1), "rank 0 looks when it starts again");
    let differing = start(1, Request::barrier());
    assert_eq!((begun(0), begun(1)), (1, 1), "what differs is not begun");
    assert!(differing.wait().is_err() && second.wait().is_err());
    drop((first, peers));
}

/// Rank 0 of two that are agreed by the clock, the bare lane of its peer, and the peer's data.
fn with_a_bare_peer_by(clock: &Arc<ManualClock>) -> (Comm, Arc<dyn ControlLane>, Comm) {
    let mut lanes = mailbox::lanes(2);
    let bare = lanes.pop().expect("two lanes");
    let mut world = threads::world_by(clock.clone(), 2, OPTIONS);
    let peer: Comm = world.pop().expect("two ranks");
    let patience = Patience { timeout: TIMEOUT, clock: clock.clone() };
    (Agreement::wrap(world.remove(0), lanes.remove(0), patience), bare, peer)
}

/// What a rank has announced.
fn announced(bare: &Arc<dyn ControlLane>) -> Arrival {
    match bare.receive() {
        Some(Received { from: 0, signal: Signal::Arrived(arrival) }) => arrival,
        other => panic!("{other:?}"),
    }
}

/// What a rank says that has waited in vain for the peer.
fn waits_in_vain(clock: &ManualClock, own: &Comm, request: Request) -> Error {
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| own.start(request)?.wait());
        clock.await_sleepers(1);
        clock.advance(TIMEOUT);
        waits.join().unwrap().expect_err("the peer does not come to it")
    })
}

/// Who came after all, and is then missing elsewhere, no longer waits for whom it waited before.
#[test]
fn where_a_rank_waited_is_forgotten_when_it_goes_on() {
    let clock = ManualClock::new();
    let (own, bare, peer) = with_a_bare_peer_by(&clock);
    let first = own.start(Request::barrier()).expect("announced");
    let arrival = announced(&bare);
    let waiting = Signal::Waiting { collective: Collective::Barrier, site: arrival.site.clone(), missing: vec![0] };
    [waiting, Signal::Arrived(arrival)].iter().for_each(|signal| bare.send(0, signal));
    std::thread::scope(|scope| {
        scope.spawn(|| peer.barrier());
        first.wait().expect("both have come");
    });
    let text = waits_in_vain(&clock, &own, Request::all_reduce(Reduce::Sum, vec![1u64])).to_string();
    assert!(text.contains("(rank 1 was last in barrier at ") && !text.contains("where it waits for"), "{text}");
}

/// A rank that waits for this one elsewhere, while this one waits for it, is named, and not this one.
#[test]
fn who_waits_in_a_circle_does_not_name_itself() {
    let clock = ManualClock::new();
    let (own, bare, _peer) = with_a_bare_peer_by(&clock);
    let site = CallSite::from(Request::barrier().site);
    bare.send(0, &Signal::Waiting { collective: Collective::AllToAll, site, missing: vec![0] });
    let error = waits_in_vain(&clock, &own, Request::barrier());
    let Error::Timeout { missing, attendance, .. } = &error else { panic!("{error}") };
    assert_eq!((&missing[..], &attendance.arrived[..]), (&[1][..], &[0][..]));
    assert!(error.to_string().contains("rank 1 was last in all_to_all at "), "{error}");
}

/// Who has waited for long, and has then gone on and left, is the one that has left.
#[test]
fn who_left_after_a_long_wait_is_named() {
    let (own, bare, _data) = with_a_bare_peer();
    let site = CallSite::from(Request::barrier().site);
    let waiting = Signal::Waiting { collective: Collective::AllToAll, site, missing: vec![0] };
    [waiting, Signal::Left].iter().for_each(|signal| bare.send(0, signal));
    let error = own.barrier().expect_err("rank 1 has left");
    assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("it has left the world (rank 1 was last in all_to_all at "), "{text}");
    assert!(!text.contains("waits for"), "who has left waits no more: {text}");
}

/// A rank says that it waits, and that it waits no longer.
#[test]
fn the_end_of_a_long_wait_is_told() {
    let clock = ManualClock::new();
    let (own, bare, peer) = with_a_bare_peer_by(&clock);
    let waits_for = || match bare.receive() {
        Some(Received { signal: Signal::Waiting { missing, .. }, .. }) => missing,
        other => panic!("{other:?}"),
    };
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| own.barrier());
        clock.await_sleepers(1);
        let arrival = announced(&bare);
        clock.advance(TIMEOUT / 5);
        clock.await_sleepers(1);
        assert_eq!(waits_for(), [1]);
        bare.send(0, &Signal::Arrived(arrival));
        scope.spawn(|| peer.barrier());
        waits.join().unwrap().expect("both have come");
    });
    assert_eq!(waits_for(), [0usize; 0]);
}
