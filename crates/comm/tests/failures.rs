//! What happens when ranks disagree, stay away, fail or die: everybody hears of it in time, with names and places.

mod common;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{Comm, PATIENT};
use guildhall_comm::threads::{self, Failure, Options};
use guildhall_comm::wrap::{Death, Fault, Faults};
use guildhall_comm::{Error, Payload, Reduce, Request, Span, solo};

/// Short, for tests in which a wait must run out.
const HASTY: Options = Options { timeout: Duration::from_millis(300) };

/// The error each of `size` ranks gets from `f`, which must fail everywhere well before a patient timeout.
fn errors(size: usize, options: Options, f: impl Fn(&Comm) -> Result<(), Error> + Sync) -> Vec<Error> {
    let since = Instant::now();
    let results = threads::run(size, options, |comm| f(&comm));
    assert!(since.elapsed() < Duration::from_secs(20), "took {:?}", since.elapsed());
    let error = |result| match result {
        Err(Failure::Returned(error)) => error,
        other => panic!("expected an error, got {other:?}"),
    };
    results.into_iter().map(error).collect()
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

#[test]
fn different_collectives_are_named_with_both_call_sites() {
    let (barrier, reduction) = (line_after(2), line_after(3));
    let errors = errors(3, PATIENT, |comm| match comm.rank() {
        2 => comm.barrier(),
        _ => comm.all_reduce(Reduce::Sum, vec![0f32; 5]).map(drop),
    });
    assert_all_say(&errors, &["all_reduce(Sum, 5 x f32)", "barrier", "rank 0 is in", "rank 2 is in"]);
    assert_all_say(&errors, &[&barrier, &reduction, "operation 0"]);
    assert!(errors.iter().any(|error| matches!(error, Error::Mismatch { .. })));
}

#[test]
fn every_difference_in_a_collective_is_a_mismatch() {
    type Variant = fn(usize) -> Request;
    let variants: [Variant; 7] = [
        |odd| Request::broadcast(odd, vec![0u8; 4]),
        |odd| Request::broadcast(0, vec![0u8; 4 + odd]),
        |odd| Request::all_reduce(Reduce::Sum, vec![0f64; 4 + odd]),
        |odd| Request::all_reduce([Reduce::Max, Reduce::Min][odd], vec![0f64; 4]),
        |odd| {
            let buffer: [Payload; 2] = [vec![0f32; 4].into(), vec![0u32; 4].into()];
            Request::all_reduce(Reduce::Sum, buffer[odd].clone())
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
        let errors = errors(2, PATIENT, |comm| comm.start(request(comm.rank()))?.wait().map(drop));
        assert_all_say(&errors, &["differs between ranks", "rank 0", "rank 1"]);
    }
}

#[test]
fn an_operation_too_many_is_a_timeout_naming_who_is_missing() {
    let errors = errors(3, HASTY, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            // Still there, but busy with something else.
            std::thread::sleep(HASTY.timeout * 3);
        }
        comm.all_reduce(Reduce::Sum, vec![0f32; 8]).map(drop)
    });
    assert_all_say(&errors, &["communicator 'world'", "all_reduce(Sum, 8 x f32) at ", "failures.rs", "rank(s) [1]"]);
    assert!(errors.iter().any(|error| matches!(error, Error::Timeout { missing, .. } if missing == &[1])));
    assert!(matches!(errors[1], Error::Aborted { by: 0 | 2, .. }));
}

#[test]
fn a_rank_that_panics_is_named_to_its_peers() {
    let results = threads::run(3, PATIENT, |comm| {
        if comm.rank() == 1 {
            panic!("out of {}", "luck");
        }
        comm.barrier()
    });
    let told = |index: usize| match &results[index] {
        Err(Failure::Returned(Error::Aborted { by: 1, reason })) => reason.contains("rank 1 panicked: out of luck"),
        _ => false,
    };
    assert!(told(0) && told(2), "{results:?}");
    assert!(matches!(&results[1], Err(Failure::Panicked { rank: 1, message }) if message == "out of luck"));
}

#[test]
fn a_rank_that_returns_an_error_is_named_to_its_peers() {
    let results = threads::run(3, PATIENT, |comm| {
        if comm.rank() == 2 {
            return Err("no such file".to_string());
        }
        comm.barrier().map_err(|error| error.to_string())
    });
    let texts: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    assert!(texts[0].contains("rank 2 aborted the world: no such file") && texts[1] == texts[0]);
    assert_eq!(texts[2], "no such file");
}

#[test]
fn results_of_a_world_without_failures_are_in_rank_order() {
    let results = threads::run(4, PATIENT, |comm| Ok::<_, Error>(comm.rank()));
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

#[test]
fn a_bad_request_is_refused_where_it_is_made_and_ends_the_world() {
    for index in 0..bad_requests().len() {
        let errors = errors(2, PATIENT, |comm| {
            if comm.rank() == 1 { comm.start(bad_requests().remove(index).0)?.wait().map(drop) } else { comm.barrier() }
        });
        assert!(matches!(errors[0], Error::Aborted { by: 1, .. }), "{:?}", errors[0]);
        assert!(matches!(errors[1], Error::Counts { rank: 1, .. }), "{:?}", errors[1]);
        assert_all_say(&errors, &["rank 1: bad request", bad_requests()[index].1, "failures.rs"]);
    }
}

#[test]
fn unequal_counts_between_peers_are_named() {
    let request = |rank: usize| {
        let (send, recv, even) = (vec![0f32; 6], vec![0f32; 6], vec![2, 2, 2]);
        match rank {
            0 => Request::all_to_all(send, even, recv, vec![2, 1, 3]),
            _ => Request::all_to_all(send, even.clone(), recv, even),
        }
    };
    let errors = errors(3, PATIENT, |comm| comm.start(request(comm.rank()))?.wait().map(drop));
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
#[test]
fn a_childs_failure_ends_the_parent_and_its_siblings() {
    let errors = errors(4, PATIENT, |comm| {
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

#[test]
fn an_abort_of_the_parent_ends_its_children() {
    let errors = errors(4, PATIENT, |comm| {
        let half = comm.split(comm.rank() % 2, 0)?;
        if comm.rank() == 0 {
            comm.abort("the user pressed a key");
        }
        half.barrier()?;
        comm.barrier()
    });
    assert_all_say(&errors, &["rank 0 aborted the world: the user pressed a key"]);
}

#[test]
fn a_timeout_in_a_child_names_ranks_of_the_world() {
    let errors = errors(4, HASTY, |comm| {
        let half = comm.split(comm.rank() / 2, 0)?.named("half");
        if comm.rank() != 3 {
            std::thread::sleep(HASTY.timeout * 2);
        }
        half.barrier()
    });
    assert!(matches!(&errors[3], Error::Timeout { missing, .. } if missing == &[2]));
    assert_all_say(&errors, &["communicator 'half'", "rank(s) [2]"]);
}

/// By then the waiting rank sleeps; the abort must wake it.
#[test]
fn an_abort_wakes_a_sleeping_rank_at_once() {
    let since = Instant::now();
    let errors = errors(2, PATIENT, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            comm.abort("late regret");
        }
        comm.barrier()
    });
    assert_all_say(&errors, &["late regret"]);
    assert!(since.elapsed() < Duration::from_secs(5));
}

#[test]
fn only_the_first_abort_is_kept() {
    let comms = threads::world(2, PATIENT);
    comms[1].abort("first");
    comms[0].abort("second");
    let error = comms[0].barrier().unwrap_err();
    assert!(matches!(&error, Error::Aborted { by: 1, reason } if reason == "first"), "{error}");
}

#[test]
fn leaving_with_operations_in_flight_is_told_to_peers() {
    let errors = errors(2, PATIENT, |comm| {
        let lane = comm.duplicate()?;
        if comm.rank() == 0 {
            drop(lane.start(Request::all_reduce(Reduce::Sum, vec![0f32; 100]))?);
            drop(lane);
            return comm.barrier();
        }
        lane.all_reduce(Reduce::Sum, vec![0f32; 100]).map(drop)
    });
    assert_all_say(&errors, &["rank 0", "left a communicator with 1 operation(s) in flight"]);
}

/// The first failure must not let a later operation of the same lane go ahead.
#[test]
fn nothing_succeeds_after_a_failure() {
    let errors = errors(2, PATIENT, |comm| {
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
    let errors = errors(2, HASTY, |comm| {
        let (first, second) = (comm.start(Request::barrier())?, comm.start(Request::barrier())?);
        if comm.rank() == 0 {
            let error = first.wait().expect_err("rank 1 has posted, but does not finish");
            assert!(matches!(error, Error::Timeout { missing, .. } if missing == [1]));
            gave_up.wait();
            caught_up.wait();
            return second.wait().map(drop);
        }
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

#[test]
fn an_announced_death_is_named_to_peers() {
    let errors = errors(3, PATIENT, |comm| {
        let comm = dying(comm, true);
        (0..5).try_for_each(|_| comm.barrier())
    });
    assert_all_say(&errors, &["rank 1 aborted the world: died at its operation 2"]);
}

#[test]
fn a_silent_death_is_found_by_timeout() {
    let errors = errors(3, HASTY, |comm| {
        let comm = dying(comm, false);
        let result = (0..5).try_for_each(|_| comm.barrier());
        // The dead do not report: its thread ends only when its peers have noticed.
        std::thread::sleep(if comm.rank() == 1 { HASTY.timeout * 3 } else { Duration::ZERO });
        result
    });
    assert!(matches!(&errors[1], Error::Aborted { by: 1, .. }));
    assert_all_say(&[errors[0].clone(), errors[2].clone()], &["rank(s) [1]", "barrier at "]);
}
