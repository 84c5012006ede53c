//! Lists of any length that all ranks of a group send each other.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};

/// The bytes of every rank, by rank. Collective.
///
/// # Errors
/// Any error of the group's communicator.
pub fn gather_bytes(mine: Vec<u8>, group: &Arc<dyn Communicator>) -> Result<Vec<Vec<u8>>, Error> {
    let lengths = gather_length(mine.len(), group)?;
    let all = group.all_gather(mine, vec![0u8; lengths.iter().sum()], lengths.clone())?.recv.into_u8();
    Ok(cut(&all, &lengths).into_iter().map(<[u8]>::to_vec).collect())
}

/// The numbers of every rank, by rank. Collective.
///
/// # Errors
/// Any error of the group's communicator.
pub fn gather_numbers(mine: Vec<u64>, group: &Arc<dyn Communicator>) -> Result<Vec<Vec<u64>>, Error> {
    let lengths = gather_length(mine.len(), group)?;
    let all = group.all_gather(mine, vec![0u64; lengths.iter().sum()], lengths.clone())?.recv.into_u64();
    Ok(cut(&all, &lengths).into_iter().map(<[u64]>::to_vec).collect())
}

fn gather_length(mine: usize, group: &Arc<dyn Communicator>) -> Result<Vec<usize>, Error> {
    Ok(group.all_gather_u64(&[mine as u64])?.into_iter().map(|length| length as usize).collect())
}

/// Consecutive parts of these lengths.
pub(crate) fn cut<'a, T>(all: &'a [T], lengths: &[usize]) -> Vec<&'a [T]> {
    let mut rest = all;
    let part = |&length: &usize| {
        let (part, tail) = rest.split_at(length);
        rest = tail;
        part
    };
    lengths.iter().map(part).collect()
}
