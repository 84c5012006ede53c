//! The rows of a corpus of pairs: those of each part, and all of them mixed.

use std::sync::Arc;

use super::corrupt::TokenWords;
use super::index::PartEntry;
use super::mixture::{Component, Mixture};
use super::pair_rows::{PairRows, PairTags, TextToRead};
use crate::data::config::{Config, TaskKind};
use crate::data::corpus::Corpus;
use crate::data::error::Error;
use crate::data::source::Source;
use crate::data::splits::Split;

/// What a part is called: a task, and the languages that are read and written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartLabel {
    pub task: String,
    pub from: String,
    pub to: String,
}

/// A direction of a task, or a language of one that reads one text.
#[derive(Clone, Debug)]
pub struct TaskPart {
    pub label: PartLabel,
    pub kind: TaskKind,
    /// Its number in `data.tasks`.
    pub task: usize,
    /// May have none where text is held out.
    pub rows: Arc<PairRows>,
}

/// The parts of a split, in the same order in both, with rows to read and to write of these lengths. `seed` decides about
/// corruption. Parts whose every pair is longer than a row have no rows.
///
/// # Errors
/// A corpus that was prepared for other tasks, or is damaged; a tokenizer without what the tasks need.
pub fn parts(
    corpus: &Corpus,
    config: &Config,
    split: Split,
    lengths: [usize; 2],
    seed: u64,
) -> Result<Vec<TaskPart>, Error> {
    let index = corpus.manifest.pairs.as_ref();
    let (entries, pairs) = (index.map_or(&[][..], |index| &index.parts), corpus.pairs(split)?);
    let words = match config.tasks.iter().any(|task| task.kind == TaskKind::Denoising) {
        true => Some(TokenWords::new(&corpus.tokenizer)?),
        false => None,
    };
    let part = |entry: &PartEntry| {
        let task = &config.tasks[entry.task];
        let reading = match (task.kind, &words) {
            (TaskKind::Denoising, Some(words)) => {
                TextToRead::Corrupted { words: words.clone(), by: task.noise.unwrap_or_default(), seed }
            }
            (TaskKind::LanguageModel, _) => TextToRead::Nothing,
            _ => TextToRead::Other,
        };
        let tag = |language: &str| {
            corpus.tokenizer.tag(language).ok_or_else(|| Error::NoTags {
                path: corpus.dir.clone(),
                missing: vec![language.to_owned()],
                tags: corpus.tokenizer.tags(),
            })
        };
        let end = corpus.tokenizer.end_of_text();
        let tags = PairTags { source: tag(&entry.from)?, target: tag(&entry.to)?, end };
        let range = entry.pairs(split);
        let own = &pairs[range.start as usize..range.end as usize];
        let rows = PairRows::new(Arc::clone(corpus.split(split)), own, (tags, reading), lengths);
        let label = PartLabel { task: entry.name.clone(), from: entry.from.clone(), to: entry.to.clone() };
        Ok(TaskPart { label, kind: task.kind, task: entry.task, rows: Arc::new(rows) })
    };
    entries.iter().map(part).collect()
}

/// The parts that have rows, mixed: tasks by their weights, and within a task parts of n pairs by n^(1/temperature).
/// `seed` orders them.
///
/// # Errors
/// No rows at all, or more parts than a mixture may have.
pub fn mixture(parts: &[TaskPart], config: &Config, seed: u64) -> Result<Mixture, Error> {
    let kept: Vec<&TaskPart> = parts.iter().filter(|part| !part.rows.is_empty()).collect();
    if kept.is_empty() {
        let too_long = parts.iter().map(|part| part.rows.too_long()).sum();
        let lengths = parts.first().map_or([0, 0], |part| [part.rows.source_seq().unwrap_or(0), part.rows.seq()]);
        return Err(Error::NoRows { split: Split::Train, lengths, too_long });
    }
    let size = |part: &TaskPart| (part.rows.pairs() as f64).powf(1.0 / config.temperature);
    let of_task = |task: usize| kept.iter().filter(|part| part.task == task).map(|part| size(part)).sum::<f64>();
    let learned = (0..config.tasks.len()).filter(|&task| of_task(task) > 0.0);
    let weights: f64 = learned.map(|task| config.tasks[task].weight).sum();
    let share = |part: &TaskPart| config.tasks[part.task].weight / weights * size(part) / of_task(part.task);
    let component = |part: &&TaskPart| Component { rows: part.rows.clone(), share: share(part) };
    Mixture::new(kept.iter().map(component).collect(), seed)
}
