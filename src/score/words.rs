//! How BLEU cuts a line into words: the tokenizers of sacrebleu that are rules and no dictionaries.

use std::fmt;
use std::str::FromStr;

use regex::Regex;

use super::error::Error;
use super::python::{is_space, single_spaced};

/// A tokenizer by its name in a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokenize {
    /// That of mteval-v13a, used by WMT.
    V13a,
    /// That of mteval-v14: punctuation and symbols of all scripts.
    Intl,
    /// Every Chinese character is a word, the rest as in 13a.
    Zh,
    /// Every character is a word.
    Char,
    /// The line is tokenised already.
    None,
}

impl Tokenize {
    pub const ALL: [Tokenize; 5] = [Tokenize::V13a, Tokenize::Intl, Tokenize::Zh, Tokenize::Char, Tokenize::None];

    pub fn name(self) -> &'static str {
        match self {
            Tokenize::V13a => "13a",
            Tokenize::Intl => "intl",
            Tokenize::Zh => "zh",
            Tokenize::Char => "char",
            Tokenize::None => "none",
        }
    }

    /// Replacements in their order. A match begins behind the one before, so a sign may escape a rule; that is part of
    /// the definition.
    fn rules(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Tokenize::V13a | Tokenize::Zh => &[
                // Punctuation of ASCII but for the full stop, comma, hyphen and apostrophe.
                (r"([{-~\[-` -&(-+:-@/])", " $1 "),
                (r"([^0-9])([.,])", "$1 $2 "),
                (r"([.,])([^0-9])", " $1 $2"),
                (r"([0-9])(-)", "$1 $2 "),
            ],
            Tokenize::Intl => &[(r"(\P{N})(\p{P})", "$1 $2 "), (r"(\p{P})(\P{N})", " $1 $2"), (r"(\p{S})", " $1 ")],
            Tokenize::Char | Tokenize::None => &[],
        }
    }
}

impl fmt::Display for Tokenize {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Tokenize {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.iter().map(|tokenize| tokenize.name()).collect();
        let found = Self::ALL.into_iter().find(|tokenize| tokenize.name() == name);
        found.ok_or_else(|| Error::UnknownTokenizer { name: name.to_owned(), names: names() })
    }
}

/// A tokenizer with its rules compiled.
#[derive(Clone, Debug)]
pub struct WordTokenizer {
    tokenize: Tokenize,
    rules: Vec<(Regex, &'static str)>,
}

impl WordTokenizer {
    pub fn new(tokenize: Tokenize) -> Self {
        let compiled = |&(pattern, with): &(&str, &'static str)| {
            (Regex::new(pattern).expect("our own patterns are well-formed"), with)
        };
        Self { tokenize, rules: tokenize.rules().iter().map(compiled).collect() }
    }

    pub fn tokenize(&self) -> Tokenize {
        self.tokenize
    }

    /// The line with white space between its words.
    pub fn apply(&self, line: &str) -> String {
        match self.tokenize {
            Tokenize::V13a => self.separate(&format!(" {} ", without_markup(line))),
            Tokenize::Intl => self.separate(line),
            Tokenize::Zh => self.separate(&with_chinese_apart(line.trim_matches(is_space))),
            Tokenize::Char => {
                let letters = line.chars().flat_map(|letter| [' ', letter]);
                letters.skip(1).collect()
            }
            Tokenize::None => line.to_owned(),
        }
    }

    fn separate(&self, line: &str) -> String {
        let mut line = line.to_owned();
        for (pattern, with) in &self.rules {
            line = pattern.replace_all(&line, *with).into_owned();
        }
        single_spaced(&line)
    }
}

/// What 13a takes out of a line of SGML. `&amp;` is not the last, so `&amp;lt;` becomes `<`.
fn without_markup(line: &str) -> String {
    let line = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    line.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
}

fn with_chinese_apart(line: &str) -> String {
    let mut apart = String::with_capacity(2 * line.len());
    for letter in line.chars() {
        if is_chinese(letter) {
            apart.extend([' ', letter, ' ']);
        } else {
            apart.push(letter);
        }
    }
    apart
}

/// The ranges of sacrebleu's `zh`. It writes the supplementary planes as four hexadecimal digits and one more letter,
/// which makes them the ranges 2001 to 2A6D (general punctuation, arrows, mathematics) and 2F81 to 2FA1 instead: scores
/// follow it.
fn is_chinese(letter: char) -> bool {
    matches!(letter,
        '\u{3400}'..='\u{4db5}'
        | '\u{4e00}'..='\u{9fa5}'
        | '\u{9fa6}'..='\u{9fbb}'
        | '\u{f900}'..='\u{fa2d}'
        | '\u{fa30}'..='\u{fa6a}'
        | '\u{fa70}'..='\u{fad9}'
        | '\u{2001}'..='\u{2a6d}'
        | '\u{2f81}'..='\u{2fa1}'
        | '\u{ff00}'..='\u{ffef}'
        | '\u{2e80}'..='\u{2eff}'
        | '\u{3000}'..='\u{303f}'
        | '\u{31c0}'..='\u{31ef}'
        | '\u{2f00}'..='\u{2fdf}'
        | '\u{2ff0}'..='\u{2fff}'
        | '\u{3100}'..='\u{312f}'
        | '\u{31a0}'..='\u{31bf}'
        | '\u{fe10}'..='\u{fe1f}'
        | '\u{fe30}'..='\u{fe4f}'
        | '\u{3200}'..='\u{33ff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(tokenize: Tokenize, line: &str) -> String {
        WordTokenizer::new(tokenize).apply(line)
    }

    #[test]
    fn numbers_keep_their_points_and_words_do_not() {
        for (tokenize, line, expected) in [
            (Tokenize::V13a, "It cost $1,234.50, or so.", "It cost $ 1,234.50 , or so ."),
            (Tokenize::V13a, "pages 12-14 &quot;x&quot;", "pages 12 - 14 \" x \""),
            (Tokenize::V13a, "a &amp;lt; b, 3.", "a < b , 3 ."),
            (Tokenize::V13a, "don't split-up", "don't split-up"),
            (Tokenize::Intl, "„Ja“ – 3,5 €.", "„ Ja “ – 3,5 € ."),
            (Tokenize::Intl, "in 1999.", "in 1999."),
            (Tokenize::Zh, "文件 a.txt，大小", "文 件 a . txt ， 大 小"),
            (Tokenize::Zh, "wait… “ok”", "wait … “ ok ”"),
            (Tokenize::Char, "ab c", "a b   c"),
            (Tokenize::None, "a.b  c", "a.b  c"),
        ] {
            assert_eq!(words(tokenize, line), expected, "{tokenize}: {line}");
        }
    }

    #[test]
    fn tokenizers_have_names() {
        for tokenize in Tokenize::ALL {
            assert_eq!(tokenize.name().parse(), Ok(tokenize));
        }
        let error = "ja-mecab".parse::<Tokenize>().unwrap_err().to_string();
        assert!(error.contains("13a, intl, zh, char, none") && error.contains("dictionary"), "{error}");
        let error = "13b".parse::<Tokenize>().unwrap_err().to_string();
        assert!(error.contains("`13b`") && !error.contains("dictionary"), "{error}");
    }
}
