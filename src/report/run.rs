//! A run folder read into what the page draws, one record at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use crate::metrics::{
    self, DeadExpert, DeadExperts, METRICS_FILE, MoeRecord, ReplacedExperts, RunScores, SentRows, StepRecord,
    StepSpeed, Summary, median_tokens_per_s, records,
};

use super::Error;
use super::columns::Columns;
use super::parts::PartHistories;
use super::saved::SavedRows;
use super::series::Point;

/// Everything known of a run.
pub(super) struct LoadedRun {
    pub(super) name: String,
    /// The resolved recipe, as text.
    pub(super) config: Option<String>,
    /// Absent until the run ends.
    pub(super) summary: Option<Summary>,
    /// Absent until somebody has texts scored.
    pub(super) scores: Option<RunScores>,
    /// Absent until somebody measures.
    pub(super) speed: Option<StepSpeed>,
    pub(super) curves: Curves,
    /// Empty without tasks.
    pub(super) parts: PartHistories,
    /// By index of the layer.
    pub(super) layers: BTreeMap<usize, LayerHistory>,
    pub(super) dead: Vec<DeadExpert>,
    /// Seconds each rank waited, since the number of ranks last changed.
    pub(super) waiting: Columns,
    /// By index of the layer: rows from each rank to each of its expert group, since the mesh last changed.
    pub(super) sent: BTreeMap<usize, Vec<Vec<f64>>>,
    /// Experts that changed ranks, with the step.
    pub(super) replaced: Vec<(u64, ReplacedExperts)>,
}

/// Steps without routes that made an expert dead before recipes could say it.
const DEAD_AFTER_UNTOLD: u64 = 20;

/// The scalar values of every step.
#[derive(Default)]
pub(super) struct Curves {
    pub(super) loss: Vec<Point>,
    pub(super) eval_loss: Vec<Point>,
    pub(super) balance_loss: Vec<Point>,
    pub(super) z_loss: Vec<Point>,
    pub(super) grad_norm: Vec<Point>,
    pub(super) lr: Vec<Point>,
    pub(super) tokens_per_s: Vec<Point>,
    /// Seconds since the run began.
    clock: Vec<Point>,
    /// Cumulative, of the last step.
    pub(super) tokens: u64,
    pub(super) seconds: f64,
}

/// One MoE layer over the run.
#[derive(Default)]
pub(super) struct LayerHistory {
    pub(super) loads: Columns,
    pub(super) entropy: Vec<Point>,
    pub(super) drop_percent: Vec<Point>,
    /// Routes dropped over the run.
    pub(super) dropped: f64,
    /// Tokens that chose each pair of experts over the run, as the log has them.
    pub(super) pairs: Vec<f64>,
    /// The strongest pairs of the last line that tells of pairs, where the log has no others.
    pub(super) strongest_last: Vec<(usize, usize, u64)>,
    /// Routes per expert in the last step.
    pub(super) load_last: Vec<u64>,
    pub(super) saved: SavedRows,
}

impl LoadedRun {
    /// Reads the run folder `directory`; a missing file is an ordinary case, a missing run is not.
    pub(super) fn read(directory: &Path) -> Result<LoadedRun, Error> {
        let config = read_config(directory)?;
        let mut run = LoadedRun {
            name: name(directory),
            config,
            summary: where_there_is(Summary::read(directory))?,
            scores: where_there_is(RunScores::read(directory))?,
            speed: where_there_is(StepSpeed::read(directory))?,
            curves: Curves::default(),
            parts: PartHistories::default(),
            layers: BTreeMap::new(),
            dead: Vec::new(),
            waiting: Columns::default(),
            sent: BTreeMap::new(),
            replaced: Vec::new(),
        };
        let has_log = run.read_log(directory)?;
        // A checkpoint has the recipe, too.
        let is_checkpoint = directory.join("manifest.json").is_file();
        if !has_log && (run.config.is_none() || is_checkpoint) {
            let beyond = directory.ancestors().skip(1).find(|folder| folder.join(METRICS_FILE).is_file());
            return Err(Error::NotARun { path: directory.to_owned(), is_checkpoint, run: beyond.map(Path::to_owned) });
        }
        run.forget_outdated_summary();
        if let Some(summary) = &run.summary {
            run.dead = summary.dead_experts.clone();
            run.parts.finish(summary);
        }
        Ok(run)
    }

    /// Number of the last step, 0 before the first.
    pub(super) fn step_last(&self) -> u64 {
        self.curves.loss.last().map_or(0, |point| point.0)
    }

    /// Tokens per second as the summary defines it, whether there is one or not.
    pub(super) fn tokens_per_s(&self) -> f64 {
        let rates = || self.curves.tokens_per_s.iter().map(|point| point.1).collect::<Vec<_>>();
        self.summary.as_ref().map_or_else(|| median_tokens_per_s(&rates()), |summary| summary.tokens_per_s)
    }

    /// The same values by whole seconds of wall-clock instead of steps.
    pub(super) fn by_second(&self, points: &[Point]) -> Vec<Point> {
        let mut clock = self.curves.clock.iter();
        // A clock gone mad must not leave the axis without room around it.
        let mut second = |step: u64| clock.find(|at| at.0 == step).map(|at| at.1.clamp(0.0, 1e15) as u64);
        points.iter().filter_map(|&(step, value)| Some((second(step)?, value))).collect()
    }

    pub(super) fn is_dead(&self, layer: usize, expert: usize) -> bool {
        self.dead.iter().any(|dead| dead.layer == layer && dead.expert == expert)
    }

    /// Whether the run has a log.
    fn read_log(&mut self, directory: &Path) -> Result<bool, Error> {
        let log = match records(&directory.join(METRICS_FILE)) {
            Ok(log) => log,
            Err(error) if error.is_not_found() => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut watch = DeadExperts::new(dead_after(self.config.as_deref()));
        for record in log {
            let record = record?;
            watch.observe(record.step, &record.moe);
            self.curves.push(&record);
            self.parts.push(&record);
            self.push_ranks(&record);
            self.push_saved(&record);
            for moe in record.moe {
                self.layers.entry(moe.layer).or_default().push(record.step, moe);
            }
        }
        self.dead = watch.dead();
        Ok(true)
    }

    /// A run resumed on another mesh has other ranks: what came before is not theirs.
    fn push_ranks(&mut self, record: &StepRecord) {
        if self.waiting.rows() != record.waiting_s.len() {
            self.waiting = Columns::default();
        }
        if !record.waiting_s.is_empty() {
            self.waiting.push(record.step, record.waiting_s.clone());
        }
        let changed = |layer: &SentRows| {
            let lengths = self.sent.get(&layer.layer).map(|rows| rows.iter().map(Vec::len));
            lengths.is_some_and(|lengths| !lengths.eq(layer.rows.iter().map(Vec::len)))
        };
        if record.sent.iter().any(changed) {
            self.sent.clear();
        }
        for layer in &record.sent {
            let nothing = || layer.rows.iter().map(|row| vec![0.0; row.len()]).collect();
            let sums = self.sent.entry(layer.layer).or_insert_with(nothing);
            sums.iter_mut().flatten().zip(layer.rows.iter().flatten()).for_each(|(sum, &n)| *sum += n as f64);
        }
    }

    fn saved(&mut self, layer: usize) -> &mut SavedRows {
        &mut self.layers.entry(layer).or_default().saved
    }

    fn push_saved(&mut self, record: &StepRecord) {
        for moe in &record.moe {
            moe.condensed.iter().for_each(|condensed| self.saved(moe.layer).push_computed(record.step, condensed));
        }
        for sent in &record.sent {
            sent.condensed.iter().for_each(|unsent| self.saved(sent.layer).push_sent(record.step, unsent));
        }
        record.migrated.iter().for_each(|migrated| self.saved(migrated.layer).push_moved(record.step, migrated));
        self.replaced.extend(record.replaced.iter().map(|layer| (record.step, layer.clone())));
    }

    /// A log longer than its summary belongs to a run that was resumed and is still going.
    fn forget_outdated_summary(&mut self) {
        let step_last = self.step_last();
        self.summary.take_if(|summary| summary.steps < step_last);
    }
}

impl Curves {
    fn push(&mut self, record: &StepRecord) {
        let step = record.step;
        self.loss.push((step, record.loss));
        self.eval_loss.extend(record.eval_loss.map(|loss| (step, loss)));
        self.balance_loss.push((step, record.balance_loss));
        self.z_loss.push((step, record.z_loss));
        self.grad_norm.push((step, record.grad_norm));
        self.lr.push((step, record.lr));
        self.tokens_per_s.push((step, record.tokens_per_s));
        self.clock.push((step, record.seconds));
        self.tokens = record.tokens;
        self.seconds = record.seconds;
    }
}

impl LayerHistory {
    fn push(&mut self, step: u64, moe: MoeRecord) {
        let load: Vec<f64> = moe.load.iter().map(|&routes| routes as f64).collect();
        let routes = moe.asked();
        self.loads.push(step, load);
        self.entropy.push((step, moe.entropy));
        // From the counts, which older logs have too.
        let dropped = moe.dropped as f64;
        self.drop_percent.push((step, if routes > 0.0 { 100.0 * dropped / routes } else { 0.0 }));
        self.dropped += dropped;
        if self.pairs.len() < moe.co_activation.len() {
            self.pairs.resize(moe.co_activation.len(), 0.0);
        }
        self.pairs.iter_mut().zip(&moe.co_activation).for_each(|(sum, &tokens)| *sum += tokens as f64);
        if !moe.strongest_pairs.is_empty() {
            self.strongest_last = moe.strongest_pairs;
        }
        self.load_last = moe.load;
    }
}

/// Name of the folder, seen through `.` and links.
fn name(directory: &Path) -> String {
    let whole = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    whole.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Steps without routes after which an expert of this run is dead.
fn dead_after(config: Option<&str>) -> u64 {
    let told = || config?.parse::<toml::Table>().ok()?.get("moe")?.get("dead_after")?.as_integer();
    told().and_then(|steps| u64::try_from(steps).ok()).filter(|&steps| steps > 0).unwrap_or(DEAD_AFTER_UNTOLD)
}

fn read_config(directory: &Path) -> Result<Option<String>, Error> {
    let path = directory.join("config.toml");
    match fs::read(&path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Config { path, source }),
    }
}

/// A file that is not there is an ordinary case.
fn where_there_is<T>(read: Result<T, metrics::Error>) -> Result<Option<T>, Error> {
    match read {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}
