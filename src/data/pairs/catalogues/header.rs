//! The header of a catalogue: the translation of the empty message, in lines like those of a mail.

use std::path::Path;

use encoding_rs::{Encoding, UTF_8};

use super::plural::PluralForms;
use crate::data::error::Error;

/// What a header says, as far as it matters here.
#[derive(Clone, Debug)]
pub struct CatalogueHeader {
    /// `Language`, where it is given.
    pub language: Option<String>,
    pub plurals: PluralForms,
    pub(super) encoding: &'static Encoding,
}

impl CatalogueHeader {
    /// Of the header's bytes; none at all stand for UTF-8 and the plural forms of English.
    pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        // Names of encodings and plural forms are ASCII, whatever the rest.
        let text = String::from_utf8_lossy(bytes);
        let field = |name: &str| {
            let value =
                |line: &str| line.split_once(':').filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(trimmed);
            text.lines().find_map(value).filter(|value| !value.is_empty())
        };
        let charset = field("Content-Type").and_then(|value| charset(&value));
        Ok(Self {
            language: field("Language"),
            plurals: field("Plural-Forms").and_then(|value| PluralForms::parse(&value)).unwrap_or_default(),
            encoding: encoding(charset, path)?,
        })
    }
}

fn trimmed((_, value): (&str, &str)) -> String {
    value.trim().to_owned()
}

fn charset(content_type: &str) -> Option<String> {
    let at = content_type.to_ascii_lowercase().find("charset=")?;
    let name = content_type[at + "charset=".len()..].split([';', ' ', '\t', '"']).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// `CHARSET` stands in templates; ASCII is UTF-8, so that other bytes are noticed.
fn encoding(charset: Option<String>, path: &Path) -> Result<&'static Encoding, Error> {
    match charset.as_deref() {
        None | Some("CHARSET" | "ASCII" | "US-ASCII" | "ascii" | "us-ascii") => Ok(UTF_8),
        Some(name) => Encoding::for_label(name.as_bytes())
            .ok_or_else(|| Error::Charset { path: path.to_owned(), charset: name.to_owned() }),
    }
}
