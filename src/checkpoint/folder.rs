//! The folders of a run's checkpoints: names, the link to the newest, and which are kept.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::Error;
use crate::durable;

/// The folder of a run that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// The link to the newest checkpoint.
pub const LATEST: &str = "latest";
const PREFIX: &str = "step-";
/// Begins the names of damaged checkpoints that a run has gone back behind.
const DAMAGED: &str = "damaged-";
/// Begins the names of folders that are not whole; the next write removes them.
const PARTIAL: &str = ".partial-";

/// The folder of one step's checkpoint.
pub fn step_folder(run: &Path, step: u64) -> PathBuf {
    run.join(CHECKPOINTS).join(format!("{PREFIX}{step:06}"))
}

/// The steps of all checkpoints, rising; none where their folder is missing.
///
/// # Errors
/// A folder that cannot be read: what is in it is not known to be gone.
pub(super) fn steps(run: &Path) -> Result<Vec<u64>, Error> {
    let folder = run.join(CHECKPOINTS);
    let entries = match fs::read_dir(&folder) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(Error::io("read", &folder))?,
    };
    let step = |entry: fs::DirEntry| {
        let step = entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok()?;
        (step_folder(run, step) == entry.path()).then_some(step)
    };
    let mut steps: Vec<u64> = entries.into_iter().filter_map(step).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The newest checkpoint of a run. A folder gets its name only when it is whole, so one whose contents are wrong was
/// damaged later: opening it says so, which going back to an older one in silence would not.
///
/// # Errors
/// A folder of checkpoints that cannot be read.
pub fn newest(run: &Path) -> Result<Option<PathBuf>, Error> {
    Ok(steps(run)?.last().map(|step| step_folder(run, *step)))
}

/// Where a checkpoint is written before it has its name.
pub(super) fn partial(run: &Path, step: u64) -> PathBuf {
    run.join(CHECKPOINTS).join(format!("{PARTIAL}{PREFIX}{step:06}"))
}

/// Gives the written folder its name, durably, and points `latest` to it.
pub(super) fn publish(run: &Path, step: u64) -> Result<(), Error> {
    let (from, to) = (partial(run, step), step_folder(run, step));
    if to.exists() {
        remove(&to)?;
    }
    fs::rename(&from, &to).map_err(Error::io("rename", &from))?;
    link_latest(&to)
}

/// Points `latest` to a checkpoint beside it.
///
/// # Errors
/// A folder that cannot be written.
pub fn link_latest(checkpoint: &Path) -> Result<(), Error> {
    let (link, fresh) = (checkpoint.with_file_name(LATEST), checkpoint.with_file_name(".latest"));
    // What an interrupted run may have left; if it is not there, all the better.
    let _ = fs::remove_file(&fresh);
    std::os::unix::fs::symlink(checkpoint.file_name().expect("a step's folder has a name"), &fresh)
        .map_err(Error::io("link", &fresh))?;
    fs::rename(&fresh, &link).map_err(Error::io("rename", &fresh))?;
    sync_folder(checkpoint.parent().expect("a checkpoint is in a folder"))
}

/// Removes a checkpoint, first taking its name away: a half removed one must not look whole.
fn remove(checkpoint: &Path) -> Result<(), Error> {
    let name = checkpoint.file_name().expect("a step's folder has a name").to_string_lossy();
    let aside = checkpoint.with_file_name(format!("{PARTIAL}removed-{name}"));
    fs::rename(checkpoint, &aside).map_err(Error::io("rename", checkpoint))?;
    fs::remove_dir_all(&aside).map_err(Error::io("remove", &aside))
}

/// Takes a damaged checkpoint its name away and returns the new one: the run writes that step again, and nothing is lost.
///
/// # Errors
/// A folder that cannot be written.
pub fn set_damaged_aside(checkpoint: &Path) -> Result<PathBuf, Error> {
    let name = checkpoint.file_name().expect("a step's folder has a name").to_string_lossy();
    let names = (1..).map(|n| if n == 1 { format!("{DAMAGED}{name}") } else { format!("{DAMAGED}{name}-{n}") });
    let mut paths = names.map(|name| checkpoint.with_file_name(name));
    let aside = paths.find(|path| !path.exists()).expect("there are infinitely many names");
    fs::rename(checkpoint, &aside).map_err(Error::io("rename", checkpoint))?;
    Ok(aside)
}

/// Makes renames within `folder` durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), Error> {
    durable::sync_folder(folder).map_err(Error::io("sync", folder))
}

/// Removes all but the newest `keep` checkpoints up to `step` (0: none is removed), of which one that cannot be removed keeps
/// no other.
pub(super) fn prune(run: &Path, step: u64, keep: usize) -> Result<(), Error> {
    let mut steps = steps(run)?;
    steps.retain(|&other| other <= step);
    let old = if keep == 0 { 0 } else { steps.len().saturating_sub(keep) };
    let mut outcome = Ok(());
    for &step in &steps[..old] {
        outcome = outcome.and(remove(&step_folder(run, step)));
    }
    outcome
}

/// An empty folder to write into, whatever an interrupted run left there. What is in nobody's way may stay: a folder that
/// somebody else uses.
pub(super) fn fresh_partial(run: &Path, step: u64) -> Result<(), Error> {
    let (folder, partial) = (run.join(CHECKPOINTS), partial(run, step));
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
            let removed = fs::remove_dir_all(entry.path()).map_err(Error::io("remove", &entry.path()));
            removed.or_else(|error| if entry.path() == partial { Err(error) } else { Ok(()) })?;
        }
    }
    fs::create_dir_all(&partial).map_err(Error::io("create", &partial))
}

/// Where a checkpoint that belongs to no run is written before it is called `folder`.
pub(super) fn partial_beside(folder: &Path) -> Result<PathBuf, Error> {
    let name = folder.file_name().ok_or_else(|| Error::NoName { path: folder.to_owned() })?;
    Ok(folder.with_file_name(format!("{PARTIAL}{}", name.to_string_lossy())))
}

/// Creates that place, which an interrupted write may have left, for a folder that must not exist.
pub(super) fn begin_beside(partial: &Path, folder: &Path) -> Result<(), Error> {
    if folder.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: folder.to_owned() });
    }
    if partial.exists() {
        fs::remove_dir_all(partial).map_err(Error::io("remove", partial))?;
    }
    fs::create_dir_all(partial).map_err(Error::io("create", partial))
}

/// Gives it its name, durably, and never another's.
pub(super) fn publish_beside(partial: &Path, folder: &Path) -> Result<(), Error> {
    if folder.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: folder.to_owned() });
    }
    fs::rename(partial, folder).map_err(Error::io("rename", partial))?;
    match folder.parent() {
        Some(parent) if parent != Path::new("") => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of later steps are another run's, or newer than what is written: they are not counted, and stay.
    #[test]
    fn the_newest_up_to_a_step_are_kept() {
        let left = |step: u64, keep: usize| {
            let run = tempfile::tempdir().unwrap();
            [2, 4, 6, 8].iter().for_each(|&step| fs::create_dir_all(step_folder(run.path(), step)).unwrap());
            prune(run.path(), step, keep).unwrap();
            steps(run.path()).unwrap()
        };
        assert_eq!(left(6, 1), [6, 8]);
        assert_eq!(left(8, 2), [6, 8]);
        assert_eq!(left(4, 3), [2, 4, 6, 8]);
        assert_eq!(left(8, 0), [2, 4, 6, 8]);
    }

    /// What others left is removed if it can be; what cannot be removed stands in the way only under the name that is wanted.
    #[test]
    fn only_an_obstacle_of_its_own_name_keeps_a_checkpoint_from_its_place() {
        let run = tempfile::tempdir().unwrap();
        let others = [partial(run.path(), 1), partial(run.path(), 2)];
        fs::create_dir_all(others[0].join("of an interrupted run")).unwrap();
        // A file is no folder to be removed.
        fs::write(&others[1], "").unwrap();
        fresh_partial(run.path(), 3).unwrap();
        assert_eq!(others.map(|other| other.exists()), [false, true]);
        assert!(partial(run.path(), 3).is_dir());
        let refused = fresh_partial(run.path(), 2).unwrap_err();
        assert!(refused.to_string().contains("remove") && refused.to_string().contains("step-000002"), "{refused}");
    }
}
