//! `guildhall plan`: what a recipe's run will cost, before it begins.

use std::fmt::Write;
use std::time::Instant;

use guildhall_tensor::{Cause, Device, Tensor};
use serde_json::{Value, json};

use super::{Failure, print, say, short};
use crate::cli;
use crate::config;
use crate::launch;
use crate::memory::available_bytes;
use crate::model::count;
use crate::parallel::{MeshShape, Order};
use crate::plan::{
    Bytes, Candidate, Cost, Layout, Load, Machine, Seconds, Task, Wire, message, names, search, seconds, step, traffic,
};
use crate::train;

/// The machine that the program runs on.
const HERE: &str = "this-machine";
/// Candidates shown of each kind.
const SHOWN: usize = 5;
/// Groups shown of each axis.
const GROUPS_SHOWN: usize = 8;

pub(super) fn run(arguments: cli::Plan) -> Result<(), Failure> {
    let loaded =
        config::load(&arguments.recipe, &arguments.overrides.set, arguments.ranks).map_err(Failure::request)?;
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let task = Task::of(&loaded.config, train::sizes(&loaded.config));
    if !(arguments.imbalance >= 1.0 && arguments.imbalance <= task.layout.mesh.expert.max(1) as f64) {
        return Err(Failure::Request(anyhow::anyhow!(
            "--imbalance {} is not between 1, an even share, and parallel.expert = {}, all rows on one rank",
            arguments.imbalance,
            task.layout.mesh.expert
        )));
    }
    let machine = machine(&arguments.device, task.layout.mesh.ranks, &loaded.config.parallel)?;
    let load = Load::Even { imbalance: arguments.imbalance };
    let cost = step(&task, task.fullest(), &load);
    let found = if arguments.search { search(&task, &machine, &load) } else { Vec::new() };
    let taken = seconds(&task, &cost, &machine);
    let plan = Plan { task: &task, machine: &machine, cost: &cost, seconds: &taken, found: &found };
    match arguments.json {
        true => print(&format!("{}\n", plan.json(arguments.explain))),
        false => print(&plan.text(arguments.explain, arguments.imbalance)),
    }
}

fn machine(name: &str, ranks: usize, parallel: &crate::parallel::Config) -> Result<Machine, Failure> {
    if name == HERE {
        return here(ranks, parallel);
    }
    Machine::known(name).ok_or_else(|| {
        let known: Vec<&str> = names().collect();
        Failure::Request(anyhow::anyhow!("--device {name} is not known: choose {HERE}, {}", known.join(", ")))
    })
}

/// One rank's share of this machine, measured: a few products and a copy.
fn here(ranks: usize, parallel: &crate::parallel::Config) -> Result<Machine, Failure> {
    let memory = available_bytes().ok_or_else(|| {
        Failure::Request(anyhow::anyhow!("how much memory is free is not known here: name a --device"))
    })?;
    let threads = launch::threads_per_rank(parallel);
    let config = crate::parallel::Config { threads: Some(threads), ..crate::parallel::Config::of(1, 1) };
    let measured = launch::run(&config, |rank| {
        let rates = crate::parallel::Mesh::new(rank.world.clone(), 1)?.measured(&rank.device)?.rates();
        Ok::<_, guildhall_comm::Error>((rates.map_or(1.0, |rates| rates.flops), copied(&rank.device)))
    });
    let (flops, bandwidth) = launch::first_cause(measured, |_: &guildhall_comm::Error| false)
        .map_err(|failure| Failure::Run(anyhow::anyhow!("{failure}")))?[0];
    let wire = Wire { latency_s: 20e-6, bandwidth };
    Ok(Machine {
        name: HERE.to_owned(),
        memory: memory / ranks as u64,
        flops: [flops; 2],
        efficiency: 1.0,
        bandwidth,
        ranks_per_node: usize::MAX,
        within: wire,
        between: wire,
    })
}

/// Bytes a second that a copy reads and writes.
fn copied(device: &std::sync::Arc<Device>) -> f64 {
    let x = Tensor::zeros(device, &[1 << 22]);
    drop(x.to_owned_copy());
    let begun = Instant::now();
    (0..4).for_each(|_| drop(x.to_owned_copy()));
    (4 * 2 * 4 * x.len()) as f64 / begun.elapsed().as_secs_f64()
}

struct Plan<'a> {
    task: &'a Task,
    machine: &'a Machine,
    cost: &'a Cost,
    seconds: &'a Seconds,
    found: &'a [Candidate],
}

impl Plan<'_> {
    fn text(&self, explains: bool, imbalance: f64) -> String {
        let mut out = String::new();
        let (model, own) = (count(&self.task.sizes), self.cost.elements);
        let _ = writeln!(
            out,
            "model    {} parameters, {} active per token, {} on a rank",
            short(model.total),
            short(model.active),
            short(own)
        );
        let rows =
            if imbalance == 1.0 { "even rows".to_owned() } else { format!("{imbalance} times an even share of rows") };
        let _ = writeln!(out, "memory   a rank, when most is alive, with {rows}");
        for (cause, bytes) in causes(&self.cost.at_peak) {
            let _ = writeln!(out, "  {cause:<24} {:>10}B", short(bytes));
        }
        let (total, usable) = (self.cost.at_peak.total(), self.machine.usable());
        let verdict = if total <= usable { "fits" } else { "does not fit" };
        let _ = writeln!(
            out,
            "  {:<24} {:>10}B   {verdict}: {} has {}B, an eighth of it to spare",
            "together",
            short(total),
            self.machine.name,
            short(self.machine.memory)
        );
        let _ = writeln!(out, "traffic  sent by a rank in a step");
        for ((axis, collective), traffic) in traffic(&self.cost.messages).into_iter().filter(|(_, t)| t.bytes > 0) {
            let (axis, collective) = (self.task.layout.degrees.name(axis), collective.name());
            let _ =
                writeln!(out, "  {axis:<14}{collective:<16}{:>6} calls {:>9}B", traffic.calls, short(traffic.bytes));
        }
        let _ = writeln!(out, "time     {:.2} ms a step on {}", self.seconds.total() * 1e3, self.machine.name);
        let messages = self.seconds.messages.iter().map(|(axis, s)| (format!("{axis} messages"), *s));
        let behind = [("gradients, beyond backward".to_owned(), self.seconds.behind)];
        let parts = self.seconds.parts.iter().map(|(part, s)| ((*part).to_owned(), *s));
        for (what, s) in parts.chain(messages).chain(behind).filter(|(_, s)| *s > 0.0) {
            let _ = writeln!(out, "  {what:<28}{:>10.3} ms", s * 1e3);
        }
        if explains {
            explain(&mut out, &self.task.layout);
        }
        self.search_text(&mut out);
        out
    }

    fn search_text(&self, out: &mut String) {
        if self.found.is_empty() {
            return;
        }
        let fitting = self.found.iter().filter(|candidate| candidate.fits).count();
        let _ = writeln!(out, "search   {} layouts, {fitting} fit {}", self.found.len(), self.machine.name);
        for candidate in self.found.iter().take(SHOWN.min(fitting)) {
            let _ = writeln!(
                out,
                "  {:>9.2} ms {:>9}B  {}",
                candidate.seconds * 1e3,
                short(candidate.bytes.total()),
                keys(candidate)
            );
        }
        for candidate in self.found.iter().filter(|candidate| !candidate.fits).take(SHOWN) {
            let (largest, bytes) = (candidate.largest(), short(candidate.bytes.total()));
            let most = short(candidate.bytes.of(largest));
            let _ = writeln!(out, "  too large {bytes}B, {} {most}B: {}", largest.name(), keys(candidate));
        }
    }

    fn json(&self, explains: bool) -> Value {
        let bytes: Value =
            causes(&self.cost.at_peak).into_iter().map(|(cause, n)| (cause.to_owned(), json!(n))).collect();
        let (messages, Layout { mesh, degrees, .. }) = (traffic(&self.cost.messages), &self.task.layout);
        let messages: Vec<Value> = messages.iter().map(|((axis, collective), traffic)| {
            let seconds = message(mesh, *axis, *collective, traffic, self.machine);
            json!({ "group": degrees.name(*axis), "collective": collective.name(), "calls": traffic.calls, "bytes": traffic.bytes, "seconds": seconds })
        }).collect();
        let model = count(&self.task.sizes);
        let candidate = |c: &Candidate| json!({ "set": keys(c), "bytes": c.bytes.total(), "largest": c.largest().name(), "seconds": c.seconds, "fits": c.fits });
        let mut value = json!({
            "parameters": { "total": model.total, "active": model.active, "experts": model.experts, "of_a_rank": self.cost.elements },
            "bytes": bytes,
            "bytes_total": self.cost.at_peak.total(),
            "bytes_offloaded": self.cost.offloaded,
            "bytes_update": self.cost.update,
            "fits": self.cost.at_peak.total() <= self.machine.usable(),
            "device": self.machine,
            "traffic": messages,
            "seconds": self.seconds,
            "seconds_total": self.seconds.total(),
            "search": self.found.iter().map(candidate).collect::<Vec<_>>(),
        });
        if explains {
            let axes = degrees.axes(mesh).into_iter();
            value["groups"] = axes.map(|axis| (degrees.name(axis), json!(mesh.groups(axis)))).collect();
        }
        value
    }
}

fn causes(bytes: &Bytes) -> Vec<(&'static str, u64)> {
    Cause::ALL.iter().map(|&cause| (cause.name(), bytes.of(cause))).filter(|(_, bytes)| *bytes > 0).collect()
}

/// What to set for a candidate.
fn keys(candidate: &Candidate) -> String {
    let MeshShape { tensor, expert, expert_tensor, order, .. } = candidate.mesh;
    let mut keys =
        format!("parallel.tensor={tensor} parallel.expert={expert} train.micro_batch={}", candidate.micro_batch);
    if tensor > 1 {
        let _ = write!(keys, " parallel.expert_tensor={expert_tensor}");
    }
    if order == Order::DataExpert {
        keys.push_str(" parallel.order=data_expert");
    }
    keys
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
