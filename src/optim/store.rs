//! Where the optimizer's state is kept, and the walk over it, tile by tile.
//!
//! ```text
//!  a weight's shard    [ m ............ | v ............ | master ........ ]     strips of one length
//!  a tile                 ^^^^             ^^^^             ^^^^                 at most `tile` elements of each
//! ```
//!
//! On the device a tile is worked on where it lies. Away from it (`away.rs`) tiles come and go in staging memory.

use std::ops::Range;
use std::sync::Arc;

use guildhall_tensor::ops::Strips;
use guildhall_tensor::{Cause, Device, Tensor};

use super::Error;
use super::away::Away;
use super::shard::{Access, Address, Shard};

/// All state of one rank.
#[derive(Debug)]
pub(super) enum Store {
    /// By weight: its strips, `[strips, len]`.
    Device(Vec<Tensor>),
    Away(Box<Away>),
}

impl Store {
    pub(super) fn on_device(device: &Arc<Device>, shards: &[Shard]) -> Store {
        let _charge = device.charge(Cause::Optimizer);
        Store::Device(shards.iter().map(|shard| Tensor::zeros(device, &[shard.strips, shard.range.len()])).collect())
    }
}

/// A tile of one weight's state, in memory of the device.
pub struct StateTile<'a> {
    /// Elements of the local weight.
    pub elements: Range<usize>,
    pub state: &'a mut Tensor,
    /// Where `state` has the tile's part of each strip.
    pub strips: Strips,
}

impl StateTile<'_> {
    /// A strip's part, on the host. Waits.
    pub fn read(&self, strip: usize) -> Vec<f32> {
        self.state.part_to_vec(self.strips.range(strip))
    }

    /// Writes values over a strip's part from element `first` of the local weight on.
    ///
    /// # Panics
    /// If the tile ends before they do.
    pub fn write(&mut self, strip: usize, first: usize, values: &[f32]) {
        let end = first + values.len();
        assert!(self.elements.start <= first && end <= self.elements.end, "{first}..{end} of {:?}", self.elements);
        self.state.store_f32s(self.strips.range(strip).start + first - self.elements.start, values);
    }
}

/// A walk over the state of all weights, in visiting order.
#[must_use = "what was changed is safe when the walk has finished"]
pub struct StateWalk<'a> {
    store: &'a mut Store,
    device: Arc<Device>,
    shards: &'a [Shard],
    tiles: Vec<Tile>,
    /// Tiles done.
    done: usize,
}

/// Elements of one shard, counted from the shard's first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tile {
    weight: usize,
    range: Range<usize>,
    /// Tiles that it stands for, itself among them.
    alike: u64,
}

/// Shards in tiles of at most `tile` elements.
fn tiles(shards: &[Shard], tile: usize) -> Vec<Tile> {
    let of = |(weight, shard): (usize, &Shard)| {
        let len = shard.range.len();
        let cut = move |start: usize| Tile { weight, range: start..len.min(start.saturating_add(tile)), alike: 1 };
        (0..len).step_by(tile).map(cut)
    };
    shards.iter().enumerate().flat_map(of).collect()
}

/// The same where nobody works on elements: of a shard's tiles between the first and the last one stands for all.
fn tiles_alike(shards: &[Shard], tile: usize) -> Vec<Tile> {
    let of = |(weight, shard): (usize, &Shard)| {
        let (len, count) = (shard.range.len(), shard.range.len().div_ceil(tile));
        let cut = |number: usize, alike| Tile {
            weight,
            range: number * tile..len.min((number * tile).saturating_add(tile)),
            alike,
        };
        match count {
            0..4 => (0..count).map(|number| cut(number, 1)).collect(),
            _ => vec![cut(0, 1), cut(1, count as u64 - 2), cut(count - 1, 1)],
        }
    };
    shards.iter().enumerate().flat_map(of).collect()
}

impl<'a> StateWalk<'a> {
    pub(super) fn new(
        store: &'a mut Store,
        device: &Arc<Device>,
        shards: &'a [Shard],
        tile: usize,
        access: Access,
    ) -> Result<StateWalk<'a>, Error> {
        let tiles = if device.has_data() { tiles(shards, tile) } else { tiles_alike(shards, tile) };
        StateWalk::over(tiles, store, device, shards, access)
    }

    /// A walk over the state of one weight alone.
    pub(super) fn of_weight(
        number: usize,
        store: &'a mut Store,
        device: &Arc<Device>,
        (shards, tile): (&'a [Shard], usize),
        access: Access,
    ) -> Result<StateWalk<'a>, Error> {
        let tiles = tiles(shards, tile).into_iter().filter(|tile| tile.weight == number).collect();
        StateWalk::over(tiles, store, device, shards, access)
    }

    fn over(
        tiles: Vec<Tile>,
        store: &'a mut Store,
        device: &Arc<Device>,
        shards: &'a [Shard],
        access: Access,
    ) -> Result<StateWalk<'a>, Error> {
        if let Store::Away(away) = store {
            let addresses =
                tiles.iter().map(|tile| Address::new(shards, tile.weight, tile.range.clone(), tile.alike, access));
            away.begin(addresses.collect(), access)?;
        }
        Ok(StateWalk { store, device: device.clone(), shards, tiles, done: 0 })
    }

    /// Calls `f` with every tile of the next weight.
    ///
    /// # Errors
    /// What moving state reports, and what `f` does.
    pub fn weight<E: From<Error>>(
        &mut self,
        number: usize,
        mut f: impl FnMut(StateTile) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(tile) = self.tiles.get(self.done).filter(|tile| tile.weight == number) {
            let (shard, range) = (&self.shards[number], tile.range.clone());
            self.device.stand_for(tile.alike);
            let elements = shard.range.start + range.start..shard.range.start + range.end;
            match self.store {
                Store::Device(tensors) => {
                    let (first, stride, count) = (range.start, shard.range.len(), shard.strips);
                    let strips = Strips { first, stride, count, len: range.len() };
                    f(StateTile { elements, state: &mut tensors[number], strips })?;
                }
                Store::Away(away) => {
                    let (mut staged, count) = (away.next()?, away.strips(shard));
                    let strips = Strips { first: 0, stride: range.len(), count, len: range.len() };
                    f(StateTile { elements, state: &mut staged, strips })?;
                    away.give_back(staged);
                }
            }
            self.done += 1;
        }
        self.device.stand_for(1);
        Ok(())
    }

    /// Returns when all that was changed is where it is kept.
    ///
    /// # Errors
    /// What moving state reports.
    ///
    /// # Panics
    /// If weights were left out.
    pub fn finish(self) -> Result<(), Error> {
        assert_eq!(self.done, self.tiles.len(), "a walk goes over all weights");
        match self.store {
            Store::Device(_) => Ok(()),
            Store::Away(away) => away.settle(),
        }
    }
}

#[cfg(test)]
mod tests {
    use guildhall_tensor::Dtype;

    use super::*;

    #[test]
    fn tiles_cover_shards_and_do_not_mix_them() {
        let shard = |range: Range<usize>| Shard { range, strips: 2, gradient: Dtype::F32 };
        let shards = [shard(3..8), shard(4..4), shard(0..2)];
        let cut = |tile| tiles(&shards, tile).into_iter().map(|tile| (tile.weight, tile.range)).collect::<Vec<_>>();
        assert_eq!(cut(2), [(0, 0..2), (0, 2..4), (0, 4..5), (2, 0..2)]);
        assert_eq!(cut(usize::MAX), [(0, 0..5), (2, 0..2)]);
        let alike = tiles_alike(&[shard(0..9), shard(0..6)], 2);
        let alike: Vec<_> = alike.into_iter().map(|tile| (tile.weight, tile.range, tile.alike)).collect();
        let of_second = [0..2, 2..4, 4..6].map(|range| (1, range, 1));
        assert_eq!(alike[..3], [(0, 0..2, 1), (0, 2..4, 3), (0, 8..9, 1)]);
        assert_eq!(alike[3..], of_second);
    }
}
