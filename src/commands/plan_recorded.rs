//! What `guildhall plan` takes from a recording: routings, the clusters beside them, and what ranks send for them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::RangeInclusive;
use std::path::Path;

use guildhall_comm::Collective;
use serde_json::{Value, json};

use super::{CommandFailure, bytes, say};
use crate::cli;
use crate::config::Config;
use crate::moe::Shadowing;
use crate::moe::recording::{self, ClusterFile, Clustering, HostChoices, Hosting, Recording, Shape, Visits};
use crate::parallel::Axis;
use crate::plan::{Layout, PlannedTraffic, RecordedFiles, Task};
use crate::train;

/// A recording of runs like a recipe's, with whatever seed and data.
pub(super) struct RecordedRun {
    routes: Recording,
    /// Present if the recipe condenses, and the run did.
    clusters: Option<ClusterFile>,
    /// Present if the recipe shadows or lets sequences migrate, and the run did, on the same mesh.
    visits: Option<Visits>,
    hosts: Option<HostChoices>,
    pub(super) steps: RangeInclusive<u64>,
}

impl RecordedRun {
    /// The recording that `flag` names.
    pub(super) fn open(flag: &str, file: &Path, config: &Config) -> Result<RecordedRun, CommandFailure> {
        let wrong = |why: String| Err(CommandFailure::Request(anyhow::anyhow!(why)));
        let Some(moe) = &config.moe else {
            return wrong(format!("{flag}: the recipe has no [moe] section, so no rows go anywhere; plan without it"));
        };
        let open = || {
            let (Shape { seed, data, .. }, steps) = Recording::look(file)?;
            let shape = Shape { seed, data, ..train::recorded_shape(config, moe, "") };
            let (any, note) = (!steps.is_empty(), |what: &str, why: String| say(&format!("note: {what}: {why}")));
            let condensation = moe.condensation().filter(|_| any);
            let own = condensation.map(|condensation| Clustering::new(&shape, condensation.tokens));
            let tell = |why| note("rows are not condensed as in the recorded run", why);
            let clusters = train::followed(file, &own, steps.clone(), tell)?;
            let visiting = train::visiting(config, &shape);
            let own = (any && moe.shadowing() != Shadowing::Off).then(|| visiting.clone());
            let tell = |why| note("shadowed experts are chosen anew", why);
            let visits = train::followed(file, &own, steps.clone(), tell)?;
            let own = train::migrating(config).filter(|_| any).map(|_| Hosting(visiting));
            let hosts =
                train::followed(file, &own, steps.clone(), |why| note("hosts of sequences are chosen anew", why))?;
            let routes = Recording::open(file, shape, steps.clone())?;
            Ok::<_, recording::Error>(RecordedRun { routes, clusters, visits, hosts, steps })
        };
        let run = open().map_err(CommandFailure::request)?;
        if run.steps.is_empty() {
            return wrong(format!("{} holds no whole step: name a recording of one step at least", file.display()));
        }
        Ok(run)
    }

    pub(super) fn files(&self) -> RecordedFiles<'_> {
        let RecordedRun { routes, clusters, visits, hosts, .. } = self;
        RecordedFiles { routes, clusters: clusters.as_ref(), visits: visits.as_ref(), hosts: hosts.as_ref() }
    }

    /// Refuses a share where the rows that are left are known.
    pub(super) fn check_share(&self, arguments: &cli::PlanArgs) -> Result<(), CommandFailure> {
        match (&self.clusters, arguments.condensed) {
            (Some(clusters), Some(share)) => Err(CommandFailure::Request(anyhow::anyhow!(
                "--condensed {share}: {} has the clusters of the recorded run; leave one of them out",
                clusters.path().display()
            ))),
            _ => Ok(()),
        }
    }
}

/// What all ranks send in the steps of a recording.
pub(super) struct SentRecorded {
    file: String,
    steps: RangeInclusive<u64>,
    traffic: BTreeMap<(Axis, Collective), PlannedTraffic>,
    /// Of a sequence's routes, the share to the rank that most went to.
    concentration: f64,
}

/// What `--recording` asks for.
pub(super) fn sent_recorded(
    file: &Path,
    arguments: &cli::PlanArgs,
    config: &Config,
    task: &Task,
) -> Result<SentRecorded, CommandFailure> {
    let run = RecordedRun::open("--recording", file, config)?;
    run.check_share(arguments)?;
    let traffic = task.traffic_recorded(run.files(), run.steps.clone()).map_err(CommandFailure::request)?;
    let concentration = task.concentration(run.files(), run.steps.clone()).map_err(CommandFailure::request)?;
    Ok(SentRecorded { file: file.display().to_string(), steps: run.steps, traffic, concentration })
}

impl SentRecorded {
    pub(super) fn text(&self, out: &mut String, layout: &Layout) {
        let (first, last) = (self.steps.start(), self.steps.end());
        let _ = writeln!(out, "recorded sent by all ranks in steps {first} to {last} of {}", self.file);
        for ((axis, collective), sent) in self.traffic.iter().filter(|(_, sent)| sent.bytes > 0) {
            let (axis, collective) = (layout.degrees.name(*axis), collective.name());
            let PlannedTraffic { calls, messages, bytes: all } = *sent;
            let _ =
                writeln!(out, "  {axis:<14}{collective:<16}{calls:>6} calls {messages:>7} messages {:>10}", bytes(all));
        }
        let ranks = layout.degrees.largest();
        let _ = writeln!(
            out,
            "  of a sequence's routes, {:.3} go to the one of {ranks} ranks that most go to (--concentration)",
            self.concentration
        );
    }

    pub(super) fn json(&self, layout: &Layout) -> Value {
        let of = |((axis, collective), sent): (&(Axis, Collective), &PlannedTraffic)| {
            let (group, collective) = (layout.degrees.name(*axis), collective.name());
            json!({ "group": group, "collective": collective, "calls": sent.calls, "messages": sent.messages, "bytes": sent.bytes })
        };
        let traffic: Vec<Value> = self.traffic.iter().map(of).collect();
        let (first, last) = (self.steps.start(), self.steps.end());
        json!({ "first": first, "last": last, "traffic": traffic, "concentration": self.concentration })
    }
}
