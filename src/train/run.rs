//! The loop over steps, on every rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guildhall_comm::Reduce;
use guildhall_tensor::{Account, Cause};

use super::error::{Error, StopKind, within};
use super::evaluate::{HeldOutLosses, HeldOutPart, held_out_losses};
use super::job::{Job, Start};
use super::replicas::divergence;
use super::saving::Saving;
use super::screen::{Screen, record};
use super::setup::{batch_plan, begin_with, loader, rank_memory, trainer};
use super::shares::{self, OwnShare};
use super::step::Trainer;
use super::tasks;
use crate::checkpoint::{self, TrainingProgress};
use crate::config::Config;
use crate::data::tasks::PartLabel;
use crate::data::{Corpus, Loader, Source, StepBatches};
use crate::launch::{Process, Rank, RunFailure};
use crate::metrics::{
    CollectiveTraffic, DeadExpert, Imbalance, Offloaded, Progress, SentRows, Status, StepRecord, TaskRecord,
};
use crate::moe::{LossTrend, Routings};

/// A finished run, over all ranks.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: Status,
    /// Steps taken, earlier processes' included.
    pub steps: u64,
    pub eval_loss: Option<f64>,
    /// The last evaluation of each part of the tasks.
    pub eval_tasks: Vec<TaskRecord>,
    /// Tokens per second of every step of this process.
    pub rates: Vec<f64>,
    pub seconds: f64,
    pub dead_experts: Vec<DeadExpert>,
    /// Seconds waited by each rank, and rows from each rank to those of its expert group, each layer's own, over this
    /// process's steps.
    pub waiting_s: Vec<f64>,
    pub rows_sent: Vec<Vec<u64>>,
    /// The largest of this process's steps.
    pub imbalance: Imbalance,
    /// By rank: peak bytes by cause.
    pub peak_bytes: Vec<BTreeMap<String, u64>>,
    /// Of optimizer state that is kept elsewhere, summed over ranks.
    pub offload: Option<Offloaded>,
    /// Ranks on each node, if there are several.
    pub nodes: Vec<usize>,
    /// By expert group, how its all-to-alls went from node to node, where ways differ.
    pub ways: BTreeMap<String, String>,
    /// (group, collective): calls and bytes, summed over ranks.
    pub traffic: BTreeMap<(String, String), CollectiveTraffic>,
}

/// The data of a run.
pub struct Data {
    pub corpus: Corpus,
    pub train: Arc<dyn Source>,
    /// What the components of rows to train on are; none without tasks.
    pub components: Vec<PartLabel>,
    /// None if nothing is evaluated.
    pub held_out: Vec<HeldOutPart>,
}

/// What else a run was begun with. In a run of several processes each has its own.
pub struct Begun<'a> {
    pub job: &'a Job,
    pub data: &'a Data,
    pub routings: Routings,
    /// Set in any process, it stops all.
    pub interrupted: &'a AtomicBool,
    /// Nothing is shown while it runs.
    pub is_quiet: bool,
}

/// Trains until the last step or until interrupted, on the ranks of this process beside those of all others. The outcome is
/// of all ranks, in every process.
///
/// # Errors
/// The failure that began it, on whatever rank.
pub fn train(process: &Process, begun: Begun) -> Result<Outcome, RunFailure<StopKind>> {
    let Begun { job, data, routings, interrupted, is_quiet } = begun;
    let (routings, budget) = (Arc::new(routings), budget(&job.config, process.neighbours()));
    let outcomes = process.run(&job.config.parallel, |rank| {
        budget.iter().for_each(|&bytes| rank.device.account().limit(bytes));
        Error::or_of_device(&rank.clone(), || {
            let mut run = Loop::new(rank, job, data, &routings)?;
            if is_quiet {
                run.screen.progress = Progress::silent();
            }
            run.run(interrupted)
        })
    })?;
    Ok(outcomes.into_iter().next().expect("a process has a rank"))
}

/// Bytes that a rank may hold: what the recipe says, else its share of what is free.
fn budget(config: &Config, neighbours: usize) -> Option<u64> {
    config.memory.budget_bytes().or_else(|| rank_memory(config, neighbours))
}

/// One rank's run.
struct Loop<'a> {
    rank: Rank,
    job: &'a Job,
    data: &'a Data,
    trainer: Trainer,
    loader: Loader,
    reached: TrainingProgress,
    started: Instant,
    seconds_before: f64,
    screen: Screen,
    rates: Vec<f64>,
    waiting_s: Vec<f64>,
    rows_sent: Vec<Vec<u64>>,
    imbalance: Imbalance,
    evaluated: Option<HeldOutLosses>,
    saving: Saving<'a>,
}

impl<'a> Loop<'a> {
    fn new(rank: Rank, job: &'a Job, data: &'a Data, routings: &Arc<Routings>) -> Result<Loop<'a>, Error> {
        Loop::set_up(rank, job, data, routings).map_err(Error::before_the_first_step)
    }

    fn set_up(rank: Rank, job: &'a Job, data: &'a Data, routings: &Arc<Routings>) -> Result<Loop<'a>, Error> {
        let config = &job.config;
        let mut trainer = trainer(&rank, config)?;
        trainer.routings = routings.clone();
        let mut reached = TrainingProgress { step: 0, tokens: 0, seconds: 0.0, loss_trend: None };
        match &job.start {
            Start::Fresh => {}
            Start::Weights(source) => begin_with(&rank, source, &mut trainer)?,
            Start::From(source) => {
                trainer.adopt_experts(source)?;
                let Trainer { model, optimizer, mesh, .. } = &mut trainer;
                let source = &checkpoint::retyped(source, model, optimizer, mesh)?;
                rank.at_own_pace(|| {
                    checkpoint::load_model(source, model)?;
                    checkpoint::load_optimizer(source, model, optimizer)
                })?;
                reached = source.manifest.progress.clone();
                trainer.trend = reached.loss_trend.map(LossTrend::of_numbers);
            }
        }
        trainer.within_budget(reached.step)?;
        let loader = loader(config, &trainer.mesh, data.train.clone(), reached.step)?;
        let screen = rank.at_own_pace(|| Screen::new(rank.world.rank() == 0, config, reached.step))?;
        trainer.mesh.measured_ways().iter().for_each(|measured| screen.progress.note(&measured.to_string()));
        let (waiting_s, group) = (vec![0.0; rank.world.size()], trainer.mesh.expert.size());
        let rows_sent = vec![vec![0; group]; if config.moe.is_some() { rank.world.size() } else { 0 }];
        let saving = Saving::new(config, &data.corpus, &rank)?;
        Ok(Loop {
            rank,
            job,
            data,
            trainer,
            loader,
            started: Instant::now(),
            seconds_before: reached.seconds,
            reached,
            screen,
            rates: Vec::new(),
            waiting_s,
            rows_sent,
            imbalance: Imbalance::EVEN,
            evaluated: None,
            saving,
        })
    }

    fn run(mut self, interrupted: &AtomicBool) -> Result<Outcome, Error> {
        let train = &self.job.config.train;
        let mut stops = self.any_rank(interrupted.load(Ordering::Relaxed))?;
        while self.reached.step < train.steps && !stops {
            let step = self.reached.step + 1;
            let taken = Error::or_of_device(&self.rank.clone(), || self.step(interrupted));
            stops = taken.map_err(within(step, "between steps"))?;
        }
        let status = if self.reached.step < train.steps { Status::Interrupted } else { Status::Done };
        let last = self.reached.step;
        let said = self.saving.settle(&self.trainer, last).map_err(within(last, "checkpoint"))?;
        self.say(said);
        if last > 0 && !self.any_rank(self.saving.has(last))? {
            if train.check_replicas_every > 0 {
                self.check_replicas().map_err(|error| error.at(last, None))?;
            }
            self.saving.save_now(&mut self.trainer, &self.reached).map_err(within(last, "checkpoint"))?;
        }
        if status == Status::Done && self.evaluated.is_none() && train.eval_every > 0 {
            self.evaluated = self.evaluate().map_err(within(last, "evaluation"))?;
        }
        self.screen.finish()?;
        self.outcome(status)
    }

    /// Whether the run is to end with this step.
    fn step(&mut self, interrupted: &AtomicBool) -> Result<bool, Error> {
        let (train, begun) = (&self.job.config.train, Instant::now());
        let batches = self.loader.next()?;
        let waited = self.rank.ledger.waited();
        let mut report = self.trainer.step(&batches, self.reached.step + 1)?;
        let waiting_s = self.of_all_ranks(self.rank.ledger.waited() - waited)?;
        let learned = self.learned(&batches)?;
        let rate = report.counted_tokens as f64 / begun.elapsed().as_secs_f64();
        self.rates.push(rate);
        self.add_up(&waiting_s, &report.sent);
        self.imbalance = self.imbalance.max(report.imbalance);
        self.reached.step += 1;
        self.reached.loss_trend = self.trainer.trend.map(LossTrend::numbers);
        self.reached.tokens += report.counted_tokens;
        self.reached.seconds = self.seconds_before + self.started.elapsed().as_secs_f64();
        self.evaluated = None;
        if train.eval_every > 0 && self.reached.step.is_multiple_of(train.eval_every) {
            self.evaluated = self.evaluate().map_err(within(self.reached.step, "evaluation"))?;
        }
        let own = [interrupted.load(Ordering::Relaxed), self.saving.is_behind()];
        let [stops, behind] = self.any_ranks(own)?;
        if !behind {
            let behind = self.saving.go_on(&self.trainer, self.reached.step);
            let said = behind.map_err(within(self.reached.step, "checkpoint"))?;
            self.say(said);
        }
        let saves = self.saving.is_due(self.reached.step);
        if train.check_replicas_every > 0 && (saves || self.reached.step.is_multiple_of(train.check_replicas_every)) {
            self.check_replicas()?;
        }
        if saves || stops || self.tells_pairs() {
            // What a checkpoint has behind it, a line tells: a run that is resumed loses no count.
            report.tell_pairs(self.trainer.sum_pairs()?);
        }
        let line = record(report, &self.reached, rate, waiting_s);
        self.screen.show(StepRecord { tasks: learned, ..line }.with_evaluation(self.evaluation()));
        if saves {
            let step = self.reached.step;
            let said = self.saving.save(&mut self.trainer, &self.reached).map_err(within(step, "checkpoint"))?;
            self.say(said);
        }
        Ok(stops)
    }

    fn say(&self, said: impl IntoIterator<Item = String>) {
        said.into_iter().for_each(|text| self.screen.progress.note(&text));
    }

    /// Holds that all copies of weights are equal; what this sends is not counted as traffic.
    fn check_replicas(&mut self) -> Result<(), Error> {
        let Trainer { model, mesh, .. } = &mut self.trainer;
        match self.rank.ledger.uncounted(|| divergence(model, mesh))? {
            Some(divergence) => Err(divergence.at(self.reached.step)),
            None => Ok(()),
        }
    }

    /// What of a step was learned of which part of the tasks.
    fn learned(&self, batches: &StepBatches) -> Result<Vec<TaskRecord>, Error> {
        let Trainer { mesh, rows, .. } = &self.trainer;
        let (source, plan) = (self.data.train.as_ref(), batch_plan(&self.job.config, mesh));
        let losses = rows.last().map(|(place, loss)| (plan.component(source, batches.step, place), loss));
        Ok(tasks::of_step(batches, losses, &self.data.components, mesh)?)
    }

    /// Whether the line of this step says which experts were chosen together.
    fn tells_pairs(&self) -> bool {
        let (config, step) = (&self.job.config, self.reached.step);
        let every = config.moe.as_ref().map_or(0, |moe| moe.pairs_every);
        every > 0 && (step.is_multiple_of(every) || step == config.train.steps)
    }

    /// A time that every rank has measured, in seconds by rank.
    fn of_all_ranks(&self, time: Duration) -> Result<Vec<f64>, Error> {
        let times = self.rank.world.all_gather_u64(&[time.as_nanos() as u64])?;
        Ok(times.into_iter().map(|ns| Duration::from_nanos(ns).as_secs_f64()).collect())
    }

    fn add_up(&mut self, waiting_s: &[f64], sent: &[SentRows]) {
        self.waiting_s.iter_mut().zip(waiting_s).for_each(|(sum, s)| *sum += s);
        for layer in sent {
            for (sums, row) in self.rows_sent.iter_mut().zip(&layer.rows) {
                sums.iter_mut().zip(row).for_each(|(sum, n)| *sum += n);
            }
        }
    }

    fn evaluate(&self) -> Result<Option<HeldOutLosses>, Error> {
        let (train, parts) = (&self.job.config.train, &self.data.held_out);
        if parts.is_empty() {
            return Ok(None);
        }
        let count = if train.eval_rows == 0 { usize::MAX } else { train.eval_rows };
        let micro = train.micro_batch.unwrap_or_else(|| self.job.config.rows_per_step());
        let Trainer { model, device, mesh, .. } = &self.trainer;
        let losses = held_out_losses(model, device, mesh, parts, (count, micro))?;
        self.trainer.within_budget(self.reached.step)?;
        if losses.loss.is_finite() { Ok(Some(losses)) } else { Err(Error::HeldOut { step: self.reached.step }) }
    }

    /// The last evaluation: the loss of all, and of each part.
    fn evaluation(&self) -> Option<(f64, Vec<TaskRecord>)> {
        self.evaluated.as_ref().map(|losses| (losses.loss, losses.tasks.clone()))
    }

    fn any_rank(&self, mine: bool) -> Result<bool, Error> {
        Ok(self.any_ranks([mine])?[0])
    }

    fn any_ranks<const N: usize>(&self, mine: [bool; N]) -> Result<[bool; N], Error> {
        let all = self.rank.world.all_reduce(Reduce::Max, mine.map(u64::from).to_vec())?.into_u64();
        Ok(std::array::from_fn(|n| all[n] > 0))
    }

    /// Collective: every rank has the account of all.
    fn outcome(self, status: Status) -> Result<Outcome, Error> {
        let account = self.rank.device.account();
        let mut peak_bytes: BTreeMap<String, u64> =
            Cause::ALL.iter().map(|&cause| (cause.name().to_owned(), account.peak(cause))).collect();
        peak_bytes.insert("total".to_owned(), account.peak_total());
        let optimizer = &self.trainer.optimizer;
        let offload = optimizer.moved().map(|moved| Offloaded {
            host_bytes: optimizer.host().map_or(0, Account::peak_total),
            moved_bytes: moved.bytes,
            busy_s: moved.busy_s,
            waited_s: moved.waited_s,
        });
        let traffic = self.rank.ledger.snapshot().into_iter().map(|((group, kind), traffic)| {
            (
                (group, kind.name().to_owned()),
                CollectiveTraffic { calls: traffic.calls, messages: traffic.messages, bytes: traffic.bytes },
            )
        });
        let own = OwnShare { peak_bytes, offload, traffic: traffic.collect(), dead_experts: self.screen.dead.dead() };
        let all = shares::of_all_ranks(&own, &self.rank.world)?;
        let ((eval_loss, eval_tasks), mesh) = (self.evaluation().unzip(), &self.trainer.mesh);
        Ok(Outcome {
            status,
            steps: self.reached.step,
            eval_loss,
            eval_tasks: eval_tasks.unwrap_or_default(),
            seconds: self.reached.seconds,
            dead_experts: all.dead_experts,
            waiting_s: self.waiting_s,
            rows_sent: self.rows_sent,
            imbalance: self.imbalance,
            rates: self.rates,
            peak_bytes: all.peak_bytes,
            offload: all.offload,
            nodes: if mesh.nodes().count() > 1 { mesh.nodes().sizes() } else { Vec::new() },
            ways: mesh.ways().into_iter().map(|(group, way)| (group, way.name().to_owned())).collect(),
            traffic: all.traffic,
        })
    }
}
