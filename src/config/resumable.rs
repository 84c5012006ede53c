//! What keeps a run from being continued with another recipe.

use super::Config;
use super::source::is_under;

/// What a resumed run may change: how long and where it runs, in what types, and what it leaves behind. Of these only
/// `train.steps` reaches the numbers, through schedules that end with it, the mesh, through the order of sums, and types,
/// through roundings. A section stands for all its keys.
const RESUMABLE: &[&str] = &[
    "run.dir",
    "train.steps",
    "train.init",
    "train.checkpoint_every",
    "train.checkpoint_file_mib",
    "train.checkpoint_async",
    "train.checkpoint_timeout_s",
    "train.keep",
    "train.check_replicas_every",
    "train.elastic",
    "train.dtype",
    "train.gradient_dtype",
    "train.eval_every",
    "train.eval_rows",
    "parallel",
    "memory",
    "metrics",
    "moe.schedule",
    "moe.schedule_groups",
    "moe.shadowing",
    "data.cache",
    "moe.dead_after",
    "moe.pairs_every",
    "moe.record",
];

/// What keeps a run saved under one configuration from being resumed under another, a sentence a key.
pub fn differences(saved: &Config, now: &Config) -> Vec<String> {
    let is_fixed = |key: &str| !RESUMABLE.iter().any(|free| is_under(key, free));
    let unlike = saved.unlike(now).into_iter().filter(|[key, ..]| is_fixed(key));
    unlike.map(|[key, was, is]| format!("{key}: was {was}, now {is}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;

    #[test]
    fn what_may_change_on_resume_exists() {
        let paths = read::paths::<Config>();
        for key in RESUMABLE {
            assert!(paths.contains_key(*key), "{key}");
        }
    }
}
