//! What the wrappers add: bytes counted by formula and by group, time spent waiting, and delays drawn by seed.

mod common;

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use common::{PATIENT, hold};
use guildhall_comm::wrap::{Trace, Traffic};
use guildhall_comm::{Collective, Error, Reduce, Request, solo, threads};

/// The ledger of one rank as (group, collective, calls, bytes).
fn rows(snapshot: BTreeMap<(String, Collective), Traffic>) -> Vec<(String, &'static str, u64, u64)> {
    let row = |((group, collective), traffic): ((String, Collective), Traffic)| {
        (group, collective.name(), traffic.calls, traffic.bytes)
    };
    snapshot.into_iter().map(row).collect()
}

fn row(group: &str, collective: &'static str, calls: u64, bytes: u64) -> (String, &'static str, u64, u64) {
    (group.to_string(), collective, calls, bytes)
}

#[test]
fn bytes_follow_the_table() {
    let ledgers = threads::run(4, PATIENT, |comm| {
        let (comm, ledger) = Trace::wrap(comm);
        let (rank, counts) = (comm.rank(), vec![1, 2, 3, 4]);
        comm.barrier()?;
        comm.broadcast(1, vec![0u8; 10])?;
        comm.all_reduce(Reduce::Sum, vec![0f32; 100])?;
        comm.all_reduce(Reduce::Max, vec![0f32; 100])?;
        comm.all_gather(vec![0u64; rank + 1], vec![0u64; 10], counts.clone())?;
        comm.reduce_scatter(Reduce::Sum, vec![0f64; 10], vec![0f64; rank + 1], counts.clone())?;
        comm.all_to_all(vec![0f32; 10], counts, vec![0f32; 4 * (rank + 1)], vec![rank + 1; 4])?;
        Ok::<_, Error>(rows(ledger.snapshot()))
    });
    for (rank, ledger) in ledgers.into_iter().enumerate() {
        let own = rank as u64 + 1;
        let expected = [
            row("world", "barrier", 1, 0),
            row("world", "broadcast", 1, if rank == 1 { 30 } else { 0 }),
            row("world", "all_reduce", 2, 1200),
            row("world", "all_gather", 1, 3 * 8 * own),
            row("world", "reduce_scatter", 1, 8 * (10 - own)),
            row("world", "all_to_all", 1, 4 * (10 - own)),
        ];
        assert_eq!(ledger.expect("nobody fails"), expected);
    }
}

#[test]
fn groups_report_under_their_own_names_to_one_ledger() {
    let ledgers = threads::run(4, PATIENT, |comm| {
        let (world, ledger) = Trace::wrap(comm);
        let expert = world.split(world.rank() % 2, 0)?.named("expert");
        let lane = expert.duplicate()?;
        let unnamed = world.split(3, 0)?;
        expert.all_gather_u64(&[1])?;
        lane.start(Request::all_gather(vec![0u64; 2], vec![0u64; 4], vec![2, 2]))?.wait()?;
        unnamed.barrier()?;
        Ok::<_, Error>(rows(ledger.snapshot()))
    });
    for ledger in ledgers {
        let expected = [row("expert", "all_gather", 2, 8 + 16), row("world/3", "barrier", 1, 0)];
        assert_eq!(ledger.expect("nobody fails"), expected);
    }
}

#[test]
fn a_world_of_one_sends_nothing() {
    let (comm, ledger) = Trace::wrap(solo::world());
    comm.all_reduce(Reduce::Sum, vec![0f32; 9]).expect("nobody to disagree with");
    comm.all_gather_u64(&[1, 2]).expect("nobody to disagree with");
    assert!(ledger.snapshot().values().all(|traffic| *traffic == Traffic { calls: 1, bytes: 0 }));
}

#[test]
fn a_wrapper_shows_the_place_of_what_it_wraps() {
    hold(|comm| {
        let (traced, _ledger) = Trace::wrap(comm.clone());
        assert_eq!((traced.rank(), traced.size(), traced.name()), (comm.rank(), comm.size(), comm.name()));
        Ok(())
    });
}

/// Rank 1 is late twice: rank 0 waits for it once inside the collective, once it has other work meanwhile.
#[test]
fn waiting_is_the_time_inside_collectives() {
    const LATE: Duration = Duration::from_millis(120);
    let waited = threads::run(2, PATIENT, |comm| {
        let (comm, ledger) = Trace::wrap(comm);
        let is_late = comm.rank() == 1;
        if is_late {
            sleep(LATE);
        }
        comm.barrier()?;
        let first = ledger.waited();
        let pending = comm.start(Request::barrier())?;
        sleep(LATE);
        pending.wait()?;
        Ok::<_, Error>((first, ledger.waited() - first))
    });
    let [punctual, late] = [0, 1].map(|rank| waited[rank].as_ref().copied().expect("nobody fails"));
    // Sleeps are no shorter than asked for, and a machine that is busy may make anything longer but rank 1's start.
    assert!(punctual.0 >= LATE * 9 / 10, "rank 0 waited {:?}", punctual.0);
    assert!(late.0 < punctual.0, "rank 1, which came last, waited {:?} and rank 0 {:?}", late.0, punctual.0);
    assert!(punctual.1 < LATE, "sleeping with an operation under way counts as waiting: {:?}", punctual.1);
}
