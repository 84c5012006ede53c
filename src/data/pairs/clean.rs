//! Which pairs are worth training on, and how their texts are written: one rule for all formats.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use super::markup::Markup;
use super::skips::SkipReason;
use super::{FoundPair, Texts, markers};

/// Less of a text than this share of its signs in letters is no sentence, once placeholders and markup are taken out.
const LETTERS_MIN: f64 = 0.5;

/// What lengths are made longer by before they are compared, so that labels of a few letters are not told by their
/// ratio.
const SHORT: f64 = 8.0;

/// The bounds of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cleaning {
    /// The longest side, in characters.
    pub max_chars: usize,
    /// How many times as long as the other a side may be. Wide characters (Chinese, Japanese, Korean) count twice.
    pub length_ratio: f64,
    /// Whether the second sides are labels, which are no text: of any length, digits alone or the text itself.
    pub labels: bool,
}

impl Default for Cleaning {
    fn default() -> Self {
        Self { max_chars: 400, length_ratio: 3.0, labels: false }
    }
}

/// What the two sides of a record are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    Translations,
    /// A catalogue's message and its translation.
    Message,
    /// A text and its label.
    Labelled,
    /// The same text twice.
    Text,
}

impl RecordKind {
    /// Whether each side says what the other says.
    fn translates(self) -> bool {
        matches!(self, RecordKind::Translations | RecordKind::Message)
    }
}

/// Cleans pairs, and knows which it has met.
#[derive(Clone, Debug)]
pub struct Cleaner {
    cleaning: Cleaning,
    markup: Markup,
    seen: HashSet<u128>,
}

impl Cleaner {
    pub fn new(cleaning: Cleaning) -> Self {
        Self { cleaning, markup: Markup::new(), seen: HashSet::new() }
    }

    /// The pair with single spaces. A catalogue's messages lose the markers of their labels, and are met once in each
    /// language; other pairs may have one source and many targets.
    pub(super) fn clean(&mut self, languages: &[String; 2], texts: Texts, kind: RecordKind) -> FoundPair {
        if texts.iter().any(|text| text.contains(['\u{fffd}', '\0'])) {
            return Err(SkipReason::WrongEncoding);
        }
        let is_catalogue = kind == RecordKind::Message;
        let texts = if is_catalogue { markers::strip(texts) } else { texts };
        let texts = texts.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
        self.judge(&texts, kind)?;
        let [source, target] = &texts;
        let told = if is_catalogue { "" } else { target };
        let told = [languages[0].as_str(), &languages[1], source, told];
        if self.seen.insert(digest(&told)) { Ok(texts) } else { Err(SkipReason::Duplicate) }
    }

    /// Whether the cleaner takes second sides for labels.
    pub(super) fn meets_labels(&self) -> bool {
        self.cleaning.labels
    }

    fn judge(&self, texts: &Texts, kind: RecordKind) -> Result<(), SkipReason> {
        let [source, target] = texts;
        let translates = kind.translates();
        let mut sides = texts.iter().take(if translates { 2 } else { 1 });
        let lengths = texts.each_ref().map(|text| SHORT + width(text));
        let ratio = (lengths[0] / lengths[1]).max(lengths[1] / lengths[0]);
        if source.is_empty() || target.is_empty() {
            Err(SkipReason::EmptySide)
        } else if translates && source == target {
            Err(SkipReason::Untranslated)
        } else if sides.clone().any(|text| text.chars().nth(self.cleaning.max_chars).is_some()) {
            Err(SkipReason::TooLong)
        } else if sides.any(|text| self.letters(text) < LETTERS_MIN) {
            Err(SkipReason::PlaceholderOnly)
        } else if translates && ratio > self.cleaning.length_ratio {
            Err(SkipReason::LengthRatio)
        } else {
            Ok(())
        }
    }

    /// The share of a text's signs that are letters outside of placeholders and markup.
    fn letters(&self, text: &str) -> f64 {
        let letters = self.markup.without(text).chars().filter(|letter| letter.is_alphabetic()).count();
        let signs = text.chars().filter(|letter| !letter.is_whitespace()).count();
        letters as f64 / signs.max(1) as f64
    }
}

/// The width of a text on a terminal, nearly: characters of East Asia are two columns wide.
fn width(text: &str) -> f64 {
    let columns = |letter: char| match letter {
        '\u{1100}'..='\u{115f}' | '\u{2e80}'..='\u{d7a3}' | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ff60}' => 2.0,
        '\u{20000}'..='\u{3fffd}' => 2.0,
        _ => 1.0,
    };
    text.chars().map(columns).sum()
}

fn digest(parts: &[&str]) -> u128 {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let digest: [u8; 32] = hasher.finalize().into();
    u128::from_le_bytes(digest[..16].try_into().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cleaned(cleaner: &mut Cleaner, pair: [&str; 2], is_catalogue: bool) -> Result<[String; 2], SkipReason> {
        let kind = if is_catalogue { RecordKind::Message } else { RecordKind::Translations };
        cleaner.clean(&["en".to_owned(), "xx".to_owned()], pair.map(str::to_owned), kind)
    }

    /// A label may be a number, as long as a sentence, or what the text says; a text must be a text.
    #[test]
    fn labels_are_no_text_to_clean() {
        let sentence = "all that may be said of it, and a good deal more than that";
        let judged = |pair: [&str; 2], kind| {
            let languages = ["en", "labels"].map(str::to_owned);
            let mut cleaner = Cleaner::new(Cleaning { max_chars: 60, ..Cleaning::default() });
            cleaner.clean(&languages, pair.map(str::to_owned), kind).map(|[_, label]| label)
        };
        for label in ["1", "0", "-1", "5 / 5", "★★★", "good", sentence, &sentence.repeat(3)] {
            assert_eq!(judged(["good", label], RecordKind::Labelled), Ok(label.to_owned()));
        }
        assert_eq!(judged(["good", "1"], RecordKind::Translations), Err(SkipReason::PlaceholderOnly));
        for (pair, reason) in [
            (["good", " "], SkipReason::EmptySide),
            (["12:30", "1"], SkipReason::PlaceholderOnly),
            ([&sentence.repeat(3), "1"], SkipReason::TooLong),
        ] {
            assert_eq!(judged(pair, RecordKind::Labelled), Err(reason), "{pair:?}");
        }
    }

    #[test]
    fn a_text_alone_is_its_own_pair() {
        let mut cleaner = Cleaner::new(Cleaning::default());
        let mut judged = |text: &str| {
            cleaner.clean(&["de", "de"].map(str::to_owned), [text, text].map(str::to_owned), RecordKind::Text)
        };
        assert_eq!(judged("Das  Haus "), Ok(["Das Haus", "Das Haus"].map(str::to_owned)));
        for (text, reason) in [
            ("Das Haus", SkipReason::Duplicate),
            (" ", SkipReason::EmptySide),
            ("12:30 %s", SkipReason::PlaceholderOnly),
            (&"lang ".repeat(100), SkipReason::TooLong),
            ("H\u{fffd}user", SkipReason::WrongEncoding),
        ] {
            assert_eq!(judged(text), Err(reason), "{text}");
        }
    }

    #[test]
    fn pairs_are_left_out_for_a_reason() {
        let long = "word ".repeat(100);
        for (pair, reason) in [
            (["", "x y z"], SkipReason::EmptySide),
            (["x y z", " \n"], SkipReason::EmptySide),
            (["same text", "same  text "], SkipReason::Untranslated),
            (["caf\u{fffd}", "coffee"], SkipReason::WrongEncoding),
            (["c\0a\0f", "coffee"], SkipReason::WrongEncoding),
            (["%s: %s (%d)", "%s : %s (%d)"], SkipReason::PlaceholderOnly),
            (["<b>%s</b> ok", "<b>%s</b> gut"], SkipReason::PlaceholderOnly),
            (["12:30", "12.30"], SkipReason::PlaceholderOnly),
            (["{name} {value:>10}", "{value} {name}"], SkipReason::PlaceholderOnly),
            ([long.as_str(), "Wort"], SkipReason::TooLong),
            (["no", "this is a very long translation of it"], SkipReason::LengthRatio),
        ] {
            let mut cleaner = Cleaner::new(Cleaning::default());
            assert_eq!(cleaned(&mut cleaner, pair, true), Err(reason), "{pair:?}");
        }
        for pair in [["Open %s", "Öffne %s"], ["Hindi", "हिन्दी"], ["file", "文件"], ["Quit", "終了"], ["a b", "ב א"]]
        {
            assert!(cleaned(&mut Cleaner::new(Cleaning::default()), pair, true).is_ok(), "{pair:?}");
        }
    }

    /// The longest text is as long as is said, and wide characters count twice.
    #[test]
    fn lengths_are_compared_at_their_limits() {
        let judged = |cleaning: Cleaning, pair: [&str; 2]| cleaned(&mut Cleaner::new(cleaning), pair, false).err();
        let longest = Cleaning { max_chars: 9, ..Cleaning::default() };
        assert_eq!(judged(longest, ["nine char", "neun mal."]), None);
        assert_eq!(judged(longest, ["nine char", "zehn Mal.."]), Some(SkipReason::TooLong));
        let [narrow, wide] = ["a".repeat(100), "文".repeat(40)];
        let ratio = |length_ratio: f64| Cleaning { length_ratio, ..Cleaning::default() };
        assert_eq!(judged(ratio(1.3), [&narrow, &wide]), None);
        assert_eq!(judged(ratio(1.3), [&narrow, &"b".repeat(40)]), Some(SkipReason::LengthRatio));
    }

    #[test]
    fn a_message_is_met_once_and_a_source_with_each_target() {
        let mut cleaner = Cleaner::new(Cleaning::default());
        let texts = cleaned(&mut cleaner, ["_Open\nfile", "Datei  _öffnen"], true);
        assert_eq!(texts, Ok(["Open file".to_owned(), "Datei öffnen".to_owned()]));
        assert_eq!(cleaned(&mut cleaner, ["Open file", "Öffne Datei"], true), Err(SkipReason::Duplicate));
        let mut cleaner = Cleaner::new(Cleaning::default());
        assert!(cleaned(&mut cleaner, ["Open file", "Datei öffnen"], false).is_ok());
        assert!(cleaned(&mut cleaner, ["Open file", "Öffne Datei"], false).is_ok());
        assert_eq!(cleaned(&mut cleaner, ["Open file", "Öffne Datei"], false), Err(SkipReason::Duplicate));
        let german = ["en".to_owned(), "de".to_owned()];
        let texts = ["Open file", "Öffne Datei"].map(str::to_owned);
        assert!(cleaner.clean(&german, texts, RecordKind::Translations).is_ok(), "languages are told apart");
    }
}
