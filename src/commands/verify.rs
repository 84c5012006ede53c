//! `guildhall verify`: the first steps of recipes in many ways, which must come to the same.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::prepare::{prepare, training_rows};
use super::{CommandFailure, fit, print, say};
use crate::cli::{LAUNCHER, RankEngine, VerifyArgs};
use crate::config::{self, Config};
use crate::data::{Corpus, Split};
use crate::verify::{self, BUGS, Bug, Comparison, Extent, Report, SearchProgress, SearchRequest};

/// Ranks of the largest mesh, unless the recipe has more.
const RANKS: usize = 4;

/// Meshes of every size up to `--ranks` are run, on threads of one machine.
const RANKS_MAX: usize = 32;

/// Of thousands of layouts each is told of, if it takes so long or differs.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: VerifyArgs) -> Result<(), CommandFailure> {
    let bug = arguments.inject.as_deref().map(bug).transpose()?;
    check_options(&arguments.only)?;
    let launcher = launcher(&arguments)?;
    let load = |recipe: &PathBuf| config::load(recipe, &arguments.overrides.set, None).map_err(CommandFailure::request);
    let configs = arguments.recipes.iter().map(load).collect::<Result<Vec<_>, _>>()?;
    let recipes: Vec<(&PathBuf, &Config)> = arguments.recipes.iter().zip(configs.iter().map(|l| &l.config)).collect();
    for (_, config) in &recipes {
        fit::here(config)?;
        fit::planned(config, config.parallel.ranks)?;
    }
    recipes.iter().try_for_each(|(recipe, config)| check(&arguments, recipe, config, bug))?;
    let corpora = recipes.iter().map(|(_, config)| prepare(config)).collect::<Result<Vec<Corpus>, _>>()?;

    let stop = Arc::new(AtomicBool::new(false));
    for ((recipe, config), corpus) in recipes.iter().zip(&corpora).filter(|_| bug.is_some()) {
        let request = request(&arguments, config, corpus, (bug, launcher.as_deref()), &stop)?;
        let told = |error| CommandFailure::Request(anyhow::anyhow!("{}: {error}", recipe.display()));
        verify::check_bug(&request).map_err(told)?;
    }
    let flag = stop.clone();
    let handler = move || {
        flag.store(true, Ordering::Relaxed);
        say("stopping after this layout");
    };
    crate::launch::when_asked_to_stop(handler).map_err(CommandFailure::request)?;
    if let Some(bug) = bug {
        say(&format!("bug      {}: {}", bug.name, bug.what));
    }
    let mut found = Vec::new();
    let mut result = Ok(());
    for ((recipe, config), corpus) in recipes.into_iter().zip(&corpora) {
        let request = request(&arguments, config, corpus, (bug, launcher.as_deref()), &stop);
        match request.and_then(|request| verify(recipe, &request)) {
            Ok(report) => found.push(RecipeReport { recipe, report }),
            Err(failure) => result = Err(failure),
        }
        if result.is_err() || stop.load(Ordering::Relaxed) {
            break;
        }
    }
    tell(&found, arguments.json)?;
    result?;
    let is_whole = found.len() == arguments.recipes.len() && found.iter().all(|found| found.report.left == 0);
    if found.iter().any(|found| found.report.has_differences()) {
        return Err(CommandFailure::Told(1));
    }
    match is_whole {
        true => Ok(()),
        false => Err(CommandFailure::Run(anyhow::anyhow!("stopped: what was not run may differ"))),
    }
}

/// The words that start ranks as processes, if they are to be processes.
fn launcher(arguments: &VerifyArgs) -> Result<Option<Vec<String>>, CommandFailure> {
    let words: Vec<String> = arguments.launcher.split_whitespace().map(str::to_owned).collect();
    let wrong = |text: String| Err(CommandFailure::Request(anyhow::anyhow!(text)));
    match arguments.engine {
        RankEngine::Threads if arguments.launcher != LAUNCHER => {
            wrong("--launcher starts processes of MPI: add --engine mpi".to_owned())
        }
        RankEngine::Threads => Ok(None),
        RankEngine::Mpi if !cfg!(feature = "mpi") => {
            wrong("--engine mpi: this program was built without MPI; build it with --features mpi".to_owned())
        }
        RankEngine::Mpi if !words.iter().any(|word| word.contains("{ranks}")) => {
            let remedy = "write {ranks} where the number of processes goes, as in mpirun -n {ranks}";
            wrong(format!("--launcher {:?}: {remedy}", arguments.launcher))
        }
        RankEngine::Mpi => Ok(Some(words)),
    }
}

/// What a search of one recipe found.
#[derive(Serialize)]
struct RecipeReport<'a> {
    recipe: &'a Path,
    #[serde(flatten)]
    report: Report,
}

fn tell(found: &[RecipeReport], json: bool) -> Result<(), CommandFailure> {
    if json {
        return print(&format!("{}\n", serde_json::to_string_pretty(found).map_err(CommandFailure::run)?));
    }
    let table = |found: &RecipeReport| format!("recipe   {}\n{}", found.recipe.display(), found.report.table());
    print(&found.iter().map(table).collect::<Vec<_>>().join("\n"))
}

/// The largest mesh for a recipe.
fn ranks(arguments: &VerifyArgs, config: &Config) -> usize {
    arguments.ranks.unwrap_or(config.parallel.ranks.max(RANKS))
}

/// How many combinations to run.
fn extent(arguments: &VerifyArgs) -> Extent {
    match (arguments.full, arguments.sample) {
        (false, _) => Extent::Pairs,
        (true, None) => Extent::All,
        (true, Some(size)) => Extent::Sample { size, seed: arguments.seed.unwrap_or(0) },
    }
}

/// What can be wrong with the request before anything is run.
fn check(arguments: &VerifyArgs, recipe: &Path, config: &Config, bug: Option<&Bug>) -> Result<(), CommandFailure> {
    let wrong = |text: String| Err(CommandFailure::Request(anyhow::anyhow!(text)));
    for (what, number) in [("--ranks", ranks(arguments, config) as u64), ("--steps", arguments.steps)] {
        if number == 0 {
            return wrong(format!("{what} 0: there is nothing to compare; use 1 or more"));
        }
    }
    if arguments.sample == Some(0) {
        return wrong("--sample 0: there is nothing to compare; use 1 or more".to_owned());
    }
    if ranks(arguments, config) > RANKS_MAX {
        let ranks = ranks(arguments, config);
        return wrong(format!("--ranks {ranks}: meshes of every size up to that are run; use {RANKS_MAX} or fewer"));
    }
    if arguments.steps > config.train.steps {
        let (steps, recipe, all) = (arguments.steps, recipe.display(), config.train.steps);
        let remedy = "use at most as many, or set train.steps higher";
        return wrong(format!("--steps {steps}: {recipe} has train.steps = {all}; {remedy}"));
    }
    match bug.and_then(|bug| Some((bug.name, (bug.needs)(config)?))) {
        Some((name, why)) => wrong(format!("the bug {name} cannot be planted in {}: {why}", recipe.display())),
        None => Ok(()),
    }
}

fn request<'a>(
    arguments: &'a VerifyArgs,
    config: &'a Config,
    corpus: &'a Corpus,
    (bug, launcher): (Option<&'static Bug>, Option<&'a [String]>),
    stop: &'a AtomicBool,
) -> Result<SearchRequest<'a>, CommandFailure> {
    Ok(SearchRequest {
        config,
        data: training_rows(corpus, config, &say)?.0,
        content: corpus.split(Split::Train).content(),
        ranks: ranks(arguments, config),
        steps: arguments.steps,
        extent: extent(arguments),
        only: &arguments.only,
        bug,
        half: arguments.half,
        launcher,
        stop,
    })
}

fn verify(recipe: &Path, request: &SearchRequest) -> Result<Report, CommandFailure> {
    let (steps, ranks, tokens) = (request.steps, request.ranks, request.config.train.batch_tokens);
    let by = request.launcher.map(|words| format!(", layouts of several ranks by {}", words.join(" ")));
    let recipe = recipe.display();
    say(&format!("verify   {recipe}: {steps} steps of {tokens} tokens, up to {ranks} ranks{}", by.unwrap_or_default()));
    let told = Cell::new(None::<Instant>);
    let progress = |progress: &SearchProgress| {
        let is_due = told.get().is_none_or(|at| at.elapsed() >= BETWEEN_LINES);
        if is_due || progress.checked.outcome != Comparison::Same || progress.done == progress.all {
            told.set(Some(Instant::now()));
            say(&line(progress));
        }
    };
    verify::verify(request, &progress).map_err(|error| match error.is_request() {
        true => CommandFailure::request(error),
        false => CommandFailure::run(error),
    })
}

fn bug(name: &str) -> Result<&'static Bug, CommandFailure> {
    verify::find(name).ok_or_else(|| {
        let names: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
        CommandFailure::Request(anyhow::anyhow!(
            "--inject {name}: there is no such bug; valid names: {}",
            names.join(", ")
        ))
    })
}

fn check_options(only: &[String]) -> Result<(), CommandFailure> {
    let valid = verify::options();
    let unknown: Vec<&str> = only.iter().map(String::as_str).filter(|name| !valid.contains(name)).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let (unknown, valid) = (unknown.join(","), valid.join(", "));
    Err(CommandFailure::Request(anyhow::anyhow!("--only {unknown}: there is no such option; valid names: {valid}")))
}

fn line(progress: &SearchProgress) -> String {
    let SearchProgress { checked, done, all, seconds_left } = progress;
    let (word, layout, summary) = (checked.outcome.word(), &checked.layout, checked.summary());
    format!(
        "{done:>5}/{all}  {} left  {word:7}  {:5.1} s  {layout}: {summary}",
        short_time(*seconds_left),
        checked.seconds
    )
}

fn short_time(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:3.0} s  ") } else { format!("{:3.0} min", seconds / 60.0) }
}
