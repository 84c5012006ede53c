//! `guildhall surgery moefy`: a dense checkpoint becomes one with experts.

use std::path::{Path, PathBuf};

use super::super::{CommandFailure, print, say};
use super::{needs_more, on_one_rank, tell_next};
use crate::cli::MoefyArgs;
use crate::model::count;
use crate::moe;
use crate::surgery::{Error, Moefy};

pub(super) fn run(arguments: &MoefyArgs) -> Result<(), CommandFailure> {
    let flags = section(arguments)?;
    let keys: Vec<String> = flags.iter().map(|(set, _)| set.clone()).collect();
    let typed = |error| match error {
        Error::Config { folder, problems } => Error::Config { folder, problems: problems.of_flags(&flags) },
        error => error,
    };
    let request = Moefy::open(&arguments.checkpoint, &keys).map_err(|error| CommandFailure::request(typed(error)))?;
    let output = match &arguments.output {
        Some(output) => output.clone(),
        None => beside(&request.dense.source.folder).map_err(CommandFailure::request)?,
    };
    let seed = arguments.seed.unwrap_or(request.config.train.seed);
    check_memory(&request, seed)?;
    on_one_rank(&request.config, |rank, mesh| request.write(&rank.device, mesh, seed, &output))?;
    account(&request, seed, &output);
    print(&format!("{}\n", output.display()))
}

/// The arguments as keys of a recipe, each with what was typed.
fn section(arguments: &MoefyArgs) -> Result<Vec<(String, String)>, CommandFailure> {
    let MoefyArgs { experts, top_k, layers: which, .. } = arguments;
    let mut keys = vec![(format!("moe.experts={experts}"), format!("--experts {experts}"))];
    keys.extend(top_k.map(|k| (format!("moe.top_k={k}"), format!("--top-k {k}"))));
    keys.extend(arguments.divide.then(|| ("moe.equal_compute=true".to_owned(), "--divide".to_owned())));
    keys.push((format!("moe.layers={}", layers(which)?), format!("--layers {which}")));
    Ok(keys)
}

/// `all`, `every:2` or `list:1,3` as a recipe says it.
fn layers(text: &str) -> Result<String, CommandFailure> {
    let number = |text: &str| text.parse::<u32>().ok();
    let read = match text.split_once(':') {
        None => (text == "all").then(|| "\"all\"".to_owned()),
        Some(("every", n)) => number(n).map(|n| format!("{{ every = {n} }}")),
        Some(("list", list)) => {
            let numbers: Option<Vec<u32>> = list.split(',').map(number).collect();
            numbers.map(|numbers| format!("{{ list = {numbers:?} }}"))
        }
        Some(_) => None,
    };
    let refused = || CommandFailure::Request(anyhow::anyhow!("--layers {text}: use all, every:2 or list:1,3"));
    read.ok_or_else(refused)
}

/// The checkpoint's own folder, links followed, with `-moe` at the end.
fn beside(checkpoint: &Path) -> std::io::Result<PathBuf> {
    let mut name = checkpoint.canonicalize()?.into_os_string();
    name.push("-moe");
    Ok(name.into())
}

/// Both models are held at once, and the dense one is no larger.
fn check_memory(request: &Moefy, seed: u64) -> Result<(), CommandFailure> {
    let sizes = request.sizes(seed);
    match needs_more(&[&sizes, &sizes]) {
        Some(lack) => Err(CommandFailure::Request(anyhow::anyhow!(
            "both models need up to {lack}: use fewer --experts, or fewer --layers"
        ))),
        None => Ok(()),
    }
}

fn account(request: &Moefy, seed: u64, output: &Path) {
    let (config, sizes) = (&request.config, request.sizes(seed));
    let Some(moe) = &config.moe else { return };
    let (folder, step) = (request.dense.source.folder.display(), request.dense.source.manifest.progress.step);
    say(&format!("moefy    {folder}, dense, of step {step}"));
    say(&format!("experts  {}", experts(moe, sizes.d_ff(), &layers_of(config.model.layers, moe))));
    let counts = count(&sizes);
    say(&format!("model    {} parameters, {} active per token", counts.total, counts.active));
    say("dropped  the optimizer's state and the step: training begins at step 0 with a fresh AdamW");
    tell_next(output, config, "moe");
}

fn layers_of(all: usize, moe: &moe::Config) -> String {
    let layers: Vec<String> = (0..all).filter(|&i| moe.layers.contains(i)).map(|i| i.to_string()).collect();
    layers.join(", ")
}

fn experts(moe: &moe::Config, d_ff: usize, layers: &str) -> String {
    let moe::Config { experts, top_k, .. } = moe;
    if moe.equal_compute {
        let width = moe.expert_width(d_ff);
        format!(
            "{experts} of width {width} = {d_ff} / {top_k} in layers {layers}, all with new values, for a part of a \
             feed-forward computes something else: train before use"
        )
    } else {
        format!(
            "{experts} copies of the feed-forward in layers {layers}, top-{top_k}, behind new routers: the model \
             computes what it did"
        )
    }
}
