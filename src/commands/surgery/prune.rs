//! `guildhall surgery prune`: a checkpoint keeps some of its experts.

use std::path::Path;

use super::super::evaluate::corpus;
use super::super::prepare::held_out_parts;
use super::super::trained::Trained;
use super::super::{CommandFailure, print, program, say, word};
use super::{check_is_new, check_set, needs_more, on_one_rank};
use crate::cli::{PruneArgs, PruneBy};
use crate::model::count;
use crate::surgery::{Pruning, drawn, largest};
use crate::train::{held_out_loads, sizes};

pub(super) fn run(arguments: &PruneArgs) -> Result<(), CommandFailure> {
    check(arguments)?;
    check_set(&arguments.overrides.set, "--keep says how many experts stay")?;
    check_is_new(&arguments.output)?;
    let request =
        Pruning::open(&arguments.run, &arguments.overrides.set, arguments.keep).map_err(CommandFailure::request)?;
    request.loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    check_scores(arguments.by, &request)?;
    check_memory(&request)?;
    let loads =
        if arguments.rows == Some(0) { None } else { Some(measured(arguments, &request.source.source.folder)?) };
    let scores = scores(arguments, &request, loads.as_deref())?;
    let kept: Vec<Vec<usize>> = scores.iter().map(|scores| largest(scores, arguments.keep)).collect();
    let config = &request.loaded.config;
    on_one_rank(config, |rank, mesh| request.write(&rank.device, mesh, &kept, &arguments.output))?;
    account(&request, &kept, loads.as_deref(), &arguments.output);
    print(&format!("{}\n", arguments.output.display()))
}

/// Options that contradict each other.
fn check(arguments: &PruneArgs) -> Result<(), CommandFailure> {
    let &PruneArgs { by, rows, seed, ranks, .. } = arguments;
    let wrong = if rows == Some(0) && by == PruneBy::Utilization {
        "--rows 0: there is no utilization without text; use 1 or more, or --by gate, which needs none"
    } else if rows == Some(0) && ranks.is_some() {
        "--ranks with --rows 0: nothing is measured that ranks could share; leave one of the two out"
    } else if seed.is_some() && by != PruneBy::Random {
        "--seed draws experts with --by random alone: leave one of the two out"
    } else {
        return Ok(());
    };
    Err(CommandFailure::Request(anyhow::anyhow!(wrong)))
}

/// Where all experts have equally many tokens, these say nothing.
fn check_scores(by: PruneBy, request: &Pruning) -> Result<(), CommandFailure> {
    let moe = request.before();
    if by == PruneBy::Utilization && moe.chosen_per_token().is_some() {
        let gate = moe.gate.kind().name();
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "--by utilization: with moe.gate = {gate:?} experts choose tokens, all equally many; use --by gate or random"
        )));
    }
    Ok(())
}

/// Both models are held at once.
fn check_memory(request: &Pruning) -> Result<(), CommandFailure> {
    match needs_more(&[&sizes(&request.source.config), &sizes(&request.loaded.config)]) {
        Some(lack) => Err(CommandFailure::Request(anyhow::anyhow!("both models need {lack}: use a larger machine"))),
        None => Ok(()),
    }
}

/// The routes of held-out text that chose each expert, by layer. Nothing is dropped meanwhile: later layers are to see
/// what experts make of all tokens.
fn measured(arguments: &PruneArgs, folder: &Path) -> Result<Vec<Vec<f64>>, CommandFailure> {
    let overrides = &arguments.overrides.set;
    let mut trained = Trained::open(folder, overrides, arguments.ranks)?;
    if let Some(moe) = trained.config.moe.as_mut().filter(|moe| moe.chosen_per_token().is_none()) {
        moe.capacity_factor = None;
    }
    let parts = held_out_parts(&corpus(&trained, !overrides.is_empty())?, &trained.config)?;
    let most = arguments.rows.unwrap_or(usize::MAX);
    let micro = trained.config.train.micro_batch.unwrap_or_else(|| trained.config.rows_per_step());
    let loads = trained.run(|model, mesh, rank| held_out_loads(model, &rank.device, mesh, &parts, (most, micro)))?;
    let count: usize = parts.iter().map(|part| part.rows.len().min(most)).sum();
    let of_tasks = match parts.iter().filter(|part| part.label.is_some()).count() {
        0 => String::new(),
        parts => format!(", {parts} parts of tasks"),
    };
    say(&format!("measured {count} rows of held-out text{of_tasks}"));
    Ok(loads)
}

/// A number for each expert of each layer; those with the largest stay.
fn scores(
    arguments: &PruneArgs,
    request: &Pruning,
    loads: Option<&[Vec<f64>]>,
) -> Result<Vec<Vec<f64>>, CommandFailure> {
    match arguments.by {
        PruneBy::Utilization => Ok(loads.expect("measured for this").to_vec()),
        PruneBy::Gate => on_one_rank(&request.source.config, |rank, mesh| request.gate_norms(&rank.device, mesh)),
        PruneBy::Random => {
            let seed = arguments.seed.unwrap_or(request.source.config.train.seed);
            Ok(drawn(seed, layers(request).len(), request.before().experts))
        }
    }
}

/// The layers that have experts.
fn layers(request: &Pruning) -> Vec<usize> {
    let moe = request.before();
    (0..request.source.config.model.layers).filter(|&layer| moe.layers.contains(layer)).collect()
}

fn account(request: &Pruning, kept: &[Vec<usize>], loads: Option<&[Vec<f64>]>, output: &Path) {
    let (config, source) = (&request.loaded.config, &request.source);
    let (folder, step) = (source.source.folder.display(), source.source.manifest.progress.step);
    let (before, keep) = (request.before().experts, kept[0].len());
    say(&format!("prune    {folder}, of step {step}: {keep} of {before} experts stay in each layer"));
    for (place, (layer, kept)) in layers(request).into_iter().zip(kept).enumerate() {
        let names: Vec<String> = kept.iter().map(ToString::to_string).collect();
        let share = loads.map(|loads| share(&loads[place], kept)).unwrap_or_default();
        say(&format!("kept     layer {layer}: experts {}{share}", names.join(", ")));
    }
    let (was, counts) = (count(&sizes(&source.config)), count(&sizes(config)));
    let (total, active) = (counts.total, counts.active);
    say(&format!("model    {total} of {} parameters, {active} active per token", was.total));
    say("dropped  the optimizer's state and the step: training begins at step 0 with a fresh AdamW");
    let recipe = word(output.join("config.toml").display());
    let init = word(format!("train.init={}", output.display()));
    let dir = word(format!("run.dir={}-pruned", config.run.dir.display()));
    say(&format!("next     {} train {recipe} --set {init} --set {dir}", program()));
}

/// The part of a layer's routes that went to some of its experts, in words.
fn share(loads: &[f64], kept: &[usize]) -> String {
    let (all, own) = (loads.iter().sum::<f64>(), kept.iter().map(|&expert| loads[expert]).sum::<f64>());
    if all > 0.0 { format!(", which had {:.1} % of its {all} routes", 100.0 * own / all) } else { String::new() }
}
