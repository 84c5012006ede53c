//! Texts on lines, and two files whose lines belong together, as Moses keeps them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::skips::SkipReason;
use super::{FoundPair, PairRecords};
use crate::data::documents;
use crate::data::error::Error;
use crate::data::sources::Compression;

/// No line may be longer: without a limit a file without line ends would be read into memory whole.
const LINE_BYTES_MAX: u64 = 1 << 24;

/// The lines of a file. Only a line feed ends a line, and a carriage return before it does not count.
pub(super) struct LineReader {
    path: PathBuf,
    input: BufReader<Box<dyn Read>>,
    bytes: Vec<u8>,
    /// Lines read.
    pub(super) count: u64,
    /// Bytes read before the last line.
    offset: u64,
    wrong: u64,
    first_wrong: u64,
}

/// One line: its text, or why it has none.
pub(super) type Line = Result<String, SkipReason>;

impl LineReader {
    pub(super) fn open(path: &Path, compression: Compression) -> Result<Self, Error> {
        let input = BufReader::with_capacity(1 << 16, documents::open(path, compression)?);
        let path = path.to_owned();
        Ok(Self { path, input, bytes: Vec::new(), count: 0, offset: 0, wrong: 0, first_wrong: 0 })
    }

    /// The next line, none at the end.
    ///
    /// # Errors
    /// Unreadable files, endless lines, and files of which half is in another encoding.
    pub(super) fn next(&mut self) -> Result<Option<Line>, Error> {
        self.offset += self.bytes.len() as u64;
        self.bytes.clear();
        let read = self.input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut self.bytes);
        let read = read.map_err(Error::io("read", &self.path))?;
        if read == 0 {
            return self.end().map(|()| None);
        }
        self.count += 1;
        if read as u64 == LINE_BYTES_MAX && self.bytes.last() != Some(&b'\n') {
            return Err(Error::LongLine { path: self.path.clone(), line: self.count, limit: LINE_BYTES_MAX });
        }
        if self.count == 1 && (self.bytes.starts_with(b"\xff\xfe") || self.bytes.starts_with(b"\xfe\xff")) {
            return Err(Error::NotText { path: self.path.clone(), byte: 1, what: "the mark of UTF-16" });
        }
        Ok(Some(self.line()))
    }

    fn line(&mut self) -> Line {
        let content = self.bytes.strip_suffix(b"\n").unwrap_or(&self.bytes);
        let content = content.strip_suffix(b"\r").unwrap_or(content);
        let mark = if self.count == 1 { content.strip_prefix(b"\xef\xbb\xbf") } else { None };
        let wrong = match std::str::from_utf8(mark.unwrap_or(content)) {
            Ok(text) => match text.find('\0') {
                None => return Ok(text.to_owned()),
                Some(at) => at,
            },
            Err(error) => error.valid_up_to(),
        };
        if self.wrong == 0 {
            self.first_wrong = self.offset + wrong as u64 + 1;
        }
        self.wrong += 1;
        Err(SkipReason::WrongEncoding)
    }

    /// A few broken lines are counted; a file that is mostly broken is in another encoding, which has to be said.
    fn end(&self) -> Result<(), Error> {
        if self.wrong * 2 > self.count {
            let what = "an encoding other than UTF-8 in most lines, first";
            return Err(Error::NotText { path: self.path.clone(), byte: self.first_wrong, what });
        }
        Ok(())
    }

    /// How many lines there are, the rest read for it.
    fn count_all(&mut self) -> Result<u64, Error> {
        while self.next()?.is_some() {}
        Ok(self.count)
    }
}

/// The lines of two files, side by side.
pub(super) fn read(files: [(&Path, Compression); 2]) -> Result<PairRecords<'static>, Error> {
    let [source, target] = files.map(|(path, compression)| LineReader::open(path, compression));
    let (mut source, mut target) = (source?, target?);
    let mut next = move || -> Result<Option<FoundPair>, Error> {
        match (source.next()?, target.next()?) {
            (None, None) => Ok(None),
            (Some(source), Some(target)) => Ok(Some(source.and_then(|source| Ok([source, target?])))),
            _ => Err(Error::UnequalLines {
                lines: [source.count_all()?, target.count_all()?],
                paths: [source.path.clone(), target.path.clone()],
            }),
        }
    };
    Ok(Box::new(std::iter::from_fn(move || next().transpose())))
}
