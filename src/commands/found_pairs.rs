//! What is said of a corpus of pairs: which languages were found, what is learned of them, and what was left out.

use std::collections::BTreeMap;

use crate::data::Split;
use crate::data::tasks::{LeftOutPart, PairIndex, PartEntry, PartLabel, TaskPart};

/// Entries of a list that are told.
const TOLD: usize = 12;

/// A line for languages, one for each task, and one for everything that was left out.
pub(super) fn told(index: &PairIndex) -> Vec<String> {
    let mut lines = vec![languages(index)];
    let mut tasks: BTreeMap<usize, Vec<&PartEntry>> = BTreeMap::new();
    index.parts.iter().for_each(|part| tasks.entry(part.task).or_default().push(part));
    lines.extend(tasks.into_values().map(|parts| task(&parts)));
    lines.extend(left_out(index));
    lines
}

/// Those with most texts first.
fn languages(index: &PairIndex) -> String {
    let mut all: Vec<(u64, &str)> =
        index.languages.iter().map(|entry| (entry.train.end - entry.train.start, &entry.language[..])).collect();
    all.sort_by_key(|&(texts, language)| (std::cmp::Reverse(texts), language));
    let list = list(all.iter().map(|(texts, language)| format!("{language} {texts}")).collect());
    format!("found    {} files, {} languages with texts to train on: {list}", index.read.files, all.len())
}

fn task(parts: &[&PartEntry]) -> String {
    let pairs = |part: &PartEntry| part.train.end - part.train.start;
    let mut sorted = parts.to_vec();
    sorted.sort_by_key(|part| (std::cmp::Reverse(pairs(part)), &part.from, &part.to));
    let name =
        |part: &PartEntry| if part.from == part.to { part.from.clone() } else { format!("{}-{}", part.from, part.to) };
    let held_out = |part: &PartEntry| part.held_out.end - part.held_out.start;
    let told = |part: &&PartEntry| format!("{} {} + {}", name(part), pairs(part), held_out(part));
    let list = list(sorted.iter().map(told).collect());
    let (all, aside): (u64, u64) = parts.iter().fold((0, 0), |(a, b), part| (a + pairs(part), b + held_out(part)));
    format!("task     {}: {all} pairs to train on + {aside} held out: {list}", parts[0].name)
}

fn left_out(index: &PairIndex) -> Vec<String> {
    let read = &index.read;
    let (skipped, mut lines) = (read.skipped.total(), Vec::new());
    let mut note = |count: u64, what: String| {
        if count > 0 {
            lines.push(format!("left out {what}"));
        }
    };
    note(skipped, format!("{skipped} of {} pairs: {}", read.pairs + skipped, read.skipped));
    note(index.leaks, format!("{} pairs to train on, since a text of theirs is held out elsewhere", index.leaks));
    note(read.over_max_bytes, format!("{} files over data.max_bytes", read.over_max_bytes));
    note(read.others, format!("{} files that hold no pairs by their names", read.others));
    note(read.english, format!("{} catalogues of English", read.english));
    let foreign: Vec<String> = read.foreign.keys().cloned().collect();
    note(foreign.len() as u64, format!("programs whose messages are no English text: {}", list(foreign)));
    let examples = list(read.unreadable_examples.clone());
    note(read.unreadable, format!("{} unreadable catalogues: {examples}", read.unreadable));
    let mut small: Vec<&LeftOutPart> = index.left_out.iter().collect();
    small.sort_by_key(|part| std::cmp::Reverse(part.pairs));
    let small = small.into_iter().map(|part| {
        let (name, from, to, pairs) = (&part.name, &part.from, &part.to, part.pairs);
        if from == to { format!("{name} {from} ({pairs})") } else { format!("{name} {from}-{to} ({pairs})") }
    });
    let small: Vec<String> = small.collect();
    note(small.len() as u64, format!("{} with fewer than min_pairs pairs: {}", small.len(), list(small.clone())));
    lines
}

/// A line for the pairs of a split that rows of these lengths, to read and to write, have no room for.
pub(super) fn too_long(parts: &[TaskPart], split: Split, [source, target]: [usize; 2]) -> Option<String> {
    let mut longer: Vec<&TaskPart> = parts.iter().filter(|part| part.rows.too_long() > 0).collect();
    if longer.is_empty() {
        return None;
    }
    longer.sort_by_key(|part| std::cmp::Reverse(part.rows.too_long()));
    let all = |part: &TaskPart| part.rows.too_long() + part.rows.pairs() as u64;
    let told = longer.iter().map(|part| {
        let PartLabel { task, from, to } = &part.label;
        let name = if from == to { format!("{task} {from}") } else { format!("{task} {from}-{to}") };
        format!("{name} {} of {}", part.rows.too_long(), all(part))
    });
    let (sum, of): (u64, u64) = parts.iter().fold((0, 0), |(a, b), part| (a + part.rows.too_long(), b + all(part)));
    let what = split.of("to train on", "that are held out");
    Some(format!(
        "left out {sum} of {of} pairs {what}, longer than rows of {source} tokens to read and {target} to write \
         (model.source_seq, model.seq): {}",
        list(told.collect())
    ))
}

fn list(all: Vec<String>) -> String {
    let more = all.len().saturating_sub(TOLD);
    let told = all[..all.len() - more].join(", ");
    if more == 0 { told } else { format!("{told} and {more} more") }
}
