//! Rows of a table by id.

use half::bf16;

use super::rows::for_rows;
use super::stored::{Stored, StoredRef};
use crate::device::Device;

/// Where in a table whose first id is `first` and that has `rows` an id's row is.
fn place(id: u32, first: usize, rows: usize) -> Option<usize> {
    // An id before the first wraps around to one far beyond the last.
    Some((id as usize).wrapping_sub(first)).filter(|&row| row < rows)
}

pub(crate) fn look_up(device: &Device, out: Stored, table: StoredRef, ids: &[u32], first: usize, width: usize) {
    match (out, table) {
        (Stored::F32(out), StoredRef::F32(table)) => look_up_as(device, (out, 0.0), table, ids, (first, width)),
        (Stored::Bf16(out), StoredRef::Bf16(table)) => {
            look_up_as(device, (out, bf16::ZERO), table, ids, (first, width));
        }
        _ => panic!("rows are looked up as the table is stored, in numbers"),
    }
}

/// Rows of a table as they are stored, each id's at its place; `zero` where it has none.
fn look_up_as<T: Copy + Send + Sync>(
    device: &Device,
    (out, zero): (&mut [T], T),
    table: &[T],
    ids: &[u32],
    (first_id, width): (usize, usize),
) {
    let rows = table.len() / width.max(1);
    for_rows(
        device,
        out,
        width,
        256,
        #[inline(always)]
        |first, run| {
            for (line, &id) in run.chunks_exact_mut(width).zip(&ids[first..]) {
                match place(id, first_id, rows) {
                    Some(row) => line.copy_from_slice(&table[row * width..][..width]),
                    None => line.fill(zero),
                }
            }
        },
    );
}

pub(crate) fn look_up_back(
    device: &Device,
    mut table: Stored,
    scratch: &mut [f32],
    g: &[f32],
    ids: &[u32],
    first: usize,
    width: usize,
    accumulate: bool,
) {
    let rows_here = table.len() / width.max(1);
    table.by_rows(device, (width, accumulate), scratch, |rows, table| {
        if !accumulate {
            table.fill(0.0);
        }
        for (line, &id) in g.chunks_exact(width).zip(ids) {
            if let Some(row) = place(id, first, rows_here).filter(|row| rows.contains(row)) {
                let row = &mut table[(row - rows.start) * width..][..width];
                row.iter_mut().zip(line).for_each(|(t, x)| *t += x);
            }
        }
    });
}
