//! Strings as Python sees them, where that differs from Rust.

/// Whether `str.split()` takes a character for white space: Unicode's white space, and four separators of ASCII.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}

/// `str.split()`.
pub(super) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// The words of [`split`] with one space between them.
pub(super) fn single_spaced(text: &str) -> String {
    split(text).collect::<Vec<_>>().join(" ")
}
