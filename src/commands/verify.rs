//! `guildhall verify`: the first steps of a recipe in many ways, which must come to the same.

use std::cell::Cell;

use super::prepare::{prepare, rows};
use super::{Failure, print, say};
use crate::cli::Verify;
use crate::config;
use crate::data::Split;
use crate::verify::{self, BUGS, Bug, Checked, Request};

/// Ranks of the largest mesh, unless the recipe has more.
const RANKS: usize = 4;

pub(super) fn run(arguments: Verify) -> Result<(), Failure> {
    let bug = arguments.inject.as_deref().map(bug).transpose()?;
    let loaded = config::load(&arguments.recipe, &arguments.overrides.set, None).map_err(Failure::request)?;
    let config = &loaded.config;
    let ranks = arguments.ranks.unwrap_or(config.parallel.ranks.max(RANKS));
    for (what, number) in [("--ranks", ranks as u64), ("--steps", arguments.steps)] {
        if number == 0 {
            return Err(Failure::Request(anyhow::anyhow!("{what} 0: there is nothing to compare; use 1 or more")));
        }
    }
    if arguments.steps > config.train.steps {
        let (steps, all) = (arguments.steps, config.train.steps);
        let remedy = format!("the recipe has train.steps = {all}; use at most as many, or set train.steps higher");
        return Err(Failure::Request(anyhow::anyhow!("--steps {steps}: {remedy}")));
    }
    let corpus = prepare(config)?;
    let request = Request {
        config,
        data: rows(&corpus, Split::Train, config)?,
        content: corpus.split(Split::Train).content(),
        ranks,
        steps: arguments.steps,
        full: arguments.full,
        bug,
    };
    say(&format!("verify   {} steps of {} tokens, up to {ranks} ranks", arguments.steps, config.train.batch_tokens));
    if let Some(bug) = bug {
        say(&format!("bug      {}: {}", bug.name, bug.what));
    }
    let done = Cell::new(0);
    let report = verify::verify(&request, &|checked, all| {
        done.set(done.get() + 1);
        say(&line(checked, done.get(), all));
    });
    let report = report.map_err(|error| match error.is_request() {
        true => Failure::request(error),
        false => Failure::run(error),
    })?;
    match arguments.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&report).map_err(Failure::run)?))?,
        false => print(&report.table())?,
    }
    match report.has_differences() {
        false => Ok(()),
        true => Err(Failure::Differences),
    }
}

fn bug(name: &str) -> Result<&'static Bug, Failure> {
    verify::find(name).ok_or_else(|| {
        let names: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
        Failure::Request(anyhow::anyhow!("--inject {name}: there is no such bug; valid names: {}", names.join(", ")))
    })
}

fn line(checked: &Checked, done: usize, all: usize) -> String {
    format!(
        "{done:>4}/{all}  {:7}  {:5.1} s  {}: {}",
        checked.outcome.word(),
        checked.seconds,
        checked.layout,
        checked.summary()
    )
}
