//! A recording on disk: made, continued or opened by one process before its ranks begin, written and read by all of them.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::block::{Place, decode, encode};
use super::header::is_recording;
use super::{Error, Shape};
use crate::moe::Routing;

/// An open file of routings; ranks share it, each reads and writes at its own places.
#[derive(Clone, Debug)]
pub struct Recording {
    file: Arc<File>,
    path: PathBuf,
    shape: Shape,
    /// The step of the first block.
    first: u64,
}

impl Recording {
    /// A recording that begins with step `first`. One that is there already is lost; another file is not touched.
    ///
    /// # Errors
    /// A file that cannot be written, or is no recording.
    pub fn create(path: &Path, shape: Shape, first: u64) -> Result<Recording, Error> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(Error::io("create", path))?;
        let bytes = beginning(&file, 8).map_err(Error::io("read", path))?;
        if !bytes.is_empty() && !is_recording(&bytes) {
            return Err(Error::WouldOverwrite(path.to_owned()));
        }
        let begin = || {
            file.set_len(0)?;
            file.write_all_at(&shape.encode(first), 0)
        };
        begin().map_err(Error::io("write", path))?;
        Ok(Recording { file: Arc::new(file), path: path.to_owned(), shape, first })
    }

    /// Continues a recording after step `done`: later steps are cut off. Without a file, or if its steps are all later,
    /// one begins with the next step.
    ///
    /// # Errors
    /// A file that cannot be written, of another run, or that ends before `done`.
    pub fn resume(path: &Path, shape: Shape, done: u64) -> Result<Recording, Error> {
        if !path.exists() {
            return Recording::create(path, shape, done + 1);
        }
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(Error::io("open", path))?;
        let (recording, last) = Recording::of(file, path, shape)?;
        if recording.first > done {
            return Recording::create(path, recording.shape, done + 1);
        }
        if last < done {
            return Err(Error::Torn { path: path.to_owned(), last, done });
        }
        recording.file.set_len(recording.offset(done + 1)).map_err(Error::io("shorten", path))?;
        Ok(recording)
    }

    /// A recording to follow in `steps`.
    ///
    /// # Errors
    /// A file that cannot be read, is of another run, or has not all the steps.
    pub fn open(path: &Path, shape: Shape, steps: RangeInclusive<u64>) -> Result<Recording, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let (recording, last) = Recording::of(file, path, shape)?;
        let (first, path) = (recording.first, path.to_owned());
        match steps {
            _ if steps.is_empty() => Ok(recording),
            _ if first > *steps.start() => Err(Error::Late { path, first, wanted: *steps.start() }),
            _ if last < *steps.end() => Err(Error::Short { path, last, wanted: *steps.end() }),
            _ => Ok(recording),
        }
    }

    /// A file with a sound header of this shape, and the last step that it holds as a whole.
    fn of(file: File, path: &Path, shape: Shape) -> Result<(Recording, u64), Error> {
        // Another model's header may be longer than this one's; 64 KiB hold sixteen thousand layers.
        let bytes = beginning(&file, 1 << 16).map_err(Error::io("read", path))?;
        let (recorded, first) =
            Shape::decode(&bytes).map_err(|reason| Error::NotARecording { path: path.to_owned(), reason })?;
        let differences = shape.differences(&recorded);
        if !differences.is_empty() {
            return Err(Error::Differs { path: path.to_owned(), differences });
        }
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        let last = first - 1 + (length - shape.header_bytes()) / shape.step_bytes();
        Ok((Recording { file: Arc::new(file), path: path.to_owned(), shape, first }, last))
    }

    /// The rows of a step that hold its tokens from `first` on, `count` of them.
    pub(super) fn rows(&self, first: u64, count: usize) -> Range<u64> {
        let seq = self.shape.seq as u64;
        assert!(first.is_multiple_of(seq) && (count as u64).is_multiple_of(seq), "{count} tokens from {first} on");
        first / seq..(first + count as u64) / seq
    }

    /// Where the blocks of a step begin.
    fn offset(&self, step: u64) -> u64 {
        self.shape.header_bytes() + (step - self.first) * self.shape.step_bytes()
    }

    /// Where the blocks of some rows begin.
    fn place(&self, step: u64, layer: u32, row: u64) -> u64 {
        let layer = self.shape.layers.iter().position(|&other| other == layer).expect("a layer of the recording");
        let blocks = (layer * self.shape.rows) as u64 + row;
        self.offset(step) + blocks * self.shape.block_bytes() as u64
    }

    pub(super) fn write(&self, step: u64, layer: u32, rows: Range<u64>, routing: &Routing) -> Result<(), Error> {
        let routes = self.shape.seq * self.shape.slots;
        let mut bytes = Vec::with_capacity(self.shape.block_bytes() * (rows.end - rows.start) as usize);
        let all = routing.chosen.chunks_exact(routes).zip(routing.expert.chunks_exact(routes));
        for (row, of_row) in rows.clone().zip(all) {
            encode(&mut bytes, Place { step, layer, row }, &self.shape, of_row);
        }
        let written = self.file.write_all_at(&bytes, self.place(step, layer, rows.start));
        written.map_err(Error::io("write", &self.path))
    }

    pub(super) fn read(&self, step: u64, layer: u32, rows: Range<u64>) -> Result<Routing, Error> {
        let Shape { slots, experts, .. } = self.shape;
        let mut bytes = vec![0; self.shape.block_bytes() * (rows.end - rows.start) as usize];
        let read = self.file.read_exact_at(&mut bytes, self.place(step, layer, rows.start));
        read.map_err(Error::io("read", &self.path))?;
        let mut routing = Routing::new(Vec::new(), slots, experts);
        for (row, block) in rows.zip(bytes.chunks_exact(self.shape.block_bytes())) {
            let damaged = || Error::Damaged { path: self.path.clone(), step, layer, row };
            decode(block, Place { step, layer, row }, &self.shape, &mut routing).ok_or_else(damaged)?;
        }
        Ok(routing)
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
}

/// The first bytes of a file, as many as there are.
fn beginning(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}
