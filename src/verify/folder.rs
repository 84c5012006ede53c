//! Where a search writes: a folder beside the run's, which goes when the search ends. A process that is killed cannot
//! remove its own, so the next search does.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Held while its owner lives; the system lets go of it, however that ends.
const LOCK_FILE: &str = "lock";

/// A folder of this process's own.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    _lock: File,
}

impl Folder {
    /// A new folder beside `run`; those that dead processes left there go.
    ///
    /// # Errors
    /// A place that cannot be written.
    pub(super) fn beside(run: &Path) -> io::Result<Folder> {
        let mut prefix = run.file_name().unwrap_or_default().to_owned();
        prefix.push(".verify-");
        let prefix = prefix.to_string_lossy().into_owned();
        let parent = run.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent)?;
        sweep(parent, &prefix)?;
        let path = parent.join(format!("{prefix}{}", std::process::id()));
        loop {
            fs::create_dir_all(&path)?;
            let lock = File::create(path.join(LOCK_FILE))?;
            lock.lock()?;
            // Somebody who swept before it was locked has removed it.
            if path.join(LOCK_FILE).exists() {
                return Ok(Folder { path, _lock: lock });
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Nothing depends on it any more; what cannot be removed is no difference.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders whose owners are dead.
fn sweep(parent: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let is_one = entry.file_name().to_string_lossy().starts_with(prefix);
        let lock = Some(entry.path()).filter(|_| is_one).and_then(|path| File::open(path.join(LOCK_FILE)).ok());
        if let Some(lock) = lock
            && lock.try_lock().is_ok()
        {
            // Somebody else may sweep at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}
