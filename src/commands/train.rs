//! `guildhall train`: reads the recipe, says what it will do, does it, and leaves an account of it.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use guildhall_tensor::Cause;

use super::blocking;
use super::elastic;
use super::first_and_last::FirstAndLast;
use super::fit;
use super::forecast::Forecast;
use super::nodes;
use super::prepare::{found, held_out_parts, prepare, training_rows};
use super::restarts;
use super::{CommandFailure, bytes, program, say, short, word};
use crate::cli::TrainArgs;
use crate::config::{Config, Loaded};
use crate::data::tasks::PartLabel;
use crate::data::{Split, Tokenizer};
use crate::launch::{Joined, Process, RunFailure, when_asked_to_stop};
use crate::memory::{self, RecomputeMode, RecomputedOp};
use crate::metrics::{self, Status, Summary, median_tokens_per_s, peak_rss_mb};
use crate::moe::Routings;
use crate::parallel::{Migrate, PerLayer};
use crate::train::{self, Begun, Data, Job, Outcome, StopKind};
use crate::{checkpoint, report};

pub(super) fn run(arguments: TrainArgs) -> Result<(), CommandFailure> {
    if let Some(restarts) = arguments.restarts {
        return restarts::run(arguments, restarts);
    }
    restarts::look_after(arguments.started_by)?;
    let loaded = elastic::load(&arguments, &[])?;
    fit::here(&loaded.config)?;
    let mut joined = Joined::of(&loaded.config.parallel, super::give_up)?;
    let fitted = elastic::fitted(&joined.process, loaded, &arguments);
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    let handle = move || flag.store(true, Ordering::Relaxed);
    let listen = || when_asked_to_stop(handle).map_err(CommandFailure::request);
    let manner = Manner { resume: arguments.resume, is_quiet: false, interrupted: &interrupted };
    let ended = fitted.and_then(|loaded| conduct(&mut joined.process, loaded, manner, listen));
    joined.end(ended)
}

type RunEnd = Result<Outcome, RunFailure<StopKind>>;

/// How a run is conducted.
pub struct Manner<'a> {
    /// From the newest checkpoint, if there is one.
    pub resume: bool,
    /// Nothing is said to the user.
    pub is_quiet: bool,
    /// Set in any process, it stops all.
    pub interrupted: &'a AtomicBool,
}

/// What each process of a run does. The one that leads is the first everywhere, and alone speaks to the user and accounts
/// for the run; `listen` is called when the run can be interrupted.
pub fn conduct(
    process: &mut Process,
    loaded: Loaded,
    Manner { resume, is_quiet, interrupted }: Manner,
    listen: impl FnOnce() -> Result<(), CommandFailure>,
) -> Result<(), CommandFailure> {
    let leads = process.leads();
    let speaks = leads && !is_quiet;
    let say = |text: &str| {
        if speaks {
            say(text)
        }
    };
    process.same_lines("recipes", &loaded.config.to_toml())?;
    process.wait_for_disks(Duration::from_secs(loaded.config.train.checkpoint_timeout_s), super::give_up);
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let shared = Config { parallel: process.with_threads(&loaded.config.parallel), ..loaded.config.clone() };
    let plan = process.agree(|| fit::planned(&shared, process.neighbours()))?;
    // The folder first: that it is in use should not take the preparation of a corpus to find out.
    let job = process.agree(|| Job::open(loaded.config, resume, leads, &say).map_err(CommandFailure::request))?;
    process.same(&format!("contents of run.dir = {}", job.config.run.dir.display()), &job.mark)?;
    process.same_lines("states to start from (--resume, checkpoints, train.init)", &job.origin())?;
    let data = process.agree(|| open_data(&job.config, speaks, &say))?;
    let contents = Split::ALL.map(|split| data.corpus.split(split).content());
    process.same("training data", &contents.join(" "))?;
    process.agree(|| check_data(&job, &data))?;
    let content = data.corpus.split(Split::Train).content();
    let (routings, anew) = process.agree(|| train::routings(&job, content).map_err(CommandFailure::request))?;
    process.agree(|| fit::offload_folder(&job.config))?;
    let blocks = blocking::divide_products(process, shared.parallel.backend, plan.flop_of_rank(&job.config), is_quiet)?;
    let begin = || if leads { job.begin() } else { Ok(None) };
    let notice = process.agree(|| begin().map_err(CommandFailure::request))?;
    if speaks {
        let notices = nodes::notices(&job.config, process.nodes(), process.path());
        notices.iter().for_each(|notice| say(&format!("note: {notice}")));
        notice.iter().for_each(|notice| say(notice));
        say_plan(&plan, &job, process);
        blocks.iter().for_each(|found| say(&format!("products {}", found.told())));
        say_routings(&job.config, &routings);
        anew.iter().for_each(|anew| say(&format!("note: {anew}")));
    }
    process.agree(listen)?;
    let result = train::train(process, Begun { job: &job, data: &data, routings, interrupted, is_quiet });
    let example = data.components.iter().find(|label| label.from != label.to);
    let account = || if leads { account(&job, &plan, &result) } else { Ok(None) };
    // Processes that leave together wait for each other: for the account, too, before that.
    let accounted = if result.is_ok() { process.agree(account) } else { account() };
    end(&job, &plan, result, accounted.map(|summary| summary.filter(|_| speaks)), example)
}

/// Says how a run has ended, in what `accounted` for it.
fn end(
    job: &Job,
    plan: &Forecast,
    result: RunEnd,
    accounted: Result<Option<Summary>, CommandFailure>,
    example: Option<&PartLabel>,
) -> Result<(), CommandFailure> {
    match result {
        Ok(outcome) => {
            if let Some(summary) = accounted? {
                say_saved(&summary, &job.config);
                say_end(&job.config, &outcome, example);
            }
            Ok(())
        }
        Err(failure) if failure.kind == Some(StopKind::Request) => {
            Err(CommandFailure::Request(anyhow::anyhow!("{failure}")))
        }
        Err(failure) => {
            let advice = advice(&job.config, plan, &failure);
            // What ended the run may also be in the way of its account; it is the one to tell first.
            let incomplete = match accounted {
                Err(CommandFailure::Run(error)) => format!("\n  the run's account is not complete: {error}"),
                _ => String::new(),
            };
            Err(CommandFailure::Run(anyhow::anyhow!("{failure}{advice}{incomplete}")))
        }
    }
}

/// How to go on after a failure that the run's own numbers did not cause.
fn advice(config: &Config, plan: &Forecast, failure: &RunFailure<StopKind>) -> String {
    match failure.kind {
        Some(StopKind::Budget { limit, peak }) => {
            let remedy = plan.remedy(config, limit, peak).map_or(String::new(), |remedy| format!("\n  {remedy}"));
            let reached = checkpoint::newest(&config.run.dir).ok().flatten();
            let reached = reached.map(|folder| format!("\n  with --resume it continues from {}", folder.display()));
            return remedy + &reached.unwrap_or_default();
        }
        Some(StopKind::Numbers) => return String::new(),
        _ => {}
    }
    match checkpoint::newest(&config.run.dir) {
        Ok(Some(folder)) => format!("\n  once that is mended, --resume continues from {}", folder.display()),
        Err(error) => format!("\n  {error}: once that is mended too, --resume continues from what is there"),
        Ok(None) => "\n  no checkpoint had been written: once that is mended, start again".to_owned(),
    }
}

fn open_data(config: &Config, speaks: bool, tell: &dyn Fn(&str)) -> Result<Data, CommandFailure> {
    let corpus = if speaks { prepare(config)? } else { found(config)? };
    let (train, components) = training_rows(&corpus, config, tell)?;
    let held_out = match config.train.eval_every {
        0 => Vec::new(),
        _ => held_out_parts(&corpus, config, tell)?,
    };
    Ok(Data { corpus, train, components, held_out })
}

/// A run continues in the order of its data; other data would be another run.
fn check_data(job: &Job, data: &Data) -> Result<(), CommandFailure> {
    let source = match &job.start {
        train::Start::Fresh => return Ok(()),
        train::Start::Weights(source) => return check_vocabulary(source, data),
        train::Start::From(source) => source,
    };
    if source.manifest.data_fingerprint == data.corpus.split(Split::Train).content() {
        return Ok(());
    }
    Err(CommandFailure::Request(anyhow::anyhow!(
        "{} was trained on data {}, the recipe's sources now give {}: restore them, or start anew without --resume",
        source.folder.display(),
        source.manifest.data_fingerprint,
        data.corpus.split(Split::Train).content()
    )))
}

/// Weights are of no use where numbers stand for other words.
fn check_vocabulary(source: &checkpoint::OpenCheckpoint, data: &Data) -> Result<(), CommandFailure> {
    let path = source.folder.join("tokenizer.json");
    let theirs = fs::read_to_string(&path)
        .map_err(|error| CommandFailure::Request(anyhow::anyhow!("could not read {}: {error}", path.display())))?;
    let own = &data.corpus.tokenizer;
    let json = own.to_json().map_err(CommandFailure::request)?;
    // The same vocabulary may be written otherwise.
    let same = || Some(Tokenizer::open(&path, Some(&own.end_of_text_name())).ok()?.to_json().ok()? == json);
    if theirs == json || same() == Some(true) {
        return Ok(());
    }
    Err(CommandFailure::Request(anyhow::anyhow!(
        "the vocabulary of train.init differs from the corpus's: set data.tokenizer = \"{}\"",
        path.display()
    )))
}

/// What will be done, before it is.
fn say_plan(plan: &Forecast, job: &Job, process: &Process) {
    let (config, model, nodes) = (&job.config, &job.config.model, process.nodes());
    let experts = match &config.moe {
        Some(moe) => format!(", {} experts, top-{}", moe.experts, moe.top_k),
        None => String::new(),
    };
    say(&format!(
        "model    {} parameters, {} active per token: {} layers of {}{experts}",
        short(plan.counts.total),
        short(plan.counts.active),
        model.layers,
        model.d_model,
    ));
    plan.trained(config).iter().for_each(|trained| say(&format!("trained  {trained}")));
    if let train::Start::Weights(source) = &job.start {
        say(&format!("init     the weights of {}, a fresh optimizer", source.folder.display()));
    }
    say(&format!("mesh     {}{}", mesh(config), nodes::header(config, nodes) + &nodes::path(config, process.path())));
    nodes::links(config).iter().for_each(|link| say(&format!("link     {link}")));
    let causes = Cause::ALL.iter().map(|&cause| (cause.name(), plan.cost.at_peak.of(cause))).filter(|(_, n)| *n > 0);
    let causes: Vec<String> = causes.map(|(name, n)| format!("{name} {}", bytes(n))).collect();
    let (even, skewed) = (bytes(plan.predicted_bytes), bytes(plan.skewed_bytes));
    let skewed = match fit::told(&plan.task.skew()) {
        Some(told) => format!("even {even}, skewed {skewed} ({told})"),
        None => even,
    };
    say(&format!("memory   {skewed} predicted: {} x ({})", config.parallel.ranks, causes.join(" + ")));
    state(config, plan.elsewhere_bytes).iter().for_each(|state| say(&format!("state    {state}")));
    again(&config.memory).iter().for_each(|again| say(&format!("again    {again}")));
    say(&format!("run      {}: {}", config.run.dir.display(), span(job)));
}

/// How the optimizer's state is kept and updated, where it is not simply there.
fn state(config: &Config, elsewhere: u64) -> Option<String> {
    let (memory, zero) = (&config.memory, config.parallel.zero);
    let shares = (zero > 0).then(|| format!("in shares (ZeRO {zero})"));
    let place = match (memory.offload, &memory.offload_dir) {
        (memory::Offload::None, _) => None,
        (memory::Offload::Host, _) => Some(format!("{} in host memory", bytes(elsewhere))),
        (memory::Offload::File, folder) => {
            folder.as_ref().map(|folder| format!("{} in files in {}", bytes(elsewhere), folder.display()))
        }
    };
    let tiles = memory.tile.map(|tile| format!("updated {tile} elements at a time"));
    let said: Vec<String> = shares.into_iter().chain(place).chain(tiles).collect();
    (!said.is_empty()).then(|| said.join(", "))
}

/// What backward makes again.
fn again(memory: &memory::Config) -> Option<String> {
    let operations = memory.recompute_operations.as_deref().unwrap_or(&RecomputedOp::ALL);
    Some(match (memory.recompute, memory.keep_communication) {
        (RecomputeMode::None, _) => return None,
        (RecomputeMode::Block, true) => "every block, but for what came from other ranks".to_owned(),
        (RecomputeMode::Block, false) => "every block, with what travels between ranks".to_owned(),
        (RecomputeMode::Operations, _) => {
            operations.iter().map(|operation| operation.name()).collect::<Vec<_>>().join(", ")
        }
    })
}

fn mesh(config: &Config) -> String {
    let (ranks, degrees, shape) = (config.parallel.ranks, &config.parallel.expert, config.parallel.shape());
    let of_layers = |f: &dyn Fn(usize) -> usize| degrees.map(f).to_string();
    let held = |all: &PerLayer| match shape.expert {
        1 => format!("all {all}"),
        _ => format!("{} of {all}", all.with(degrees, |all, expert| all / expert)),
    };
    let experts = config.moe.as_ref().map(|moe| &moe.experts);
    if ranks == 1 {
        return "1 rank".to_owned();
    }
    if shape.tensor == 1 {
        let experts = experts.map_or(String::new(), |all| format!(" and {} experts", held(all)));
        return format!("{ranks} ranks, each with its own rows{experts}");
    }
    let whole_or_sliced = if shape.expert_tensor == 1 { "" } else { "slices of " };
    let experts = experts.map_or(String::new(), |all| {
        format!(
            "; experts {} slices x {degrees} expert x {} data, {whole_or_sliced}{} a rank",
            shape.expert_tensor,
            of_layers(&|expert| shape.at(expert).expert_data()),
            held(all)
        )
    });
    format!("{ranks} ranks = {} tensor x {} data{experts}", shape.tensor, ranks / shape.tensor)
}

fn span(job: &Job) -> String {
    let (done, train) = (job.steps_done(), &job.config.train);
    match done == train.steps {
        true => format!("all {done} steps are done already"),
        false => format!("steps {} to {}, {} tokens each", done + 1, train.steps, train.batch_tokens),
    }
}

/// Writes summary.json and report.html, for a failed run too.
fn account(job: &Job, plan: &Forecast, result: &RunEnd) -> Result<Option<Summary>, CommandFailure> {
    let run = &job.config.run.dir;
    let has_steps = run.join(metrics::METRICS_FILE).exists();
    if matches!(result, Err(failure) if failure.kind == Some(StopKind::Request) || !has_steps) {
        return Ok(None);
    }
    let summary = summary(job, plan, result.as_ref().ok()).map_err(CommandFailure::run)?;
    summary.write(run).map_err(CommandFailure::run)?;
    report::render(run, None).map_err(CommandFailure::run)?;
    Ok(Some(summary))
}

fn summary(job: &Job, plan: &Forecast, outcome: Option<&Outcome>) -> Result<Summary, metrics::Error> {
    let config = &job.config;
    let mut losses = FirstAndLast::default();
    for record in metrics::records(&config.run.dir.join(metrics::METRICS_FILE))? {
        losses.push(&record?);
    }
    let mut summary = Summary {
        status: outcome.map_or(Status::Failed, |outcome| outcome.status),
        steps: losses.steps,
        loss_first: losses.first,
        loss_last: losses.last,
        eval_loss: losses.eval,
        eval_tasks: losses.eval_tasks,
        tokens_per_s: median_tokens_per_s(&losses.rates),
        seconds: losses.seconds,
        peak_bytes: Default::default(),
        peak_bytes_by_rank: Vec::new(),
        predicted_peak_bytes: plan.predicted_bytes,
        predicted_skewed_bytes: plan.skewed_bytes,
        imbalance: outcome.filter(|_| config.moe.is_some()).map(|outcome| outcome.imbalance),
        peak_rss_mb: peak_rss_mb(),
        params_total: plan.counts.total,
        params_active: plan.counts.active,
        ranks: config.parallel.ranks,
        expert: config.parallel.expert.largest(),
        expert_by_layer: match config.parallel.expert.list() {
            Some(list) if config.parallel.shapes().len() > 1 => list.to_vec(),
            _ => Vec::new(),
        },
        nodes: outcome.map_or_else(Vec::new, |outcome| outcome.nodes.clone()),
        all_to_all: outcome.map_or_else(Default::default, |outcome| outcome.ways.clone()),
        traffic: Default::default(),
        traffic_by_group: Default::default(),
        shadowed: losses.shadowed,
        condensed: losses.condensed.map(|[all, travelling]| metrics::CondensedSummary::new(all, travelling)),
        migrated: losses.migrated,
        offload: outcome.and_then(|outcome| outcome.offload),
        routes: losses.routes,
        routes_dropped: losses.dropped,
        waiting_s: Vec::new(),
        rows_sent: Vec::new(),
        dead_experts: Vec::new(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("GUILDHALL_COMMIT").map(str::to_owned),
    };
    if let Some(outcome) = outcome {
        if outcome.eval_loss.is_some() {
            (summary.eval_loss, summary.eval_tasks) = (outcome.eval_loss, outcome.eval_tasks.clone());
        }
        if !outcome.rates.is_empty() {
            summary.tokens_per_s = median_tokens_per_s(&outcome.rates);
        }
        for (cause, bytes) in outcome.peak_bytes.iter().flatten() {
            *summary.peak_bytes.entry(cause.clone()).or_default() += bytes;
        }
        summary.peak_bytes_by_rank = outcome.peak_bytes.clone();
        summary.dead_experts = outcome.dead_experts.clone();
        summary.waiting_s = outcome.waiting_s.clone();
        summary.rows_sent = outcome.rows_sent.clone();
        for ((group, kind), traffic) in &outcome.traffic {
            let sum = summary.traffic.entry(kind.clone()).or_default();
            sum.calls += traffic.calls;
            sum.messages += traffic.messages;
            sum.bytes += traffic.bytes;
            summary.traffic_by_group.entry(group.clone()).or_default().insert(kind.clone(), *traffic);
        }
    }
    Ok(summary)
}

fn say_routings(config: &Config, routings: &Routings) {
    let Some(moe) = &config.moe else { return };
    if let (Some(path), Some(_)) = (&moe.replay, &routings.replay) {
        say(&format!("routing  as recorded in {}", path.display()));
    }
    if let Some(visits) = &routings.replay_visits {
        say(&format!("shadows  as recorded in {}", visits.path().display()));
    }
    if let Some(hosts) = &routings.replay_hosts {
        say(&format!("hosts    as recorded in {}", hosts.path().display()));
    }
    if let Some(clusters) = &routings.replay_clusters {
        say(&format!("clusters as recorded in {}", clusters.path().display()));
    }
    if let (Some(path), Some(recording)) = (&moe.record, &routings.record) {
        say(&format!("routing  goes to {}, from step {} on", path.display(), recording.first()));
    }
}

/// What condensation and migration saved.
fn say_saved(summary: &Summary, config: &Config) {
    if let Some(condensed) = &summary.condensed {
        let [all, sent] = [condensed.uncomputed_share, condensed.unsent_share].map(|share| 100.0 * share);
        say(&format!("shared   {all:.1} % of the routes had no row of their own, {sent:.1} % of those to other ranks"));
    }
    match summary.migrated {
        0 if config.parallel.migrate == Migrate::Off || config.sequences_stay().is_some() => {}
        0 => say("moved    no sequence: none would have saved a fiftieth of the time of a layer and what follows"),
        moved => say(&format!("moved    {moved} times a sequence went on at another rank")),
    }
}

/// `example` is a direction that was learned.
fn say_end(config: &Config, outcome: &Outcome, example: Option<&PartLabel>) {
    let run = &config.run.dir;
    let latest = word(run.join(checkpoint::CHECKPOINTS).join(checkpoint::LATEST).display());
    let two_stacks = config.model.stack_layers().is_some();
    let (how, next) = match outcome.status {
        Status::Interrupted => ("stopped  after ", "the same command with --resume continues from there".to_owned()),
        Status::Done if let Some(PartLabel { from, to, .. }) = example => {
            ("done     ", format!("{} translate {latest} --from {} --to {}", program(), word(from), word(to)))
        }
        _ if config.model.is_causal() && !two_stacks => {
            let asked =
                if config.data.has_conversations() { "--chat --prompt \"Hello!\"" } else { "--prompt \"The \"" };
            ("done     ", format!("{} generate {latest} {asked}", program()))
        }
        _ => ("done     ", format!("{} evaluate {}", program(), latest)),
    };
    if outcome.imbalance.most > 1.0 {
        // Rounded up, so that what is planned for it is no less.
        let up = |times: f64| (times * 100.0).ceil() / 100.0;
        let (mean, most) = (up(outcome.imbalance.mean), up(outcome.imbalance.most));
        let recipe = word(run.join("config.toml").display());
        let to_plan = format!("{} plan {recipe} --imbalance {mean},{most}", program());
        say(&format!("rows     up to {mean} times an even share on a rank, {most} in a layer: {to_plan}"));
    }
    let noun = if outcome.steps == 1 { "step" } else { "steps" };
    say(&format!("{how}{} {noun}; see {}", outcome.steps, run.join(report::REPORT_FILE).display()));
    say(&format!("next     {next}"));
}
