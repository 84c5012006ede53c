//! Files that are either the old one or the new one, never half of each.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::Error;

/// Writes `bytes` to a temporary sibling of `path`, then renames it over `path`.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temporary = temporary_sibling(path);
    let written = write_and_rename(&temporary, path, bytes);
    if written.is_err() {
        // The error being reported matters more than the stray file it may leave.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(Error::io("write", path))
}

fn write_and_rename(temporary: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(temporary)?;
    file.write_all(bytes)?;
    // Without it a power cut after the rename may leave an empty file under the final name.
    file.sync_all()?;
    fs::rename(temporary, path)
}

fn temporary_sibling(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".tmp-{}", std::process::id()));
    path.with_file_name(name)
}
