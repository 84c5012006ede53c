//! A document in one column of each row.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;
use serde_json::Value;

use super::{Flow, Sink, send_whole};
use crate::data::chat::conversation;
use crate::data::error::Error;
use crate::data::guard;
use crate::data::sources::{Compression, SourceFile};

pub(super) fn read(file: &SourceFile, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    if file.compression != Compression::None {
        return Err(bad(&file.path, "it is compressed a second time; decompress it"));
    }
    let raw = File::open(&file.path).map_err(Error::io("open", &file.path))?;
    let reader = guarded(&file.path, || SerializedFileReader::new(raw).map_err(|error| bad(&file.path, error)))?;
    let projection = project(&reader, file)?;
    let mut rows =
        guarded(&file.path, || reader.get_row_iter(Some(projection)).map_err(|error| bad(&file.path, error)))?;
    for row in 1.. {
        let record = guarded(&file.path, || {
            rows.next().transpose().map_err(|error| bad(&file.path, format!("row {row}: {error}")))
        })?;
        let Some(record) = record else { break };
        let field = record.into_columns().pop().map_or(Field::Null, |(_, field)| field);
        let text = text_of_field(field, file, row)?;
        if send_whole((&text, row), part_bytes, empty, sink)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The library panics on some damaged files. Nothing it was working on is used afterwards.
pub(in crate::data) fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    guard::guarded(work).unwrap_or_else(|| Err(bad(path, "its pages are damaged")))
}

pub(in crate::data) fn bad(path: &Path, message: impl ToString) -> Error {
    Error::Parquet { path: path.to_owned(), message: message.to_string() }
}

/// The file's schema with only the wanted column, so that the others are not decoded.
fn project(reader: &dyn FileReader, file: &SourceFile) -> Result<Type, Error> {
    let schema = reader.metadata().file_metadata().schema();
    let field = schema.get_fields().iter().find(|field| field.name() == file.field);
    let field = field.ok_or_else(|| Error::MissingColumn {
        path: file.path.clone(),
        column: file.field.clone(),
        available: schema.get_fields().iter().map(|field| field.name().to_owned()).collect(),
    })?;
    let projection = Type::group_type_builder(schema.name()).with_fields(vec![field.clone()]).build();
    projection.map_err(|error| bad(&file.path, error))
}

fn text_of_field(field: Field, file: &SourceFile, row: u64) -> Result<String, Error> {
    if file.chat {
        let wrong = |message| Error::Conversation { place: file.place(row), message };
        return json(&field).and_then(conversation).map_err(wrong);
    }
    let found = match field {
        Field::Str(text) => return Ok(text),
        Field::Bytes(bytes) => match String::from_utf8(bytes.data().to_vec()) {
            Ok(text) => return Ok(text),
            Err(_) => "it is not UTF-8".to_owned(),
        },
        Field::Null => "it is null".to_owned(),
        _ => "the column is not text".to_owned(),
    };
    Err(Error::BadRow { path: file.path.clone(), row, column: file.field.clone(), found })
}

/// Nested values as JSON would have them.
fn json(field: &Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(is_so) => Value::Bool(*is_so),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::Float(number) => (*number).into(),
        Field::Double(number) => (*number).into(),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => str::from_utf8(bytes.data()).map_err(|_| "it has bytes that are no UTF-8")?.into(),
        Field::ListInternal(list) => list.elements().iter().map(json).collect::<Result<Vec<Value>, _>>()?.into(),
        Field::Group(row) => {
            let members = row.get_column_iter().map(|(name, field)| Ok((name.to_string(), json(field)?)));
            Value::Object(members.collect::<Result<_, String>>()?)
        }
        _ => return Err("it has values that are neither text nor numbers".to_owned()),
    })
}
