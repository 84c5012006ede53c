//! Why the optimizer's state could not be kept or moved.

use std::io;
use std::path::PathBuf;

/// State that is kept in a file failed this rank.
#[derive(Debug, thiserror::Error)]
#[error(
    "rank {rank} could not {action} its {bytes} bytes of optimizer state and gradients in {}: {source}; set memory.offload_dir to a \
     folder that can be written, on a disk with room for the state of all ranks, or memory.offload to \"host\"",
    path.display()
)]
pub struct Error {
    pub rank: usize,
    pub action: &'static str,
    pub bytes: u64,
    pub path: PathBuf,
    pub source: io::Error,
}
