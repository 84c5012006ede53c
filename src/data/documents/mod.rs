//! The documents inside a file, streamed in parts of bounded size.
//!
//! Long documents are cut so that memory stays bounded and one huge document is tokenised by all cores. A
//! cut falls before a single space between two printable ASCII characters, where the pre-tokenizers of
//! byte-level BPEs cut anyway, so the tokens are those of the uncut text; only text without any such place
//! for half a part is cut elsewhere. Says nothing about which documents are used: empty ones are counted
//! and left out here, everything else is the caller's decision.

mod jsonl;
pub(super) mod parquet;
mod plain;

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::error::Error;
use super::sources::{Compression, Format, SourceFile};

/// A stretch of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DocumentPart<'a> {
    pub(crate) text: &'a str,
    /// Whether the document ends here.
    pub(crate) last: bool,
    /// The line or row that it is in.
    pub(crate) place: u64,
}

/// What receives the parts; it may ask to stop.
pub(crate) type Sink<'a> = dyn FnMut(DocumentPart) -> Result<ControlFlow<()>, Error> + 'a;

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
    // A conversation is written by its template as a whole.
    let part_bytes = if file.chat { usize::MAX } else { part_bytes };
    // Who asked to stop knows it; for the caller of this function it makes no difference.
    let _flow = match file.format {
        Format::Plain => plain::read(file, open(&file.path, file.compression)?, part_bytes, &mut empty, sink)?,
        Format::Jsonl => jsonl::read(file, open(&file.path, file.compression)?, part_bytes, &mut empty, sink)?,
        Format::Parquet => parquet::read(file, part_bytes, &mut empty, sink)?,
    };
    Ok(empty)
}

/// The bytes of a file without their wrapping.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn Read>, Error> {
    let raw = File::open(path).map_err(Error::io("open", path))?;
    Ok(match compression {
        Compression::None => Box::new(raw),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::new(raw))),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::new(raw).map_err(Error::io("decompress", path))?),
    })
}

/// Sends a document that is whole in memory, from a line or row.
fn send_whole((text, place): (&str, u64), part_bytes: usize, empty: &mut u64, sink: &mut Sink) -> Flow {
    if text.is_empty() {
        *empty += 1;
        return Ok(ControlFlow::Continue(()));
    }
    let mut rest = text;
    while rest.len() > part_bytes {
        let (part, after) = rest.split_at(cut_point(rest, part_bytes));
        if sink(DocumentPart { text: part, last: false, place })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        rest = after;
    }
    sink(DocumentPart { text: rest, last: true, place })
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(path: &Path) -> SourceFile {
        let (format, compression) = crate::data::sources::format_of(path);
        SourceFile {
            path: path.to_owned(),
            source: 0,
            relative: String::new(),
            format,
            compression,
            field: "text".into(),
            chat: false,
            held_out: false,
            named: true,
            bytes: 0,
            modified_ns: 0,
        }
    }

    fn parts_of(file: &SourceFile, part_bytes: usize) -> Vec<(String, bool)> {
        let mut parts = Vec::new();
        read(file, part_bytes, &mut |part| {
            parts.push((part.text.to_owned(), part.last));
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
        parts
    }

    #[test]
    fn cuts_fall_before_a_space_between_words() {
        for (text, limit, expected) in [
            ("hello world again", 12, 11),
            ("hello world again", 11, 11),
            ("hello world again", 10, 10),
            ("hello  world", 8, 8),
            ("ab c", 2, 2),
            ("äöü", 3, 2),
            ("äöü", 1, 2),
        ] {
            assert_eq!(cut_point(text, limit), expected, "{text:?} at {limit}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// However a document arrives, it is cut at the same places, into parts that give it back.
        #[test]
        fn streamed_and_whole_documents_have_the_same_parts(
            text in "([a-c]{1,9}[ \\n]{1,2}|é|\u{1F600}){0,30}",
            part_bytes in 4usize..40,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (plain, lines) = (folder.path().join("a.txt"), folder.path().join("a.jsonl"));
            std::fs::write(&plain, &text).unwrap();
            std::fs::write(&lines, serde_json::json!({ "text": text }).to_string()).unwrap();
            let parts = parts_of(&file(&plain), part_bytes);
            prop_assert_eq!(&parts, &parts_of(&file(&lines), part_bytes));
            prop_assert_eq!(parts.iter().map(|(part, _)| part.as_str()).collect::<String>(), text);
            prop_assert!(parts.iter().all(|(part, _)| part.len() <= part_bytes));
            let lasts = parts.iter().filter(|(_, last)| *last).count();
            prop_assert_eq!(lasts, usize::from(!parts.is_empty()));
        }
    }

    /// As above where it is hardest: a place to cut at every distance from the end of what has been read.
    #[test]
    fn a_cut_never_depends_on_what_has_been_read() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, lines) = (folder.path().join("a.txt"), folder.path().join("a.jsonl"));
        for (part_bytes, first) in (4..16).flat_map(|part| (0..20).map(move |first| (part, first))) {
            let text = format!("{}{}", "x".repeat(first), " ab c".repeat(12));
            std::fs::write(&plain, &text).unwrap();
            std::fs::write(&lines, serde_json::json!({ "text": text }).to_string()).unwrap();
            assert_eq!(parts_of(&file(&plain), part_bytes), parts_of(&file(&lines), part_bytes), "{text:?}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_not_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, "\u{feff}text").unwrap();
        assert_eq!(parts_of(&file(&path), 100), [("text".to_owned(), true)]);
    }

    #[test]
    fn places_of_bad_bytes_count_from_the_start_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let mut bytes = "word ".repeat(20).into_bytes();
        bytes[70] = 0xff;
        std::fs::write(&path, bytes).unwrap();
        let error = read(&file(&path), 16, &mut |_| Ok(ControlFlow::Continue(()))).unwrap_err();
        assert!(matches!(error, Error::NotText { byte: 71, .. }), "{error}");
    }
}
