//! A run's configuration: the sections of a recipe, read, checked and completed.
//!
//! ```text
//! recipe.toml ──┐
//! --set k=v   ──┼─► source: one table, ──► read + node: the ──► derived ──► rules: what ──► Loaded
//! --ranks N   ──┘   who wrote what         sections' structs    values      must agree
//!                          │                     │                               │
//!                          └──────────► problem (explain, suggest) ◄─────────────┘
//! ```
//!
//! Keys, types and defaults are the section structs' own business; nothing here lists them a second time,
//! except that every number has its range in `bounds`. No stage stops at its first problem: a value found
//! wrong is replaced by a sample, and the rules that would read it stay silent.

mod bounds;
mod chat;
mod condensation;
mod device;
mod experts;
mod explain;
mod families;
mod frozen;
mod gates;
mod init;
mod load;
mod lora_rules;
mod mesh;
mod migration;
mod moved;
mod node;
mod problem;
mod read;
mod recompute;
mod rejection;
mod replacing;
mod resumable;
mod rules;
mod shares;
mod sizes;
mod source;
mod suggest;
mod tasks;
mod training;
mod wishes;
mod zero;

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

pub use device::{DeviceTable, device};
pub use experts::load_with_experts;
pub use init::{misfits, unlike};
pub use load::{BaseRecipe, load, load_kept, load_launched, load_text};
pub use problem::{Origin, Problem, Problems};
pub use resumable::differences;
pub use training::{LrSchedule, Run, StorageType, TrainedPart, Training};

use crate::limits::{Bounds, Finding, common_divisor};
use crate::parallel::PerLayer;
use crate::{data, lora, memory, metrics, model, moe, parallel};
use explain::Explainer;
use read::Reading;
use rejection::Wrong;
use source::{KINDED, RecipeSource, is_under};

/// A whole recipe. Out of [`load`], what can be derived is filled in: `train.only`, `lora.alpha`, `model.kv_heads`, `model.d_ff`,
/// `moe.d_expert`, `train.micro_batch` and `run.dir` have values, and `data.mask_rate` where tokens are masked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub run: Run,
    pub train: Training,
    pub parallel: parallel::Config,
    pub memory: memory::Config,
    pub model: model::Config,
    /// Absent for a dense model.
    pub moe: Option<moe::Config>,
    /// Absent for a model that is trained itself.
    pub lora: Option<lora::Config>,
    pub data: data::Config,
    pub metrics: metrics::Config,
}

/// A configuration nothing is wrong with.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    pub config: Config,
    /// What of the recipe has no effect, one sentence each, to be printed.
    pub notices: Vec<String>,
}

impl Config {
    /// The recipe that says everything: loading it gives an equal configuration.
    ///
    /// # Panics
    /// Never for a configuration out of [`load`]: its numbers fit TOML's.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("sections of numbers, strings and lists are TOML")
    }

    /// Rows of one optimizer step over all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.train.batch_tokens / self.model.seq
    }

    /// Fills in what was left to be derived from other keys.
    fn derive(&mut self) {
        let rows = self.rows_per_step();
        self.train.micro_batch.get_or_insert(rows);
        self.model.kv_heads.get_or_insert(self.model.heads);
        let d_ff = *self.model.d_ff.get_or_insert(4 * self.model.d_model);
        self.model.derive_stacks();
        let adapts = self.lora.is_some();
        self.train.only.get_or_insert(if adapts { TrainedPart::Lora } else { TrainedPart::All });
        if let Some(lora) = &mut self.lora {
            lora.alpha.get_or_insert(lora.rank as f32);
        }
        self.train.freeze.sort();
        self.train.freeze.dedup();
        if !self.model.is_causal() {
            self.data.mask_rate.get_or_insert(0.15);
        }
        if self.memory.offload == memory::Offload::File {
            self.memory.offload_dir.get_or_insert_with(|| self.run.dir.join("offload"));
        }
        if let Some(moe) = &mut self.moe {
            moe.d_expert = Some(moe.expert_width(d_ff));
            // Which layers a list is of that is too long or too short, nobody knows.
            let layers = (0..self.model.layers).filter(|layer| moe.layers.contains(*layer)).count();
            if moe.experts.list().is_some_and(|list| list.len() == layers) {
                moe.experts = PerLayer::of_each(moe.experts.of_layers(layers));
            }
        }
    }

    /// Every key in which two recipes differ, in alphabetical order, and its values in both.
    fn unlike(&self, other: &Config) -> Vec<[String; 3]> {
        let (one, other) = (self.flat(), other.flat());
        let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
        let told = |value: Option<&Value>| value.map_or("absent".to_owned(), problem::shown);
        let values = keys.into_iter().map(|key| (key, one.get(key), other.get(key)));
        values.filter(|(_, a, b)| a != b).map(|(key, a, b)| [key.clone(), told(a), told(b)]).collect()
    }

    /// Every key that has a value, as `section.key`.
    fn flat(&self) -> BTreeMap<String, Value> {
        // By way of text, where an f32 is written with its own digits and not with those of the nearest f64.
        let sections: Table = self.to_toml().parse().expect("to_toml writes TOML");
        let mut flat = BTreeMap::new();
        for (section, keys) in sections {
            if let Value::Table(keys) = keys {
                flat.extend(keys.into_iter().map(|(key, value)| (source::join(&section, &key), value)));
            }
        }
        for choice in KINDED {
            if let Some(Value::Table(mut own)) = flat.get(*choice).cloned() {
                flat.extend(own.remove("kind").map(|kind| ((*choice).to_owned(), kind)));
                flat.extend(own.into_iter().map(|(key, value)| (source::join(choice, &key), value)));
            }
        }
        flat
    }
}

/// The stages after the source, each adding to the problems and to what later stages must not look at.
struct RecipeChecker<'a> {
    source: &'a RecipeSource,
    broken: BTreeSet<String>,
    problems: Vec<Problem>,
}

const RULES: &[&[rules::Rule]] = &[
    rules::RULES,
    families::RULES,
    gates::RULES,
    condensation::RULES,
    mesh::RULES,
    migration::RULES,
    replacing::RULES,
    zero::RULES,
    frozen::RULES,
    lora_rules::RULES,
    recompute::RULES,
    chat::RULES,
    sizes::RULES,
    tasks::RULES,
];
const UNUSED: &[&[rules::Unused]] = &[
    rules::UNUSED,
    families::UNUSED,
    gates::UNUSED,
    condensation::UNUSED,
    mesh::UNUSED,
    migration::UNUSED,
    replacing::UNUSED,
    zero::UNUSED,
    frozen::UNUSED,
    recompute::UNUSED,
    chat::UNUSED,
    tasks::UNUSED,
];
/// Rules that say themselves which key is to blame.
const MISFITS: [(&[&str], fn(&Config) -> Vec<(String, Finding)>); 2] =
    [(gates::MISFITS_READ, gates::misfits), (tasks::MISFITS_READ, tasks::misfits)];
const IDLE: &[&[rules::Unused]] = &[gates::IDLE, migration::IDLE, zero::IDLE];

impl<'a> RecipeChecker<'a> {
    fn new(source: &'a RecipeSource) -> Self {
        RecipeChecker { source, broken: BTreeSet::new(), problems: Vec::new() }
    }

    /// The table as a configuration, with samples where it is wrong.
    fn config(&mut self) -> Option<Config> {
        self.check_bounds(bounds::BOUNDS.iter().map(|(key, range)| ((*key).to_owned(), *range)));
        self.check_bounds(gates::bounds(self.source));
        let mut config = self.read::<Config>()?;
        config.derive();
        Some(config)
    }

    fn read<T: DeserializeOwned>(&mut self) -> Option<T> {
        let table = Value::Table(self.source.table.clone());
        let Reading { value, faults, broken } = read::read::<T>("", &table, self.broken.clone());
        self.broken = broken;
        if !faults.is_empty() {
            let explainer = Explainer { source: self.source, paths: &read::paths::<T>() };
            self.problems.extend(explainer.problems(&faults));
        }
        // What a misspelt key of a section was to say is not known to be absent.
        let unknown = faults.iter().filter(|fault| matches!(fault.wrong, Wrong::Unknown(_)));
        self.broken.extend(unknown.map(|fault| fault.path.clone()).filter(|path| path.matches('.').count() == 1));
        value
    }

    /// Numbers outside their bounds are replaced before anything computes with them.
    fn check_bounds(&mut self, bounds: impl IntoIterator<Item = (String, Bounds)>) {
        for (key, range) in bounds {
            let value = self.source.value(&key);
            if let Some(remedy) = value.and_then(|value| range.remedy(value)) {
                self.blame(&key, Finding::new(format!("must be {range}"), remedy));
                self.broken.insert(key);
            }
        }
    }

    /// Degrees in a recipe are a wish for the ranks it was written for; `--ranks` goes before them.
    fn fit_mesh(&self, config: &mut Config) -> Vec<String> {
        const TENSOR: &str = "parallel.tensor";
        const EXPERT: &str = "parallel.expert";
        const TABLE: &str = "parallel.expert_table";
        const GROUPS: &str = "moe.schedule_groups";
        let keys = [TENSOR, EXPERT, "parallel.expert_tensor", "parallel.ranks", "moe.experts"];
        let given = self.source.origin("parallel.ranks");
        let (Origin::Ranks(ranks) | Origin::Processes(ranks)) = given else { return Vec::new() };
        if !self.all_sound(&keys)
            || !config.parallel.expert_tensor.is_none_or(|e| e == 1 || e == config.parallel.tensor)
        {
            return Vec::new();
        }
        let fixed = |key: &str| self.source.origin(key).is_command_line();
        let experts = config.moe.as_ref().map_or(PerLayer::Same(1), |moe| moe.experts.clone());
        let parallel = &mut config.parallel;
        let mut notices = Vec::new();
        let mut fits = |key: &str, wish: String, fitting: String| {
            let is_used = !fixed(key) && wish != fitting;
            if is_used {
                let origin = self.source.origin(key);
                notices.push(format!("{key} = {wish} ({origin}) does not divide {given}; {fitting} is used instead"));
            }
            is_used
        };
        let divisor = |wish: usize, (whole, limit): (usize, usize)| match whole.is_multiple_of(wish) {
            true => wish,
            false => common_divisor(common_divisor(wish, whole), limit),
        };
        let tensor = divisor(parallel.tensor, (ranks, 0));
        if fits(TENSOR, parallel.tensor.to_string(), tensor.to_string()) {
            parallel.tensor = tensor;
        }
        parallel.expert_tensor = parallel.expert_tensor.map(|slices| if slices == 1 { 1 } else { parallel.tensor });
        let slices = parallel.shape().expert_tensor;
        if ranks.is_multiple_of(slices) {
            let expert = parallel.expert.with(&experts, |expert, all| divisor(expert, (ranks / slices, all)));
            if fits(EXPERT, parallel.expert.to_string(), expert.to_string()) {
                parallel.expert = expert;
                // What was said of groups of another size says nothing of these.
                let table = parallel.expert_table.take_if(|_| !fixed(TABLE)).map(|_| TABLE);
                let moe = config.moe.as_mut();
                let groups = moe.and_then(|moe| moe.schedule_groups.take_if(|_| !fixed(GROUPS))).map(|_| GROUPS);
                for key in table.into_iter().chain(groups) {
                    let origin = self.source.origin(key);
                    notices.push(format!("{key} ({origin}) is of other expert groups than {given} makes; left out"));
                }
            }
        }
        notices.extend(zero::fit(config, (!fixed("parallel.zero")).then(|| self.source.origin("parallel.zero"))));
        notices
    }

    fn check_rules(&mut self, config: &Config) {
        for rule in RULES.iter().copied().flatten() {
            if self.all_sound(rule.reads)
                && let Some(finding) = (rule.check)(config)
            {
                self.fault(rule.key, finding, config);
            }
        }
        for (reads, misfits) in MISFITS {
            let found = if self.all_sound(reads) { misfits(config) } else { Vec::new() };
            found.into_iter().for_each(|(key, finding)| self.fault(&key, finding, config));
        }
    }

    /// Also a default can be at fault, and is then to be seen.
    fn fault(&mut self, key: &str, finding: Finding, config: &Config) {
        let value = self.source.value(key).cloned().or_else(|| config.flat().remove(key));
        self.problems.push(finding.about(key, value.as_ref(), self.source.origin(key)));
    }

    /// A key without effect is a problem if it was typed for this command.
    fn check_typed(&mut self, config: &Config) {
        for (key, _, because) in self.unused(config, Origin::is_command_line) {
            self.blame(key, Finding::new(format!("nothing uses it: {because}"), "leave it out"));
        }
    }

    /// In a recipe a key without effect is worth a notice, unless it only says what would be so anyway, as a resolved recipe
    /// does of every key.
    fn unused_in_recipe(&self, config: &Config) -> Vec<String> {
        let resolved = LazyCell::new(|| config.flat());
        let unused = self.unused(config, |origin| !origin.is_command_line()).into_iter();
        let meant = unused.filter(|(key, ..)| !self.is_default(key, resolved.get(*key)));
        meant.map(|(key, origin, because)| format!("{key} ({origin}) is not used: {because}")).collect()
    }

    /// Keys without effect that were given at such a place, and why they have none.
    fn unused(&self, config: &Config, at: impl Fn(&Origin) -> bool) -> Vec<(&'static str, Origin, &'static str)> {
        let look = |unused: &rules::Unused| {
            let origin =
                Some(self.source.origin(unused.key)).filter(|origin| *origin != Origin::Default && at(origin))?;
            let is_sound = self.all_sound(unused.reads) && self.all_sound(&[unused.key]);
            let because = if is_sound { (unused.because)(config) } else { None };
            Some((unused.key, origin, because?))
        };
        UNUSED.iter().copied().flatten().filter_map(look).collect()
    }

    /// Choices that have no effect with the other keys as they are. Of several that would, none is the one to blame.
    fn idle(&self, config: &Config) -> Vec<String> {
        let notice = |idle: &rules::Unused| {
            let because = (idle.because)(config).filter(|_| self.all_sound(idle.reads))?;
            let (value, origin) = (self.source.value(idle.key).map(problem::shown)?, self.source.origin(idle.key));
            Some(format!("{} = {value} ({origin}) moves nothing: {because}", idle.key))
        };
        IDLE.iter().copied().flatten().filter_map(notice).collect()
    }

    /// Whether the recipe would mean the same without the key, which has this value.
    fn is_default(&self, key: &str, value: Option<&Value>) -> bool {
        let rest = self.source.without(key);
        let mut without = RecipeChecker { source: &rest, broken: self.broken.clone(), problems: Vec::new() };
        without.config().is_some_and(|config| config.flat().get(key) == value)
    }

    /// Whether none of the keys, nor a part of one, nor what holds it, was found wrong.
    fn all_sound(&self, keys: &[&str]) -> bool {
        let touches = |broken: &String, key: &str| is_under(broken, key) || is_under(key, broken);
        !keys.iter().any(|key| self.broken.iter().any(|broken| touches(broken, key)))
    }

    fn blame(&mut self, key: &str, finding: Finding) {
        let (value, origin) = (self.source.value(key), self.source.origin(key));
        self.problems.push(finding.about(key, value, origin));
    }
}
