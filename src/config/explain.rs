//! Faults of reading in the user's words: what is wrong, and the likeliest way to put it right.

use std::collections::BTreeMap;

use toml::Value;

use super::moved;
use super::problem::{Origin, Problem};
use super::rejection::{Expected, Rejection, Wrong};
use super::source::{KINDED, RecipeSource, is_under, join};
use super::suggest;
use crate::limits::Finding;
use crate::moe;

/// The section that may be left out though it has keys without defaults.
const DENSE_WITHOUT: &str = "moe";

/// Turns faults into problems; `paths` is everything a recipe may hold.
pub(super) struct Explainer<'a> {
    pub(super) source: &'a RecipeSource,
    pub(super) paths: &'a BTreeMap<String, Expected>,
}

impl Explainer<'_> {
    pub(super) fn problems(&self, faults: &[Rejection]) -> Vec<Problem> {
        let meant: Vec<String> = faults.iter().filter_map(|fault| self.explains_absence(fault)).collect();
        let absent = |fault: &Rejection| matches!(fault.wrong, Wrong::Missing(_));
        let explained = |fault: &Rejection| meant.iter().any(|meant| is_under(&fault.path, meant));
        // One slip is one problem: what is there under a wrong name, or in a wrong shape, is not also missing.
        let separate = faults.iter().filter(|fault| !(absent(fault) && explained(fault)));
        separate.map(|fault| self.problem(fault)).collect()
    }

    fn problem(&self, fault: &Rejection) -> Problem {
        let (path, value) = (&fault.path, fault.value.as_ref());
        match &fault.wrong {
            Wrong::Unknown(known) => self.unknown(fault, known),
            Wrong::Missing(field) => {
                let (origin, addition) = (self.source.origin_around(path), self.addition(path, field));
                let finding = match (path.rsplit_once('.'), &origin) {
                    // The section is there for a key that was typed, and for nothing else.
                    (Some((section, _)), Origin::Set(text)) if text.starts_with(&format!("{section}.")) => {
                        Finding::new(
                            format!("missing, as the recipe has no [{section}] section"),
                            format!("leave {origin} out, or {addition}"),
                        )
                    }
                    (Some((DENSE_WITHOUT, _)), _) => {
                        let remedy = format!("{addition}, or leave out [moe] and all its keys for a dense model");
                        Finding::new("missing, and has no default", remedy)
                    }
                    _ => Finding::new("missing, and has no default", addition),
                };
                finding.about(path, None, origin)
            }
            Wrong::Type(expected) => mismatch(value, expected).about(path, value, self.source.origin(path)),
            Wrong::Empty => {
                let finding = Finding::new("empty", "give it a value, or leave it out for its default");
                finding.about(path, value, self.source.origin(path))
            }
            Wrong::Said(message) => {
                let finding = Finding::new(message, "give another value");
                finding.about(path, value, self.source.origin(path))
            }
        }
    }

    fn unknown(&self, fault: &Rejection, known: &[&str]) -> Problem {
        if let Some(finding) = self.of_a_choice(fault, known) {
            return finding.about(&fault.path, fault.value.as_ref(), self.source.origin(&fault.path));
        }
        let remedy = match self.meant(fault) {
            Some(meant) => format!("did you mean {meant}?"),
            None => format!("valid here: {}", known.join(", ")),
        };
        let origin = self.source.origin(&fault.path);
        match &fault.value {
            // The contents of a section would drown its name.
            Some(Value::Table(_)) => Finding::new("no such section", remedy).about(&fault.path, None, origin),
            value => Finding::new("no such key", remedy).about(&fault.path, value.as_ref(), origin),
        }
    }

    /// Keys that belong to one kind of gate and stand elsewhere.
    fn of_a_choice(&self, fault: &Rejection, known: &[&str]) -> Option<Finding> {
        if let Some(finding) = fault.value.as_ref().and_then(|value| moved::answer(&fault.path, value, self.source)) {
            return Some(finding);
        }
        let (parent, key) = fault.path.rsplit_once('.').filter(|(parent, _)| KINDED.contains(parent))?;
        if suggest::nearest(key, known.iter().copied()).is_some() {
            return None;
        }
        let kind = self.source.value(&join(parent, "kind")).map(ToString::to_string).unwrap_or_default();
        let owners: Vec<String> = moe::Config::gates_with(key).iter().map(|gate| format!("{gate:?}")).collect();
        let remedy = match (owners.as_slice(), known) {
            ([], []) => "leave it out: this one has no keys of its own".to_owned(),
            ([], known) => format!("valid here: {}", known.join(", ")),
            (owners, _) => format!("it is a key of {}", owners.join(" and ")),
        };
        Some(Finding::new(format!("{kind} has no such key"), remedy))
    }

    /// The path below which nothing is to be missed because of the fault.
    fn explains_absence(&self, fault: &Rejection) -> Option<String> {
        match fault.wrong {
            Wrong::Unknown(_) => self.meant(fault),
            Wrong::Missing(_) => None,
            Wrong::Type(_) | Wrong::Empty | Wrong::Said(_) => Some(fault.path.clone()),
        }
    }

    /// The path somebody meant by an unknown one: a neighbour, else the same name in another section.
    fn meant(&self, fault: &Rejection) -> Option<String> {
        let Wrong::Unknown(known) = fault.wrong else {
            return None;
        };
        let (parent, name) = fault.path.rsplit_once('.').unwrap_or(("", &fault.path));
        if let Some(near) = suggest::nearest(name, known.iter().copied()) {
            return Some(join(parent, near));
        }
        let elsewhere = |path: &&String| path.rsplit_once('.').is_some_and(|(_, leaf)| leaf == name);
        self.paths.keys().find(elsewhere).cloned()
    }

    fn addition(&self, path: &str, field: &str) -> String {
        let expected = self.paths.get(path).unwrap_or(&Expected::Text);
        match path.rsplit_once('.') {
            Some((section, _)) if self.paths.contains_key(section) => {
                format!("add {field} to [{section}]: {expected}")
            }
            _ => format!("add {field}: {expected}"),
        }
    }
}

/// A value of the wrong type: what it is, and how it would be right.
fn mismatch(value: Option<&Value>, expected: &Expected) -> Finding {
    let found = value.map_or("nothing", kind);
    let meant = value.and_then(|value| rewritten(value, expected));
    match (expected, value, meant) {
        (Expected::Choice(_), Some(Value::String(_)), Some(meant)) => {
            Finding::new(format!("not {expected}"), format!("did you mean {meant}?"))
        }
        (_, _, Some(meant)) => {
            Finding::new(format!("{found} where {expected} is expected"), format!("did you mean {meant}?"))
        }
        (_, _, None) => Finding::new(format!("{found} does not fit"), format!("give {expected}")),
    }
}

/// The value in the shape that was expected, if it is plain what was meant.
fn rewritten(value: &Value, expected: &Expected) -> Option<String> {
    match (expected, value) {
        (Expected::Whole, Value::Float(number)) if number.fract() == 0.0 => Some(format!("{number:.0}")),
        (Expected::Whole, Value::String(text)) => text.parse::<u32>().ok().map(|n| n.to_string()),
        (Expected::Number, Value::String(text)) => {
            text.parse::<f64>().ok().filter(|number| number.is_finite()).map(|_| text.clone())
        }
        (Expected::Truth, Value::String(text)) => truth(text).map(String::from),
        (Expected::Truth, Value::Integer(number @ 0..=1)) => Some((*number == 1).to_string()),
        (Expected::Text, Value::Array(_) | Value::Table(_)) => None,
        (Expected::Text, scalar) => Some(format!("{:?}", scalar.to_string())),
        (Expected::List, scalar) if !scalar.is_table() => Some(format!("[{scalar}]")),
        (Expected::Form(form), text @ Value::String(_)) if form.starts_with("a list") => Some(format!("[{text}]")),
        (Expected::Choice(names), Value::String(text)) => {
            suggest::nearest(text, names.iter().copied()).map(|name| format!("{name:?}"))
        }
        _ => None,
    }
}

fn truth(text: &str) -> Option<&'static str> {
    match text.to_lowercase().as_str() {
        "true" | "yes" | "on" => Some("true"),
        "false" | "no" | "off" => Some("false"),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number with a fraction or exponent",
        Value::Boolean(_) => "a truth value",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}
