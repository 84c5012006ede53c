//! Words of any length that all ranks of a group tell each other.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};

/// What every rank has to say, by rank. Collective.
///
/// # Errors
/// What the group reports.
pub fn gather_bytes(mine: Vec<u8>, group: &Arc<dyn Communicator>) -> Result<Vec<Vec<u8>>, Error> {
    let lengths: Vec<usize> = group.all_gather_u64(&[mine.len() as u64])?.iter().map(|&n| n as usize).collect();
    let total = lengths.iter().sum();
    let all = group.all_gather(mine, vec![0u8; total], lengths.clone())?.recv.into_u8();
    let mut rest = &all[..];
    let parts = lengths.iter().map(|&length| {
        let (part, tail) = rest.split_at(length);
        rest = tail;
        part.to_vec()
    });
    Ok(parts.collect())
}
