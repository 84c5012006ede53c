//! From a recipe and the table of options to the layouts that are run, and those that cannot be.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use toml::{Table, Value as Toml};

use super::cover::{Combination, combinations, cover, product, shuffled};
use super::options::{Between, KNOBS, Knob, MICRO_BATCH, NumericChange, OptionValue};
use crate::config::{self, BaseRecipe, Config, Problems, StorageType};

/// Combinations that may be looked at one by one.
pub(super) const MOST: usize = 100_000;

/// One way to run the recipe.
#[derive(Clone, Debug)]
pub(super) struct NamedLayout {
    pub(super) name: String,
    /// By option, which of its values.
    pub(super) row: Combination,
    pub(super) config: Config,
    pub(super) between: Between,
}

impl NamedLayout {
    /// Of a step.
    pub(super) fn micro_batches(&self) -> usize {
        let rows = self.config.rows_per_step();
        rows / self.config.train.micro_batch.unwrap_or(rows)
    }

    /// Whether the recipe's mathematics are the same with other micro-batches.
    pub(super) fn may_be_cut(&self) -> bool {
        let moe = self.config.moe.as_ref();
        moe.and_then(|moe| moe.asks_the_micro_batch(&self.config.model.row_lengths())).is_none()
    }
}

/// A combination that is not run, and why.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SkippedLayout {
    pub layout: String,
    pub reason: String,
}

/// A sample of combinations.
pub(super) struct Drawn {
    pub(super) rows: Vec<Combination>,
    pub(super) skipped: Vec<SkippedLayout>,
    pub(super) drawn: usize,
    pub(super) unseen: usize,
}

/// The options of a recipe, and what all layouts start from.
pub(super) struct Space {
    knobs: Vec<(&'static Knob, Vec<OptionValue>)>,
    base: BaseRecipe,
    /// Options that this recipe has only one value of.
    pub(super) skipped: Vec<SkippedLayout>,
    /// What has been asked for: the ranks of what is possible, or why it is not.
    known: HashMap<Combination, Result<usize, String>>,
}

/// Updates of gradients that are zero in truth are noise divided by noise where `train.eps` is small.
const EPS: f64 = 1e-4;

impl Space {
    /// The options of `config` for up to `ranks` ranks, of which those in `only` vary (empty: all); layouts run in `folder`.
    pub(super) fn new(config: &Config, ranks: usize, only: &[String], folder: &Path) -> Space {
        let mut skipped = Vec::new();
        let mut knobs = Vec::new();
        let mut table: Table = config.to_toml().parse().expect("a resolved recipe is TOML");
        complete(&mut table, config, folder);
        for knob in KNOBS {
            let mut values = (knob.values)(config, ranks);
            if !only.is_empty() && !only.iter().any(|name| name == knob.name) {
                values.truncate(1);
            }
            let section = values[0].set.first().and_then(|set| set.split('.').next()).map(str::to_owned);
            let reason = match &section {
                Some(section) if !table.contains_key(section) => Some("the recipe has no [moe] section"),
                _ => (knob.fixed)(config),
            };
            if let Some(reason) = reason {
                skipped.extend(values.drain(1..).map(|value| skip(format!("{} {}", knob.name, value.label), reason)));
            }
            values[0].set.iter().for_each(|set| put(&mut table, set));
            knobs.push((knob, values));
        }
        let base =
            BaseRecipe::parse(Path::new("the recipe, resolved"), table.to_string()).expect("a table written as TOML");
        let mut space = Space { knobs, base, skipped, known: HashMap::new() };
        space.leave_impossible_meshes_out();
        space
    }

    /// What no other option makes possible need not be tried with each of them.
    fn leave_impossible_meshes_out(&mut self) {
        let alone = |mesh: usize| {
            [mesh].into_iter().chain(std::iter::repeat_n(0, self.knobs.len() - 1)).collect::<Combination>()
        };
        let rows: Vec<Combination> = (0..self.knobs[0].1.len()).map(alone).collect();
        let mut possible = Vec::new();
        for row in rows {
            match self.config(&row) {
                // The reference has its own error.
                Err(problems) if row[0] > 0 => self.skipped.push(skip(self.name(&row), &why(&problems))),
                _ => possible.push(self.knobs[0].1[row[0]].clone()),
            }
        }
        self.knobs[0].1 = possible;
    }

    /// The recipe on one rank, every option plain.
    ///
    /// # Errors
    /// What keeps the recipe from that, in the words of its configuration.
    pub(super) fn reference(&mut self) -> Result<NamedLayout, String> {
        self.layout(&vec![0; self.knobs.len()])
    }

    /// What a row is compared with: one rank, and of the row's values those that make another recipe of this one.
    pub(super) fn reference_of(&self, row: &[usize]) -> Combination {
        let kept = self.values(row).map(|(_, value)| value.is_another_recipe);
        kept.zip(row).map(|(kept, &value)| if kept { value } else { 0 }).collect()
    }

    /// A layout by its row.
    pub(super) fn layout(&mut self, row: &[usize]) -> Result<NamedLayout, String> {
        let config = self.config(row).map_err(|problems| why(&problems))?;
        let between = self.values(row).map(|(_, value)| value.between).find(|b| *b != Between::Nothing);
        Ok(NamedLayout {
            name: self.name(row),
            row: row.to_vec(),
            config,
            between: between.unwrap_or(Between::Nothing),
        })
    }

    /// How many combinations there are, possible or not.
    pub(super) fn combinations(&self) -> usize {
        combinations(&self.sizes())
    }

    fn sizes(&self) -> Vec<usize> {
        self.knobs.iter().map(|(_, values)| values.len()).collect()
    }

    /// Rows in which every two values meet, and pairs that cannot.
    pub(super) fn pairs(&mut self) -> (Vec<Combination>, Vec<SkippedLayout>) {
        let (sizes, mut skipped) = (self.sizes(), std::mem::take(&mut self.skipped));
        let (rows, apart) = cover(&sizes, |row| self.ranks(row).is_ok());
        for pair in apart {
            let mut row = vec![0; sizes.len()];
            // Where no mesh would do, the last one tells why.
            row[0] = sizes[0] - 1;
            pair.iter().for_each(|&(factor, value)| row[factor] = value);
            let reason = self.ranks(&row).clone().err().unwrap_or_default();
            let named = |&(factor, value): &(usize, usize)| {
                let (knob, values) = &self.knobs[factor];
                label(knob, &values[value])
            };
            skipped.push(skip(pair.iter().map(named).collect::<Vec<_>>().join(", "), &reason));
        }
        (rows, skipped)
    }

    /// Every combination that is possible, and those that are not; after `stop`, how many there are besides.
    pub(super) fn product(&mut self, stop: &AtomicBool) -> (Vec<Combination>, Vec<SkippedLayout>, usize) {
        let (mut rows, mut skipped) = (Vec::new(), std::mem::take(&mut self.skipped));
        let mut unseen = self.combinations();
        for row in product(&self.sizes()).take_while(|_| !stop.load(Ordering::Relaxed)) {
            unseen -= 1;
            match self.ranks(&row).clone() {
                Ok(_) => rows.push(row),
                Err(reason) => skipped.push(skip(self.name(&row), &reason)),
            }
        }
        (rows, skipped, unseen)
    }

    /// As many possible combinations as are wanted, drawn by a seed, and those that were drawn and are not possible; how
    /// many were drawn, and, after `stop`, how many more were wanted. Fewer where there are no more.
    pub(super) fn sample(&mut self, wanted: usize, seed: u64, stop: &AtomicBool) -> Drawn {
        let mut drawn = Drawn { rows: Vec::new(), skipped: std::mem::take(&mut self.skipped), drawn: 0, unseen: 0 };
        for row in shuffled(&self.sizes(), seed) {
            if drawn.rows.len() == wanted || stop.load(Ordering::Relaxed) {
                drawn.unseen = wanted - drawn.rows.len();
                break;
            }
            drawn.drawn += 1;
            match self.ranks(&row).clone() {
                Ok(_) => drawn.rows.push(row),
                Err(reason) => drawn.skipped.push(skip(self.name(&row), &reason)),
            }
        }
        drawn
    }

    /// The same row without all that may move nothing.
    pub(super) fn anchor(&self, row: &[usize]) -> Combination {
        let moves = self.causes(row).map(|cause| cause != NumericChange::Nothing);
        let kept = moves.zip(self.reference_of(row)).map(|(moves, of_reference)| moves || of_reference > 0);
        kept.zip(row).map(|(kept, &value)| if kept { value } else { 0 }).collect()
    }

    /// How far a row may be from its reference.
    pub(super) fn cause(&self, row: &[usize]) -> NumericChange {
        let reference = self.reference_of(row);
        let moved = self.causes(row).zip(row.iter().zip(&reference)).filter(|(_, (value, other))| value != other);
        moved.map(|(cause, _)| cause).max().unwrap_or(NumericChange::Nothing)
    }

    /// By option, how far its value in a row may move the numbers.
    fn causes<'a>(&'a self, row: &'a [usize]) -> impl Iterator<Item = NumericChange> + 'a {
        let plain = move |name: &&str| self.knobs.iter().zip(row).all(|((k, _), v)| k.name != *name || *v == 0);
        self.values(row).map(move |(knob, value)| match value.cause.unwrap_or(knob.cause) {
            NumericChange::Nothing if !knob.reorders_beside.iter().all(plain) => NumericChange::Order,
            cause => cause,
        })
    }

    /// The layout's reference but for what `layout` stores in fewer bits, and for how often gradients are added to what is. Where
    /// they are not stored so, all rows are added up at once: an error of adding must not be what it is judged by.
    pub(super) fn sampled(&mut self, layout: &NamedLayout) -> Result<NamedLayout, String> {
        let rounds = layout.config.train.gradient_dtype == StorageType::Bf16;
        let kept = |knob: &Knob, value: &OptionValue| {
            value.is_another_recipe || knob.cause == NumericChange::Storage || (rounds && knob.name == MICRO_BATCH)
        };
        let of_knob = |((knob, of), &value)| if kept(knob, of) { value } else { 0 };
        let row: Combination = self.values(&layout.row).zip(&layout.row).map(of_knob).collect();
        let mut sampled = self.layout(&row)?;
        if !rounds && layout.may_be_cut() {
            sampled.name += if sampled.micro_batches() > 1 { ", all rows at once" } else { "" };
            sampled.config.train.micro_batch = None;
        }
        Ok(sampled)
    }

    /// The first reason why values of an option are not there, if it has one.
    pub(super) fn why_not(&self, option: &str) -> Option<&str> {
        let of_it = |skipped: &&SkippedLayout| skipped.layout.split(' ').next() == Some(option);
        self.skipped.iter().find(of_it).map(|skipped| skipped.reason.as_str())
    }

    fn values<'a>(&'a self, row: &'a [usize]) -> impl Iterator<Item = (&'static Knob, &'a OptionValue)> {
        self.knobs.iter().zip(row).map(|((knob, values), &value)| (*knob, &values[value]))
    }

    /// The mesh, and what is not plain.
    fn name(&self, row: &[usize]) -> String {
        let told = self.values(row).zip(row).enumerate().filter(|(factor, (_, value))| *factor == 0 || **value > 0);
        told.map(|(_, ((knob, value), _))| label(knob, value)).collect::<Vec<_>>().join(", ")
    }

    /// The ranks of a row, or why it is not possible.
    pub(super) fn ranks(&mut self, row: &[usize]) -> &Result<usize, String> {
        if !self.known.contains_key(row) {
            let found = self.config(row).map_err(|problems| why(&problems)).and_then(|config| {
                let idle = self.values(row).zip(row).filter(|(_, value)| **value > 0);
                match { idle }.find_map(|((knob, _), _)| (knob.idle)(&config)) {
                    Some(because) => Err(because.to_owned()),
                    None => Ok(config.parallel.ranks),
                }
            });
            self.known.insert(row.to_vec(), found);
        }
        &self.known[row]
    }

    /// How long a row takes beside others: every rank is a thread, and sends to others.
    pub(super) fn work(&mut self, row: &[usize]) -> f64 {
        *self.ranks(row).as_ref().unwrap_or(&1) as f64
    }

    fn config(&self, row: &[usize]) -> Result<Config, Problems> {
        let moved = self.values(row).zip(row).filter(|(_, value)| **value > 0);
        let set: Vec<String> = moved.flat_map(|((_, value), _)| value.set.clone()).collect();
        self.base.with(&set)
    }
}

fn why(problems: &Problems) -> String {
    let one = |problem: &config::Problem| format!("{}: {}", problem.key, problem.wrong);
    problems.as_slice().iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Rows that share an anchor, by it.
pub(super) fn by_anchor(space: &Space, rows: Vec<Combination>) -> BTreeMap<Combination, Vec<Combination>> {
    let mut families: BTreeMap<Combination, Vec<Combination>> = BTreeMap::new();
    for row in rows {
        let anchor = space.anchor(&row);
        let family = families.entry(anchor.clone()).or_default();
        if row != anchor {
            family.push(row);
        }
    }
    families
}

fn label(knob: &Knob, value: &OptionValue) -> String {
    if knob.name == KNOBS[0].name { value.label.clone() } else { format!("{} {}", knob.name, value.label) }
}

fn skip(layout: String, reason: &str) -> SkippedLayout {
    SkippedLayout { layout, reason: reason.to_owned() }
}

/// What all layouts have in common, whatever the recipe says.
fn complete(table: &mut Table, config: &Config, folder: &Path) {
    let dir = folder.join("run");
    put(table, &format!("run.dir={}", Toml::String(dir.to_string_lossy().into_owned())));
    put(table, &format!("train.eps={:?}", config.train.eps.max(EPS)));
    for key in ["train.eval_every=0", "train.checkpoint_every=0", "train.keep=1"] {
        put(table, key);
    }
    for key in [
        "parallel.link=",
        "parallel.node_link=",
        "moe.record=",
        "moe.replay=",
        "moe.schedule_groups=",
        "memory.keep_communication=",
        "memory.offload_dir=",
    ] {
        put(table, key);
    }
}

/// Puts `section.key=value` into a table that has the section.
fn put(table: &mut Table, set: &str) {
    let (path, value) = set.split_once('=').expect("written as key=value");
    let (section, key) = path.split_once('.').expect("keys have sections");
    let Some(Toml::Table(section)) = table.get_mut(section) else { return };
    match (value, value.parse::<Toml>()) {
        ("", _) => section.remove(key),
        (_, Ok(value)) => section.insert(key.to_owned(), value),
        (word, Err(_)) => section.insert(key.to_owned(), Toml::String(word.to_owned())),
    };
}
