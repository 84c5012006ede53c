//! What a run learned of each part of its tasks: a direction, or a language of a task that reads one text.

use std::collections::BTreeMap;

use crate::metrics::{StepRecord, Summary, TaskRecord};

use super::series::Point;

/// Logged steps that the last training loss of a part is a mean over.
const LAST_STEPS: usize = 20;

/// All parts, and what they come to by task.
#[derive(Default)]
pub(super) struct PartHistories {
    /// By task, and the languages that are read and written.
    pub(super) parts: BTreeMap<[String; 3], PartHistory>,
    pub(super) tasks: BTreeMap<String, PartHistory>,
    /// By task and the language that is written.
    pub(super) languages: BTreeMap<[String; 2], PartHistory>,
}

/// A part over the run, or a task.
#[derive(Default)]
pub(super) struct PartHistory {
    pub(super) rows: u64,
    pub(super) tokens: u64,
    /// Mean cross-entropy of each step that has tokens of it.
    pub(super) training: Vec<Point>,
    /// As many weights: the tokens.
    weights: Vec<f64>,
    pub(super) held_out: Vec<Point>,
}

impl PartHistories {
    pub(super) fn push(&mut self, record: &StepRecord) {
        self.train(record.step, &record.tasks);
        self.evaluate(record.step, &record.eval_tasks);
    }

    /// Adds the evaluation behind the last step, which the log does not have if the step was none that evaluates.
    pub(super) fn finish(&mut self, summary: &Summary) {
        let is_told = self.parts.values().any(|part| part.held_out.last().is_some_and(|at| at.0 == summary.steps));
        if !is_told {
            self.evaluate(summary.steps, &summary.eval_tasks);
        }
    }

    /// How many parts a task has.
    pub(super) fn parts_of(&self, task: &str) -> usize {
        self.parts.keys().filter(|[of, ..]| of == task).count()
    }

    /// How many parts of a task write a language.
    pub(super) fn parts_into(&self, task: &str, language: &str) -> usize {
        self.parts.keys().filter(|[of, _, to]| of == task && to == language).count()
    }

    fn train(&mut self, step: u64, records: &[TaskRecord]) {
        for record in records {
            for history in self.of(record) {
                history.rows += record.rows;
                history.tokens += record.tokens;
            }
        }
        self.add(step, records, |history, point, weight| {
            history.training.push(point);
            history.weights.push(weight);
        });
    }

    fn evaluate(&mut self, step: u64, records: &[TaskRecord]) {
        self.add(step, records, |history, point, _| history.held_out.push(point));
    }

    /// The part of a record, its task, and the language that it writes.
    fn of(&mut self, record: &TaskRecord) -> [&mut PartHistory; 3] {
        let TaskRecord { task, from, to, .. } = record.clone();
        [
            self.parts.entry([task.clone(), from, to.clone()]).or_default(),
            self.tasks.entry(task.clone()).or_default(),
            self.languages.entry([task, to]).or_default(),
        ]
    }

    /// Of the records that have a loss, the loss of each part, and of each task and language the mean over tokens.
    fn add(&mut self, step: u64, records: &[TaskRecord], push: impl Fn(&mut PartHistory, Point, f64)) {
        for record in records {
            let [part, ..] = self.of(record);
            record.loss.iter().for_each(|loss| push(part, (step, *loss), record.tokens as f64));
        }
        for (task, (loss, tokens)) in means(records, |record| record.task.clone()) {
            push(self.tasks.entry(task).or_default(), (step, loss), tokens);
        }
        for (language, (loss, tokens)) in means(records, |record| [record.task.clone(), record.to.clone()]) {
            push(self.languages.entry(language).or_default(), (step, loss), tokens);
        }
    }
}

/// By key, the mean loss over the tokens of records that have one, and how many tokens these are.
fn means<K: Ord>(records: &[TaskRecord], key: impl Fn(&TaskRecord) -> K) -> BTreeMap<K, (f64, f64)> {
    let mut sums: BTreeMap<K, (f64, f64)> = BTreeMap::new();
    for record in records {
        let (Some(loss), tokens) = (record.loss, record.tokens as f64) else { continue };
        let (sum, all) = sums.entry(key(record)).or_default();
        (*sum, *all) = (*sum + loss * tokens, *all + tokens);
    }
    sums.into_iter().map(|(key, (sum, tokens))| (key, (sum / tokens, tokens))).collect()
}

impl PartHistory {
    /// Mean training loss per token of the last logged steps.
    pub(super) fn last_training(&self) -> Option<f64> {
        let first = self.training.len().saturating_sub(LAST_STEPS);
        let last = self.training[first..].iter().zip(&self.weights[first..]);
        let [sum, tokens] = last.fold([0.0, 0.0], |[sum, all], (point, tokens)| [sum + point.1 * tokens, all + tokens]);
        (tokens > 0.0).then(|| sum / tokens)
    }

    /// First, last and best held-out loss.
    pub(super) fn held_out_losses(&self) -> Option<[f64; 3]> {
        let (first, last) = (self.held_out.first()?, self.held_out.last()?);
        let best = self.held_out.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
        Some([first.1, last.1, best])
    }
}

/// What the reader of a part sees: `en → de`, or the language of one text.
pub(super) fn direction(from: &str, to: &str) -> String {
    match to {
        one if one == from => one.to_owned(),
        labels if labels.starts_with("classification:") => format!("{from} → label"),
        _ => format!("{from} → {to}"),
    }
}
