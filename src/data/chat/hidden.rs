//! Names of special tokens within messages, which are text, kept apart from those that the template writes.
//!
//! Before a template runs, each name in a message is replaced by a mark of noncharacters. What is then recognised in the
//! template's text is the template's own.

use std::ops::Range;

use serde_json::Value;
use tokenizers::{OffsetReferential, OffsetType};

use super::messages::ChatMessage;

/// Around the number of a name; between them its hexadecimal digits.
const AROUND: [char; 2] = ['\u{fdd2}', '\u{fdd3}'];
const DIGIT: u32 = 0xfde0;

/// The noncharacters that are used here and for answers.
const RESERVED: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The special tokens in a text, each with the bytes that stand for it.
pub(super) fn special(tokenizer: &tokenizers::Tokenizer, text: &str) -> Vec<(u32, Range<usize>)> {
    let added = tokenizer.get_added_vocabulary();
    let split = added.extract_and_normalize(tokenizer.get_normalizer(), text);
    let is_special = |id: u32| added.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special);
    let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
    let tokens =
        splits.into_iter().filter_map(|(_, (start, end), tokens)| Some((tokens.as_ref()?.first()?.id, start..end)));
    tokens.filter(|(id, _)| is_special(*id)).collect()
}

/// The names that were taken out of the messages of a conversation.
#[derive(Debug, Default)]
pub(super) struct HiddenNames(Vec<String>);

impl HiddenNames {
    /// Hides the names in all texts of the messages. Nothing, if the messages have noncharacters themselves.
    pub(super) fn hide(tokenizer: &tokenizers::Tokenizer, messages: &mut [ChatMessage]) -> Option<HiddenNames> {
        let mut hidden = HiddenNames::default();
        let mut values = messages.iter_mut().flat_map(|message| message.values_mut());
        values.all(|value| hidden.hide_in(tokenizer, value)).then_some(hidden)
    }

    fn hide_in(&mut self, tokenizer: &tokenizers::Tokenizer, value: &mut Value) -> bool {
        match value {
            Value::String(text) => {
                if text.contains(|letter| RESERVED.contains(&letter)) {
                    return false;
                }
                for (_, range) in special(tokenizer, text).into_iter().rev() {
                    let mark = mark(self.0.len());
                    self.0.push(text[range.clone()].to_owned());
                    text.replace_range(range, &mark);
                }
                true
            }
            Value::Array(values) => values.iter_mut().all(|value| self.hide_in(tokenizer, value)),
            Value::Object(members) => {
                let is_plain = |key: &String| special(tokenizer, key).is_empty();
                members.keys().all(is_plain) && members.values_mut().all(|value| self.hide_in(tokenizer, value))
            }
            _ => true,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A part of the template's text with the names as they were, and where they were and are.
    pub(super) fn restore(&self, text: &str) -> RestoredText {
        let mut restored = RestoredText { text: String::new(), names: Vec::new() };
        let mut rest = 0;
        for (start, _) in text.match_indices(AROUND[0]) {
            let Some(length) = text[start..].find(AROUND[1]) else { continue };
            let end = start + length + AROUND[1].len_utf8();
            let Some(name) = number(&text[start..end]).and_then(|number| self.0.get(number)) else { continue };
            restored.text.push_str(&text[rest..start]);
            let now = restored.text.len()..restored.text.len() + name.len();
            restored.text.push_str(name);
            restored.names.push((now, start..end));
            rest = end;
        }
        restored.text.push_str(&text[rest..]);
        restored
    }
}

/// A text with the names as they were.
pub(super) struct RestoredText {
    pub(super) text: String,
    /// The bytes of a name here, and those of the mark that was in its place.
    names: Vec<(Range<usize>, Range<usize>)>,
}

impl RestoredText {
    /// Where bytes of this text are in the one with marks; a part of a name is at all of its mark.
    pub(super) fn marked(&self, bytes: Range<usize>) -> Range<usize> {
        self.place(bytes.start, false)..self.place(bytes.end, true)
    }

    fn place(&self, byte: usize, is_end: bool) -> usize {
        let before = self.names.iter().take_while(|(now, _)| if is_end { now.start < byte } else { now.start <= byte });
        match before.last() {
            None => byte,
            Some((now, then)) if byte < now.end => {
                if is_end {
                    then.end
                } else {
                    then.start
                }
            }
            Some((now, then)) => byte - now.end + then.end,
        }
    }
}

fn mark(number: usize) -> String {
    let digit = |digit: char| char::from_u32(DIGIT + digit.to_digit(16).expect("a digit")).expect("a noncharacter");
    let digits: String = format!("{number:x}").chars().map(digit).collect();
    format!("{}{digits}{}", AROUND[0], AROUND[1])
}

fn number(mark: &str) -> Option<usize> {
    let digits = mark.strip_prefix(AROUND[0])?.strip_suffix(AROUND[1])?.chars();
    let digits: Option<String> =
        digits.map(|digit| char::from_digit(u32::from(digit).wrapping_sub(DIGIT), 16)).collect();
    usize::from_str_radix(&digits?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_to_where_they_were() {
        let hidden = HiddenNames(vec!["<s>".into(), "</s>".into()]);
        let text = format!("a{}b{}c", mark(1), mark(0));
        let restored = hidden.restore(&text);
        assert_eq!(restored.text, "a</s>b<s>c");
        let marks = [mark(1).len(), mark(0).len()];
        assert_eq!(restored.marked(0..1), 0..1);
        assert_eq!(restored.marked(1..5), 1..1 + marks[0]);
        assert_eq!(restored.marked(2..3), 1..1 + marks[0]);
        assert_eq!(restored.marked(5..6), 1 + marks[0]..2 + marks[0]);
        assert_eq!(restored.marked(9..10), text.len() - 1..text.len());
        assert_eq!((number(&mark(0x1f3)), number(AROUND[0].to_string().as_str())), (Some(0x1f3), None));
    }
}
