//! A file that only grows: what could not be written is kept, and written before what follows.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::Error;

/// Appends to a file, whole pieces at a time.
#[derive(Debug)]
pub(super) struct Appender {
    file: File,
    path: PathBuf,
    /// Bytes of the file that are whole pieces.
    bytes: u64,
    /// Pieces that are not in the file yet.
    unwritten: Vec<u8>,
}

impl Appender {
    /// Starts an empty file; an earlier one of this name is lost.
    pub(super) fn create(path: &Path) -> Result<Appender, Error> {
        File::create(path).map_err(Error::io("create", path))?;
        Appender::open(path, 0)
    }

    /// Continues a file behind its first `bytes` bytes; a missing one starts empty.
    pub(super) fn open(path: &Path, bytes: u64) -> Result<Appender, Error> {
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(Error::io("open", path))?;
        file.set_len(bytes).map_err(Error::io("shorten", path))?;
        Ok(Appender { file, path: path.to_path_buf(), bytes, unwritten: Vec::new() })
    }

    /// Takes a piece, to be written by [`Appender::catch_up`].
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.unwritten.extend_from_slice(piece);
    }

    /// Writes what has been taken, and hands it to the operating system.
    ///
    /// # Errors
    /// A file that cannot be written: what it lacks is kept.
    pub(super) fn catch_up(&mut self) -> Result<(), Error> {
        let written = self.file.write_all(&self.unwritten).and_then(|()| self.file.flush());
        if let Err(error) = written {
            // A part of a piece would hide all that follow.
            let _ = self.file.set_len(self.bytes);
            return Err(Error::io("append to", &self.path)(error));
        }
        self.bytes += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }

    /// Waits until the file is on the disk.
    pub(super) fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(Error::io("sync", &self.path))
    }
}
