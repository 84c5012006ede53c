//! Translation memories, TMX 1.4: units (`tu`) of variants (`tuv`) in one language each, with a segment (`seg`).
//!
//! Elements within a segment stand for codes of the text's own format. The codes in `bpt`, `ept`, `ph`, `it` and `ut`
//! are left out with all that they hold; `hi` only marks text, which stays.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

use super::skips::SkipReason;
use super::transcode::Transcoded;
use super::{FoundPair, PairRecords};
use crate::data::documents;
use crate::data::error::Error;
use crate::data::sources::Compression;

/// No piece of the file between two tags may be longer, and no unit: both are in memory whole.
const PIECE_BYTES_MAX: u64 = 1 << 24;

/// Languages that a message names.
const NAMED: usize = 20;

/// The pairs of two languages.
pub(super) fn read(
    path: &Path,
    compression: Compression,
    languages: &[String; 2],
) -> Result<PairRecords<'static>, Error> {
    let input = Transcoded::xml(documents::open(path, compression)?);
    let input = input.map_err(|charset| Error::Charset { path: path.to_owned(), charset })?;
    let since = Rc::new(Cell::new(0));
    let input = Bounded { input: input.map_err(Error::io("read", path))?, since: since.clone() };
    let mut reader = Reader::from_reader(BufReader::with_capacity(1 << 16, input));
    reader.config_mut().check_end_names = true;
    let mut memory = Memory {
        path: path.to_owned(),
        reader,
        since,
        languages: languages.clone(),
        unit: TmxUnit::default(),
        found: BTreeSet::new(),
        pairs: 0,
        units: 0,
    };
    Ok(Box::new(std::iter::from_fn(move || memory.next().transpose())))
}

/// A reader that fails where too much is read before the count is set back.
struct Bounded<R> {
    input: R,
    since: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.since.set(self.since.get() + read as u64);
        if self.since.get() > PIECE_BYTES_MAX {
            return Err(io::Error::other(format!("more than {PIECE_BYTES_MAX} bytes without a complete unit")));
        }
        Ok(read)
    }
}

/// The unit that is being read.
#[derive(Default)]
struct TmxUnit {
    sides: [Option<String>; 2],
    /// Which side the current variant is.
    side: Option<usize>,
    text: String,
    in_segment: bool,
    /// Elements within the segment that are open; of those from `code` on nothing is text.
    open: usize,
    code: Option<usize>,
}

struct Memory<R: Read> {
    path: PathBuf,
    reader: Reader<BufReader<Bounded<R>>>,
    since: Rc<Cell<u64>>,
    languages: [String; 2],
    unit: TmxUnit,
    /// Languages met.
    found: BTreeSet<String>,
    pairs: u64,
    units: u64,
}

impl<R: Read> Memory<R> {
    fn next(&mut self) -> Result<Option<FoundPair>, Error> {
        let mut buffer = Vec::new();
        loop {
            buffer.clear();
            let event = self.reader.read_event_into(&mut buffer).map_err(|error| self.bad_at(error))?;
            match event {
                Event::Start(element) => self.unit.start(&element, &self.languages, &mut self.found),
                Event::End(element) if element.name().as_ref() == "tu" => {
                    self.since.set(0);
                    self.units += 1;
                    return Ok(Some(self.finish_unit()));
                }
                Event::End(element) => self.unit.end(element.name().as_ref()),
                Event::Text(text) => self.unit.push(&text.xml10_content()),
                Event::CData(text) => self.unit.push(&text.xml10_content()),
                Event::GeneralRef(reference) => match resolve(&reference.resolve_char_ref(), &reference) {
                    Some(text) => self.unit.push(&text),
                    None => return Err(self.bad(format!("unknown entity &{};", &*reference))),
                },
                Event::Eof => return self.end().map(|()| None),
                _ => {}
            }
        }
    }

    fn finish_unit(&mut self) -> FoundPair {
        match std::mem::take(&mut self.unit).sides {
            [Some(source), Some(target)] => {
                self.pairs += 1;
                Ok([source, target])
            }
            _ => Err(SkipReason::MissingLanguage),
        }
    }

    fn end(&self) -> Result<(), Error> {
        if self.pairs > 0 {
            return Ok(());
        }
        let found = self.found.iter().take(NAMED).cloned().collect();
        Err(Error::NoDirection { path: self.path.clone(), languages: self.languages.clone(), found, units: self.units })
    }

    fn bad_at(&self, error: quick_xml::Error) -> Error {
        match error {
            quick_xml::Error::Io(error) => {
                let error = io::Error::new(error.kind(), error.to_string());
                Error::Io { action: "read", path: self.path.clone(), source: error }
            }
            error => self.bad(error.to_string()),
        }
    }

    fn bad(&self, message: String) -> Error {
        Error::Xml { path: self.path.clone(), byte: self.reader.buffer_position() + 1, message }
    }
}

impl TmxUnit {
    fn start(&mut self, element: &BytesStart, languages: &[String; 2], found: &mut BTreeSet<String>) {
        match element.name().as_ref() {
            "tu" => *self = TmxUnit::default(),
            "tuv" => {
                let language = language(element);
                self.side = language.as_ref().and_then(|language| side(language, languages));
                if found.len() < NAMED {
                    found.extend(language);
                }
            }
            "seg" => (self.in_segment, self.open, self.code) = (true, 0, None),
            name if self.in_segment => {
                self.open += 1;
                if matches!(name, "bpt" | "ept" | "ph" | "it" | "ut") {
                    self.code.get_or_insert(self.open);
                }
            }
            _ => {}
        }
    }

    fn end(&mut self, name: &str) {
        if name == "seg" {
            self.in_segment = false;
            let text = std::mem::take(&mut self.text);
            // Of two variants in a language the first counts.
            if let Some(side) = self.side.take() {
                self.sides[side].get_or_insert(text);
            }
        } else if self.in_segment {
            if self.code == Some(self.open) {
                self.code = None;
            }
            self.open = self.open.saturating_sub(1);
        }
    }

    fn push(&mut self, text: &str) {
        if self.in_segment && self.code.is_none() && self.side.is_some() {
            self.text.push_str(text);
        }
    }
}

/// `xml:lang`, or `lang` as before TMX 1.4.
fn language(element: &BytesStart) -> Option<String> {
    let attribute = |name: &str| {
        let attribute = element.try_get_attribute(name).ok().flatten()?;
        attribute.normalized_value(XmlVersion::Implicit1_0).ok().map(|value| value.into_owned())
    };
    attribute("xml:lang").or_else(|| attribute("lang"))
}

/// Which of the two languages a tag is. `en` is also `en-GB`, and the other way round; an exact tag goes before.
fn side(tag: &str, languages: &[String; 2]) -> Option<usize> {
    let plain = |tag: &str| tag.to_lowercase().replace('_', "-");
    let (tag, languages) = (plain(tag), languages.each_ref().map(|language| plain(language)));
    let within = |long: &str, short: &str| long.strip_prefix(short).is_some_and(|rest| rest.starts_with('-'));
    let near = |language: &String| within(&tag, language) || within(language, &tag);
    languages.iter().position(|language| *language == tag).or_else(|| languages.iter().position(near))
}

/// The text of a reference to a character, or to one of the five entities that XML knows.
fn resolve(letter: &Result<Option<char>, quick_xml::Error>, name: &str) -> Option<String> {
    match (letter, name) {
        (Ok(Some(letter)), _) => Some(letter.to_string()),
        (Ok(None), "amp") => Some("&".to_owned()),
        (Ok(None), "lt") => Some("<".to_owned()),
        (Ok(None), "gt") => Some(">".to_owned()),
        (Ok(None), "quot") => Some("\"".to_owned()),
        (Ok(None), "apos") => Some("'".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_tag_goes_before_a_near_one() {
        let of = |tag: &str, languages: [&str; 2]| side(tag, &languages.map(str::to_owned));
        assert_eq!(of("pt-BR", ["pt", "pt_BR"]), Some(1));
        assert_eq!(of("pt", ["pt-BR", "PT"]), Some(1));
        assert_eq!((of("pt-PT", ["en", "pt"]), of("en", ["en-GB", "pt"])), (Some(1), Some(0)));
        assert_eq!(of("ptx", ["en", "pt"]), None);
    }
}
