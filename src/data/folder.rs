//! Making a folder appear whole or not at all.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::error::Error;
use crate::durable;

/// Whoever waits for a lock asks for it so often, so that a file system that does not answer can be told from a lock that
/// another process holds.
const ASKING_EVERY: Duration = Duration::from_millis(200);

/// Waits until no other process holds the lock, telling so; `None` where the file system has no locks.
pub(super) fn lock(path: &Path, waiting: &dyn Fn()) -> Result<Option<File>, Error> {
    let file = File::create(path).map_err(Error::io("create", path))?;
    let mut is_told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if is_told => {}
            Err(TryLockError::WouldBlock) => {
                is_told = true;
                waiting();
            }
            Err(TryLockError::Error(_)) => return Ok(None),
        }
        thread::sleep(ASKING_EVERY);
    }
}

/// A folder being filled, removed again unless it is published.
pub(super) struct Partial {
    pub(super) dir: PathBuf,
}

impl Partial {
    pub(super) fn create(cache: &Path, prefix: &str) -> Result<Self, Error> {
        let mut attempt = 0u64;
        loop {
            let dir = cache.join(format!("{prefix}{}-{attempt}", std::process::id()));
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(Self { dir }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
                Err(error) => return Err(Error::io("create the folder", &dir)(error)),
            }
        }
    }

    /// Gives the folder its name. Losing a race against a process that made the same is success.
    pub(super) fn publish(self, dir: &Path) -> Result<(), Error> {
        sync_folder(&self.dir)?;
        match fs::rename(&self.dir, dir) {
            Err(_) if dir.is_dir() => Ok(()),
            Err(error) => Err(Error::io("give the prepared folder its name", dir)(error)),
            Ok(()) => sync_folder(dir.parent().unwrap_or(dir)),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After publishing there is nothing to remove; failing to clean up must not hide the first error.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A rename is only durable once the folder it happened in is.
fn sync_folder(path: &Path) -> Result<(), Error> {
    durable::sync_folder(path).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn who_waits_for_a_lock_asks_often_and_tells_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let (held, told) = (File::create(&path).unwrap(), Cell::new(0));
        held.lock().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(3 * ASKING_EVERY);
                held.unlock().unwrap();
            });
            let lock = lock(&path, &|| told.set(told.get() + 1)).unwrap();
            assert!(lock.is_some() && told.get() == 1, "told {} times", told.get());
        });
    }
}
