//! Writing texts with a checkpoint of two stacks: what its tokenizer and its recipe say of every text.

use super::CommandFailure;
use super::trained::Trained;
use crate::data::Tokenizer;
use crate::model::{BeamOptions, Translator};
use crate::train::Error;

/// How beams are searched, as the command line has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeOptions {
    pub(super) beams: usize,
    pub(super) length_penalty: f64,
    /// None: as many as a row of the model has.
    pub(super) max_tokens: Option<usize>,
}

/// Versions of a text that a search may follow.
const BEAMS_MAX: usize = 1000;

/// Refuses a search among no versions, and among more than anybody means.
pub(super) fn check_beams(beams: usize) -> Result<(), CommandFailure> {
    let wrong = match beams {
        0 => "there is nothing to choose from; 1 takes the likeliest token every time".to_owned(),
        1..=BEAMS_MAX => return Ok(()),
        _ => format!("each beam is a row to compute in every step; use {BEAMS_MAX} or fewer"),
    };
    Err(CommandFailure::Request(anyhow::anyhow!("--beams {beams}: {wrong}")))
}

/// Decodes one text after the other.
pub(super) struct TextDecoder<'a> {
    translator: &'a Translator<'a>,
    pub(super) tokenizer: &'a Tokenizer,
    options: BeamOptions,
    writable: Vec<bool>,
}

impl<'a> TextDecoder<'a> {
    pub(super) fn new(translator: &'a Translator<'a>, trained: &'a Trained, search: DecodeOptions) -> TextDecoder<'a> {
        let tokenizer = &trained.tokenizer;
        let options = BeamOptions {
            beams: search.beams,
            length_penalty: search.length_penalty,
            max_tokens: search.max_tokens.unwrap_or(trained.config.model.seq),
            end: tokenizer.end_of_text(),
        };
        TextDecoder { translator, tokenizer, options, writable: writable(tokenizer) }
    }

    pub(super) fn end(&self) -> u32 {
        self.options.end
    }

    /// The best text behind the tag `first` for a source with its tag and its end, as one line.
    ///
    /// # Errors
    /// What the model reports; logits that are no numbers.
    pub(super) fn text(&self, source: &[u32], first: u32) -> Result<String, Error> {
        let found = self.translator.translate(source, first, &self.options, &self.writable)?;
        let best = found.into_iter().next().ok_or(Error::Scores { token: 1 })?;
        self.line(&best.tokens)
    }

    /// Tokens as one line.
    ///
    /// # Errors
    /// Tokens that the tokenizer does not have.
    pub(super) fn line(&self, tokens: &[u32]) -> Result<String, Error> {
        Ok(one_line(&self.tokenizer.decode(tokens)?))
    }
}

/// By token whether a text may have it: tags and the mask are none.
fn writable(tokenizer: &Tokenizer) -> Vec<bool> {
    let mut writable = vec![true; tokenizer.vocab()];
    let all_tags = tokenizer.tags();
    let special = all_tags.iter().filter_map(|language| tokenizer.tag(language)).chain(tokenizer.mask().ok());
    special.for_each(|token| writable[token as usize] = false);
    writable
}

/// With single blanks for all white space.
pub(super) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_tags_nor_the_mask_are_written() {
        let languages = ["de", "en"].map(str::to_owned);
        let tokenizer = Tokenizer::train_tagged(&["the house".to_owned()], 300, None, &languages).unwrap();
        let special = [tokenizer.tag("de").unwrap(), tokenizer.tag("en").unwrap(), tokenizer.mask().unwrap()];
        let open = writable(&tokenizer);
        assert!((0..tokenizer.vocab() as u32).all(|token| open[token as usize] != special.contains(&token)));
    }
}
