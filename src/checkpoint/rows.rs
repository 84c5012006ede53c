//! Slices of columns become rows before they are written: a rank that holds some columns of a matrix would write a few
//! elements a row, so the ranks of a group hand each other their parts of whole rows, and each writes rows of its own.
//!
//! ```text
//!  rank 0 holds  a b . .      rank 1 holds  . . c d      rank 0 writes  a b c d
//!                e f . .                    . . g h      rank 1 writes  e f g h
//! ```

use std::ops::Range;
use std::slice::Chunks;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};

use crate::parallel::{ContiguousRun, Piece, share};

/// Most bytes that a rank gives away at once: enough for few writes, and little beside a model.
const BATCH_BYTES: usize = 4 << 20;

/// Elements that are neighbours in the file, as bytes.
pub(super) struct FileBlock {
    /// The first in the global tensor.
    pub(super) global: usize,
    pub(super) bytes: Vec<u8>,
}

/// How the ranks that hold the columns of a piece, equally many each, make whole rows of their parts.
pub(super) struct RowExchange<'a> {
    group: &'a Arc<dyn Communicator>,
    /// From one rank's part of a row to the next rank's.
    width: usize,
    /// Bytes of an element.
    size: usize,
}

/// Whether a piece is of columns, so that its runs are parts of rows, of which each of `ranks` has equally many: with others
/// as long, the ranks' shares and tiles are of the same rows. The same answer on every rank.
pub(super) fn is_of_even_columns(piece: &Piece, ranks: usize) -> bool {
    piece.slice.is_some_and(|slice| slice.dim > 0 && ranks > 1 && slice.len * ranks == piece.shape[slice.dim])
}

impl<'a> RowExchange<'a> {
    /// Of a piece that is of columns, whose elements have `size` bytes.
    pub(super) fn of(piece: &Piece, group: &'a Arc<dyn Communicator>, size: usize) -> RowExchange<'a> {
        RowExchange { group, width: piece.runs().next().map_or(0, |run| run.len), size }
    }

    /// Runs that are exchanged together; equally many of every rank.
    pub(super) fn batches<'r>(&self, runs: &'r [ContiguousRun]) -> Chunks<'r, ContiguousRun> {
        runs.chunks(self.batch())
    }

    fn batch(&self) -> usize {
        (BATCH_BYTES / (self.width * self.size).max(1)).max(1)
    }

    /// At most by how many bytes the rows that this rank writes exceed its own parts of all of them: `part` of the elements
    /// it has of the piece, which are exchanged in tiles of `tile`. Rows are dealt out whole.
    pub(super) fn excess(&self, part: Range<usize>, tile: usize) -> usize {
        let (ranks, batch) = (self.group.size(), self.batch());
        let runs = part.end.div_ceil(self.width) - part.start / self.width;
        let uneven = |runs: usize| runs.next_multiple_of(ranks) - runs;
        let is_torn = |at: usize| !at.is_multiple_of(self.width);
        let tiles = part.len().div_ceil(tile);
        let rows = match tiles > 1 || is_torn(part.start) || is_torn(part.end) {
            true => (tiles + runs / batch + 1) * 3 * ranks,
            false => runs / batch * uneven(batch) + uneven(runs % batch),
        };
        rows * self.width * self.size
    }

    /// The rows that this rank writes, for its own part of all of them: `runs`, whose elements are `own`. Collective; the
    /// runs are the same on every rank but for their columns.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn exchange(&self, runs: &[ContiguousRun], own: Vec<u8>) -> Result<Vec<FileBlock>, Error> {
        let (ranks, rank) = (self.group.size(), self.group.rank());
        let mine = &runs[share(runs.len(), (rank, ranks))];
        let length = |runs: &[ContiguousRun]| runs.iter().map(|run| run.len * self.size).sum::<usize>();
        let send_counts = (0..ranks).map(|to| length(&runs[share(runs.len(), (to, ranks))])).collect();
        let of_one = length(mine);
        let recv = vec![0u8; of_one * ranks];
        let parts = self.group.all_to_all(own, send_counts, recv, vec![of_one; ranks])?.recv.into_u8();
        let (mut blocks, mut at) = (Vec::new(), 0);
        for run in mine {
            for from in 0..ranks {
                let part = &parts[from * of_one + at..][..run.len * self.size];
                self.append(&mut blocks, run.global + self.width * from - self.width * rank, part);
            }
            at += run.len * self.size;
        }
        Ok(blocks)
    }

    /// Appends a part of a row to the block that it continues.
    fn append(&self, blocks: &mut Vec<FileBlock>, global: usize, part: &[u8]) {
        match blocks.last_mut() {
            Some(last) if last.global + last.bytes.len() / self.size == global => {
                last.bytes.extend_from_slice(part);
            }
            _ => blocks.push(FileBlock { global, bytes: part.to_vec() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use guildhall_comm::threads;

    use super::*;
    use crate::parallel::Slice;

    /// Each element is its number in the file. What ranks put is all of it, once, also where it takes several batches.
    #[test]
    fn rows_beyond_a_batch_are_exchanged_too() {
        let (rows, columns, ranks) = (2500, 2048, 2);
        assert!(rows * columns * 4 > 2 * ranks * BATCH_BYTES, "several batches");
        let options = threads::Options { timeout: Duration::from_secs(60) };
        let put = threads::run(ranks, options, |group| {
            let slice = Some(Slice::share(1, columns, (group.rank(), ranks)));
            let piece = Piece { name: "w".to_owned(), shape: vec![rows, columns], slice, offset: 0 };
            let runs: Vec<ContiguousRun> = piece.runs().collect();
            let elements =
                |run: &ContiguousRun| (run.global..run.global + run.len).flat_map(|n| (n as u32).to_le_bytes());
            let rows = RowExchange::of(&piece, &group, 4);
            let batches = rows.batches(&runs);
            let blocks = batches.map(|runs| rows.exchange(runs, runs.iter().flat_map(elements).collect()));
            blocks.collect::<Result<Vec<_>, Error>>()
        });
        let mut file = vec![0u8; rows * columns * 4];
        let blocks = put.into_iter().flat_map(|blocks| blocks.expect("rows")).flatten();
        for FileBlock { global, bytes } in blocks {
            file[4 * global..][..bytes.len()].copy_from_slice(&bytes);
        }
        assert!(file.as_chunks().0.iter().zip(0u32..).all(|(word, n)| u32::from_le_bytes(*word) == n));
    }
}
