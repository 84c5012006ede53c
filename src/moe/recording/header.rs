//! The first bytes of a recording: what it is a recording of.

use super::block::{CHECKSUM_BYTES, hash};
use super::file::Header;

const VERSION: u32 = 1;
/// Bytes before the layers.
const FIXED: usize = 56;

/// What two runs must have in common for one to follow the other's routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub experts: usize,
    /// Choices per token, as the gate has them.
    pub slots: usize,
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
        if self.experts <= usize::from(u16::MAX) { 2 } else { 4 }
    }

    pub(super) fn block_bytes(&self) -> usize {
        2 * self.seq * self.slots * self.entry_bytes() + CHECKSUM_BYTES
    }
}

impl Header for Shape {
    const MAGIC: &'static [u8; 8] = b"GHROUTES";
    const WHAT: [&'static str; 2] = ["routings", "name a file that a run wrote as moe.record"];

    fn step_bytes(&self) -> u64 {
        (self.layers.len() * self.rows) as u64 * self.block_bytes() as u64
    }

    fn header_bytes(&self) -> u64 {
        (FIXED + 4 * self.layers.len() + CHECKSUM_BYTES) as u64
    }

    fn differences(&self, recorded: &Shape) -> Vec<String> {
        let pairs = [
            ("moe.experts", recorded.experts as u64, self.experts as u64),
            ("choices per token (moe.top_k; of expert_choice, moe.experts)", recorded.slots as u64, self.slots as u64),
            ("model.seq", recorded.seq as u64, self.seq as u64),
            ("rows of a step (train.batch_tokens / model.seq)", recorded.rows as u64, self.rows as u64),
            ("train.seed", recorded.seed, self.seed),
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
            VERSION,
            self.experts as u32,
            self.slots as u32,
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
        let checksum = hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<(Shape, u64), String> {
        let (word, long) = (|at| word(bytes, at), |at| long(bytes, at));
        let end = end::<Shape>(bytes, VERSION, [28, FIXED, 4])?;
        let [experts, slots, seq, rows] = [12, 16, 20, 24].map(|at| word(at) as usize);
        let layers = (FIXED..end).step_by(4).map(word).collect();
        Ok((Shape { experts, slots, seq, rows, layers, seed: long(32), data: long(40) }, first_step(long(48))?))
    }
}

/// Where a header ends that says at byte `count` how many layers it has, with `each` bytes of each after the `fixed` ones;
/// or what is wrong with it.
pub(super) fn end<H: Header>(bytes: &[u8], version: u32, [count, fixed, each]: [usize; 3]) -> Result<usize, String> {
    if !bytes.starts_with(H::MAGIC) {
        return Err("its first bytes are others".to_owned());
    }
    if bytes.len() < fixed + CHECKSUM_BYTES {
        return Err(format!("cut off after {} bytes", bytes.len()));
    }
    if word(bytes, 8) != version {
        return Err(format!("version {}, this program knows {version}", word(bytes, 8)));
    }
    let end = fixed.saturating_add(each.saturating_mul(word(bytes, count) as usize));
    if bytes.len() - CHECKSUM_BYTES < end || long(bytes, end) != hash(&bytes[..end]) {
        return Err("its header is damaged".to_owned());
    }
    Ok(end)
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
        let shape = Shape { experts: 8, slots: 2, seq: 16, rows: 4, layers: vec![1, 3], seed: 1 << 40, data: 3 };
        let mut bytes = shape.encode(9);
        assert_eq!(bytes.len() as u64, shape.header_bytes());
        assert_eq!(Shape::decode(&bytes), Ok((shape.clone(), 9)));
        for at in 0..bytes.len() {
            bytes[at] ^= 0x80;
            assert!(Shape::decode(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 0x80;
            assert!(Shape::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        let mut later = bytes.clone();
        later[8] = 2;
        assert_eq!(Shape::decode(&later), Err("version 2, this program knows 1".to_owned()));
    }
}
