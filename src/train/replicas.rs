//! Copies of weights, compared: what differs where it must be equal was changed by a machine, not by training.

use std::collections::BTreeMap;

use guildhall_comm::Error as CommError;
use guildhall_tensor::{HostElements, Tensor};
use sha2::{Digest, Sha256};

use super::error::Error;
use crate::parallel::{Mesh, Parameters, Placement, gather_bytes, gather_numbers};

/// A weight whose copies are not equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The name of the first tensor in it.
    pub weight: String,
    /// Ranks whose copies are equal, the most of them first.
    pub ranks: Vec<Vec<usize>>,
}

impl Divergence {
    /// Why training stops after `step`.
    pub fn at(self, step: u64) -> Error {
        let list = |ranks: &Vec<usize>| {
            let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
        };
        let who = match &self.ranks[..] {
            [most, others @ ..] if most.len() > others.iter().map(Vec::len).sum() => {
                format!(
                    "that of {} is not that of {}",
                    others.iter().map(list).collect::<Vec<_>>().join(" and "),
                    list(most)
                )
            }
            all => format!("those of {} are not the same", all.iter().map(list).collect::<Vec<_>>().join(" and ")),
        };
        Error::Replicas { step, weight: self.weight, who }
    }
}

/// A part of a weight that a rank holds, and a digest of its elements: both equal on all ranks that have a copy.
struct HeldCopy {
    name: String,
    identity: u64,
    digest: u64,
}

/// The first weight or buffer, of all that several ranks hold, of which they hold different values. Every rank learns of
/// it. Collective.
///
/// # Errors
/// What the world reports.
pub fn divergence(model: &mut dyn Parameters, mesh: &Mesh) -> Result<Option<Divergence>, CommError> {
    let own = held_copies(model);
    let numbers = own.iter().flat_map(|copy| [copy.identity, copy.digest]).collect();
    let mut holders: BTreeMap<u64, BTreeMap<u64, Vec<usize>>> = BTreeMap::new();
    for (rank, numbers) in gather_numbers(numbers, &mesh.world)?.into_iter().enumerate() {
        for copy in numbers.chunks_exact(2) {
            holders.entry(copy[0]).or_default().entry(copy[1]).or_default().push(rank);
        }
    }
    let Some((identity, copies)) = holders.into_iter().find(|(_, copies)| copies.len() > 1) else { return Ok(None) };
    let mut ranks: Vec<Vec<usize>> = copies.into_values().collect();
    ranks.sort_by_key(|ranks| (usize::MAX - ranks.len(), ranks[0]));
    let name = own.into_iter().find(|copy| copy.identity == identity).map_or(Vec::new(), |copy| copy.name.into_bytes());
    let names = gather_bytes(name, &mesh.world)?;
    let weight = String::from_utf8_lossy(&names[ranks[0][0]]).into_owned();
    Ok(Some(Divergence { weight, ranks }))
}

fn held_copies(model: &mut dyn Parameters) -> Vec<HeldCopy> {
    let mut copies = Vec::new();
    model.visit(&mut |weight| {
        let copy = |kept: &mut Tensor, first| HeldCopy::of(&weight.placement, kept, first);
        copies.push(weight.parameter.stored().with_kept(copy));
    });
    model.visit_buffers(&mut |buffer| copies.push(HeldCopy::of(&buffer.placement, &buffer.value, 0)));
    copies
}

impl HeldCopy {
    fn of(placement: &Placement, kept: &Tensor, first: usize) -> HeldCopy {
        let pieces = placement.pieces.iter().map(|piece| format!("{} {:?};", piece.name, piece.slice));
        let identity = format!("{first} {} {}", kept.len(), pieces.collect::<String>());
        HeldCopy {
            name: placement.pieces.first().map_or_else(String::new, |piece| piece.name.clone()),
            identity: number(Sha256::digest(identity)),
            digest: number(digest(kept)),
        }
    }
}

/// Elements that are hashed at a time.
const AT_ONCE: usize = 1 << 14;

fn digest(tensor: &Tensor) -> impl AsRef<[u8]> {
    let (mut hasher, mut bytes) = (Sha256::new(), Vec::new());
    let mut take = |more: &mut dyn Iterator<Item = u8>| {
        bytes.clear();
        bytes.extend(more);
        hasher.update(&bytes);
    };
    match tensor.elements(0..tensor.len()) {
        HostElements::F32(all) => {
            all.chunks(AT_ONCE).for_each(|x| take(&mut x.iter().flat_map(|x| x.to_le_bytes())));
        }
        HostElements::Bf16(all) => {
            all.chunks(AT_ONCE).for_each(|x| take(&mut x.iter().flat_map(|x| x.to_le_bytes())));
        }
        HostElements::U32(_) => unreachable!("weights are numbers"),
    }
    hasher.finalize()
}

fn number(hash: impl AsRef<[u8]>) -> u64 {
    u64::from_le_bytes(hash.as_ref()[..8].try_into().expect("eight bytes of thirty-two"))
}

#[cfg(test)]
mod tests {
    use guildhall_tensor::{Device, Dtype};

    use super::*;

    /// A weight is hashed in parts, of which the last may be short.
    #[test]
    fn every_element_counts() {
        let all = 3 * AT_ONCE + 1;
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let values = Tensor::from_fn(&Device::new(1), &[all], |i| (i % 251) as f32);
            let mut tensor = values.into_dtype(dtype);
            let whole = number(digest(&tensor));
            for place in [0, AT_ONCE - 1, AT_ONCE, all / 2, all - 1] {
                flip(&mut tensor, place);
                assert_ne!(number(digest(&tensor)), whole, "element {place} in {dtype:?}");
                flip(&mut tensor, place);
            }
            assert_eq!(number(digest(&tensor)), whole, "every bit is back in {dtype:?}");
        }
    }

    fn flip(tensor: &mut Tensor, place: usize) {
        if tensor.dtype() == Dtype::Bf16 {
            let element = &mut tensor.bf16s_mut()[place];
            *element = half::bf16::from_bits(element.to_bits() ^ 1);
        } else {
            let element = &mut tensor.f32s_mut()[place];
            *element = f32::from_bits(element.to_bits() ^ 1);
        }
    }
}
