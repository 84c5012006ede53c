//! The first bytes of a recording: what it is a recording of.

use std::ops::Range;

use super::block::{CHECKSUM_BYTES, hash};
use super::file::Header;
use crate::parallel::PerLayer;

const VERSION: u32 = 1;
/// Of recordings whose layers have different numbers of experts: these and the choices follow the layers.
const UNEVEN: u32 = 2;
/// Bytes before the layers.
const FIXED: usize = 56;
/// No recording has as much of anything in a step.
const COUNT_MAX: u64 = 1 << 56;

/// What two runs must have in common for one to follow the other's routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of all layers, or of each.
    pub experts: PerLayer,
    /// Choices per token, as the gate has them.
    pub slots: PerLayer,
    /// Tokens of a row.
    pub seq: usize,
    /// Rows of a step.
    pub rows: usize,
    /// The MoE layers, by their index in the model.
    pub layers: Vec<u32>,
    /// Of the order of rows.
    pub seed: u64,
    /// Fingerprint of the data; see [`Shape::fingerprint`].
    pub data: u64,
}

impl Shape {
    /// A number for a text that names the data.
    pub fn fingerprint(content: &str) -> u64 {
        hash(content.as_bytes())
    }

    /// The hash in the header of a file that begins with step 1, by which files that belong to these routings know them.
    pub(super) fn hash_from_start(&self) -> u64 {
        let header = self.encode(1);
        long(&header, header.len() - CHECKSUM_BYTES)
    }

    /// Bytes of an expert; all bits set must remain for a route that is not there.
    pub(super) fn entry_bytes(&self) -> usize {
        if self.experts.largest() <= usize::from(u16::MAX) { 2 } else { 4 }
    }

    /// Of the layer at a place in `layers`.
    pub(super) fn block_bytes(&self, place: usize) -> usize {
        2 * self.seq * self.slots.at(place) * self.entry_bytes() + CHECKSUM_BYTES
    }

    /// Of a step in the layers before a place in `layers`.
    pub(super) fn bytes_before(&self, place: usize) -> u64 {
        (0..place).map(|layer| (self.rows * self.block_bytes(layer)) as u64).sum()
    }

    /// The place of a layer of the model in `layers`.
    ///
    /// # Panics
    /// If the layer is none of the recording's.
    pub(super) fn place(&self, layer: u32) -> usize {
        self.layers.iter().position(|&other| other == layer).expect("a layer of the recording")
    }

    fn is_uneven(&self) -> bool {
        self.experts.list().is_some() || self.slots.list().is_some()
    }
}

impl Header for Shape {
    const MAGIC: &'static [u8; 8] = b"GHROUTES";
    const WHAT: [&'static str; 2] = ["routings", "name a file that a run wrote as moe.record"];

    fn step_bytes(&self) -> u64 {
        self.bytes_before(self.layers.len())
    }

    fn header_bytes(&self) -> u64 {
        let of_layer = if self.is_uneven() { 12 } else { 4 };
        (FIXED + of_layer * self.layers.len() + CHECKSUM_BYTES) as u64
    }

    fn differences(&self, recorded: &Shape) -> Vec<String> {
        let choices = "choices per token (moe.top_k; of expert_choice, moe.experts)";
        let number = |n: usize| n.to_string();
        let pairs = [
            ("moe.experts", recorded.experts.to_string(), self.experts.to_string()),
            (choices, recorded.slots.to_string(), self.slots.to_string()),
            ("model.seq", number(recorded.seq), number(self.seq)),
            ("rows of a step (train.batch_tokens / model.seq)", number(recorded.rows), number(self.rows)),
            ("train.seed", recorded.seed.to_string(), self.seed.to_string()),
        ];
        let differ = pairs.iter().filter(|(_, was, is)| was != is);
        let mut all: Vec<String> = differ.map(|(what, was, is)| format!("{what}: {was} there, {is} here")).collect();
        if self.layers != recorded.layers {
            all.push(format!("MoE layers: {:?} there, {:?} here", recorded.layers, self.layers));
        }
        if self.data != recorded.data {
            all.push(format!("training data: fingerprint {:016x} there, {:016x} here", recorded.data, self.data));
        }
        all
    }

    fn encode(&self, first: u64) -> Vec<u8> {
        let mut bytes = Self::MAGIC.to_vec();
        for number in [
            if self.is_uneven() { UNEVEN } else { VERSION },
            self.experts.largest() as u32,
            self.slots.largest() as u32,
            self.seq as u32,
            self.rows as u32,
            self.layers.len() as u32,
        ] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [self.seed, self.data, first] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        self.layers.iter().for_each(|layer| bytes.extend_from_slice(&layer.to_le_bytes()));
        for numbers in [&self.experts, &self.slots].into_iter().filter(|_| self.is_uneven()) {
            let of_layers = numbers.of_layers(self.layers.len());
            of_layers.into_iter().for_each(|number| bytes.extend_from_slice(&(number as u32).to_le_bytes()));
        }
        let checksum = hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<(Shape, u64), String> {
        let (word, long) = (|at| word(bytes, at), |at| long(bytes, at));
        let is_uneven = bytes.len() > FIXED && word(8) == UNEVEN;
        let (known, of_layer) = if is_uneven { (&[UNEVEN][..], 12) } else { (&[VERSION, UNEVEN][..], 4) };
        let end = end::<Shape>(bytes, known, [28, FIXED, of_layer])?;
        let [experts, slots, seq, rows] = [12, 16, 20, 24].map(|at| word(at) as usize);
        let words = |range: Range<usize>| range.step_by(4).map(word);
        let part = (end - FIXED) / (of_layer / 4);
        let numbers = |place: usize, all: usize| match is_uneven {
            true => PerLayer::of_each(
                words(FIXED + place * part..FIXED + (place + 1) * part).map(|number| number as usize).collect(),
            ),
            false => PerLayer::Same(all),
        };
        let (experts, slots) = (numbers(1, experts), numbers(2, slots));
        let layers: Vec<u32> = words(FIXED..FIXED + part).collect();
        let of_token = [experts.largest(), slots.largest()].map(|number| number as u32);
        countable(of_token)?;
        countable([of_token[1], seq as u32, rows as u32, layers.len() as u32])?;
        Ok((Shape { experts, slots, seq, rows, layers, seed: long(32), data: long(40) }, first_step(long(48))?))
    }
}

/// Where a header ends that says at byte `count` how many layers it has, with `each` bytes of each after the `fixed` ones;
/// or what is wrong with it.
pub(super) fn end<H: Header>(bytes: &[u8], known: &[u32], [count, fixed, each]: [usize; 3]) -> Result<usize, String> {
    if !bytes.starts_with(H::MAGIC) {
        return Err("its first bytes are others".to_owned());
    }
    if bytes.len() < fixed + CHECKSUM_BYTES {
        return Err(format!("cut off after {} bytes", bytes.len()));
    }
    if !known.contains(&word(bytes, 8)) {
        let known: Vec<String> = known.iter().map(u32::to_string).collect();
        return Err(format!("version {}, this program knows {}", word(bytes, 8), known.join(" and ")));
    }
    let end = fixed.saturating_add(each.saturating_mul(word(bytes, count) as usize));
    if bytes.len() - CHECKSUM_BYTES < end || long(bytes, end) != hash(&bytes[..end]) {
        return Err("its header is damaged".to_owned());
    }
    countable([word(bytes, count)])?;
    Ok(end)
}

/// Holds that there is something of each, and that all of it together can be counted.
pub(super) fn countable(numbers: impl IntoIterator<Item = u32>) -> Result<(), String> {
    let all = numbers.into_iter().try_fold(1u64, |all, number| all.checked_mul(u64::from(number)));
    let is_countable = all.is_some_and(|all| (1..=COUNT_MAX).contains(&all));
    if is_countable { Ok(()) } else { Err("its sizes are those of no recording".to_owned()) }
}

pub(super) fn first_step(step: u64) -> Result<u64, String> {
    if step == 0 { Err("it begins with step 0, steps count from 1".to_owned()) } else { Ok(step) }
}

pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_no_changed_byte_goes_unnoticed() {
        let (experts, slots) = (PerLayer::Same(8), PerLayer::Same(2));
        let even = Shape { experts, slots, seq: 16, rows: 4, layers: vec![1, 3], seed: 1 << 40, data: 3 };
        let uneven = Shape { experts: PerLayer::Each(vec![8, 5]), ..even.clone() };
        let chosen = Shape { slots: PerLayer::Each(vec![8, 5]), ..uneven.clone() };
        for shape in [even, uneven, chosen] {
            let mut bytes = shape.encode(9);
            assert_eq!(bytes.len() as u64, shape.header_bytes());
            assert_eq!(Shape::decode(&bytes), Ok((shape.clone(), 9)));
            for at in 0..bytes.len() {
                for bit in [0x80, 1, 2, 3] {
                    bytes[at] ^= bit;
                    assert!(Shape::decode(&bytes).is_err(), "byte {at}");
                    bytes[at] ^= bit;
                }
                assert!(Shape::decode(&bytes[..at]).is_err(), "{at} bytes");
            }
            let mut later = bytes.clone();
            later[8] = 4;
            assert_eq!(Shape::decode(&later), Err("version 4, this program knows 1 and 2".to_owned()));
        }
    }
}
