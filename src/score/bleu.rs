//! Corpus BLEU: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation" (ACL 2002), with the
//! smoothing of Chen and Cherry (WMT 2014), as sacrebleu counts it (Post, WMT 2018).

use std::collections::HashMap;
use std::ops::AddAssign;

use super::words::{Tokenize, WordTokenizer};
use super::{Error, SACREBLEU_VERSION, checked, ngrams, python, reference_count};

/// The longest n-grams that count.
const ORDER: usize = 4;

/// What a precision of zero becomes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Smoothing {
    /// It stays zero, and so the score is.
    None,
    /// So many matches; sacrebleu takes 0.1.
    Floor(f64),
    /// That many matches and n-grams are added for orders above 1; sacrebleu takes 1.
    AddK(f64),
    /// The n-th one is one in 2^n of a match.
    Exp,
}

impl Smoothing {
    fn signature(self) -> String {
        match self {
            Smoothing::None => "none".to_owned(),
            Smoothing::Floor(value) => format!("floor[{value:.2}]"),
            Smoothing::AddK(value) => format!("add-k[{value:.2}]"),
            Smoothing::Exp => "exp".to_owned(),
        }
    }
}

/// The choices of a signature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BleuOptions {
    pub tokenize: Tokenize,
    pub lowercase: bool,
    pub smoothing: Smoothing,
    /// Orders without an n-gram in any hypothesis are left out; for scores of single sentences.
    pub effective_order: bool,
}

impl Default for BleuOptions {
    fn default() -> Self {
        Self { tokenize: Tokenize::V13a, lowercase: false, smoothing: Smoothing::Exp, effective_order: false }
    }
}

/// What is summed over segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BleuCounts {
    /// n-grams of hypotheses that a reference has too, by order.
    pub matches: [u64; ORDER],
    /// n-grams of hypotheses, by order.
    pub totals: [u64; ORDER],
    /// Words of hypotheses.
    pub hypothesis: u64,
    /// Words of the references nearest in length.
    pub reference: u64,
}

impl AddAssign for BleuCounts {
    fn add_assign(&mut self, other: Self) {
        for order in 0..ORDER {
            self.matches[order] += other.matches[order];
            self.totals[order] += other.totals[order];
        }
        self.hypothesis += other.hypothesis;
        self.reference += other.reference;
    }
}

/// A score with what it was made of.
#[derive(Clone, Debug, PartialEq)]
pub struct BleuScore {
    /// From 0 to 100.
    pub score: f64,
    /// In per cent, by order, smoothed.
    pub precisions: [f64; ORDER],
    pub brevity_penalty: f64,
    pub counts: BleuCounts,
}

impl BleuScore {
    /// The score with `digits` after the point, and what it was made of, as sacrebleu prints them behind the signature.
    pub fn describe(&self, digits: usize) -> String {
        let precisions = self.precisions.map(|precision| format!("{precision:.1}")).join("/");
        let BleuCounts { hypothesis, reference, .. } = self.counts;
        let ratio = if reference > 0 { hypothesis as f64 / reference as f64 } else { 0.0 };
        format!(
            "{:.digits$} {precisions} (BP = {:.3} ratio = {ratio:.3} hyp_len = {hypothesis} ref_len = {reference})",
            self.score, self.brevity_penalty
        )
    }
}

/// BLEU with its options, ready to count.
#[derive(Clone, Debug)]
pub struct Bleu {
    options: BleuOptions,
    tokenizer: WordTokenizer,
}

impl Bleu {
    pub fn new(options: BleuOptions) -> Self {
        Self { options, tokenizer: WordTokenizer::new(options.tokenize) }
    }

    /// The score of a corpus; `references` has those of each segment.
    ///
    /// # Errors
    /// Numbers of hypotheses and segments that differ, no segment, or a segment without a reference.
    pub fn corpus<H: AsRef<str>, R: AsRef<str>>(
        &self,
        hypotheses: &[H],
        references: &[Vec<R>],
    ) -> Result<BleuScore, Error> {
        let mut counts = BleuCounts::default();
        for (hypothesis, references) in checked(hypotheses, references)? {
            counts += self.segment(hypothesis.as_ref(), references);
        }
        Ok(self.score(counts))
    }

    /// The counts of one segment.
    pub fn segment<R: AsRef<str>>(&self, hypothesis: &str, references: &[R]) -> BleuCounts {
        let (hypothesis, references) = (self.line(hypothesis), references.iter().map(|line| self.line(line.as_ref())));
        let references: Vec<String> = references.collect();
        let words: Vec<&str> = python::split(&hypothesis).collect();
        let references: Vec<Vec<&str>> = references.iter().map(|line| python::split(line).collect()).collect();
        let lengths = references.iter().map(|words| words.len() as u64);
        let mut counts = BleuCounts {
            hypothesis: words.len() as u64,
            reference: nearest(words.len() as u64, lengths),
            ..BleuCounts::default()
        };
        for order in 0..ORDER {
            let ours = ngrams::counts(&words, order + 1);
            counts.totals[order] = ours.values().sum();
            counts.matches[order] = ngrams::matches(&ours, &most_of_any(&references, order + 1));
        }
        counts
    }

    fn line(&self, line: &str) -> String {
        let lower = if self.options.lowercase { line.to_lowercase() } else { line.to_owned() };
        self.tokenizer.apply(lower.trim_end_matches(python::is_space))
    }

    /// The score of summed counts.
    pub fn score(&self, counts: BleuCounts) -> BleuScore {
        let (hypothesis, reference) = (counts.hypothesis as f64, counts.reference as f64);
        let brevity_penalty = match counts.hypothesis {
            longer if longer >= counts.reference => 1.0,
            0 => 0.0,
            _ => (1.0 - reference / hypothesis).exp(),
        };
        let mut score = BleuScore { score: 0.0, precisions: [0.0; ORDER], brevity_penalty, counts };
        if counts.matches.iter().any(|&matches| matches > 0) {
            let orders = self.precisions(counts, &mut score.precisions);
            let logarithms = score.precisions[..orders].iter().map(|&precision| logarithm(precision));
            score.score = brevity_penalty * (logarithms.sum::<f64>() / orders as f64).exp();
        }
        score
    }

    /// Fills in the precisions; returns how many orders the score is the mean of.
    fn precisions(&self, counts: BleuCounts, precisions: &mut [f64; ORDER]) -> usize {
        let BleuOptions { smoothing, effective_order, .. } = self.options;
        let (mut orders, mut halved) = (ORDER, 1.0);
        for (order, precision) in precisions.iter_mut().enumerate() {
            let added = if let (Smoothing::AddK(value), 1..) = (smoothing, order) { value } else { 0.0 };
            let (matches, total) = (counts.matches[order] as f64 + added, counts.totals[order] as f64 + added);
            if total == 0.0 {
                break;
            }
            if effective_order {
                orders = order + 1;
            }
            *precision = match smoothing {
                _ if matches > 0.0 => 100.0 * matches / total,
                Smoothing::Exp => {
                    halved *= 2.0;
                    100.0 / (halved * total)
                }
                Smoothing::Floor(value) => 100.0 * value / total,
                Smoothing::None | Smoothing::AddK(_) => 0.0,
            };
        }
        orders
    }

    /// What another needs to know to get the same score.
    pub fn signature<R>(&self, references: &[Vec<R>]) -> String {
        let BleuOptions { tokenize, lowercase, smoothing, effective_order } = self.options;
        format!(
            "nrefs:{}|case:{}|eff:{}|tok:{tokenize}|smooth:{}|version:{SACREBLEU_VERSION}",
            reference_count(references),
            if lowercase { "lc" } else { "mixed" },
            if effective_order { "yes" } else { "no" },
            smoothing.signature()
        )
    }
}

/// The length nearest to the hypothesis's; of two as near the shorter.
fn nearest(length: u64, lengths: impl Iterator<Item = u64>) -> u64 {
    lengths.min_by_key(|&other| (other.abs_diff(length), other)).unwrap_or(0)
}

/// Each n-gram as often as in the reference that has most of it.
fn most_of_any<'a>(references: &'a [Vec<&'a str>], order: usize) -> HashMap<&'a [&'a str], u64> {
    let mut most = HashMap::new();
    for words in references {
        for (ngram, count) in ngrams::counts(words, order) {
            let entry = most.entry(ngram).or_insert(0);
            *entry = count.max(*entry);
        }
    }
    most
}

/// Of zero a number so low that the score is zero.
fn logarithm(precision: f64) -> f64 {
    if precision == 0.0 { -9_999_999_999.0 } else { precision.ln() }
}
