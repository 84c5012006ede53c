//! What every communicator must do, held in every implementation: each collective against a plain sequential
//! computation, and the rules of starting, waiting and dropping.

mod common;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Comm, Draws, Element, Outcome, PATIENT, hold, hold_moved, reduced, values};
use guildhall_comm::{Completed, Payload, Pending, Reduce, Request, Span, bf16};

const REDUCES: [Reduce; 3] = [Reduce::Sum, Reduce::Max, Reduce::Min];

/// Zero, one, around a cache line of each kind, around a block, and several blocks with a remainder.
const LENGTHS: [usize; 9] = [0, 1, 7, 16, 33, 1000, 1024, 1025, 9001];

/// Worlds of this process that have held a law.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Evaluates `$law::<E>(comm)` for every element type.
macro_rules! for_every_kind {
    ($law:ident, $comm:expr) => {{
        $law::<f32>($comm)?;
        $law::<f64>($comm)?;
        $law::<bf16>($comm)?;
        $law::<u32>($comm)?;
        $law::<u64>($comm)?;
        $law::<u8>($comm)
    }};
}

#[test]
fn all_reduce_reduces_in_rank_order() {
    fn law<E: Element>(comm: &Comm) -> Outcome
    where
        Payload: From<Vec<E>>,
    {
        for (case, len) in LENGTHS.into_iter().enumerate() {
            for reduce in REDUCES {
                let mine: Vec<E> = values(case as u64, comm.rank(), len);
                let result = E::unpack(comm.all_reduce(reduce, mine)?);
                assert_eq!(result, reduced(reduce, case as u64, comm.size(), len));
            }
        }
        Ok(())
    }
    hold(|comm| for_every_kind!(law, comm));
}

#[test]
fn not_a_number_survives_maxima_and_minima() {
    hold(|comm| {
        for reduce in [Reduce::Max, Reduce::Min] {
            for broken in 0..comm.size() {
                let mine = if comm.rank() == broken { f32::NAN } else { 1.0 };
                assert!(comm.all_reduce(reduce, vec![mine])?.into_f32()[0].is_nan());
            }
        }
        Ok(())
    });
}

#[test]
fn broadcast_gives_everyone_the_roots_buffer() {
    fn law<E: Element>(comm: &Comm) -> Outcome
    where
        Payload: From<Vec<E>>,
    {
        for (case, len) in LENGTHS.into_iter().enumerate() {
            let root = case % comm.size();
            let mine: Vec<E> = values(case as u64, comm.rank(), len);
            let result = E::unpack(comm.broadcast(root, mine)?);
            assert_eq!(result, values::<E>(case as u64, root, len));
        }
        Ok(())
    }
    hold(|comm| for_every_kind!(law, comm));
}

/// Starts an all-gather of uneven contributions; the check compares what came back with the truth.
fn start_all_gather<E: Element>(comm: &Comm, case: u64) -> Result<Started, guildhall_comm::Error>
where
    Payload: From<Vec<E>>,
{
    let (rank, size) = (comm.rank(), comm.size());
    let counts = Draws::new(case).counts(size, 700);
    let mine: Vec<E> = values(case, rank, counts[rank]);
    let recv = values::<E>(case + 1, rank, counts.iter().sum());
    let expected: Vec<E> = (0..size).flat_map(|peer| values::<E>(case, peer, counts[peer])).collect();
    let pending = comm.start(Request::all_gather(mine.clone(), recv, counts))?;
    Ok(Started::new(pending, move |completed| {
        assert_eq!(E::unpack(completed.send.expect("the send buffer comes back")), mine);
        assert_eq!(E::unpack(completed.recv), expected);
    }))
}

/// As above for a reduce-scatter.
fn start_reduce_scatter<E: Element>(comm: &Comm, case: u64) -> Result<Started, guildhall_comm::Error>
where
    Payload: From<Vec<E>>,
{
    let (rank, size) = (comm.rank(), comm.size());
    let (counts, reduce) = (Draws::new(case).counts(size, 3000), REDUCES[case as usize % 3]);
    let total = counts.iter().sum();
    let mine: Vec<E> = values(case, rank, total);
    let recv = values::<E>(case + 1, rank, counts[rank]);
    let start: usize = counts[..rank].iter().sum();
    let expected = reduced::<E>(reduce, case, size, total)[start..start + counts[rank]].to_vec();
    let pending = comm.start(Request::reduce_scatter(reduce, mine.clone(), recv, counts))?;
    Ok(Started::new(pending, move |completed| {
        assert_eq!(E::unpack(completed.send.expect("the send buffer comes back")), mine);
        assert_eq!(E::unpack(completed.recv), expected);
    }))
}

/// As above for an all-to-all in which every pair of ranks exchanges another number of elements.
fn start_all_to_all<E: Element>(comm: &Comm, case: u64) -> Result<Started, guildhall_comm::Error>
where
    Payload: From<Vec<E>>,
{
    let (rank, size) = (comm.rank(), comm.size());
    let counts = Draws::new(case).counts(size * size, 300);
    let sent_by = |peer: usize| counts[peer * size..(peer + 1) * size].to_vec();
    let sent: Vec<Vec<E>> = (0..size).map(|peer| values(case, peer, sent_by(peer).iter().sum())).collect();
    let recv_counts: Vec<usize> = (0..size).map(|peer| sent_by(peer)[rank]).collect();
    let part = |peer: usize| {
        let start: usize = sent_by(peer)[..rank].iter().sum();
        sent[peer][start..start + sent_by(peer)[rank]].to_vec()
    };
    let expected: Vec<E> = (0..size).flat_map(part).collect();
    let recv = values::<E>(case + 1, rank, expected.len());
    let mine = sent[rank].clone();
    let pending = comm.start(Request::all_to_all(mine.clone(), sent_by(rank), recv, recv_counts))?;
    Ok(Started::new(pending, move |completed| {
        assert_eq!(E::unpack(completed.send.expect("the send buffer comes back")), mine);
        assert_eq!(E::unpack(completed.recv), expected);
    }))
}

fn start_all_reduce<E: Element>(comm: &Comm, case: u64) -> Result<Started, guildhall_comm::Error>
where
    Payload: From<Vec<E>>,
{
    let (len, reduce) = (Draws::new(case).below(3000), REDUCES[case as usize % 3]);
    let expected = reduced::<E>(reduce, case, comm.size(), len);
    let pending = comm.start(Request::all_reduce(reduce, values::<E>(case, comm.rank(), len)))?;
    Ok(Started::new(pending, move |completed| assert_eq!(E::unpack(completed.recv), expected)))
}

/// An operation under way and what must come of it.
struct Started {
    pending: Pending,
    check: Box<dyn FnOnce(Completed)>,
}

impl Started {
    fn new(pending: Pending, check: impl FnOnce(Completed) + 'static) -> Self {
        Started { pending, check: Box::new(check) }
    }

    fn wait(self) -> Outcome {
        (self.check)(self.pending.wait()?);
        Ok(())
    }
}

#[test]
fn all_gather_concatenates_uneven_parts() {
    fn law<E: Element>(comm: &Comm) -> Outcome
    where
        Payload: From<Vec<E>>,
    {
        (0..6).try_for_each(|case| start_all_gather::<E>(comm, case)?.wait())
    }
    hold(|comm| for_every_kind!(law, comm));
}

#[test]
fn reduce_scatter_reduces_uneven_parts() {
    fn law<E: Element>(comm: &Comm) -> Outcome
    where
        Payload: From<Vec<E>>,
    {
        (0..6).try_for_each(|case| start_reduce_scatter::<E>(comm, case)?.wait())
    }
    hold(|comm| for_every_kind!(law, comm));
}

#[test]
fn all_to_all_transposes_uneven_parts() {
    fn law<E: Element>(comm: &Comm) -> Outcome
    where
        Payload: From<Vec<E>>,
    {
        (0..6).try_for_each(|case| start_all_to_all::<E>(comm, case)?.wait())
    }
    hold(|comm| for_every_kind!(law, comm));
}

/// An operation drawn by `case`, the same on every rank.
fn start_any(comm: &Comm, case: u64) -> Result<Started, guildhall_comm::Error> {
    match Draws::new(!case).below(7) {
        0 => start_all_reduce::<f32>(comm, case),
        1 => start_all_reduce::<bf16>(comm, case),
        2 => start_all_gather::<u8>(comm, case),
        3 => start_reduce_scatter::<f64>(comm, case),
        4 => start_all_to_all::<f32>(comm, case),
        5 => start_all_to_all::<u64>(comm, case),
        _ => Ok(Started::new(comm.start(Request::barrier())?, |completed| {
            assert!(completed.recv.is_empty() && completed.send.is_none());
        })),
    }
}

/// More operations in flight than the rendezvous has rounds, awaited in an order of each rank's own.
#[test]
fn operations_in_flight_may_be_awaited_in_any_order() {
    hold(|comm| {
        for burst in 0..5 {
            let mut own = Draws::new(burst * 100 + comm.rank() as u64);
            let mut started: Vec<Started> =
                (0..20).map(|index| start_any(comm, burst * 20 + index)).collect::<Result<_, _>>()?;
            while !started.is_empty() {
                started.swap_remove(own.below(started.len())).wait()?;
            }
        }
        Ok(())
    });
}

/// Messages between processes travel in parts, some of them behind those of other operations; here are more parts to each
/// rank than may be under way at once.
#[test]
fn long_messages_of_several_operations_arrive_whole() {
    hold(|comm| {
        let (size, other) = (comm.size(), comm.duplicate()?);
        // Above a megabyte for each rank.
        let len = 270_000;
        let of = |rank: usize, to: usize, salt: usize| -> Vec<f32> {
            (0..len).map(|index| (rank * 31 + to * 7 + index % (97 + salt)) as f32).collect()
        };
        let sent = |rank: usize, salt: usize| (0..size).flat_map(|to| of(rank, to, salt)).collect::<Vec<f32>>();
        let sums = [1, 2].map(|salt| comm.start(Request::all_reduce(Reduce::Sum, sent(comm.rank(), salt))));
        let counts = vec![len; size];
        let exchange = Request::all_to_all(sent(comm.rank(), 0), counts.clone(), vec![0.0f32; len * size], counts);
        let exchanged = other.start(exchange)?.wait()?.recv.into_f32();
        let expected: Vec<f32> = (0..size).flat_map(|from| of(from, comm.rank(), 0)).collect();
        assert!(exchanged == expected, "an all-to-all of long parts");
        for (sum, salt) in sums.into_iter().zip([1, 2]).rev() {
            let sum = sum?.wait()?.recv.into_f32();
            let expected: Vec<f32> = (0..len * size)
                .map(|at| (0..size).map(|rank| (rank * 31 + at / len * 7 + at % len % (97 + salt)) as f32).sum())
                .collect();
            assert!(sum == expected, "sum {salt} of long parts");
        }
        Ok(())
    });
}

/// What ranks have started goes on while they do other things: rank 0 gets its sum before any other looks for its own.
#[test]
fn operations_go_on_while_nobody_waits_for_them() {
    hold_moved(|comm| {
        let folder = std::env::temp_dir();
        // Of the first process: a name that no other world has.
        let world = comm.broadcast(0, vec![u64::from(std::process::id()), NEXT.fetch_add(1, Relaxed)])?.into_u64();
        let done = folder.join(format!("guildhall-law-{}-{}", world[0], world[1]));
        if comm.rank() == 0 {
            // What a process of this number may have left.
            let _ = fs::remove_file(&done);
        }
        // Longer than what is sent at once, so that parts follow parts.
        let sum = comm.start(Request::all_reduce(Reduce::Sum, vec![1.0f32; 600_000]))?;
        if comm.rank() == 0 {
            assert_eq!(sum.wait()?.recv.into_f32(), vec![comm.size() as f32; 600_000]);
            fs::write(&done, "").expect("a file in the folder for such");
        } else {
            let since = Instant::now();
            while !done.exists() {
                assert!(since.elapsed() < PATIENT.timeout / 2, "it waits for ranks that do something else");
                sleep(Duration::from_millis(1));
            }
            sum.wait()?;
        }
        comm.barrier()?;
        // The first to come removes it.
        let _ = fs::remove_file(done);
        Ok(())
    });
}

/// Each rank drops other results than its peers; everybody still gets what it waits for.
#[test]
fn a_dropped_result_is_still_delivered_to_peers() {
    hold(|comm| {
        let mut own = Draws::new(comm.rank() as u64);
        for case in 0..60 {
            let started = start_any(comm, case)?;
            if own.below(2) == 0 { drop(started) } else { started.wait()? }
        }
        comm.barrier()
    });
}

#[test]
fn buffers_come_back_as_the_same_allocation_untouched_outside_their_range() {
    hold(|comm| {
        let window = |fill: f32| Span { data: vec![fill; 50], range: 10..10 + 4 * comm.size() };
        let (send, recv) = (window(1.0), window(2.0));
        let addresses = (send.data.as_ptr(), recv.data.as_ptr());
        let counts = vec![4; comm.size()];
        let completed = comm.all_to_all(send, counts.clone(), recv, counts)?;
        let send = completed.send.expect("the send buffer comes back").into_f32();
        let recv = completed.recv.into_f32();
        assert_eq!((send.as_ptr(), recv.as_ptr()), addresses);
        assert_eq!(send, [1.0; 50]);
        let within = 10..10 + 4 * comm.size();
        assert!((0..50).all(|index| recv[index] == if within.contains(&index) { 1.0 } else { 2.0 }));
        Ok(())
    });
}

#[test]
fn small_exchanges_have_short_forms() {
    hold(|comm| {
        let (rank, size) = (comm.rank() as u64, comm.size() as u64);
        let gathered = comm.all_gather_u64(&[rank, 10 * rank])?;
        assert_eq!(gathered, (0..size).flat_map(|peer| [peer, 10 * peer]).collect::<Vec<_>>());
        let to_each: Vec<u64> = (0..size).map(|peer| 100 * rank + peer).collect();
        assert_eq!(comm.all_to_all_u64(&to_each)?, (0..size).map(|peer| 100 * peer + rank).collect::<Vec<_>>());
        let mut sums = [1.0, rank as f64];
        comm.sum_f64(&mut sums)?;
        assert_eq!(sums, [size as f64, (size * (size - 1) / 2) as f64]);
        Ok(())
    });
}

/// Nobody leaves a barrier before the last has entered it.
#[test]
fn a_barrier_holds_everyone() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    let entered = AtomicUsize::new(0);
    let late = 1;
    for result in guildhall_comm::threads::run(3, PATIENT, |comm| {
        if comm.rank() == late {
            sleep(Duration::from_millis(20));
        }
        entered.fetch_add(1, Ordering::SeqCst);
        comm.barrier()?;
        assert_eq!(entered.load(Ordering::SeqCst), 3);
        Ok::<_, guildhall_comm::Error>(())
    }) {
        result.expect("nobody fails");
    }
}

/// Ranks of the parent, in the order of the child.
fn members(parent: &Comm, child: &Comm) -> Result<Vec<u64>, guildhall_comm::Error> {
    child.all_gather_u64(&[parent.rank() as u64])
}

#[test]
fn split_groups_by_colour_and_orders_by_key() {
    hold(|comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let colour = |rank: usize| usize::from(rank % 3 == 1);
        let child = comm.split(colour(rank), size - rank)?;
        let expected: Vec<u64> = (0..size).rev().filter(|r| colour(*r) == colour(rank)).map(|r| r as u64).collect();
        assert_eq!(members(comm, &child)?, expected);
        assert_eq!(expected[child.rank()], rank as u64);
        assert_eq!(child.size(), expected.len());
        Ok(())
    });
}

#[test]
fn equal_keys_keep_the_parents_order() {
    hold(|comm| {
        let child = comm.split(7, 3)?;
        assert_eq!((child.rank(), child.size()), (comm.rank(), comm.size()));
        Ok(())
    });
}

#[test]
fn splits_nest_and_repeat() {
    hold(|comm| {
        for round in 0..3 {
            let half = comm.split(comm.rank() / 2, comm.rank())?;
            let quarter = half.split(half.rank(), 0)?;
            assert_eq!(quarter.size(), 1);
            start_any(&half, round)?.wait()?;
            start_any(&quarter, round + 50)?.wait()?;
            start_any(comm, round + 90)?.wait()?;
        }
        Ok(())
    });
}

/// The two lanes are used in opposite orders by even and odd ranks; on one lane that would be a mismatch.
#[test]
fn a_duplicate_is_matched_independently() {
    hold(|comm| {
        let lane = comm.duplicate()?;
        assert_eq!((lane.rank(), lane.size(), lane.name()), (comm.rank(), comm.size(), comm.name()));
        let (first, second) = if comm.rank() % 2 == 0 {
            let first = start_all_reduce::<f32>(comm, 1)?;
            (first, start_all_gather::<u32>(&lane, 2)?)
        } else {
            let second = start_all_gather::<u32>(&lane, 2)?;
            (start_all_reduce::<f32>(comm, 1)?, second)
        };
        first.wait()?;
        second.wait()
    });
}

#[test]
fn a_name_is_only_a_name() {
    hold(|comm| {
        let named = comm.named("expert");
        assert_eq!(named.name(), "expert");
        let started = start_all_reduce::<f32>(&named, 5)?;
        start_all_to_all::<f32>(comm, 6)?.wait()?;
        started.wait()
    });
}

#[cfg(feature = "mpi")]
mod processes {
    use std::process::Command;

    use super::*;

    fn is_launched() -> bool {
        std::env::vars_os().any(|(name, _)| name == "OMPI_COMM_WORLD_SIZE" || name == "PMI_SIZE")
    }

    /// Runs this program in so many processes of a launcher.
    fn launch(ranks: &str, arguments: &[&str]) {
        let program = std::env::current_exe().expect("this program has a path");
        let launcher = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
        let mut command = Command::new(&launcher);
        // Open MPI asks to be told that it runs as root, and more ranks than cores.
        command.envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")));
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").args(["-n", ranks]).arg(&program);
        let finished = command.args(["--test-threads", "1"]).args(arguments).output().expect("the launcher is there");
        let (out, err) = (String::from_utf8_lossy(&finished.stdout), String::from_utf8_lossy(&finished.stderr));
        let has_run = out.contains(" passed") && !out.contains(" 0 passed");
        assert!(finished.status.success() && has_run, "{ranks} ranks: {out}\n{err}");
    }

    /// Every law, in worlds of processes.
    #[test]
    fn laws_hold_for_processes_of_a_launcher() {
        if !is_launched() {
            ["2", "3", "4", "8"].into_iter().for_each(|ranks| launch(ranks, &[]));
        }
    }

    /// Its length divides that of no part in which bytes travel, so that one in another's place would show.
    fn pattern() -> Vec<u8> {
        (0..65_521u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// A message of more bytes than MPI's `int` can count.
    #[test]
    #[ignore = "takes 5 GB of memory"]
    fn more_bytes_arrive_than_an_int_counts() {
        const BYTES: usize = (1 << 31) + 4321;
        if !is_launched() {
            return launch("2", &["--ignored", "--exact", "processes::more_bytes_arrive_than_an_int_counts"]);
        }
        let pattern = pattern();
        hold(|comm| {
            let is_first = comm.rank() == 0;
            let mut send: Vec<u8> = if is_first { pattern.repeat(BYTES / pattern.len() + 1) } else { vec![7] };
            send.truncate(if is_first { BYTES } else { 1 });
            let (sent, awaited) = if is_first { (BYTES, 1) } else { (1, BYTES) };
            let counts = |n: usize| if is_first { vec![0, n] } else { vec![n, 0] };
            let got = comm.all_to_all(send, counts(sent), vec![0u8; awaited], counts(awaited))?.recv.into_u8();
            let mut parts = got.chunks(pattern.len());
            assert!(is_first && got == [7] || !is_first && parts.all(|part| *part == pattern[..part.len()]));
            Ok(())
        });
    }
}
