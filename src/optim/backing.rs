//! What keeps state and gradients that are away: memory of the host, or a file that has no name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Cause, Device, DevicePoint, Dtype, PinnedTensor, Tensor};

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
    /// Of f32 and of bf16, a chunk through which sums come from a device with memory of its own.
    bounce: Option<[PinnedTensor; 2]>,
}

#[derive(Debug)]
enum BackingStore {
    /// Memory with an account of its own: the strips of all weights, and their gradients.
    Host { host: Arc<Device>, state: PinnedTensor, gradients: PinnedTensor },
    /// State, then gradients; a chunk of either on its way to or from a device with memory of its own.
    File { file: File, bytes: Vec<u8>, chunk: PinnedTensor, state: usize },
    /// In place of a file, where there are no elements that it could keep.
    Nowhere,
}

/// Consecutive elements that are kept.
#[derive(Clone, Copy)]
struct Spot {
    /// Of gradients, or of strips.
    is_gradient: bool,
    /// The first, among those of all weights.
    first: usize,
}

impl Backing {
    /// Room for `shards` of a `device`: elements are here if they are there.
    pub(super) fn new(device: &Device, place: &OffloadTarget, shards: &[Shard]) -> io::Result<Backing> {
        let like = || if device.has_data() { Device::new(1) } else { Device::sizes(1) };
        let scratch = like();
        let chunk = |dtype| PinnedTensor::new(device, Tensor::stale(&scratch, &[CHUNK], dtype));
        let state_len: usize = shards.iter().map(Shard::len).sum();
        let gradients_len: usize = shards.iter().map(|shard| shard.range.len()).sum();
        let place = match place {
            OffloadTarget::File(_) if !device.has_data() => BackingStore::Nowhere,
            OffloadTarget::File(folder) => {
                let (file, mut bytes) = (nameless(folder)?, vec![0; 4 * CHUNK]);
                let (zeros, state) = (vec![0.0; CHUNK], state_len);
                for first in (0..gradients_len).step_by(CHUNK) {
                    write_at(&file, &mut bytes, state + first, &zeros[..CHUNK.min(gradients_len - first)])?;
                }
                BackingStore::File { file, bytes, chunk: chunk(Dtype::F32), state }
            }
            OffloadTarget::None | OffloadTarget::Host => {
                let host = like();
                let of = |cause, len| -> io::Result<PinnedTensor> {
                    let _charge = host.charge(cause);
                    Ok(PinnedTensor::new(device, Tensor::zeros_to_keep(&host, len)?))
                };
                let state = of(Cause::Optimizer, state_len)?;
                let gradients = of(Cause::Gradients, gradients_len)?;
                BackingStore::Host { host: host.clone(), state, gradients }
            }
        };
        let bounce = device.has_own_memory().then(|| [Dtype::F32, Dtype::Bf16].map(chunk));
        Ok(Backing { place, scratch, bounce })
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        match &self.place {
            BackingStore::Host { host, .. } => Some(host),
            BackingStore::File { .. } | BackingStore::Nowhere => None,
        }
    }

    /// Fills the front of `staging` with a tile: its strips end to end, and the gradient behind them if it has one. Kernels up
    /// to `after` may use what it replaces.
    pub(super) fn read(&mut self, tile: &Address, staging: &mut Tensor, after: &DevicePoint) -> io::Result<()> {
        let (len, mut spots) = (tile.range.len(), tile.spots());
        if tile.has_gradient {
            spots.push(Spot { is_gradient: true, first: tile.gradient + tile.range.start });
        }
        let mut parts = spots.into_iter().zip((0..).step_by(len.max(1)));
        parts.try_for_each(|(spot, at)| self.place.read(spot, staging, at..at + len, after))
    }

    /// Keeps the front of `staging` as a tile, as kernels up to `after` leave it.
    pub(super) fn write(&mut self, tile: &Address, staging: &Tensor, after: &DevicePoint) -> io::Result<()> {
        let len = tile.range.len();
        let mut parts = tile.spots().into_iter().zip((0..).step_by(len.max(1)));
        parts.try_for_each(|(spot, at)| self.place.write(spot, staging, at..at + len, after))
    }

    /// Keeps sums in place of what was there.
    pub(super) fn put(&mut self, part: &GradientPart, sums: &Tensor, after: &DevicePoint) -> io::Result<()> {
        match sums.dtype() {
            Dtype::F32 if self.scratch.has_data() => {
                let spot = Spot { is_gradient: true, first: part.to };
                self.place.write(spot, sums, part.from.clone(), after)
            }
            _ => self.by_chunks(part, sums, after, |_, _, chunk| Ok(chunk)),
        }
    }

    /// Adds sums to what is there, rounded to what they are stored in, as a device would.
    pub(super) fn add(&mut self, part: &GradientPart, sums: &Tensor, after: &DevicePoint) -> io::Result<()> {
        self.by_chunks(part, sums, after, |backing, spot, more| {
            let len = more.len();
            let mut before = Tensor::stale(&backing.scratch, &[len], Dtype::F32);
            backing.place.read(spot, &mut before, 0..len, &backing.scratch.point())?;
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
        after: &DevicePoint,
        f: impl Fn(&mut Backing, Spot, Tensor) -> io::Result<Tensor>,
    ) -> io::Result<()> {
        // What is done here is no work of the device, and takes none of its memory.
        let chunks = if self.scratch.has_data() { part.from.clone() } else { 0..0 };
        for first in chunks.step_by(CHUNK) {
            let from = first..part.from.end.min(first + CHUNK);
            let spot = Spot { is_gradient: true, first: part.to + first - part.from.start };
            let chunk = self.chunk_of(sums, from, after);
            let chunk = f(self, spot, chunk)?.into_f32();
            self.place.write(spot, &chunk, 0..chunk.len(), &self.scratch.point())?;
        }
        Ok(())
    }

    /// A copy of a chunk of sums.
    fn chunk_of(&mut self, sums: &Tensor, from: Range<usize>, after: &DevicePoint) -> Tensor {
        let len = from.len();
        let mut chunk = Tensor::stale(&self.scratch, &[len], sums.dtype());
        match &mut self.bounce {
            None => chunk.copy_part(0, sums, from),
            Some([f32, bf16]) => {
                let bounce = if sums.dtype() == Dtype::Bf16 { bf16 } else { f32 };
                bounce.keep(0, sums, from, after);
                bounce.fetch(&mut chunk, 0, 0..len, after);
            }
        }
        chunk
    }

    /// By weight, the sum of the squares of tiles of its gradient, each as large as a device squares at once.
    pub(super) fn squares(&mut self, weights: &[Vec<GradientPart>]) -> io::Result<SquareSums> {
        let mut sums = SquareSums::zeros(&self.scratch, weights.len());
        // This is no work of the device either.
        let weights = if self.scratch.has_data() { weights } else { &[] };
        for (weight, tiles) in weights.iter().enumerate() {
            for tile in tiles {
                let (spot, len) = (Spot { is_gradient: true, first: tile.to }, tile.from.len());
                let mut elements = Tensor::stale(&self.scratch, &[len], Dtype::F32);
                self.place.read(spot, &mut elements, 0..len, &self.scratch.point())?;
                sums.add(weight, &elements, 0..len);
            }
        }
        Ok(sums)
    }
}

impl Address {
    /// Where the strips of the tile are kept.
    fn spots(&self) -> Vec<Spot> {
        let first = |strip| self.base + strip * self.strip + self.range.start;
        (0..self.strips).map(|strip| Spot { is_gradient: false, first: first(strip) }).collect()
    }
}

impl BackingStore {
    /// Fills elements `range` of a tensor with those from `spot` on.
    fn read(&mut self, spot: Spot, to: &mut Tensor, range: Range<usize>, after: &DevicePoint) -> io::Result<()> {
        let Spot { is_gradient, first } = spot;
        match self {
            BackingStore::Host { state, gradients, .. } => {
                let kept = if is_gradient { gradients } else { state };
                kept.fetch(to, range.start, first..first + range.len(), after);
                Ok(())
            }
            BackingStore::File { file, bytes, chunk, state } => {
                let first = if is_gradient { *state + first } else { first };
                for (at, len) in chunks(range.len()) {
                    let place = range.start + at..range.start + at + len;
                    if !to.device().has_own_memory() {
                        to.write_f32s(place, |to| read_at(file, bytes, first + at, to)).unwrap_or(Ok(()))?;
                        continue;
                    }
                    read_at(file, bytes, first + at, &mut chunk.f32s_mut()[..len])?;
                    chunk.fetch(to, place.start, 0..len, after);
                }
                Ok(())
            }
            BackingStore::Nowhere => Ok(()),
        }
    }

    /// Keeps elements `range` of an f32 tensor from `spot` on.
    fn write(&mut self, spot: Spot, from: &Tensor, range: Range<usize>, after: &DevicePoint) -> io::Result<()> {
        let Spot { is_gradient, first } = spot;
        match self {
            BackingStore::Host { state, gradients, .. } => {
                let kept = if is_gradient { gradients } else { state };
                kept.keep(first, from, range, after);
                Ok(())
            }
            BackingStore::File { file, bytes, chunk, state } => {
                let first = if is_gradient { *state + first } else { first };
                for (at, len) in chunks(range.len()) {
                    let place = range.start + at..range.start + at + len;
                    if !from.device().has_own_memory() {
                        write_at(file, bytes, first + at, from.elements(place).f32s())?;
                        continue;
                    }
                    chunk.keep(0, from, place, after);
                    write_at(file, bytes, first + at, &chunk.f32s()[..len])?;
                }
                Ok(())
            }
            BackingStore::Nowhere => Ok(()),
        }
    }
}

/// The beginnings and lengths of chunks of so many elements.
fn chunks(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(CHUNK).map(move |at| (at, CHUNK.min(len - at)))
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

/// A chunk from element `first` of the file on; `bytes` is what it goes through.
fn read_at(file: &File, bytes: &mut [u8], first: usize, to: &mut [f32]) -> io::Result<()> {
    let bytes = &mut bytes[..4 * to.len()];
    file.read_exact_at(bytes, 4 * first as u64)?;
    for (to, from) in to.iter_mut().zip(bytes.as_chunks().0) {
        *to = f32::from_le_bytes(*from);
    }
    Ok(())
}

/// A chunk to element `first` of the file and those behind.
fn write_at(file: &File, bytes: &mut [u8], first: usize, from: &[f32]) -> io::Result<()> {
    let bytes = &mut bytes[..4 * from.len()];
    for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(from) {
        *to = from.to_le_bytes();
    }
    file.write_all_at(bytes, 4 * first as u64)
}
