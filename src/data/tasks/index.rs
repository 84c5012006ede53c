//! What the manifest of a corpus says of pairs: where each part of a task has its own, what was read, and what was left
//! out of it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::data::pairs::{PairListing, PairSummary, Skips};
use crate::data::splits::Split;

/// Names of files kept for the report.
const EXAMPLES: usize = 5;

/// The pairs of a corpus.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairIndex {
    /// In the order of their documents.
    pub languages: Vec<LanguageEntry>,
    pub parts: Vec<PartEntry>,
    /// Directions and languages of too few pairs.
    pub left_out: Vec<LeftOutPart>,
    pub read: ReadPairs,
    /// Pairs that were not kept for training, since a side of theirs is held out.
    pub leaks: u64,
    /// SHA-256 of the tables of pairs: two numbers of documents each (u32, little-endian).
    pub train_sha256: String,
    pub held_out_sha256: String,
}

/// A language and its documents, by split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageEntry {
    pub language: String,
    pub train: Range<u64>,
    pub held_out: Range<u64>,
}

/// A direction of a task, or a language of one that reads one text: its pairs in the tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartEntry {
    /// Its number in `data.tasks`.
    pub task: usize,
    pub name: String,
    pub from: String,
    pub to: String,
    pub train: Range<u64>,
    pub held_out: Range<u64>,
}

/// A direction or language that a task does not learn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOutPart {
    pub name: String,
    pub from: String,
    pub to: String,
    /// To train on.
    pub pairs: u64,
}

/// What reading came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadPairs {
    pub files: u64,
    pub pairs: u64,
    pub skipped: Skips,
    /// Catalogues of English, whose translations are their messages.
    pub english: u64,
    /// Files of folders and globs that hold no pairs by their names.
    pub others: u64,
    pub over_max_bytes: u64,
    /// Catalogues in folders and globs that could not be read, and what was wrong with the first of them.
    pub unreadable: u64,
    pub unreadable_examples: Vec<String>,
    /// Catalogues of programs whose messages are no English text, by program.
    pub foreign: BTreeMap<String, u64>,
}

impl PartEntry {
    /// Its places in the table of a split.
    pub fn pairs(&self, split: Split) -> Range<u64> {
        split.of(&self.train, &self.held_out).clone()
    }
}

impl PairIndex {
    pub(in crate::data) fn sha256(&self, split: Split) -> &str {
        split.of(&self.train_sha256, &self.held_out_sha256)
    }

    /// Pairs in the table of a split.
    pub(in crate::data) fn pairs(&self, split: Split) -> u64 {
        self.parts.iter().map(|part| part.pairs(split).end).max().unwrap_or(0)
    }
}

impl ReadPairs {
    pub(super) fn add(&mut self, listing: &PairListing, summary: PairSummary) {
        self.english += listing.english;
        self.others += listing.others;
        self.unreadable += summary.unreadable;
        let room = EXAMPLES.saturating_sub(self.unreadable_examples.len());
        self.unreadable_examples.extend(summary.unreadable_examples.into_iter().take(room));
        for direction in summary.directions.values() {
            self.files += direction.files;
            self.pairs += direction.pairs;
            self.skipped += &direction.skips;
        }
        for (program, count) in summary.foreign {
            *self.foreign.entry(program).or_insert(0) += count;
        }
    }
}
