//! A file of equally many bytes for every step behind a header: made, continued or opened by one process before its ranks
//! begin, written and read by all of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Error;

/// What a file is a recording of: its first bytes, and how many each step has.
pub trait Header: Clone {
    const MAGIC: &'static [u8; 8];
    /// What is recorded, and what to do about a file that is something else.
    const WHAT: [&'static str; 2];

    /// The header of a file that begins with step `first`.
    fn encode(&self, first: u64) -> Vec<u8>;

    /// The header and the first step of a file that begins with `bytes`, or what is wrong with them.
    ///
    /// # Errors
    /// Bytes that are no header.
    fn decode(bytes: &[u8]) -> Result<(Self, u64), String>;

    /// Each field that is not the same, in words.
    fn differences(&self, recorded: &Self) -> Vec<String>;

    fn header_bytes(&self) -> u64;

    fn step_bytes(&self) -> u64;
}

/// An open file; ranks share it, each reads and writes at its own places.
#[derive(Clone, Debug)]
pub struct StepFile<H> {
    file: Arc<File>,
    pub(super) path: PathBuf,
    pub(super) header: H,
    /// The step of the first block.
    first: u64,
}

/// A file that may be written, and is still as it was.
#[derive(Debug)]
pub struct Ready<H> {
    path: PathBuf,
    header: H,
    first: u64,
    /// Bytes that stay; with none the file begins anew.
    keeps: u64,
}

impl<H: Header> Ready<H> {
    /// Cuts the file to what stays of it, or makes it.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn begin(self) -> Result<StepFile<H>, Error> {
        let Ready { path, header, first, keeps } = self;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(Error::io("create", &path))?;
        // Other processes of a run may look at it at the same time: it is a recording all the while.
        let begin = || match keeps {
            0 => {
                file.write_all_at(&header.encode(first), 0)?;
                file.set_len(header.header_bytes())
            }
            keeps => file.set_len(keeps),
        };
        begin().map_err(Error::io("write", &path))?;
        Ok(StepFile { file: Arc::new(file), path, header, first })
    }
}

impl<H: Header> StepFile<H> {
    /// For a recording that begins with step `first`. One that is there already will be lost; another file is not touched.
    ///
    /// # Errors
    /// A file that is no recording.
    pub fn to_create(path: &Path, header: H, first: u64) -> Result<Ready<H>, Error> {
        match StepFile::<H>::is_there(path).map_err(Error::io("read", path))? {
            Some(false) => Err(Error::WouldOverwrite(path.to_owned())),
            _ => Ok(Ready { path: path.to_owned(), header, first, keeps: 0 }),
        }
    }

    /// Whether what has this name is such a recording, of whatever version and in whatever state, if something has.
    pub(super) fn is_there(path: &Path) -> io::Result<Option<bool>> {
        match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
            // A pipe would keep its reader waiting.
            Ok(found) if !found.is_file() => Ok(Some(false)),
            Ok(found) => Ok(Some(found.len() == 0 || beginning(path, 8)?.starts_with(H::MAGIC))),
        }
    }

    /// To continue a recording after step `done`: later steps will be cut off. Without a file, or if its steps are all
    /// later, one begins with the next step.
    ///
    /// # Errors
    /// A file of another run, or that ends before `done`.
    pub fn to_resume(path: &Path, header: H, done: u64) -> Result<Ready<H>, Error> {
        if !path.exists() {
            return StepFile::to_create(path, header, done + 1);
        }
        let (recording, last) = StepFile::read_header(path, header)?;
        let first = recording.first;
        if first > done {
            return StepFile::to_create(path, recording.header, done + 1);
        }
        if last < done {
            return Err(Error::Torn { path: path.to_owned(), last, done });
        }
        let keeps = recording.offset(done + 1);
        Ok(Ready { path: recording.path, header: recording.header, first, keeps })
    }

    /// [`StepFile::to_create`], and done so.
    ///
    /// # Errors
    /// A file that cannot be written, or is no recording.
    pub fn create(path: &Path, header: H, first: u64) -> Result<StepFile<H>, Error> {
        StepFile::to_create(path, header, first)?.begin()
    }

    /// [`StepFile::to_resume`], and done so.
    ///
    /// # Errors
    /// A file that cannot be written, of another run, or that ends before `done`.
    pub fn resume(path: &Path, header: H, done: u64) -> Result<StepFile<H>, Error> {
        StepFile::to_resume(path, header, done)?.begin()
    }

    /// A recording to follow in `steps`.
    ///
    /// # Errors
    /// A file that cannot be read, is of another run, or has not all the steps.
    pub fn open(path: &Path, header: H, steps: RangeInclusive<u64>) -> Result<StepFile<H>, Error> {
        let (recording, last) = StepFile::read_header(path, header)?;
        let (first, path) = (recording.first, path.to_owned());
        match steps {
            _ if steps.is_empty() => Ok(recording),
            _ if first > *steps.start() => Err(Error::Late { path, first, wanted: *steps.start() }),
            _ if last < *steps.end() => Err(Error::Short { path, last, wanted: *steps.end() }),
            _ => Ok(recording),
        }
    }

    /// What a file is a recording of, and its whole steps.
    ///
    /// # Errors
    /// A file that cannot be read, or is no recording.
    pub fn look(path: &Path) -> Result<(H, RangeInclusive<u64>), Error> {
        let (file, header, first) = StepFile::<H>::header_of(path)?;
        let recording = StepFile { file: Arc::new(file), path: path.to_owned(), header, first };
        let last = recording.last()?;
        Ok((recording.header, first..=last))
    }

    /// A file with a sound header that is equal to `header`, and the last step that it holds as a whole.
    fn read_header(path: &Path, header: H) -> Result<(StepFile<H>, u64), Error> {
        let (file, recorded, first) = StepFile::<H>::header_of(path)?;
        let differences = header.differences(&recorded);
        if !differences.is_empty() {
            return Err(Error::Differs { path: path.to_owned(), differences });
        }
        let recording = StepFile { file: Arc::new(file), path: path.to_owned(), header, first };
        let last = recording.last()?;
        Ok((recording, last))
    }

    /// The last step that is there as a whole.
    fn last(&self) -> Result<u64, Error> {
        let length = self.file.metadata().map_err(Error::io("read", &self.path))?.len();
        let whole = length.saturating_sub(self.header.header_bytes()) / self.header.step_bytes();
        Ok((self.first - 1).saturating_add(whole))
    }

    /// A file's header and first step.
    fn header_of(path: &Path) -> Result<(File, H, u64), Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        // Another model's header may be longer than this one's; 64 KiB hold eight thousand layers.
        let bytes = beginning(path, 1 << 16).map_err(Error::io("read", path))?;
        let [what, remedy] = H::WHAT;
        let wrong = |reason| {
            let reason = format!("{what} ({reason}): {remedy}");
            Error::NotARecording { path: path.to_owned(), reason }
        };
        let (header, first) = H::decode(&bytes).map_err(wrong)?;
        Ok((file, header, first))
    }

    /// Where the blocks of a step begin.
    pub(super) fn offset(&self, step: u64) -> u64 {
        self.header.header_bytes() + (step - self.first) * self.header.step_bytes()
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.file.write_all_at(bytes, offset).map_err(Error::io("write", &self.path))
    }

    pub(super) fn read_at(&self, count: usize, offset: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; count];
        self.file.read_exact_at(&mut bytes, offset).map_err(Error::io("read", &self.path))?;
        Ok(bytes)
    }

    /// Returns once everything written so far is on the disk.
    ///
    /// # Errors
    /// A disk that cannot take it.
    pub fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(Error::io("sync", &self.path))
    }

    /// The step of the first block.
    pub fn first(&self) -> u64 {
        self.first
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The first bytes of a file, as many as there are.
fn beginning(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}
