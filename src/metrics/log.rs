//! `metrics.jsonl`: appended to by one rank, cut back on resume, read by reports.
//!
//! A line is written by one call, so a killed process leaves at most a torn last line. Cutting back only
//! shortens the file: earlier lines keep their bytes because nothing touches them, and a kill at any moment
//! leaves either the old length or the new one.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::append::Appender;
use super::{Error, StepRecord};

/// Name of the log in a run folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Reports place steps on axes of f64, which holds every integer up to here.
const STEP_MAX: u64 = 1 << f64::MANTISSA_DIGITS;

/// Appends step records to the log of a run. What could not be written is kept, and written before the next record.
#[derive(Debug)]
pub struct Writer {
    file: Appender,
    last_step: Option<u64>,
}

impl Writer {
    /// Starts an empty log in the folder `run`; an earlier log there is lost.
    pub fn create(run: &Path) -> Result<Writer, Error> {
        Ok(Writer { file: Appender::create(&run.join(METRICS_FILE))?, last_step: None })
    }

    /// Continues the log of `run` after `step`: later lines and a torn last line go; a missing log starts empty.
    pub fn resume(run: &Path, step: u64) -> Result<Writer, Error> {
        let path = run.join(METRICS_FILE);
        let kept = if path.exists() { kept_prefix(&path, step)? } else { Prefix::default() };
        let mut file = Appender::open(&path, kept.bytes)?;
        if kept.lacks_newline {
            file.push(b"\n");
            file.catch_up()?;
        }
        file.sync()?;
        Ok(Writer { file, last_step: kept.last_step })
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
        let line = serde_json::to_string(record).expect("a step record has string keys only");
        self.file.push(format!("{line}\n").as_bytes());
        self.catch_up()
    }

    /// Writes what could not be written before.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn catch_up(&mut self) -> Result<(), Error> {
        self.file.catch_up()
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

/// A line's step, whatever else is read of it.
trait AtStep: DeserializeOwned {
    fn step(&self) -> u64;
}

impl AtStep for StepRecord {
    fn step(&self) -> u64 {
        self.step
    }
}

impl AtStep for StepOnly {
    fn step(&self) -> u64 {
        self.step
    }
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
    last_step: Option<u64>,
    buffer: Vec<u8>,
}

impl LogLines {
    fn open(path: &Path) -> Result<LogLines, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Ok(LogLines {
            reader: BufReader::new(file),
            path: path.to_owned(),
            number: 0,
            last_step: None,
            buffer: Vec::new(),
        })
    }

    /// The next record, or `None` at the end or at a torn last line.
    fn next_parsed<T: AtStep>(&mut self) -> Result<Option<T>, Error> {
        self.buffer.clear();
        self.number += 1;
        let length = self.reader.read_until(b'\n', &mut self.buffer).map_err(Error::io("read", &self.path))?;
        if length == 0 {
            return Ok(None);
        }
        match serde_json::from_slice::<T>(&self.buffer) {
            Ok(record) => self.follow(record.step()).map(|()| Some(record)),
            Err(_) if !self.buffer.ends_with(b"\n") => Ok(None),
            Err(source) => Err(Error::CorruptLine { path: self.path.clone(), line: self.number, source }),
        }
    }

    /// Steps only grow, as [`Writer::write`] demands; those who read count on it.
    fn follow(&mut self, step: u64) -> Result<(), Error> {
        let last = self.last_step.replace(step);
        if step <= STEP_MAX && last.is_none_or(|last| last < step) {
            return Ok(());
        }
        Err(Error::StepOrder { path: self.path.clone(), line: self.number, step, last })
    }
}
