//! Why a model cannot become the one that was asked for.

use std::path::PathBuf;

use crate::parallel::PerLayer;
use crate::{checkpoint, config};

/// A failure of surgery.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the model has {experts} experts already: give them to a dense one")]
    AlreadyMoe { experts: PerLayer },
    #[error(
        "experts of width {d_expert} cannot be copies of a feed-forward of width {d_ff}: leave moe.d_expert out, or \
         set moe.equal_compute = true for new ones"
    )]
    Width { d_expert: usize, d_ff: usize },
    #[error("copies beside moe.shared_experts = {0} would count twice: leave it out; moe.residual mixes instead")]
    Shared(usize),
    #[error("{} has no experts: give it some with `guildhall surgery upcycle`", folder.display())]
    Dense { folder: PathBuf },
    #[error(
        "the checkpoints are of different models than {}:\n  {}\n  aggregate models that were trained with the same \
         [model], [moe] (but for moe.experts), train.dtype and tokenizer; a key without a part in the tensors can be set \
         for all with --set", first.display(), differences.join("\n  ")
    )]
    Unlike { first: PathBuf, differences: Vec<String> },
    #[error(
        "--keep {keep}: tokens go to moe.top_k = {top_k} of {experts} experts; keep {}{}", match most == top_k {
            true => format!("all {most}"),
            false => format!("from {top_k} to {most}"),
        }, match experts.list().is_some() && !is_global {
            true => ", of which every layer has so many, or take the best of all layers with --global",
            false => "",
        }
    )]
    Keep { keep: usize, top_k: usize, experts: PerLayer, most: usize, is_global: bool },
    #[error(
        "moe.gate = \"hash\" sends tokens by their number and that of the experts: with fewer, every token would go to \
         another expert than it trained; prune a model whose gate learns"
    )]
    Hashed,
    #[error(
        "{} has adapters: put them into its weights first, with `guildhall convert {} OUT --to guildhall`",
        folder.display(), folder.display()
    )]
    Adapters { folder: PathBuf },
    #[error("the recipe in {} cannot be read: {problems}", folder.display())]
    Recipe { folder: PathBuf, problems: config::Problems },
    #[error("the model of {} with experts: {problems}", folder.display())]
    Config { folder: PathBuf, problems: config::Problems },
    #[error("could not read {}: {source}", path.display())]
    Tokenizer { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Comm(#[from] guildhall_comm::Error),
}
