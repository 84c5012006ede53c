//! What can be wrong with a configuration: one [`Problem`] a mistake, all of them in one [`Problems`].
//!
//! A problem always says which key, which value, where it was written, what is wrong and what to do.

use std::fmt;
use std::path::PathBuf;

use toml::Value;

use crate::limits::Finding;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of a recipe, or the file as a whole.
    Recipe { file: PathBuf, line: Option<usize> },
    /// The text after `--set`.
    Set(String),
    /// The number after `--ranks`.
    Ranks(usize),
    /// How many processes a launcher has started.
    Processes(usize),
    /// Another option of a command that sets a key.
    Flag(String),
    /// Nowhere: the program's own choice.
    Default,
}

impl Origin {
    /// Whether it was typed for this one command, so that the user surely means it to have an effect.
    pub fn is_command_line(&self) -> bool {
        matches!(self, Origin::Set(_) | Origin::Ranks(_) | Origin::Flag(_))
    }

    /// Place in the list of problems: the recipe from top to bottom, then the command line.
    fn order(&self) -> (usize, usize) {
        match self {
            Origin::Recipe { line, .. } => (0, line.unwrap_or(0)),
            Origin::Default | Origin::Processes(_) => (1, 0),
            Origin::Set(_) | Origin::Ranks(_) | Origin::Flag(_) => (2, 0),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Recipe { file, line: None } => write!(f, "{}", file.display()),
            Origin::Recipe { file, line: Some(line) } => write!(f, "{}:{line}", file.display()),
            Origin::Set(text) => write!(f, "--set {text}"),
            Origin::Ranks(ranks) => write!(f, "--ranks {ranks}"),
            Origin::Processes(processes) => write!(f, "{processes} processes"),
            Origin::Flag(text) => f.write_str(text),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// One mistake in a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// `moe.top_k`; empty when the mistake is not about one key (an unreadable file).
    pub key: String,
    /// The offending value as TOML; absent when the key itself is the mistake.
    pub value: Option<String>,
    pub origin: Origin,
    pub wrong: String,
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.key.as_str(), &self.value) {
            ("", _) => write!(f, "{}", self.origin)?,
            (key, None) => write!(f, "{key} ({})", self.origin)?,
            (key, Some(value)) => write!(f, "{key} = {value} ({})", self.origin)?,
        }
        write!(f, ": {}; {}", self.wrong, self.remedy)
    }
}

impl Finding {
    pub(super) fn about(self, key: &str, value: Option<&Value>, origin: Origin) -> Problem {
        Problem { key: key.into(), value: value.map(shown), origin, wrong: self.wrong, remedy: self.remedy }
    }

    /// For mistakes that are not about one key.
    pub(super) fn at(self, origin: Origin) -> Problem {
        self.about("", None, origin)
    }
}

/// A value as it would be typed; the TOML crate writes floats without exponents, however small.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}").to_lowercase(),
        value => value.to_string(),
    }
}

/// Everything wrong with one request; never empty.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// Orders the problems as their places are read.
    ///
    /// # Panics
    /// Without a problem there is no error to make.
    pub(super) fn new(mut problems: Vec<Problem>) -> Self {
        assert!(!problems.is_empty(), "an error needs a problem");
        problems.sort_by_key(|problem| problem.origin.order());
        Problems(problems)
    }

    /// The same of a command that has options of its own for keys: `flags` are what was set and how it was typed.
    pub fn of_flags(mut self, flags: &[(String, String)]) -> Problems {
        for problem in &mut self.0 {
            let typed = |(set, _): &&(String, String)| problem.origin == Origin::Set(set.clone());
            if let Some((_, flag)) = flags.iter().find(typed) {
                problem.origin = Origin::Flag(flag.clone());
            }
        }
        self
    }

    pub fn as_slice(&self) -> &[Problem] {
        &self.0
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        let noun = if count == 1 { "problem" } else { "problems" };
        write!(f, "{count} {noun} in the configuration:")?;
        for problem in &self.0 {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}
