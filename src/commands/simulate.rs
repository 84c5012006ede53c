//! `guildhall simulate`: a recipe's first steps in many orders of events, of which each seed draws one.

mod schedule;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guildhall_comm::simulated::{MishapKind, TransportFlaw};

use super::{CommandFailure, fit, program, say, word};
use crate::cli::SimulateArgs;
use crate::config;
use crate::launch;
use crate::moe::Shadowing;
use crate::parallel::{AllToAll, Migrate};
use schedule::{DIFFERS, Played, SimulatedRecipe, Undisturbed};

/// Keys that every simulated run has alike.
const OWN: [&str; 3] = ["run.dir", "train.steps", "parallel.threads"];

/// Every rank is a thread.
const RANKS_MAX: usize = 32;

/// Ranks that wait for messages longer than this are late.
const TIMEOUT_MIN_S: u64 = 10;

/// Seeds in which a flaw of the transport must show.
const CANARY_SEEDS: u64 = 100;

const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Schedules, unless it is said how many.
const SEEDS: u64 = 100;
/// So many bad seeds are told one by one.
const TOLD_MAX: usize = 10;

const FLAWS: [(&str, TransportFlaw, &str); 2] = [
    ("overtaking", TransportFlaw::Overtaking, "messages that overtake each other"),
    ("loss", TransportFlaw::Loss, "messages that are lost"),
];

pub(super) fn run(arguments: SimulateArgs) -> Result<(), CommandFailure> {
    let flaw = arguments.inject.as_deref().map(flaw).transpose()?;
    if arguments.seeds == Some(0) {
        return Err(CommandFailure::Request(anyhow::anyhow!("--seeds 0: there is nothing to run; use 1 or more")));
    }
    for key in OWN {
        if arguments.overrides.set.iter().any(|set| set.split('=').next().is_some_and(|set| set.trim() == key)) {
            let instead = if key == "train.steps" { "use --steps" } else { "leave it out" };
            return Err(CommandFailure::Request(anyhow::anyhow!(
                "--set {key}: a simulation sets it itself; {instead}"
            )));
        }
    }
    let recipe = SimulatedRecipe::new(&arguments)?;
    check(&recipe).inspect_err(|_| recipe.clear())?;
    let config = recipe.config();
    say(&format!(
        "recipe   {}: {} ranks, {} steps, {}",
        arguments.recipe.display(),
        config.parallel.ranks,
        config.train.steps,
        match config.train.checkpoint_every {
            0 => "a checkpoint at the end".to_owned(),
            1 => "each with a checkpoint".to_owned(),
            every => format!("a checkpoint every {every}"),
        }
    ));
    let found = recipe.prepare().and_then(|reference| {
        let seeds = match (arguments.seed, arguments.seeds) {
            (None, count) => (0, count.unwrap_or(SEEDS)),
            (Some(first), count) => (first, count.unwrap_or(1)),
        };
        // Who looks at one schedule again has seen that the bugs are noticed.
        if flaw.is_none() && seeds.1 > 1 {
            canaries(&reference)?;
        }
        let mut found = Schedules::default();
        search(&reference, seeds, flaw, &mut found)?;
        Ok(found)
    });
    let found = found.inspect_err(|_| recipe.clear())?;
    tell(&arguments, &found);
    if let Some(&(seed, _)) = found.bad.first() {
        say(&format!("left     {}: what the runs of the first had written", recipe.folder(seed).display()));
        return Err(CommandFailure::Told(1));
    }
    recipe.clear();
    match found.left {
        0 => Ok(()),
        left => Err(CommandFailure::Run(anyhow::anyhow!("stopped: {left} schedules were not run, and may end badly"))),
    }
}

fn flaw(name: &str) -> Result<TransportFlaw, CommandFailure> {
    let known = FLAWS.iter().find(|(known, ..)| *known == name);
    known.map(|(_, flaw, _)| *flaw).ok_or_else(|| {
        CommandFailure::Request(anyhow::anyhow!("--inject {name}: there is no such bug; use overtaking or loss"))
    })
}

/// What no seed could repeat is refused.
fn check(recipe: &SimulatedRecipe) -> Result<(), CommandFailure> {
    let config = recipe.config();
    let refused = |text: String| Err(CommandFailure::Request(anyhow::anyhow!(text)));
    let (ranks, timeout) = (config.parallel.ranks, config.parallel.timeout_s);
    if timeout < TIMEOUT_MIN_S {
        return refused(format!(
            "parallel.timeout_s = {timeout}: messages may take nearly a second of the world's time here, which costs none; use \
             {TIMEOUT_MIN_S} or more"
        ));
    }
    if ranks == 1 {
        return refused("1 rank: no messages, so there is only one schedule; use --ranks 2 or more".to_owned());
    }
    if ranks > RANKS_MAX {
        return refused(format!("{ranks} ranks: every rank is a thread here; use --ranks {RANKS_MAX} or fewer"));
    }
    if config.parallel.migrate == Migrate::Auto {
        return refused(
            "parallel.migrate = \"auto\" decides by measured speeds, which no seed repeats: add --set \
                        parallel.migrate=off or force"
                .to_owned(),
        );
    }
    if config.parallel.all_to_all == AllToAll::Auto {
        return refused(
            "parallel.all_to_all = \"auto\" decides by measured speeds, which no seed repeats: add --set \
                        parallel.all_to_all=direct, two_d or two_level"
                .to_owned(),
        );
    }
    if config.moe.as_ref().is_some_and(|moe| moe.shadowing() == Shadowing::Auto) {
        return refused(
            "moe.shadowing = \"auto\" decides by measured speeds, which no seed repeats: add --set \
                        moe.shadowing=off or a number"
                .to_owned(),
        );
    }
    Ok(())
}

/// Schedules that were run.
#[derive(Default)]
struct Schedules {
    undisturbed: u64,
    deaths: u64,
    standstills: u64,
    /// Those whose mishap was drawn for later than the end.
    too_late: u64,
    /// Runs with a mishap that went on from a checkpoint, and those that began again.
    resumed: u64,
    begun_again: u64,
    turns: u64,
    /// Seeds, and what went wrong.
    bad: Vec<(u64, String)>,
    left: u64,
    took: Duration,
}

impl Schedules {
    fn add(&mut self, seed: u64, played: Result<Played, String>) {
        match played {
            Ok(Played { mishap, has_resumed, turns }) => {
                match mishap.map(|(mishap, has_happened)| (mishap.kind, has_happened)) {
                    None => self.undisturbed += 1,
                    Some((_, false)) => self.too_late += 1,
                    Some((MishapKind::Death, true)) => self.deaths += 1,
                    Some((MishapKind::Standstill(_), true)) => self.standstills += 1,
                }
                self.resumed += u64::from(has_resumed == Some(true));
                self.begun_again += u64::from(has_resumed == Some(false));
                self.turns += turns;
            }
            Err(what) => self.bad.push((seed, what)),
        }
    }

    fn run(&self) -> u64 {
        self.undisturbed + self.too_late + self.deaths + self.standstills + self.bad.len() as u64
    }
}

/// Sees that a result that is not the right one shows, and what is wrong with a transport in what this recipe sends.
fn canaries(reference: &Undisturbed) -> Result<(), CommandFailure> {
    for (what, is_loss) in [("a weight or state", false), ("a loss", true)] {
        if reference.altered(is_loss).play(0, None).err().as_deref() != Some(DIFFERS) {
            return Err(CommandFailure::Run(anyhow::anyhow!(
                "another bit of {what} is not noticed: please report this"
            )));
        }
        say(&format!("canary   another bit of {what}: noticed"));
    }
    for (name, flaw, what) in FLAWS {
        let shows = (0..CANARY_SEEDS).find(|&seed| reference.play(seed, Some(flaw)).is_err());
        match shows {
            Some(seed) => say(&format!("canary   {what}: noticed by seed {seed}")),
            None => {
                let text = format!(
                    "{what} (--inject {name}) are not noticed by {CANARY_SEEDS} seeds: this recipe sends too little to tell \
                     anything; use more --ranks or --steps"
                );
                return Err(CommandFailure::Run(anyhow::anyhow!(text)));
            }
        }
    }
    Ok(())
}

/// Runs schedules, several at a time: each is one thread's work.
fn search(
    reference: &Undisturbed,
    (first, count): (u64, u64),
    flaw: Option<TransportFlaw>,
    found: &mut Schedules,
) -> Result<(), CommandFailure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    launch::when_asked_to_stop(move || flag.store(true, Ordering::Relaxed)).map_err(CommandFailure::request)?;
    say(&format!("seeds    {first} to {}", first.saturating_add(count - 1)));
    let (next, begun) = (AtomicU64::new(0), Instant::now());
    let shared = Mutex::new((found, begun));
    let work = |core| {
        launch::stay_on(core);
        while !stop.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            let seed = first + number;
            let played = reference.play(seed, flaw);
            let mut guard = shared.lock().unwrap_or_else(PoisonError::into_inner);
            let (found, said) = &mut *guard;
            found.add(seed, played);
            if said.elapsed() > BETWEEN_LINES {
                *said = Instant::now();
                say(&format!("         {} of {count} schedules, {} bad", found.run(), found.bad.len()));
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let work = &work;
    thread::scope(|scope| (0..workers).for_each(|core| drop(scope.spawn(move || work(core)))));
    let (found, _) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.bad.sort();
    found.took = begun.elapsed();
    found.left = count - found.run();
    Ok(())
}

fn tell(arguments: &SimulateArgs, found: &Schedules) {
    let Schedules { undisturbed, deaths, standstills, too_late, resumed, begun_again, turns, bad, took, .. } = found;
    say(&format!(
        "ran      {} schedules in {:.1} s, {turns} turns: {undisturbed} undisturbed, {deaths} with a death, {standstills} with \
         a standstill, {too_late} in which it would have come after the end",
        found.run(),
        took.as_secs_f64()
    ));
    say(&format!("resumed  {resumed} runs from a checkpoint; {begun_again} had none yet and began again"));
    if bad.is_empty() {
        return say("found    nothing: every run ended, and came to the weights and losses of an undisturbed one");
    }
    say(&format!("found    {} bad schedules", bad.len()));
    for (seed, what) in bad.iter().take(TOLD_MAX) {
        say(&format!("  seed {seed}: {what}"));
    }
    let mut again: Vec<String> = vec![program(), "simulate".to_owned(), word(arguments.recipe.display())];
    let options = [("--ranks", arguments.ranks.map(|ranks| ranks as u64)), ("--steps", Some(arguments.steps))];
    again.extend(options.iter().filter_map(|(name, value)| value.map(|value| format!("{name} {value}"))));
    again.extend(arguments.overrides.set.iter().map(|set| format!("--set {}", word(set))));
    again.extend(arguments.inject.iter().map(|name| format!("--inject {name}")));
    say(&format!("again    {} --seed {}", again.join(" "), bad[0].0));
    let commit = option_env!("GUILDHALL_COMMIT")
        .map_or(" of an unknown commit (GUILDHALL_COMMIT was not set when it was built)".to_owned(), |commit| {
            format!(", commit {commit}")
        });
    say(&format!("by       guildhall {}{commit}: of another, a seed draws other schedules", env!("CARGO_PKG_VERSION")));
}

/// The configuration of a run in `folder`, of the recipe and what the command changes.
fn load(arguments: &SimulateArgs, folder: &Path) -> Result<config::Loaded, CommandFailure> {
    let mut set = vec!["train.checkpoint_every=1".to_owned()];
    set.extend(arguments.overrides.set.iter().cloned());
    let quoted = |path: PathBuf| format!("{:?}", path.display().to_string());
    set.extend([
        format!("run.dir={}", quoted(folder.to_owned())),
        format!("train.steps={}", arguments.steps),
        "parallel.threads=1".to_owned(),
    ]);
    let mut loaded = config::load(&arguments.recipe, &set, arguments.ranks).map_err(CommandFailure::request)?;
    fit::here(&loaded.config)?;
    if let Some(moe) = &mut loaded.config.moe {
        // A file of each run's own would be needed.
        moe.record = None;
    }
    Ok(loaded)
}
