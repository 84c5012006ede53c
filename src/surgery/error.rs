//! Why a model cannot become the one that was asked for.

use std::path::PathBuf;

use crate::{checkpoint, config};

/// A failure of surgery.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the model has {experts} experts already: moefy a dense one")]
    AlreadyMoe { experts: usize },
    #[error(
        "experts of width {d_expert} cannot be copies of a feed-forward of width {d_ff}: leave moe.d_expert out, or \
         set moe.equal_compute = true for new ones"
    )]
    Width { d_expert: usize, d_ff: usize },
    #[error("copies beside moe.shared_experts = {0} would count twice: leave it out; moe.residual mixes instead")]
    Shared(usize),
    #[error("the model of {} with experts: {problems}", folder.display())]
    Config { folder: PathBuf, problems: config::Problems },
    #[error("could not read {}: {source}", path.display())]
    Tokenizer { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Comm(#[from] guildhall_comm::Error),
}
