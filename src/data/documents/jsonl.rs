//! A document in one field of each line.

use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;

use serde_json::{Map, Value};

use super::{Flow, Sink, send_whole};
use crate::data::chat::conversation;
use crate::data::error::Error;
use crate::data::sources::SourceFile;

/// No line of JSONL may be longer: without a limit a file without line ends would be read into memory whole.
const LINE_BYTES_MAX: u64 = 1 << 28;

pub(super) fn read(file: &SourceFile, input: impl Read, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        let read = input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        let read = read.map_err(Error::io("read", &file.path))?;
        if read == 0 {
            break;
        }
        if read as u64 == LINE_BYTES_MAX {
            return Err(Error::LongLine { path: file.path.clone(), line, limit: LINE_BYTES_MAX });
        }
        let content = if line == 1 { bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes) } else { &bytes };
        if content.trim_ascii().is_empty() {
            continue;
        }
        let text = text_of_line(content, file, line)?;
        if send_whole((&text, line), part_bytes, empty, sink)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn text_of_line(bytes: &[u8], file: &SourceFile, line: u64) -> Result<String, Error> {
    let mut object: Map<String, Value> = serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("column {}: {}", error.column(), without_place(&error));
        Error::BadJson { path: file.path.clone(), line, message }
    })?;
    let value = object.remove(&file.field);
    if file.chat
        && let Some(value) = value
    {
        let wrong = |message| Error::Conversation { place: file.place(line), message };
        return conversation(value).map_err(wrong);
    }
    let found = match value {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Null) => "it is null".to_owned(),
        Some(Value::Bool(_)) => "it is true or false".to_owned(),
        Some(Value::Number(_)) => "it is a number".to_owned(),
        Some(Value::Array(_)) => "it is an array".to_owned(),
        Some(Value::Object(_)) => "it is an object".to_owned(),
        None => format!("the line has {}", names(object.keys())),
    };
    Err(Error::MissingField { path: file.path.clone(), line, field: file.field.clone(), found })
}

fn names<'a>(keys: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<_> = keys.map(|key| format!("`{key}`")).collect();
    if names.is_empty() { "no fields".into() } else { names.join(", ") }
}

/// The parser counts its own lines, which are always 1 here and would contradict ours.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.clone(), |(message, _)| message.to_owned())
}
