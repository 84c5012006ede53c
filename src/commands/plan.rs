//! `guildhall plan`: what a recipe's run will cost, before it begins.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use guildhall_tensor::Cause;
use serde_json::{Value, json};

use super::fit::EVEN;
use super::plan_figures::figures;
use super::plan_recorded::{RecordedRun, SentRecorded, sent_recorded};
use super::{CommandFailure, bytes, duration, fit, machine, print, say, short};
use crate::cli;
use crate::config::{self, Config};
use crate::launch;
use crate::model::count;
use crate::parallel::{AllToAll, Nodes};
use crate::plan::{
    Bytes, Candidate, Layout, Load, Machine, Offload, PlannedTraffic, Recorded, Seconds, StepCost, Task, message,
    pairs, search, seconds, step, traffic,
};
use crate::train;

/// Candidates shown of each kind.
const SHOWN: usize = 5;
/// Groups shown of each axis.
const GROUPS_SHOWN: usize = 8;

pub(super) fn run(arguments: cli::PlanArgs) -> Result<(), CommandFailure> {
    let loaded =
        config::load(&arguments.recipe, &arguments.overrides.set, arguments.ranks).map_err(CommandFailure::request)?;
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let mut task = Task::of(&loaded.config, train::sizes(&loaded.config));
    // What can be refused is refused before the machine is measured.
    task.layout.condensed = condensed(&arguments, &task)?;
    can_be_walked(&arguments, &task)?;
    let concentration = concentration(&arguments, &task)?;
    let loads = match arguments.imbalance.as_deref().map(|told| told.split_once(':')) {
        Some(Some(("recorded", file))) => {
            let run = RecordedRun::open("--imbalance recorded", Path::new(file), &loaded.config)?;
            run.check_share(&arguments)?;
            Err(run)
        }
        _ => Ok(Recorded::of(task.fullest(), load(arguments.imbalance.as_deref(), &task)?)),
    };
    let machine = machine::named(&arguments.device, &loaded.config, loaded.config.parallel.ranks)?;
    task.layout.rates = machine.rates(task.sizes.dtype, &task.layout.mesh);
    // A device may be named for a recipe that is run on processors.
    task.layout.on_accelerators |= machine.is_accelerator();
    on_nodes(&mut task, &loaded.config, &machine);
    let loads = loads.or_else(|run| task.recorded(run.files(), run.steps.clone())).map_err(CommandFailure::request)?;
    let sent = arguments.recording.as_deref().map(|file| sent_recorded(file, &arguments, &loaded.config, &task));
    let sent = sent.transpose()?;
    let (skewed, load) = (loads.heaviest(&task), loads.skew);
    let cost = match concentration {
        Some(share) => slowest(&task, task.walked(share), &machine),
        None => step(&task, task.fullest(), &EVEN),
    };
    let fits = machine.holds(&task.layout, &skewed);
    // What does not fit asks for what would.
    let wanted = arguments.search || (!fits && !arguments.json);
    let found = if wanted { search(&task, &machine, &load) } else { Vec::new() };
    let taken = seconds(&task, &cost, &machine);
    // Where ranks differ, the one with least is walked too.
    let emptiest = task.emptiest();
    let least = (emptiest, step(&task, emptiest, &task.rest(&load)).at_peak.total());
    let skewed = (&load, &skewed);
    let plan = PlanReport {
        task: &task,
        machine: &machine,
        cost: &cost,
        skewed,
        least,
        sent,
        seconds: &taken,
        fits,
        found: &found,
    };
    match arguments.json {
        true => print(&format!("{}\n", plan.json(arguments.explain))),
        false => print(&plan.text(&arguments)),
    }
}

/// Places the ranks on nodes: the recipe's, if it has any, or the machine's. Of ways from node to node, the one that a recipe
/// leaves to be measured is the fastest by the machine's links.
fn on_nodes(task: &mut Task, config: &Config, machine: &Machine) {
    if config.parallel.node_link.is_none() {
        task.layout.nodes = Nodes::of_consecutive(task.layout.mesh.ranks, machine.ranks_per_node);
    }
    if config.parallel.all_to_all == AllToAll::Auto {
        task.layout.way = task.fastest_way(machine);
        let (way, name) = (task.layout.way.name(), &machine.name);
        say(&format!(
            "note: parallel.all_to_all = \"auto\" is planned as {way:?}, by the links of {name}; a run measures"
        ));
    }
}

/// The largest exponent of Zipf's law that is of use: with it all but a thousandth go to one expert.
const ZIPF_MAX: f64 = 10.0;

/// The share of routes that are taken to have no row of their own.
fn condensed(arguments: &cli::PlanArgs, task: &Task) -> Result<f64, CommandFailure> {
    let condenses = task.sizes.moe.as_ref().is_some_and(|moe| moe.condenses());
    let wrong = |why: &str| Err(CommandFailure::Request(anyhow::anyhow!("{why}")));
    match arguments.condensed {
        Some(_) if !condenses => {
            wrong("--condensed: moe.condense is \"off\", so every route has a row of its own; plan without it")
        }
        Some(share) if !(0.0..1.0).contains(&share) => wrong(&format!(
            "--condensed {share} is not a share from 0 to below 1: a summary.json has it as condensed.uncomputed_share"
        )),
        Some(share) => Ok(share),
        None => {
            let recorded = arguments.recording.is_some()
                || arguments.imbalance.as_deref().is_some_and(|told| told.starts_with("recorded:"));
            if condenses && !recorded {
                say(
                    "note: moe.condense: every route is taken to have a row of its own, which is the most; --condensed SHARE \
                     assumes a share without, and --recording FILE counts what a run recorded",
                );
            }
            Ok(0.0)
        }
    }
}

/// Refuses more ranks than are walked at once.
fn can_be_walked(arguments: &cli::PlanArgs, task: &Task) -> Result<(), CommandFailure> {
    let (ranks, most) = (task.layout.mesh.ranks, launch::RANKS_MAX);
    let asked = arguments.recording.is_some() || arguments.concentration.is_some();
    if !asked || ranks <= most {
        return Ok(());
    }
    let wrong = "--recording and --concentration walk all ranks at once, each in a thread";
    Err(CommandFailure::Request(anyhow::anyhow!("{wrong}: {ranks} are more than {most}; plan fewer, or without")))
}

/// The share of a sequence's routes that are taken to go to one rank.
fn concentration(arguments: &cli::PlanArgs, task: &Task) -> Result<Option<f64>, CommandFailure> {
    let wrong = |why: String| Err(CommandFailure::Request(anyhow::anyhow!("--concentration {why}")));
    match (arguments.concentration, task.concentrations()) {
        (Some(share), None) => wrong(format!("{share}: the tokens of this recipe choose no experts; plan without it")),
        (Some(share), Some(possible)) if !possible.contains(&share) => wrong(format!(
            "{share} is not a share from {:.3} to {:.3}: the rank that most routes go to has no less than an even share, and \
             the experts of a token differ",
            possible.start(),
            possible.end()
        )),
        (None, _) if task.layout.migrating.is_some() && arguments.recording.is_none() => {
            say(
                "note: parallel.migrate: every sequence is taken to stay where it is; --concentration SHARE makes up sequences \
                 that may move, and --recording FILE follows those of a run",
            );
            Ok(None)
        }
        (share, _) => Ok(share),
    }
}

/// Of what ranks take, that of the one that takes longest.
fn slowest(task: &Task, costs: Vec<StepCost>, machine: &Machine) -> StepCost {
    let time = |cost: &StepCost| seconds(task, cost, machine).total();
    let longest = costs.into_iter().max_by(|a, b| time(a).total_cmp(&time(b)));
    longest.expect("a task has ranks")
}

/// What `--imbalance` says of the planned rank's rows, or what is taken to be so.
fn load(imbalance: Option<&str>, task: &Task) -> Result<Load, CommandFailure> {
    let most = task.layout.mesh.expert.max(1) as f64;
    let Some(told) = imbalance else { return Ok(task.skew()) };
    let numbers = |text: &str| text.split(',').map(|number| number.trim().parse().ok()).collect::<Option<Vec<f64>>>();
    let zipf = told.strip_prefix("zipf:").and_then(|exponent| exponent.parse::<f64>().ok());
    match (told, zipf, numbers(told).as_deref()) {
        ("worst", ..) => Ok(Load::Even { imbalance: most }),
        (_, Some(exponent), _) if (0.0..=ZIPF_MAX).contains(&exponent) => Ok(Load::Zipf { exponent }),
        (.., Some([times])) if (1.0..=most).contains(times) => Ok(Load::Even { imbalance: *times }),
        (.., Some([mean, times])) if (1.0..=most).contains(times) && (1.0..=*times).contains(mean) => {
            Ok(Load::Skewed { mean: *mean, most: *times })
        }
        _ => Err(CommandFailure::Request(anyhow::anyhow!(
            "--imbalance {told} is not between 1, an even share, and parallel.expert = {most}, all rows on one rank; of two \
             the first is the average over layers, and not above the second; besides, worst says {most}, and zipf:S takes an \
             exponent S from 0 to {ZIPF_MAX}, and recorded:FILE a file that a run wrote as moe.record"
        ))),
    }
}

struct PlanReport<'a> {
    task: &'a Task,
    machine: &'a Machine,
    /// If rows spread evenly.
    cost: &'a StepCost,
    /// If this rank receives more than others: what has to fit.
    skewed: (&'a Load, &'a StepCost),
    /// A rank that holds least, and how much, while another receives more than its share.
    least: (usize, u64),
    /// What all ranks send in the steps of a recording.
    sent: Option<SentRecorded>,
    seconds: &'a Seconds,
    fits: bool,
    found: &'a [Candidate],
}

impl PlanReport<'_> {
    fn text(&self, arguments: &cli::PlanArgs) -> String {
        let (mut out, (load, skewed)) = (String::new(), self.skewed);
        let (model, own) = (count(&self.task.sizes), self.cost.elements);
        let _ = writeln!(
            out,
            "model    {} parameters, {} active per token, {} on a rank{}",
            short(model.total),
            short(model.active),
            short(own),
            if model.trained < model.total { format!(", {} trained", short(model.trained)) } else { String::new() }
        );
        let (even, told) = (self.cost, fit::told(load));
        let beside = |n: u64| if told.is_some() { format!(" {:>11}", bytes(n)) } else { String::new() };
        let heads = told.as_ref().map_or(String::new(), |told| format!("       even      skewed, {told}"));
        let _ = writeln!(out, "memory   a rank, when most is alive {heads}");
        for cause in Cause::ALL {
            let [held, more] = [even, skewed].map(|cost| cost.at_peak.of(cause));
            if held + more > 0 {
                let _ = writeln!(out, "  {:<24} {:>11}{}", cause.name(), bytes(held), beside(more));
            }
        }
        let [total, more] = [even, skewed].map(|cost| cost.at_peak.total());
        let verdict = fits(self.machine.rank_holds(self.task.layout.offload, skewed));
        let Machine { name, memory, budget, .. } = self.machine;
        let budget = budget.map_or(String::new(), |budget| format!(", and memory.budget is {}", bytes(budget)));
        let memory = bytes(*memory);
        let _ = writeln!(
            out,
            "  {:<24} {:>11}{}   {verdict}: {name} has {memory}, an eighth of it to spare{budget}",
            "together",
            bytes(total),
            beside(more),
        );
        let (rank, least) = self.least;
        if least < more {
            let _ = writeln!(out, "  {:<24} {:>11}", format!("least, on rank {rank}"), bytes(least));
        }
        if self.cost.offloaded > 0 {
            let _ = writeln!(out, "  {:<24} {:>11}{}", "elsewhere", bytes(self.cost.offloaded), self.host_text());
        }
        self.traffic_text(&mut out);
        self.pairs_text(&mut out);
        self.sent.iter().for_each(|sent| sent.text(&mut out, &self.task.layout));
        figures(&mut out, self.machine);
        let _ = writeln!(out, "time     {} a step on {}", duration(self.seconds.total()), self.machine.name);
        let messages = self.seconds.messages.iter().map(|(axis, s)| (format!("{axis} messages"), *s));
        let Seconds { behind, moving, .. } = *self.seconds;
        let behind = [("gradients, beyond backward", behind), ("offloaded state, beyond update", moving)];
        let behind = behind.map(|(what, s)| (what.to_owned(), s));
        let parts = self.seconds.parts.iter().map(|(part, s)| ((*part).to_owned(), *s));
        for (what, s) in parts.chain(messages).chain(behind).filter(|(_, s)| *s > 0.0) {
            let _ = writeln!(out, "  {what:<32}{:>10}", duration(s));
        }
        if arguments.explain {
            explain(&mut out, &self.task.layout);
        }
        if arguments.search {
            self.search_text(&mut out);
        }
        if !self.fits {
            let _ = writeln!(out, "remedy   {}", fit::proposal(self.task, self.found));
        }
        out
    }

    /// What a rank sends in a step, by group and collective.
    fn traffic_text(&self, out: &mut String) {
        let _ = writeln!(out, "traffic  sent by a rank in a step");
        for ((axis, collective), traffic) in traffic(&self.cost.messages).into_iter().filter(|(_, t)| t.bytes > 0) {
            let (axis, collective) = (self.task.layout.degrees.name(axis), collective.name());
            let PlannedTraffic { calls, messages, bytes: sent } = traffic;
            let _ = writeln!(
                out,
                "  {axis:<14}{collective:<16}{calls:>6} calls {messages:>7} messages {:>10}",
                bytes(sent)
            );
        }
    }

    /// What all ranks of a node keep on its host, where that is another memory than theirs.
    fn host_text(&self) -> String {
        let (machine, layout) = (self.machine, &self.task.layout);
        let Some(memory) = machine.host_memory.filter(|_| layout.offload == Offload::Host) else {
            return String::new();
        };
        let fits = fits(machine.host_holds(layout, self.cost));
        let (ranks, held) = (machine.neighbours(layout), bytes(machine.of_host(layout, self.cost)));
        let (ranks, keep) =
            if ranks == 1 { ("the rank".to_owned(), "keeps") } else { (format!("{ranks} ranks"), "keep") };
        format!("   {fits}: {ranks} of a node {keep} {held}, its host has {}, an eighth of it to spare", bytes(memory))
    }

    fn pairs_text(&self, out: &mut String) {
        let sent = pairs(self.task, self.task.fullest()).bytes;
        if let Some(moe) = self.task.sizes.moe.as_ref().filter(|_| sent > 0) {
            let (every, sent) = (moe.pairs_every, bytes(sent));
            let _ =
                writeln!(out, "  besides, every {every} steps, {sent} about experts chosen together (moe.pairs_every)");
        }
    }

    fn search_text(&self, out: &mut String) {
        let (fitting, others): (Vec<&Candidate>, Vec<_>) = self.found.iter().partition(|candidate| candidate.fits);
        let (tried, fit) = (self.found.len(), fitting.len());
        let _ = writeln!(out, "search   {tried} layouts tried, {fit} fit {}", self.machine.name);
        if !fitting.is_empty() {
            let _ = writeln!(out, "       a step     a rank  to set");
        }
        for candidate in fitting.into_iter().take(SHOWN) {
            let (time, bytes) = (duration(candidate.seconds), bytes(candidate.bytes.total()));
            let _ = writeln!(out, "  {time:>11} {bytes:>10}  {}", to_set(candidate));
        }
        if !others.is_empty() {
            let _ = writeln!(out, "    too large     a rank  of which                to set");
        }
        for candidate in others.into_iter().take(SHOWN) {
            let ((largest, held), total) = (candidate.largest(), bytes(candidate.bytes.total()));
            let most = format!("{largest} {}", bytes(held));
            let _ = writeln!(out, "              {total:>10}  {most:<22}  {}", to_set(candidate));
        }
        if let Some(caution) = fit::caution(self.task, self.found) {
            let _ = writeln!(out, "note     {caution}");
        }
    }

    fn json(&self, explains: bool) -> Value {
        let bytes: Value =
            causes(&self.cost.at_peak).into_iter().map(|(cause, n)| (cause.to_owned(), json!(n))).collect();
        let (messages, Layout { mesh, degrees, nodes, way, .. }) = (traffic(&self.cost.messages), &self.task.layout);
        let messages: Vec<Value> = messages.iter().map(|((axis, collective), traffic)| {
            let seconds = message(&self.task.layout, *axis, *collective, traffic, self.machine);
            json!({ "group": degrees.name(*axis), "collective": collective.name(), "calls": traffic.calls, "messages": traffic.messages, "bytes": traffic.bytes, "seconds": seconds })
        }).collect();
        let model = count(&self.task.sizes);
        let candidate = |c: &Candidate| json!({ "set": c.set, "bytes": c.bytes.total(), "largest": c.largest().0, "seconds": c.seconds, "fits": c.fits });
        let mut value = json!({
            "parameters": { "total": model.total, "active": model.active, "experts": model.experts, "trained": model.trained, "of_a_rank": self.cost.elements },
            "bytes": bytes,
            "bytes_total": self.cost.at_peak.total(),
            "imbalance": match self.skewed.0 {
                Load::Skewed { mean, most } => json!([mean, most]),
                Load::Even { imbalance } => json!([imbalance, imbalance]),
                Load::Zipf { exponent } => json!(format!("zipf:{exponent}")),
                Load::Peaked { .. } | Load::Counted(_) | Load::Table(_) => Value::Null,
            },
            "bytes_skewed": causes(&self.skewed.1.at_peak).into_iter().collect::<BTreeMap<_, _>>(),
            "bytes_total_skewed": self.skewed.1.at_peak.total(),
            "bytes_total_least": self.least.1,
            "bytes_offloaded": self.cost.offloaded,
            "bytes_update": self.cost.update,
            "fits": self.fits,
            "device": self.machine,
            "nodes": nodes.sizes(),
            "all_to_all": way.name(),
            "traffic": messages,
            "condensed": self.task.layout.condensed,
            "seconds": self.seconds,
            "seconds_total": self.seconds.total(),
            "search": self.found.iter().map(candidate).collect::<Vec<_>>(),
        });
        if let Some(sent) = &self.sent {
            value["recorded"] = sent.json(&self.task.layout);
        }
        if explains {
            let axes = degrees.axes(mesh).into_iter();
            value["groups"] = axes.map(|axis| (degrees.name(axis), json!(mesh.groups(axis)))).collect();
        }
        value
    }
}

fn fits(holds: bool) -> &'static str {
    if holds { "fits" } else { "does not fit" }
}

fn causes(bytes: &Bytes) -> Vec<(&'static str, u64)> {
    Cause::ALL.iter().map(|&cause| (cause.name(), bytes.of(cause))).filter(|(_, bytes)| *bytes > 0).collect()
}

fn to_set(candidate: &Candidate) -> String {
    if candidate.set.is_empty() { "nothing: it is the recipe's own".to_owned() } else { candidate.set.join(" ") }
}

/// Every axis with its groups.
fn explain(out: &mut String, Layout { mesh, degrees, .. }: &Layout) {
    let _ = writeln!(out, "groups   of {} ranks", mesh.ranks);
    for axis in degrees.axes(mesh) {
        let groups = mesh.groups(axis);
        let shown: Vec<String> =
            groups.iter().take(GROUPS_SHOWN).map(|group| format!("{{{}}}", shown(group))).collect();
        let more = if groups.len() > GROUPS_SHOWN {
            format!(" and {} more", groups.len() - GROUPS_SHOWN)
        } else {
            String::new()
        };
        let _ = writeln!(out, "  {:<14} {}{more}", degrees.name(axis), shown.join(" "));
    }
}

/// The ranks of a group; of a large one the first and the last.
fn shown(group: &[usize]) -> String {
    let all: Vec<String> = group.iter().map(ToString::to_string).collect();
    match all.len() {
        0..=16 => all.join(" "),
        n => format!("{} ... {}", all[..4].join(" "), all[n - 1]),
    }
}
