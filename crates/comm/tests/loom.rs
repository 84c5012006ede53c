//! The rendezvous, and agreement over queues, under every order of events that a model checker can tell apart, two ranks at a time.
//!
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test --release -p guildhall-comm --test loom`
//!
//! Loom replaces atomics, cells, locks and condition variables; waits there look once and go to sleep, without spinning
//! and without timeouts, so a lost wake-up shows as a deadlock and a missing ordering as an access out of turn.

#![cfg(loom)]

use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::control::{ControlLane, Received, Signal, mailbox};
use guildhall_comm::wrap::{Agreement, Patience};
use guildhall_comm::{Communicator, Error, Reduce, Request, SystemClock, threads};

type Comm = Arc<dyn Communicator>;

/// Longer than any wait in a model, in which no time passes.
const HOUR: Duration = Duration::from_secs(3600);

/// Explores `first` on rank 0 against `second` on rank 1 of a fresh world.
fn explore(first: fn(Comm), second: fn(Comm)) {
    loom::model(move || {
        let options = threads::Options { timeout: HOUR };
        let mut world = threads::world(2, options);
        let peer = world.pop().expect("two ranks");
        let own = world.pop().expect("two ranks");
        let thread = loom::thread::spawn(move || second(peer));
        first(own);
        thread.join().expect("rank 1 does not panic");
    });
}

fn reduce(comm: &Comm) {
    // 32 elements are two cache lines: each rank reduces one and copies the other.
    let mine = vec![1.0 + comm.rank() as f32; 32];
    assert_eq!(comm.all_reduce(Reduce::Sum, mine).expect("nobody fails").into_f32(), [3.0; 32]);
}

fn exchange(comm: &Comm) {
    let rank = comm.rank() as u64;
    let received = comm.all_to_all_u64(&[10 * rank, 10 * rank + 1]).expect("nobody fails");
    assert_eq!(received, [rank, 10 + rank]);
}

#[test]
fn one_exchange() {
    let rank: fn(Comm) = |comm| exchange(&comm);
    explore(rank, rank);
}

#[test]
fn one_reduction_in_two_phases() {
    let rank: fn(Comm) = |comm| reduce(&comm);
    explore(rank, rank);
}

/// The second operation is awaited first; the first is finished on the way.
#[test]
fn two_in_flight_awaited_backwards() {
    let rank: fn(Comm) = |comm| {
        let first = comm.start(Request::broadcast(0, vec![comm.rank() as u8])).expect("nobody fails");
        let second = comm.start(Request::broadcast(1, vec![comm.rank() as u8])).expect("nobody fails");
        assert_eq!(second.wait().expect("nobody fails").recv.into_u8(), [1]);
        assert_eq!(first.wait().expect("nobody fails").recv.into_u8(), [0]);
    };
    explore(rank, rank);
}

/// One more operation than the ring has rounds, so that the first round's cells are written again.
#[test]
fn rounds_are_used_again() {
    let rank: fn(Comm) = |comm| {
        comm.barrier().expect("nobody fails");
        comm.barrier().expect("nobody fails");
        exchange(&comm);
    };
    explore(rank, rank);
}

/// Cells of barriers are written again by barriers and by others, and the other way round.
#[test]
fn rounds_of_barriers_are_used_again() {
    let rank: fn(Comm) = |comm| {
        comm.barrier().expect("nobody fails");
        exchange(&comm);
        comm.barrier().expect("nobody fails");
        comm.barrier().expect("nobody fails");
        exchange(&comm);
    };
    explore(rank, rank);
}

/// Rank 0 comes to the end of two barriers, of which its peer has started both and looked at neither, and goes on to the cells of
/// the first.
#[test]
fn a_barrier_that_a_peer_has_not_looked_at_is_not_written_over() {
    explore(
        |comm| {
            comm.barrier().expect("nobody fails");
            comm.barrier().expect("nobody fails");
            exchange(&comm);
        },
        |comm| {
            let started = [(); 2].map(|()| comm.start(Request::barrier()).expect("nobody fails"));
            started.into_iter().for_each(|pending| drop(pending.wait().expect("nobody fails")));
            exchange(&comm);
        },
    );
}

/// The third start must first finish the oldest round, whose cell it takes.
#[test]
fn more_in_flight_than_rounds() {
    let rank: fn(Comm) = |comm| {
        let start = |root| comm.start(Request::broadcast(root, vec![comm.rank() as u8])).expect("nobody fails");
        let started = [start(0), start(1), start(0)];
        let received = started.map(|pending| pending.wait().expect("nobody fails").recv.into_u8()[0]);
        assert_eq!(received, [0, 1, 0]);
    };
    explore(rank, rank);
}

/// Rank 0 drops its result and still gives its peer what it needs.
#[test]
fn a_dropped_operation_is_finished_with_the_next() {
    explore(
        |comm| {
            drop(comm.start(Request::broadcast(0, vec![7u8])).expect("nobody fails"));
            comm.barrier().expect("nobody fails");
        },
        |comm| {
            assert_eq!(comm.broadcast(0, vec![0u8]).expect("nobody fails").into_u8(), [7]);
            comm.barrier().expect("nobody fails");
        },
    );
}

/// Rank 0 leaves with an operation in flight: rank 1 hears of it wherever it is, or has finished before.
#[test]
fn leaving_is_never_silent() {
    explore(
        |comm| drop(comm.start(Request::all_reduce(Reduce::Sum, vec![1f32; 32])).expect("nobody fails")),
        |comm| {
            let error = comm.all_reduce(Reduce::Sum, vec![1f32; 32]).expect_err("its peer has left");
            assert!(matches!(error, Error::Aborted { by: 0, .. }));
        },
    );
}

/// An abort meets a rank that posts, waits or sleeps.
#[test]
fn an_abort_ends_every_wait() {
    explore(
        |comm| comm.abort("enough"),
        |comm| {
            let error = comm.barrier().expect_err("its peer never comes");
            assert!(matches!(error, Error::Aborted { by: 0, reason, .. } if reason == "enough"));
        },
    );
}

/// Both ranks fail at once; each hears of a cause.
#[test]
fn two_aborts_race() {
    let rank: fn(Comm) = |comm| {
        comm.abort("enough");
        assert!(matches!(comm.barrier(), Err(Error::Aborted { .. })));
    };
    explore(rank, rank);
}

/// An operation both have posted may succeed or be aborted, but leaves nobody behind.
#[test]
fn an_abort_races_with_an_exchange() {
    explore(
        |comm| {
            let pending = comm.start(Request::broadcast(1, vec![0u8]));
            comm.abort("enough");
            drop(pending.map(|pending| pending.wait()));
        },
        |comm| match comm.broadcast(1, vec![5u8]) {
            Ok(buf) => assert_eq!(buf.into_u8(), [5]),
            Err(error) => assert!(matches!(error, Error::Aborted { by: 0, .. })),
        },
    );
}

type Lane = Arc<dyn ControlLane>;

fn next(lane: &Lane) -> Received {
    lane.receive_by(&*SystemClock::new(), HOUR).expect("it has been sent, or will be")
}

/// Both ranks tell each other something and leave; neither sleeps through anything, nor hears it out of order.
#[test]
fn no_signal_is_slept_through() {
    fn rank(lane: Lane) {
        let own = Signal::Failed { rank: lane.rank(), reason: String::new(), site: None };
        lane.send_all(&own);
        let Received { from, signal } = next(&lane);
        assert_eq!((from, signal), (1 - lane.rank(), Signal::Failed { rank: from, reason: String::new(), site: None }));
    }
    loom::model(|| {
        let mut lanes = mailbox::lanes(2);
        let peer = lanes.pop().expect("two ranks");
        let own = lanes.pop().expect("two ranks");
        let thread = loom::thread::spawn(move || rank(peer));
        rank(own.clone());
        assert_eq!(next(&own).signal, Signal::Left);
        thread.join().expect("rank 1 does not panic");
    });
}

/// As [`explore`], where ranks agree over queues first.
fn explore_agreement(first: fn(Comm), second: fn(Comm)) {
    loom::model(move || {
        let options = threads::Options { timeout: HOUR };
        let world = threads::world(2, options).into_iter().zip(mailbox::lanes(2));
        let patience = Patience { timeout: HOUR, clock: SystemClock::new() };
        let mut world: Vec<Comm> = world.map(|(comm, lane)| Agreement::wrap(comm, lane, patience.clone())).collect();
        let peer = world.pop().expect("two ranks");
        let own = world.pop().expect("two ranks");
        let thread = loom::thread::spawn(move || second(peer));
        first(own);
        thread.join().expect("rank 1 does not panic");
    });
}

#[test]
fn ranks_that_agree_go_on() {
    let rank: fn(Comm) = |comm| exchange(&comm);
    explore_agreement(rank, rank);
}

#[test]
fn ranks_that_disagree_both_hear_of_it() {
    explore_agreement(
        |comm| {
            let error = comm.barrier().expect_err("its peer does something else");
            assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { by: 1, .. }), "{error}");
        },
        |comm| {
            let error = comm.broadcast(0, vec![0u8]).expect_err("its peer does something else");
            assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { by: 0, .. }), "{error}");
        },
    );
}

/// An abort, or the leaving that follows it, meets a rank that announces, waits or sleeps.
#[test]
fn an_abort_ends_every_agreement() {
    explore_agreement(
        |comm| comm.abort("enough"),
        |comm| {
            let error = comm.barrier().expect_err("its peer never comes");
            assert!(matches!(error, Error::Aborted { by: 0, reason, .. } if reason == "enough"));
        },
    );
}
