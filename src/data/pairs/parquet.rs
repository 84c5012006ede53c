//! A pair in two columns of each row, at the top or in a group: `en` and `de`, or `translation` with both.

use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::skips::SkipReason;
use super::{FoundPair, PairRecords};
use crate::data::documents::parquet::{bad, guarded};
use crate::data::error::Error;

/// Where a column is looked for if it is not at the top, as Hugging Face's sets of translations have it.
const GROUP: &str = "translation";

/// `columns` are names, with dots between those of nested groups. Of pairs that are `labelled`, the second may hold whole
/// numbers, or true and false.
pub(super) fn read(path: &Path, columns: &[String; 2], labelled: bool) -> Result<PairRecords<'static>, Error> {
    let raw = std::fs::File::open(path).map_err(Error::io("open", path))?;
    let reader = guarded(path, || SerializedFileReader::new(raw).map_err(|error| bad(path, error)))?;
    let schema = reader.metadata().file_metadata().schema();
    let places = columns.each_ref().map(|column| {
        let grouped = || place(schema, &format!("{GROUP}.{column}"));
        place(schema, column).or_else(grouped).ok_or_else(|| missing(path, column, schema))
    });
    let [source, target] = places;
    let places = [source?, target?];
    let fields = schema.get_fields().iter().filter(|field| places.iter().any(|place| field.name() == place[0]));
    let fields: Vec<_> = fields.filter_map(|field| narrowed(field, &places, 0)).collect();
    let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
    let projection = projection.map_err(|error| bad(path, error))?;
    let into = reader.into_iter();
    let mut rows = guarded(path, || into.project(Some(projection)).map_err(|error| bad(path, error)))?;
    let (path, columns, mut number) = (path.to_owned(), columns.clone(), 0u64);
    let mut next = move || -> Result<Option<FoundPair>, Error> {
        number += 1;
        let row =
            guarded(&path, || rows.next().transpose().map_err(|error| bad(&path, format!("row {number}: {error}"))))?;
        let Some(row) = row else { return Ok(None) };
        let text = |side: usize| {
            text(&row, &places[side], labelled && side == 1).map_err(|found| Error::BadRow {
                path: path.clone(),
                row: number,
                column: columns[side].clone(),
                found,
            })
        };
        Ok(Some(match (text(0)?, text(1)?) {
            (Side::Text(source), Side::Text(target)) => Ok([source, target]),
            (Side::Wrong, _) | (_, Side::Wrong) => Err(SkipReason::WrongEncoding),
            _ => Err(SkipReason::EmptySide),
        }))
    };
    Ok(Box::new(std::iter::from_fn(move || next().transpose())))
}

/// What a column holds in a row.
enum Side {
    Text(String),
    Null,
    /// Bytes that are not UTF-8.
    Wrong,
}

/// The names that lead to a column.
fn place(schema: &Type, column: &str) -> Option<Vec<String>> {
    let is = |name: &str| schema.get_fields().iter().find(|field| field.name() == name);
    if is(column).is_some_and(|field| field.is_primitive()) {
        return Some(vec![column.to_owned()]);
    }
    let (first, rest) = column.split_once('.')?;
    let inner = is(first).filter(|field| field.is_group())?;
    let mut names = vec![first.to_owned()];
    names.extend(place(inner, rest)?);
    Some(names)
}

/// A field with those of its own that lead to a place, so that the others are not decoded.
fn narrowed(field: &Arc<Type>, places: &[Vec<String>; 2], depth: usize) -> Option<Arc<Type>> {
    let under: Vec<_> =
        places.iter().filter(|place| place.get(depth).is_some_and(|name| name == field.name())).collect();
    if under.is_empty() || field.is_primitive() {
        return (!under.is_empty()).then(|| field.clone());
    }
    let inner = field.get_fields().iter().filter_map(|inner| narrowed(inner, places, depth + 1)).collect();
    let info = field.get_basic_info();
    let mut builder =
        Type::group_type_builder(field.name()).with_fields(inner).with_converted_type(info.converted_type());
    if info.has_repetition() {
        builder = builder.with_repetition(info.repetition());
    }
    builder.build().ok().map(Arc::new)
}

fn text(row: &Row, place: &[String], is_label: bool) -> Result<Side, String> {
    let field = row.get_column_iter().find(|(name, _)| **name == place[0]).map(|(_, field)| field);
    match (field, &place[1..]) {
        (Some(Field::Group(inner)), rest @ [_, ..]) => text(inner, rest, is_label),
        (None | Some(Field::Null), _) => Ok(Side::Null),
        (Some(Field::Str(text)), []) => Ok(Side::Text(text.clone())),
        (Some(Field::Bytes(bytes)), []) => Ok(String::from_utf8(bytes.data().to_vec()).map_or(Side::Wrong, Side::Text)),
        (Some(field), []) if is_label => label(field),
        _ => Err("the column is not text".to_owned()),
    }
}

/// The digits of a whole number, `true` or `false`.
fn label(field: &Field) -> Result<Side, String> {
    let text = match field {
        Field::Bool(is_so) => is_so.to_string(),
        Field::Byte(number) => number.to_string(),
        Field::Short(number) => number.to_string(),
        Field::Int(number) => number.to_string(),
        Field::Long(number) => number.to_string(),
        Field::UByte(number) => number.to_string(),
        Field::UShort(number) => number.to_string(),
        Field::UInt(number) => number.to_string(),
        Field::ULong(number) => number.to_string(),
        _ => return Err("the column is neither text nor whole numbers".to_owned()),
    };
    Ok(Side::Text(text))
}

fn missing(path: &Path, column: &str, schema: &Type) -> Error {
    let inside = |field: &Arc<Type>| match field.is_group() {
        true => field.get_fields().iter().map(|inner| format!("{}.{}", field.name(), inner.name())).collect(),
        false => vec![field.name().to_owned()],
    };
    let available = schema.get_fields().iter().flat_map(inside).collect();
    Error::MissingColumn { path: path.to_owned(), column: column.to_owned(), available }
}
