//! What a type asks for, and what of a table it did not take.

use std::fmt;

use serde::de::{Error, Unexpected};
use toml::Value;

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
    ("lora.targets", r#""all", or a list of projections: ["q_proj", "v_proj"]"#),
    ("memory.budget", r#"a number of bytes, or text such as "512 MiB""#),
    ("moe.experts", "a whole number, or a list of one for each layer with experts: [8, 4]"),
    ("parallel.expert", "a whole number, or a list of one for each layer with experts: [4, 2]"),
    ("parallel.link", "{ latency_us = 20, gbytes_per_s = 10 }"),
    ("parallel.node_link", "{ ranks_per_node = 2, latency_us = 50, gbytes_per_s = 5 }"),
    ("device.within", "{ latency_us = 5, gbytes_per_s = 300 }"),
    ("device.between", "{ latency_us = 15, gbytes_per_s = 25 }"),
    ("data.tasks", r#"a list of tables: [[data.tasks]] with kind = "translation" and sources = ["corpus/"]"#),
    (
        "data.sources",
        r#"a list of paths, or of tables { path = "...", field = "text" }; also split, held_out, config of a data set, and chat = true"#,
    ),
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
            Expected::Whole => f.write_str("a whole number, 0 or more"),
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
