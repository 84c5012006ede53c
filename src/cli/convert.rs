//! The arguments of `convert` and `audit`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Whose layout a converted model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConvertTo {
    /// Hugging Face's transformers
    Hf,
    /// Checkpoints of this program
    Guildhall,
    /// The adapters alone, as PEFT reads them
    Peft,
}

/// Turn a model of Hugging Face into a checkpoint, or a checkpoint into a model of Hugging Face
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall convert models/mixtral runs/imported
  guildhall convert runs/quickstart models/quickstart --dtype bf16
  guildhall convert runs/adapted models/adapters --to peft")]
pub struct ConvertArgs {
    /// The folder of a model of Hugging Face, of a checkpoint, or of a run, whose newest is taken
    pub input: PathBuf,
    /// The new folder, which must not exist
    pub output: PathBuf,
    /// The layout of the new folder [default: the other one]
    #[arg(long, value_name = "LAYOUT")]
    pub to: Option<ConvertTo>,
    /// Round or widen elements to f32, bf16 or f16 [default: as they are]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Most bytes of a file of tensors, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub file_mib: u64,
}

/// Check that a folder has every tensor of its model, whole, and no others
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall audit models/mixtral
  guildhall audit runs/quickstart")]
pub struct AuditArgs {
    /// The folder of a model of Hugging Face, of a checkpoint, or of a run, whose newest is taken
    pub folder: PathBuf,
}
