//! A chat template: where it lies beside a tokenizer, and what it writes for a conversation.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value as JinjaValue};
use minijinja::{Environment, context};
use regex::Regex;
use serde_json::{Map, Value};

use super::messages::ChatMessage;
use super::python::{self, Day};
use crate::data::config::Config;
use crate::data::error::Error;
use crate::data::expand::expand;
use crate::data::manifest::sha256;

const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
/// Where older models have their special tokens.
const SPECIALS: &str = "special_tokens_map.json";

/// Around what the template itself calls an answer. Noncharacters, which no text may have.
pub(super) const ANSWER: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The function that a block of an answer calls.
const MARK: &str = "__answer";
const NAME: &str = "chat";

/// Steps of a template, so that none runs for ever: each message takes about a hundred.
const FUEL: u64 = 1 << 24;

/// The program that writes a conversation as text.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on, as the template knows them.
    specials: BTreeMap<String, String>,
    marks_answers: bool,
    key: String,
    /// Itself and what it needs to know of the tokenizer, as files that lie beside a tokenizer, by name.
    files: BTreeMap<String, Vec<u8>>,
}

impl ChatTemplate {
    /// Finds the template of a recipe: where `data.chat_template` says, else beside the tokenizer.
    ///
    /// # Errors
    /// There is none, or it is no template.
    pub fn find(config: &Config) -> Result<ChatTemplate, Error> {
        let tokenizer = expand(&config.tokenizer)?;
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let place = match &config.chat_template {
            Some(place) => expand(&place.to_string_lossy())?,
            None => folder.to_owned(),
        };
        let (path, source) = source(&place)?;
        let wrong = |message: String| Error::ChatTemplate { path: path.clone(), message };
        let day = config.chat_date.as_ref().map(|date| {
            Day::parse(date).ok_or_else(|| {
                Error::Config(vec![format!("data.chat_date = {date:?} is no day: write \"2026-07-26\"")])
            })
        });
        let template = ChatTemplate::new(&path, &source, specials(folder)?, day.transpose()?).map_err(wrong)?;
        let mut files = BTreeMap::new();
        for name in [SPECIALS, CONFIG].into_iter().filter(|name| folder.join(name).is_file()) {
            let own = folder.join(name);
            files.insert(name.to_owned(), fs::read(&own).map_err(Error::io("read", &own))?);
        }
        if path != folder.join(CONFIG) {
            files.insert(JINJA.to_owned(), source.into_bytes());
        }
        Ok(ChatTemplate { files, ..template })
    }

    /// A template of this text; `path` is for messages.
    pub(super) fn new(
        path: &Path,
        source: &str,
        specials: BTreeMap<String, String>,
        day: Option<Day>,
    ) -> Result<ChatTemplate, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| told(&error))?);
        environment.set_fuel(Some(FUEL));
        python::add(&mut environment, day);
        environment.add_function(MARK, |state: &mut minijinja::State, options: minijinja::value::Kwargs| {
            let caller: JinjaValue = options.get("caller")?;
            let [start, end] = ANSWER;
            Ok::<_, minijinja::Error>(format!("{start}{}{end}", caller.call(state, &[])?))
        });
        // What transformers has as a block of its own is a call here, with the same rules for spaces around it.
        let block = |name: &str| Regex::new(&format!(r"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}")).expect("a pattern");
        let (start, end) = (block("generation"), block("endgeneration"));
        let marks_answers = start.is_match(source);
        let called = start.replace_all(source, format!("{{%${{1}} call {MARK}() ${{2}}%}}"));
        let called = end.replace_all(&called, "{%${1} endcall ${2}%}");
        environment.add_template_owned(NAME, called.into_owned()).map_err(|error| told(&error))?;
        let key = sha256(format!("{source}\0{specials:?}\0{day:?}").as_bytes());
        let (path, files) = (path.to_owned(), BTreeMap::new());
        Ok(ChatTemplate { path, environment, specials, marks_answers, key, files })
    }

    /// Files that, beside the tokenizer, make another program find the same.
    pub(in crate::data) fn files(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.files
    }

    /// An error of this template.
    pub(super) fn wrong(&self, message: String) -> Error {
        Error::ChatTemplate { path: self.path.clone(), message }
    }

    /// Whether the template says itself what of its text is an answer.
    pub(super) fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    /// Equal for templates that write the same.
    pub(in crate::data) fn key(&self) -> &str {
        &self.key
    }

    /// The text of messages, and of the beginning of an answer if one is asked for.
    ///
    /// # Errors
    /// What the template says, or why it fails.
    pub(super) fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| told(&error))?;
        let specials = JinjaValue::from(Serde(&self.specials));
        let messages = JinjaValue::from(Serde(messages));
        let of_this = context! { messages, add_generation_prompt, tools => (), documents => () };
        let path = self.path.display();
        template
            .render(context! { ..of_this, ..specials })
            .map_err(|error| format!("the chat template {path} says: {}", told(&error)))
    }

    /// The token that ends a turn by the model's own account.
    pub(super) fn end(&self) -> Option<&str> {
        self.specials.get("eos_token").map(String::as_str)
    }
}

/// An error of a template in a line.
fn told(error: &minijinja::Error) -> String {
    let line = error.line().map_or(String::new(), |line| format!(", line {line} of the template"));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let date = if detail.contains("strftime_now") { " (set data.chat_date to a day, which it asks for)" } else { "" };
    format!("{detail}{date}{line}")
}

/// The template in a file or folder.
fn source(place: &Path) -> Result<(PathBuf, String), Error> {
    let read = |path: &Path| fs::read_to_string(path).map_err(Error::io("read the chat template", path));
    if !place.is_dir() && !place.as_os_str().is_empty() {
        return match place.extension().is_some_and(|ending| ending == "json") {
            true => in_config(place)?.ok_or_else(|| Error::NoChatTemplate { place: place.to_owned() }),
            false => Ok((place.to_owned(), read(place)?)),
        };
    }
    let (jinja, config) = (place.join(JINJA), place.join(CONFIG));
    if jinja.is_file() {
        let source = read(&jinja)?;
        return Ok((jinja, source));
    }
    let found = if config.is_file() { in_config(&config)? } else { None };
    found.ok_or_else(|| Error::NoChatTemplate { place: place.to_owned() })
}

/// The template in a tokenizer's configuration: a text, or the one called `default` of several.
fn in_config(path: &Path) -> Result<Option<(PathBuf, String)>, Error> {
    let wrong = |message: String| Error::ChatTemplate { path: path.to_owned(), message };
    let source = match object(path)?.remove("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(source)) => source,
        Some(Value::Array(several)) => {
            let name = |one: &Value| one.get("name").and_then(Value::as_str).map(str::to_owned);
            let default = several.iter().find(|one| name(one).as_deref() == Some("default"));
            let names = || several.iter().filter_map(name).collect::<Vec<_>>().join(", ");
            let source = default.and_then(|one| one.get("template")).and_then(Value::as_str);
            let missing = || {
                wrong(format!(
                    "of its templates ({}) none is called `default`; save one as a file, and name that as data.chat_template",
                    names()
                ))
            };
            source.ok_or_else(missing)?.to_owned()
        }
        Some(_) => return Err(wrong("`chat_template` is neither a text nor a list of templates".to_owned())),
    };
    Ok(Some((path.to_owned(), source)))
}

/// The special tokens by the names that templates have for them.
fn specials(folder: &Path) -> Result<BTreeMap<String, String>, Error> {
    let mut specials = BTreeMap::new();
    for path in [folder.join(SPECIALS), folder.join(CONFIG)].iter().filter(|path| path.is_file()) {
        let text = |value: &Value| value.get("content").unwrap_or(value).as_str().map(str::to_owned);
        let of_tokens = object(path)?.into_iter().filter(|(key, _)| key.ends_with("_token"));
        specials.extend(of_tokens.filter_map(|(key, value)| Some((key, text(&value)?))));
    }
    Ok(specials)
}

fn object(path: &Path) -> Result<Map<String, Value>, Error> {
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|error| Error::ChatTemplate {
        path: path.to_owned(),
        message: format!("it is no JSON object ({error})"),
    })
}
