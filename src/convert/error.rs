//! Why a model cannot be converted.

use std::path::PathBuf;

use crate::{checkpoint, config, data};

/// A failure to convert a model, or to read one that another program has written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error(
        "{} is no model: it has neither manifest.json, as checkpoints of this program have, nor config.json, as models of \
         Hugging Face have; name the folder of one, or that of a run",
        path.display()
    )]
    NotAModel { path: PathBuf },
    #[error("{} cannot be read: {reason}", path.display())]
    Json { path: PathBuf, reason: String },
    #[error(
        "{} says what no recipe can say:\n  {}\n  a model is converted only if it computes the same afterwards",
        path.display(), listed(problems)
    )]
    Inexpressible { path: PathBuf, problems: Vec<String> },
    #[error("the recipe that {} comes to is wrong: {problems}", path.display())]
    Recipe { path: PathBuf, problems: config::Problems },
    #[error("the tensors of {} are not those of its config.json:\n  {}", folder.display(), listed(problems))]
    Tensors { folder: PathBuf, problems: Vec<String> },
    #[error(
        "no model of Hugging Face is that of {}; the nearest is {nearest}, and in its way stand:\n  {}",
        folder.display(), listed(problems)
    )]
    NoFamily { folder: PathBuf, nearest: &'static str, problems: Vec<String> },
    #[error("{} has no adapters: its recipe has no [lora] section", folder.display())]
    NoAdapters { folder: PathBuf },
    #[error(
        "PEFT cannot say the adapters of {}, since in {family}:\n  {}\n  `--to hf` makes them a part of the weights",
        folder.display(), listed(problems)
    )]
    NoModule { folder: PathBuf, family: &'static str, problems: Vec<String> },
    #[error("{reason}")]
    Request { reason: String },
    #[error("{} is not what was converted:\n  {}", folder.display(), listed(problems))]
    Differs { folder: PathBuf, problems: Vec<String> },
    #[error(transparent)]
    Tokenizer(#[from] data::Error),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
}

impl Error {
    pub(super) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }

    /// Whether a folder has a model, of which files or tensors are not as they should be.
    pub fn is_fault(&self) -> bool {
        match self {
            Error::Tensors { .. } | Error::Json { .. } | Error::Tokenizer(_) | Error::Differs { .. } => true,
            Error::Checkpoint(error) => {
                !matches!(error, checkpoint::Error::NotACheckpoint { .. } | checkpoint::Error::Format { .. })
            }
            _ => false,
        }
    }

    /// Whether files could not be written or are not as they were written, and the request was right.
    pub fn is_of_run(&self) -> bool {
        match self {
            Error::Checkpoint(error) => error.is_of_files(),
            Error::Differs { .. } => true,
            _ => false,
        }
    }
}

/// The first problems, a line each, and how many more there are.
fn listed(problems: &[String]) -> String {
    const SHOWN: usize = 12;
    match problems.len().checked_sub(SHOWN) {
        None | Some(0) => problems.join("\n  "),
        Some(more) => format!("{}\n  and {more} more", problems[..SHOWN].join("\n  ")),
    }
}
