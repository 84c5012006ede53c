//! The folders of a run's checkpoints: names, the link to the newest, and which are kept.

use std::fs;
use std::path::{Path, PathBuf};

use super::Error;
use super::manifest::Manifest;

/// The folder of a run that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// The link to the newest checkpoint.
pub const LATEST: &str = "latest";
const PREFIX: &str = "step-";

/// The folder of one step's checkpoint.
pub fn step_folder(run: &Path, step: u64) -> PathBuf {
    run.join(CHECKPOINTS).join(format!("{PREFIX}{step:06}"))
}

/// The steps of all checkpoints, rising.
fn steps(run: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(run.join(CHECKPOINTS)) else { return Vec::new() };
    let step = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok();
    let mut steps: Vec<u64> = entries.flatten().filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// The newest checkpoint of a run: a folder gets its name only when it is whole.
pub fn newest(run: &Path) -> Option<PathBuf> {
    steps(run).into_iter().rev().map(|step| step_folder(run, step)).find(|folder| Manifest::read(folder).is_ok())
}

/// Where a checkpoint is written before it has its name.
pub(super) fn partial(run: &Path, step: u64) -> PathBuf {
    run.join(CHECKPOINTS).join(format!(".partial-{PREFIX}{step:06}"))
}

/// Gives the written folder its name, durably, and points `latest` to it.
pub(super) fn publish(run: &Path, step: u64) -> Result<PathBuf, Error> {
    let (from, to) = (partial(run, step), step_folder(run, step));
    if to.exists() {
        // A run that went back to an older checkpoint comes by this step again.
        fs::remove_dir_all(&to).map_err(Error::io("replace", &to))?;
    }
    fs::rename(&from, &to).map_err(Error::io("rename", &from))?;
    let folder = run.join(CHECKPOINTS);
    let (link, fresh) = (folder.join(LATEST), folder.join(".latest"));
    // What an interrupted run may have left; if it is not there, all the better.
    let _ = fs::remove_file(&fresh);
    std::os::unix::fs::symlink(to.file_name().expect("a step's folder has a name"), &fresh)
        .map_err(Error::io("link", &fresh))?;
    fs::rename(&fresh, &link).map_err(Error::io("rename", &fresh))?;
    sync_folder(&folder)?;
    Ok(to)
}

/// Makes renames within `folder` durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), Error> {
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io("sync", folder))
}

/// Removes all but the newest `keep` checkpoints (0: none is removed), and leftovers of interrupted writes.
pub(super) fn prune(run: &Path, keep: usize) -> Result<(), Error> {
    let steps = steps(run);
    let old = if keep == 0 { 0 } else { steps.len().saturating_sub(keep) };
    for &step in &steps[..old] {
        let folder = step_folder(run, step);
        fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    }
    Ok(())
}

/// An empty folder to write into, whatever an interrupted run left there.
pub(super) fn fresh_partial(run: &Path, step: u64) -> Result<PathBuf, Error> {
    let folder = run.join(CHECKPOINTS);
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".partial-") {
            fs::remove_dir_all(entry.path()).map_err(Error::io("remove", &entry.path()))?;
        }
    }
    let partial = partial(run, step);
    fs::create_dir_all(&partial).map_err(Error::io("create", &partial))?;
    Ok(partial)
}
