//! The search: the reference, then every layout, against what it should be equal to.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use guildhall_comm::threads::Failure;

use super::bugs::Bug;
use super::collect::Run;
use super::compare::{Losses, Tolerance, compare, losses};
use super::cover::Row;
use super::layouts::{Layout, Space, by_anchor};
use super::options::Cause;
use super::report::{Checked, Outcome, Report};
use super::routing::{Verdict, judge};
use super::run::Runner;
use crate::config::Config;
use crate::data::Source;
use crate::moe::recording::{self, Decisions, Recording};
use crate::moe::{self, Routings};
use crate::train;

/// What to search.
pub struct Request<'a> {
    pub config: &'a Config,
    /// The rows to train on.
    pub data: Arc<dyn Source>,
    /// What names them.
    pub content: &'a str,
    /// The largest mesh.
    pub ranks: usize,
    pub steps: u64,
    /// All combinations instead of every pair.
    pub full: bool,
    pub bug: Option<&'static Bug>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not use {}: {source}; choose another run.dir or make room there", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("the recipe cannot run on one rank, which others are compared with: {0}")]
    Reference(String),
    #[error("the bug {name} cannot be planted: {reason}")]
    Bug { name: &'static str, reason: &'static str },
    #[error("the run on one rank, which others are compared with, failed: {0}")]
    Run(String),
    #[error(transparent)]
    Recording(#[from] recording::Error),
}

impl Error {
    /// Whether the request was wrong, not a run.
    pub fn is_request(&self) -> bool {
        !matches!(self, Error::Run(_))
    }
}

/// Differences that are kept of a layout.
const KEPT: usize = 12;

/// Compares layouts until all are, or until a planted bug shows; tells `progress` of each with the number there are.
///
/// # Errors
/// A recipe that does not run on one rank, a bug that it cannot have, a folder that cannot be written.
pub fn verify(request: &Request, progress: &dyn Fn(&Checked, usize)) -> Result<Report, Error> {
    let begun = Instant::now();
    if let Some((bug, reason)) = request.bug.and_then(|bug| Some((bug, (bug.needs)(request.config)?))) {
        return Err(Error::Bug { name: bug.name, reason });
    }
    let folder = Folder::new(request.config)?;
    let failed = |source| Error::Folder { path: folder.0.clone(), source };
    let mut space = Space::new(request.config, request.ranks, &folder.0).map_err(failed)?;
    let layout = space.reference().map_err(Error::Reference)?;
    let runner = Runner { data: request.data.clone(), steps: request.steps, folder: folder.0.join("run") };
    let routes = Routes { folder: &folder.0, content: request.content, steps: request.steps };
    let run = runner.run(&layout, routes.recorded(&layout.config)?, None);
    let run = run.map_err(|failure| Error::Run(failure.to_string()))?;
    let (rows, skipped) = space.rows(request.full);
    let mut search =
        Search { request, space, runner, routes, reference: (layout, run), losses: HashMap::new(), found: Vec::new() };
    let families = by_anchor(&search.space, rows);
    let count = families.values().map(|members| 1 + members.len()).sum();
    for (anchor, members) in families {
        search.family(anchor, members, &|checked| progress(checked, count))?;
        if request.bug.is_some() && search.found.iter().any(|checked| checked.outcome != Outcome::Same) {
            break;
        }
    }
    let smallest = search.smallest()?;
    let Request { ranks, steps, .. } = *request;
    let (bug, seconds) = (request.bug.map(|bug| bug.name), begun.elapsed().as_secs_f64());
    Ok(Report { steps, ranks, bug, layouts: search.found, smallest, skipped, seconds })
}

struct Search<'a> {
    request: &'a Request<'a>,
    space: Space,
    runner: Runner,
    routes: Routes<'a>,
    reference: (Layout, Run),
    /// What one rank loses by each way of storing less.
    losses: HashMap<Row, Losses>,
    found: Vec<Checked>,
}

impl Search<'_> {
    /// A layout against the reference, and those that may not differ from it by a bit.
    fn family(&mut self, anchor: Row, members: Vec<Row>, progress: &dyn Fn(&Checked)) -> Result<(), Error> {
        let layout = self.space.layout(&anchor).expect("a possible layout");
        let (mut checked, run, replays) = self.against_reference(&layout)?;
        progress(&checked);
        self.found.push(checked.clone());
        for member in members {
            if self.request.bug.is_some() && checked.outcome != Outcome::Same {
                break;
            }
            let member = self.space.layout(&member).expect("a possible layout");
            checked = match &run {
                Some(run) => self.against(&member, (&layout, run), replays)?,
                None => Checked {
                    messages: vec![format!("not compared: {} failed", layout.name)],
                    ..blank(&member, &layout.name, BITS, Instant::now())
                },
            };
            progress(&checked);
            self.found.push(checked.clone());
        }
        Ok(())
    }

    /// The first layout that differs, with as few options as still make it differ; the mesh stays.
    fn smallest(&mut self) -> Result<Option<Checked>, Error> {
        let first = self.found.iter().find(|checked| checked.outcome != Outcome::Same);
        let Some(mut smallest) = first.filter(|_| self.request.bug.is_none()).cloned() else { return Ok(None) };
        let mut row = smallest.row.clone();
        for factor in 1..row.len() {
            let plainer: Row = row.iter().enumerate().map(|(i, &value)| if i == factor { 0 } else { value }).collect();
            if plainer == row {
                continue;
            }
            if self.space.layout(&plainer).is_err() {
                continue;
            }
            let checked = self.check(&plainer)?;
            if checked.outcome != Outcome::Same {
                (smallest, row) = (checked, plainer);
            }
        }
        Ok(Some(smallest))
    }

    /// One layout by itself.
    fn check(&mut self, row: &Row) -> Result<Checked, Error> {
        let mut found = Vec::new();
        std::mem::swap(&mut found, &mut self.found);
        let anchor = self.space.anchor(row);
        let members = if *row == anchor { Vec::new() } else { vec![row.clone()] };
        self.family(anchor, members, &|_| ())?;
        std::mem::swap(&mut found, &mut self.found);
        Ok(found.pop().expect("the layout that was checked"))
    }

    /// Also gives the run, and whether it followed the reference's routing.
    fn against_reference(&mut self, layout: &Layout) -> Result<(Checked, Option<Run>, bool), Error> {
        let begun = Instant::now();
        let cause = self.space.cause(&layout.row);
        let told = match cause {
            Cause::Nothing => BITS,
            Cause::Order => "order of sums",
            Cause::Storage => "half the bits",
        };
        let storage = match cause {
            Cause::Storage => Some(self.losses_of(&self.space.storage(&layout.row))?),
            _ => None,
        };
        let mut checked = blank(layout, &self.reference.0.name, told, begun);
        // Half the bits choose otherwise, sooner or later.
        let mut replays = cause == Cause::Storage;
        let mut result = self.runner.run(layout, self.routes.followed(&layout.config, replays)?, self.request.bug);
        if let Ok(run) = &result
            && !replays
        {
            match judge(&run.decisions, &self.reference.1.decisions, &layout.config) {
                Verdict::Same => {}
                Verdict::Wrong(why) => checked.messages.push(why),
                Verdict::Rounding { step, layer, tokens, apart } => {
                    checked.flips = Some(format!(
                        "{tokens} tokens of layer {layer}, step {step}, went elsewhere by scores {apart:.0e} apart"
                    ));
                    replays = true;
                    result = self.runner.run(layout, self.routes.followed(&layout.config, true)?, self.request.bug);
                }
            }
        }
        let tolerance = match &storage {
            None if cause == Cause::Nothing => Tolerance::Bits,
            None => Tolerance::Order,
            Some(one_rank) => Tolerance::Storage { one_rank },
        };
        let run = self.finish(&mut checked, result, (&self.reference.1, &tolerance));
        checked.seconds = begun.elapsed().as_secs_f64();
        Ok((checked, run, replays))
    }

    /// A layout against one that it must equal to the bit.
    fn against(&self, layout: &Layout, (other, want): (&Layout, &Run), replays: bool) -> Result<Checked, Error> {
        let begun = Instant::now();
        let mut checked = blank(layout, &other.name, BITS, begun);
        let result = self.runner.run(layout, self.routes.followed(&layout.config, replays)?, self.request.bug);
        if let Ok(run) = &result
            && judge(&run.decisions, &want.decisions, &layout.config) != Verdict::Same
        {
            checked.messages.push("tokens were routed differently".to_owned());
        }
        self.finish(&mut checked, result, (want, &Tolerance::Bits));
        checked.seconds = begun.elapsed().as_secs_f64();
        Ok(checked)
    }

    fn finish(
        &self,
        checked: &mut Checked,
        result: Result<Run, Failure<train::Error>>,
        (want, tolerance): (&Run, &Tolerance),
    ) -> Option<Run> {
        let run = match result {
            Ok(run) => run,
            Err(failure) => {
                checked.messages.push(failure.to_string());
                return None;
            }
        };
        let mut differences = compare(&run, want, tolerance);
        let large = differences.iter().take_while(|difference| difference.is_too_large()).count();
        checked.messages.extend(run.disagreements.iter().take(KEPT).cloned());
        if large == 0 && checked.messages.is_empty() {
            checked.outcome = Outcome::Same;
        } else {
            checked.outcome = Outcome::Differs;
        }
        differences.truncate(large.clamp(1, KEPT));
        checked.differences = differences;
        Some(run)
    }

    fn losses_of(&mut self, row: &Row) -> Result<Losses, Error> {
        if let Some(losses) = self.losses.get(row) {
            return Ok(losses.clone());
        }
        let layout = self.space.layout(row).map_err(Error::Reference)?;
        let run = self.runner.run(&layout, self.routes.followed(&layout.config, true)?, None);
        let run = run.map_err(|failure| Error::Run(failure.to_string()))?;
        let losses = losses(&run, &self.reference.1);
        self.losses.insert(row.clone(), losses.clone());
        Ok(losses)
    }
}

const BITS: &str = "bits";

/// A layout that has not been run.
fn blank(layout: &Layout, against: &str, tolerance: &'static str, begun: Instant) -> Checked {
    Checked {
        layout: layout.name.clone(),
        row: layout.row.clone(),
        against: against.to_owned(),
        tolerance,
        outcome: Outcome::Failed,
        flips: None,
        messages: Vec::new(),
        differences: Vec::new(),
        seconds: begun.elapsed().as_secs_f64(),
    }
}

/// The routings of runs: all are looked at, the reference's are recorded, and others follow them if they must.
struct Routes<'a> {
    folder: &'a Path,
    content: &'a str,
    steps: u64,
}

impl Routes<'_> {
    fn recorded(&self, config: &Config) -> Result<Routings, Error> {
        let create = |moe| Recording::create(&self.path(), train::recorded_shape(config, moe, self.content), 1);
        let record = config.moe.as_ref().map(create).transpose()?;
        Ok(Routings { record, decisions: Some(Decisions::default()), ..Routings::NONE })
    }

    fn followed(&self, config: &Config, replays: bool) -> Result<Routings, Error> {
        let open = |moe: &moe::Config| {
            Recording::open(&self.path(), train::recorded_shape(config, moe, self.content), 1..=self.steps)
        };
        let replay = config.moe.as_ref().filter(|_| replays).map(open).transpose()?;
        Ok(Routings { replay, decisions: Some(Decisions::default()), ..Routings::NONE })
    }

    fn path(&self) -> PathBuf {
        self.folder.join("routes")
    }
}

/// A folder beside the run's, which goes when it is forgotten.
struct Folder(PathBuf);

impl Folder {
    fn new(config: &Config) -> Result<Folder, Error> {
        let mut name = config.run.dir.clone().into_os_string();
        name.push(format!(".verify-{}", std::process::id()));
        let path = PathBuf::from(name);
        let made = std::fs::create_dir_all(&path);
        made.map_err(|source| Error::Folder { path: path.clone(), source })?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Nothing depends on it any more; what cannot be removed is no difference.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
