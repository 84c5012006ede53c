//! Catalogues of gettext: the messages of a program with their translations into one language.

mod english;
mod header;
mod mo;
mod plural;
mod po;

use std::io::Read;
use std::path::Path;

use encoding_rs::Encoding;

use super::skips::SkipReason;
use crate::data::documents;
use crate::data::error::Error;
use crate::data::sources::Compression;

pub(super) use english::is_english;
pub use header::CatalogueHeader;
pub use plural::PluralForms;

/// No catalogue may be larger: they are read whole.
const BYTES_MAX: u64 = 1 << 28;

/// A message with what translators made of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CatalogueEntry {
    pub context: Option<String>,
    pub id: String,
    pub plural_id: Option<String>,
    /// The translation, or one for each plural form.
    pub texts: Vec<String>,
    pub fuzzy: bool,
    pub obsolete: bool,
}

/// A catalogue as it is stored. An entry that cannot be decoded is a reason.
#[derive(Clone, Debug)]
pub struct Catalogue {
    pub header: CatalogueHeader,
    pub entries: Vec<Result<CatalogueEntry, SkipReason>>,
}

impl Catalogue {
    /// Reads a catalogue, compiled (`.mo`) or not (`.po`).
    ///
    /// # Errors
    /// Unreadable and damaged files, and encodings that nobody knows.
    pub fn read(path: &Path, compression: Compression, compiled: bool) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        let input = documents::open(path, compression)?;
        input.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
        if bytes.len() as u64 > BYTES_MAX {
            let message = format!("it is larger than {BYTES_MAX} bytes");
            return Err(Error::Catalogue { path: path.to_owned(), message });
        }
        if compiled { mo::parse(&bytes, path) } else { po::parse(&bytes, path) }
    }

    /// Every message with a translation of it. Of plural forms those for one and for most numbers are taken.
    pub fn pairs(&self) -> impl Iterator<Item = Result<[String; 2], SkipReason>> {
        self.entries.iter().flat_map(|entry| match entry {
            Ok(entry) => self.pairs_of(entry),
            Err(reason) => vec![Err(*reason)],
        })
    }

    fn pairs_of(&self, entry: &CatalogueEntry) -> Vec<Result<[String; 2], SkipReason>> {
        if entry.obsolete {
            return vec![Err(SkipReason::Obsolete)];
        }
        if entry.fuzzy {
            return vec![Err(SkipReason::Fuzzy)];
        }
        // Headers may promise more forms than an entry has.
        let last = entry.texts.len().saturating_sub(1);
        let pair = |id: &str, form: usize| match entry.texts.get(form.min(last)) {
            Some(text) if !text.trim().is_empty() => Ok([id.to_owned(), text.clone()]),
            _ => Err(SkipReason::Untranslated),
        };
        let Some(plural_id) = &entry.plural_id else { return vec![pair(&entry.id, 0)] };
        let (one, most) = (self.header.plurals.form(1), self.header.plurals.form_of_most());
        let plural = pair(plural_id, most);
        if one.min(last) == most.min(last) { vec![plural] } else { vec![pair(&entry.id, one), plural] }
    }
}

/// The text of some bytes; none where they are not of the encoding.
fn decoded(bytes: &[u8], encoding: &'static Encoding) -> Result<String, SkipReason> {
    let text = encoding.decode_without_bom_handling_and_without_replacement(bytes);
    text.map(|text| text.into_owned()).ok_or(SkipReason::WrongEncoding)
}
