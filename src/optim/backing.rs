//! What keeps state and gradients that are away: memory of the host, or a file that has no name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use super::shard::{Address, GradientPart, Shard};

/// Elements that are converted or added at a time.
const CHUNK: usize = 1 << 16;

/// Where state is between updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadTarget {
    /// On the device.
    None,
    /// In memory that is not the device's.
    Host,
    /// In a file of this rank's own, in this folder.
    File(PathBuf),
}

#[derive(Debug)]
pub(super) struct Backing {
    place: BackingStore,
    /// Where sums are added as a device adds them, and squared.
    scratch: Arc<Device>,
}

#[derive(Debug)]
enum BackingStore {
    /// Memory with an account of its own; by weight, its strips, and its gradient.
    Host { host: Arc<Device>, state: Vec<Tensor>, gradients: Vec<Tensor> },
    /// State, then gradients.
    File { file: File, bytes: Vec<u8>, state: usize },
    /// In place of a file, where there are no elements that it could keep.
    Nowhere,
}

/// Consecutive elements that are kept.
#[derive(Clone, Copy)]
struct Spot {
    weight: usize,
    /// Of the weight's gradient, or of its strips.
    is_gradient: bool,
    /// Elements of the weights before it.
    base: usize,
    /// The first, among the weight's.
    first: usize,
}

impl Backing {
    /// Room for `shards` of a `device`: elements are here if they are there.
    pub(super) fn new(device: &Device, place: &OffloadTarget, shards: &[Shard]) -> io::Result<Backing> {
        let like = || if device.has_data() { Device::new(1) } else { Device::sizes(1) };
        let place = match place {
            OffloadTarget::File(_) if !device.has_data() => BackingStore::Nowhere,
            OffloadTarget::File(folder) => {
                let (file, mut bytes) = (nameless(folder)?, vec![0; 4 * CHUNK]);
                let state = shards.iter().map(Shard::len).sum();
                let gradients: usize = shards.iter().map(|shard| shard.range.len()).sum();
                for first in (0..gradients).step_by(CHUNK) {
                    let zeros = vec![0.0; CHUNK.min(gradients - first)];
                    write_at(&file, &mut bytes, state + first, &zeros)?;
                }
                BackingStore::File { file, bytes, state }
            }
            OffloadTarget::None | OffloadTarget::Host => {
                let host = like();
                let of = |cause, len: fn(&Shard) -> usize| -> Vec<Tensor> {
                    let _charge = host.charge(cause);
                    shards.iter().map(|shard| Tensor::zeros(&host, &[len(shard)])).collect()
                };
                let state = of(Cause::Optimizer, Shard::len);
                let gradients = of(Cause::Gradients, |shard| shard.range.len());
                BackingStore::Host { host: host.clone(), state, gradients }
            }
        };
        Ok(Backing { place, scratch: like() })
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        match &self.place {
            BackingStore::Host { host, .. } => Some(host),
            BackingStore::File { .. } | BackingStore::Nowhere => None,
        }
    }

    /// Fills the front of `staging` with a tile: its strips end to end, and the gradient behind them if it has one.
    pub(super) fn read(&mut self, tile: &Address, staging: &mut Tensor) -> io::Result<()> {
        let len = tile.range.len();
        for strip in 0..tile.strips {
            self.place.read(tile.strip_at(strip), staging, strip * len..(strip + 1) * len)?;
        }
        match tile.has_gradient {
            true => {
                let gradient =
                    GradientPart { weight: tile.weight, place: (tile.gradient, tile.range.start), from: 0..len };
                self.place.read(Spot::of(&gradient), staging, tile.strips * len..(tile.strips + 1) * len)
            }
            false => Ok(()),
        }
    }

    /// Keeps the front of `staging` as a tile.
    pub(super) fn write(&mut self, tile: &Address, staging: &Tensor) -> io::Result<()> {
        let len = tile.range.len();
        let mut strips = 0..tile.strips;
        strips.try_for_each(|strip| self.place.write(tile.strip_at(strip), staging, strip * len..(strip + 1) * len))
    }

    /// Keeps sums in place of what was there.
    pub(super) fn put(&mut self, part: &GradientPart, sums: &Tensor) -> io::Result<()> {
        self.by_chunks(part, sums, |_, _, chunk| Ok(chunk))
    }

    /// Adds sums to what is there, rounded to what they are stored in, as a device would.
    pub(super) fn add(&mut self, part: &GradientPart, sums: &Tensor) -> io::Result<()> {
        self.by_chunks(part, sums, |backing, spot, more| {
            let len = more.len();
            let mut before = Tensor::stale(&backing.scratch, &[len], Dtype::F32);
            backing.place.read(spot, &mut before, 0..len)?;
            let mut sum = before.into_dtype(more.dtype());
            sum.add_part(&more, 0..len);
            Ok(sum)
        })
    }

    /// Keeps what `f` makes of sums, some at a time, whose place it is told.
    fn by_chunks(
        &mut self,
        part: &GradientPart,
        sums: &Tensor,
        f: impl Fn(&mut Backing, Spot, Tensor) -> io::Result<Tensor>,
    ) -> io::Result<()> {
        // What is done here is no work of the device, and takes none of its memory.
        let chunks = if self.scratch.has_data() { part.from.clone() } else { 0..0 };
        for first in chunks.step_by(CHUNK) {
            let from = first..part.from.end.min(first + CHUNK);
            let at = Spot::of(part);
            let spot = Spot { first: at.first + first - part.from.start, ..at };
            let mut chunk = Tensor::stale(&self.scratch, &[from.len()], sums.dtype());
            chunk.copy_part(0, sums, from);
            let chunk = f(self, spot, chunk)?.into_f32();
            self.place.write(spot, &chunk, 0..chunk.len())?;
        }
        Ok(())
    }

    /// By weight, the sum of the squares of tiles of its gradient, each as large as a device squares at once.
    pub(super) fn squares(&mut self, weights: &[Vec<GradientPart>]) -> io::Result<SquareSums> {
        let mut sums = SquareSums::zeros(&self.scratch, weights.len());
        // Nor is this.
        let weights = if self.scratch.has_data() { weights } else { &[] };
        for (weight, tiles) in weights.iter().enumerate() {
            for tile in tiles {
                let mut elements = Tensor::stale(&self.scratch, &[tile.from.len()], Dtype::F32);
                self.place.read(Spot::of(tile), &mut elements, 0..tile.from.len())?;
                sums.add(weight, &elements, 0..tile.from.len());
            }
        }
        Ok(sums)
    }
}

impl Spot {
    /// Where elements of a gradient are kept.
    fn of(part: &GradientPart) -> Spot {
        let (base, first) = part.place;
        Spot { weight: part.weight, is_gradient: true, base, first }
    }
}

impl Address {
    /// Where a strip of the tile is kept.
    fn strip_at(&self, strip: usize) -> Spot {
        let first = strip * self.strip + self.range.start;
        Spot { weight: self.weight, is_gradient: false, base: self.base, first }
    }
}

impl BackingStore {
    /// Fills elements `range` of a tensor with those from `spot` on.
    fn read(&mut self, spot: Spot, to: &mut Tensor, range: Range<usize>) -> io::Result<()> {
        let Spot { weight, is_gradient, base, first } = spot;
        match self {
            BackingStore::Host { state, gradients, .. } => {
                let kept = if is_gradient { &gradients[weight] } else { &state[weight] };
                to.copy_part(range.start, kept, first..first + range.len());
                Ok(())
            }
            BackingStore::File { file, bytes, state } => {
                let before = if is_gradient { *state } else { 0 };
                to.write_f32s(range, |to| read_at(file, bytes, before + base + first, to)).unwrap_or(Ok(()))
            }
            BackingStore::Nowhere => Ok(()),
        }
    }

    /// Keeps elements `range` of an f32 tensor from `spot` on.
    fn write(&mut self, spot: Spot, from: &Tensor, range: Range<usize>) -> io::Result<()> {
        let Spot { weight, is_gradient, base, first } = spot;
        match self {
            BackingStore::Host { state, gradients, .. } => {
                let kept = if is_gradient { &mut gradients[weight] } else { &mut state[weight] };
                kept.copy_part(first, from, range);
                Ok(())
            }
            BackingStore::File { file, bytes, state } => {
                let before = if is_gradient { *state } else { 0 };
                write_at(file, bytes, before + base + first, from.elements(range).f32s())
            }
            BackingStore::Nowhere => Ok(()),
        }
    }
}

/// A new file in `folder` that loses its name at once: it goes with the process, however that ends, and no later run can
/// take it for its own.
fn nameless(folder: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    let path = (0..).map(|n| folder.join(format!("optimizer-{}-{n}.state", std::process::id())));
    for path in path {
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            opened => return opened.and_then(|file| fs::remove_file(&path).map(|()| file)),
        }
    }
    unreachable!("there are infinitely many names")
}

fn read_at(file: &File, bytes: &mut [u8], first: usize, to: &mut [f32]) -> io::Result<()> {
    for (chunk, first) in to.chunks_mut(CHUNK).zip((first..).step_by(CHUNK)) {
        let bytes = &mut bytes[..4 * chunk.len()];
        file.read_exact_at(bytes, 4 * first as u64)?;
        for (to, from) in chunk.iter_mut().zip(bytes.as_chunks().0) {
            *to = f32::from_le_bytes(*from);
        }
    }
    Ok(())
}

fn write_at(file: &File, bytes: &mut [u8], first: usize, from: &[f32]) -> io::Result<()> {
    for (chunk, first) in from.chunks(CHUNK).zip((first..).step_by(CHUNK)) {
        let bytes = &mut bytes[..4 * chunk.len()];
        for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(chunk) {
            *to = from.to_le_bytes();
        }
        file.write_all_at(bytes, 4 * first as u64)?;
    }
    Ok(())
}
