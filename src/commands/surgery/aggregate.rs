//! `guildhall surgery aggregate`: checkpoints with experts become one with the experts of all.

use std::path::Path;

use super::super::{CommandFailure, print, say};
use super::{check_is_new, check_set, needs_more, on_one_rank, tell_next};
use crate::cli::AggregateArgs;
use crate::model::{Sizes, count};
use crate::parallel::PerLayer;
use crate::surgery::{Aggregation, GateFactors};
use crate::train::sizes;

pub(super) fn run(arguments: &AggregateArgs) -> Result<(), CommandFailure> {
    let AggregateArgs { checkpoints, output, overrides } = arguments;
    check_set(&overrides.set, "the new model has the experts of all checkpoints")?;
    check_is_new(output)?;
    let request = Aggregation::open(checkpoints, &overrides.set).map_err(CommandFailure::request)?;
    request.loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    check_memory(&request)?;
    let config = &request.loaded.config;
    let factors = on_one_rank(config, |rank, mesh| request.write(&rank.device, mesh, output))?;
    account(&request, &factors, output);
    print(&format!("{}\n", output.display()))
}

/// All models are held at once.
fn check_memory(request: &Aggregation) -> Result<(), CommandFailure> {
    let all = request.models.iter().map(|model| &model.config).chain([&request.loaded.config]);
    let all: Vec<Sizes> = all.map(sizes).collect();
    match needs_more(&all.iter().collect::<Vec<_>>()) {
        Some(lack) => Err(CommandFailure::Request(anyhow::anyhow!(
            "all models together need {lack}: aggregate fewer of them, or prune them before"
        ))),
        None => Ok(()),
    }
}

fn account(request: &Aggregation, factors: &[GateFactors], output: &Path) {
    let (config, mut experts) = (&request.loaded.config, PerLayer::Same(0));
    for model in &request.models {
        let count = model.config.moe.as_ref().map_or(PerLayer::Same(0), |moe| moe.experts.clone());
        let (folder, step) = (model.source.folder.display(), model.source.manifest.progress.step);
        let behind = experts.with(&count, |before, count| before + count);
        say(&format!("from     {folder}, of step {step}: experts {experts} to {}", behind.map(|all| all - 1)));
        experts = behind;
    }
    for GateFactors { layer, factors } in factors {
        let factors: Vec<String> = factors.iter().map(|factor| format!("{factor:.4}")).collect();
        say(&format!("gate     layer {layer}: rows times {}", factors.join(", ")));
    }
    let counts = count(&sizes(config));
    say(&format!("model    {} parameters, {} active per token", counts.total, counts.active));
    say("dropped  the optimizers' state and the steps: training begins at step 0 with a fresh AdamW");
    tell_next(output, config, "aggregated");
}
