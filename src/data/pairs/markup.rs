//! What programs fill into messages, and what they mark them up with: nothing that is translated.

use regex::Regex;

/// Addresses, tags, entities, and placeholders of printf, Python, Qt, shells and templates. `% d`, with the space that
/// printf allows, is left alone: more often it is a percent sign and a word.
const PATTERN: &str = concat!(
    r"(?:https?|ftp)://[^ \t\r\n<>]+",
    r"|</?[A-Za-z][^<>]{0,200}>",
    r"|&#?[A-Za-z0-9]{1,10};",
    r"|%L[0-9]{1,2}",
    r"|%\([A-Za-z_][A-Za-z0-9_]*\)[#0+-]*[0-9]*(?:\.[0-9]+)?[a-zA-Z]",
    r"|%(?:[0-9]+\$)?[#0+'-]*(?:[0-9]+|\*)?(?:\.(?:[0-9]+|\*))?(?:hh|h|ll|l|L|q|j|z|Z|t)?[A-Za-z%]",
    r"|%<[A-Za-z0-9]+>|%[0-9]{1,2}",
    r"|\$\{[^{}\n]{0,60}\}|\$[A-Za-z_][A-Za-z0-9_]*",
    r"|\{[^{} \t\r\n]{0,60}\}",
);

/// The pattern, compiled.
#[derive(Clone, Debug)]
pub(super) struct Markup(Regex);

impl Markup {
    pub(super) fn new() -> Self {
        Self(Regex::new(PATTERN).expect("our own pattern is well-formed"))
    }

    /// The text with a space for each placeholder or piece of markup.
    pub(super) fn without(&self, text: &str) -> String {
        self.0.replace_all(text, " ").into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_many_tongues_are_known() {
        for text in [
            "%s",
            "%d",
            "%-10.3lf",
            "%2$s",
            "%(name)s",
            "%%",
            "%1",
            "%L1",
            "%<PRIu64>",
            "{}",
            "{0}",
            "{name!r:>10}",
            "$HOME",
            "${HOME:-x}",
            "<b>",
            "</b>",
            "<a href=\"x\">",
            "&lt;",
            "&#160;",
            "https://example.org/a?b",
            "%*d",
            "%zu",
        ] {
            assert_eq!(Markup::new().without(text), " ", "{text}");
        }
        for text in ["100% sure", "a < b > c", "R&D", "{ x }", "5 $"] {
            assert_eq!(Markup::new().without(text), text);
        }
    }
}
