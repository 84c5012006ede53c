//! Wishes that cannot be granted to the letter and harm nobody: what is done instead is told.

use super::Config;
use super::problem::Origin;

/// Keys that are looked at; one of them that is wrong by itself has its own problem.
pub(super) const READS: [&str; 5] =
    ["train.steps", "train.warmup_steps", "train.micro_batch", "train.batch_tokens", "model.seq"];

/// Bends what asks for more than there is, and says so; `origin` tells where a key was given.
pub(super) fn bend(config: &mut Config, origin: impl Fn(&str) -> Origin) -> Vec<String> {
    [long_warm_up(config, &origin), large_micro_batch(config, &origin)].into_iter().flatten().collect()
}

/// Legal, for a short try of a recipe: the rate rises as it would in the whole run.
fn long_warm_up(config: &Config, origin: &impl Fn(&str) -> Origin) -> Option<String> {
    let (warm_up, steps, origin) = (config.train.warmup_steps, config.train.steps, origin("train.warmup_steps"));
    (warm_up > steps).then(|| {
        format!(
            "train.warmup_steps = {warm_up} ({origin}) is longer than train.steps = {steps}: the learning rate ends at \
             {steps}/{warm_up} of train.lr, before its peak"
        )
    })
}

/// A step of fewer rows is one micro-batch.
fn large_micro_batch(config: &mut Config, origin: &impl Fn(&str) -> Origin) -> Option<String> {
    let (rows, origin) = (config.rows_per_step(), origin("train.micro_batch"));
    let asked = config.train.micro_batch.filter(|&asked| asked > rows && rows > 0)?;
    config.train.micro_batch = Some(rows);
    Some(format!("train.micro_batch = {asked} ({origin}) is more than the {rows} rows of a step: all of them are one"))
}
