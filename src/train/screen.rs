//! What a run shows and logs while it goes: a bar or lines on stderr, a record a step, and who is dead.

use super::error::Error;
use super::step::StepReport;
use crate::checkpoint::TrainingProgress;
use crate::config::Config;
use crate::metrics::{
    self, DeadExperts, EventWriter, METRICS_FILE, Progress, StepRecord, TENSORBOARD_FOLDER, Writer, records,
};

/// What rank 0 shows and writes; the others keep silent.
pub(super) struct Screen {
    pub(super) progress: Progress,
    writer: Option<Writer>,
    lines: Logged,
    events: Option<EventWriter>,
    scalars: Logged,
    pub(super) dead: DeadExperts,
}

/// What is written of every step to a file that may be full.
struct Logged {
    file: &'static str,
    /// The first step of which the file has nothing yet.
    behind_since: Option<u64>,
}

impl Logged {
    fn new(file: &'static str) -> Logged {
        Logged { file, behind_since: None }
    }

    /// What is to be said of an attempt to write a step: only that it begins to fail, and that it no longer does.
    fn told(&mut self, step: u64, written: Result<(), metrics::Error>) -> Option<String> {
        let file = self.file;
        match (written, self.behind_since) {
            (Ok(()), None) | (Err(_), Some(_)) => None,
            (Ok(()), Some(since)) => {
                self.behind_since = None;
                Some(format!("note: {file} has all steps again, also those since step {since}"))
            }
            (Err(error), None) => {
                self.behind_since = Some(step);
                Some(format!(
                    "warning: {file} lacks step {step}: {error}\n  training goes on, and steps are kept until they can be \
                     written"
                ))
            }
        }
    }
}

impl Screen {
    /// What an earlier process logged up to step `done` is kept, and remembered.
    pub(super) fn new(shows: bool, config: &Config, done: u64) -> Result<Screen, Error> {
        let run = &config.run.dir;
        // A model without experts has nothing that could die.
        let mut dead = DeadExperts::new(config.moe.as_ref().map_or(1, |moe| moe.dead_after));
        let (mut writer, mut events) = (None, None);
        if shows {
            writer = Some(if done == 0 { Writer::create(run)? } else { Writer::resume(run, done)? });
            if config.metrics.tensorboard {
                events = Some(EventWriter::create(run, done)?);
            }
            for record in records(&run.join(METRICS_FILE)).into_iter().flatten() {
                let record = record?;
                dead.observe(record.step, &record.moe);
            }
        }
        let progress = if shows { Progress::new(config.train.steps, done) } else { Progress::silent() };
        let lines = Logged::new(METRICS_FILE);
        Ok(Screen { progress, writer, lines, events, scalars: Logged::new(TENSORBOARD_FOLDER), dead })
    }

    /// Shows a step and logs it. What cannot be written ends no run: it is kept, and written with a later step.
    pub(super) fn show(&mut self, record: StepRecord) {
        let Some(writer) = &mut self.writer else { return };
        let lines = self.lines.told(record.step, writer.write(&record));
        let events = self.events.as_mut().map(|events| events.write(&record));
        let events = events.and_then(|written| self.scalars.told(record.step, written));
        lines.iter().chain(&events).for_each(|told| self.progress.note(told));
        self.progress.step(&record);
        record.replaced.iter().for_each(|layer| self.progress.note(&layer.told(record.step)));
        for event in self.dead.observe(record.step, &record.moe) {
            self.progress.note(&event.to_string());
        }
    }

    /// Ends the logs.
    ///
    /// # Errors
    /// What still cannot be written, and is lost.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        self.progress.finish();
        let lines = self.writer.as_mut().map_or(Ok(()), Writer::catch_up);
        let events = self.events.as_mut().map_or(Ok(()), EventWriter::catch_up);
        Ok(lines.and(events)?)
    }
}

/// The line of a step.
pub(super) fn record(
    report: StepReport,
    reached: &TrainingProgress,
    tokens_per_s: f64,
    waiting_s: Vec<f64>,
) -> StepRecord {
    // Per layer, so that an even load reads 1 whatever the depth.
    let layers = report.moe.len().max(1) as f64;
    StepRecord {
        step: report.step,
        loss: report.loss,
        balance_loss: report.balance / layers,
        z_loss: report.z / layers,
        grad_norm: report.gradient_norm,
        lr: report.lr,
        tokens: reached.tokens,
        tokens_per_s,
        seconds: reached.seconds,
        eval_loss: None,
        tasks: Vec::new(),
        eval_tasks: Vec::new(),
        shadowed: report.shadowed,
        condense_threshold: report.condense_threshold,
        moe: report.moe,
        waiting_s,
        sent: report.sent,
        migrated: report.migrated,
        replaced: report.replaced,
    }
}
