//! Masked language modelling (Devlin et al. 2018) as a source over a source: which tokens are hidden, and how, is a
//! function of the seed, the pass over the data, the row and the place in it. So every pass hides others, and neither
//! resuming nor the mesh hides anything else.

use guildhall_tensor::{Draws, Purpose};

use super::error::Error;
use super::manifest::sha256;
use super::source::{IGNORE, Row, Source};
use super::tokenizer::Tokenizer;

/// Of the selected tokens, the share that becomes the mask.
const MASKED: f32 = 0.8;
/// The share that becomes the mask or a random token; the rest stays.
const CHANGED: f32 = 0.9;

/// Rows of another source with some of their tokens hidden; the hidden tokens are the targets, and there are no
/// others. Ends of text are never selected: where documents end is no question of language.
#[derive(Clone, Debug)]
pub struct Masked<S> {
    rows: S,
    seed: u64,
    rate: f32,
    mask: u32,
    end_of_text: u32,
    vocab: usize,
}

/// What one draw is for.
#[derive(Clone, Copy)]
enum MaskDraw {
    Selection = 0,
    Change = 1,
    Token = 2,
}

impl<S: Source> Masked<S> {
    /// Selects each token with probability `rate`.
    ///
    /// # Errors
    /// A tokenizer without a mask token.
    pub fn new(rows: S, tokenizer: &Tokenizer, rate: f64, seed: u64) -> Result<Self, Error> {
        let (mask, end_of_text, vocab) = (tokenizer.mask()?, tokenizer.end_of_text(), tokenizer.vocab());
        Ok(Self { rows, seed, rate: rate as f32, mask, end_of_text, vocab })
    }

    /// What stands for a selected token.
    fn hidden(&self, token: u32, change: f32, random: u32) -> u32 {
        if change < MASKED {
            self.mask
        } else if change < CHANGED {
            // The upper half of the product: each token as likely as any other up to 2^-32 of the vocabulary.
            ((u64::from(random) * self.vocab as u64) >> 32) as u32
        } else {
            token
        }
    }
}

impl<S: Source> Source for Masked<S> {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn seq(&self) -> usize {
        self.rows.seq()
    }

    fn get(&self, index: usize, pass: u64) -> Result<Row, Error> {
        let mut row = self.rows.get(index, pass)?;
        let draws = |draw: MaskDraw| Draws::new(self.seed, Purpose::Mask, pass, draw as u32);
        let [selection, change, random] = [MaskDraw::Selection, MaskDraw::Change, MaskDraw::Token].map(draws);
        let first = index as u64 * self.seq() as u64;
        for ((at, token), target) in (first..).zip(&mut row.tokens).zip(&mut row.targets) {
            let selected = *token != self.end_of_text && selection.uniform(at) < self.rate;
            *target = if selected { *token } else { IGNORE };
            if selected {
                *token = self.hidden(*token, change.uniform(at), random.bits(at));
            }
        }
        Ok(row)
    }

    fn fingerprint(&self) -> String {
        let Self { rows, seed, rate, mask, end_of_text, vocab } = self;
        sha256(format!("masked {seed} {rate} {mask} {end_of_text} {vocab} {}", rows.fingerprint()).as_bytes())
    }
}
