//! Texts of one language, for tasks that read no pairs: which files hold them, and a text a line.
//!
//! A text is met as a pair with itself, so that it is cleaned, counted and held out as the texts of pairs are.

use std::path::Path;

use super::PairRecords;
use super::lines::LineReader;
use super::list::{PairFile, PairLayout, PairListing, PairSpec, bad, ending_of};
use crate::data::error::Error;
use crate::data::sources::{self, Compression, Format, SourceFile};

/// The field of JSONL, or column of Parquet, unless the source names another.
const FIELD: &str = "text";

/// Adds the files of a source of texts in `language`. In folders and globs these are `.txt`, `.jsonl`, `.parquet`, and
/// files whose names end in the language.
pub(super) fn list(
    source: usize,
    (spec, language): (&PairSpec, &str),
    cache: &Path,
    listing: &mut PairListing,
) -> Result<(), Error> {
    for file in sources::list_all(&spec.path, cache)?.files {
        let (_, ending) = ending_of(&file);
        let holds_pairs = ["mo", "gmo", "po", "tmx", "tsv"].contains(&&*ending.to_lowercase());
        if holds_pairs && file.named {
            let message = "the file holds pairs, and `language` says that it is text of one language: leave it out";
            return Err(bad(spec, message));
        }
        let is_text = file.named || file.format != Format::Plain || ending == "txt" || ending == language;
        match is_text && !holds_pairs {
            true => add(SourceFile { source, ..file }, spec, language, listing),
            false => listing.others += 1,
        }
    }
    Ok(())
}

/// Adds one file of texts.
pub(super) fn add(file: SourceFile, spec: &PairSpec, language: &str, listing: &mut PairListing) {
    let field = spec.field.clone().unwrap_or_else(|| FIELD.to_owned());
    let fields = Some([field.clone(), field]);
    let layout = match file.format {
        Format::Plain => PairLayout::Texts,
        Format::Jsonl => PairLayout::Jsonl { fields },
        Format::Parquet => PairLayout::Parquet { fields },
    };
    let languages = [language, language].map(str::to_owned);
    let SourceFile { path, source, named, .. } = file;
    listing.files.push(PairFile { path, layout, languages, source, named, alone: true });
}

/// The lines of a file.
pub(super) fn read(path: &Path, compression: Compression) -> Result<PairRecords<'static>, Error> {
    let mut lines = LineReader::open(path, compression)?;
    let next = move || lines.next().map(|line| line.map(|line| line.map(|text| [text.clone(), text]))).transpose();
    Ok(Box::new(std::iter::from_fn(next)))
}
