//! What keeps state and gradients that are away: memory of the host, or a file that has no name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::ops::sum_of_squares;
use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use super::Offload;
use super::away::{Address, Part};
use super::store::Shard;

/// Elements that are converted or added at a time.
const CHUNK: usize = 1 << 16;

#[derive(Debug)]
pub(super) struct Backing {
    place: Place,
    /// Where sums are added as a device adds them, and squared.
    scratch: Arc<Device>,
}

#[derive(Debug)]
enum Place {
    /// Memory with an account of its own; by weight, its strips, and its gradient.
    Host { host: Arc<Device>, state: Vec<Tensor>, gradients: Vec<Tensor> },
    /// State, then gradients.
    File { file: File, bytes: Vec<u8>, state: usize },
}

impl Backing {
    pub(super) fn new(place: &Offload, shards: &[Shard]) -> io::Result<Backing> {
        let place = match place {
            Offload::File(folder) => {
                let (file, mut bytes) = (nameless(folder)?, vec![0; 4 * CHUNK]);
                let state = shards.iter().map(Shard::len).sum();
                let gradients: usize = shards.iter().map(|shard| shard.range.len()).sum();
                for first in (0..gradients).step_by(CHUNK) {
                    let zeros = vec![0.0; CHUNK.min(gradients - first)];
                    write_at(&file, &mut bytes, state + first, &zeros)?;
                }
                Place::File { file, bytes, state }
            }
            Offload::None | Offload::Host => {
                let host = Device::new(1);
                let of = |cause, len: fn(&Shard) -> usize| -> Vec<Tensor> {
                    let _charge = host.charge(cause);
                    shards.iter().map(|shard| Tensor::zeros(&host, &[len(shard)])).collect()
                };
                let state = of(Cause::Optimizer, Shard::len);
                let gradients = of(Cause::Gradients, |shard| shard.range.len());
                Place::Host { host: host.clone(), state, gradients }
            }
        };
        Ok(Backing { place, scratch: Device::new(1) })
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        match &self.place {
            Place::Host { host, .. } => Some(host),
            Place::File { .. } => None,
        }
    }

    /// Fills the front of `staging` with a tile: its strips end to end, and the gradient behind them if it has one.
    pub(super) fn read(&mut self, tile: &Address, staging: &mut [f32]) -> io::Result<()> {
        let (own, rest) = staging.split_at_mut(tile.range.len() * tile.strips);
        for (strip, to) in own.chunks_exact_mut(tile.range.len()).enumerate() {
            let first = strip * tile.strip + tile.range.start;
            match &mut self.place {
                Place::Host { state, .. } => to.copy_from_slice(&state[tile.weight].f32s()[first..first + to.len()]),
                Place::File { file, bytes, .. } => read_at(file, bytes, tile.base + first, to)?,
            }
        }
        match tile.has_gradient {
            true => self.gradient(tile.weight, (tile.gradient, tile.range.start), &mut rest[..tile.range.len()]),
            false => Ok(()),
        }
    }

    /// Keeps the front of `staging` as a tile.
    pub(super) fn write(&mut self, tile: &Address, staging: &[f32]) -> io::Result<()> {
        for (strip, from) in staging.chunks_exact(tile.range.len()).take(tile.strips).enumerate() {
            let first = strip * tile.strip + tile.range.start;
            match &mut self.place {
                Place::Host { state, .. } => {
                    state[tile.weight].f32s_mut()[first..first + from.len()].copy_from_slice(from);
                }
                Place::File { file, bytes, .. } => write_at(file, bytes, tile.base + first, from)?,
            }
        }
        Ok(())
    }

    /// Reads elements of a gradient from the second of `first` on.
    fn gradient(&mut self, weight: usize, (base, first): (usize, usize), to: &mut [f32]) -> io::Result<()> {
        match &mut self.place {
            Place::Host { gradients, .. } => {
                to.copy_from_slice(&gradients[weight].f32s()[first..first + to.len()]);
                Ok(())
            }
            Place::File { file, bytes, state } => read_at(file, bytes, *state + base + first, to),
        }
    }

    fn set_gradient(&mut self, weight: usize, (base, first): (usize, usize), from: &[f32]) -> io::Result<()> {
        match &mut self.place {
            Place::Host { gradients, .. } => {
                gradients[weight].f32s_mut()[first..first + from.len()].copy_from_slice(from);
                Ok(())
            }
            Place::File { file, bytes, state } => write_at(file, bytes, *state + base + first, from),
        }
    }

    /// Keeps sums in place of what was there.
    pub(super) fn put(&mut self, part: &Part, sums: &Tensor) -> io::Result<()> {
        self.by_chunks(part, sums, |_, _, _| Ok(()))
    }

    /// Adds sums to what is there, rounded to what they are stored in, as a device would.
    pub(super) fn add(&mut self, part: &Part, sums: &Tensor) -> io::Result<()> {
        self.by_chunks(part, sums, |backing, place, more| {
            let mut before = vec![0.0; more.len()];
            backing.gradient(part.weight, place, &mut before)?;
            let mut sum = Tensor::stale(&backing.scratch, &[more.len()], more.dtype());
            sum.store_f32s(0, &before);
            sum.add_part(more, 0..more.len());
            *more = sum;
            Ok(())
        })
    }

    /// Keeps what `f` makes of sums, some at a time, whose place it is told.
    fn by_chunks(
        &mut self,
        part: &Part,
        sums: &Tensor,
        f: impl Fn(&mut Backing, (usize, usize), &mut Tensor) -> io::Result<()>,
    ) -> io::Result<()> {
        for first in part.from.clone().step_by(CHUNK) {
            let from = first..part.from.end.min(first + CHUNK);
            let place = (part.place.0, part.place.1 + first - part.from.start);
            let mut chunk = Tensor::stale(&self.scratch, &[from.len()], sums.dtype());
            chunk.copy_part(0, sums, from);
            f(self, place, &mut chunk)?;
            self.set_gradient(part.weight, place, chunk.to_f32().f32s())?;
        }
        Ok(())
    }

    /// The sum of the squares of as many elements as a device squares at once.
    pub(super) fn squares(&mut self, tile: &Part) -> io::Result<f64> {
        let mut elements = Tensor::stale(&self.scratch, &[tile.from.len()], Dtype::F32);
        self.gradient(tile.weight, tile.place, elements.f32s_mut())?;
        Ok(sum_of_squares(&self.scratch, elements.f32s()))
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
