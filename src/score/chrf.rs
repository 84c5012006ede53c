//! chrF (Popović, WMT 2015) and chrF++ (Popović, WMT 2017): the F-score of n-grams of characters, and of words, as
//! sacrebleu counts it.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::AddAssign;

use super::{Error, SACREBLEU_VERSION, checked, ngrams, python, reference_count};

/// A precision or recall that nothing defines, with `epsilon`.
const EPSILON: f64 = 1e-16;

/// The choices of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChrfOptions {
    /// The longest n-grams of characters.
    pub characters: usize,
    /// The longest n-grams of words: 0 for chrF, 2 for chrF++.
    pub words: usize,
    /// How many times more recall weighs than precision.
    pub beta: u32,
    pub lowercase: bool,
    /// Whether n-grams of characters have white space in them.
    pub whitespace: bool,
    /// Orders without n-grams score almost nothing, as in Popović's program, instead of being left out.
    pub epsilon: bool,
}

impl Default for ChrfOptions {
    fn default() -> Self {
        Self { characters: 6, words: 0, beta: 2, lowercase: false, whitespace: false, epsilon: false }
    }
}

impl ChrfOptions {
    /// chrF++.
    pub fn plus_plus() -> Self {
        Self { words: 2, ..Self::default() }
    }
}

/// The n-grams of one order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OrderCount {
    hypothesis: u64,
    reference: u64,
    matches: u64,
}

/// What is summed over segments: the n-grams of every order, of characters and then of words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChrfCounts(Vec<OrderCount>);

impl AddAssign for ChrfCounts {
    fn add_assign(&mut self, other: Self) {
        self.0.resize(self.0.len().max(other.0.len()), OrderCount::default());
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            sum.hypothesis += count.hypothesis;
            sum.reference += count.reference;
            sum.matches += count.matches;
        }
    }
}

/// A score from 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChrfScore {
    pub score: f64,
}

impl ChrfScore {
    /// The score with `digits` after the point.
    pub fn describe(&self, digits: usize) -> String {
        format!("{:.digits$}", self.score)
    }
}

/// chrF with its options.
#[derive(Clone, Copy, Debug)]
pub struct Chrf {
    options: ChrfOptions,
}

/// A line as it is compared.
struct Units<'a> {
    characters: Vec<char>,
    words: Vec<&'a str>,
}

impl Chrf {
    pub fn new(options: ChrfOptions) -> Self {
        Self { options }
    }

    /// The score of a corpus; `references` has those of each segment.
    ///
    /// # Errors
    /// Numbers of hypotheses and segments that differ, no segment, or a segment without a reference.
    pub fn corpus<H: AsRef<str>, R: AsRef<str>>(
        &self,
        hypotheses: &[H],
        references: &[Vec<R>],
    ) -> Result<ChrfScore, Error> {
        let mut counts = ChrfCounts::default();
        for (hypothesis, references) in checked(hypotheses, references)? {
            counts += self.segment(hypothesis.as_ref(), references);
        }
        Ok(self.score(&counts))
    }

    /// The counts of one segment, against the reference that scores most.
    pub fn segment<R: AsRef<str>>(&self, hypothesis: &str, references: &[R]) -> ChrfCounts {
        let (mut best, mut most) = (ChrfCounts::default(), -1.0);
        let hypothesis = self.line(hypothesis);
        let ours = self.units(&hypothesis);
        for reference in references {
            let reference = self.line(reference.as_ref());
            let counts = self.compare(&ours, &self.units(&reference));
            let score = self.score(&counts).score;
            if score > most {
                (best, most) = (counts, score);
            }
        }
        best
    }

    fn line(&self, line: &str) -> String {
        if self.options.lowercase { line.to_lowercase() } else { line.to_owned() }
    }

    fn units<'a>(&self, line: &'a str) -> Units<'a> {
        let kept = |letter: &char| self.options.whitespace || !python::is_space(*letter);
        let words = python::split(line).flat_map(without_punctuation).filter(|part| !part.is_empty());
        Units { characters: line.chars().filter(kept).collect(), words: words.collect() }
    }

    fn compare(&self, ours: &Units, theirs: &Units) -> ChrfCounts {
        let characters = (1..=self.options.characters)
            .map(|order| count(ngrams::counts(&ours.characters, order), ngrams::counts(&theirs.characters, order)));
        let words = (1..=self.options.words)
            .map(|order| count(ngrams::counts(&ours.words, order), ngrams::counts(&theirs.words, order)));
        ChrfCounts(characters.chain(words).collect())
    }

    /// The score of summed counts.
    pub fn score(&self, counts: &ChrfCounts) -> ChrfScore {
        let factor = f64::from(self.options.beta).powi(2);
        let f_score = |precision: f64, recall: f64| (1.0 + factor) * precision * recall / (factor * precision + recall);
        let share = |part: u64, whole: u64| if whole > 0 { part as f64 / whole as f64 } else { EPSILON };
        let shares = counts.0.iter().map(|of| (share(of.matches, of.hypothesis), share(of.matches, of.reference)));
        if self.options.epsilon {
            let scores = shares
                .map(|(precision, recall)| if precision + recall > 0.0 { f_score(precision, recall) } else { EPSILON });
            return ChrfScore { score: 100.0 * scores.sum::<f64>() / counts.0.len().max(1) as f64 };
        }
        let both = counts.0.iter().map(|of| of.hypothesis > 0 && of.reference > 0);
        let defined = shares.zip(both).filter_map(|(shares, both)| both.then_some(shares));
        let (mut precision, mut recall, mut orders) = (0.0, 0.0, 0.0_f64);
        for (of_order, recall_of_order) in defined {
            precision += of_order;
            recall += recall_of_order;
            orders += 1.0;
        }
        let (precision, recall) = (precision / orders.max(1.0), recall / orders.max(1.0));
        ChrfScore { score: if precision + recall > 0.0 { 100.0 * f_score(precision, recall) } else { 0.0 } }
    }

    /// The name of the score: `chrF2`, `chrF2++`.
    pub fn name(&self) -> String {
        format!("chrF{}{}", self.options.beta, "+".repeat(self.options.words))
    }

    /// What another needs to know to get the same score.
    pub fn signature<R>(&self, references: &[Vec<R>]) -> String {
        let ChrfOptions { characters, words, lowercase, whitespace, epsilon, .. } = self.options;
        format!(
            "nrefs:{}|case:{}|eff:{}|nc:{characters}|nw:{words}|space:{}|version:{SACREBLEU_VERSION}",
            reference_count(references),
            if lowercase { "lc" } else { "mixed" },
            if epsilon { "no" } else { "yes" },
            if whitespace { "yes" } else { "no" },
        )
    }
}

/// Where a reference has no n-gram of an order, those of the hypothesis do not count.
fn count<T: Eq + Hash>(ours: HashMap<&[T], u64>, theirs: HashMap<&[T], u64>) -> OrderCount {
    OrderCount {
        hypothesis: if theirs.is_empty() { 0 } else { ours.values().sum() },
        reference: theirs.values().sum(),
        matches: ngrams::matches(&ours, &theirs),
    }
}

/// A word, and a punctuation mark of ASCII at its end or else at its beginning as a word of its own.
fn without_punctuation(word: &str) -> [&str; 2] {
    let mark = |letter: char| letter.is_ascii_punctuation();
    if word.chars().nth(1).is_none() {
        [word, ""]
    } else if word.ends_with(mark) {
        let (rest, last) = word.split_at(word.len() - 1);
        [rest, last]
    } else if word.starts_with(mark) {
        let (first, rest) = word.split_at(1);
        [first, rest]
    } else {
        [word, ""]
    }
}
