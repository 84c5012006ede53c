//! The checkpoints of a run: when each is written, beside the steps or between them, and what becomes of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::Error;
use super::overdue::Overdue;
use super::step::Trainer;
use crate::checkpoint::{
    self, Destination, DiskWatch, Extra, SlowDisk, TrainingProgress, WritePace, WriteProgress, Writing,
};
use crate::config::Config;
use crate::data::{Corpus, Split};
use crate::launch::Rank;
use crate::{metrics, moe};

impl Trainer {
    /// Bytes of the copy of the state that this rank holds while it is written.
    pub fn copied_bytes(&mut self) -> u64 {
        checkpoint::snapshot_bytes(&mut self.model, &self.optimizer, &self.mesh)
    }
}

/// All messages that checkpoints take are uncounted: how many there are depends on the speed of disks.
pub(super) struct Saving<'a> {
    config: &'a Config,
    corpus: &'a Corpus,
    rank: Rank,
    /// Written while steps are taken.
    under_way: Option<Writing>,
    overdue: Option<Overdue>,
    /// The newest that is whole. A disk that has failed is not asked.
    newest: Option<PathBuf>,
    disk: Arc<DiskWatch>,
}

impl<'a> Saving<'a> {
    /// # Errors
    /// A folder of checkpoints that cannot be read.
    pub(super) fn new(config: &'a Config, corpus: &'a Corpus, rank: &Rank) -> Result<Saving<'a>, Error> {
        let newest = checkpoint::newest(&config.run.dir)?;
        let disk = Arc::new(DiskWatch::new(Duration::from_secs(config.train.checkpoint_timeout_s)));
        Ok(Saving { config, corpus, rank: rank.clone(), under_way: None, overdue: None, newest, disk })
    }

    /// Whether the state behind `step` is written.
    pub(super) fn has(&self, step: u64) -> bool {
        self.newest.as_ref() == Some(&checkpoint::step_folder(&self.config.run.dir, step))
    }

    /// Whether `step` leaves a checkpoint. That of the last is written when the run ends. One that is overdue is not begun
    /// while another is under way, which may make up for it.
    pub(super) fn is_due(&self, step: u64) -> bool {
        let train = &self.config.train;
        let is_regular = train.checkpoint_every > 0 && step.is_multiple_of(train.checkpoint_every);
        let is_retried = self.under_way.is_none() && self.overdue.is_some_and(|overdue| overdue.is_due(step));
        step < train.steps && (is_regular || is_retried)
    }

    /// Whether this rank keeps the others from the next stage of what is under way.
    pub(super) fn is_behind(&mut self) -> bool {
        self.under_way.as_mut().is_some_and(|writing| !writing.is_ready())
    }

    /// Begins the next stage of what is under way, if no rank is behind; what is to be said. Collective.
    ///
    /// # Errors
    /// All but files that cannot be written: the run goes on without, and says so.
    pub(super) fn go_on(&mut self, trainer: &Trainer, step: u64) -> Result<Option<String>, Error> {
        let Some(writing) = self.under_way.take() else { return Ok(None) };
        let of = writing.step();
        let outcome = match self.rank.ledger.uncounted(|| writing.advance(&trainer.mesh)) {
            Ok(WriteProgress::UnderWay(writing)) => {
                self.under_way = Some(*writing);
                return Ok(None);
            }
            Ok(WriteProgress::Whole(folder)) => Ok(folder),
            Err(error) => Err(error.into()),
        };
        self.end(outcome, of, step)
    }

    /// Waits for what is under way; what is to be said. Collective.
    ///
    /// # Errors
    /// As [`Saving::go_on`].
    pub(super) fn settle(&mut self, trainer: &Trainer, step: u64) -> Result<Option<String>, Error> {
        let Some(writing) = self.under_way.take() else { return Ok(None) };
        let of = writing.step();
        let outcome = self.rank.ledger.uncounted(|| writing.finish(&trainer.mesh));
        self.end(outcome.map_err(Error::from), of, step)
    }

    /// Writes a checkpoint, or begins to; what is to be said. Collective.
    ///
    /// # Errors
    /// As [`Saving::go_on`].
    pub(super) fn save(&mut self, trainer: &mut Trainer, reached: &TrainingProgress) -> Result<Vec<String>, Error> {
        let step = reached.step;
        let mut said = Vec::new();
        if let Some(before) = self.under_way.as_ref().map(Writing::step) {
            let begun = Instant::now();
            said.extend(self.settle(trainer, step)?);
            said.push(format!(
                "note: the checkpoint of step {before} was still being written when that of step {step} came due: waited \
                 {:.1} s for it",
                begun.elapsed().as_secs_f64()
            ));
        }
        match self.config.train.copies_state() {
            true => self.begin(trainer, reached)?,
            false => {
                let outcome = self.save_now(trainer, reached);
                said.extend(self.end(outcome, step, step)?);
            }
        }
        Ok(said)
    }

    /// Writes a checkpoint, and returns when it is whole. Collective.
    ///
    /// # Errors
    /// What the ranks could not write.
    pub(super) fn save_now(&self, trainer: &mut Trainer, reached: &TrainingProgress) -> Result<PathBuf, Error> {
        let extra = self.extra(trainer, reached)?;
        let Trainer { model, optimizer, mesh, .. } = trainer;
        Ok(self.rank.ledger.uncounted(|| checkpoint::save(self.to(), model, optimizer, mesh, extra))?)
    }

    fn begin(&mut self, trainer: &mut Trainer, reached: &TrainingProgress) -> Result<(), Error> {
        let (to, extra) = (self.to(), self.extra(trainer, reached)?);
        let Trainer { device, model, optimizer, mesh, .. } = trainer;
        let copied =
            self.rank.ledger.uncounted(|| Writing::of_snapshot(to, device, (model, optimizer, mesh), extra))?;
        self.under_way = Some(copied);
        trainer.within_budget(reached.step)
    }

    fn to(&self) -> Destination<'_> {
        let (run, train) = (&self.config.run.dir, &self.config.train);
        let pace = if self.rank.runs_alone { WritePace::InTurn } else { WritePace::Beside };
        let after = Duration::from_secs(self.config.parallel.timeout_s);
        let slow = if self.rank.runs_alone { SlowDisk::UNTOLD } else { SlowDisk { after, tell: metrics::say } };
        let file_bytes = train.checkpoint_file_bytes();
        Destination { run, keep: train.keep, file_bytes, pace, disk: Some(&self.disk), slow }
    }

    fn extra(&self, trainer: &mut Trainer, reached: &TrainingProgress) -> Result<Extra, Error> {
        // A checkpoint must not outlive the decisions that led to it, which each process has written to a file of its own.
        if self.rank.is_first_here {
            trainer.routings.sync().map_err(moe::Error::from)?;
        }
        let tokenizer = self.corpus.tokenizer.to_json()?;
        let mut files = vec![
            ("config.toml".to_owned(), self.config.to_toml().into_bytes()),
            ("tokenizer.json".to_owned(), tokenizer.into_bytes()),
        ];
        files.extend(self.corpus.chat_files.clone());
        files.extend(trainer.experts_files());
        let data_fingerprint = self.corpus.split(Split::Train).content().to_owned();
        Ok(Extra { progress: reached.clone(), data_fingerprint, files })
    }

    /// What is to be said when the checkpoint of step `of` is whole, or cannot be, by step `now`.
    fn end(&mut self, outcome: Result<PathBuf, Error>, of: u64, now: u64) -> Result<Option<String>, Error> {
        match outcome {
            Ok(folder) => {
                self.newest = Some(folder);
                Ok(self.overdue.take().map(|overdue| overdue.is_made_up(of)))
            }
            Err(Error::Checkpoint(error)) if error.is_of_files() => {
                let overdue = Overdue::after(self.overdue, of, now);
                self.overdue = Some(overdue);
                Ok(Some(overdue.warning(of, &error, (self.newest.as_deref(), self.config.train.steps))))
            }
            Err(error) => Err(error),
        }
    }
}
