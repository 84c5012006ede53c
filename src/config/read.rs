//! From a table to any `Deserialize` type, with every fault found instead of the first.
//!
//! Serde stops at the first error, and a value it refuses leaves nothing to go on with. So the table is read
//! again and again: whatever was refused is replaced by a *sample*, the simplest value that its type
//! accepts, until the rest goes through. The deserializer (`node.rs`) sees which keys and types a struct
//! asks for; no second list of keys exists that could fall behind the structs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{DeserializeOwned, Error, Unexpected};
use toml::Value;

use super::node::ReadingState;
use super::source::join;

/// What a type asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    Whole,
    Number,
    Text,
    Truth,
    List,
    Section,
    Choice(&'static [&'static str]),
    /// In words, where the type's own answer would be less than a person would say.
    Form(String),
}

/// Words for the keys that take several shapes.
const FORMS: &[(&str, &str)] = &[
    ("moe.layers", r#""all", { every = 2 } or { list = [1, 3] }"#),
    ("memory.budget", r#"a number of bytes, or text such as "512 MiB""#),
    ("parallel.expert", "a whole number, or a list of one for each layer with experts: [4, 2]"),
    ("parallel.link", "{ latency_us = 20, gbytes_per_s = 10 }"),
    ("parallel.node_link", "{ ranks_per_node = 2, latency_us = 50, gbytes_per_s = 5 }"),
    ("device.within", "{ latency_us = 5, gbytes_per_s = 300 }"),
    ("device.between", "{ latency_us = 15, gbytes_per_s = 25 }"),
    ("data.sources", r#"a list of paths, or of tables { path = "...", field = "text" }"#),
];

impl Expected {
    /// The words for `path`, if it has its own.
    pub(super) fn or_form(self, path: &str) -> Self {
        let form = FORMS.iter().find(|(key, _)| *key == path);
        form.map_or(self, |(_, words)| Expected::Form((*words).into()))
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Whole => f.write_str("a whole number of at least 0"),
            Expected::Number => f.write_str("a number"),
            Expected::Text => f.write_str("a string"),
            Expected::Truth => f.write_str("true or false"),
            Expected::List => f.write_str("a list"),
            Expected::Section => f.write_str("a section"),
            Expected::Choice(names) => {
                let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
                write!(f, "one of {}", names.join(", "))
            }
            Expected::Form(words) => f.write_str(words),
        }
    }
}

/// One thing that did not go through.
#[derive(Clone, Debug)]
pub(super) struct Rejection {
    pub(super) path: String,
    pub(super) value: Option<Value>,
    pub(super) wrong: Wrong,
}

#[derive(Clone, Debug)]
pub(super) enum Wrong {
    /// No field has this name; these exist.
    Unknown(&'static [&'static str]),
    /// A field without a default is absent.
    Missing(&'static str),
    Type(Expected),
    /// Text without a letter; no key of a recipe means anything by that.
    Empty,
    /// What a type said in its own words.
    Said(String),
}

impl Rejection {
    /// The faults serde makes itself do not know where they are.
    pub(super) fn located(self, path: &str, value: Option<&Value>) -> Self {
        if !self.path.is_empty() {
            return self;
        }
        let (path, value) = match self.wrong {
            Wrong::Missing(field) => (join(path, field), None),
            _ => (path.into(), value.cloned()),
        };
        Rejection { path, value, ..self }
    }

    fn unlocated(wrong: Wrong) -> Self {
        Rejection { path: String::new(), value: None, wrong }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.path, self.wrong)
    }
}

impl std::error::Error for Rejection {}

impl Error for Rejection {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Rejection::unlocated(Wrong::Said(message.to_string()))
    }

    /// A visitor that looks at any value says in its own words what it expects.
    fn invalid_type(_: Unexpected<'_>, expected: &dyn serde::de::Expected) -> Self {
        Rejection::unlocated(Wrong::Type(Expected::Form(expected.to_string())))
    }

    fn unknown_field(_: &str, known: &'static [&'static str]) -> Self {
        Rejection::unlocated(Wrong::Unknown(known))
    }

    fn missing_field(field: &'static str) -> Self {
        Rejection::unlocated(Wrong::Missing(field))
    }
}

/// The outcome of reading.
pub(super) struct Reading<T> {
    /// What the table says, with samples at the paths of `broken`; absent if a type refuses its sample.
    pub(super) value: Option<T>,
    pub(super) faults: Vec<Rejection>,
    pub(super) broken: BTreeSet<String>,
}

/// Reads `value`, found at `root`; paths already known to be `broken` are not looked at.
pub(super) fn read<T: DeserializeOwned>(root: &str, value: &Value, broken: BTreeSet<String>) -> Reading<T> {
    let mut state = ReadingState::new(broken);
    let mut faults = Vec::new();
    let value = loop {
        match T::deserialize(state.node(root.into(), Some(value))) {
            Ok(read) => break Some(read),
            Err(fault) => {
                let first_time = state.set_aside(&fault);
                faults.push(fault);
                if !first_time {
                    break None;
                }
            }
        }
    };
    Reading { value, faults, broken: state.broken }
}

/// Every path a type can hold, optional parts included, with what it asks for.
pub(super) fn paths<T: DeserializeOwned>() -> BTreeMap<String, Expected> {
    let (mut all, mut variant, mut variants) = (BTreeMap::new(), 0, 1);
    while variant < variants {
        let state = ReadingState::of_every_key(variant);
        let refused = T::deserialize(state.node(String::new(), None)).err();
        assert!(refused.is_none(), "a type refuses its sample: {refused:?}");
        (variant, variants) = (variant + 1, state.variants.get());
        all.extend(state.expected.into_inner());
    }
    all
}
