//! A recording of shadow sets: which experts visit every rank of an expert group in a micro-batch. It lies beside the
//! routings, and unlike them it is of one mesh and one size of micro-batches.
//!
//! ```text
//!  a bit for every expert   checksum
//! ```

use super::block::{CHECKSUM_BYTES, checksum, hash};
use super::companion::Companion;
use super::file::Header;
use super::header::{countable, end, first_step, long, word};
use super::{Error, Shape, Site, StepFile};
use crate::parallel::{Axis, ExpertTable, Mesh, MeshShape, Order};

const VERSION: u32 = 1;
/// Bytes before the layers.
const FIXED: usize = 68;

/// What two runs must have in common for one to follow the other's shadow sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visiting {
    experts: u32,
    /// Rows of a step, and of a micro-batch.
    pub(super) rows: u32,
    micro_batch: u32,
    /// Ranks, degrees of tensor and expert tensor, and the order's number.
    mesh: [u32; 4],
    /// The MoE layers' indices in the model, and over how many ranks each spreads its experts.
    pub(super) layers: Vec<(u32, u32)>,
    /// The hash in the header of the routings, had they begun with step 1, and one of who holds which expert.
    routes: u64,
    table: u64,
}

impl Visiting {
    /// Of routings of this shape on a mesh where the experts of each MoE layer lie as its table says.
    pub fn new(routes: &Shape, mesh: MeshShape, tables: &[ExpertTable], micro_batch: usize) -> Visiting {
        let order = match mesh.order {
            Order::ExpertData => 0,
            Order::DataExpert => 1,
        };
        let held = tables.iter().flat_map(|table| (0..table.ranks()).map(|rank| table.of(rank)));
        // The number of a rank's experts tells where the next rank's begin.
        let numbers = held.flat_map(|experts| [experts.len()].into_iter().chain(experts.iter().copied()));
        let table: Vec<u8> = numbers.flat_map(|number| (number as u32).to_le_bytes()).collect();
        let degrees = tables.iter().map(|table| table.ranks() as u32);
        Visiting {
            experts: routes.experts.largest() as u32,
            rows: routes.rows as u32,
            micro_batch: micro_batch.min(routes.rows) as u32,
            mesh: [mesh.ranks as u32, mesh.tensor as u32, mesh.expert_tensor as u32, order],
            layers: routes.layers.iter().copied().zip(degrees).collect(),
            routes: routes.hash_from_start(),
            table: hash(&table),
        }
    }

    fn set_bytes(&self) -> usize {
        self.experts.div_ceil(8) as usize
    }

    fn block_bytes(&self) -> usize {
        self.set_bytes() + CHECKSUM_BYTES
    }

    /// Expert groups of some layers, those of every slice.
    fn groups(&self, layers: &[(u32, u32)]) -> u64 {
        layers.iter().map(|&(_, degree)| u64::from(self.mesh[0] / degree)).sum()
    }

    fn micro_batches(&self) -> u64 {
        u64::from(self.rows.div_ceil(self.micro_batch.max(1)))
    }

    /// The block of an expert group's set.
    fn encode_set(&self, place: [u64; 4], visiting: &[usize]) -> Vec<u8> {
        let mut bytes = vec![0; self.set_bytes()];
        visiting.iter().for_each(|&expert| bytes[expert / 8] |= 1 << (expert % 8));
        let checksum = checksum(&bytes, &place);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The experts of a block; `None` if it is not the block of `place`.
    fn decode_set(&self, place: [u64; 4], block: &[u8]) -> Option<Vec<usize>> {
        let (bits, sum) = block.split_at(self.set_bytes());
        let visiting: Vec<usize> =
            (0..8 * bits.len()).filter(|&expert| bits[expert / 8] >> (expert % 8) & 1 > 0).collect();
        let exist = visiting.last().is_none_or(|&last| last < self.experts as usize);
        (exist && sum == checksum(bits, &place).to_le_bytes()).then_some(visiting)
    }
}

impl Header for Visiting {
    const MAGIC: &'static [u8; 8] = b"GHVISITS";
    const WHAT: [&'static str; 2] = ["shadow sets", "take it away to have them decided anew"];

    fn header_bytes(&self) -> u64 {
        (FIXED + 8 * self.layers.len() + CHECKSUM_BYTES) as u64
    }

    fn step_bytes(&self) -> u64 {
        self.micro_batches() * self.groups(&self.layers) * self.block_bytes() as u64
    }

    fn differences(&self, recorded: &Visiting) -> Vec<String> {
        let keys = ["ranks", "tensor", "expert_tensor"];
        let degrees = keys.iter().zip(recorded.mesh.iter().zip(&self.mesh)).filter(|(_, (was, is))| was != is);
        let mut all: Vec<String> =
            degrees.map(|(key, (was, is))| format!("parallel.{key}: {was} there, {is} here")).collect();
        let expert = |of: &Visiting| of.layers.iter().map(|&(_, degree)| degree).collect::<Vec<_>>();
        if expert(self) != expert(recorded) {
            all.push(format!("parallel.expert: {:?} there, {:?} here", expert(recorded), expert(self)));
        } else if self.table != recorded.table {
            all.push("parallel.expert_table: another there".to_owned());
        }
        if self.mesh[3] != recorded.mesh[3] {
            all.push("parallel.order: the other there".to_owned());
        }
        if self.micro_batch != recorded.micro_batch {
            let [was, is] = [recorded.micro_batch, self.micro_batch];
            all.push(format!("rows of a micro-batch: {was} there, {is} here"));
        }
        let routes =
            |of: &Visiting| (of.routes, of.experts, of.rows, of.layers.iter().map(|&(at, _)| at).collect::<Vec<_>>());
        if routes(self) != routes(recorded) {
            all.push("it belongs to other routings".to_owned());
        }
        all
    }

    fn encode(&self, first: u64) -> Vec<u8> {
        self.encode_as(Self::MAGIC, first)
    }

    fn decode(bytes: &[u8]) -> Result<(Visiting, u64), String> {
        Visiting::decode_as::<Visiting>(bytes)
    }
}

impl Companion for Visiting {
    const SUFFIX: &'static str = ".visits";
}

impl Visiting {
    /// The header of a file of kind `magic` that begins with step `first`.
    pub(super) fn encode_as(&self, magic: &[u8; 8], first: u64) -> Vec<u8> {
        let mut bytes = magic.to_vec();
        let layers = self.layers.len() as u32;
        let [ranks, tensor, expert_tensor, order] = self.mesh;
        for number in [VERSION, self.experts, self.rows, self.micro_batch, ranks, tensor, expert_tensor, order, layers]
        {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [self.routes, self.table, first] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in self.layers.iter().flat_map(|&(index, degree)| [index, degree]) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        let checksum = hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// From the header of a file with header `H`.
    pub(super) fn decode_as<H: Header>(bytes: &[u8]) -> Result<(Visiting, u64), String> {
        let (word, long) = (|at| word(bytes, at), |at| long(bytes, at));
        let end = end::<H>(bytes, &[VERSION], [40, FIXED, 8])?;
        let visiting = Visiting {
            experts: word(12),
            rows: word(16),
            micro_batch: word(20),
            mesh: [24, 28, 32, 36].map(word),
            layers: (FIXED..end).step_by(8).map(|at| (word(at), word(at + 4))).collect(),
            routes: long(44),
            table: long(52),
        };
        let Visiting { experts, rows, micro_batch, mesh: [ranks, ..], layers, .. } = &visiting;
        countable([*experts, *rows, *ranks, layers.len() as u32])?;
        countable([*micro_batch])?;
        layers.iter().try_for_each(|&(_, degree)| countable([degree]))?;
        Ok((visiting, first_step(long(60))?))
    }
}

/// An open file of shadow sets.
pub type Visits = StepFile<Visiting>;

impl StepFile<Visiting> {
    /// The expert group of this rank, in whose block it reads and writes.
    fn group(mesh: &Mesh) -> u64 {
        mesh.shape().place(Axis::Expert(mesh.shape().expert), mesh.world.rank()).group as u64
    }

    /// Where the block of an expert group begins.
    fn place(&self, site: &Site, group: u64) -> u64 {
        let (layers, micro_batch) = (&self.header.layers, u64::from(site.micro_batch));
        let layer = layers.iter().position(|&(index, _)| index == site.layer).expect("a layer of the recording");
        assert!(micro_batch < self.header.micro_batches(), "{site:?} of {:?}", self.header);
        assert!(group < self.header.groups(&layers[layer..=layer]), "group {group} at {site:?} of {:?}", self.header);
        let blocks = micro_batch * self.header.groups(layers) + self.header.groups(&layers[..layer]) + group;
        self.offset(site.step) + blocks * self.header.block_bytes() as u64
    }

    /// Writes the set of this rank's expert group, once for all of its ranks.
    pub(super) fn write(&self, site: &Site, mesh: &Mesh, visiting: &[usize]) -> Result<(), Error> {
        if mesh.expert.rank() > 0 {
            return Ok(());
        }
        let group = Visits::group(mesh);
        self.write_at(&self.header.encode_set(key(site, group), visiting), self.place(site, group))
    }

    /// The set of this rank's expert group.
    pub(super) fn read(&self, site: &Site, mesh: &Mesh) -> Result<Vec<usize>, Error> {
        let group = Visits::group(mesh);
        let block = self.read_at(self.header.block_bytes(), self.place(site, group))?;
        let damaged = || {
            let block = format!("layer {}, micro-batch {}, expert group {group}", site.layer, site.micro_batch);
            Error::Damaged { path: self.path.clone(), step: site.step, block: block.into() }
        };
        self.header.decode_set(key(site, group), &block).ok_or_else(damaged)
    }
}

/// What tells the blocks apart.
fn key(site: &Site, group: u64) -> [u64; 4] {
    [site.step, u64::from(site.micro_batch), u64::from(site.layer), group]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visiting(experts: usize) -> Visiting {
        let routes = Shape {
            experts: experts.into(),
            slots: 2.into(),
            seq: 16,
            rows: 4,
            layers: vec![1, 3],
            seed: 1 << 40,
            data: 3,
        };
        let tables = [ExpertTable::even(experts, 2), ExpertTable::even(experts, 1)];
        Visiting::new(&routes, MeshShape::of(4, 2), &tables, 3)
    }

    #[test]
    fn headers_come_back_and_no_changed_byte_goes_unnoticed() {
        let own = visiting(8);
        let mut bytes = own.encode(9);
        assert_eq!(bytes.len() as u64, own.header_bytes());
        assert_eq!(Visiting::decode(&bytes), Ok((own.clone(), 9)));
        for at in 0..bytes.len() {
            bytes[at] ^= 0x80;
            assert!(Visiting::decode(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 0x80;
            assert!(Visiting::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        // Two micro-batches; two expert groups in the one layer, four in the other.
        assert_eq!(own.step_bytes(), 2 * 6 * 9);
    }

    #[test]
    fn sets_come_back_and_no_changed_byte_goes_unnoticed() {
        for (experts, set) in [(1, vec![0]), (8, vec![]), (10, vec![0, 7, 8, 9]), (64, (0..64).collect())] {
            let (own, place) = (Visiting { experts, ..visiting(8) }, [7, 1, 3, 2]);
            let mut block = own.encode_set(place, &set);
            assert_eq!(block.len(), own.block_bytes());
            assert_eq!(own.decode_set(place, &block), Some(set));
            for at in 0..block.len() {
                block[at] ^= 1;
                assert_eq!(own.decode_set(place, &block), None, "{experts} experts, byte {at}");
                block[at] ^= 1;
            }
            for other in [[8, 1, 3, 2], [7, 0, 3, 2], [7, 1, 1, 2], [7, 1, 3, 0]] {
                assert_eq!(own.decode_set(other, &block), None, "{other:?}");
            }
            assert_eq!(own.decode_set(place, &vec![0; block.len()]), None, "a hole");
        }
        let (wide, narrow) = (Visiting { experts: 16, ..visiting(8) }, Visiting { experts: 15, ..visiting(8) });
        assert_eq!(narrow.decode_set([1; 4], &wide.encode_set([1; 4], &[15])), None, "no such expert");
    }
}
