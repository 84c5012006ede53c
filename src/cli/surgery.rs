//! What `guildhall surgery` takes.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::Overrides;

/// Make another model of checkpoints
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall surgery upcycle runs/dense/checkpoints/latest --experts 8 -o runs/upcycled
  guildhall surgery aggregate runs/a runs/b -o runs/both
  guildhall surgery prune runs/experts --keep 4 -o runs/pruned")]
pub struct SurgeryArgs {
    #[command(subcommand)]
    pub operation: SurgeryOperation,
}

#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum SurgeryOperation {
    #[command(visible_alias = "upcycle")]
    Moefy(MoefyArgs),
    Aggregate(AggregateArgs),
    Prune(PruneArgs),
}

/// Turn a dense model into a Mixture-of-Experts model, whose experts begin as copies of the feed-forward
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall surgery moefy runs/dense/checkpoints/latest --experts 8 --top-k 2 -o runs/upcycled
  guildhall surgery upcycle runs/dense --experts 8 --divide")]
pub struct MoefyArgs {
    /// The dense checkpoint's folder, or a run's, of which the newest is taken
    pub checkpoint: PathBuf,
    /// Experts of a layer (moe.experts)
    #[arg(long, value_name = "N")]
    pub experts: u64,
    /// Experts each token is sent to (moe.top_k)
    #[arg(long, value_name = "K")]
    pub top_k: Option<u64>,
    /// Divide the inner width by top-k, for equal compute; such experts begin with new values (moe.equal_compute)
    #[arg(long)]
    pub divide: bool,
    /// Which layers get experts: all, every:2 or list:1,3 (moe.layers)
    #[arg(long, value_name = "WHICH", default_value = "all")]
    pub layers: String,
    /// Seed of new values [default: the recipe's train.seed]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// The new checkpoint's folder, which must not exist [default: the old one's with -moe]
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
}

/// Make one model of several with experts: it has the experts of all, and the mean of what else they have
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall surgery aggregate runs/a runs/b -o runs/both
  guildhall train runs/both/config.toml --set train.init=runs/both --set run.dir=runs/on")]
pub struct AggregateArgs {
    /// Folders of two or more checkpoints, or of runs, of which the newest is taken
    #[arg(required = true, num_args = 2.., value_name = "CHECKPOINT")]
    pub checkpoints: Vec<PathBuf>,
    /// The new checkpoint's folder, which must not exist
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// What experts are kept by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PruneBy {
    /// The routes of held-out text that chose them
    Utilization,
    /// The L2 norms of their rows of the gate
    Gate,
    /// Chance
    Random,
}

/// Keep the best experts of each layer, and drop the others with their rows of the gate
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall surgery prune runs/experts --keep 4 -o runs/pruned
  guildhall surgery prune runs/experts --keep 4 --global -o runs/uneven
  guildhall surgery prune runs/experts/checkpoints/latest --keep 4 --by random --seed 1 -o runs/random")]
pub struct PruneArgs {
    /// The folder of a run, whose newest checkpoint is taken, or of a checkpoint
    pub run: PathBuf,
    /// Experts of a layer that stay (moe.experts); with --global on average over layers
    #[arg(long, value_name = "N")]
    pub keep: usize,
    /// Keep the best experts of all layers together, so that layers keep different numbers, moe.top_k or more each
    #[arg(long)]
    pub global: bool,
    /// By what
    #[arg(long, value_name = "WHAT", default_value = "utilization")]
    pub by: PruneBy,
    /// Rows of held-out text to count routes of [default: all]; 0 counts none, for what needs no text
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Ranks (threads) to count routes with, instead of those it was trained with; beside --set parallel.KEY also of the
    /// new recipe
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// The same seed draws the same experts [default: the recipe's train.seed]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// The new checkpoint's folder, which must not exist
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    #[command(flatten)]
    pub overrides: Overrides,
}
