//! What keeps state that is away: memory of the host, or a file that has no name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::{Cause, Device, Tensor};

use super::Offload;
use super::away::Address;
use super::store::Shard;

/// Elements converted to bytes at a time.
const CHUNK: usize = 1 << 16;

#[derive(Debug)]
pub(super) enum Backing {
    /// Memory with an account of its own; by weight, its strips.
    Host {
        host: Arc<Device>,
        tensors: Vec<Tensor>,
    },
    File {
        file: File,
        bytes: Vec<u8>,
    },
}

impl Backing {
    pub(super) fn new(place: &Offload, shards: &[Shard]) -> io::Result<Backing> {
        match place {
            Offload::File(folder) => Ok(Backing::File { file: nameless(folder)?, bytes: vec![0; 4 * CHUNK] }),
            Offload::None | Offload::Host => {
                let host = Device::new(1);
                let charge = host.charge(Cause::Optimizer);
                let tensors = shards.iter().map(|shard| Tensor::zeros(&host, &[shard.len()])).collect();
                drop(charge);
                Ok(Backing::Host { host, tensors })
            }
        }
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        match self {
            Backing::Host { host, .. } => Some(host),
            Backing::File { .. } => None,
        }
    }

    /// Fills the front of `staging` with a tile: its strips end to end.
    pub(super) fn read(&mut self, tile: &Address, staging: &mut [f32]) -> io::Result<()> {
        for (strip, to) in staging.chunks_exact_mut(tile.range.len()).take(tile.strips).enumerate() {
            let first = strip * tile.strip + tile.range.start;
            match self {
                Backing::Host { tensors, .. } => {
                    to.copy_from_slice(&tensors[tile.weight].f32s()[first..first + to.len()]);
                }
                Backing::File { file, bytes } => read_at(file, bytes, tile.base + first, to)?,
            }
        }
        Ok(())
    }

    /// Keeps the front of `staging` as a tile.
    pub(super) fn write(&mut self, tile: &Address, staging: &[f32]) -> io::Result<()> {
        for (strip, from) in staging.chunks_exact(tile.range.len()).take(tile.strips).enumerate() {
            let first = strip * tile.strip + tile.range.start;
            match self {
                Backing::Host { tensors, .. } => {
                    tensors[tile.weight].f32s_mut()[first..first + from.len()].copy_from_slice(from);
                }
                Backing::File { file, bytes } => write_at(file, bytes, tile.base + first, from)?,
            }
        }
        Ok(())
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
