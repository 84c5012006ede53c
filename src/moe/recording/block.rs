//! One block: the routing of one row of data in one layer of one step.
//!
//! ```text
//!  chosen[seq * slots]   sent[seq * slots]   checksum
//! ```
//!
//! Entries are experts, or all bits set for [`Routing::DROPPED`].

use super::header::Shape;
use crate::moe::Routing;

pub(super) const CHECKSUM_BYTES: usize = 8;

/// Where a block belongs; part of its checksum, so that one in a wrong place is noticed too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockPlace {
    pub(super) step: u64,
    pub(super) layer: u32,
    pub(super) row: u64,
}

impl BlockPlace {
    fn checksum(&self, entries: &[u8]) -> u64 {
        checksum(entries, &[self.step, u64::from(self.layer), self.row])
    }
}

/// The hash of a block's entries and of where it belongs.
pub(super) fn checksum(entries: &[u8], place: &[u64]) -> u64 {
    place.iter().fold(fnv1a(FNV_START, entries), |hash, word| fnv1a(hash, &word.to_le_bytes()))
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: every byte permutes the states of the hash, so no single changed byte goes unnoticed.
fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The hash of some bytes.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    fnv1a(FNV_START, bytes)
}

/// Appends the block at `place` of the routes of one row.
pub(super) fn encode(bytes: &mut Vec<u8>, place: BlockPlace, shape: &Shape, (chosen, sent): (&[u32], &[u32])) {
    let start = bytes.len();
    for &expert in chosen.iter().chain(sent) {
        bytes.extend_from_slice(&expert.to_le_bytes()[..shape.entry_bytes()]);
    }
    let checksum = place.checksum(&bytes[start..]);
    bytes.extend_from_slice(&checksum.to_le_bytes());
}

/// Appends the routes of the row in a block to a routing; `None` if it is not the block of `place`.
pub(super) fn decode(block: &[u8], place: BlockPlace, shape: &Shape, routing: &mut Routing) -> Option<()> {
    let (entries, checksum) = block.split_at(block.len() - CHECKSUM_BYTES);
    if checksum != place.checksum(entries).to_le_bytes() {
        return None;
    }
    let (chosen, sent) = entries.split_at(entries.len() / 2);
    let experts = routing.experts;
    for (bytes, routes) in [(chosen, &mut routing.chosen), (sent, &mut routing.expert)] {
        for entry in bytes.chunks_exact(shape.entry_bytes()) {
            routes.push(expert(entry, experts)?);
        }
    }
    // No gate sends a token to an expert twice.
    let is_choice =
        |routes: &[u32]| (1..routes.len()).all(|i| routes[i] == Routing::DROPPED || !routes[..i].contains(&routes[i]));
    let added = |routes: &[u32]| {
        routes[routes.len() - entries.len() / shape.entry_bytes() / 2..].chunks(routing.k).all(is_choice)
    };
    (added(&routing.chosen) && added(&routing.expert)).then_some(())
}

fn expert(entry: &[u8], experts: usize) -> Option<u32> {
    if entry.iter().all(|&byte| byte == 0xff) {
        return Some(Routing::DROPPED);
    }
    let mut word = [0; 4];
    word[..entry.len()].copy_from_slice(entry);
    Some(u32::from_le_bytes(word)).filter(|&expert| (expert as usize) < experts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(experts: usize) -> Shape {
        Shape { experts: experts.into(), slots: 2.into(), seq: 3, rows: 4, layers: vec![0, 5], seed: 1, data: 2 }
    }

    const PLACE: BlockPlace = BlockPlace { step: 7, layer: 5, row: 3 };

    #[test]
    fn blocks_come_back_in_both_widths_and_no_changed_byte_goes_unnoticed() {
        for experts in [4, 0xffff, 0x1_0000, 1 << 20] {
            let last = experts as u32 - 1;
            let chosen = [0, 1, last, 2, 3, Routing::DROPPED];
            let sent = [0, Routing::DROPPED, last, 2, 3, Routing::DROPPED];
            let (shape, mut bytes) = (shape(experts), Vec::new());
            encode(&mut bytes, PLACE, &shape, (&chosen, &sent));
            assert_eq!(bytes.len(), shape.block_bytes(0), "{experts} experts");
            let empty = || Routing::new(Vec::new(), 2, experts);
            let mut routing = empty();
            decode(&bytes, PLACE, &shape, &mut routing).expect("a whole block");
            assert_eq!(routing, Routing { expert: sent.to_vec(), chosen: chosen.to_vec(), ..empty() });
            for at in 0..bytes.len() {
                bytes[at] ^= 1;
                assert_eq!(decode(&bytes, PLACE, &shape, &mut empty()), None, "byte {at}");
                bytes[at] ^= 1;
            }
            for place in
                [BlockPlace { step: 8, ..PLACE }, BlockPlace { layer: 0, ..PLACE }, BlockPlace { row: 2, ..PLACE }]
            {
                assert_eq!(decode(&bytes, place, &shape, &mut empty()), None, "{place:?}");
            }
        }
    }

    #[test]
    fn a_hole_and_an_expert_that_does_not_exist_are_no_blocks() {
        let shape = shape(4);
        let mut routing = Routing::new(Vec::new(), 2, 4);
        assert_eq!(decode(&vec![0; shape.block_bytes(0)], PLACE, &shape, &mut routing), None);
        let mut bytes = Vec::new();
        encode(&mut bytes, PLACE, &shape, (&[4; 6], &[0; 6]));
        assert_eq!(decode(&bytes, PLACE, &shape, &mut routing), None);
        let (once, twice) = ([0, 1, 2, 3, 1, 0], [0, 1, 2, 2, 1, 0]);
        for (chosen, sent) in [(&once, &twice), (&twice, &once)] {
            bytes.clear();
            encode(&mut bytes, PLACE, &shape, (chosen, sent));
            assert_eq!(decode(&bytes, PLACE, &shape, &mut routing), None, "a token goes to no expert twice");
        }
    }
}
