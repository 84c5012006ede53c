//! Reading a recipe, whole: from a file, one that a run kept, or a text.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::problem::{Problem, Problems};
use super::rejection::Wrong;
use super::source::{self, Override, RecipeSource};
use super::{Config, Loaded, RecipeChecker, condensation, families, gates, lora_rules, moved, read, wishes, zero};

/// Reads `recipe`, puts `overrides` (`key=value`, later ones win) and `ranks` over it, and reports
/// everything that is wrong with the result at once.
pub fn load(recipe: &Path, overrides: &[String], ranks: Option<usize>) -> Result<Loaded, Problems> {
    load_launched(recipe, overrides, ranks, None)
}

/// The same where a launcher has started so many `processes`: as many ranks, if nothing else says how many or
/// `train.elastic` is set.
pub fn load_launched(
    recipe: &Path,
    overrides: &[String],
    ranks: Option<usize>,
    processes: Option<usize>,
) -> Result<Loaded, Problems> {
    read_recipe(recipe, source::overrides(overrides, ranks), |_| {}, processes)
}

/// The same for a text that is in no file: messages call it `place`.
pub fn load_text(place: &Path, text: String) -> Result<Loaded, Problems> {
    finish_recipe(RecipeSource::parse(place, text), place, (Vec::new(), Vec::new()), |_| {}, None)
}

/// The same for a recipe that a run resolved and kept, whatever version of this program wrote it.
pub fn load_kept(recipe: &Path, overrides: &[String], ranks: Option<usize>) -> Result<Loaded, Problems> {
    read_recipe(recipe, source::overrides(overrides, ranks), moved::carry, None)
}

pub(super) fn read_recipe(
    recipe: &Path,
    given: (Vec<Override>, Vec<Problem>),
    renew: impl FnOnce(&mut RecipeSource),
    processes: Option<usize>,
) -> Result<Loaded, Problems> {
    finish_recipe(RecipeSource::read(recipe, "a recipe"), recipe, given, renew, processes)
}

fn finish_recipe(
    read: Result<RecipeSource, Vec<Problem>>,
    recipe: &Path,
    (given, mut problems): (Vec<Override>, Vec<Problem>),
    renew: impl FnOnce(&mut RecipeSource),
    processes: Option<usize>,
) -> Result<Loaded, Problems> {
    let mut source = match read {
        Ok(source) => source,
        Err(more) => {
            problems.extend(more);
            return Err(Problems::new(problems));
        }
    };
    renew(&mut source);
    let mut notices = put_over(&mut source, given, processes, recipe);
    let (config, checker, bent) = resolve(&source, problems)?;
    notices.extend(bent);
    notices.extend(checker.unused_in_recipe(&config));
    notices.extend(gates::remark(&config).filter(|_| checker.all_sound(gates::REMARK_READS)));
    notices.extend(condensation::remark(&config).filter(|_| checker.all_sound(condensation::REMARK_READS)));
    notices.extend(zero::remark(&config));
    notices.extend(lora_rules::remark(&config));
    notices.extend(checker.idle(&config));
    Ok(Loaded { config, notices })
}

/// A recipe that is read once, to be resolved with one set of overrides after the other.
#[derive(Debug)]
pub struct BaseRecipe {
    source: RecipeSource,
    place: PathBuf,
}

impl BaseRecipe {
    /// Reads a text that messages call `place`.
    ///
    /// # Errors
    /// What is no TOML.
    pub fn parse(place: &Path, text: String) -> Result<BaseRecipe, Problems> {
        let source = RecipeSource::parse(place, text).map_err(Problems::new)?;
        Ok(BaseRecipe { source, place: place.to_owned() })
    }

    /// The recipe with `overrides` over it, without notices: those cost more than all else.
    ///
    /// # Errors
    /// As of [`load`].
    pub fn with(&self, overrides: &[String]) -> Result<Config, Problems> {
        let (given, problems) = source::overrides(overrides, None);
        let mut source = self.source.clone();
        put_over(&mut source, given, None, &self.place);
        Ok(resolve(&source, problems)?.0)
    }
}

/// Puts what the command line and the launcher say over a recipe, and completes it; returns notices.
fn put_over(source: &mut RecipeSource, given: Vec<Override>, processes: Option<usize>, recipe: &Path) -> Vec<String> {
    let notices = given.into_iter().flat_map(|given| source.apply(given)).collect();
    processes.iter().for_each(|&processes| source.launched(processes));
    complete(source, recipe);
    notices
}

/// What a source says, with notices of what was bent to fit its ranks.
fn resolve(
    source: &RecipeSource,
    mut problems: Vec<Problem>,
) -> Result<(Config, RecipeChecker<'_>, Vec<String>), Problems> {
    let mut checker = RecipeChecker::new(source);
    let found = checker.config().map(|mut config| {
        let mut notices = checker.fit_mesh(&mut config);
        notices.extend(checker.fit_experts(&mut config));
        if checker.all_sound(&wishes::READS) {
            notices.extend(wishes::bend(&mut config, |key| source.origin(key)));
        }
        checker.check_rules(&config);
        checker.check_typed(&config);
        (config, notices)
    });
    problems.append(&mut checker.problems);
    match found {
        Some((config, notices)) if problems.is_empty() => Ok((config, checker, notices)),
        _ => Err(Problems::new(problems)),
    }
}

/// Adds the defaults that depend on the recipe's name and on other keys' presence, and the sections that may be left out because
/// all their keys have defaults; of others, it is the keys that are then reported as missing.
fn complete(source: &mut RecipeSource, recipe: &Path) {
    let name = recipe.file_stem().unwrap_or_default().to_string_lossy();
    source.set_default("run", "dir", format!("runs/{name}"));
    families::add_layers(source);
    let nothing = read::read::<Config>("", &Value::Table(Table::new()), BTreeSet::new());
    for fault in nothing.faults {
        if let (Wrong::Missing(section), None) = (fault.wrong, fault.path.split_once('.')) {
            source.table.entry(section).or_insert(Value::Table(Table::new()));
        }
    }
}
