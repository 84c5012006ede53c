//! What makes files last.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Makes renames within `folder` durable, where the file system can: some write folders by themselves, and say that they
/// cannot be asked to.
///
/// # Errors
/// A folder that cannot be opened or written.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), Error> {
    let is_unasked = |error: &Error| matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported);
    match File::open(folder)?.sync_all() {
        Err(error) if !is_unasked(&error) => Err(error),
        _ => Ok(()),
    }
}
