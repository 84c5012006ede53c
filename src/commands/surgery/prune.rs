//! `guildhall surgery prune`: a checkpoint keeps some of its experts.

use std::path::Path;

use super::super::evaluate::corpus;
use super::super::prepare::held_out_parts;
use super::super::trained::Trained;
use super::super::{CommandFailure, print, say};
use super::{check_is_new, check_set, needs_more, on_one_rank, tell_next};
use crate::cli::{PruneArgs, PruneBy};
use crate::config::{Config, Loaded};
use crate::model::count;
use crate::parallel::PerLayer;
use crate::surgery::{ExpertsToKeep, Pruning, drawn, multiples_of_means, shares_of_layers};
use crate::train::{held_out_loads, sizes};

pub(super) fn run(arguments: &PruneArgs) -> Result<(), CommandFailure> {
    check(arguments)?;
    let set = &arguments.overrides.set;
    check_set(set, "--keep says how many experts stay")?;
    check_is_new(&arguments.output)?;
    // Alone, ranks are those that count; beside keys of the mesh they are a part of it.
    let ranks = arguments.ranks.filter(|_| set.iter().any(|set| set.trim_start().starts_with("parallel.")));
    let wanted = ExpertsToKeep { experts: arguments.keep, is_global: arguments.global };
    let request = Pruning::open(&arguments.run, set, ranks, wanted).map_err(CommandFailure::request)?;
    check_scores(arguments.by, &request)?;
    // What all layers keep alike is known, and checked, before anything is measured.
    let known = (!wanted.is_global).then(|| recipe(&request, &PerLayer::Same(wanted.experts))).transpose()?;
    let loads =
        if arguments.rows == Some(0) { None } else { Some(measured(arguments, &request.source.source.folder)?) };
    let kept = request.kept(&scores(arguments, &request, loads.as_deref())?);
    let config = match known {
        Some(config) => config,
        None => recipe(&request, &PerLayer::of_each(kept.iter().map(Vec::len).collect()))?,
    };
    let to_write = (&kept[..], &config);
    on_one_rank(&config, |rank, mesh| request.write(&rank.device, mesh, to_write, &arguments.output))?;
    account(&request, to_write, loads.as_deref(), &arguments.output);
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

/// The new model's configuration, with what is to be said of it. Both models are held at once.
fn recipe(request: &Pruning, experts: &PerLayer) -> Result<Config, CommandFailure> {
    let Loaded { config, notices } = request.recipe(experts).map_err(CommandFailure::request)?;
    notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    match needs_more(&[&sizes(&request.source.config), &sizes(&config)]) {
        Some(lack) => Err(CommandFailure::Request(anyhow::anyhow!("both models need {lack}: use a larger machine"))),
        None => Ok(config),
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
    let parts = held_out_parts(&corpus(&trained, !overrides.is_empty())?, &trained.config, &say)?;
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

/// A number for each expert of each layer; those with the largest stay. Those that are held against others of other layers
/// are made comparable.
fn scores(
    arguments: &PruneArgs,
    request: &Pruning,
    loads: Option<&[Vec<f64>]>,
) -> Result<Vec<Vec<f64>>, CommandFailure> {
    let config = &request.source.config;
    let is_global = request.wanted.is_global;
    match arguments.by {
        PruneBy::Utilization => {
            let loads = loads.expect("measured for this");
            Ok(if is_global { shares_of_layers(loads) } else { loads.to_vec() })
        }
        PruneBy::Gate => {
            let norms = on_one_rank(config, |rank, mesh| request.gate_norms(&rank.device, mesh))?;
            Ok(if is_global { multiples_of_means(&norms) } else { norms })
        }
        PruneBy::Random => {
            let layers = request.before().of_layers(config.model.layers);
            let experts: Vec<usize> = layers.iter().map(|(_, moe)| moe.experts).collect();
            Ok(drawn(arguments.seed.unwrap_or(config.train.seed), &experts))
        }
    }
}

fn account(request: &Pruning, (kept, config): (&[Vec<usize>], &Config), loads: Option<&[Vec<f64>]>, output: &Path) {
    let (source, before) = (&request.source, request.before());
    let (folder, step) = (source.source.folder.display(), source.source.manifest.progress.step);
    let layers = before.of_layers(source.config.model.layers);
    let stay = match request.wanted {
        ExpertsToKeep { experts, is_global: false } => {
            format!("{experts} of {} experts stay in each layer", before.experts)
        }
        ExpertsToKeep { is_global: true, .. } => {
            let all: usize = layers.iter().map(|(_, moe)| moe.experts).sum();
            let (stay, least) = (kept.iter().map(Vec::len).sum::<usize>(), before.top_k);
            format!("{stay} of {all} experts stay, {least} or more in each layer")
        }
    };
    say(&format!("prune    {folder}, of step {step}: {stay}"));
    for (place, ((layer, _), kept)) in layers.into_iter().zip(kept).enumerate() {
        let names: Vec<String> = kept.iter().map(ToString::to_string).collect();
        let share = loads.map(|loads| share(&loads[place], kept)).unwrap_or_default();
        say(&format!("kept     layer {layer}: experts {}{share}", names.join(", ")));
    }
    let (was, counts) = (count(&sizes(&source.config)), count(&sizes(config)));
    let (total, active) = (counts.total, counts.active);
    say(&format!("model    {total} of {} parameters, {active} active per token", was.total));
    say("dropped  the optimizer's state and the step: training begins at step 0 with a fresh AdamW");
    tell_next(output, config, "pruned");
}

/// The part of a layer's routes that went to some of its experts, in words.
fn share(loads: &[f64], kept: &[usize]) -> String {
    let (all, own) = (loads.iter().sum::<f64>(), kept.iter().map(|&expert| loads[expert]).sum::<f64>());
    if all > 0.0 { format!(", which had {:.1} % of its {all} routes", 100.0 * own / all) } else { String::new() }
}
