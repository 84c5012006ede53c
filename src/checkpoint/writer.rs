//! What one rank does in the folder of a checkpoint, task after task. Nothing here knows of other ranks but that they are
//! there: all tasks are this rank's own, and which comes next the ranks agree on.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::Error;
use super::collect::{CheckpointFiles, FileBytes};
use super::folder::{self, sync_folder};
use super::manifest::{CheckpointManifest, Hasher, MANIFEST, regular};
use super::save::Extra;

/// Bytes between two signs of life.
const BETWEEN_SIGNS: usize = 4 << 20;
/// A process may have many files open, but not any number.
const OPEN_MAX: usize = 64;

/// Where a checkpoint goes when it is whole.
#[derive(Clone, Debug)]
pub(super) enum CheckpointPlace {
    /// To the others of a run, of which the newest `keep` stay.
    OfRun { run: PathBuf, step: u64, keep: usize },
    /// To a folder that must not exist yet.
    Alone(PathBuf),
}

impl CheckpointPlace {
    /// Its name when it is whole.
    pub(super) fn folder(&self) -> PathBuf {
        match self {
            CheckpointPlace::OfRun { run, step, .. } => super::step_folder(run, *step),
            CheckpointPlace::Alone(folder) => folder.clone(),
        }
    }

    /// Its name until then.
    pub(super) fn partial(&self) -> Result<PathBuf, Error> {
        match self {
            CheckpointPlace::OfRun { run, step, .. } => Ok(folder::partial(run, *step)),
            CheckpointPlace::Alone(folder) => folder::partial_beside(folder),
        }
    }

    fn begin(&self, partial: &Path) -> Result<(), Error> {
        match self {
            CheckpointPlace::OfRun { run, step, .. } => folder::fresh_partial(run, *step),
            CheckpointPlace::Alone(folder) => folder::begin_beside(partial, folder),
        }
    }

    fn publish(&self, partial: &Path) -> Result<(), Error> {
        match self {
            CheckpointPlace::OfRun { run, step, .. } => folder::publish(run, *step),
            CheckpointPlace::Alone(folder) => folder::publish_beside(partial, folder),
        }
    }

    /// Removes what is too old to stay.
    fn prune(&self) -> Result<(), Error> {
        match self {
            CheckpointPlace::OfRun { run, step, keep } => folder::prune(run, *step, *keep),
            CheckpointPlace::Alone(_) => Ok(()),
        }
    }
}

/// All that is known of a checkpoint before its first byte is written.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) place: CheckpointPlace,
    pub(super) partial: PathBuf,
    pub(super) files: CheckpointFiles,
    pub(super) extra: Extra,
    /// This rank, and how many there are.
    pub(super) rank: (usize, usize),
}

impl Outline {
    fn leads(&self) -> bool {
        self.rank.0 == 0
    }

    /// The small files: indexes, and what else was given.
    fn small(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let indexes = self.files.sets.iter().filter_map(|(_, set)| set.index.as_ref());
        indexes.chain(&self.extra.files).map(|(name, contents)| (name.as_str(), contents.as_slice()))
    }

    /// All files but the manifest; the large ones first, so that they are different ranks'.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.files.names().chain(self.small().map(|(name, _)| name))
    }
}

/// A part of the work.
#[derive(Debug)]
pub(super) enum WriteTask {
    /// Rank 0 makes the folder, the files with their headers, and the small files.
    Begin,
    Put(FileBytes),
    /// What was put is on the disk.
    Sync,
    /// Of this rank's part of all files.
    Hash,
    /// Rank 0 writes the manifest, and gives the folder its name.
    Publish(Checksums),
    /// Rank 0 removes what there is of a checkpoint that cannot be whole.
    Discard,
    /// As long as a slow disk takes.
    #[cfg(test)]
    Linger(std::time::Duration),
}

/// Of files, by name.
pub(super) type Checksums = BTreeMap<String, String>;

/// What a task gives back.
#[derive(Debug)]
pub(super) enum Written {
    Nothing,
    /// To be filled again.
    Emptied(FileBytes),
    Checksums(Checksums),
    /// A checkpoint is whole; an older one could not be removed.
    Unpruned(Error),
}

/// What a writer and the rank that waits for it know of each other.
#[derive(Debug, Default)]
pub(super) struct Oversight {
    is_abandoned: AtomicBool,
    signs: AtomicU64,
}

impl Oversight {
    /// Nobody wants the checkpoint any more.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Relaxed);
    }

    /// Whether the checkpoint is still wanted. Who asks gives a sign of life: it does so after every operation of the file
    /// system that may take long.
    fn is_wanted(&self) -> bool {
        self.signs.fetch_add(1, Relaxed);
        !self.is_abandoned.load(Relaxed)
    }

    /// Signs of life so far.
    pub(super) fn signs(&self) -> u64 {
        self.signs.load(Relaxed)
    }
}

/// Does tasks in their order, until one fails.
#[derive(Debug)]
pub(super) struct TaskWriter {
    outline: Arc<Outline>,
    /// Those that this rank writes to.
    open: BTreeMap<usize, File>,
    oversight: Arc<Oversight>,
    has_failed: bool,
}

impl TaskWriter {
    pub(super) fn new(outline: Arc<Outline>, oversight: Arc<Oversight>) -> TaskWriter {
        TaskWriter { outline, open: BTreeMap::new(), oversight, has_failed: false }
    }

    /// Does one task. After one that has failed nothing is done but to tidy up; the error was told.
    pub(super) fn work(&mut self, task: WriteTask) -> Result<Written, Error> {
        let is_wanted = self.oversight.is_wanted() && !self.has_failed;
        if !is_wanted && !matches!(task, WriteTask::Discard) {
            return Ok(Written::Nothing);
        }
        let outcome = match task {
            WriteTask::Begin => self.begin().map(|()| Written::Nothing),
            WriteTask::Put(blocks) => {
                self.put(&blocks).map(|()| blocks.emptied().map_or(Written::Nothing, Written::Emptied))
            }
            WriteTask::Sync => self.sync().map(|()| Written::Nothing),
            WriteTask::Hash => self.hash().map(Written::Checksums),
            WriteTask::Publish(sums) => self.publish(sums),
            WriteTask::Discard => {
                self.discard();
                Ok(Written::Nothing)
            }
            #[cfg(test)]
            WriteTask::Linger(time) => {
                std::thread::sleep(time);
                Ok(Written::Nothing)
            }
        };
        self.has_failed = outcome.is_err();
        outcome
    }

    fn begin(&self) -> Result<(), Error> {
        let Outline { place, partial, files, .. } = &*self.outline;
        if !self.outline.leads() {
            return Ok(());
        }
        place.begin(partial)?;
        for (name, layout) in files.sets.iter().flat_map(|(_, set)| &set.files) {
            let path = partial.join(name);
            let mut file = File::create(&path).map_err(Error::io("create", &path))?;
            file.write_all(&layout.header).map_err(Error::io("write", &path))?;
            file.set_len(layout.file_bytes).map_err(Error::io("extend", &path))?;
            file.sync_all().map_err(Error::io("sync", &path))?;
            if !self.oversight.is_wanted() {
                return Ok(());
            }
        }
        self.outline.small().try_for_each(|(name, contents)| write_durably(&partial.join(name), contents))
    }

    fn put(&mut self, blocks: &FileBytes) -> Result<(), Error> {
        for (number, at, bytes) in blocks.iter() {
            for (chunk, at) in bytes.chunks(BETWEEN_SIGNS).zip((at..).step_by(BETWEEN_SIGNS)) {
                if !self.oversight.is_wanted() {
                    return Ok(());
                }
                let written = self.file(number)?.write_all_at(chunk, at);
                written.map_err(|error| Error::io("write", &self.path(number))(error))?;
            }
        }
        Ok(())
    }

    fn file(&mut self, number: usize) -> Result<&File, Error> {
        if !self.open.contains_key(&number) {
            if self.open.len() == OPEN_MAX {
                self.sync()?;
            }
            let path = self.path(number);
            let file = OpenOptions::new().write(true).open(&path).map_err(Error::io("open", &path))?;
            self.open.insert(number, file);
        }
        Ok(&self.open[&number])
    }

    fn path(&self, number: usize) -> PathBuf {
        let Outline { partial, files, .. } = &*self.outline;
        partial.join(files.names().nth(number).expect("a file of the checkpoint"))
    }

    fn sync(&mut self) -> Result<(), Error> {
        for (number, file) in std::mem::take(&mut self.open) {
            if !self.oversight.is_wanted() {
                break;
            }
            file.sync_all().map_err(Error::io("sync", &self.path(number)))?;
        }
        Ok(())
    }

    /// The files are dealt to the ranks in turn.
    fn hash(&self) -> Result<Checksums, Error> {
        let (rank, ranks) = self.outline.rank;
        let own = self.outline.names().skip(rank).step_by(ranks);
        own.map(|name| Ok((name.to_owned(), self.hash_of(&self.outline.partial.join(name))?))).collect()
    }

    fn hash_of(&self, path: &Path) -> Result<String, Error> {
        let mut file = regular(path).map_err(Error::io("open", path))?;
        let mut hasher = Hasher::default();
        while hasher.read(&mut file, BETWEEN_SIGNS).map_err(Error::io("read", path))? > 0 {
            if !self.oversight.is_wanted() {
                break;
            }
        }
        Ok(hasher.finish())
    }

    fn publish(&self, sums: Checksums) -> Result<Written, Error> {
        let Outline { place, partial, extra, .. } = &*self.outline;
        if !self.outline.leads() {
            return Ok(Written::Nothing);
        }
        let manifest = CheckpointManifest::new(extra.progress.clone(), extra.data_fingerprint.clone(), sums);
        write_durably(&partial.join(MANIFEST), &manifest.sealed())?;
        sync_folder(partial)?;
        // A rank whose disk answers late does not name a checkpoint that the others have given up.
        if !self.oversight.is_wanted() {
            return Ok(Written::Nothing);
        }
        place.publish(partial)?;
        // A sign of life: what is removed may be large.
        self.oversight.is_wanted();
        Ok(place.prune().map_or_else(Written::Unpruned, |()| Written::Nothing))
    }

    /// The space that it took may be just what is missing. What cannot be removed is found by the next write.
    fn discard(&self) {
        if self.outline.leads() {
            let _ = std::fs::remove_dir_all(&self.outline.partial);
        }
    }
}

fn write_durably(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TrainingProgress;

    /// While the manifest was written the others have given the checkpoint up.
    #[test]
    fn a_late_disk_names_no_checkpoint() {
        for is_abandoned in [true, false] {
            let run = tempfile::tempdir().unwrap();
            let place = CheckpointPlace::OfRun { run: run.path().to_owned(), step: 1, keep: 0 };
            let partial = place.partial().unwrap();
            let progress = TrainingProgress { step: 1, tokens: 0, seconds: 0.0, loss_trend: None };
            let extra = Extra { progress, data_fingerprint: String::new(), files: Vec::new() };
            let files = CheckpointFiles { sets: Vec::new() };
            let outline = Arc::new(Outline { place, partial, files, extra, rank: (0, 1) });
            let oversight = Arc::new(Oversight::default());
            let mut writer = TaskWriter::new(outline.clone(), oversight.clone());
            writer.work(WriteTask::Begin).unwrap();
            if is_abandoned {
                oversight.abandon();
            }
            writer.publish(Checksums::new()).unwrap();
            assert_eq!(outline.place.folder().exists(), !is_abandoned);
        }
    }
}
