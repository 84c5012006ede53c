//! What happens when ranks disagree, stay away, fail or die: everybody hears of it in time, with names and places.

mod common;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{Comm, Means, PATIENT};
use guildhall_comm::Failure;
use guildhall_comm::threads::{self, Options};
use guildhall_comm::wrap::{Death, Fault, Faults};
use guildhall_comm::{Clock, Error, ManualClock, Payload, Reduce, Request, Span, SystemClock, solo};

/// A test of each of these, by all means of agreement.
macro_rules! by_all_means {
    ($($test:ident,)*) => {
        by_all_means!(@ in_place, InPlace, $($test,)*);
        by_all_means!(@ mailboxes, Mailboxes, $($test,)*);
        by_all_means!(@ sockets, Sockets, $($test,)*);
        by_all_means!(@ messages, Messages, $($test,)*);
        by_all_means!(@ carried, Carried, $($test,)*);
    };
    (@ $module:ident, $means:ident, $($test:ident,)*) => {
        mod $module {
            $(#[test]
            fn $test() {
                super::$test(super::Means::$means);
            })*
        }
    };
}

by_all_means! {
    different_collectives_are_named_with_both_call_sites,
    every_difference_in_a_collective_is_a_mismatch,
    an_operation_too_many_is_a_timeout_naming_who_is_missing,
    a_rank_that_panics_is_named_to_its_peers,
    a_rank_that_returns_an_error_is_named_to_its_peers,
    results_of_a_world_without_failures_are_in_rank_order,
    a_bad_request_is_refused_where_it_is_made_and_ends_the_world,
    unequal_counts_between_peers_are_named,
    a_childs_failure_ends_the_parent_and_its_siblings,
    an_abort_of_the_parent_ends_its_children,
    a_timeout_in_a_child_names_ranks_of_the_world,
    an_abort_wakes_a_sleeping_rank_at_once,
    only_the_first_abort_is_kept,
    leaving_with_operations_in_flight_is_told_to_peers,
    nothing_succeeds_after_a_failure,
    an_announced_death_is_named_to_peers,
    a_silent_death_is_found_by_timeout,
}

/// For tests in which a wait must run out.
const HASTY: Options = Options { timeout: Duration::from_millis(300) };

/// By what clock waits run out: one that is set forward when all who should wait do so. Bytes on their way through
/// sockets take real time, and so does running out there.
struct Time {
    manual: Option<Arc<ManualClock>>,
    clock: Arc<dyn Clock>,
}

impl Time {
    fn of(means: Means) -> Self {
        if means == Means::Sockets {
            return Time { manual: None, clock: SystemClock::new() };
        }
        let clock = ManualClock::new();
        Time { manual: Some(clock.clone()), clock }
    }

    /// Lets the waits of `sleepers` ranks run out.
    fn run_out(&self, sleepers: usize) {
        if let Some(clock) = &self.manual {
            clock.await_sleepers(sleepers);
            clock.advance(HASTY.timeout);
        }
    }
}

/// The error each of `size` ranks gets from `f`, which must fail everywhere well before a patient timeout.
fn errors(means: Means, size: usize, f: impl Fn(&Comm) -> Result<(), Error> + Sync) -> Vec<Error> {
    let since = Instant::now();
    let errors = errors_of(means.world(size, PATIENT, SystemClock::new()), f);
    assert!(since.elapsed() < Duration::from_secs(20), "took {:?}", since.elapsed());
    errors
}

/// The same of a given world.
fn errors_of(world: Vec<Comm>, f: impl Fn(&Comm) -> Result<(), Error> + Sync) -> Vec<Error> {
    let error = |result| match result {
        Err(Failure::Returned(error)) => error,
        other => panic!("expected an error, got {other:?}"),
    };
    threads::run_on(world, |comm| f(&comm)).into_iter().map(error).collect()
}

/// Every error must carry each of `needles` in its text.
fn assert_all_say(errors: &[Error], needles: &[&str]) {
    for error in errors {
        let text = error.to_string();
        assert!(needles.iter().all(|needle| text.contains(needle)), "{text:?} lacks one of {needles:?}");
    }
}

/// The place `file:line` that `offset` lines after the caller.
#[track_caller]
fn line_after(offset: u32) -> String {
    let here = std::panic::Location::caller();
    format!("{}:{}:", here.file(), here.line() + offset)
}

fn different_collectives_are_named_with_both_call_sites(means: Means) {
    let (barrier, reduction) = (line_after(2), line_after(3));
    let errors = errors(means, 3, |comm| match comm.rank() {
        2 => comm.barrier(),
        _ => comm.all_reduce(Reduce::Sum, vec![0f32; 5]).map(drop),
    });
    assert_all_say(&errors, &["all_reduce(Sum, 5 x f32)", "barrier", "rank 0 is in", "rank 2 is in"]);
    assert_all_say(&errors, &[&barrier, &reduction, "operation 0"]);
    assert!(errors.iter().any(|error| matches!(error, Error::Mismatch { .. })));
}

fn every_difference_in_a_collective_is_a_mismatch(means: Means) {
    type Variant = fn(usize) -> Request;
    let variants: [Variant; 7] = [
        |odd| Request::broadcast(odd, vec![0u8; 4]),
        |odd| Request::broadcast(0, vec![0u8; 4 + odd]),
        |odd| Request::all_reduce(Reduce::Sum, vec![0f64; 4 + odd]),
        |odd| Request::all_reduce([Reduce::Max, Reduce::Min][odd], vec![0f64; 4]),
        |odd| {
            let buffer: Payload = if odd == 0 { vec![0f32; 4].into() } else { vec![0u32; 4].into() };
            Request::all_reduce(Reduce::Sum, buffer)
        },
        |odd| Request::all_gather(vec![0u8; 3], vec![0u8; 6 + odd], vec![3, 3 + odd]),
        |odd| Request::reduce_scatter(Reduce::Sum, vec![0u8; 6 + odd], vec![0u8; 3 + odd], vec![3, 3 + odd]),
    ];
    for (index, variant) in variants.iter().enumerate() {
        // The odd rank is 1, and its own contribution follows its own counts.
        let request = |rank| match (index, rank) {
            (5, 1) => Request::all_gather(vec![0u8; 4], vec![0u8; 7], vec![3, 4]),
            _ => variant(rank),
        };
        let errors = errors(means, 2, |comm| comm.start(request(comm.rank()))?.wait().map(drop));
        assert_all_say(&errors, &["differs between ranks", "rank 0", "rank 1"]);
    }
}

fn an_operation_too_many_is_a_timeout_naming_who_is_missing(means: Means) {
    let (time, gave_up) = (Time::of(means), Barrier::new(3));
    let errors = errors_of(means.world(3, HASTY, time.clock.clone()), |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            // Still there, but busy with something else.
            time.run_out(2);
            gave_up.wait();
        }
        let result = comm.all_reduce(Reduce::Sum, vec![0f32; 8]).map(drop);
        if comm.rank() != 1 {
            gave_up.wait();
        }
        result
    });
    assert_all_say(&errors, &["communicator 'world'", "all_reduce(Sum, 8 x f32) at ", "failures.rs", "rank(s) [1]"]);
    assert!(errors.iter().any(|error| matches!(error, Error::Timeout { missing, waited, .. }
        if missing == &[1] && *waited >= HASTY.timeout)));
    assert!(matches!(errors[1], Error::Aborted { by: 0 | 2, .. }));
}

fn a_rank_that_panics_is_named_to_its_peers(means: Means) {
    let results = means.run(3, PATIENT, |comm| {
        if comm.rank() == 1 {
            panic!("out of {}", "luck");
        }
        comm.barrier()
    });
    let told = |index: usize| match &results[index] {
        Err(Failure::Returned(Error::Aborted { by: 1, reason, .. })) => reason.contains("rank 1 panicked: out of luck"),
        _ => false,
    };
    assert!(told(0) && told(2), "{results:?}");
    assert!(matches!(&results[1], Err(Failure::Panicked { rank: 1, message }) if message == "out of luck"));
}

fn a_rank_that_returns_an_error_is_named_to_its_peers(means: Means) {
    let results = means.run(3, PATIENT, |comm| {
        if comm.rank() == 2 {
            return Err("no such file".to_string());
        }
        comm.barrier().map_err(|error| error.to_string())
    });
    let texts: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    // Where ranks tell each other, each says besides in what it was.
    assert!(texts[..2].iter().all(|text| text.contains("rank 2 aborted the world: no such file")), "{texts:?}");
    assert_eq!(texts[2], "no such file");
}

fn results_of_a_world_without_failures_are_in_rank_order(means: Means) {
    let results = means.run(4, PATIENT, |comm| Ok::<_, Error>(comm.rank()));
    let ranks: Vec<usize> = results.into_iter().map(|result| result.expect("nobody fails")).collect();
    assert_eq!(ranks, [0, 1, 2, 3]);
}

/// Requests that contradict themselves, on a rank of two.
fn bad_requests() -> Vec<(Request, &'static str)> {
    let outside = Span { data: vec![0u8; 4], range: 3..9 };
    vec![
        (Request::broadcast(2, vec![0u8]), "root 2 is not among the 2 ranks"),
        (Request::all_reduce(Reduce::Sum, outside), "the range of buf does not lie within its data"),
        (Request::all_gather(vec![0u8; 2], vec![0u8; 3], vec![2, 2]), "recv has 3 elements"),
        (Request::all_gather(vec![0u8; 1], vec![0u8; 4], vec![2, 2]), "send has 1 elements"),
        (Request::all_gather(vec![0u8; 2], vec![0u8; 2], vec![2]), "counts has 1 entries for 2 ranks"),
        (Request::all_gather(vec![0u8; 2], vec![0f32; 4], vec![2, 2]), "send holds u8 but recv holds f32"),
        (Request::reduce_scatter(Reduce::Max, vec![0u8; 5], vec![0u8; 2], vec![2, 2]), "send has 5 elements"),
        (Request::all_to_all(vec![0u8; 4], vec![2, 2], vec![0u8; 4], vec![2, 3]), "the sum of recv_counts is 5"),
        (Request::all_to_all(vec![0u8; 4], vec![usize::MAX, 5], vec![0u8; 4], vec![2, 2]), "send_counts overflows"),
    ]
}

fn a_bad_request_is_refused_where_it_is_made_and_ends_the_world(means: Means) {
    for index in 0..bad_requests().len() {
        let errors = errors(means, 2, |comm| {
            if comm.rank() == 1 { comm.start(bad_requests().remove(index).0)?.wait().map(drop) } else { comm.barrier() }
        });
        assert!(matches!(errors[0], Error::Aborted { by: 1, .. }), "{:?}", errors[0]);
        assert!(matches!(errors[1], Error::Counts { rank: 1, .. }), "{:?}", errors[1]);
        assert_all_say(&errors, &["rank 1: bad request", bad_requests()[index].1, "failures.rs"]);
    }
}

fn unequal_counts_between_peers_are_named(means: Means) {
    let request = |rank: usize| {
        let (send, recv, even) = (vec![0f32; 6], vec![0f32; 6], vec![2, 2, 2]);
        match rank {
            0 => Request::all_to_all(send, even, recv, vec![2, 1, 3]),
            _ => Request::all_to_all(send, even.clone(), recv, even),
        }
    };
    let errors = errors(means, 3, |comm| comm.start(request(comm.rank()))?.wait().map(drop));
    let sites = [request(0), request(1)].map(|request| request.site.to_string());
    assert_ne!(sites[0], sites[1]);
    assert_all_say(&errors, &[&sites[0], &sites[1], "rank 0", "elements of rank", "sends it 2"]);
    assert!(errors.iter().any(|error| matches!(error, Error::PeerCounts { sent: 2, expected: 1 | 3, .. })));
}

#[test]
fn a_solo_rank_hears_the_same_of_itself() {
    let world = solo::world();
    let error = world.all_to_all(vec![0f32; 2], vec![2], vec![0f32; 3], vec![3]).unwrap_err();
    assert!(matches!(error, Error::PeerCounts { expected: 3, sent: 2, .. }), "{error}");
    assert!(matches!(world.barrier(), Err(Error::Aborted { by: 0, .. })));
    let world = solo::world();
    let error = world.broadcast(1, vec![0u8]).unwrap_err();
    assert!(matches!(error, Error::Counts { .. }), "{error}");
    let world = solo::world();
    world.split(0, 0).unwrap().abort("enough");
    assert_eq!(world.barrier().unwrap_err().to_string(), world.duplicate().err().unwrap().to_string());
}

/// A failure in one half must reach a rank that waits in the other half, and in the whole.
fn a_childs_failure_ends_the_parent_and_its_siblings(means: Means) {
    let errors = errors(means, 4, |comm| {
        let half = comm.split(comm.rank() / 2, comm.rank())?.named("half");
        match comm.rank() {
            // World rank 3 is rank 1 of the second half; 1 waits in vain in its own half, 2 in the world.
            3 => half.broadcast(9, vec![0u8]).map(drop),
            0 | 2 => comm.barrier(),
            _ => half.barrier(),
        }
    });
    assert_all_say(&errors, &["rank 3: bad request broadcast(root 9"]);
    assert!(errors[..3].iter().all(|error| matches!(error, Error::Aborted { by: 3, .. })));
}

fn an_abort_of_the_parent_ends_its_children(means: Means) {
    let errors = errors(means, 4, |comm| {
        let half = comm.split(comm.rank() % 2, 0)?;
        if comm.rank() == 0 {
            comm.abort("the user pressed a key");
        }
        half.barrier()?;
        comm.barrier()
    });
    assert_all_say(&errors, &["rank 0 aborted the world: the user pressed a key"]);
}

fn a_timeout_in_a_child_names_ranks_of_the_world(means: Means) {
    let (time, split, gave_up) = (Time::of(means), Barrier::new(4), Barrier::new(4));
    let errors = errors_of(means.world(4, HASTY, time.clock.clone()), |comm| {
        let half = comm.split(comm.rank() / 2, 0)?.named("half");
        split.wait();
        if comm.rank() == 3 {
            let result = half.barrier();
            gave_up.wait();
            return result;
        }
        if comm.rank() == 2 {
            time.run_out(1);
        }
        gave_up.wait();
        half.barrier()
    });
    assert!(matches!(&errors[3], Error::Timeout { missing, .. } if missing == &[2]));
    assert_all_say(&errors, &["communicator 'half'", "rank(s) [2]"]);
}

/// By then the waiting rank sleeps; the abort must wake it.
fn an_abort_wakes_a_sleeping_rank_at_once(means: Means) {
    let clock = ManualClock::new();
    let errors = errors_of(means.world(2, HASTY, clock.clone()), |comm| {
        if comm.rank() == 1 {
            clock.await_sleepers(1);
            comm.abort("late regret");
        }
        comm.barrier()
    });
    assert_all_say(&errors, &["late regret"]);
}

fn only_the_first_abort_is_kept(means: Means) {
    let comms = means.world(2, PATIENT, SystemClock::new());
    comms[1].abort("first");
    comms[0].barrier().expect_err("it has been aborted");
    comms[0].abort("second");
    let error = comms[0].barrier().unwrap_err();
    assert!(matches!(&error, Error::Aborted { by: 1, reason, .. } if reason == "first"), "{error}");
}

fn leaving_with_operations_in_flight_is_told_to_peers(means: Means) {
    let left = Barrier::new(2);
    let errors = errors(means, 2, |comm| {
        let lane = comm.duplicate()?;
        if comm.rank() == 0 {
            drop(lane.start(Request::all_reduce(Reduce::Sum, vec![0f32; 100]))?);
            drop(lane);
            left.wait();
            return comm.barrier();
        }
        // It could be over before the other one leaves.
        left.wait();
        lane.all_reduce(Reduce::Sum, vec![0f32; 100]).map(drop)
    });
    assert_all_say(&errors, &["rank 0", "left a communicator with 1 operation(s) in flight"]);
}

/// The first failure must not let a later operation of the same lane go ahead.
fn nothing_succeeds_after_a_failure(means: Means) {
    let errors = errors(means, 2, |comm| {
        let first = comm.start(Request::all_reduce(Reduce::Sum, vec![0f32; 1 + comm.rank()]))?;
        let second = comm.start(Request::barrier());
        assert!(first.wait().is_err());
        assert!(second.is_err() || second?.wait().is_err());
        assert!(comm.split(0, 0).is_err());
        comm.barrier()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Aborted { .. })));
    assert_all_say(&errors, &["1 x f32", "2 x f32"]);
}

/// Rank 0 gives up on rank 1, which then finishes both operations after all. By now rank 0 could finish them too; but
/// it has failed, and must stay so.
#[test]
fn a_failed_rank_does_not_go_on() {
    let (gave_up, caught_up) = (Barrier::new(2), Barrier::new(2));
    let clock = ManualClock::new();
    let errors = errors_of(Means::InPlace.world(2, HASTY, clock.clone()), |comm| {
        let start = || comm.start(Request::broadcast(0, vec![1.0f32]));
        let (first, second) = (start()?, start()?);
        if comm.rank() == 0 {
            let error = first.wait().expect_err("rank 1 has posted, but does not finish");
            assert!(matches!(error, Error::Timeout { missing, .. } if missing == [1]));
            gave_up.wait();
            caught_up.wait();
            return second.wait().map(drop);
        }
        clock.await_sleepers(1);
        clock.advance(HASTY.timeout);
        gave_up.wait();
        first.wait().expect("rank 0 had finished its part");
        let result = second.wait().map(drop);
        caught_up.wait();
        result
    });
    assert_all_say(&errors, &["rank 0 aborted the world", "rank(s) [1]"]);
}

fn dying(comm: &Comm, announced: bool) -> Comm {
    let death = (comm.rank() == 1).then_some(Death { at_operation: 2, announced });
    Fault::wrap(comm.clone(), Faults { seed: 5, delay_max: Duration::from_micros(100), death })
}

fn an_announced_death_is_named_to_peers(means: Means) {
    let errors = errors(means, 3, |comm| {
        let comm = dying(comm, true);
        (0..5).try_for_each(|_| comm.barrier())
    });
    assert_all_say(&errors, &["rank 1 aborted the world: died at its operation 2"]);
}

fn a_silent_death_is_found_by_timeout(means: Means) {
    let (time, noticed) = (Time::of(means), Barrier::new(3));
    let errors = errors_of(means.world(3, HASTY, time.clock.clone()), |comm| {
        let comm = dying(comm, false);
        let result = (0..5).try_for_each(|_| comm.barrier());
        if comm.rank() == 1 {
            time.run_out(2);
        }
        // The dead do not report: its thread ends only when its peers have noticed.
        noticed.wait();
        result
    });
    assert!(matches!(&errors[1], Error::Aborted { by: 1, .. }));
    assert_all_say(&[errors[0].clone(), errors[2].clone()], &["rank(s) [1]", "barrier at "]);
}
