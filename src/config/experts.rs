//! What says who holds which expert, fitted to models that get another number of them.

use std::path::Path;

use super::load::read_recipe;
use super::problem::{Origin, Problems};
use super::{Config, Loaded, RecipeChecker, moved, source};
use crate::limits::common_divisor;
use crate::parallel::PerLayer;

const EXPERTS: &str = "moe.experts";
const EXPERT: &str = "parallel.expert";
const TABLE: &str = "parallel.expert_table";
const GROUPS: &str = "moe.schedule_groups";
const READS: &[&str] = &[EXPERTS, EXPERT, TABLE, GROUPS];

/// Reads a recipe that a run kept, for a model that gets another number of experts by `flag`. What of it says who holds
/// which expert is fitted to them, each with a notice. `ranks` go before those of the recipe.
///
/// # Errors
/// Everything that is wrong with the result.
pub fn load_with_experts(
    recipe: &Path,
    overrides: &[String],
    (experts, flag): (&PerLayer, &str),
    ranks: Option<usize>,
) -> Result<Loaded, Problems> {
    read_recipe(recipe, source::overrides_and_experts(overrides, ranks, experts, flag), moved::carry, None)
}

impl RecipeChecker<'_> {
    /// Degrees that do not divide the experts a command gives a model become their largest divisors that do. A table of
    /// other experts goes, and so do groups of other ranks. Returns a notice for each.
    pub(super) fn fit_experts(&self, config: &mut Config) -> Vec<String> {
        let (Origin::Flag(flag), Some(moe)) = (self.source.origin(EXPERTS), &mut config.moe) else { return Vec::new() };
        let is_fixed = |key: &str| self.source.origin(key).is_command_line();
        if !self.all_sound(READS) {
            return Vec::new();
        }
        let (parallel, mut notices) = (&mut config.parallel, Vec::new());
        let others = |table: &mut Vec<usize>| PerLayer::Same(table.len()) != moe.experts && !is_fixed(TABLE);
        let table_goes = parallel.expert_table.take_if(others).is_some();
        let fitting = parallel.expert.with(&moe.experts, common_divisor);
        let is_lowered = parallel.expert_table.is_none() && fitting != parallel.expert && !is_fixed(EXPERT);
        if is_lowered {
            let (wish, origin) = (&parallel.expert, self.source.origin(EXPERT));
            notices.push(format!("{EXPERT} = {wish} ({origin}) does not divide {flag}; {fitting} is used instead"));
            parallel.expert = fitting;
        }
        let groups_go = is_lowered && moe.schedule_groups.take_if(|_| !is_fixed(GROUPS)).is_some();
        for (key, _) in [(TABLE, table_goes), (GROUPS, groups_go)].into_iter().filter(|(_, goes)| *goes) {
            notices.push(format!("{key} ({}) is of other experts than {flag}; left out", self.source.origin(key)));
        }
        notices
    }
}
