//! What a run's log says of it as a whole.

use crate::metrics;

/// What the lines of metrics.jsonl say of a run's ends.
pub(super) struct FirstAndLast {
    pub(super) steps: u64,
    pub(super) first: f64,
    pub(super) last: f64,
    pub(super) eval: Option<f64>,
    pub(super) eval_tasks: Vec<metrics::TaskRecord>,
    pub(super) seconds: f64,
    pub(super) shadowed: u64,
    pub(super) condensed: Option<[[u64; 2]; 2]>,
    pub(super) migrated: u64,
    pub(super) rates: Vec<f64>,
    pub(super) routes: u64,
    pub(super) dropped: u64,
}

impl Default for FirstAndLast {
    fn default() -> FirstAndLast {
        let (first, last, rates) = (f64::NAN, f64::NAN, Vec::new());
        let (steps, seconds, eval) = (0, 0.0, None);
        let (shadowed, migrated, condensed, routes, dropped) = (0, 0, None, 0, 0);
        let eval_tasks = Vec::new();
        FirstAndLast {
            steps,
            first,
            last,
            eval,
            eval_tasks,
            seconds,
            shadowed,
            migrated,
            condensed,
            rates,
            routes,
            dropped,
        }
    }
}

impl FirstAndLast {
    pub(super) fn push(&mut self, record: &metrics::StepRecord) {
        if self.steps == 0 {
            self.first = record.loss;
        }
        (self.steps, self.last, self.seconds) = (record.step, record.loss, record.seconds);
        if record.eval_loss.is_some() {
            (self.eval, self.eval_tasks) = (record.eval_loss, record.eval_tasks.clone());
        }
        self.shadowed += record.shadowed;
        record.add_condensed(&mut self.condensed);
        self.migrated += record.migrated.iter().map(|layer| layer.sequences).sum::<u64>();
        self.rates.push(record.tokens_per_s);
        self.routes += record.moe.iter().map(|moe| moe.asked() as u64).sum::<u64>();
        self.dropped += record.moe.iter().map(|moe| moe.dropped).sum::<u64>();
    }
}
