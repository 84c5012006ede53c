//! `metrics.jsonl`: appended to by one rank, cut back on resume, read by reports.
//!
//! A line is written by one call, so a killed process leaves at most a torn last line. Cutting back only
//! shortens the file: earlier lines keep their bytes because nothing touches them, and a kill at any moment
//! leaves either the old length or the new one.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{Error, StepRecord};

/// Name of the log in a run folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Appends step records to the log of a run. What could not be written is kept, and written before the next record.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    last_step: Option<u64>,
    /// Bytes of the file that are whole lines.
    bytes: u64,
    /// Lines that are not in the file yet.
    unwritten: Vec<u8>,
}

impl Writer {
    /// Starts an empty log in the folder `run`; an earlier log there is lost.
    pub fn create(run: &Path) -> Result<Writer, Error> {
        let path = run.join(METRICS_FILE);
        File::create(&path).map_err(Error::io("create", &path))?;
        let file = OpenOptions::new().append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok(Writer { file, path, last_step: None, bytes: 0, unwritten: Vec::new() })
    }

    /// Continues the log of `run` after `step`: later lines and a torn last line go; a missing log starts empty.
    pub fn resume(run: &Path, step: u64) -> Result<Writer, Error> {
        let path = run.join(METRICS_FILE);
        let file = OpenOptions::new().append(true).create(true).open(&path).map_err(Error::io("open", &path))?;
        let kept = kept_prefix(&path, step)?;
        let (last_step, bytes) = (kept.last_step, kept.bytes);
        let mut writer = Writer { file, path, last_step, bytes, unwritten: Vec::new() };
        writer.file.set_len(bytes).map_err(Error::io("shorten", &writer.path))?;
        if kept.lacks_newline {
            writer.unwritten.push(b'\n');
            writer.catch_up()?;
        }
        writer.file.sync_all().map_err(Error::io("sync", &writer.path))?;
        Ok(writer)
    }

    /// Appends one line, and those before it that could not be written, and hands them to the operating system at once.
    ///
    /// # Errors
    /// A file that cannot be written: the line is kept.
    ///
    /// # Panics
    /// If `record.step` does not follow the step before it: readers and [`Writer::resume`] rely on the order.
    #[track_caller]
    pub fn write(&mut self, record: &StepRecord) -> Result<(), Error> {
        assert!(
            self.last_step.is_none_or(|last| last < record.step),
            "step {} written after step {:?}",
            record.step,
            self.last_step
        );
        self.last_step = Some(record.step);
        serde_json::to_writer(&mut self.unwritten, record).expect("a step record has string keys only");
        self.unwritten.push(b'\n');
        self.catch_up()
    }

    /// Writes what could not be written before.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn catch_up(&mut self) -> Result<(), Error> {
        let written = self.file.write_all(&self.unwritten).and_then(|()| self.file.flush());
        if let Err(error) = written {
            // A part of a line would hide all that follow.
            let _ = self.file.set_len(self.bytes);
            return Err(Error::io("append to", &self.path)(error));
        }
        self.bytes += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }
}

/// The records of the log `path`, one at a time; ends before a torn last line.
pub fn records(path: &Path) -> Result<Records, Error> {
    Ok(Records { lines: LogLines::open(path)? })
}

/// All records of the log `path`, without a torn last line.
pub fn read(path: &Path) -> Result<Vec<StepRecord>, Error> {
    records(path)?.collect()
}

/// Iterator made by [`records`].
#[derive(Debug)]
pub struct Records {
    lines: LogLines,
}

impl Iterator for Records {
    type Item = Result<StepRecord, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.lines.next_parsed().transpose()
    }
}

/// The part of a log that a resumed run keeps.
#[derive(Default)]
struct Prefix {
    bytes: u64,
    last_step: Option<u64>,
    /// The last kept record is whole and only its newline was lost.
    lacks_newline: bool,
}

/// The only field that cutting back needs.
#[derive(Deserialize)]
struct StepOnly {
    step: u64,
}

fn kept_prefix(path: &Path, step: u64) -> Result<Prefix, Error> {
    let mut lines = LogLines::open(path)?;
    let mut kept = Prefix::default();
    while let Some(line) = lines.next_parsed::<StepOnly>()? {
        if line.step > step {
            break;
        }
        kept.bytes += lines.buffer.len() as u64;
        kept.last_step = Some(line.step);
        kept.lacks_newline = !lines.buffer.ends_with(b"\n");
    }
    Ok(kept)
}

/// Lines of a log, parsed; one buffer serves all.
#[derive(Debug)]
struct LogLines {
    reader: BufReader<File>,
    path: PathBuf,
    number: u64,
    buffer: Vec<u8>,
}

impl LogLines {
    fn open(path: &Path) -> Result<LogLines, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Ok(LogLines { reader: BufReader::new(file), path: path.to_owned(), number: 0, buffer: Vec::new() })
    }

    /// The next record, or `None` at the end or at a torn last line.
    fn next_parsed<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Error> {
        self.buffer.clear();
        self.number += 1;
        let length = self.reader.read_until(b'\n', &mut self.buffer).map_err(Error::io("read", &self.path))?;
        if length == 0 {
            return Ok(None);
        }
        match serde_json::from_slice(&self.buffer) {
            Ok(record) => Ok(Some(record)),
            Err(_) if !self.buffer.ends_with(b"\n") => Ok(None),
            Err(source) => Err(Error::CorruptLine { path: self.path.clone(), line: self.number, source }),
        }
    }
}
