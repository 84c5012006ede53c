//! `guildhall take-part`: one of the processes in which `guildhall verify --engine mpi` runs a layout.

use super::CommandFailure;
use super::prepare::{found, training_rows};
use crate::cli::TakePartArgs;
use crate::config;
use crate::data::Split;
use crate::launch::Joined;
use crate::verify::{self, TakingPart};

pub(super) fn run(arguments: &TakePartArgs) -> Result<(), CommandFailure> {
    let folder = &arguments.folder;
    let layout = config::load(&verify::layout_file(folder), &[], None).map_err(CommandFailure::request)?;
    let config = layout.config;
    let joined = Joined::of(&config.parallel, super::give_up)?;
    let corpus = joined.process.agree(|| found(&config))?;
    let (data, _) = training_rows(&corpus, &config, &|_| ())?;
    let content = corpus.split(Split::Train).content();
    match verify::take_part(&joined.process, folder, &config, (data, content)) {
        Ok(()) => joined.leave(super::give_up).map_err(|error| CommandFailure::run(anyhow::anyhow!(error))),
        Err(error @ TakingPart::Run(_)) => Err(CommandFailure::run(error)),
        Err(error) => Err(CommandFailure::request(error)),
    }
}
