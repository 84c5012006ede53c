//! The search: the reference, then every layout, against what it should be equal to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::bugs::{Bug, Shows};
use super::check::{Checker, Planted};
use super::cover::Combination;
use super::error::Error;
use super::folder::Folder;
use super::layouts::{Drawn, MOST, SkippedLayout, Space, by_anchor};
use super::processes::Launcher;
use super::report::{Checked, Comparison, Report, SampleSummary};
use super::run::{Routes, Runner, checkpoints};
use crate::config::Config;
use crate::data::Source;

/// What to search.
pub struct SearchRequest<'a> {
    pub config: &'a Config,
    /// The rows to train on.
    pub data: Arc<dyn Source>,
    /// What names them.
    pub content: &'a str,
    /// The largest mesh.
    pub ranks: usize,
    pub steps: u64,
    pub extent: Extent,
    /// Names of the options that vary; empty means all.
    pub only: &'a [String],
    pub bug: Option<&'static Bug>,
    /// Whether it is planted where storage has half the bits, and nowhere else.
    pub half: bool,
    /// The words that start a number of ranks as processes, which stands in them as `{ranks}`; the program's follow. Without,
    /// ranks are threads.
    pub launcher: Option<&'a [String]>,
    /// Ends the search after the layout that is being run.
    pub stop: &'a AtomicBool,
}

/// How many combinations are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// So many that every two values meet.
    Pairs,
    All,
    /// So many of all, drawn by the seed.
    Sample {
        size: usize,
        seed: u64,
    },
}

/// Where a search is when a layout has been compared.
pub struct SearchProgress<'a> {
    pub checked: &'a Checked,
    pub done: usize,
    pub all: usize,
    /// If layouts take as long as those so far, by their ranks.
    pub seconds_left: f64,
}

/// Holds that a layout of the search can show the bug it is for.
///
/// # Errors
/// None that does, and why; what keeps the search from beginning.
pub fn check_bug(request: &SearchRequest) -> Result<(), Error> {
    let (folder, mut space) = begin(request)?;
    rows(request, &mut space)?;
    drop(folder);
    Ok(())
}

fn begin(request: &SearchRequest) -> Result<(Folder, Space), Error> {
    let failed = |source| Error::Folder { path: request.config.run.dir.clone(), source };
    let folder = Folder::beside(&request.config.run.dir).map_err(failed)?;
    let mut space = Space::new(request.config, request.ranks, request.only, &folder.path);
    space.reference().map_err(Error::Reference)?;
    match space.combinations() {
        combinations if request.extent == Extent::All && combinations > MOST => Err(Error::TooMany { combinations }),
        _ => Ok((folder, space)),
    }
}

/// What is run, what is not and why, how many were not looked at, and what was drawn of how many.
struct Listed {
    rows: Vec<Combination>,
    skipped: Vec<SkippedLayout>,
    unseen: usize,
    sample: Option<SampleSummary>,
}

/// What is run, with a layout that shows the bug that is planted.
fn rows(request: &SearchRequest, space: &mut Space) -> Result<Listed, Error> {
    let Some(planted) = request.planted() else { return Ok(listed(request, space)) };
    let Shows { lacks, option, more, of_choices, .. } = *planted.bug.shows;
    let why = match space.why_not(option) {
        _ if of_choices && planted.half => " and chooses by itself in half the bits: leave --half out".to_owned(),
        Some(reason) => format!(", for {reason}"),
        None => format!(": let {option} vary, or take {more}"),
    };
    let found = listed(request, space);
    let shows = |row: &Combination| space.layout(row).is_ok_and(|layout| planted.is_in(&layout));
    match found.unseen == 0 && !found.rows.iter().any(shows) {
        true => Err(Error::Unplantable { bug: planted.bug.name, lacks, why }),
        false => Ok(found),
    }
}

fn listed(request: &SearchRequest, space: &mut Space) -> Listed {
    match request.extent {
        Extent::Pairs => {
            let (rows, skipped) = space.pairs();
            Listed { rows, skipped, unseen: 0, sample: None }
        }
        Extent::All => {
            let (rows, skipped, unseen) = space.product(request.stop);
            Listed { rows, skipped, unseen, sample: None }
        }
        Extent::Sample { size, seed } => {
            let combinations = space.combinations();
            let Drawn { rows, skipped, drawn, unseen } = space.sample(size, seed, request.stop);
            let sample = Some(SampleSummary { seed, layouts: rows.len(), drawn, combinations });
            Listed { rows, skipped, unseen, sample }
        }
    }
}

/// Compares layouts until all are, or until a planted bug shows, or until it is to stop; tells `progress` of each.
///
/// # Errors
/// A recipe that does not run on one rank, too many combinations, a bug that cannot show, a folder that cannot be written.
pub fn verify(request: &SearchRequest, progress: &dyn Fn(&SearchProgress)) -> Result<Report, Error> {
    let begun = Instant::now();
    let (folder, mut space) = begin(request)?;
    let Listed { rows, skipped, unseen, sample } = rows(request, &mut space)?;
    let routes = Routes { folder: &folder.path, content: request.content, steps: request.steps };
    let launcher = request.launcher.map(Launcher);
    let runner = Runner {
        data: request.data.clone(),
        steps: request.steps,
        folder: checkpoints(&folder.path),
        routes,
        launcher,
    };
    let mut checker = Checker::new(space, runner, request.planted())?;
    let space = &mut checker.space;
    let families = by_anchor(space, rows);
    let all: Vec<&Combination> =
        families.iter().flat_map(|(anchor, members)| [anchor].into_iter().chain(members)).collect();
    let pace =
        Pace { begun: Instant::now(), all: all.len(), done: 0.0, ahead: all.iter().map(|row| space.work(row)).sum() };
    let mut search = Search { request, checker, found: Vec::new(), pace, progress };
    for (anchor, members) in &families {
        search.family(anchor, members)?;
    }
    let left = if search.shows_the_bug() { 0 } else { unseen + search.pace.all - search.found.len() };
    let smallest = search.smallest()?;
    let SearchRequest { ranks, steps, .. } = *request;
    let (bug, seconds) = (request.bug.map(|bug| bug.name), begun.elapsed().as_secs_f64());
    let condensed_share = search.checker.condensed_share();
    Ok(Report { steps, ranks, bug, layouts: search.found, smallest, skipped, condensed_share, sample, left, seconds })
}

impl SearchRequest<'_> {
    fn planted(&self) -> Option<Planted<'static>> {
        self.bug.map(|bug| Planted { bug, half: self.half })
    }
}

struct Search<'a> {
    request: &'a SearchRequest<'a>,
    checker: Checker<'a>,
    found: Vec<Checked>,
    pace: Pace,
    progress: &'a dyn Fn(&SearchProgress),
}

/// How much of a search is done, in units that take about as long each.
struct Pace {
    begun: Instant,
    /// Layouts.
    all: usize,
    done: f64,
    ahead: f64,
}

impl Search<'_> {
    /// A layout and those that may not differ from it by a bit; nothing once the search is to end.
    fn family(&mut self, anchor: &Combination, members: &[Combination]) -> Result<(), Error> {
        if self.is_to_end() {
            return Ok(());
        }
        let (checked, anchor) = self.checker.anchor(anchor)?;
        self.take(checked);
        for member in members {
            if self.is_to_end() {
                break;
            }
            let checked = self.checker.member(member, &anchor)?;
            self.take(checked);
        }
        Ok(())
    }

    fn take(&mut self, checked: Checked) {
        let work = self.checker.space.work(&checked.row);
        let pace = &mut self.pace;
        (pace.done, pace.ahead) = (pace.done + work, pace.ahead - work);
        self.found.push(checked);
        let seconds_left = pace.begun.elapsed().as_secs_f64() * pace.ahead / pace.done;
        let checked = self.found.last().expect("just pushed");
        (self.progress)(&SearchProgress { checked, done: self.found.len(), all: pace.all, seconds_left });
    }

    fn is_to_end(&self) -> bool {
        self.request.stop.load(Ordering::Relaxed) || self.shows_the_bug()
    }

    fn shows_the_bug(&self) -> bool {
        self.request.bug.is_some() && self.found.last().is_some_and(|checked| checked.outcome != Comparison::Same)
    }

    /// The first layout that differs, with as few options as still make it differ; the mesh stays.
    fn smallest(&mut self) -> Result<Option<Checked>, Error> {
        let first = self.found.iter().find(|checked| checked.outcome != Comparison::Same);
        let Some(mut smallest) = first.filter(|_| self.request.bug.is_none()).cloned() else { return Ok(None) };
        let mut row = smallest.row.clone();
        for factor in 1..row.len() {
            let plainer: Combination =
                row.iter().enumerate().map(|(i, &value)| if i == factor { 0 } else { value }).collect();
            let is_new = plainer != row && self.checker.space.ranks(&plainer).is_ok();
            if !is_new || self.is_to_end() {
                continue;
            }
            let (mut checked, anchor) = self.checker.anchor(&self.checker.space.anchor(&plainer))?;
            if checked.row != plainer {
                checked = self.checker.member(&plainer, &anchor)?;
            }
            if checked.outcome != Comparison::Same {
                (smallest, row) = (checked, plainer);
            }
        }
        Ok(Some(smallest))
    }
}
