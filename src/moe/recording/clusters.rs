//! A recording of clusters: which routes share a row where tokens are condensed. It lies beside the routings and is, like
//! them, in the order of the data.
//!
//! ```text
//!  representative[seq * slots]   checksum
//! ```
//!
//! An entry is the route whose row a route shares, itself if it has one of its own, counted from the first route of its
//! group of tokens.

use super::block::{CHECKSUM_BYTES, checksum, hash};
use super::companion::Companion;
use super::file::Header;
use super::header::{countable, end, first_step, long, word};
use super::{Error, Shape, Site, StepFile};
use crate::moe::{Clusters, Routing};
use crate::parallel::Rows;

const VERSION: u32 = 1;
/// Bytes before the layers.
const FIXED: usize = 48;

/// What two runs must have in common for one to follow the other's clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clustering {
    slots: u32,
    /// Tokens of a row, rows of a step.
    seq: u32,
    rows: u32,
    /// Consecutive tokens of a step among which clusters form.
    group: u32,
    /// The MoE layers' indices in the model.
    layers: Vec<u32>,
    /// The hash in the header of the routings, had they begun with step 1.
    routes: u64,
}

impl Clustering {
    /// Of routings of this shape, in groups of `tokens`; `None`: a sequence.
    pub fn new(routes: &Shape, tokens: Option<usize>) -> Clustering {
        Clustering {
            slots: routes.slots.largest() as u32,
            seq: routes.seq as u32,
            rows: routes.rows as u32,
            group: tokens.unwrap_or(routes.seq) as u32,
            layers: routes.layers.clone(),
            routes: routes.hash_from_start(),
        }
    }

    fn routes_of_row(&self) -> usize {
        self.seq as usize * self.slots as usize
    }

    fn routes_of_group(&self) -> u64 {
        u64::from(self.group.max(1)) * u64::from(self.slots)
    }

    /// Bytes of an entry.
    fn entry_bytes(&self) -> usize {
        match self.routes_of_group() {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 4,
        }
    }

    fn block_bytes(&self) -> usize {
        self.routes_of_row() * self.entry_bytes() + CHECKSUM_BYTES
    }

    /// The block at `place` of the row that begins with route `first` of the step, whose routes go to `sent`; `of` has
    /// the number in the step of each route's representative.
    fn encode_row(&self, (place, first): ([u64; 3], u64), sent: &[u32], of: impl Iterator<Item = u64>) -> Vec<u8> {
        let group = self.routes_of_group();
        let mut bytes = Vec::with_capacity(self.block_bytes());
        for (route, of) in (first..).zip(of) {
            bytes.extend_from_slice(&(of - route / group * group).to_le_bytes()[..self.entry_bytes()]);
        }
        let checksum = checksum(&bytes, &key(place, sent));
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The representatives' numbers in a block; `None` if it is not the block of `place` and of these routes.
    fn decode_row(&self, (place, first): ([u64; 3], u64), sent: &[u32], block: &[u8]) -> Option<Vec<u64>> {
        let (entries, sum) = block.split_at(block.len() - CHECKSUM_BYTES);
        if sum != checksum(entries, &key(place, sent)).to_le_bytes() {
            return None;
        }
        let group = self.routes_of_group();
        let number = |(route, entry): (u64, &[u8])| {
            let mut long = [0; 8];
            long[..entry.len()].copy_from_slice(entry);
            Some(u64::from_le_bytes(long)).filter(|&entry| entry < group).map(|entry| route / group * group + entry)
        };
        (first..).zip(entries.chunks_exact(self.entry_bytes())).map(number).collect()
    }
}

/// What tells the blocks apart: where they belong, and to which routes.
fn key([step, layer, row]: [u64; 3], sent: &[u32]) -> [u64; 4] {
    let sent: Vec<u8> = sent.iter().flat_map(|expert| expert.to_le_bytes()).collect();
    [hash(&sent), step, layer, row]
}

impl Header for Clustering {
    const MAGIC: &'static [u8; 8] = b"GHSHARES";
    const WHAT: [&'static str; 2] = ["clusters", "take it away to have them decided anew"];

    fn header_bytes(&self) -> u64 {
        (FIXED + 4 * self.layers.len() + CHECKSUM_BYTES) as u64
    }

    fn step_bytes(&self) -> u64 {
        self.layers.len() as u64 * u64::from(self.rows) * self.block_bytes() as u64
    }

    fn differences(&self, recorded: &Clustering) -> Vec<String> {
        let mut all = Vec::new();
        if self.group != recorded.group {
            all.push(format!("moe.condense_tokens: {} there, {} here", recorded.group, self.group));
        }
        if (Clustering { group: self.group, ..recorded.clone() }) != *self {
            all.push("it belongs to other routings".to_owned());
        }
        all
    }

    fn encode(&self, first: u64) -> Vec<u8> {
        let mut bytes = Self::MAGIC.to_vec();
        for number in [VERSION, self.slots, self.seq, self.rows, self.group, self.layers.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [self.routes, first] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        self.layers.iter().for_each(|layer| bytes.extend_from_slice(&layer.to_le_bytes()));
        let checksum = hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<(Clustering, u64), String> {
        let (word, long) = (|at| word(bytes, at), |at| long(bytes, at));
        let end = end::<Clustering>(bytes, &[VERSION], [28, FIXED, 4])?;
        let [slots, seq, rows, group] = [12, 16, 20, 24].map(word);
        let layers: Vec<u32> = (FIXED..end).step_by(4).map(word).collect();
        countable([slots, seq, rows, layers.len() as u32])?;
        countable([slots, group])?;
        Ok((Clustering { slots, seq, rows, group, layers, routes: long(32) }, first_step(long(40))?))
    }
}

impl Companion for Clustering {
    const SUFFIX: &'static str = ".clusters";
}

/// An open file of clusters.
pub type ClusterFile = StepFile<Clustering>;

impl StepFile<Clustering> {
    /// Where the block of a row begins.
    fn place(&self, [step, layer, row]: [u64; 3]) -> u64 {
        let own = |&index: &u32| u64::from(index) == layer;
        let layer = self.header.layers.iter().position(own).expect("a layer of the recording") as u64;
        self.offset(step) + (layer * u64::from(self.header.rows) + row) * self.header.block_bytes() as u64
    }

    /// Each sequence of some tokens: the place of its block, the number in the step of its first route, and the experts
    /// that its routes are sent to.
    fn blocks<'a>(
        &'a self,
        site: &'a Site,
        (tokens, routing): (&'a Rows, &'a Routing),
    ) -> impl Iterator<Item = ([u64; 3], u64, &'a [u32])> {
        let Clustering { seq, slots, .. } = self.header;
        assert!(tokens.is_empty() || tokens.seq == seq as usize, "rows of {seq} tokens, not of {}", tokens.seq);
        let sequences = tokens.sequences.iter().zip(routing.expert.chunks_exact(self.header.routes_of_row()));
        sequences.map(move |(&first, sent)| {
            ([site.step, u64::from(site.layer), first / u64::from(seq)], first * u64::from(slots), sent)
        })
    }

    /// Writes the clusters of some tokens; without clusters every route has its own row.
    pub(super) fn write(
        &self,
        site: &Site,
        (tokens, routing): (&Rows, &Routing),
        clusters: Option<&Clusters>,
    ) -> Result<(), Error> {
        let numbers = RouteNumbers { tokens, slots: routing.k };
        let routes = self.header.routes_of_row() as u32;
        for (row, (place, first, sent)) in (0..).zip(self.blocks(site, (tokens, routing))) {
            let of = (row * routes..(row + 1) * routes).map(|route| numbers.number(representative(clusters, route)));
            self.write_at(&self.header.encode_row((place, first), sent, of), self.place(place))?;
        }
        Ok(())
    }

    /// The clusters of some tokens of which this is the routing; `None` if every route has its own row.
    ///
    /// # Errors
    /// A file that cannot be read, is damaged there, or has clusters of other routings.
    ///
    /// # Panics
    /// If the layer is none of the recording's.
    pub fn read(&self, site: &Site, (tokens, routing): (&Rows, &Routing)) -> Result<Option<Clusters>, Error> {
        let numbers = RouteNumbers { tokens, slots: routing.k };
        let (mut of, mut last) = (Vec::with_capacity(routing.expert.len()), None);
        let damaged = |[step, layer, row]: [u64; 3]| {
            let block = format!("layer {layer}, row {row}").into();
            Error::Damaged { path: self.path.clone(), step, block }
        };
        for (place, first, sent) in self.blocks(site, (tokens, routing)) {
            let block = self.read_at(self.header.block_bytes(), self.place(place))?;
            let row = self.header.decode_row((place, first), sent, &block).ok_or_else(|| damaged(place))?;
            for number in row {
                of.push(numbers.route(number).ok_or_else(|| damaged(place))?);
            }
            last = Some(place);
        }
        match last {
            Some(place) if !are_clusters(&of, routing) => Err(damaged(place)),
            _ => Ok(Clusters::of(of)),
        }
    }
}

pub(super) fn representative(clusters: Option<&Clusters>, route: u32) -> u32 {
    match clusters {
        Some(Clusters::Known(of)) => of[route as usize],
        Some(Clusters::Counted(_)) => panic!("a simulated step has nothing to record"),
        None => route,
    }
}

/// Whether representatives have rows of their own, at the experts of those that they represent.
fn are_clusters(of: &[u32], routing: &Routing) -> bool {
    let sent = |route: usize| routing.expert[route];
    let is_member = |(route, &own): (usize, &u32)| {
        let own = own as usize;
        own == route || (of[own] as usize == own && sent(own) == sent(route) && sent(route) != Routing::DROPPED)
    };
    of.iter().enumerate().all(is_member)
}

/// The numbers in the step of some tokens' routes.
pub(super) struct RouteNumbers<'a> {
    pub(super) tokens: &'a Rows,
    pub(super) slots: usize,
}

impl RouteNumbers<'_> {
    pub(super) fn number(&self, route: u32) -> u64 {
        let (token, slot) = (route as usize / self.slots, route as usize % self.slots);
        let first = self.tokens.sequences[token / self.tokens.seq];
        (first + (token % self.tokens.seq) as u64) * self.slots as u64 + slot as u64
    }

    /// The route with this number, if it is one of them.
    fn route(&self, number: u64) -> Option<u32> {
        let (token, slot, seq) = (number / self.slots as u64, number % self.slots as u64, self.tokens.seq as u64);
        let place = self.tokens.sequences.partition_point(|&first| first <= token).checked_sub(1)?;
        let within = Some(token - self.tokens.sequences[place]).filter(|&within| within < seq)?;
        u32::try_from((place as u64 * seq + within) * self.slots as u64 + slot).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn shape(slots: usize) -> Shape {
        Shape { experts: 8.into(), slots: slots.into(), seq: 4, rows: 4, layers: vec![1, 3], seed: 1 << 40, data: 3 }
    }

    #[test]
    fn headers_come_back_and_no_changed_byte_goes_unnoticed() {
        let own = Clustering::new(&shape(2), Some(8));
        let mut bytes = own.encode(9);
        assert_eq!(bytes.len() as u64, own.header_bytes());
        assert_eq!(Clustering::decode(&bytes), Ok((own.clone(), 9)));
        for at in 0..bytes.len() {
            bytes[at] ^= 0x80;
            assert!(Clustering::decode(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 0x80;
            assert!(Clustering::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        // Two layers of four rows of four tokens.
        assert_eq!(own.step_bytes(), 2 * 4 * (4 * 2 + 8));
        assert_eq!(own.differences(&own), Vec::<String>::new());
        let other = Clustering::new(&shape(2), None);
        assert_eq!(own.differences(&other), ["moe.condense_tokens: 4 there, 8 here"]);
        let other = Clustering::new(&Shape { seed: 1, ..shape(2) }, Some(8));
        assert_eq!(own.differences(&other), ["it belongs to other routings"]);
    }

    #[test]
    fn blocks_come_back_in_all_widths_and_no_changed_byte_goes_unnoticed() {
        for (tokens, width) in [(128, 1), (129, 2), (1 << 15, 2), ((1 << 15) + 1, 4)] {
            let own = Clustering { group: tokens, ..Clustering::new(&shape(2), None) };
            let (place, group, sent) = ([7, 3, 2], u64::from(tokens) * 2, [0, 1, 0, 1, 5, Routing::DROPPED, 0, 1]);
            // The last routes of a group, and the first of the next.
            let first = group - 4;
            let of = [0, group - 1, group - 2, 3, group, group + 1, 2 * group - 1, group];
            let mut block = own.encode_row((place, first), &sent, of.into_iter());
            assert_eq!((block.len(), own.block_bytes()), (8 * width + 8, 8 * width + 8), "groups of {tokens}");
            assert_eq!(own.decode_row((place, first), &sent, &block), Some(of.to_vec()));
            for at in 0..block.len() {
                block[at] ^= 1;
                assert_eq!(own.decode_row((place, first), &sent, &block), None, "groups of {tokens}, byte {at}");
                block[at] ^= 1;
            }
            for other in [[8, 3, 2], [7, 1, 2], [7, 3, 1]] {
                assert_eq!(own.decode_row((other, first), &sent, &block), None, "{other:?}");
            }
            let elsewhere = [0, 1, 0, 1, 5, 5, 0, 1];
            assert_eq!(own.decode_row((place, first), &elsewhere, &block), None, "clusters of other routes");
            assert_eq!(own.decode_row((place, first), &sent, &vec![0; block.len()]), None, "a hole");
        }
        let own = Clustering::new(&shape(2), None);
        let beyond = own.encode_row(([7, 3, 0], 0), &[0; 8], [8; 8].into_iter());
        assert_eq!(own.decode_row(([7, 3, 0], 0), &[0; 8], &beyond), None, "a route of the next group");
    }

    fn rows(rows: Range<u64>) -> Rows {
        Rows { seq: 4, sequences: rows.map(|row| row * 4).collect(), ..Rows::default() }
    }

    /// One rank writes two micro-batches at once, two others read one each: groups of two rows, one route a token.
    #[test]
    fn clusters_that_span_rows_are_read_wherever_they_lie() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, header) = (folder.path().join("clusters"), Clustering::new(&shape(1), Some(8)));
        let file = ClusterFile::create(&path, header, 5).expect("a file");
        let site = Site { step: 6, micro_batch: 0, stack: 0, layer: 3, call: 0 };
        let routing = Routing::new((0..16).map(|route| route % 2).collect(), 1, 2);
        let mut of: Vec<u32> = (0..16).collect();
        (of[6], of[4], of[15], of[9]) = (0, 0, 9, 9);
        let clusters = Clusters::Known(of.clone());
        file.write(&site, (&rows(0..4), &routing), Some(&clusters)).expect("a write");
        let read = |of_rows: Range<u64>| {
            let routing = routing.of_tokens(of_rows.start as usize * 4..of_rows.end as usize * 4);
            file.read(&site, (&rows(of_rows), &routing)).map_err(|error| error.to_string())
        };
        assert_eq!(read(0..4), Ok(Some(clusters)));
        let second = of[8..].iter().map(|of| of - 8).collect();
        assert_eq!(
            [read(0..2), read(2..4)],
            [Ok(Some(Clusters::Known(of[..8].to_vec()))), Ok(Some(Clusters::Known(second)))]
        );
        assert!(read(1..2).expect_err("its representative is not there").contains("layer 3, row 1"));
        file.write(&site, (&rows(0..4), &routing), None).expect("a write");
        assert_eq!(read(0..4), Ok(None));
        // A chain, and a representative at another expert.
        for (route, to) in [(2, 6), (4, 1)] {
            let mut wrong = of.clone();
            wrong[route] = to;
            file.write(&site, (&rows(0..4), &routing), Some(&Clusters::Known(wrong))).expect("a write");
            assert!(read(0..4).expect_err("no clusters").contains("is damaged at step 6"), "{route} to {to}");
        }
    }
}
