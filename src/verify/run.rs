//! One layout's run, with everything looked at that others are compared with.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bugs::{Bug, Plant};
use super::collect::{RankResult, RunResult};
use super::dither::dither;
use super::error::Error;
use super::layouts::NamedLayout;
use super::options::Between;
use super::processes::{Launcher, LayoutOrder};
use crate::checkpoint::{self, Destination, Extra, TrainingProgress, Writing};
use crate::config::Config;
use crate::data::Source;
use crate::launch::{self, Rank};
use crate::moe::LossTrend;
use crate::moe::recording::Seen;
use crate::moe::recording::{self, ClusterFile, Clustering, Decisions, Recording, Shape};
use crate::moe::{self, Routings};
use crate::train::{self, Trainer, held_out_loss};

/// Rows that an evaluation between steps looks at.
const EVALUATED_ROWS: usize = 2;

/// So that tiny models make several files.
const FILE_BYTES: u64 = 4096;

/// What all runs have in common.
pub(super) struct Runner<'a> {
    pub(super) data: Arc<dyn Source>,
    pub(super) steps: u64,
    /// Where checkpoints may go.
    pub(super) folder: PathBuf,
    pub(super) routes: Routes<'a>,
    /// What starts the ranks of layouts of several as processes; without, they are threads.
    pub(super) launcher: Option<Launcher<'a>>,
}

/// Whose routings and clusters a run has: references have numbers.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum RoutedBy {
    /// Its own, which are recorded under a number.
    Recorded(usize),
    /// Those of the reference of a number, or its own.
    Followed(Option<usize>),
}

/// What a run has that the layout does not ask for.
#[derive(Clone, Copy)]
pub(super) enum Twist<'a> {
    Nothing,
    Bug(&'a Bug),
    /// Weights that begin a rounding away from where they should: the draws of this number say which. With a bug of the
    /// build, if one is planted.
    Dither(u64, Option<&'a Bug>),
}

impl<'a> Twist<'a> {
    fn plant(self) -> Option<&'a Plant> {
        match self {
            Twist::Bug(bug) | Twist::Dither(_, Some(bug)) => Some(&bug.plant),
            Twist::Nothing | Twist::Dither(_, None) => None,
        }
    }
}

impl Runner<'_> {
    /// Trains `layout` for some steps, with a twist. A failure of a rank is a result, in words.
    ///
    /// # Errors
    /// Routings that cannot be recorded or followed; a launcher that cannot be started.
    pub(super) fn run(
        &self,
        layout: &NamedLayout,
        routed: RoutedBy,
        twist: Twist,
    ) -> Result<Result<RunResult, String>, Error> {
        let mut config = layout.config.clone();
        if let Some(Plant::Configuration(change) | Plant::Storage(change)) = twist.plant() {
            change(&mut config);
        }
        let order = LayoutOrder::of(&self.routes, layout.between, routed, twist);
        let launcher = self.launcher.as_ref().filter(|_| config.parallel.ranks > 1);
        let ended = match launcher {
            Some(launcher) => launcher.run(self.routes.folder, &config, &order)?,
            None => self.threads(&config, routed, (layout.between, twist))?,
        };
        Ok(ended.map(|(ranks, decisions)| {
            let (eps, clip) = (config.train.eps, config.train.clip);
            RunResult { eps, clip, decisions, ..RunResult::of(ranks) }
        }))
    }

    /// The ranks are threads of this process.
    fn threads(
        &self,
        config: &Config,
        routed: RoutedBy,
        how: (Between, Twist),
    ) -> Result<Result<(Vec<RankResult>, Seen), String>, Error> {
        let routings = self.routings(config, routed)?;
        let results = launch::run(&config.parallel, |rank| self.rank(rank, config, &routings, how));
        let ranks = launch::first_cause(results, train::Error::is_consequence);
        Ok(ranks.map(|ranks| (ranks, seen(&routings))).map_err(|failure| failure.to_string()))
    }

    /// What a rank needs to be told besides its configuration.
    pub(super) fn routings(&self, config: &Config, routed: RoutedBy) -> Result<Arc<Routings>, Error> {
        let routings = match routed {
            RoutedBy::Recorded(number) => self.routes.recorded(config, number)?,
            RoutedBy::Followed(number) => self.routes.followed(config, number)?,
        };
        Ok(Arc::new(Routings { migration: train::migration_policy(config), ..routings }))
    }

    /// What one rank does.
    pub(super) fn rank(
        &self,
        rank: Rank,
        config: &Config,
        routings: &Arc<Routings>,
        (between, twist): (Between, Twist),
    ) -> Result<RankResult, train::Error> {
        train::Error::or_of_device(&rank.clone(), || {
            let trainer = trainer(&rank, config, twist)?;
            let seen = RankResult::of(&*rank.world);
            let mut worker =
                Worker { steps: self.steps, folder: &self.folder, rank, config, routings, trainer, twist, seen };
            worker.train(between, &self.data)?;
            Ok(worker.seen)
        })
    }
}

/// What was decided in this process.
pub(super) fn seen(routings: &Routings) -> Seen {
    routings.decisions.as_ref().map(|decisions| decisions.seen()).unwrap_or_default()
}

/// A new trainer, with its bug if that is in the mesh.
fn trainer(rank: &Rank, config: &Config, twist: Twist) -> Result<Trainer, train::Error> {
    let mut mesh = train::mesh(rank, config)?;
    if let Some(Plant::Mesh(change)) = twist.plant() {
        change(&mut mesh, config);
    }
    train::trainer_on(mesh, rank, config)
}

/// One rank of a run.
struct Worker<'a> {
    steps: u64,
    /// Where checkpoints may go.
    folder: &'a Path,
    rank: Rank,
    config: &'a Config,
    routings: &'a Arc<Routings>,
    trainer: Trainer,
    twist: Twist<'a>,
    seen: RankResult,
}

impl Worker<'_> {
    fn train(&mut self, between: Between, data: &Arc<dyn Source>) -> Result<(), train::Error> {
        train::begin(&self.rank, &mut self.trainer, self.config)?;
        if let Twist::Dither(number, _) = self.twist {
            dither(&mut self.trainer, number)?;
        }
        self.prepare();
        let mut loader = train::loader(self.config, &self.trainer.mesh, data.clone(), 0)?;
        for step in 0..self.steps {
            let mut sums = self.trainer.gradients(&loader.next()?, step + 1)?;
            self.trainer.optimizer.recall(&mut self.trainer.model)?;
            match self.twist.plant() {
                Some(Plant::Gradients(change)) => change(&mut self.trainer),
                Some(Plant::Norm(wrong)) => sums.gradient_norm = wrong(&mut self.trainer)?,
                _ => {}
            }
            self.seen.gradients(step as usize, &mut self.trainer.model);
            let report = self.trainer.update(sums)?;
            if let Some(Plant::Update(change)) = self.twist.plant() {
                change(&mut self.trainer, &report);
            }
            self.seen.report(report);
            if step + 1 < self.steps {
                self.between(between, step + 1, data)?;
            }
        }
        self.seen.state(&mut self.trainer.model);
        Ok(())
    }

    /// Gives a new trainer what it is not made with.
    fn prepare(&mut self) {
        self.trainer.routings = self.routings.clone();
        if let Some(Plant::Trainer(change)) = self.twist.plant() {
            change(&mut self.trainer);
        }
    }

    fn between(&mut self, between: Between, step: u64, data: &Arc<dyn Source>) -> Result<(), train::Error> {
        match between {
            Between::Nothing => {}
            Between::Evaluation => {
                let Trainer { model, device, mesh, .. } = &self.trainer;
                held_out_loss(model, device, mesh, &**data, (EVALUATED_ROWS, EVALUATED_ROWS))?;
                if let Some(Plant::Evaluation(change)) = self.twist.plant() {
                    change(&mut self.trainer);
                }
            }
            Between::Checkpoint => self.write_and_read(step, |to, Trainer { model, optimizer, mesh, .. }, extra| {
                checkpoint::save(to, model, optimizer, mesh, extra)
            })?,
            Between::Copy => {
                self.write_and_read(step, |to, Trainer { device, model, optimizer, mesh, .. }, extra| {
                    let to = Destination { file_bytes: FILE_BYTES, ..to };
                    Writing::of_snapshot(to, device, (model, optimizer, mesh), extra)?.finish(mesh)
                })?
            }
        }
        Ok(())
    }

    fn write_and_read(
        &mut self,
        step: u64,
        write: impl FnOnce(Destination, &mut Trainer, Extra) -> Result<PathBuf, checkpoint::Error>,
    ) -> Result<(), train::Error> {
        let loss_trend = self.trainer.trend.map(LossTrend::numbers);
        let progress = TrainingProgress { step, tokens: 0, seconds: 0.0, loss_trend };
        let files = self.trainer.experts_files();
        let extra = Extra { progress, data_fingerprint: String::new(), files };
        let folder = write(Destination { keep: 1, ..Destination::of(self.folder) }, &mut self.trainer, extra)?;
        self.trainer = trainer(&self.rank, self.config, self.twist)?;
        let source = checkpoint::open(&folder)?;
        self.trainer.adopt_experts(&source)?;
        checkpoint::load_model(&source, &mut self.trainer.model)?;
        checkpoint::load_optimizer(&source, &mut self.trainer.model, &mut self.trainer.optimizer)?;
        self.trainer.trend = source.manifest.progress.loss_trend.map(LossTrend::of_numbers);
        self.prepare();
        if let Some(Plant::Loaded(change)) = self.twist.plant() {
            change(&mut self.trainer);
        }
        Ok(())
    }
}

/// The routings and clusters of runs: all are looked at, a reference's are recorded, and others follow them if they must.
pub(super) struct Routes<'a> {
    pub(super) folder: &'a Path,
    /// What names the data.
    pub(super) content: &'a str,
    pub(super) steps: u64,
}

impl Routes<'_> {
    /// Those of the reference of a number.
    pub(super) fn recorded(&self, config: &Config, number: usize) -> Result<Routings, recording::Error> {
        let mut routings = Routings { decisions: Some(Decisions::default()), ..Routings::NONE };
        if let Some(moe) = &config.moe {
            let (path, shape) = (self.path(number), train::recorded_shape(config, moe, self.content));
            let create = |clustering| ClusterFile::create(&ClusterFile::beside(&path), clustering, 1);
            routings.record_clusters = clustering(moe, &shape).map(create).transpose()?;
            routings.record = Some(Recording::create(&path, shape, 1)?);
        }
        Ok(routings)
    }

    /// Those of the reference of a number, if there is one to follow.
    pub(super) fn followed(&self, config: &Config, number: Option<usize>) -> Result<Routings, recording::Error> {
        let mut routings = Routings { decisions: Some(Decisions::default()), ..Routings::NONE };
        if let Some((moe, number)) = config.moe.as_ref().zip(number) {
            let (path, shape) = (self.path(number), train::recorded_shape(config, moe, self.content));
            let clusters = ClusterFile::beside(&path);
            // A reference that condenses nothing records no clusters.
            let open = |clustering| ClusterFile::open(&clusters, clustering, 1..=self.steps);
            routings.replay_clusters = clustering(moe, &shape).filter(|_| clusters.exists()).map(open).transpose()?;
            routings.replay = Some(Recording::open(&path, shape, 1..=self.steps)?);
        }
        Ok(routings)
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.join(format!("routes-{number}"))
    }
}

/// What clusters of a run depend on besides its routings, if it has any.
fn clustering(moe: &moe::Config, shape: &Shape) -> Option<Clustering> {
    moe.condensation().map(|condensation| Clustering::new(shape, condensation.tokens))
}

/// Where in a search's folder the checkpoints of runs are.
pub(super) fn checkpoints(folder: &Path) -> PathBuf {
    folder.join("run")
}
