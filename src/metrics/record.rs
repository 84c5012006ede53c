//! One line of `metrics.jsonl`: what one optimizer step did, over all ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::float;

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counted from 1; the number of optimizer steps done.
    pub step: u64,
    /// Mean cross-entropy of the step's valid tokens, nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// Load-balancing loss before its weight, mean over MoE layers; 0 without any.
    #[serde(with = "float")]
    pub balance_loss: f64,
    /// Router z-loss before its weight, mean over MoE layers; 0 without any.
    #[serde(with = "float")]
    pub z_loss: f64,
    /// Global gradient norm before clipping.
    #[serde(with = "float")]
    pub grad_norm: f64,
    /// Learning rate of this step.
    #[serde(with = "float")]
    pub lr: f64,
    /// Valid tokens trained on since the run began.
    pub tokens: u64,
    /// Valid tokens of this step per wall-clock second, over all ranks.
    #[serde(with = "float")]
    pub tokens_per_s: f64,
    /// Wall-clock seconds since the run began, summed over resumes.
    #[serde(with = "float")]
    pub seconds: f64,
    /// Mean cross-entropy of the evaluation set, nats, at steps that evaluate.
    #[serde(default, with = "float::optional", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// What was learned of each part of the tasks, of those that the step has rows of; empty without tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskRecord>,
    /// The evaluation of each part, at steps that evaluate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_tasks: Vec<TaskRecord>,
    /// Experts whose weights visited other ranks, summed over layers, micro-batches and expert groups; absent if none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shadowed: u64,
    /// Cosine from which tokens were condensed; absent without condensation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condense_threshold: Option<f64>,
    /// One entry per MoE layer; empty for a dense model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moe: Vec<MoeRecord>,
    /// Seconds each rank spent waiting inside collectives in this step's training, by rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_s: Vec<f64>,
    /// Rows between ranks, one entry per MoE layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sent: Vec<SentRows>,
    /// Sequences that moved, one entry per MoE layer; absent if none may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub migrated: Vec<MigratedSequences>,
    /// The layers whose experts changed ranks behind this step; absent if none did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<ReplacedExperts>,
}

/// A direction of a task, or a language of one that reads one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskRecord {
    pub task: String,
    /// The languages that are read and written.
    pub from: String,
    pub to: String,
    pub rows: u64,
    /// Valid targets of these rows.
    pub tokens: u64,
    /// Their mean cross-entropy, nats, where it was measured.
    #[serde(default, with = "float::optional", skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
}

/// What the parts of each task that write a language come to together, if these are several: their tokens, and the mean of
/// their losses over tokens. As in the names of directions, `*` stands for all languages that they read.
pub fn by_language(parts: &[TaskRecord]) -> Vec<TaskRecord> {
    let mut languages: BTreeMap<(&str, &str), Vec<&TaskRecord>> = BTreeMap::new();
    parts.iter().for_each(|part| languages.entry((&part.task, &part.to)).or_default().push(part));
    let together = |((task, to), parts): ((&str, &str), Vec<&TaskRecord>)| {
        let tokens: u64 = parts.iter().map(|part| part.tokens).sum();
        let sum: f64 = parts.iter().filter_map(|part| Some(part.loss? * part.tokens as f64)).sum();
        let [task, from, to] = [task, "*", to].map(str::to_owned);
        let rows = parts.iter().map(|part| part.rows).sum();
        TaskRecord { task, from, to, rows, tokens, loss: (tokens > 0).then(|| sum / tokens as f64) }
    };
    languages.into_iter().filter(|(_, parts)| parts.len() > 1).map(together).collect()
}

impl StepRecord {
    /// The same of a step behind which there was an evaluation: the loss of all, and of each part.
    pub fn with_evaluation(self, evaluation: Option<(f64, Vec<TaskRecord>)>) -> StepRecord {
        let (eval_loss, eval_tasks) = evaluation.unzip();
        StepRecord { eval_loss, eval_tasks: eval_tasks.unwrap_or_default(), ..self }
    }

    /// Adds what condensation saved, as [`super::CondensedSummary::new`] takes it; nothing without condensation.
    pub fn add_condensed(&self, sums: &mut Option<[[u64; 2]; 2]>) {
        let all =
            self.moe.iter().filter_map(|layer| layer.condensed.as_ref()).map(|layer| [layer.routes, layer.uncomputed]);
        let travelling = self.sent.iter().filter_map(|layer| layer.condensed).map(|layer| [layer.routes, layer.unsent]);
        for (which, [routes, saved]) in all.map(|numbers| (0, numbers)).chain(travelling.map(|numbers| (1, numbers))) {
            let sum = &mut sums.get_or_insert_default()[which];
            *sum = [sum[0] + routes, sum[1] + saved];
        }
    }
}

/// The rows that one MoE layer sent to its experts in one step; results come back, and gradients go, the same ways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SentRows {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// `rows[i][j]`: from rank i of all to the j-th rank of its expert group of this layer, itself included.
    pub rows: Vec<Vec<u64>>,
    /// Absent without condensation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condensed: Option<UnsentRecord>,
}

/// The sequences that went on at other ranks behind one MoE layer in one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigratedSequences {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    pub sequences: u64,
    pub tokens: u64,
    /// Rows of the residual stream that were sent by themselves; results carried those of the other tokens.
    pub residual_rows: u64,
    /// Results of their rows that would have gone to another rank had they stayed.
    pub results_if_stayed: u64,
    /// Results of their rows that went to another rank.
    pub results: u64,
}

/// The experts of one MoE layer that changed ranks behind one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplacedExperts {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// Experts with another rank than before.
    pub moved: usize,
    /// Rows of the rank of an expert group that has most, over an even share, of the steps since the loads were last looked
    /// at: as they went, and as they would have gone.
    pub imbalance_before: f64,
    pub imbalance_after: f64,
    /// The rank of an expert group that owns each expert from now on.
    pub owners: Vec<usize>,
}

impl ReplacedExperts {
    /// For the user.
    pub fn told(&self, step: u64) -> String {
        let ReplacedExperts { layer, moved, imbalance_before: before, imbalance_after: after, .. } = self;
        format!(
            "step {step}: {moved} experts of layer {layer} changed ranks: rows of the busiest {before:.2} -> {after:.2} times \
             an even share"
        )
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// What one MoE layer's router did in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeRecord {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// Routes per expert, over all ranks.
    pub load: Vec<u64>,
    /// Entropy of the load, from 0 (one expert does all) to 1 (uniform).
    #[serde(with = "float")]
    pub entropy: f64,
    /// Routes that the tokens asked for, sent and dropped; 0 in logs that are older than this number.
    #[serde(default)]
    pub routes: u64,
    /// Routes that were not sent: without a place, or given up by the gate.
    pub dropped: u64,
    /// Of all routes, the share that was dropped.
    #[serde(default)]
    pub drop_rate: f64,
    /// Experts without a route in this step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead: Vec<usize>,
    /// Tokens that chose both of two experts since the last step whose line has them: the upper triangle of a table of all experts without its diagonal, row by
    /// row. Empty with one choice a token, or with more than [`PAIRS_ALL_MAX`] experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub co_activation: Vec<u64>,
    /// With more experts, the pairs most often chosen together, most often first: two experts, and the tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strongest_pairs: Vec<(usize, usize, u64)>,
    /// Absent without condensation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condensed: Option<CondensedRecord>,
}

/// What condensation saved, over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CondensedRecord {
    /// Routes that were sent to experts, by a row of their own or by the row of a similar token.
    pub routes: u64,
    /// Of these, those without a row of their own: no rank computed a row for them.
    pub uncomputed: u64,
    pub uncomputed_share: f64,
    /// Pairs of tokens that were compared, by cosine: bins of equal width from -1 to 1.
    pub similarity: Vec<u64>,
    /// Pairs that were decided by their similarity in the layer before.
    pub remembered: u64,
}

/// What condensation saved on the way to other ranks, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnsentRecord {
    /// Routes to experts on other ranks.
    pub routes: u64,
    /// Of these, those without a row of their own: no row was sent for them.
    pub unsent: u64,
    pub unsent_share: f64,
}

/// A part of a whole; 0 of nothing.
pub fn share(part: f64, of: u64) -> f64 {
    if of > 0 { part / of as f64 } else { 0.0 }
}

/// With more experts than this, only as many pairs are told: [`MoeRecord::strongest_pairs`].
pub const PAIRS_ALL_MAX: usize = 64;

impl MoeRecord {
    /// Derives what follows from the load of each expert, and from how many of `routes` were dropped.
    pub fn new(layer: usize, load: Vec<u64>, routes: u64, dropped: u64) -> MoeRecord {
        let entropy = load_entropy(&load);
        let drop_rate = share(dropped as f64, routes);
        let dead = (0..load.len()).filter(|&expert| load[expert] == 0).collect();
        let (co_activation, strongest_pairs) = (Vec::new(), Vec::new());
        let condensed = None;
        MoeRecord { layer, load, entropy, routes, dropped, drop_rate, dead, co_activation, strongest_pairs, condensed }
    }

    /// Routes that the tokens asked for: by older logs, those that an expert was chosen for.
    pub fn asked(&self) -> f64 {
        let chosen: f64 = self.load.iter().map(|&routes| routes as f64).sum();
        chosen.max(self.routes as f64)
    }

    /// The same with [`MoeRecord::tell_pairs`].
    pub fn with_pairs(mut self, triangle: Vec<u64>) -> MoeRecord {
        self.tell_pairs(triangle);
        self
    }

    /// Adds how many tokens chose each pair of experts, as the upper triangle of a table.
    pub fn tell_pairs(&mut self, triangle: Vec<u64>) {
        let experts = self.load.len();
        if experts <= PAIRS_ALL_MAX {
            self.co_activation = triangle;
            return;
        }
        let places = (0..experts).flat_map(|a| (a + 1..experts).map(move |b| (a, b)));
        let pairs = places.zip(triangle).filter(|(_, tokens)| *tokens > 0);
        self.strongest_pairs = pairs.map(|((a, b), tokens)| (a, b, tokens)).collect();
        // Stable: of equals the lower pair comes first.
        self.strongest_pairs.sort_by_key(|&(_, _, tokens)| std::cmp::Reverse(tokens));
        self.strongest_pairs.truncate(PAIRS_ALL_MAX);
    }
}

/// Entropy of a load divided by ln E, so that uniform is 1; a single expert counts as uniform, no routes as 0.
pub fn load_entropy(load: &[u64]) -> f64 {
    let total: f64 = load.iter().map(|&routes| routes as f64).sum();
    if total == 0.0 {
        return 0.0;
    }
    if load.len() == 1 {
        return 1.0;
    }
    let shares = load.iter().filter(|&&routes| routes > 0).map(|&routes| routes as f64 / total);
    let nats: f64 = shares.map(|share| -share * share.ln()).sum();
    // Rounding may pass 1 by an ulp, and a share of 1 gives -0.
    (nats / (load.len() as f64).ln()).clamp(0.0, 1.0) + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_runs_from_collapse_to_uniform() {
        let check = |load: &[u64], expected: f64| {
            let found = load_entropy(load);
            assert!((found - expected).abs() < 1e-12, "{load:?}: {found}, not {expected}");
        };
        check(&[5, 5, 5, 5], 1.0);
        check(&[20, 0, 0, 0], 0.0);
        check(&[7, 7, 0, 0], 0.5);
        check(&[3], 1.0);
        check(&[0, 0], 0.0);
        check(&[], 0.0);
    }

    #[test]
    fn a_record_tells_what_follows_from_its_counts() {
        let record = MoeRecord::new(1, vec![6, 0, 2, 0], 8, 2).with_pairs(vec![0, 2, 0, 0, 0, 0]);
        assert_eq!((record.drop_rate, &record.dead[..]), (0.25, &[1, 3][..]));
        assert_eq!((record.co_activation.len(), record.strongest_pairs.len()), (6, 0));
        assert_eq!(MoeRecord::new(1, vec![0, 0], 0, 0).drop_rate, 0.0);
    }

    #[test]
    fn of_many_experts_the_strongest_pairs_are_told() {
        let mut triangle = vec![1; 65 * 64 / 2];
        // {0, 64}, {1, 2} and {63, 64}.
        (triangle[63], triangle[64], triangle[2079]) = (0, 7, 9);
        let record = MoeRecord::new(0, vec![1; 65], 65, 0).with_pairs(triangle);
        assert_eq!((record.strongest_pairs.len(), record.co_activation.len()), (64, 0));
        assert_eq!(record.strongest_pairs[..4], [(63, 64, 9), (1, 2, 7), (0, 1, 1), (0, 2, 1)]);
        assert_eq!(record.strongest_pairs[63], (0, 62, 1));
    }
}
