//! One layout: run, and compared with what it should be equal to.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use super::bugs::Bug;
use super::collect::RunResult;
use super::compare::{Difference, Tolerance, compare, errors};
use super::cover::Combination;
use super::error::Error;
use super::layouts::{NamedLayout, Space};
use super::noise::{Noise, SAMPLES};
use super::options::NumericChange;
use super::report::{BITS, Checked, Comparison, ORDER, STORAGE};
use super::routing::{Verdict, judge};
use super::run::{RoutedBy, Runner, Twist};
use crate::config::StorageType;
use crate::moe::Shadowing;
use crate::parallel::Exchange;

/// Differences that are kept of a layout.
const KEPT: usize = 12;

/// What layouts are run with and compared with.
pub(super) struct Checker<'a> {
    pub(super) space: Space,
    pub(super) runner: Runner<'a>,
    pub(super) planted: Option<Planted<'a>>,
    /// One rank, by each way of computing something else; the recipe's own is there from the beginning.
    references: HashMap<Combination, Rc<Reference>>,
    /// One rank, by each way of storing less.
    samples: HashMap<Combination, Rc<Sampled>>,
}

/// One rank, whose routings and clusters are recorded under a number.
struct Reference {
    name: String,
    run: RunResult,
    number: usize,
}

/// One rank that stores less, and what it loses.
struct Sampled {
    name: String,
    run: RunResult,
    noise: Noise,
}

/// What a run is compared with, and how closely.
struct Want<'a> {
    name: &'a str,
    run: &'a RunResult,
    tolerance: Tolerance<'a>,
}

/// A bug, and whether it is planted in layouts of half the bits alone.
#[derive(Clone, Copy)]
pub(super) struct Planted<'a> {
    pub(super) bug: &'a Bug,
    pub(super) half: bool,
}

impl Planted<'_> {
    /// Whether a layout has it, and can show it.
    pub(super) fn is_in(&self, layout: &NamedLayout) -> bool {
        match self.half {
            // Those follow the reference's routing.
            true if self.bug.shows.of_choices || layout.config.train.dtype != StorageType::Bf16 => false,
            _ => (self.bug.shows.is_in)(layout),
        }
    }
}

/// A layout that was compared with the reference, for others to be compared with it.
pub(super) struct Anchor {
    layout: NamedLayout,
    /// Absent if the run failed.
    run: Option<RunResult>,
    /// The reference whose routing it followed, if it did.
    followed: Option<usize>,
}

impl<'a> Checker<'a> {
    /// Runs the reference.
    ///
    /// # Errors
    /// A recipe that does not run on one rank.
    pub(super) fn new(space: Space, runner: Runner<'a>, planted: Option<Planted<'a>>) -> Result<Checker<'a>, Error> {
        let (references, samples) = (HashMap::new(), HashMap::new());
        let mut checker = Checker { space, runner, planted, references, samples };
        let plain = checker.space.reference().map_err(Error::Reference)?;
        checker.reference(&plain.row)?;
        Ok(checker)
    }

    /// What a row is compared with.
    fn reference(&mut self, row: &[usize]) -> Result<Rc<Reference>, Error> {
        let row = self.space.reference_of(row);
        if let Some(reference) = self.references.get(&row) {
            return Ok(reference.clone());
        }
        let (layout, number) = (self.space.layout(&row).map_err(Error::Reference)?, self.references.len());
        let run = self.runner.run(&layout, RoutedBy::Recorded(number), Twist::Nothing)?.map_err(Error::Run)?;
        let reference = Rc::new(Reference { name: layout.name, run, number });
        self.references.insert(row, reference.clone());
        Ok(reference)
    }

    /// Of the routes of references that condense, the share without a row of their own.
    pub(super) fn condensed_share(&self) -> Option<f64> {
        let steps = self.references.values().flat_map(|reference| &reference.run.reports);
        let saved = steps.flat_map(|report| &report.moe).filter_map(|layer| layer.condensed.as_ref());
        let (uncomputed, all) = saved.fold((0, 0), |(u, all), saved| (u + saved.uncomputed, all + saved.routes));
        (all > 0).then(|| uncomputed as f64 / all as f64)
    }

    /// A layout against one that it must equal to the bit.
    pub(super) fn member(&mut self, row: &Combination, anchor: &Anchor) -> Result<Checked, Error> {
        let layout = self.space.layout(row).expect("a possible layout");
        let Anchor { layout: other, run, followed } = anchor;
        let mut checked = blank(&layout, &other.name, BITS);
        let Some(want) = run else {
            checked.messages.push(format!("not compared: {} failed", other.name));
            return Ok(checked);
        };
        let begun = Instant::now();
        let result = self.runner.run(&layout, RoutedBy::Followed(*followed), self.twist(&layout))?;
        if let Ok(run) = &result {
            match judge(&run.decisions, &want.decisions, &layout.config) {
                Verdict::Same => {}
                Verdict::Wrong(why) => checked.messages.push(why),
                Verdict::Rounding(what) if run.sums_are_exact => {
                    checked.messages.push(format!("{what}, where no bit may move"));
                }
                Verdict::Rounding(what) => checked.flips = Some(what),
            }
        }
        self.finish(&mut checked, result, &[Want { name: &other.name, run: want, tolerance: Tolerance::Bits }]);
        checked.seconds = begun.elapsed().as_secs_f64();
        Ok(checked)
    }

    /// A layout against its reference.
    pub(super) fn anchor(&mut self, row: &Combination) -> Result<(Checked, Anchor), Error> {
        let (layout, begun) = (self.space.layout(row).expect("a possible layout"), Instant::now());
        let reference = self.reference(row)?;
        let cause = self.space.cause(&layout.row);
        let told = match cause {
            NumericChange::Nothing => BITS,
            NumericChange::Order => ORDER,
            NumericChange::Storage => STORAGE,
        };
        let sampled = match cause {
            NumericChange::Storage => Some(self.sampled(&layout)?),
            _ => None,
        };
        let mut checked = blank(&layout, &reference.name, told);
        // Half the bits choose otherwise, sooner or later.
        let mut followed = Some(reference.number).filter(|_| cause == NumericChange::Storage);
        let mut result = self.runner.run(&layout, RoutedBy::Followed(followed), self.twist(&layout))?;
        if let Ok(run) = &result
            && followed.is_none()
        {
            match judge(&run.decisions, &reference.run.decisions, &layout.config) {
                Verdict::Same => {}
                Verdict::Wrong(why) => checked.messages.push(why),
                Verdict::Rounding(what) => {
                    (checked.flips, followed) = (Some(what), Some(reference.number));
                    result = self.runner.run(&layout, RoutedBy::Followed(followed), self.twist(&layout))?;
                }
            }
        }
        let parts = parts(&layout);
        let tolerance = match &sampled {
            None if cause == NumericChange::Nothing => Tolerance::Bits,
            None => Tolerance::Order,
            Some(sampled) => Tolerance::Storage { one_rank: &sampled.noise, parts },
        };
        let mut wants = vec![Want { name: &reference.name, run: &reference.run, tolerance }];
        if let Some(Sampled { name, run, noise }) = sampled.as_deref()
            && parts == 0
        {
            wants.push(Want { name, run, tolerance: Tolerance::Rounding(noise) });
        }
        let run = self.finish(&mut checked, result, &wants);
        checked.seconds = begun.elapsed().as_secs_f64();
        Ok((checked, Anchor { layout, run, followed }))
    }

    fn finish(&self, checked: &mut Checked, result: Result<RunResult, String>, wants: &[Want]) -> Option<RunResult> {
        let run = match result {
            Ok(run) => run,
            Err(failure) => {
                checked.messages.push(failure);
                return None;
            }
        };
        let worst = |differences: &[Difference]| differences.first().map_or(0.0, Difference::share);
        let compared = wants.iter().map(|want| (want.name, compare(&run, want.run, &want.tolerance)));
        let nearest = compared.max_by(|a, b| worst(&a.1).total_cmp(&worst(&b.1)));
        let (against, mut differences) = nearest.expect("compared with something");
        checked.against = against.to_owned();
        let large = differences.iter().take_while(|difference| difference.is_too_large()).count();
        checked.messages.extend(run.disagreements.iter().take(KEPT).cloned());
        if large == 0 && checked.messages.is_empty() {
            checked.outcome = Comparison::Same;
        } else {
            checked.outcome = Comparison::Differs;
        }
        differences.truncate(large.clamp(1, KEPT));
        checked.differences = differences;
        Some(run)
    }

    fn twist(&self, layout: &NamedLayout) -> Twist<'a> {
        let has_it = |planted: &Planted| planted.bug.is_of_the_build() || planted.is_in(layout);
        self.planted.filter(has_it).map_or(Twist::Nothing, |planted| Twist::Bug(planted.bug))
    }

    /// One rank that stores what a layout does, and what it loses by that, sample by sample.
    fn sampled(&mut self, layout: &NamedLayout) -> Result<Rc<Sampled>, Error> {
        let reference = self.reference(&layout.row)?;
        let layout = self.space.sampled(layout).map_err(Error::Reference)?;
        if let Some(sampled) = self.samples.get(&layout.row) {
            return Ok(sampled.clone());
        }
        let bug = self.planted.map(|planted| planted.bug).filter(|bug| bug.is_of_the_build());
        let run =
            |twist| self.runner.run(&layout, RoutedBy::Followed(Some(reference.number)), twist)?.map_err(Error::Run);
        let sample = |number| Ok(errors(&run(Twist::Dither(number, bug))?, &reference.run));
        let noise = Noise::of(&(0..SAMPLES).map(sample).collect::<Result<Vec<_>, Error>>()?);
        let run = run(bug.map_or(Twist::Nothing, Twist::Bug))?;
        let sampled = Rc::new(Sampled { name: layout.name, run, noise });
        self.samples.insert(layout.row, sampled.clone());
        Ok(sampled)
    }
}

/// How many parts of a sum are rounded that one rank does not have: none where nothing that is rounded travels.
fn parts(layout: &NamedLayout) -> usize {
    let config = &layout.config;
    let shape = config.parallel.shape();
    let shadows = config.moe.as_ref().is_some_and(|moe| moe.shadowing() != Shadowing::Off);
    let visits = shadows || config.parallel.exchange == Exchange::Experts;
    match config.train.gradient_dtype {
        _ if shape.ranks == 1 => 0,
        // A rank's gradient of every micro-batch goes to others, or home.
        StorageType::Bf16 => shape.ranks * layout.micro_batches(),
        StorageType::F32 if visits => shape.ranks * layout.micro_batches(),
        // What projects distances meets a gradient that each rank has of its own rows, and rounds before the product.
        StorageType::F32 if config.model.blueprint().is_segmented() => shape.ranks * layout.micro_batches(),
        // A row, or its gradient, is a sum of what it becomes on other ranks.
        StorageType::F32 if shape.tensor * shape.expert > 1 => shape.tensor * shape.expert,
        StorageType::F32 => 0,
    }
}

/// A layout that has not been run.
fn blank(layout: &NamedLayout, against: &str, tolerance: &'static str) -> Checked {
    Checked {
        layout: layout.name.clone(),
        row: layout.row.clone(),
        against: against.to_owned(),
        tolerance,
        outcome: Comparison::Failed,
        flips: None,
        messages: Vec::new(),
        differences: Vec::new(),
        seconds: 0.0,
    }
}
