//! A conversation as tokens, of which some are given and the others are learned.

use std::ops::Range;

use serde_json::Value;

use super::answers::{self, RenderedChat};
use super::hidden::{HiddenNames, special};
use super::messages::{ChatMessage, is_answer, messages};
use super::template::ChatTemplate;
use crate::data::config::ChatLoss;
use crate::data::error::Error;
use crate::data::tokenizer::Tokenizer;

/// Writes conversations as tokens; any number of threads may do so at once.
#[derive(Debug)]
pub struct ChatEncoder {
    template: ChatTemplate,
    /// Recognises the names of special tokens.
    recognising: tokenizers::Tokenizer,
    /// Takes them for text.
    literal: tokenizers::Tokenizer,
    loss: ChatLoss,
    end: Option<u32>,
}

/// What becomes of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::data) enum EncodedChat {
    /// Its tokens, and those of them that are given: in ascending order, none at once with another.
    Tokens { tokens: Vec<u32>, given: Vec<Range<usize>> },
    /// There is nothing to learn in it.
    NoAnswer,
    /// A message has the name of a special token, and this tokenizer cannot write that as text.
    Forged,
}

/// Tokens, each with the bytes of the text that it stands for.
type PlacedTokens = Vec<(u32, Range<usize>)>;

impl ChatEncoder {
    pub fn new(template: ChatTemplate, tokenizer: &Tokenizer, loss: ChatLoss) -> ChatEncoder {
        let end = template.end().and_then(|name| tokenizer.token(name));
        let [recognising, literal] = [false, true].map(|is_literal| tokenizer.placing(is_literal));
        ChatEncoder { template, recognising, literal, loss, end }
    }

    /// The tokens of a conversation, given as [`super::conversation`] has it.
    ///
    /// # Errors
    /// What the template or the tokenizer says.
    pub(in crate::data) fn encode(&self, json: &str) -> Result<EncodedChat, String> {
        let mut messages = messages(json)?;
        let learns_all = self.loss == ChatLoss::All;
        if !learns_all && !messages.iter().any(is_answer) {
            return Ok(EncodedChat::NoAnswer);
        }
        let Some(hidden) = HiddenNames::hide(&self.recognising, &mut messages) else { return Ok(EncodedChat::Forged) };
        let RenderedChat { text, mut answers } = match learns_all {
            true => answers::render_all(&self.template, &messages)?,
            false => answers::render(&self.template, &messages)?,
        };
        if !self.template.marks_answers() {
            answers.iter_mut().for_each(|answer| self.end_with_turn(&text, answer));
        }
        let Some(placed) = self.placed(&text, &hidden)? else { return Ok(EncodedChat::Forged) };
        let is_learned = |bytes: &Range<usize>| learns_all || answers.iter().any(|answer| meet(bytes, answer));
        let given = runs(placed.iter().map(|(_, bytes)| !is_learned(bytes)));
        if given.iter().map(Range::len).sum::<usize>() == placed.len() {
            return Ok(EncodedChat::NoAnswer);
        }
        Ok(EncodedChat::Tokens { tokens: placed.into_iter().map(|(id, _)| id).collect(), given })
    }

    /// The tokens that ask for an answer to a user's message.
    ///
    /// # Errors
    /// What the template or the tokenizer says; the name of a special token, where that cannot be written as text.
    pub fn prompt(&self, user: &str) -> Result<Vec<u32>, Error> {
        let message = [("role", "user"), ("content", user)].map(|(key, text)| (key.to_owned(), Value::from(text)));
        let mut messages = [ChatMessage::from_iter(message)];
        let tokens = match HiddenNames::hide(&self.recognising, &mut messages) {
            None => Ok(None),
            Some(hidden) => {
                let text = self.template.render(&messages, true);
                text.and_then(|text| self.placed(&answers::marked(&text).text, &hidden))
            }
        };
        let forged =
            || "the prompt has the name of a special token, which the tokenizer cannot write as text".to_owned();
        let tokens = tokens.and_then(|tokens| tokens.ok_or_else(forged));
        let tokens = tokens.map_err(|message| self.template.wrong(message))?;
        Ok(tokens.into_iter().map(|(id, _)| id).collect())
    }

    /// The token that ends a turn by the model's own account.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    fn placed(&self, text: &str, hidden: &HiddenNames) -> Result<Option<PlacedTokens>, String> {
        match hidden.is_empty() {
            true => placed(&self.recognising, text).map(Some),
            false => self.apart(text, hidden),
        }
    }

    /// Spaces behind the token that ends a turn are no part of the answer.
    fn end_with_turn(&self, text: &str, answer: &mut Range<usize>) {
        if let Some((_, last)) = special(&self.recognising, &text[answer.clone()]).last() {
            let end = answer.start + last.end;
            if text[end..answer.end].trim().is_empty() {
                answer.end = end;
            }
        }
    }

    /// The tokens of a text with hidden names: its special tokens, and what is between them, each by itself with the names
    /// written out. Nothing, if the tokenizer would write the parts otherwise than the whole.
    fn apart(&self, text: &str, hidden: &HiddenNames) -> Result<Option<PlacedTokens>, String> {
        let mut parts: Vec<(Option<u32>, Range<usize>)> = Vec::new();
        let mut rest = 0;
        for (id, bytes) in special(&self.recognising, text) {
            parts.extend([(None, rest..bytes.start), (Some(id), bytes.clone())]);
            rest = bytes.end;
        }
        parts.push((None, rest..text.len()));
        parts.retain(|(id, bytes)| id.is_some() || !bytes.is_empty());
        let mut together = Vec::new();
        let mut written = Vec::new();
        for (id, bytes) in parts {
            let Some(id) = id else {
                together.extend(placed(&self.literal, &text[bytes.clone()])?.into_iter().map(|(id, _)| id));
                let restored = hidden.restore(&text[bytes.clone()]);
                let tokens = placed(&self.literal, &restored.text)?.into_iter();
                let moved = |own: Range<usize>| bytes.start + own.start..bytes.start + own.end;
                written.extend(tokens.map(|(id, own)| (id, moved(restored.marked(own)))));
                continue;
            };
            together.push(id);
            written.push((id, bytes));
        }
        let whole = placed(&self.recognising, text)?;
        Ok(whole.into_iter().map(|(id, _)| id).eq(together).then_some(written))
    }
}

fn placed(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<PlacedTokens, String> {
    let encoding = tokenizer.encode(text, false).map_err(|error| error.to_string())?;
    let places = encoding.get_offsets().iter().map(|&(start, end)| start..end);
    Ok(encoding.get_ids().iter().copied().zip(places).collect())
}

/// Whether two ranges have a byte in common; one without any is where it stands.
fn meet(bytes: &Range<usize>, answer: &Range<usize>) -> bool {
    bytes.start < answer.end && bytes.end.max(bytes.start + 1) > answer.start
}

/// Where the flags are set.
fn runs(flags: impl Iterator<Item = bool>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (place, _) in flags.enumerate().filter(|(_, is_set)| *is_set) {
        match runs.last_mut() {
            Some(run) if run.end == place => run.end += 1,
            _ => runs.push(place..place + 1),
        }
    }
    runs
}
