//! What a run shows and logs while it goes: a bar or lines on stderr, a record a step, and who is dead.

use super::error::Error;
use super::step::StepReport;
use crate::checkpoint::TrainingProgress;
use crate::config::Config;
use crate::metrics::{DeadExperts, METRICS_FILE, Progress, StepRecord, Writer, records};

/// What rank 0 shows and writes; the others keep silent.
pub(super) struct Screen {
    pub(super) progress: Progress,
    writer: Option<Writer>,
    /// The first step whose line is not in the log yet.
    behind_since: Option<u64>,
    pub(super) dead: DeadExperts,
}

impl Screen {
    /// What an earlier process logged up to step `done` is kept, and remembered.
    pub(super) fn new(shows: bool, config: &Config, done: u64) -> Result<Screen, Error> {
        let run = &config.run.dir;
        // A model without experts has nothing that could die.
        let mut dead = DeadExperts::new(config.moe.as_ref().map_or(1, |moe| moe.dead_after));
        let mut writer = None;
        if shows {
            writer = Some(if done == 0 { Writer::create(run)? } else { Writer::resume(run, done)? });
            for record in records(&run.join(METRICS_FILE)).into_iter().flatten() {
                let record = record?;
                dead.observe(record.step, &record.moe);
            }
        }
        let progress = if shows { Progress::new(config.train.steps, done) } else { Progress::silent() };
        Ok(Screen { progress, writer, behind_since: None, dead })
    }

    /// Shows a step and logs it. A line that cannot be written ends no run: it is kept, and written with a later one.
    pub(super) fn show(&mut self, record: StepRecord) {
        let Some(writer) = &mut self.writer else { return };
        match (writer.write(&record), self.behind_since) {
            (Ok(()), None) | (Err(_), Some(_)) => {}
            (Ok(()), Some(since)) => {
                self.behind_since = None;
                self.progress.note(&format!("note: {METRICS_FILE} has all lines again, also those since step {since}"));
            }
            (Err(error), None) => {
                self.behind_since = Some(record.step);
                self.progress.note(&format!(
                    "warning: {METRICS_FILE} has no line of step {}: {error}\n  training goes on, and lines are kept until \
                     they can be written",
                    record.step
                ));
            }
        }
        self.progress.step(&record);
        record.replaced.iter().for_each(|layer| self.progress.note(&layer.told(record.step)));
        for event in self.dead.observe(record.step, &record.moe) {
            self.progress.note(&event.to_string());
        }
    }

    /// Ends the log.
    ///
    /// # Errors
    /// Lines that still cannot be written, and are lost.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        self.progress.finish();
        self.writer.as_mut().map_or(Ok(()), |writer| Ok(writer.catch_up()?))
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
