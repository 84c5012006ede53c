//! The documents inside a file, streamed in parts of bounded size.
//!
//! Long documents are cut so that memory stays bounded and one huge document is tokenised by all cores. A
//! cut falls before a single space between two printable ASCII characters, where the pre-tokenizers of
//! byte-level BPEs cut anyway, so the tokens are those of the uncut text; only text without any such place
//! for half a part is cut elsewhere. Says nothing about which documents are used: empty ones are counted
//! and left out here, everything else is the caller's decision.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::str;

use flate2::read::MultiGzDecoder;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::error::Error;
use super::sources::{Compression, Format, SourceFile};

/// No line of JSONL may be longer: without a limit a file without line ends would be read into memory whole.
const LINE_BYTES_MAX: u64 = 1 << 28;

/// A stretch of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part<'a> {
    pub(crate) text: &'a str,
    /// Whether the document ends here.
    pub(crate) last: bool,
}

/// What receives the parts; it may ask to stop.
pub(crate) type Sink<'a> = dyn FnMut(Part) -> Result<ControlFlow<()>, Error> + 'a;

/// Whether the reader got to the end or was stopped, or why it failed.
type Flow = Result<ControlFlow<()>, Error>;

/// Streams the documents of `file` to `sink` in parts of at most `part_bytes`; returns the number of empty
/// documents left out.
///
/// # Errors
/// Anything unreadable, with its place; for plain text also a NUL byte in a file that was not named, which
/// is how binary files are told from text.
pub(crate) fn read(file: &SourceFile, part_bytes: usize, sink: &mut Sink) -> Result<u64, Error> {
    let mut empty = 0;
    match file.format {
        Format::Plain => read_plain(file, open(file)?, part_bytes, &mut empty, sink)?,
        Format::Jsonl => read_jsonl(file, open(file)?, part_bytes, &mut empty, sink)?,
        Format::Parquet => read_parquet(file, part_bytes, &mut empty, sink)?,
    };
    Ok(empty)
}

fn open(file: &SourceFile) -> Result<Box<dyn Read>, Error> {
    let raw = File::open(&file.path).map_err(Error::io("open", &file.path))?;
    Ok(match file.compression {
        Compression::None => Box::new(raw),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::new(raw))),
        Compression::Zstd => {
            Box::new(zstd::stream::read::Decoder::new(raw).map_err(Error::io("decompress", &file.path))?)
        }
    })
}

/// Sends a document that is whole in memory.
fn send_whole(text: &str, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    if text.is_empty() {
        *empty += 1;
        return Ok(ControlFlow::Continue(()));
    }
    let mut rest = text;
    while rest.len() > part_bytes {
        let (part, after) = rest.split_at(cut_point(rest, part_bytes));
        if sink(Part { text: part, last: false })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        rest = after;
    }
    sink(Part { text: rest, last: true })
}

/// Where to cut `text`, which is longer than `limit` bytes: the last good place, or else a boundary of
/// characters; never 0.
fn cut_point(text: &str, limit: usize) -> usize {
    let bytes = text.as_bytes();
    let good = |at: &usize| {
        bytes[*at] == b' ' && bytes[at - 1].is_ascii_graphic() && bytes.get(at + 1).is_some_and(u8::is_ascii_graphic)
    };
    (limit / 2 + 1..=limit).rev().find(good).unwrap_or_else(|| {
        let boundary = (1..=limit).rev().find(|&at| text.is_char_boundary(at));
        boundary.unwrap_or_else(|| text.chars().next().map_or(text.len(), char::len_utf8))
    })
}

/// Streams one file as one document; at no time is more than a part and a block in memory.
fn read_plain(file: &SourceFile, mut input: impl Read, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    let mut text = TextWindow::new(file, part_bytes);
    let mut sent = false;
    loop {
        let ended = text.fill(&mut input)?;
        // A cut is judged by the byte after it, which must have been read.
        while text.valid.saturating_sub(if ended { 0 } else { 1 }) > part_bytes {
            let valid = text.valid();
            let cut = cut_point(valid, part_bytes);
            if sink(Part { text: &valid[..cut], last: false })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            text.consume(cut);
            sent = true;
        }
        if ended {
            break;
        }
    }
    if text.valid().is_empty() && !sent {
        *empty += 1;
        return Ok(ControlFlow::Continue(()));
    }
    sink(Part { text: text.valid(), last: true })
}

/// The bytes of a plain file that have been read and not yet sent, of which a prefix is known to be UTF-8.
struct TextWindow<'a> {
    file: &'a SourceFile,
    block: usize,
    bytes: Vec<u8>,
    valid: usize,
    /// Bytes of the file before the window.
    consumed: u64,
    started: bool,
}

impl<'a> TextWindow<'a> {
    fn new(file: &'a SourceFile, part_bytes: usize) -> Self {
        let block = part_bytes + 8;
        Self { file, block, bytes: Vec::new(), valid: 0, consumed: 0, started: false }
    }

    /// Reads another block and checks it; true at the end of the file.
    fn fill(&mut self, input: &mut impl Read) -> Result<bool, Error> {
        let before = self.bytes.len();
        let wanted = self.block as u64;
        let read = input.by_ref().take(wanted).read_to_end(&mut self.bytes);
        let ended = (read.map_err(Error::io("read", &self.file.path))? as u64) < wanted;
        if !self.started {
            self.started = true;
            self.drop_byte_order_mark();
        }
        if !self.file.named
            && let Some(at) = self.bytes[before.min(self.bytes.len())..].iter().position(|&byte| byte == 0)
        {
            return Err(self.not_text(before + at, "NUL byte"));
        }
        match str::from_utf8(&self.bytes[self.valid..]) {
            Ok(_) => self.valid = self.bytes.len(),
            Err(error) => {
                self.valid += error.valid_up_to();
                if ended || error.error_len().is_some() {
                    return Err(self.not_text(self.valid, "invalid UTF-8"));
                }
            }
        }
        Ok(ended)
    }

    fn drop_byte_order_mark(&mut self) {
        if self.bytes.starts_with("\u{feff}".as_bytes()) {
            self.bytes.drain(..3);
            self.consumed += 3;
        }
    }

    fn valid(&self) -> &str {
        // Checked twice, at a hundredth of the cost of tokenising, because the unchecked view is unsafe.
        str::from_utf8(&self.bytes[..self.valid]).unwrap_or_default()
    }

    fn consume(&mut self, count: usize) {
        self.bytes.drain(..count);
        self.valid -= count;
        self.consumed += count as u64;
    }

    fn not_text(&self, at: usize, what: &'static str) -> Error {
        Error::NotText { path: self.file.path.clone(), byte: self.consumed + at as u64 + 1, what }
    }
}

fn read_jsonl(file: &SourceFile, input: impl Read, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
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
        if send_whole(&text, part_bytes, empty, sink)?.is_break() {
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
    let found = match object.remove(&file.field) {
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

fn read_parquet(file: &SourceFile, part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    let bad = |message: String| Error::Parquet { path: file.path.clone(), message };
    if file.compression != Compression::None {
        return Err(bad("it is compressed a second time; decompress it".into()));
    }
    let raw = File::open(&file.path).map_err(Error::io("open", &file.path))?;
    let reader = SerializedFileReader::new(raw).map_err(|error| bad(error.to_string()))?;
    let projection = project(&reader, &file.path, &file.field)?;
    let rows = reader.get_row_iter(Some(projection)).map_err(|error| bad(error.to_string()))?;
    for (row, record) in (1..).zip(rows) {
        let record = record.map_err(|error| bad(format!("row {row}: {error}")))?;
        let field = record.into_columns().pop().map_or(Field::Null, |(_, field)| field);
        let text = text_of_field(field, file, row)?;
        if send_whole(&text, part_bytes, empty, sink)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The file's schema with only the wanted column, so that the others are not decoded.
fn project(reader: &dyn FileReader, path: &Path, column: &str) -> Result<Type, Error> {
    let schema = reader.metadata().file_metadata().schema();
    let field = schema.get_fields().iter().find(|field| field.name() == column);
    let field = field.ok_or_else(|| Error::MissingColumn {
        path: path.to_owned(),
        column: column.to_owned(),
        available: schema.get_fields().iter().map(|field| field.name().to_owned()).collect(),
    })?;
    let projection = Type::group_type_builder(schema.name()).with_fields(vec![field.clone()]).build();
    projection.map_err(|error| Error::Parquet { path: path.to_owned(), message: error.to_string() })
}

fn text_of_field(field: Field, file: &SourceFile, row: u64) -> Result<String, Error> {
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
