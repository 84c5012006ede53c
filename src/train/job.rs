//! A run's folder: locked, found empty or continued.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::folder_lock::{LOCK_FILE, lock};
use crate::checkpoint::{self, NewestWhole, OpenCheckpoint};
use crate::config::{self, Config, StorageType};
use crate::convert::{self, ModelFolder, ModelKind};
use crate::metrics::{METRICS_FILE, SCORES_FILE, SUMMARY_FILE};
use crate::report::REPORT_FILE;

const CONFIG_FILE: &str = "config.toml";
/// What the lock says where no checkpoint was found.
const NONE: &str = "none";

/// Where a run begins.
#[derive(Clone, Debug)]
pub enum Start {
    /// At step 0.
    Fresh,
    /// At step 0, with the weights of this checkpoint.
    Weights(OpenCheckpoint),
    /// After the last step of this checkpoint.
    From(OpenCheckpoint),
}

/// A run's configuration and folder, which nobody else writes while this lives.
#[derive(Debug)]
pub struct Job {
    pub config: Config,
    pub start: Start,
    resume: bool,
    /// Checkpoints that are newer than the start and cannot be read, with the reason.
    damaged: Vec<(PathBuf, checkpoint::Error)>,
    /// What the process that leads has written into the folder: another says that a process has another folder.
    pub mark: String,
    /// Held by the process that leads, for all.
    _lock: Option<File>,
}

/// Why a run's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("could not {action} {}: {source}; choose another run.dir or make room there", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} is on a file system without locks ({source}), so that two runs could write there at once: mount it with \
             them, or choose another run.dir", dir.display())]
    NoLocks { dir: PathBuf, source: std::io::Error },
    #[error("{} is in use by another run{by}: wait for it, or choose another run.dir", dir.display())]
    Locked { dir: PathBuf, by: String },
    #[error("{} cannot be continued with this recipe:\n  {}\nkeep what the checkpoint was trained with, or start anew without --resume", folder.display(), differences.join("\n  "))]
    Differs { folder: PathBuf, differences: Vec<String> },
    #[error("the configuration saved in {} cannot be read: {problems}", path.display())]
    SavedConfig { path: PathBuf, problems: config::Problems },
    #[error("train.init = {} is a checkpoint of run.dir = {}, which a new run would move aside: choose another run.dir, \
             or continue with --resume", init.display(), dir.display())]
    InitInRun { init: PathBuf, dir: PathBuf },
    #[error("{} holds what was reached after {done} steps: give the folder its own name back", folder.display())]
    Renamed { folder: PathBuf, done: u64 },
    #[error("train.init = {} does not fit the recipe:\n  {}\n  set them as they are there{}, or begin with another checkpoint",
            init.display(), misfits.join("\n  "), advice(init, misfits))]
    InitMisfit { init: PathBuf, misfits: Vec<String> },
    #[error("{} has taken {done} steps already, train.steps is {steps}: set train.steps to more", folder.display())]
    AlreadyDone { folder: PathBuf, done: u64, steps: u64 },
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Init(#[from] InitError),
}

/// Why weights cannot be taken from a folder.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Convert(#[from] convert::Error),
}

pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> JobError {
    let path = path.to_owned();
    move |source| JobError::Io { action, path, source }
}

impl Job {
    /// Takes the folder of `config`: with `resume` its newest checkpoint is where to begin, if it has one. Nothing
    /// that an earlier run left is changed yet. The process that `leads` locks the folder and finds the checkpoint that is
    /// whole; the others of the same run come after it, and take its word: it has read every byte. `tell` hears of what is
    /// waited for.
    ///
    /// # Errors
    /// A folder that cannot be written, is in use, or holds a checkpoint that this recipe cannot continue.
    pub fn open(config: Config, resume: bool, leads: bool, tell: &dyn Fn(&str)) -> Result<Job, JobError> {
        let dir = &config.run.dir;
        fs::create_dir_all(dir).map_err(io("create", dir))?;
        let mut lock = leads.then(|| lock(dir, resume, tell)).transpose()?;
        let newest = match found_by_leader(dir).filter(|_| !leads) {
            _ if !resume => None,
            Some(found) => found.map(|folder| checkpoint::open_found_whole(&folder)).transpose()?,
            None => checkpoint::open_newest_whole(dir)?,
        };
        if let Some(lock) = lock.as_mut().filter(|_| resume) {
            let found = newest.as_ref().and_then(|newest| newest.whole.folder.file_name()?.to_str());
            let told = writeln!(lock, "{}", found.unwrap_or(NONE)).and_then(|()| lock.sync_all());
            told.map_err(io("write", &dir.join(LOCK_FILE)))?;
        }
        let (start, damaged) = match newest {
            Some(NewestWhole { whole, damaged }) => (Start::From(continued(&config, whole)?), damaged),
            None => (fresh(&config)?, Vec::new()),
        };
        let mark = fs::read_to_string(dir.join(LOCK_FILE)).unwrap_or_default();
        Ok(Job { config, start, resume, damaged, mark, _lock: lock })
    }

    /// What a run goes on from: the same in all of its processes, or each would take other steps.
    pub fn origin(&self) -> String {
        let told = |how: &str, from: &OpenCheckpoint| format!("{how} {:?}", from.manifest);
        match &self.start {
            Start::Fresh => "nothing".to_owned(),
            Start::Weights(from) => told("the weights of", from),
            Start::From(from) => told("the state of", from),
        }
    }

    /// Makes the folder this run's own: moves an earlier run aside, unless it is continued, and writes the
    /// configuration. Returns what the user should be told.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn begin(&self) -> Result<Option<String>, JobError> {
        let dir = &self.config.run.dir;
        let notice = match &self.start {
            Start::From(source) => {
                let notice = self.set_damaged_aside(source.manifest.progress.step)?;
                // A process that died between a checkpoint and its link left the link behind.
                checkpoint::link_latest(&source.folder)?;
                notice
            }
            Start::Fresh | Start::Weights(_) => self.notice(set_aside(dir)?),
        };
        remove_stale(&dir.join(SUMMARY_FILE))?;
        let path = dir.join(CONFIG_FILE);
        fs::write(&path, self.config.to_toml()).map_err(io("write", &path))?;
        Ok(notice)
    }

    /// Makes room for the checkpoints that the run will write again, and tells why it goes back to step `done`.
    fn set_damaged_aside(&self, done: u64) -> Result<Option<String>, JobError> {
        let mut notices = Vec::new();
        for (folder, error) in &self.damaged {
            let aside = checkpoint::set_damaged_aside(folder)?;
            notices.push(format!(
                "warning: {}: the run goes back to step {done}, and what is damaged is in {} now",
                error.fault(),
                aside.display()
            ));
        }
        Ok((!notices.is_empty()).then(|| notices.join("\n")))
    }

    fn notice(&self, moved: Option<PathBuf>) -> Option<String> {
        let dir = self.config.run.dir.display();
        let moved = moved.map(|to| format!("what an earlier run left there is now in {}", to.display()));
        match (self.resume, moved) {
            (true, None) => Some(format!("note: {dir} has no checkpoint yet: starting at step 0")),
            (true, Some(moved)) => Some(format!("note: {dir} has no checkpoint yet: starting at step 0; {moved}")),
            (false, moved) => moved.map(|moved| format!("note: {dir}: {moved} (--resume would have continued it)")),
        }
    }

    /// Steps taken before this start.
    pub fn steps_done(&self) -> u64 {
        match &self.start {
            Start::Fresh | Start::Weights(_) => 0,
            Start::From(source) => source.manifest.progress.step,
        }
    }
}

/// What the process that leads goes on from, by its lock; `None` where the lock does not say, as in another folder than the
/// leader's.
fn found_by_leader(dir: &Path) -> Option<Option<PathBuf>> {
    let mark = fs::read_to_string(dir.join(LOCK_FILE)).ok()?;
    let found = mark.lines().nth(1)?;
    Some((found != NONE).then(|| dir.join(checkpoint::CHECKPOINTS).join(found)))
}

/// The beginning of a new run.
fn fresh(config: &Config) -> Result<Start, JobError> {
    let Some(init) = &config.train.init else { return Ok(Start::Fresh) };
    let (source, saved) = init_weights(init, config.train.dtype)?;
    let within = config.run.dir.join(checkpoint::CHECKPOINTS);
    let same_place = |a: &Path, b: &Path| Some(a.canonicalize().ok()?.starts_with(b.canonicalize().ok()?));
    match same_place(&source.folder, &within) {
        Some(true) => Err(JobError::InitInRun { init: init.clone(), dir: config.run.dir.clone() }),
        _ => fitting(config, saved.as_ref(), &source.folder).map(|()| Start::Weights(source)),
    }
}

/// What `train.init` names, and its configuration if it has a readable one: a checkpoint, or a model of Hugging Face, whose
/// tensors are read where they lie.
///
/// # Errors
/// A folder of neither; what is damaged, or cannot be expressed.
pub fn init_weights(init: &Path, dtype: StorageType) -> Result<(OpenCheckpoint, Option<Config>), InitError> {
    match convert::kind(init) {
        Ok(ModelKind::Guildhall) | Err(_) => {
            let source = checkpoint::open(init)?;
            let saved = config::load_kept(&source.folder.join(CONFIG_FILE), &[], None);
            Ok((source, saved.ok().map(|saved| saved.config)))
        }
        Ok(ModelKind::HuggingFace) => {
            let model = ModelFolder::open(init, Some(dtype))?;
            Ok((model.source()?, Some(model.config)))
        }
    }
}

/// Refuses weights of another model by its configuration, all keys at once. A checkpoint without a readable one is held
/// against the model's tensors later, as all are.
fn fitting(config: &Config, saved: Option<&Config>, init: &Path) -> Result<(), JobError> {
    let misfits = saved.map_or_else(Vec::new, |saved| config::misfits(saved, config));
    if misfits.is_empty() { Ok(()) } else { Err(JobError::InitMisfit { init: init.to_owned(), misfits }) }
}

/// What some of the misfits ask for besides.
fn advice(init: &Path, misfits: &[String]) -> String {
    let any = |key: &str| misfits.iter().any(|misfit| misfit.starts_with(&format!("{key} is ")));
    let tokenizer = init.join("tokenizer.json");
    let vocabulary = any("model.vocab").then(|| format!(", the vocabulary by data.tokenizer = {tokenizer:?}"));
    let experts = misfits.iter().any(|misfit| misfit.starts_with("moe.experts is absent"));
    let experts = experts.then(|| "; a dense model gets experts by `guildhall surgery upcycle`".to_owned());
    let adapters = misfits.iter().any(|misfit| misfit.starts_with("lora."));
    let adapters =
        adapters.then(|| "; adapters become a part of weights by `guildhall convert --to guildhall`".to_owned());
    [vocabulary, experts, adapters].into_iter().flatten().collect()
}

fn continued(config: &Config, source: OpenCheckpoint) -> Result<OpenCheckpoint, JobError> {
    let folder = source.folder.clone();
    let path = source.file(CONFIG_FILE)?;
    let saved = config::load_kept(&path, &[], None)
        .map_err(|problems| JobError::SavedConfig { path: path.clone(), problems })?;
    let differences = config::differences(&saved.config, config);
    if !differences.is_empty() {
        return Err(JobError::Differs { folder, differences });
    }
    let (done, steps) = (source.manifest.progress.step, config.train.steps);
    if checkpoint::step_folder(&config.run.dir, done) != folder {
        return Err(JobError::Renamed { folder, done });
    }
    if done > steps {
        return Err(JobError::AlreadyDone { folder, done, steps });
    }
    Ok(source)
}

/// A summary of an earlier end would be believed until this run has one.
fn remove_stale(path: &Path) -> Result<(), JobError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// What a run leaves in its folder. Checkpoints go first: they are what `--resume` would continue.
const LEFTOVERS: [&str; 6] =
    [checkpoint::CHECKPOINTS, METRICS_FILE, SUMMARY_FILE, SCORES_FILE, REPORT_FILE, CONFIG_FILE];

/// Moves an earlier run's files to `previous-<n>`: a new run in the same folder never mixes with it nor destroys it.
fn set_aside(dir: &Path) -> Result<Option<PathBuf>, JobError> {
    let found: Vec<_> = LEFTOVERS.iter().filter(|name| dir.join(name).exists()).collect();
    if !dir.join(METRICS_FILE).exists() && !dir.join(checkpoint::CHECKPOINTS).exists() {
        return Ok(None);
    }
    let free = (1..).map(|n| dir.join(format!("previous-{n}"))).find(|path| !path.exists());
    let to = free.expect("there are infinitely many names");
    fs::create_dir(&to).map_err(io("create", &to))?;
    for name in found {
        fs::rename(dir.join(name), to.join(name)).map_err(io("move", &dir.join(name)))?;
    }
    Ok(Some(to))
}
