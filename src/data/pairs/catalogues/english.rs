//! Whether a program's messages are English text, or names by which it looks up even its English.

use super::Catalogue;

/// Of fewer messages nothing is told: they count as English.
const MESSAGES_MIN: usize = 20;

/// Words that hardly any English sentence of some length does without.
const COMMON: [&str; 38] = [
    "a", "all", "an", "and", "are", "as", "at", "be", "by", "can", "cannot", "could", "do", "does", "for", "from",
    "has", "if", "in", "is", "it", "no", "not", "of", "on", "or", "that", "the", "this", "to", "use", "was", "when",
    "will", "with", "without", "you", "your",
];

/// Words that make a message long enough to tell its language.
const LONG: usize = 5;

/// Whether the messages are English: hardly any is a name like `menu.file.open` or `IDS_OPEN`, and long ones have the
/// common words of the language.
pub(in crate::data::pairs) fn is_english(catalogue: &Catalogue) -> bool {
    let ids: Vec<&str> = catalogue.entries.iter().flatten().map(|entry| entry.id.trim()).collect();
    let symbols = ids.iter().filter(|id| is_symbol(id)).count();
    if ids.len() >= MESSAGES_MIN && 2 * symbols > ids.len() {
        return false;
    }
    let words = ids.iter().map(|id| id.split(|letter: char| !letter.is_alphabetic()).filter(|word| !word.is_empty()));
    let long: Vec<Vec<&str>> = words.map(Iterator::collect).filter(|words: &Vec<_>| words.len() >= LONG).collect();
    let common = |words: &&Vec<&str>| words.iter().any(|word| COMMON.contains(&word.to_lowercase().as_str()));
    let told = long.iter().filter(common).count();
    long.len() < MESSAGES_MIN || 3 * told > long.len()
}

/// Whether a message is one word put together from several, with signs between them or capitals within.
fn is_symbol(id: &str) -> bool {
    let joined = |pair: &[u8]| pair[0].is_ascii_alphanumeric() && matches!(pair[1], b'_' | b'.' | b':' | b'/');
    let camel = |pair: &[u8]| pair[0].is_ascii_lowercase() && pair[1].is_ascii_uppercase();
    let inner = &id.as_bytes()[..id.len().saturating_sub(1)];
    !id.contains(char::is_whitespace) && inner.windows(2).any(|pair| joined(pair) || camel(pair))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::data::pairs::catalogues::po;

    fn told(ids: impl Iterator<Item = String>) -> bool {
        let text: String = ids.map(|id| format!("msgid \"{id}\"\nmsgstr \"x\"\n\n")).collect();
        is_english(&po::parse(text.as_bytes(), Path::new("a.po")).unwrap())
    }

    #[test]
    fn names_and_other_languages_are_not_english() {
        assert!(told((0..40).map(|n| format!("Cannot open the file number {n} of this folder."))));
        assert!(told((0..40).map(|n| format!("Aruba{n}"))), "short messages tell nothing");
        assert!(!told((0..40).map(|n| format!("menu.file.open{n}"))));
        assert!(!told((0..40).map(|n| format!("IDS_OPEN_{n}"))));
        assert!(!told((0..40).map(|n| format!("openFile{n}Label"))));
        assert!(!told((0..40).map(|n| format!("Die Datei Nummer {n} lässt sich leider nicht öffnen."))));
        assert!(told((0..5).map(|n| format!("menu.file.open{n}"))), "few messages tell nothing");
    }
}
