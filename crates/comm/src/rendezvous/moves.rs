//! The data movement of each collective, as one rank performs it: copies and reductions straight from the peers'
//! buffers into its own.
//!
//! Why no two ranks touch the same bytes: of a peer's buffers a rank reads `source` only, and what it writes is its
//! own `target`. The two coincide in the collectives in place. There, a broadcast's root writes nothing; and in an
//! all-reduce rank r first writes chunk r of its own buffer, which in that phase only r reads, and when all have
//! done so writes the other chunks of its own buffer, of which peers now read chunk r alone.
//!
//! Devices copy later than they are asked, in an order that marks give: a rank marks its target when it has asked for
//! everything (in an all-reduce after each phase), and each copy comes after the marks of both buffers. When all have
//! marked theirs, a rank has its own buffers wait for the marks of all: its peers may still be reading from one, and
//! its own device writing to the other.

use std::ops::Range;

use super::place::BufferPlace;
use super::{Round, Stage};
use crate::error::Error;
use crate::operation::{Operation, Reduce};
use crate::payload::ElementKind;

/// Chunks of an all-reduce are cut at multiples of a cache line, so that no two ranks write one line of a buffer.
const LINE_BYTES: usize = 64;

/// Performs this rank's part of the round.
///
/// # Safety
/// All ranks have posted this round, its entries agree (`Round::check`), and this rank has not finished it.
pub(super) unsafe fn perform(round: &Round<'_>) -> Result<(), Error> {
    // SAFETY: the caller's promise is what each of these asks for.
    unsafe {
        match round.entry(round.rank).operation() {
            Operation::Barrier => {}
            Operation::Broadcast { root, buf } => broadcast(round, *root, buf.bytes()),
            Operation::AllReduce { reduce, buf } => all_reduce(round, (buf.kind(), *reduce), buf.len())?,
            Operation::AllGather { counts, send, .. } => all_gather(round, counts, send.kind()),
            Operation::ReduceScatter { reduce, counts, send, .. } => {
                reduce_scatter(round, (send.kind(), *reduce), counts);
            }
            Operation::AllToAll { send_counts, recv_counts, send, .. } => {
                all_to_all(round, send_counts, recv_counts, send.kind());
            }
        }
        if round.entry(round.rank).operation().is_on_device() {
            await_marks(round)?;
        }
    }
    Ok(())
}

/// Has this rank's buffers wait for the devices of all.
///
/// # Safety
/// As for [`perform`].
unsafe fn await_marks(round: &Round<'_>) -> Result<(), Error> {
    // SAFETY: entries stay until this rank, too, has finished the round.
    unsafe {
        let own = round.entry(round.rank);
        own.target_to_read().mark();
        round.rendezvous.arrive(round.rank, Stage::Begun, round.index);
        round.wait_for(Stage::Begun)?;
        for rank in 0..round.size() {
            let other = round.entry(rank).target_to_read();
            own.source.wait(other);
            own.target_to_read().wait(other);
        }
    }
    Ok(())
}

/// # Safety
/// As for [`perform`].
unsafe fn broadcast(round: &Round<'_>, root: usize, bytes: usize) {
    if round.rank == root {
        return;
    }
    // SAFETY: both buffers have this length (agreement); nobody writes the root's, nobody reads this rank's.
    unsafe {
        let target = round.entry(round.rank).target_to_write();
        target.copy(0, round.entry(root).source, 0..bytes);
    }
}

/// # Safety
/// As for [`perform`].
unsafe fn all_gather(round: &Round<'_>, counts: &[usize], kind: ElementKind) {
    // SAFETY: the counts agree between ranks and fit both buffers (validation); nobody reads this rank's target.
    unsafe {
        let target = round.entry(round.rank).target_to_write();
        for peer in std::iter::once(round.rank).chain(round.peers()) {
            let part = part(counts, peer, kind);
            target.copy(part.start, round.entry(peer).source, 0..part.len());
        }
    }
}

/// # Safety
/// As for [`perform`].
unsafe fn all_to_all(round: &Round<'_>, send_counts: &[usize], recv_counts: &[usize], kind: ElementKind) {
    // SAFETY: the peer sends as much as is expected of it (`check_counts_between`), within both buffers
    // (validation); nobody reads this rank's target.
    unsafe {
        let own = round.entry(round.rank);
        let target = own.target_to_write();
        let (from, to) = (part(send_counts, round.rank, kind), part(recv_counts, round.rank, kind));
        target.copy(to.start, own.source, from);
        for peer in round.peers() {
            let entry = round.entry(peer);
            let Operation::AllToAll { send_counts, .. } = entry.operation() else { unreachable!("entries agree") };
            let (from, to) = (part(send_counts, round.rank, kind), part(recv_counts, peer, kind));
            target.copy(to.start, entry.source, from);
        }
    }
}

/// # Safety
/// As for [`perform`].
unsafe fn reduce_scatter(round: &Round<'_>, rule: (ElementKind, Reduce), counts: &[usize]) {
    let part = part(counts, round.rank, rule.0);
    // SAFETY: the counts agree and fit all buffers; nobody writes sources, nobody reads this rank's target.
    unsafe {
        let target = round.entry(round.rank).target_to_write();
        target.reduce(0, rule, &sources(round), part);
    }
}

/// # Safety
/// As for [`perform`].
unsafe fn all_reduce(round: &Round<'_>, rule: (ElementKind, Reduce), len: usize) -> Result<(), Error> {
    let chunk = |rank| chunk(len, rule.0, rank, round.size());
    let own = chunk(round.rank);
    // SAFETY: the buffers have one length (agreement). In the first phase this rank alone reads and writes its
    // chunk of its own buffer, and reads that chunk of the others, which nobody writes. In the second it writes the
    // rest of its own buffer, of which peers read its chunk only, and reads chunks that their owners are done with.
    unsafe {
        let target = round.entry(round.rank).target_to_write();
        target.reduce(own.start, rule, &sources(round), own);
        target.mark();
        round.rendezvous.arrive(round.rank, Stage::Reduced, round.index);
        round.wait_for(Stage::Reduced)?;
        for peer in round.peers() {
            let part = chunk(peer);
            target.copy(part.start, round.entry(peer).target_to_read(), part);
        }
    }
    Ok(())
}

/// What every rank gives, in rank order.
///
/// # Safety
/// As for [`perform`].
unsafe fn sources(round: &Round<'_>) -> Vec<BufferPlace> {
    // SAFETY: the caller's promise.
    (0..round.size()).map(|rank| unsafe { round.entry(rank).source }).collect()
}

/// Bytes of rank `rank`'s part in a buffer that `counts` divides.
fn part(counts: &[usize], rank: usize, kind: ElementKind) -> Range<usize> {
    let start = counts[..rank].iter().sum::<usize>() * kind.size();
    start..start + counts[rank] * kind.size()
}

/// Bytes of rank `rank`'s chunk in a buffer of `len` elements that `size` ranks reduce together.
fn chunk(len: usize, kind: ElementKind, rank: usize, size: usize) -> Range<usize> {
    let bytes = len * kind.size();
    let share = bytes.div_ceil(size).next_multiple_of(LINE_BYTES);
    (share * rank).min(bytes)..(share * (rank + 1)).min(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_buffer_once_and_start_on_lines() {
        for len in [0, 1, 15, 16, 17, 100, 1000, 4096] {
            for size in 1..9 {
                let chunks: Vec<_> = (0..size).map(|rank| chunk(len, ElementKind::F32, rank, size)).collect();
                assert_eq!((chunks[0].start, chunks[size - 1].end), (0, len * 4));
                assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(chunks.iter().all(|part| part.is_empty() || part.start % LINE_BYTES == 0));
            }
        }
    }

    #[test]
    fn parts_follow_each_other() {
        let counts = [3, 0, 2];
        let parts: Vec<_> = (0..3).map(|rank| part(&counts, rank, ElementKind::U8)).collect();
        assert_eq!(parts, [0..3, 3..3, 3..5]);
    }
}
