//! Files beside the routings that they belong to: decisions that are of use with these routings only, and are made anew
//! where a file does not fit.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::file::Header;
use super::{Error, Ready, StepFile};

/// The header of a file that lies beside routings.
pub trait Companion: Header {
    /// What follows the routings' name.
    const SUFFIX: &'static str;
}

impl<H: Companion> StepFile<H> {
    /// Where the file lies that belongs to the routings at `path`.
    pub fn beside(path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(H::SUFFIX);
        PathBuf::from(name)
    }

    /// Decisions to follow in `steps`, or why they are made anew.
    ///
    /// # Errors
    /// A file that cannot be read, is of another kind, or ends before the last step.
    pub fn follow(path: &Path, own: H, steps: RangeInclusive<u64>) -> Result<Result<StepFile<H>, String>, Error> {
        if !path.exists() {
            return Ok(Err(format!("{} is not there", path.display())));
        }
        match StepFile::open(path, own, steps) {
            Err(Error::Differs { differences, .. }) => {
                Ok(Err(format!("{} was recorded otherwise ({})", path.display(), differences.join("; "))))
            }
            Err(Error::Late { first, .. }) => Ok(Err(format!("{} begins at step {first}", path.display()))),
            opened => opened.map(Ok),
        }
    }

    /// To continue a file after step `done`; one that was recorded otherwise begins anew.
    ///
    /// # Errors
    /// A file of another kind, or that ends before `done`.
    pub fn to_continue(path: &Path, own: H, done: u64) -> Result<Ready<H>, Error> {
        match StepFile::to_resume(path, own.clone(), done) {
            Err(Error::Differs { .. }) => StepFile::to_create(path, own, done + 1),
            ready => ready,
        }
    }

    /// Takes away what an earlier run left at `path`; another file is not touched.
    ///
    /// # Errors
    /// A file that cannot be taken away.
    pub fn discard(path: &Path) -> Result<(), Error> {
        match StepFile::<H>::is_there(path) {
            Ok(Some(true)) => fs::remove_file(path).map_err(Error::io("take away", path)),
            _ => Ok(()),
        }
    }
}
