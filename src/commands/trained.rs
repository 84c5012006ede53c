//! Opening a checkpoint to use it: its configuration, its tokenizer, its model on every rank.

use std::path::Path;
use std::time::Duration;

use super::{CommandFailure, blocking, fit};
use crate::checkpoint;
use crate::config::{self, Config};
use crate::data::Tokenizer;
use crate::launch::{Process, Rank};
use crate::model::Model;
use crate::parallel::Mesh;
use crate::train::{Error, StopKind, trained};

/// A checkpoint that has been read as far as one process can.
pub(super) struct Trained {
    pub(super) source: checkpoint::OpenCheckpoint,
    pub(super) config: Config,
    pub(super) tokenizer: Tokenizer,
    /// Where the model's ranks are.
    pub(super) process: Process,
}

impl Trained {
    pub(super) fn open(folder: &Path, overrides: &[String], ranks: Option<usize>) -> Result<Trained, CommandFailure> {
        let source = checkpoint::open(folder).map_err(CommandFailure::request)?;
        let config = {
            let path = source.file("config.toml").map_err(CommandFailure::request)?;
            config::load_kept(&path, overrides, ranks).map_err(CommandFailure::request)?.config
        };
        fit::here(&config)?;
        let end = config.data.end_of_text.as_deref();
        let path = source.file("tokenizer.json").map_err(CommandFailure::request)?;
        let tokenizer = Tokenizer::open(&path, end).map_err(CommandFailure::request)?;
        tokenizer.check_fits(&path, config.model.vocab).map_err(CommandFailure::request)?;
        let mut process = Process::whole(&config.parallel);
        process.divide(blocking::known(config.parallel.backend));
        process.wait_for_disks(Duration::from_secs(config.train.checkpoint_timeout_s), super::give_up);
        Ok(Trained { source, config, tokenizer, process })
    }

    /// The recipe with the checkpoint's own tokenizer for text.
    pub(super) fn own_tokenizer(&self) -> Result<Config, CommandFailure> {
        let path = self.source.file("tokenizer.json").map_err(CommandFailure::request)?;
        let mut config = self.config.clone();
        // A template of conversations stays where it was.
        let beside = Path::new(&config.data.tokenizer).parent().map(Path::to_owned);
        let has_chats = config.data.has_conversations();
        config.data.chat_template = config.data.chat_template.take().or(beside.filter(|_| has_chats));
        config.data.tokenizer = path.display().to_string();
        Ok(config)
    }

    /// Runs `f` with the model, loaded on every rank, and returns its result, which is the same on all.
    pub(super) fn run<T: Send>(
        &self,
        f: impl Fn(&Model, &Mesh, &Rank) -> Result<T, Error> + Sync,
    ) -> Result<T, CommandFailure> {
        let results = self.process.run(&self.config.parallel, |rank| {
            Error::or_of_device(&rank, || {
                let loaded = trained(&rank, &self.config, &self.source);
                let (model, mesh) = loaded.map_err(Error::before_the_first_step)?;
                f(&model, &mesh, &rank)
            })
        });
        match results {
            Ok(values) => Ok(values.into_iter().next().expect("a process has a rank")),
            Err(failure) if failure.kind == Some(StopKind::Request) => {
                Err(CommandFailure::Request(anyhow::anyhow!("{failure}")))
            }
            Err(failure) => Err(CommandFailure::Run(anyhow::anyhow!("{failure}"))),
        }
    }
}
