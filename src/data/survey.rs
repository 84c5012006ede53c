//! The first pass over a corpus: what there is, before anything is written.
//!
//! It finds binary files, applies `data.max_bytes`, counts documents, finds the longest one, and draws the
//! sample the tokenizer is trained on. The second pass can then decide about every document as it comes, and
//! nothing ever has to be taken back. Reading twice costs a few percent of tokenising once.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use sha2::{Digest, Sha256};

use super::documents::{self, DocumentPart};
use super::error::Error;
use super::manifest::SkippedFiles;
use super::shuffle::mix;
use super::sources::{Compression, Format, Listing, SourceFile};
use super::splits::CorpusShape;

/// What a file may hold besides its text.
const BYTE_ORDER_MARK_BYTES: u64 = 3;

/// Names of binary files kept for the report.
const EXAMPLES: usize = 5;

/// What a pass needs to know besides the files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SurveyLimits {
    pub(crate) part_bytes: usize,
    /// Text kept for training a tokenizer; 0 where none is trained.
    pub(crate) sample_bytes: usize,
    pub(crate) max_bytes: Option<u64>,
}

/// A file that will be used, with what it holds.
#[derive(Clone, Debug)]
pub(crate) struct SurveyedFile {
    pub(crate) file: SourceFile,
    pub(crate) documents: u64,
    /// Bytes of text.
    pub(crate) bytes: u64,
    /// Place in the file and bytes of its longest document.
    longest: (u64, u64),
}

/// The corpus as found.
#[derive(Debug)]
pub(crate) struct Survey {
    /// In the corpus's order, only files with text.
    pub(crate) files: Vec<SurveyedFile>,
    pub(crate) sample: Vec<String>,
    pub(crate) skipped: SkippedFiles,
}

/// Reads every file once.
///
/// # Errors
/// Unreadable files; no text at all; nothing that fits `max_bytes`.
pub(crate) fn survey(listing: &Listing, bounds: SurveyLimits, progress: &dyn Fn(usize)) -> Result<Survey, Error> {
    let mut surveyor = Surveyor::new(listing, bounds);
    for (done, index) in reading_order(listing, bounds.max_bytes).into_iter().enumerate() {
        progress(done);
        surveyor.visit(index, &listing.files[index])?;
    }
    surveyor.finish(listing.files.len())
}

impl Survey {
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(crate) fn shape(&self) -> CorpusShape {
        let mut shape = CorpusShape { documents: 0, bytes: 0, longest: 0, longest_bytes: 0 };
        for file in &self.files {
            let (place, bytes) = file.longest;
            if bytes > shape.longest_bytes {
                (shape.longest, shape.longest_bytes) = (shape.documents + place, bytes);
            }
            shape.documents += file.documents;
            shape.bytes += file.bytes;
        }
        shape
    }
}

/// Under a cap, files are considered in an order that is unrelated to their content and the same on every
/// machine; otherwise as they come.
fn reading_order(listing: &Listing, max_bytes: Option<u64>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..listing.files.len()).collect();
    if max_bytes.is_some() {
        order.sort_by_cached_key(|&index| (name_hash(&listing.files[index]), index));
    }
    order
}

fn name_hash(file: &SourceFile) -> [u8; 32] {
    Sha256::digest(file.relative.as_bytes()).into()
}

/// Whether the size on disk is the size of the text, so that the file need not be read to know it.
fn is_bare(file: &SourceFile) -> bool {
    (file.format, file.compression) == (Format::Plain, Compression::None)
}

struct Surveyor {
    bounds: SurveyLimits,
    bytes: u64,
    files: BTreeMap<usize, SurveyedFile>,
    sample: Sample,
    skipped: SkippedFiles,
}

/// The counts of one file while it is read.
#[derive(Default)]
struct Count {
    documents: u64,
    bytes: u64,
    document_bytes: u64,
    longest: (u64, u64),
}

impl Surveyor {
    fn new(listing: &Listing, bounds: SurveyLimits) -> Self {
        let skipped =
            SkippedFiles { hidden: listing.hidden, broken_links: listing.broken_links, ..SkippedFiles::default() };
        let sample = Sample::new(bounds.sample_bytes);
        Self { bounds, bytes: 0, files: BTreeMap::new(), sample, skipped }
    }

    fn visit(&mut self, index: usize, file: &SourceFile) -> Result<(), Error> {
        let left = self.bounds.max_bytes.map_or(u64::MAX, |max| max - self.bytes);
        if left == 0 || (is_bare(file) && file.bytes > left.saturating_add(BYTE_ORDER_MARK_BYTES)) {
            self.skipped.over_max_bytes += 1;
            return Ok(());
        }
        let key = u64::from_le_bytes(name_hash(file)[..8].try_into().unwrap_or_default());
        let mut count = Count::default();
        let mut over = false;
        let read = documents::read(file, self.bounds.part_bytes, &mut |part| {
            self.sample.offer(mix(key).wrapping_add(count.bytes), index, part.text);
            count.add(part);
            over = count.bytes > left;
            Ok(if over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        match read {
            Err(Error::NotText { .. }) if !file.named => self.skip_binary(index, file),
            Err(error) => return Err(error),
            Ok(_) if over => {
                self.sample.forget(index);
                self.skipped.over_max_bytes += 1;
            }
            Ok(empty) => self.keep(index, file, &count, empty),
        }
        Ok(())
    }

    fn skip_binary(&mut self, index: usize, file: &SourceFile) {
        self.sample.forget(index);
        self.skipped.binary += 1;
        if self.skipped.binary_examples.len() < EXAMPLES {
            self.skipped.binary_examples.push(file.relative.clone());
        }
    }

    fn keep(&mut self, index: usize, file: &SourceFile, count: &Count, empty: u64) {
        self.skipped.empty += empty;
        self.bytes += count.bytes;
        if count.documents > 0 {
            let Count { documents, bytes, longest, .. } = *count;
            self.files.insert(index, SurveyedFile { file: file.clone(), documents, bytes, longest });
        }
    }

    fn finish(self, files: usize) -> Result<Survey, Error> {
        let SkippedFiles { binary, empty, over_max_bytes, .. } = self.skipped;
        match self.bounds.max_bytes {
            Some(max_bytes) if self.files.is_empty() && over_max_bytes > 0 => {
                Err(Error::NothingFits { files, max_bytes })
            }
            _ if self.files.is_empty() => Err(Error::NoText { files, binary, empty }),
            _ => Ok(Survey {
                files: self.files.into_values().collect(),
                sample: self.sample.into_texts(),
                skipped: self.skipped,
            }),
        }
    }
}

impl Count {
    fn add(&mut self, part: DocumentPart) {
        self.bytes += part.text.len() as u64;
        self.document_bytes += part.text.len() as u64;
        if part.last {
            if self.document_bytes > self.longest.1 {
                self.longest = (self.documents, self.document_bytes);
            }
            self.documents += 1;
            self.document_bytes = 0;
        }
    }
}

/// The parts with the smallest hashes, as many as fit: a uniform sample of bounded size in one pass.
struct Sample {
    bytes_max: usize,
    bytes: usize,
    /// By hash, file and place of arrival.
    parts: BTreeMap<(u64, usize, u64), String>,
    offered: u64,
}

impl Sample {
    fn new(bytes_max: usize) -> Self {
        Self { bytes_max, bytes: 0, parts: BTreeMap::new(), offered: 0 }
    }

    fn offer(&mut self, place: u64, file: usize, text: &str) {
        let key = (mix(place), file, self.offered);
        self.offered += 1;
        let full = self.bytes + text.len() > self.bytes_max;
        if full && self.parts.last_key_value().is_none_or(|(last, _)| key > *last) && !self.parts.is_empty() {
            return;
        }
        if self.bytes_max == 0 {
            return;
        }
        self.bytes += text.len();
        self.parts.insert(key, text.to_owned());
        while self.bytes > self.bytes_max && self.parts.len() > 1 {
            self.bytes -= self.parts.pop_last().map_or(0, |(_, text)| text.len());
        }
    }

    fn forget(&mut self, file: usize) {
        self.parts.retain(|(_, of, _), _| *of != file);
        self.bytes = self.parts.values().map(String::len).sum();
    }

    fn into_texts(self) -> Vec<String> {
        self.parts.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_bounded_and_repeatable() {
        let draw = |bytes_max| {
            let mut sample = Sample::new(bytes_max);
            for place in 0..1000u64 {
                sample.offer(place, 0, &format!("text {place:04}"));
            }
            sample.into_texts()
        };
        let texts = draw(900);
        assert_eq!(texts.len(), 100);
        assert_eq!(texts, draw(900));
        let late = texts.iter().filter(|text| text.as_str() >= "text 0500").count();
        // Half of them on average; ten is five standard deviations away.
        assert!(late.abs_diff(50) < 25, "{late} of 100 come from the second half");
        assert_eq!(draw(1 << 20).len(), 1000);
        assert_eq!(draw(0).len(), 0);
        assert_eq!(draw(3).len(), 1, "one part is kept even where it is longer than the sample");
    }

    #[test]
    fn a_forgotten_file_leaves_the_sample() {
        let mut sample = Sample::new(100);
        sample.offer(1, 0, "kept");
        sample.offer(2, 1, "forgotten");
        sample.forget(1);
        assert_eq!((sample.bytes, sample.into_texts()), (4, vec!["kept".to_owned()]));
    }
}
