//! What the wrappers add: bytes counted by formula and by group, time spent waiting, and the time that bytes take.

mod common;

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Comm, Outcome, PATIENT, hold};
use guildhall_comm::wrap::{Delay, Link, Network, NodeWay, Relay, Trace, Traffic};
use guildhall_comm::{Collective, Error, Payload, Reduce, Request, solo, threads};

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
    assert!(ledger.snapshot().values().all(|traffic| *traffic == Traffic { calls: 1, ..Traffic::default() }));
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

const MS: Duration = Duration::from_millis(1);

/// A millisecond and a microsecond a byte within a node of two ranks, ten times that beyond.
const SLOW: Network = Network {
    ranks_per_node: 2,
    within: Link { latency: MS, message: Duration::ZERO, bandwidth: 1e6 },
    between: Link { latency: Duration::from_millis(10), message: Duration::ZERO, bandwidth: 1e5 },
};

/// What rank 0 of `ranks` waits for `f` on slow links.
fn charged(ranks: usize, f: impl Fn(&Comm) -> Outcome + Sync) -> Duration {
    let times = threads::run(ranks, PATIENT, |comm| {
        let comm = Delay::wrap(comm, SLOW);
        comm.barrier()?;
        let start = Instant::now();
        f(&comm)?;
        Ok::<_, Error>(start.elapsed())
    });
    times.into_iter().next().expect("a world has a rank").expect("nobody fails")
}

/// `what` takes `ms`: never less, and on a machine that is not stuck less than the next thing it could be mistaken for.
#[track_caller]
fn takes(what: &str, took: Duration, ms: u32) {
    assert!(took >= ms * MS && took < ms * MS * 3 / 2 + 50 * MS, "{what} took {took:?}, not {ms} ms");
}

#[test]
fn messages_take_the_time_of_their_links() {
    let zeros = |n| Payload::from(vec![0u8; n]);
    let sum = |comm: &Comm, bytes| comm.all_reduce(Reduce::Sum, zeros(bytes)).map(drop);
    takes("within a node", charged(2, |comm| sum(comm, 100_000)), 101);
    // Two of four ranks are elsewhere: half of 20000 bytes, twice, at 10 us each.
    takes("between nodes", charged(4, |comm| sum(comm, 20_000)), 210);
    takes("to oneself", charged(1, |comm| sum(comm, 1 << 20)), 0);
    takes("what is only received", charged(2, |comm| comm.broadcast(1, zeros(60_000)).map(drop)), 61);
    let uneven = |comm: &Comm| {
        let counts = if comm.rank() == 0 { [50_000, 0] } else { [70_000, 10_000] };
        let back = if comm.rank() == 0 { [50_000, 70_000] } else { [0, 10_000] };
        comm.all_to_all(zeros(counts.iter().sum()), counts.into(), zeros(back.iter().sum()), back.into()).map(drop)
    };
    takes("an uneven exchange", charged(2, uneven), 71);
    let gather = |comm: &Comm| comm.all_gather(zeros(80_000), zeros(160_000), vec![80_000; 2]).map(drop);
    takes("a gathering", charged(2, gather), 81);
    let scatter = |comm: &Comm| {
        comm.reduce_scatter(Reduce::Sum, zeros(110_000), zeros([30_000, 80_000][comm.rank()]), vec![30_000, 80_000])
    };
    takes("a scattering", charged(2, |comm| scatter(comm).map(drop)), 81);
}

#[test]
fn operations_under_way_share_a_link_and_leave_time_to_compute() {
    let all_reduce = |bytes| Request::all_reduce(Reduce::Sum, vec![0u8; bytes]);
    let both = charged(2, |comm| {
        let group = comm.split(0, comm.rank())?;
        let (one, other) = (comm.start(all_reduce(100_000))?, group.start(all_reduce(100_000))?);
        other.wait()?;
        one.wait().map(drop)
    });
    takes("one after the other", both, 202);
    let hidden = charged(2, |comm| {
        let pending = comm.start(all_reduce(200_000))?;
        sleep(190 * MS);
        pending.wait().map(drop)
    });
    takes("computing meanwhile", hidden, 201);
}

#[test]
fn a_split_knows_who_is_near() {
    let bytes = vec![0u8; 20_000];
    let within = charged(4, |comm| comm.split(comm.rank() / 2, 0)?.all_reduce(Reduce::Sum, bytes.clone()).map(drop));
    takes("a group of one node", within, 21);
    let across = charged(4, |comm| comm.split(comm.rank() % 2, 0)?.all_reduce(Reduce::Sum, bytes.clone()).map(drop));
    takes("a group across nodes", across, 210);
}

/// Four ranks on two nodes, each with an element for every rank: what crosses is what is for the other node, in one message a
/// rank (two_d) or a pair of nodes (two_level), and an untraced result.
#[test]
fn all_to_alls_by_nodes_are_counted_leg_by_leg() {
    for (way, crossing) in [(NodeWay::TwoD, [1; 4]), (NodeWay::TwoLevel, [0, 1, 0, 1])] {
        let sent = threads::run(4, PATIENT, |comm| {
            let (comm, ledger) = Trace::wrap(comm);
            let comm = Relay::wrap(comm.named("all"), &[0, 0, 1, 1], way, "node")?;
            let rank = comm.rank() as u64;
            let received = comm.all_to_all_u64(&[10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3])?;
            assert_eq!(received, [rank, 10 + rank, 20 + rank, 30 + rank]);
            Ok::<_, Error>(ledger.snapshot())
        });
        let sent: Vec<_> = sent.into_iter().map(Result::unwrap).collect();
        let of = |rank: usize, name: &str, kind| sent[rank][&(name.to_owned(), kind)];
        let across: Vec<Traffic> = (0..4).map(|rank| of(rank, "all", Collective::AllToAll)).collect();
        assert_eq!(across.iter().map(|sent| sent.messages).collect::<Vec<_>>(), crossing, "{way:?}");
        assert_eq!(across.iter().map(|sent| sent.bytes).sum::<u64>(), 4 * 2 * 8, "{way:?}");
        for rank in 0..4 {
            // What each sends to and receives from four, to one other of its node.
            let told = Traffic { calls: 1, messages: 1, bytes: 8 * 8 };
            assert_eq!(of(rank, "node", Collective::AllGather), told, "{way:?}");
        }
    }
}
