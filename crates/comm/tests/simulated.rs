//! Simulated worlds: what a seed draws is drawn again, what happens to a rank is noticed, and so are broken transports.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guildhall_comm::simulated::{
    Mishap, MishapKind, SimulatedEnd, SimulatedRank, Stuck, TransportFlaw, WorldScript, run,
};
use guildhall_comm::{Communicator, Error, Reduce};

const TIMEOUT: Duration = Duration::from_secs(60);
const ROUNDS: u64 = 12;
/// Of a sum: enough for messages in several parts.
const WORDS: u64 = 5000;

fn script(seed: u64) -> WorldScript {
    WorldScript::undisturbed(seed)
}

/// Sums and exchanges in two groups, some of them beside each other; the sum of what is left.
fn work(rank: &SimulatedRank) -> Result<u64, Error> {
    let (world, mut sum) = (&rank.world, 0);
    let halves = world.split(world.rank() % 2, world.rank())?;
    for round in 0..ROUNDS {
        let mine = (0..WORDS).map(|word| word * round + world.rank() as u64).collect::<Vec<u64>>();
        let beside = halves.start(guildhall_comm::Request::all_reduce(Reduce::Sum, mine.clone()))?;
        let counts = vec![1; world.size()];
        let sent: Vec<u64> = (0..world.size() as u64).map(|to| 100 * round + 10 * to + world.rank() as u64).collect();
        let exchanged = world.all_to_all(sent, counts.clone(), vec![0u64; world.size()], counts)?.recv.into_u64();
        sum += world.all_reduce(Reduce::Sum, exchanged)?.into_u64().iter().sum::<u64>();
        sum += beside.wait()?.recv.into_u64().iter().zip(1..).map(|(word, place)| place * word).sum::<u64>();
    }
    Ok(sum)
}

/// By counting.
fn worth(rank: usize, size: usize) -> u64 {
    let half: Vec<u64> = (0..size).filter(|other| other % 2 == rank % 2).map(|other| other as u64).collect();
    let of_round = |round: u64| {
        let beside =
            (0..WORDS).map(|word| (word + 1) * half.iter().map(|other| word * round + other).sum::<u64>()).sum::<u64>();
        let pairs = (0..size as u64).flat_map(|from| (0..size as u64).map(move |to| 100 * round + 10 * to + from));
        beside + pairs.sum::<u64>()
    };
    (0..ROUNDS).map(of_round).sum()
}

fn ends(size: usize, script: WorldScript) -> SimulatedEnd<Result<u64, Error>> {
    run(size, TIMEOUT, script, |rank| work(&rank)).unwrap_or_else(|stuck| panic!("{stuck}"))
}

#[test]
fn every_order_comes_to_the_same() {
    for seed in 0..100 {
        let size = 1 + seed as usize % 5;
        for (rank, end) in ends(size, script(seed)).ends.into_iter().enumerate() {
            assert_eq!(end.expect("it lives").expect("it works"), worth(rank, size), "seed {seed}, rank {rank}");
        }
    }
}

/// Of a sum of fewer elements than ranks some ranks have no part of their own, and nothing to wait for before they gather: still the
/// parts of the sum before it, on the same lane, go first.
#[test]
fn a_short_sum_does_not_overtake_a_long_one() {
    let of_word = |rank: u64, word: u64| (rank + 1) * (word + 1);
    for seed in 0..100 {
        let size = 3 + seed % 3;
        let end = run(size as usize, TIMEOUT, script(seed), |SimulatedRank { world, clock, .. }| {
            let me = world.rank() as u64;
            if me + 1 == size {
                clock.sleep_until(clock.now() + TIMEOUT / 4);
            }
            let start = |words: u64| {
                let mine: Vec<u64> = (0..words).map(|word| of_word(me, word)).collect();
                world.start(guildhall_comm::Request::all_reduce(Reduce::Sum, mine))
            };
            let sums = [start(WORDS)?, start(1)?, start(WORDS)?, start(2)?];
            sums.into_iter().map(|sum| Ok(sum.wait()?.recv.into_u64())).collect::<Result<Vec<_>, Error>>()
        });
        let want = |words: u64| -> Vec<u64> {
            (0..words).map(|word| (0..size).map(|rank| of_word(rank, word)).sum()).collect()
        };
        for end in end.expect("nobody waits for ever").ends {
            let sums = end.expect("nobody dies").expect("it works");
            assert!(sums == [WORDS, 1, WORDS, 2].map(want), "seed {seed}, {size} ranks");
        }
    }
}

#[test]
fn a_seed_draws_one_order() {
    let orders = |seed| {
        let order = Mutex::new(Vec::new());
        let note = |rank: &SimulatedRank| order.lock().unwrap().push((rank.world.rank(), rank.clock.now()));
        let end = run(3, TIMEOUT, script(seed), |rank| {
            for _ in 0..5 {
                note(&rank);
                rank.world.all_reduce(Reduce::Sum, vec![1u64]).expect("it works");
            }
        });
        (order.into_inner().unwrap(), end.expect("nobody waits for ever").time)
    };
    let all: Vec<_> = (0..10).map(orders).collect();
    for (seed, order) in all.iter().enumerate() {
        assert_eq!(&orders(seed as u64), order, "seed {seed}");
        assert!(all[..seed].iter().all(|other| other != order), "seed {seed}");
    }
}

/// Every rank is the first of those that are woken at one time, in some order.
#[test]
fn whose_turn_is_next_is_drawn() {
    let first = |seed| {
        let order = Mutex::new(Vec::new());
        run(3, TIMEOUT, script(seed), |rank| {
            rank.clock.sleep_until(TIMEOUT / 2);
            order.lock().unwrap().push(rank.world.rank());
        })
        .expect("nobody waits for ever");
        order.into_inner().unwrap()[0]
    };
    let firsts: BTreeSet<usize> = (0..50).map(first).collect();
    assert_eq!(firsts.len(), 3, "{firsts:?}");
}

/// Deaths and standstills of every rank, in the first half of its turns and in the second.
#[test]
fn mishaps_spare_no_rank() {
    let turns = ends(3, script(0)).turns;
    let mishaps = (0..900).filter_map(|seed| WorldScript::drawn(seed, &turns, TIMEOUT).mishap);
    let halves =
        mishaps.map(|Mishap { rank, at_turn, kind }| (rank, kind == MishapKind::Death, at_turn < turns[rank] / 2));
    assert_eq!(halves.collect::<BTreeSet<_>>().len(), 3 * 2 * 2);
}

/// A rank that dies is named by whoever needs it, and what the others had finished stays.
#[test]
fn the_dead_are_named() {
    let (size, mut finished) = (3, 0);
    let turns = ends(size, script(0)).turns;
    for seed in (1..900).step_by(3) {
        let script = WorldScript::drawn(seed, &turns, TIMEOUT);
        let Mishap { rank, at_turn, kind } = script.mishap.expect("two seeds of three have one");
        assert_eq!(kind, MishapKind::Death);
        let SimulatedEnd { ends, time, turns, had_mishap } = ends(size, script);
        assert_eq!(had_mishap, ends[rank].is_none(), "seed {seed}");
        // In its last turn a rank ends before anything can happen to it.
        let range = if ends[rank].is_none() { at_turn + 1..u64::MAX } else { 0..at_turn + 2 };
        assert!(range.contains(&turns[rank]), "seed {seed}");
        for (survivor, end) in ends.into_iter().enumerate() {
            match end {
                None => assert_eq!(survivor, rank, "seed {seed}"),
                Some(Ok(sum)) => {
                    finished += 1;
                    assert_eq!(sum, worth(survivor, size), "seed {seed}");
                }
                Some(Err(Error::Aborted { by, reason, .. })) => {
                    assert_eq!((by, reason.contains("closed")), (rank, true), "seed {seed}: {reason}");
                }
                Some(Err(error)) => panic!("seed {seed}: {error}"),
            }
        }
        assert!(time < TIMEOUT, "seed {seed}: nobody had to wait for the timeout, and it took {time:?}");
    }
    assert!(finished > 10, "some die when others need them no more: {finished}");
}

/// A rank that stands still is named when the time is up, and finds the world ended when it goes on.
#[test]
fn who_stands_still_is_named() {
    let (size, mut named) = (3, 0);
    let turns = ends(size, script(0)).turns;
    for seed in (2..302).step_by(3) {
        let script = WorldScript::drawn(seed, &turns, 3 * TIMEOUT);
        let Mishap { rank, kind, .. } = script.mishap.expect("two seeds of three have one");
        assert_eq!(kind, MishapKind::Standstill(3 * TIMEOUT));
        let end = ends(size, script);
        for (survivor, end) in end.ends.into_iter().enumerate() {
            match end.expect("nobody dies") {
                Ok(sum) => assert_eq!(sum, worth(survivor, size), "seed {seed}"),
                Err(Error::Timeout { missing, .. }) => {
                    named += 1;
                    // Not those that wait for it elsewhere.
                    assert_eq!(missing, [rank], "seed {seed}");
                }
                Err(Error::Aborted { by, .. }) => assert_ne!(by, survivor, "seed {seed}"),
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
    }
    assert!(named > 80, "{named}");
}

/// Rank 1 waits for rank 0, which came late to another operation and waits there for rank 2: rank 1, which gives up first,
/// blames rank 2, and tells where it would have met rank 0.
#[test]
fn for_whom_the_missing_wait_is_told() {
    for seed in 0..50 {
        let end = run(3, TIMEOUT, script(seed), |SimulatedRank { world, clock, .. }| {
            let pair = world.split(usize::from(world.rank() == 2), world.rank())?;
            let sum = |group: &Arc<dyn Communicator>| group.all_reduce(Reduce::Sum, vec![1u64]).map(drop);
            match world.rank() {
                0 => {
                    clock.sleep_until(clock.now() + TIMEOUT / 4);
                    sum(&world)
                }
                1 => sum(&pair),
                _ => {
                    clock.sleep_until(clock.now() + 3 * TIMEOUT);
                    Ok(())
                }
            }
        });
        let end = end.expect("nobody waits for ever").ends.swap_remove(1).expect("nobody dies");
        let Err(Error::Timeout { missing, attendance, .. }) = &end else { panic!("seed {seed}: {end:?}") };
        assert_eq!((&missing[..], &attendance.arrived[..]), (&[2][..], &[1][..]), "seed {seed}");
        assert!(attendance.last.iter().any(|seen| seen.rank == 0 && seen.waits_for.contains(&2)), "seed {seed}");
        let text = end.expect_err("seen above").to_string();
        assert!(text.contains("; rank 0 was last in ") && text.contains("where it waits for rank(s) ["), "{text}");
    }
}

/// Also while ranks split a world: those that are through wait for one that still waits for the missing one.
#[test]
fn who_stands_still_during_a_split_is_named() {
    let (size, lost, mut named) = (4, 1, [0; 2]);
    let split = |rank: &SimulatedRank| {
        let (world, me) = (&rank.world, rank.world.rank());
        let groups = [world.split(me % 2, me)?, world.split(me / 2, me)?, world.duplicate()?];
        groups.iter().try_for_each(|group| group.barrier())
    };
    for seed in 0..1200 {
        let mishap = Mishap { rank: lost, at_turn: seed % 20, kind: MishapKind::Standstill(3 * TIMEOUT) };
        let script = WorldScript { mishap: Some(mishap), ..script(seed) };
        let end = run(size, TIMEOUT, script, |rank| split(&rank)).unwrap_or_else(|stuck| panic!("{stuck}"));
        for (rank, end) in end.ends.into_iter().enumerate().filter(|&(rank, _)| rank != lost) {
            let Err(Error::Timeout { missing, attendance, .. }) = end.expect("nobody dies") else { continue };
            assert!(missing.contains(&lost), "seed {seed}, rank {rank}: {attendance:?}");
            let is_missed_by_others = attendance.last.iter().any(|seen| seen.waits_for.contains(&lost));
            named[usize::from(is_missed_by_others)] += 1;
        }
    }
    assert!(named.iter().all(|&times| times > 10), "directly, and by others that wait for it: {named:?}");
}

#[test]
fn broken_transports_are_noticed() {
    let noticed = |flaw| {
        let is_wrong = |seed| {
            let end = ends(3, WorldScript { flaw: Some(flaw), ..script(seed) });
            let mut ends = end.ends.into_iter().enumerate();
            ends.any(|(rank, end)| end.expect("nobody dies").ok() != Some(worth(rank, 3)))
        };
        (0..20).filter(|&seed| is_wrong(seed)).count()
    };
    assert!(noticed(TransportFlaw::Overtaking) > 0);
    assert!(noticed(TransportFlaw::Loss) > 0);
}

#[test]
fn who_waits_for_ever_is_found() {
    let end = run(2, TIMEOUT, script(0), |rank| {
        if rank.world.rank() == 1 {
            rank.clock.sleep_until(Duration::MAX);
        }
    });
    let Err(Stuck { ranks, .. }) = end else { panic!("{end:?}") };
    assert_eq!(ranks, [1]);
}
