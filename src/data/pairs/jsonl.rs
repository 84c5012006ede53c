//! A pair in two fields of each line, at its top or under another: `{"en": .., "de": ..}`, `{"translation": {"en":
//! ..}}`.

use std::path::Path;

use serde_json::{Map, Value};

use super::lines::LineReader;
use super::skips::SkipReason;
use super::{FoundPair, PairRecords};
use crate::data::error::Error;
use crate::data::sources::Compression;

/// Where a field is looked for if it is not at the top, as Hugging Face's sets of translations have it.
const GROUP: &str = "translation";

/// `fields` are names, with dots between those of nested objects. Of pairs that are `labelled`, the second may be a whole
/// number, true or false.
pub(super) fn read(
    path: &Path,
    compression: Compression,
    fields: &[String; 2],
    labelled: bool,
) -> Result<PairRecords<'static>, Error> {
    let mut lines = LineReader::open(path, compression)?;
    let (path, fields) = (path.to_owned(), fields.clone());
    let mut next = move || -> Result<Option<FoundPair>, Error> {
        let Some(line) = lines.next()? else { return Ok(None) };
        let line = match line {
            Ok(line) if line.trim().is_empty() => return Ok(Some(Err(SkipReason::EmptySide))),
            Ok(line) => line,
            Err(reason) => return Ok(Some(Err(reason))),
        };
        let object: Map<String, Value> = serde_json::from_str(&line).map_err(|error| {
            let text = error.to_string();
            let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message).to_owned();
            let message = format!("column {}: {message}", error.column());
            Error::BadJson { path: path.clone(), line: lines.count, message }
        })?;
        let [source, target] = [(&fields[0], false), (&fields[1], labelled)].map(|(field, is_label)| {
            text(&object, field, is_label).map_err(|found| Error::MissingField {
                path: path.clone(),
                line: lines.count,
                field: field.clone(),
                found,
            })
        });
        Ok(Some(match (source?, target?) {
            (Some(source), Some(target)) => Ok([source, target]),
            _ => Err(SkipReason::EmptySide),
        }))
    };
    Ok(Box::new(std::iter::from_fn(move || next().transpose())))
}

/// The text of a field, none where it is null, or what was found in its place.
fn text(object: &Map<String, Value>, field: &str, is_label: bool) -> Result<Option<String>, String> {
    let grouped = || find(object.get(GROUP)?.as_object()?, field);
    match find(object, field).or_else(grouped) {
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Null) => Ok(None),
        Some(Value::Number(number)) if is_label && !number.is_f64() => Ok(Some(number.to_string())),
        Some(Value::Bool(is_so)) if is_label => Ok(Some(is_so.to_string())),
        Some(Value::Bool(_)) => Err("it is true or false".to_owned()),
        Some(Value::Number(_)) => Err("it is a number".to_owned()),
        Some(Value::Array(_)) => Err("it is an array".to_owned()),
        Some(Value::Object(inner)) => Err(format!("it is an object with {}", names(inner))),
        None => Err(format!("the line has {}", names(object))),
    }
}

fn find<'a>(object: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    object.get(field).or_else(|| {
        let (first, rest) = field.split_once('.')?;
        find(object.get(first)?.as_object()?, rest)
    })
}

fn names(object: &Map<String, Value>) -> String {
    let names: Vec<_> = object.keys().map(|key| format!("`{key}`")).collect();
    if names.is_empty() { "no fields".into() } else { names.join(", ") }
}
