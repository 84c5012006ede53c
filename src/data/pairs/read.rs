//! Pairs as they come out of files: read, cleaned and counted.

use std::collections::BTreeMap;
use std::fs;

use super::catalogues::Catalogue;
use super::clean::{Cleaner, Cleaning, RecordKind};
use super::list::{PairFile, PairLayout, PairListing, compression};
use super::skips::Skips;
use super::{PairRecords, catalogues, jsonl, lines, parquet, texts, tmx, tsv};
use crate::data::error::Error;
use crate::data::sources::Compression;

/// Names of files kept for the report.
const EXAMPLES: usize = 5;

/// Two texts that say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPair {
    pub languages: [String; 2],
    pub texts: [String; 2],
    /// Whether the first text is a catalogue's message, which all languages of the program share.
    pub is_message: bool,
}

/// The pairs of one file.
pub struct PairReader<'a> {
    languages: [String; 2],
    kind: RecordKind,
    records: PairRecords<'a>,
    cleaner: &'a mut Cleaner,
    skips: Skips,
}

impl PairReader<'_> {
    /// What was left out so far.
    pub fn skips(&self) -> &Skips {
        &self.skips
    }
}

impl Iterator for PairReader<'_> {
    type Item = Result<TextPair, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let found = match self.records.next()? {
                Ok(found) => found,
                Err(error) => return Some(Err(error)),
            };
            match found.and_then(|texts| self.cleaner.clean(&self.languages, texts, self.kind)) {
                Ok(texts) => {
                    let languages = self.languages.clone();
                    let is_message = self.kind == RecordKind::Message;
                    return Some(Ok(TextPair { languages, texts, is_message }));
                }
                Err(reason) => self.skips.add(reason),
            }
        }
    }
}

/// Begins to read a file. The cleaner knows what was met in files before.
///
/// # Errors
/// Files that cannot be opened, and catalogues, which are read at once, that are damaged.
pub fn open<'a>(file: &PairFile, cleaner: &'a mut Cleaner) -> Result<PairReader<'a>, Error> {
    let kind = match file.layout {
        _ if file.alone => RecordKind::Text,
        PairLayout::Catalogue { .. } => RecordKind::Message,
        _ if cleaner.meets_labels() => RecordKind::Labelled,
        _ => RecordKind::Translations,
    };
    let records = records(file, cleaner.meets_labels())?;
    Ok(PairReader { languages: file.languages.clone(), kind, records, cleaner, skips: Skips::default() })
}

/// `labelled` are those whose second sides are labels.
fn records(file: &PairFile, labelled: bool) -> Result<PairRecords<'static>, Error> {
    let (path, wrapping) = (&file.path, compression(&file.path));
    match &file.layout {
        PairLayout::Lines { other } => lines::read([(path, wrapping), (other, compression(other))]),
        PairLayout::Texts => texts::read(path, wrapping),
        PairLayout::Tsv { columns } => tsv::read(path, wrapping, *columns),
        PairLayout::Jsonl { fields } => {
            jsonl::read(path, wrapping, fields.as_ref().unwrap_or(&file.languages), labelled)
        }
        PairLayout::Parquet { .. } if wrapping != Compression::None => {
            Err(Error::Parquet { path: path.clone(), message: "it is compressed a second time; decompress it".into() })
        }
        PairLayout::Parquet { fields } => parquet::read(path, fields.as_ref().unwrap_or(&file.languages), labelled),
        PairLayout::Tmx => tmx::read(path, wrapping, &file.languages),
        PairLayout::Catalogue { compiled, .. } => {
            let catalogue = Catalogue::read(path, wrapping, *compiled)?;
            let pairs: Vec<_> = catalogue.pairs().collect();
            Ok(Box::new(pairs.into_iter().map(Ok)))
        }
    }
}

/// What the pairs of two languages came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectionSummary {
    pub files: u64,
    pub pairs: u64,
    pub skips: Skips,
}

/// What reading a listing came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairSummary {
    pub directions: BTreeMap<[String; 2], DirectionSummary>,
    /// Catalogues in folders and globs that could not be read, and what was wrong with the first of them.
    pub unreadable: u64,
    pub unreadable_examples: Vec<String>,
    /// Catalogues of programs whose messages are no English text, by program.
    pub foreign: BTreeMap<String, u64>,
}

/// Sends every pair of the listing to `sink`, in order.
///
/// # Errors
/// Those of the readers, and of `sink`; but a damaged catalogue that no source names is counted.
pub fn read_all(
    listing: &PairListing,
    cleaning: Cleaning,
    sink: &mut dyn FnMut(TextPair) -> Result<(), Error>,
) -> Result<PairSummary, Error> {
    let (mut summary, mut cleaner) = (PairSummary::default(), Cleaner::new(cleaning));
    let foreign = foreign_programs(listing);
    for file in &listing.files {
        if let Some(program) = domain(file).filter(|program| foreign.contains(program)) {
            *summary.foreign.entry(program.to_owned()).or_insert(0) += 1;
            continue;
        }
        let mut reader = match open(file, &mut cleaner) {
            Ok(reader) => reader,
            Err(error) if !file.named && domain(file).is_some() => {
                summary.unreadable += 1;
                if summary.unreadable_examples.len() < EXAMPLES {
                    summary.unreadable_examples.push(error.to_string());
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        let direction = summary.directions.entry(file.languages.clone()).or_default();
        direction.files += 1;
        let before = direction.pairs;
        for pair in &mut reader {
            direction.pairs += 1;
            sink(pair?)?;
        }
        if file.alone && file.named && direction.pairs == before {
            let ([language, _], skipped) = (file.languages.clone(), reader.skips().to_string());
            return Err(Error::NoTexts { path: file.path.clone(), language, skipped });
        }
        direction.skips += reader.skips();
    }
    Ok(summary)
}

fn domain(file: &PairFile) -> Option<&str> {
    match &file.layout {
        PairLayout::Catalogue { domain, .. } => Some(domain),
        _ => None,
    }
}

/// Programs whose messages are names of messages, or of another language than English; told by the largest catalogue of
/// each.
fn foreign_programs(listing: &PairListing) -> Vec<&str> {
    let mut largest: BTreeMap<&str, (u64, &PairFile)> = BTreeMap::new();
    for file in &listing.files {
        let Some(program) = domain(file) else { continue };
        let bytes = fs::metadata(&file.path).map_or(0, |metadata| metadata.len());
        let entry = largest.entry(program).or_insert((bytes, file));
        if bytes > entry.0 {
            *entry = (bytes, file);
        }
    }
    let is_foreign = |file: &PairFile| {
        let PairLayout::Catalogue { compiled, .. } = file.layout else { return false };
        let catalogue = Catalogue::read(&file.path, compression(&file.path), compiled);
        catalogue.is_ok_and(|catalogue| !catalogues::is_english(&catalogue))
    };
    largest.into_iter().filter(|(_, (_, file))| is_foreign(file)).map(|(program, _)| program).collect()
}
