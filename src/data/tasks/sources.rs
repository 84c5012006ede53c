//! The parallel text of a recipe's tasks: which files, and what comes out of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::Serialize;

use super::gather::{GatheredTexts, Gatherer};
use super::index::ReadPairs;
use crate::data::config::{Config, TaskKind, TaskTable};
use crate::data::error::Error;
use crate::data::manifest::sha256;
use crate::data::pairs::{self, Cleaning, PairFile, PairListing, PairSpec, Skips};

/// Packages of Debian and its kin that bring many catalogues, those with most messages first.
const PACKAGES: &str = "iso-codes, libgtk-3-common, binutils-common, coreutils, git, libglib2.0-data, xkb-data, \
                        shared-mime-info, dpkg, bash, gettext";

/// Of how messages are held out: a corpus that was split by another rule is prepared anew.
const SPLIT_RULE: u32 = 2;

/// The language that stands for the labels of a task.
pub(super) fn label_language(task: &TaskTable) -> String {
    format!("classification:{}", task.name())
}

/// What each task reads.
pub(in crate::data) struct TaskSources<'a> {
    config: &'a Config,
    /// By task; empty for those that read what others do.
    listings: Vec<PairListing>,
    /// Files that would have exceeded `data.max_bytes`.
    over_max_bytes: u64,
}

/// What the fingerprint must know of a file.
#[derive(Serialize)]
struct FileStamp {
    task: usize,
    what: String,
    bytes: u64,
    modified_ns: u128,
}

impl<'a> TaskSources<'a> {
    /// Finds the files of all tasks.
    ///
    /// # Errors
    /// Sources that match nothing or do not tell their languages; languages and directions that none of them has.
    pub(in crate::data) fn list(config: &'a Config, cache: &Path) -> Result<TaskSources<'a>, Error> {
        let listings = config.tasks.iter().map(|task| list_of(task, cache)).collect::<Result<Vec<_>, _>>()?;
        let mut sources = TaskSources { config, listings, over_max_bytes: 0 };
        if let Some(max_bytes) = config.max_bytes {
            sources.keep_within(max_bytes)?;
        }
        Ok(sources)
    }

    /// Whole files in an order that is unrelated to their content, as long as they fit.
    fn keep_within(&mut self, max_bytes: u64) -> Result<(), Error> {
        let files = self.listings.iter().enumerate();
        let files = files.flat_map(|(task, listing)| (0..listing.files.len()).map(move |file| (task, file)));
        let mut order: Vec<(usize, usize)> = files.collect();
        let path = |&(task, file): &(usize, usize)| self.listings[task].files[file].path.to_string_lossy().into_owned();
        order.sort_by_cached_key(|at| (sha256(path(at).as_bytes()), *at));
        let (count, mut left, mut kept) = (order.len(), max_bytes, BTreeSet::new());
        for (task, file) in order {
            let bytes: u64 = self.listings[task].files[file].paths().into_iter().map(|path| size(path).0).sum();
            if bytes <= left {
                left -= bytes;
                kept.insert((task, file));
            }
        }
        if kept.is_empty() {
            return Err(Error::NothingFits { files: count, max_bytes });
        }
        self.over_max_bytes = (count - kept.len()) as u64;
        for (task, listing) in self.listings.iter_mut().enumerate() {
            let mut number = 0..;
            listing.files.retain(|_| kept.contains(&(task, number.next().expect("numbers do not end"))));
        }
        Ok(())
    }

    /// All that decides about the pairs but not how often they are met.
    pub(in crate::data) fn key(&self) -> impl Serialize {
        let neutral = |task: &TaskTable| TaskTable { weight: 1.0, noise: None, ..task.clone() };
        let tasks: Vec<TaskTable> = self.config.tasks.iter().map(neutral).collect();
        let files = self.listings.iter().enumerate().flat_map(|(task, listing)| {
            let sides = listing.files.iter().flat_map(|file| file.paths().into_iter().map(move |path| (file, path)));
            sides.map(move |(file, path)| {
                let (bytes, modified_ns) = size(path);
                let what = format!("{} {:?} {:?} {}", path.display(), file.layout, file.languages, file.named);
                FileStamp { task, what, bytes, modified_ns }
            })
        });
        (tasks, self.config.temperature, files.collect::<Vec<_>>(), SPLIT_RULE)
    }

    pub(in crate::data) fn files(&self) -> usize {
        self.listings.iter().map(|listing| listing.files.len()).sum()
    }

    /// Reads, cleans and gathers all pairs, and says what was found and left out.
    ///
    /// # Errors
    /// What the readers report.
    pub(super) fn gather(&self) -> Result<(GatheredTexts, ReadPairs), Error> {
        let (mut gatherer, mut read) = (Gatherer::new(self.config.held_out), ReadPairs::default());
        read.over_max_bytes = self.over_max_bytes;
        for (index, (task, listing)) in self.config.tasks.iter().zip(&self.listings).enumerate() {
            let labels = task.kind == TaskKind::Classification;
            let cleaning = Cleaning { max_chars: task.max_chars, length_ratio: task.length_ratio, labels };
            if labels {
                gatherer.labels(label_language(task));
            }
            let summary = pairs::read_all(listing, cleaning, &mut |pair| {
                gatherer.push(index, pair);
                Ok(())
            })?;
            read.add(listing, summary);
        }
        Ok((gatherer.finish(), read))
    }

    /// What to do about too few pairs.
    pub(super) fn help(&self, read: &ReadPairs) -> String {
        let skipped = match &read.skipped {
            none if *none == Skips::default() => String::new(),
            some => format!(" (left out: {some})"),
        };
        let unreadable = match read.unreadable_examples.first() {
            Some(example) => format!("; {} catalogues were unreadable: {example}", read.unreadable),
            None => String::new(),
        };
        let catalogues = self.config.tasks.iter().flat_map(|task| &task.sources).any(names_catalogues);
        let advice = if catalogues { packages() } else { "add sources, or lower min_pairs".to_owned() };
        format!("{} pairs were read{skipped}{unreadable}; {advice}", read.pairs)
    }
}

fn packages() -> String {
    format!("install packages that bring catalogues of translations ({PACKAGES}), or lower min_pairs")
}

fn names_catalogues(spec: &PairSpec) -> bool {
    [".mo", ".gmo", ".po"].iter().any(|ending| spec.path.ends_with(ending))
}

fn size(path: &Path) -> (u64, u128) {
    let Ok(metadata) = fs::metadata(path) else { return (0, 0) };
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    (metadata.len(), modified.map_or(0, |time| time.as_nanos()))
}

/// The files of one task in the languages and directions that it takes.
fn list_of(task: &TaskTable, cache: &Path) -> Result<PairListing, Error> {
    let is_labelled = task.kind == TaskKind::Classification;
    let labelled = |spec: &PairSpec| PairSpec { to: Some(label_language(task)), ..spec.clone() };
    let of_one_text = task.kind.is_of_one_text();
    let of_one_text = |spec: &PairSpec| PairSpec { of_one_text, ..spec.clone() };
    let specs = task.sources.iter().map(|spec| if is_labelled { labelled(spec) } else { of_one_text(spec) });
    let specs: Vec<PairSpec> = specs.collect();
    let mut listing = pairs::list(&specs, cache).map_err(|error| match error {
        Error::NoMatch { source_name, help } if task.sources.iter().any(names_catalogues) => {
            Error::NoMatch { source_name, help: format!("{help}; {}", packages()) }
        }
        error => error,
    })?;
    if !specs.is_empty() {
        check_names(task, &listing)?;
    }
    listing.files.retain(|file| {
        let [one, other] = file.languages.each_ref().map(String::as_str);
        task.takes([one, other]) || (!is_labelled && task.takes([other, one]))
    });
    Ok(listing)
}

/// Refuses languages and directions that no file has.
fn check_names(task: &TaskTable, listing: &PairListing) -> Result<(), Error> {
    let found: BTreeSet<&str> = listing.files.iter().flat_map(|file| &file.languages).map(String::as_str).collect();
    let found_list = || found.iter().map(|language| (*language).to_owned()).collect();
    let task_name = || task.name().to_owned();
    if let Some(name) = task.languages.iter().flatten().find(|name| !found.contains(name.as_str())) {
        return Err(Error::NoTaskLanguage { task: task_name(), language: name.clone(), found: found_list() });
    }
    let both_ways = |file: &'_ PairFile| {
        let [one, other] = &file.languages;
        [[one.clone(), other.clone()], [other.clone(), one.clone()]]
    };
    let directions: BTreeSet<[String; 2]> = listing.files.iter().flat_map(both_ways).collect();
    let has = |pattern: &&String| {
        let one = TaskTable { directions: Some(vec![(*pattern).clone()]), ..task.clone() };
        directions.iter().any(|direction| one.takes(direction.each_ref().map(String::as_str)))
    };
    match task.directions.iter().flatten().find(|pattern| !has(pattern)) {
        None => Ok(()),
        Some(pattern) => {
            Err(Error::NoTaskDirection { task: task_name(), direction: pattern.clone(), found: found_list() })
        }
    }
}
