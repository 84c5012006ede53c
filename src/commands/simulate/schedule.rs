//! One schedule: a run, what happens to it, how it goes on, and what it must come to.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use guildhall_comm::simulated::{Mishap, SimulatedEnd, TransportFlaw, WorldScript};

use super::load;
use crate::checkpoint;
use crate::cli::SimulateArgs;
use crate::commands::prepare::prepare;
use crate::commands::train::{Manner, conduct};
use crate::commands::{CommandFailure, chain};
use crate::config::{Config, Loaded};
use crate::launch::{self, Process};
use crate::metrics::{METRICS_FILE, records};

/// What is wrong with a run that ended well otherwise.
pub(super) const DIFFERS: &str = "it came to other weights or losses than an undisturbed run";

/// A folder for runs, and the recipe they are of.
pub(super) struct SimulatedRecipe<'a> {
    arguments: &'a SimulateArgs,
    folder: PathBuf,
    loaded: Loaded,
}

/// What an undisturbed run came to, and how many turns each rank had in a simulated one.
pub(super) struct Undisturbed<'a> {
    recipe: &'a SimulatedRecipe<'a>,
    reached: Reached,
    turns: Vec<u64>,
}

/// Where a run has come.
#[derive(Clone, PartialEq)]
struct Reached {
    /// The weights and the optimizer's state, by file.
    files: BTreeMap<String, Vec<u8>>,
    /// Loss and gradient norm of every step, as bits.
    numbers: Vec<[u64; 3]>,
}

/// What happened in a schedule that ended well.
pub(super) struct Played {
    /// What was drawn, and whether it came in time to happen.
    pub(super) mishap: Option<(Mishap, bool)>,
    /// After a mishap: whether there was a checkpoint to go on from.
    pub(super) has_resumed: Option<bool>,
    pub(super) turns: u64,
}

/// How a simulated run ended.
struct EndOfRun {
    turns: Vec<u64>,
    had_mishap: bool,
    /// Whether a process ended as if nothing had happened.
    is_done: bool,
}

impl<'a> SimulatedRecipe<'a> {
    pub(super) fn new(arguments: &'a SimulateArgs) -> Result<SimulatedRecipe<'a>, CommandFailure> {
        let folder = std::env::temp_dir().join(format!("guildhall-simulate-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| {
            let wrong =
                format!("could not create {}: {error}; set TMPDIR to a folder that can be written", folder.display());
            CommandFailure::Request(anyhow::anyhow!(wrong))
        })?;
        let loaded = load(arguments, &folder.join("threads")).inspect_err(|_| remove(&folder))?;
        Ok(SimulatedRecipe { arguments, folder, loaded })
    }

    pub(super) fn config(&self) -> &Config {
        &self.loaded.config
    }

    /// Runs the recipe on ranks that share memory, and once in a simulated world, so that a schedule's mishap can be drawn.
    pub(super) fn prepare(&'a self) -> Result<Undisturbed<'a>, CommandFailure> {
        prepare(self.config())?;
        let manner = Manner { resume: false, is_quiet: true, interrupted: &AtomicBool::new(false) };
        conduct(&mut Process::whole(&self.config().parallel), self.loaded.clone(), manner, || Ok(()))?;
        let reached = Reached::of(self.config()).map_err(|what| CommandFailure::Run(anyhow::anyhow!(what)))?;
        let mut reference = Undisturbed { recipe: self, reached, turns: vec![0; self.config().parallel.ranks] };
        let simulated = load(self.arguments, &self.folder.join("simulated"))?;
        let end = reference.world(&simulated, WorldScript::undisturbed(u64::MAX), false).map_err(|what| {
            CommandFailure::Run(anyhow::anyhow!("a simulated run of which nothing is asked: {what}"))
        })?;
        reference.turns = end.turns;
        Ok(reference)
    }

    /// Where the runs of a seed are.
    pub(super) fn folder(&self, seed: u64) -> PathBuf {
        self.folder.join(format!("seed-{seed}"))
    }

    pub(super) fn clear(&self) {
        remove(&self.folder);
    }
}

impl Undisturbed<'_> {
    /// Plays the schedule of a seed, in a folder that is left where it ends badly.
    ///
    /// # Errors
    /// What went wrong.
    pub(super) fn play(&self, seed: u64, flaw: Option<TransportFlaw>) -> Result<Played, String> {
        let folder = self.recipe.folder(seed);
        remove(&folder);
        let loaded = load(self.recipe.arguments, &folder).map_err(|failure| told(&failure))?;
        let still = 3 * Duration::from_secs(loaded.config.parallel.timeout_s);
        let script = WorldScript { flaw, ..WorldScript::drawn(seed, &self.turns, still) };
        let end = self.world(&loaded, script, false)?;
        let (mut turns, mut has_resumed) = (end.turns.iter().sum(), None);
        if script.mishap.is_some() {
            if end.is_done && Reached::of(&loaded.config).is_err() {
                return Err("a rank ended well, and the run was not at its end".to_owned());
            }
            has_resumed = Some(has_checkpoint(&folder)?);
            let again = self.world(&loaded, WorldScript { flaw, ..WorldScript::undisturbed(!seed) }, true);
            turns += again.map_err(|what| format!("when it went on: {what}"))?.turns.iter().sum::<u64>();
            if has_resumed == Some(true) && folder.join("previous-1").exists() {
                return Err("it had a checkpoint, and began again".to_owned());
            }
        }
        self.reached.compare(&Reached::of(&loaded.config)?)?;
        remove(&folder);
        Ok(Played { mishap: script.mishap.map(|mishap| (mishap, end.had_mishap)), has_resumed, turns })
    }

    /// What a run would be held against if one bit of it were another: of a weight or state, or of a loss.
    pub(super) fn altered(&self, is_loss: bool) -> Undisturbed<'_> {
        let mut reached = self.reached.clone();
        let bit = match is_loss {
            true => reached.numbers.last_mut().map(|[_, loss, _]| *loss ^= 1),
            false => reached.files.values_mut().last().and_then(|file| file.last_mut()).map(|byte| *byte ^= 1),
        };
        bit.expect("a run has steps and a checkpoint");
        Undisturbed { recipe: self.recipe, reached, turns: self.turns.clone() }
    }

    /// Runs the recipe in a simulated world.
    ///
    /// # Errors
    /// Ranks that did not end as they should.
    fn world(&self, loaded: &Loaded, script: WorldScript, resume: bool) -> Result<EndOfRun, String> {
        let end = launch::simulate(&loaded.config.parallel, script, |process| {
            let interrupted = &AtomicBool::new(false);
            let manner = Manner { resume, is_quiet: true, interrupted };
            conduct(&mut process?, loaded.clone(), manner, || Ok(()))
        });
        let SimulatedEnd { ends, turns, had_mishap, .. } = end.map_err(|stuck| stuck.to_string())?;
        let mishap = script.mishap.filter(|_| had_mishap);
        let is_done = ends.iter().any(|end| matches!(end, Some(Ok(()))));
        ends.into_iter().enumerate().try_for_each(|(rank, end)| judge(rank, end, mishap))?;
        Ok(EndOfRun { turns, had_mishap, is_done })
    }
}

/// Whether a process ended as it should: well, or, where something has happened to a rank, by a failure that names it. The
/// rank itself may have stood still until the others were gone, and names whom it misses.
fn judge(rank: usize, end: Option<Result<(), CommandFailure>>, mishap: Option<Mishap>) -> Result<(), String> {
    match (end, mishap) {
        (Some(Ok(())), _) => Ok(()),
        (None, Some(mishap)) if mishap.rank == rank => Ok(()),
        (Some(Err(CommandFailure::Run(_))), Some(mishap)) if mishap.rank == rank => Ok(()),
        (None, _) => Err(format!("rank {rank} is gone, and nothing had happened to it")),
        (Some(Err(CommandFailure::Run(error))), Some(mishap)) if names(&chain(&error), mishap.rank) => Ok(()),
        (Some(Err(failure)), Some(mishap)) => {
            Err(format!("rank {rank} does not name rank {}: {}", mishap.rank, told(&failure)))
        }
        (Some(Err(failure)), None) => Err(format!("rank {rank} failed: {}", told(&failure))),
    }
}

/// Whether a text speaks of a rank, as `rank 1` or among `rank(s) [0, 1]`.
fn names(text: &str, rank: usize) -> bool {
    let rank = rank.to_string();
    let alone = text.split("rank ").skip(1).any(|after| {
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        digits == rank
    });
    let mut lists = text.split("rank(s) [").skip(1).filter_map(|after| after.split_once(']'));
    alone || lists.any(|(list, _)| list.split(", ").any(|one| one == rank))
}

fn told(failure: &CommandFailure) -> String {
    match failure {
        CommandFailure::Request(error) => format!("refused: {}", chain(error)),
        CommandFailure::Run(error) => chain(error),
        CommandFailure::Told(code) => format!("exit code {code}"),
    }
}

/// Whether a run has a checkpoint.
fn has_checkpoint(run: &Path) -> Result<bool, String> {
    checkpoint::newest(run).map(|newest| newest.is_some()).map_err(|error| error.to_string())
}

impl Reached {
    /// Holds that another run has come to the same.
    fn compare(&self, other: &Reached) -> Result<(), String> {
        match self == other {
            true => Ok(()),
            false => Err(DIFFERS.to_owned()),
        }
    }

    /// Where the run of `config` has come after all its steps.
    fn of(config: &Config) -> Result<Reached, String> {
        let folder = checkpoint::step_folder(&config.run.dir, config.train.steps);
        let files = read(&folder).map_err(|error| format!("the last checkpoint is missing: {error}"))?;
        let lines = records(&config.run.dir.join(METRICS_FILE)).map_err(|error| error.to_string())?;
        let numbers = lines.map(|line| {
            let line = line.map_err(|error| error.to_string())?;
            Ok([line.step, line.loss.to_bits(), line.grad_norm.to_bits()])
        });
        Ok(Reached { files, numbers: numbers.collect::<Result<_, String>>()? })
    }
}

/// The tensors of a checkpoint, as they are stored.
fn read(folder: &Path) -> std::io::Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.insert(name, fs::read(path)?);
        }
    }
    Ok(files)
}

/// What cannot be removed is left: it is in the folder for temporary files.
fn remove(folder: &Path) {
    let _ = fs::remove_dir_all(folder);
}

#[cfg(test)]
mod tests {
    use guildhall_comm::simulated::MishapKind;

    use super::*;

    /// Whoever lives says which rank something has happened to; where nothing has, all end well.
    #[test]
    fn an_end_is_judged_by_what_has_happened() {
        let fails = |text: &str| Some(Err(CommandFailure::Run(anyhow::anyhow!(text.to_owned()))));
        let mishap = Some(Mishap { rank: 1, at_turn: 0, kind: MishapKind::Death });
        for (rank, end, mishap, is_well) in [
            (0, Some(Ok(())), None, true),
            (0, fails("rank 1 is gone"), None, false),
            (1, None, None, false),
            (1, None, mishap, true),
            (0, None, mishap, false),
            (1, fails("rank 0 is gone"), mishap, true),
            (0, fails("rank 1 is gone"), mishap, true),
            (0, fails("rank 2 is gone"), mishap, false),
            (0, Some(Err(CommandFailure::Request(anyhow::anyhow!("rank 1 has another recipe")))), mishap, false),
        ] {
            let told = format!("rank {rank}, {end:?}, {mishap:?}");
            assert_eq!(judge(rank, end, mishap).is_ok(), is_well, "{told}");
        }
    }

    #[test]
    fn a_rank_is_named_alone_or_in_a_list() {
        for (text, rank, is_named) in [
            ("rank 1 is gone: closed", 1, true),
            ("rank 11 is gone: closed", 1, false),
            ("without rank(s) [0, 2] (rank 0 was last in x)", 2, true),
            ("without rank(s) [0, 12] at x.rs:2:2", 2, false),
        ] {
            assert_eq!(names(text, rank), is_named, "{text}");
        }
    }
}
