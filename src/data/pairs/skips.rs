//! What was left out of parallel text, and why.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Why a record gives no pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// A side holds nothing but white space.
    EmptySide,
    /// A side is not in the file's encoding.
    WrongEncoding,
    /// A record of several languages lacks one of the two.
    MissingLanguage,
    /// A catalogue's message has no translation, or both sides are the same.
    Untranslated,
    /// Its translator, or a tool, was not sure of it.
    Fuzzy,
    /// The program no longer has the message.
    Obsolete,
    /// Most of a side is placeholders, markup, digits or signs.
    PlaceholderOnly,
    /// A side is longer than a text may be.
    TooLong,
    /// One side is many times as long as the other.
    LengthRatio,
    /// It came before: the same pair, or in catalogues the same message in the same language.
    Duplicate,
}

impl SkipReason {
    pub const ALL: [SkipReason; 10] = [
        SkipReason::EmptySide,
        SkipReason::WrongEncoding,
        SkipReason::MissingLanguage,
        SkipReason::Untranslated,
        SkipReason::Fuzzy,
        SkipReason::Obsolete,
        SkipReason::PlaceholderOnly,
        SkipReason::TooLong,
        SkipReason::LengthRatio,
        SkipReason::Duplicate,
    ];

    /// What was left out, in words.
    pub fn describe(self) -> &'static str {
        match self {
            SkipReason::EmptySide => "with an empty side",
            SkipReason::WrongEncoding => "in a wrong encoding",
            SkipReason::MissingLanguage => "without one of the languages",
            SkipReason::Untranslated => "not translated",
            SkipReason::Fuzzy => "marked as fuzzy",
            SkipReason::Obsolete => "obsolete",
            SkipReason::PlaceholderOnly => "mostly placeholders or markup",
            SkipReason::TooLong => "too long",
            SkipReason::LengthRatio => "of too different lengths",
            SkipReason::Duplicate => "met before",
        }
    }
}

/// How many records were left out, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skips(BTreeMap<SkipReason, u64>);

impl Skips {
    pub(super) fn add(&mut self, reason: SkipReason) {
        *self.0.entry(reason).or_insert(0) += 1;
    }

    pub fn count(&self, reason: SkipReason) -> u64 {
        self.0.get(&reason).copied().unwrap_or(0)
    }

    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl AddAssign<&Skips> for Skips {
    fn add_assign(&mut self, other: &Skips) {
        for (&reason, count) in &other.0 {
            *self.0.entry(reason).or_insert(0) += count;
        }
    }
}

/// `12 met before, 3 too long`, in the order of [`SkipReason::ALL`].
impl fmt::Display for Skips {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let parts: Vec<_> = self.0.iter().map(|(reason, count)| format!("{count} {}", reason.describe())).collect();
        formatter.write_str(if parts.is_empty() { "none" } else { "" })?;
        formatter.write_str(&parts.join(", "))
    }
}
