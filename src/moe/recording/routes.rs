//! A recording of routings: the rows of a micro-batch at their places in the file.

use std::ops::Range;

use super::block::{BlockPlace, decode, encode};
use super::{Error, Shape, StepFile};
use crate::moe::Routing;

/// An open file of routings.
pub type Recording = StepFile<Shape>;

impl StepFile<Shape> {
    /// The rows of a step that hold these tokens.
    pub(super) fn rows(&self, tokens: Range<u64>) -> Range<u64> {
        let seq = self.header.seq as u64;
        assert!([tokens.start, tokens.end].iter().all(|end| end.is_multiple_of(seq)), "whole rows, not {tokens:?}");
        tokens.start / seq..tokens.end / seq
    }

    /// Where the blocks of some rows begin.
    fn place(&self, step: u64, layer: u32, row: u64) -> u64 {
        let place = self.header.place(layer);
        self.offset(step) + self.header.bytes_before(place) + row * self.header.block_bytes(place) as u64
    }

    pub(super) fn write(&self, step: u64, layer: u32, rows: Range<u64>, routing: &Routing) -> Result<(), Error> {
        let routes = self.header.seq * routing.k;
        let mut bytes =
            Vec::with_capacity(self.header.block_bytes(self.header.place(layer)) * (rows.end - rows.start) as usize);
        let all = routing.chosen.chunks_exact(routes).zip(routing.expert.chunks_exact(routes));
        for (row, of_row) in rows.clone().zip(all) {
            encode(&mut bytes, BlockPlace { step, layer, row }, &self.header, of_row);
        }
        self.write_at(&bytes, self.place(step, layer, rows.start))
    }

    /// The routing of some rows of a step.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged there.
    ///
    /// # Panics
    /// If the layer is none of the recording's.
    pub fn read(&self, step: u64, layer: u32, rows: Range<u64>) -> Result<Routing, Error> {
        let at = self.header.place(layer);
        let (slots, experts) = (self.header.slots.at(at), self.header.experts.at(at));
        let block_bytes = self.header.block_bytes(at);
        let bytes =
            self.read_at(block_bytes * (rows.end - rows.start) as usize, self.place(step, layer, rows.start))?;
        let mut routing = Routing::new(Vec::new(), slots, experts);
        for (row, block) in rows.zip(bytes.chunks_exact(block_bytes)) {
            let damaged = || {
                let block = format!("layer {layer}, row {row}").into();
                Error::Damaged { path: self.path.clone(), step, block }
            };
            decode(block, BlockPlace { step, layer, row }, &self.header, &mut routing).ok_or_else(damaged)?;
        }
        Ok(routing)
    }
}
