//! The lower layer: a recipe's text with the command line's overrides applied, as one TOML table in which
//! every value knows where it was written. What keys mean is not known here.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::problem::{Origin, Problem};
use super::suggest;
use crate::limits::Finding;
use crate::parallel::PerLayer;

/// A key's path from the root: `moe.top_k`, `data.sources[1].path`.
pub(super) fn join(parent: &str, key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(is_bare);
    // Quoted like in TOML, so that the key "model.vocab" of a file never passes for `vocab` of [model].
    let key = if bare { key.into() } else { format!("{key:?}") };
    if parent.is_empty() { key } else { format!("{parent}.{key}") }
}

/// Whether `path` is `ancestor` or lies under it.
pub(super) fn is_under(path: &str, ancestor: &str) -> bool {
    path.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

fn is_bare(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == '-'
}

/// Values that are a word, or a table whose `kind` is the word and whose other keys are that kind's own.
pub(super) const KINDED: &[&str] = &["moe.gate"];

/// One value given on the command line.
#[derive(Clone, Debug)]
pub(super) struct Override {
    keys: Vec<String>,
    value: Value,
    origin: Origin,
}

impl Override {
    /// Reads `moe.top_k=4`.
    fn parse(text: &str) -> Result<Self, Finding> {
        let (path, value) = text.split_once('=').ok_or_else(|| {
            let example = "write it as KEY=VALUE, for example --set train.lr=1e-3";
            Finding::new("there is no `=`", example)
        })?;
        let (path, value) = (path.trim(), value.trim());
        let keys: Vec<String> = path.split('.').map(String::from).collect();
        if keys.iter().any(|key| key.is_empty() || !key.chars().all(is_bare)) {
            let wrong = format!("`{path}` is not a dotted key");
            let example = "name a section and a key, for example train.lr";
            return Err(Finding::new(wrong, example));
        }
        Ok(Override { keys, value: parse_value(value)?, origin: Origin::Set(text.into()) })
    }

    fn ranks(ranks: usize, origin: impl Fn(usize) -> Origin) -> Self {
        Override {
            keys: vec!["parallel".into(), "ranks".into()],
            value: Value::Integer(i64::try_from(ranks).unwrap_or(i64::MAX)),
            origin: origin(ranks),
        }
    }

    fn experts(experts: &PerLayer, flag: &str) -> Self {
        Override {
            keys: vec!["moe".into(), "experts".into()],
            value: Value::try_from(experts).expect("numbers of experts that models have"),
            origin: Origin::Flag(flag.into()),
        }
    }

    fn path(&self) -> String {
        self.keys.iter().fold(String::new(), |path, key| join(&path, key))
    }
}

/// A TOML value; a bare word is a string. What starts like a TOML string, list or table must be one.
fn parse_value(text: &str) -> Result<Value, Finding> {
    if text.is_empty() {
        return Err(Finding::new("there is nothing after `=`", "give a value"));
    }
    match text.parse() {
        Ok(value) => Ok(value),
        Err(error) if text.starts_with(['[', '{', '"', '\'']) => Err(Finding::new(
            format!("the value is not TOML: {}", one_line(&error)),
            "close every quote and bracket, and quote the whole for the shell",
        )),
        Err(_) => Ok(Value::String(text.into())),
    }
}

/// Everything the command line overrides, lowest priority first, and what could not be understood.
pub(super) fn overrides(texts: &[String], ranks: Option<usize>) -> (Vec<Override>, Vec<Problem>) {
    overrides_and(texts, ranks.map(|ranks| Override::ranks(ranks, Origin::Ranks)).into_iter())
}

/// The same where `flag` gives a model so many experts.
pub(super) fn overrides_and_experts(
    texts: &[String],
    ranks: Option<usize>,
    experts: &PerLayer,
    flag: &str,
) -> (Vec<Override>, Vec<Problem>) {
    overrides_and(
        texts,
        ranks.map(|ranks| Override::ranks(ranks, Origin::Ranks)).into_iter().chain([Override::experts(experts, flag)]),
    )
}

fn overrides_and(texts: &[String], last: impl Iterator<Item = Override>) -> (Vec<Override>, Vec<Problem>) {
    let (mut given, mut problems) = (Vec::new(), Vec::new());
    for text in texts {
        match Override::parse(text) {
            Ok(read) => given.push(read),
            Err(finding) => problems.push(finding.at(Origin::Set(text.clone()))),
        }
    }
    for last in last {
        problems.extend(given.iter().filter_map(|other| contradiction(other, &last)));
        given.push(last);
    }
    (given, problems)
}

/// Both were typed for this very command, so neither may be dropped in silence.
fn contradiction(other: &Override, last: &Override) -> Option<Problem> {
    let finding = Finding::new(format!("{} says something else", last.origin), "give only one of the two");
    let (path, origin) = (other.path(), other.origin.clone());
    (path == last.path() && other.value != last.value).then(|| finding.about(&path, Some(&other.value), origin))
}

/// A recipe and what overrides it.
#[derive(Clone, Debug)]
pub(super) struct RecipeSource {
    pub(super) table: Table,
    origins: BTreeMap<String, Origin>,
    file: PathBuf,
}

impl RecipeSource {
    /// Reads the text of a file that is to be `what`; every syntax error is a problem of its own.
    pub(super) fn read(file: &Path, what: &str) -> Result<Self, Vec<Problem>> {
        let text = fs::read_to_string(file).map_err(|error| vec![unreadable(file, what, &error)])?;
        RecipeSource::parse(file, text)
    }

    /// Reads a text of which `file` is the place.
    pub(super) fn parse(file: &Path, text: String) -> Result<Self, Vec<Problem>> {
        let (tree, errors) = DeTable::parse_recoverable(&text);
        if !errors.is_empty() {
            let mut problems: Vec<Problem> = errors.iter().map(|error| syntax(file, &text, error)).collect();
            // What follows an error in its line is mostly its consequence.
            problems.dedup_by(|next, first| next.origin == first.origin);
            return Err(problems);
        }
        let table = text.parse().map_err(|error| vec![past_64_bits(file, &text, &error)])?;
        let mut source = RecipeSource { table, origins: BTreeMap::new(), file: file.into() };
        source.note_table("", tree.get_ref(), &text);
        Ok(source)
    }

    fn note_table(&mut self, path: &str, table: &DeTable<'_>, text: &str) {
        for (key, value) in table {
            let path = join(path, key.get_ref());
            self.note(&path, key.span().start, text);
            self.note_value(&path, value, text);
        }
    }

    fn note_value(&mut self, path: &str, value: &Spanned<DeValue<'_>>, text: &str) {
        match value.get_ref() {
            DeValue::Table(table) => self.note_table(path, table, text),
            DeValue::Array(array) => {
                for (index, element) in array.iter().enumerate() {
                    let path = format!("{path}[{index}]");
                    self.note(&path, element.span().start, text);
                    self.note_value(&path, element, text);
                }
            }
            _ => {}
        }
    }

    fn note(&mut self, path: &str, offset: usize, text: &str) {
        let origin = Origin::Recipe { file: self.file.clone(), line: Some(place(text, offset).0) };
        self.origins.insert(path.into(), origin);
    }

    /// Puts an override's value in place and returns notices about what of the recipe goes with the old one.
    pub(super) fn apply(&mut self, given: Override) -> Vec<String> {
        let path = given.path();
        let mut notices = Vec::new();
        if let [section] = given.keys.as_slice() {
            notices = self.replaced(section, &given);
        }
        if let Some(choice) = KINDED.iter().find(|choice| is_under(&path, choice)) {
            notices = self.choose(choice, &given);
        }
        self.origins.retain(|known, _| !is_under(known, &path));
        let mut holder = String::new();
        for key in &given.keys {
            let is_section = holder.is_empty() && given.keys.len() > 1;
            holder = join(&holder, key);
            let is_choice = KINDED.contains(&&*holder) && path != holder && path != join(&holder, "kind");
            // A section keeps its line in the recipe, a choice that of its kind; any other value of which a part is
            // overridden is now this one's.
            if !(is_section || is_choice) || !self.origins.contains_key(&holder) {
                self.origins.insert(holder.clone(), given.origin.clone());
            }
        }
        insert(&mut self.table, &given.keys, given.value);
        notices
    }

    /// A kind given anew takes the keys with it that the recipe gives another one; a key given to a word makes it a table.
    fn choose(&mut self, choice: &str, given: &Override) -> Vec<String> {
        let Some((section, name)) = choice.split_once('.') else { return Vec::new() };
        let origin = self.origin(choice);
        let is_whole = given.path() == choice;
        let kind_is_given = given.path() == join(choice, "kind");
        let Some(Value::Table(section)) = self.table.get_mut(section) else { return Vec::new() };
        if let Some(Value::String(kind)) = section.get(name).filter(|_| !is_whole) {
            let kind = Value::String(kind.clone());
            section.insert(name.into(), Value::Table(Table::from_iter([("kind".to_owned(), kind)])));
            self.origins.insert(join(choice, "kind"), origin);
            return Vec::new();
        }
        let Some(Value::Table(old)) = section.get(name) else { return Vec::new() };
        let is_same = kind_is_given && old.get("kind") == Some(&given.value);
        let mut lost: Vec<String> = old.keys().filter(|key| *key != "kind").map(|key| join(choice, key)).collect();
        lost.retain(|path| (is_whole || kind_is_given && !is_same) && !self.origin(path).is_command_line());
        lost.into_iter()
            .map(|path| {
                let notice = format!("{path} ({}) is not used: {} replaces the gate", self.origin(&path), given.origin);
                self.remove(&path);
                notice
            })
            .collect()
    }

    /// Takes a part of a value away.
    fn remove(&mut self, path: &str) {
        let mut keys: Vec<&str> = path.split('.').collect();
        let last = keys.pop().unwrap_or_default();
        let holder = keys.iter().try_fold(&mut self.table, |table, key| table.get_mut(*key)?.as_table_mut());
        holder.into_iter().for_each(|table| {
            table.remove(last);
        });
    }

    /// A section given whole takes the recipe's section with it, also the keys it does not mention.
    fn replaced(&self, section: &str, given: &Override) -> Vec<String> {
        let (Some(Value::Table(old)), Value::Table(new)) = (self.table.get(section), &given.value) else {
            return Vec::new();
        };
        old.keys()
            .filter(|key| !new.contains_key(*key))
            .map(|key| join(section, key))
            .map(|path| {
                let (was, by) = (self.origin(&path), &given.origin);
                format!("{path} ({was}) is not used: {by} replaces the whole section")
            })
            .collect()
    }

    /// Gives a key of a section a value unless it has one.
    pub(super) fn set_default(&mut self, section: &str, key: &str, value: impl Into<Value>) {
        let section = self.table.entry(section).or_insert(Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.entry(key).or_insert(value.into());
        }
    }

    /// As many ranks as a launcher has started processes, if nothing says how many or training is elastic.
    pub(super) fn launched(&mut self, processes: usize) {
        let value = |section, key| self.table.get(section).and_then(|section: &Value| section.get(key));
        let is_elastic = value("train", "elastic").and_then(Value::as_bool) == Some(true);
        let is_typed = self.origin("parallel.ranks").is_command_line();
        if value("parallel", "ranks").is_none() || is_elastic && !is_typed {
            self.apply(Override::ranks(processes, Origin::Processes));
        }
    }

    /// The same source without one key, for learning what its default would be.
    pub(super) fn without(&self, path: &str) -> Self {
        let mut rest = self.clone();
        if let Some((section, key)) = path.split_once('.')
            && let Some(Value::Table(section)) = rest.table.get_mut(section)
        {
            section.remove(key);
        }
        rest
    }

    /// The value of `section.key`, or of a part of it, as it was written.
    pub(super) fn value(&self, path: &str) -> Option<&Value> {
        let (section, rest) = path.split_once('.')?;
        rest.split('.').try_fold(self.table.get(section)?, |value, key| match key.split_once('[') {
            Some((list, index)) => value.get(list)?.get(index.strip_suffix(']')?.parse::<usize>().ok()?),
            None => value.get(key),
        })
    }

    /// Where the value at `path` was written; a part of a value was written with the whole.
    pub(super) fn origin(&self, path: &str) -> Origin {
        let holder = self.holder(path);
        let written = holder.filter(|(known, _)| *known == path || known.contains('.'));
        written.map_or(Origin::Default, |(_, origin)| origin.clone())
    }

    /// Where something missing at `path` belongs.
    pub(super) fn origin_around(&self, path: &str) -> Origin {
        let file = || Origin::Recipe { file: self.file.clone(), line: None };
        self.holder(path).map_or_else(file, |(_, origin)| origin.clone())
    }

    /// The longest path with a known origin that is `path` or holds it.
    fn holder(&self, path: &str) -> Option<(&str, &Origin)> {
        let origins = self.origins.iter().map(|(known, origin)| (known.as_str(), origin));
        origins.filter(|(known, _)| is_under(path, known)).max_by_key(|(known, _)| known.len())
    }
}

/// Whatever is in the way of the path gives way: the override is the newer word.
fn insert(table: &mut Table, keys: &[String], value: Value) {
    let [first, rest @ ..] = keys else { return };
    if rest.is_empty() {
        table.insert(first.clone(), value);
        return;
    }
    let slot = table.entry(first.clone()).or_insert(Value::Boolean(false));
    if !slot.is_table() {
        *slot = Value::Table(Table::new());
    }
    if let Value::Table(inner) = slot {
        insert(inner, rest, value);
    }
}

fn unreadable(file: &Path, what: &str, error: &io::Error) -> Problem {
    let names = neighbours(file);
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let remedy = match suggest::nearest(&name, names.iter().map(String::as_str)) {
        Some(near) if near != name => {
            format!("did you mean {}?", file.with_file_name(near).display())
        }
        _ => format!("give the path of {what}, a readable TOML file"),
    };
    Finding::new(format!("cannot be read: {error}"), remedy).at(Origin::Recipe { file: file.into(), line: None })
}

/// The other recipes in the same folder.
fn neighbours(file: &Path) -> Vec<String> {
    let folder = match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let entries = fs::read_dir(folder).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".toml")).collect()
}

fn syntax(file: &Path, text: &str, error: &toml::de::Error) -> Problem {
    let (line, column) = place(text, error.span().map_or(0, |span| span.start));
    let written = text.lines().nth(line - 1).unwrap_or("").trim();
    let wrong = format!("column {column}: not TOML: {}", one_line(error));
    Finding::new(wrong, format!("correct `{written}`")).at(Origin::Recipe { file: file.into(), line: Some(line) })
}

/// What is TOML as a text, and yet no table of values, has a number that cannot be held.
fn past_64_bits(file: &Path, text: &str, error: &toml::de::Error) -> Problem {
    let (line, column) = place(text, error.span().map_or(0, |span| span.start));
    let written = text.lines().nth(line - 1).unwrap_or("").trim();
    let wrong = format!("column {column}: a number that 64 bits do not hold ({})", one_line(error));
    let remedy = format!("correct `{written}`: whole numbers end at {}", i64::MAX);
    Finding::new(wrong, remedy).at(Origin::Recipe { file: file.into(), line: Some(line) })
}

/// Line and column of a byte, both counted from 1.
fn place(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.matches('\n').count() + 1;
    (line, before[line_start..].chars().count() + 1)
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().lines().collect::<Vec<_>>().join(", ")
}
