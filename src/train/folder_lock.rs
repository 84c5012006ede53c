//! The lock of a run's folder: two runs that wrote there at once would destroy each other.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::job::{JobError, io};
use crate::launch::machine;

/// The file that is locked. Its first line says who holds it.
pub(super) const LOCK_FILE: &str = ".lock";

/// For so long a file server may keep the lock of a machine that is gone (NFS: its lease, and then a time of grace, 90 s each).
const LEASE: Duration = Duration::from_secs(180);
const ASKING_EVERY: Duration = Duration::from_millis(500);

/// Who has locked a folder.
#[derive(Debug, PartialEq, Eq)]
struct Holder {
    process: u32,
    machine: String,
    host: String,
}

impl Holder {
    fn here() -> Holder {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Holder { process: std::process::id(), machine: machine().replace(' ', "-"), host: host.trim().to_owned() }
    }

    /// As the lock says, unless it is being written.
    fn of(lock: &Path) -> Option<Holder> {
        let text = fs::read_to_string(lock).ok()?;
        let words: Vec<&str> = text.lines().next()?.split(' ').collect();
        let &[process, _, machine, host] = words.as_slice() else { return None };
        Some(Holder { process: process.parse().ok()?, machine: machine.to_owned(), host: host.to_owned() })
    }

    fn told(holder: Option<&Holder>) -> String {
        holder.map_or_else(String::new, |holder| format!(" (process {} on {})", holder.process, holder.host))
    }
}

/// Locks `dir` until the file is dropped. Where another machine holds the lock, a run that `goes_on` waits for as long as a file
/// server may keep it for one that is gone, and tells so. A lock of this machine is refused at once: its kernel would have
/// let go of it with its process.
///
/// # Errors
/// A folder that is in use, cannot be written, or is on a file system without locks.
pub(super) fn lock(dir: &Path, goes_on: bool, tell: &dyn Fn(&str)) -> Result<File, JobError> {
    lock_within(dir, if goes_on { LEASE } else { Duration::ZERO }, tell)
}

fn lock_within(dir: &Path, patience: Duration, tell: &dyn Fn(&str)) -> Result<File, JobError> {
    let path = dir.join(LOCK_FILE);
    let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(io("create", &path))?;
    let (here, begun) = (Holder::here(), Instant::now());
    let mut is_told = false;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) if source.kind() == ErrorKind::Unsupported => {
                return Err(JobError::NoLocks { dir: dir.to_owned(), source });
            }
            Err(TryLockError::Error(error)) => return Err(io("lock", &path)(error)),
        }
        let holder = Holder::of(&path);
        let is_of_here = holder.as_ref().is_some_and(|holder| holder.machine == here.machine);
        let by = Holder::told(holder.as_ref());
        if is_of_here || begun.elapsed() >= patience {
            return Err(JobError::Locked { dir: dir.to_owned(), by });
        }
        if !is_told {
            is_told = true;
            tell(&format!(
                "note: {} is in use by another run{by}: waiting for up to {} s, since a file server keeps the lock of a \
                 machine that is gone",
                dir.display(),
                patience.as_secs()
            ));
        }
        thread::sleep(ASKING_EVERY);
    }
    write_holder(&file, &here).map_err(io("write", &path))?;
    Ok(file)
}

/// Synced, so that other processes of the run read it on a network's file system too.
fn write_holder(mut file: &File, Holder { process, machine, host }: &Holder) -> std::io::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    file.set_len(0)?;
    writeln!(file, "{process} {now} {machine} {host}")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A folder that a process of this machine, or of another, has locked.
    fn locked(by: &Holder) -> (tempfile::TempDir, File) {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(LOCK_FILE)).unwrap();
        file.lock().unwrap();
        write_holder(&file, by).unwrap();
        (folder, file)
    }

    fn elsewhere() -> Holder {
        Holder { process: 77, machine: "other".into(), host: "node7".into() }
    }

    #[test]
    fn a_lock_of_this_machine_is_not_waited_for() {
        let (folder, _file) = locked(&Holder::here());
        let refused = lock(folder.path(), true, &|told| panic!("{told}")).unwrap_err().to_string();
        let expected = format!("is in use by another run (process {} on ", std::process::id());
        assert!(refused.contains(&expected), "{refused}");
    }

    #[test]
    fn a_lock_of_another_machine_is_waited_for_if_the_run_goes_on() {
        let (folder, file) = locked(&elsewhere());
        let refused = lock(folder.path(), false, &|told| panic!("{told}")).unwrap_err().to_string();
        assert!(refused.contains("(process 77 on node7)"), "{refused}");
        let told = RefCell::new(Vec::new());
        let tell = |text: &str| told.borrow_mut().push(text.to_owned());
        let refused = lock_within(folder.path(), Duration::from_secs(1), &tell);
        assert!(matches!(refused, Err(JobError::Locked { .. })));
        let server = thread::spawn(move || {
            thread::sleep(Duration::from_secs(1));
            drop(file);
        });
        let _held = lock(folder.path(), true, &tell).unwrap();
        server.join().unwrap();
        assert_eq!(told.borrow().len(), 2, "{told:?}");
        assert!(told.borrow()[1].contains("(process 77 on node7): waiting for up to 180 s"), "{told:?}");
        assert_eq!(Holder::of(&folder.path().join(LOCK_FILE)), Some(Holder::here()));
    }
}
