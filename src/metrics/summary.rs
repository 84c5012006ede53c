//! `summary.json`: what a run came to, written once when it ends, however it ends.

use std::collections::BTreeMap;
use std::fs;
use std::ops::AddAssign;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Error, TaskRecord, float, share, write_atomically};

/// Name of the summary in a run folder.
pub const SUMMARY_FILE: &str = "summary.json";

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Done,
    /// Stopped by the user after a checkpoint; `--resume` continues it.
    Interrupted,
    Failed,
}

/// Optimizer state that was kept elsewhere, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offloaded {
    /// Accounted peak of memory of the host; 0 where files are used.
    pub host_bytes: u64,
    /// Read and written.
    pub moved_bytes: u64,
    /// Seconds that ranks' moving threads were busy, summed.
    #[serde(with = "float")]
    pub busy_s: f64,
    /// Seconds that ranks waited for them, summed: what did not hide behind the update.
    #[serde(with = "float")]
    pub waited_s: f64,
}

/// Rows that a rank computed in a micro-batch, or sent where experts choose, over an even share of them, at most: on average
/// over MoE layers, and in one. 1 where all ranks have alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Imbalance {
    pub mean: f64,
    pub most: f64,
}

impl Imbalance {
    pub const EVEN: Imbalance = Imbalance { mean: 1.0, most: 1.0 };

    /// The larger of each.
    pub fn max(self, other: Imbalance) -> Imbalance {
        Imbalance { mean: self.mean.max(other.mean), most: self.most.max(other.most) }
    }
}

/// What condensation saved over all MoE layers and steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CondensedSummary {
    /// Routes that were sent to experts, and the share of them without a row of their own: no rank computed a row for
    /// them.
    pub routes: u64,
    pub uncomputed_share: f64,
    /// Routes to experts on other ranks, and the share of them without a row of their own: no row was sent for them.
    pub travelling: u64,
    pub unsent_share: f64,
}

impl CondensedSummary {
    /// Of the routes that were sent and of those to other ranks: how many there were, and how many of them had no row of
    /// their own.
    pub fn new([routes, uncomputed]: [u64; 2], [travelling, unsent]: [u64; 2]) -> CondensedSummary {
        let (uncomputed_share, unsent_share) = (share(uncomputed as f64, routes), share(unsent as f64, travelling));
        CondensedSummary { routes, uncomputed_share, travelling, unsent_share }
    }
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub status: Status,
    /// Optimizer steps done, over all resumes.
    pub steps: u64,
    /// Mean token cross-entropy of the first step, nats.
    #[serde(with = "float")]
    pub loss_first: f64,
    /// The same of the last step.
    #[serde(with = "float")]
    pub loss_last: f64,
    /// The last evaluation, nats.
    #[serde(default, with = "float::optional", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// The same of each part of the tasks; empty without tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_tasks: Vec<TaskRecord>,
    /// As [`median_tokens_per_s`] gives it.
    #[serde(with = "float")]
    pub tokens_per_s: f64,
    /// Wall-clock seconds, over all resumes.
    #[serde(with = "float")]
    pub seconds: f64,
    /// Accounted peak by cause, summed over ranks, bytes: `total`, `parameters`, `gradients`, `optimizer`,
    /// `activations`, `communication`, `checkpoint`, `other`.
    pub peak_bytes: BTreeMap<String, u64>,
    /// The same of each rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peak_bytes_by_rank: Vec<BTreeMap<String, u64>>,
    /// What the plan predicted for `total`, bytes, if rows spread evenly.
    pub predicted_peak_bytes: u64,
    /// The same if every rank were the one that receives most, as early training is taken to be skewed.
    #[serde(default)]
    pub predicted_skewed_bytes: u64,
    /// The largest in the last process of the run: what `guildhall plan --imbalance` takes. Absent for a dense model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imbalance: Option<Imbalance>,
    /// Peak resident memory of the process, MiB, where the system tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_rss_mb: Option<u64>,
    pub params_total: u64,
    /// Parameters that one token passes through.
    pub params_active: u64,
    pub ranks: usize,
    /// Ranks over which the experts of a layer are spread; where layers differ, the most.
    pub expert: usize,
    /// By layer with experts, where they differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_by_layer: Vec<usize>,
    /// Ranks on each node, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<usize>,
    /// By expert group, how its all-to-alls went from node to node, where ways differ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub all_to_all: BTreeMap<String, String>,
    /// By kind of collective, over all groups.
    pub traffic: BTreeMap<String, CollectiveTraffic>,
    /// By group, then by kind.
    pub traffic_by_group: BTreeMap<String, BTreeMap<String, CollectiveTraffic>>,
    /// Experts whose weights visited other ranks, summed over steps, layers, micro-batches and expert groups.
    #[serde(default)]
    pub shadowed: u64,
    /// What condensation saved over all MoE layers and steps; absent without condensation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condensed: Option<CondensedSummary>,
    /// Sequences that went on at other ranks, summed over steps, layers and micro-batches.
    #[serde(default)]
    pub migrated: u64,
    /// What state kept away from the device took, in the last process of the run; absent if it stayed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offloaded>,
    /// Routes chosen over all MoE layers and steps, and those of them that were dropped.
    #[serde(default)]
    pub routes: u64,
    #[serde(default)]
    pub routes_dropped: u64,
    /// Seconds each rank waited inside collectives while training, by rank, in the last process of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_s: Vec<f64>,
    /// `rows_sent[i][j]`: rows from rank i to the j-th rank of its expert group, each layer's own, over all MoE layers,
    /// likewise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows_sent: Vec<Vec<u64>>,
    /// Experts without routes when the run ended.
    pub dead_experts: Vec<DeadExpert>,
    /// Version of the program.
    pub version: String,
    /// Commit the program was built from, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
}

/// Collectives of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveTraffic {
    pub calls: u64,
    /// What carried the payload from rank to rank.
    #[serde(default)]
    pub messages: u64,
    /// Payload sent.
    pub bytes: u64,
}

impl AddAssign for CollectiveTraffic {
    fn add_assign(&mut self, other: CollectiveTraffic) {
        self.calls += other.calls;
        self.messages += other.messages;
        self.bytes += other.bytes;
    }
}

/// An expert that receives nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeadExpert {
    pub layer: usize,
    pub expert: usize,
    /// The first step of the streak without routes.
    pub since_step: u64,
}

impl Summary {
    /// Replaces the summary of the folder `run` in one go.
    pub fn write(&self, run: &Path) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(self).expect("a summary has string keys only");
        text.push(b'\n');
        write_atomically(&run.join(SUMMARY_FILE), &text)
    }

    /// What the fullest rank was predicted to hold while rows are skewed, where that is more than of even rows.
    pub fn predicted_if_skewed(&self) -> Option<u64> {
        Some(self.predicted_skewed_bytes).filter(|&skewed| skewed > self.predicted_peak_bytes)
    }

    /// Reads the summary of the folder `run`; [`Error::is_not_found`] tells a run that has not ended.
    pub fn read(run: &Path) -> Result<Summary, Error> {
        let path = run.join(SUMMARY_FILE);
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&text).map_err(|source| Error::CorruptSummary { path, source })
    }
}

/// Median tokens per second of a run's steps in order, without the first two, which pay for warming up;
/// of all of them if there are no others, and 0 of none.
pub fn median_tokens_per_s(rates: &[f64]) -> f64 {
    let steady = if rates.len() > 2 { &rates[2..] } else { rates };
    let mut sorted = steady.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_skips_the_first_two_steps() {
        let check = |rates: &[f64], expected: f64| assert_eq!(median_tokens_per_s(rates), expected, "{rates:?}");
        check(&[], 0.0);
        check(&[3.0], 3.0);
        check(&[1.0, 3.0], 2.0);
        check(&[1.0, 2.0, 9.0], 9.0);
        check(&[1.0, 2.0, 9.0, 7.0], 8.0);
        check(&[100.0, 100.0, 5.0, 3.0, 4.0], 4.0);
    }
}
