//! How good outputs are, as the field's own tools count it: BLEU, chrF and chrF++ as sacrebleu defines them, and shares
//! of exact matches.
//!
//! ```text
//!  hypothesis, references --> WordTokenizer --> counts of matching n-grams --> sums over segments --> score
//! ```
//!
//! A *segment* is one line: a hypothesis with its references. Counts of segments are added, so the parts of a corpus
//! may be counted apart and in any order; a score is a function of the sums.
//!
//! The tokenizers of sacrebleu that need dictionaries or models (`ja-mecab`, `ko-mecab`, `spm`, `flores101`,
//! `flores200`) are not built. Choose [`Tokenize::Char`] for Japanese and Korean, [`Tokenize::Zh`] for Chinese, or
//! chrF, which needs no tokenizer.

mod bleu;
mod chrf;
mod error;
mod matches;
mod ngrams;
mod python;
mod words;

pub use bleu::{Bleu, BleuCounts, BleuOptions, BleuScore, Smoothing};
pub use chrf::{Chrf, ChrfCounts, ChrfOptions, ChrfScore};
pub use error::Error;
pub use matches::{accuracy, exact_match};
pub use words::{Tokenize, WordTokenizer};

/// The release of sacrebleu whose numbers the tests compare; part of a signature.
pub const SACREBLEU_VERSION: &str = "2.6.0";

/// References by segment, or the error that says what is missing.
fn checked<'a, H, R>(
    hypotheses: &'a [H],
    references: &'a [Vec<R>],
) -> Result<impl Iterator<Item = (&'a H, &'a Vec<R>)>, Error> {
    if hypotheses.len() != references.len() {
        return Err(Error::Lengths { hypotheses: hypotheses.len(), references: references.len() });
    }
    if hypotheses.is_empty() {
        return Err(Error::Nothing);
    }
    match references.iter().position(Vec::is_empty) {
        Some(segment) => Err(Error::NoReference { segment: segment + 1 }),
        None => Ok(hypotheses.iter().zip(references)),
    }
}

/// The number of references of every segment as a signature has it: `var` where it varies.
fn reference_count<R>(references: &[Vec<R>]) -> String {
    let first = references.first().map_or(0, Vec::len);
    if references.iter().all(|of_segment| of_segment.len() == first) { first.to_string() } else { "var".to_owned() }
}
