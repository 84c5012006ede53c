//! A recording of the hosts at which sequences go on behind MoE layers. Like shadow sets it lies beside the routings, and
//! is of one mesh and one size of micro-batches.
//!
//! ```text
//!  the host's place in the data group   checksum
//! ```

use super::block::{CHECKSUM_BYTES, checksum};
use super::companion::Companion;
use super::file::Header;
use super::{Error, Site, StepFile, Visiting};

const BLOCK_BYTES: usize = size_of::<u32>() + CHECKSUM_BYTES;

/// What two runs must have in common for one to follow the other's choice of hosts: the same as for shadow sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosting(pub Visiting);

/// An open file of hosts.
pub type HostChoices = StepFile<Hosting>;

impl Header for Hosting {
    const MAGIC: &'static [u8; 8] = b"GHHOSTS\0";
    const WHAT: [&'static str; 2] = ["hosts of sequences", "take it away to have them chosen anew"];

    fn header_bytes(&self) -> u64 {
        self.0.header_bytes()
    }

    fn step_bytes(&self) -> u64 {
        self.0.layers.len() as u64 * u64::from(self.0.rows) * BLOCK_BYTES as u64
    }

    fn differences(&self, recorded: &Hosting) -> Vec<String> {
        self.0.differences(&recorded.0)
    }

    fn encode(&self, first: u64) -> Vec<u8> {
        self.0.encode_as(Self::MAGIC, first)
    }

    fn decode(bytes: &[u8]) -> Result<(Hosting, u64), String> {
        Visiting::decode_as::<Hosting>(bytes).map(|(of, first)| (Hosting(of), first))
    }
}

impl Companion for Hosting {
    const SUFFIX: &'static str = ".hosts";
}

impl StepFile<Hosting> {
    /// Where the block of a row of the step begins.
    fn place(&self, site: &Site, row: u64) -> u64 {
        let Visiting { layers, rows, .. } = &self.header.0;
        let layer = layers.iter().position(|&(index, _)| index == site.layer).expect("a layer of the recording");
        assert!(row < u64::from(*rows), "row {row} at {site:?} of {:?}", self.header);
        self.offset(site.step) + (layer as u64 * u64::from(*rows) + row) * BLOCK_BYTES as u64
    }

    /// Writes the host of a row's sequence.
    pub(super) fn write(&self, site: &Site, row: u64, host: usize) -> Result<(), Error> {
        let entry = (host as u32).to_le_bytes();
        let checksum = checksum(&entry, &key(site, row));
        self.write_at(&[&entry[..], &checksum.to_le_bytes()].concat(), self.place(site, row))
    }

    /// The host of a row's sequence, which must be one of `hosts`: its index there.
    pub(super) fn read(&self, site: &Site, row: u64, hosts: &[usize]) -> Result<usize, Error> {
        let block = self.read_at(BLOCK_BYTES, self.place(site, row))?;
        let (entry, sum) = block.split_at(size_of::<u32>());
        let host = u32::from_le_bytes(entry.try_into().expect("four bytes")) as usize;
        let is_sound = sum == checksum(entry, &key(site, row)).to_le_bytes();
        let index = hosts.iter().position(|&other| other == host).filter(|_| is_sound);
        let damaged = || {
            let block = format!("layer {}, row {row}", site.layer);
            Error::Damaged { path: self.path.clone(), step: site.step, block: block.into() }
        };
        index.ok_or_else(damaged)
    }
}

/// What tells the blocks apart.
fn key(site: &Site, row: u64) -> [u64; 3] {
    [site.step, u64::from(site.layer), row]
}

#[cfg(test)]
mod tests {
    use super::super::Shape;
    use super::*;
    use crate::parallel::{ExpertTable, MeshShape};

    #[test]
    fn hosts_come_back_and_no_changed_byte_goes_unnoticed() {
        let routes =
            Shape { experts: 8.into(), slots: 2.into(), seq: 16, rows: 4, layers: vec![1, 3], seed: 7, data: 3 };
        let tables = [ExpertTable::even(8, 2), ExpertTable::even(8, 4)];
        let own = Hosting(Visiting::new(&routes, MeshShape::of(4, 2), &tables, 3));
        let mut header = own.encode(5);
        assert_eq!(Hosting::decode(&header), Ok((own.clone(), 5)));
        assert!(Visiting::decode(&header).is_err(), "of another kind");
        for at in 0..header.len() {
            header[at] ^= 0x80;
            assert!(Hosting::decode(&header).is_err(), "byte {at}");
            header[at] ^= 0x80;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("hosts");
        let file = HostChoices::create(&path, own, 5).expect("a file");
        let site = |step, layer| Site { step, micro_batch: 0, stack: 0, layer, call: 0 };
        let places = [5, 6].into_iter().flat_map(|step| [1, 3].map(|layer| site(step, layer)));
        let all: Vec<(Site, u64)> = places.flat_map(|site| (0..4).map(move |row| (site, row))).collect();
        let host = |place: usize| place * 7 % 5;
        for (place, (site, row)) in all.iter().enumerate() {
            file.write(site, *row, host(place)).expect("room");
        }
        for (place, (site, row)) in all.iter().enumerate() {
            assert_eq!(file.read(site, *row, &[4, 3, 2, 1, 0]).expect("a host"), 4 - host(place));
        }
        assert!(file.read(&all[0].0, 0, &[1, 2]).is_err(), "none of these hosts");
        let at = file.place(&all[3].0, 3) as usize;
        let bytes = std::fs::read(&path).expect("a file");
        for byte in at..at + BLOCK_BYTES {
            let mut damaged = bytes.clone();
            damaged[byte] ^= 1;
            std::fs::write(&path, &damaged).expect("room");
            assert!(file.read(&all[3].0, 3, &[0, 1, 2, 3, 4]).is_err(), "byte {byte}");
        }
    }
}
