//! Writing a checkpoint, all ranks together.
//!
//! ```text
//!   stage      what each rank does, at its own speed        what all ranks say to each other when all are ready
//!   begun      rank 0: folder, headers, small files         whether any has failed
//!   put        its bytes, flushed to the disk               whether any has failed
//!   hashed     checksums of its part of the files           whether any has failed, and the checksums
//!   published  rank 0: the manifest, then the name          whether any has failed
//! ```
//!
//! What a rank does is done by its helper; what ranks say is said by the rank itself, in the order in which all do. Whoever
//! waits for a stage meets the others again and again meanwhile, so that no rank is long away from them, however slow its
//! disk is.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guildhall_comm::Reduce;
use guildhall_tensor::{Cause, Device};

use super::Error;
use super::collect::{CheckpointFiles, FileBytes, collect, snapshot_bytes};
use super::file_set::{FileSet, TensorKind};
use super::held::{locals, tensors};
use super::helper::{DiskWatch, Helper, WritePace};
use super::manifest::TrainingProgress;
use super::writer::{CheckpointPlace, Checksums, Outline, TaskWriter, WriteTask, Written};
use crate::optim::Optimizer;
use crate::parallel::{Mesh, Parameters, gather_bytes};

/// Who waits for its helper meets the others so often.
const MEETINGS_EVERY: Duration = Duration::from_millis(50);

/// What a checkpoint holds besides tensors.
#[derive(Clone, Debug)]
pub struct Extra {
    pub progress: TrainingProgress,
    pub data_fingerprint: String,
    /// Further small files: name and contents.
    pub files: Vec<(String, Vec<u8>)>,
}

/// Where a run has its checkpoints, and how they are written.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The run's folder.
    pub run: &'a Path,
    /// How many of the newest stay; 0 keeps all.
    pub keep: usize,
    /// Most bytes of a file of tensors, unless one tensor has more.
    pub file_bytes: u64,
    pub pace: WritePace,
    /// This rank's; without one a disk may take as long as it likes.
    pub disk: Option<&'a Arc<DiskWatch>>,
    pub slow: SlowDisk,
}

/// What rank 0 does where all wait for somebody's disk, and where something could not be removed.
#[derive(Clone, Copy, Debug)]
pub struct SlowDisk {
    /// How long they have waited then.
    pub after: Duration,
    /// Says it to the user.
    pub tell: fn(&str),
}

impl SlowDisk {
    /// Nothing.
    pub const UNTOLD: SlowDisk = SlowDisk { after: Duration::MAX, tell: |_| () };
}

impl Destination<'_> {
    /// A run's folder: all checkpoints stay, and tensors of a kind are in one file.
    pub fn of(run: &Path) -> Destination<'_> {
        let slow = SlowDisk::UNTOLD;
        Destination { run, keep: 0, file_bytes: u64::MAX, pace: WritePace::Beside, disk: None, slow }
    }
}

/// Writes `<run>/checkpoints/step-NNNNNN` and returns its path; of all checkpoints up to it the newest stay. Collective.
/// Either the folder is whole or it has no such name, whatever fails. Of what is written a rank has the bytes of one weight
/// at a time in memory.
///
/// # Errors
/// What this rank could not write, or that another could not.
pub fn save(
    to: Destination,
    model: &mut dyn Parameters,
    optimizer: &mut Optimizer,
    mesh: &Mesh,
    extra: Extra,
) -> Result<PathBuf, Error> {
    let writing = Writing::of_run(to, model, optimizer, mesh, extra)?;
    writing.stream(model, Some(optimizer), mesh)?.finish(mesh)
}

/// Writes a checkpoint of a model alone, without an optimizer's state, as `folder`, which must not exist yet, in files of at
/// most `file_bytes`. Collective. Either the folder is whole or it has no such name.
///
/// # Errors
/// As [`save`]; a folder that exists.
pub fn export(
    folder: &Path,
    file_bytes: u64,
    model: &mut dyn Parameters,
    mesh: &Mesh,
    extra: Extra,
) -> Result<(), Error> {
    let files = files(model, None, mesh, file_bytes)?;
    let place = CheckpointPlace::Alone(folder.to_owned());
    let writing = Writing::open(place, files, extra, mesh, (WritePace::Beside, Arc::default()))?;
    writing.stream(model, None, mesh)?.finish(mesh).map(drop)
}

fn files(
    model: &mut dyn Parameters,
    optimizer: Option<&Optimizer>,
    mesh: &Mesh,
    file_bytes: u64,
) -> Result<CheckpointFiles, Error> {
    let locals = locals(model, optimizer);
    let kinds = [Some(TensorKind::Model), optimizer.map(|_| TensorKind::Optimizer)].into_iter().flatten();
    let set = |kind| Ok((kind, FileSet::new(kind, &tensors(kind, &locals, mesh)?, file_bytes)));
    Ok(CheckpointFiles { sets: kinds.map(set).collect::<Result<_, Error>>()? })
}

/// A checkpoint that is being written. Dropped, it is abandoned: what there is has no checkpoint's name, and the next write
/// removes it.
#[derive(Debug)]
pub struct Writing {
    outline: Arc<Outline>,
    helper: Helper,
    stage: WriteStage,
    /// What is still to be put.
    snapshot: Option<FileBytes>,
    slow: SlowDisk,
}

/// What of a checkpoint is done when the helpers of all ranks are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteStage {
    Begun,
    Put,
    Hashed,
    Published,
}

/// How far a checkpoint is.
#[derive(Debug)]
pub enum WriteProgress {
    UnderWay(Box<Writing>),
    Whole(PathBuf),
}

impl Writing {
    /// Copies all that this rank is to write of the state as it is, and lets its helper write the copy while training goes
    /// on. Memory for it, [`snapshot_bytes`], is charged to the device's account until it is written. Collective.
    ///
    /// # Errors
    /// What a group reports, or moving state does.
    pub fn of_snapshot(
        to: Destination,
        device: &Arc<Device>,
        (model, optimizer, mesh): (&mut dyn Parameters, &mut Optimizer, &Mesh),
        extra: Extra,
    ) -> Result<Writing, Error> {
        let mut writing = Writing::of_run(to, model, optimizer, mesh, extra)?;
        let bytes = snapshot_bytes(model, optimizer, mesh);
        let room = FileBytes::with_room(bytes, device.hold(Cause::Checkpoint, bytes));
        let state = (model, Some(optimizer), mesh);
        writing.snapshot = Some(collect(state, &writing.outline.files, room, |_| Ok(()))?);
        Ok(writing)
    }

    fn of_run(
        to: Destination,
        model: &mut dyn Parameters,
        optimizer: &Optimizer,
        mesh: &Mesh,
        extra: Extra,
    ) -> Result<Writing, Error> {
        let files = files(model, Some(optimizer), mesh, to.file_bytes)?;
        let place = CheckpointPlace::OfRun { run: to.run.to_owned(), step: extra.progress.step, keep: to.keep };
        let disk = to.disk.cloned().unwrap_or_default();
        Ok(Writing { slow: to.slow, ..Writing::open(place, files, extra, mesh, (to.pace, disk))? })
    }

    fn open(
        place: CheckpointPlace,
        files: CheckpointFiles,
        extra: Extra,
        mesh: &Mesh,
        (pace, disk): (WritePace, Arc<DiskWatch>),
    ) -> Result<Writing, Error> {
        let (partial, rank) = (place.partial()?, (mesh.world.rank(), mesh.world.size()));
        let outline = Arc::new(Outline { place, partial, files, extra, rank });
        let writer = |oversight| TaskWriter::new(outline.clone(), oversight);
        let mut helper = Helper::new(pace, disk, (rank.0, &outline.partial), writer);
        helper.submit(WriteTask::Begin);
        Ok(Writing { outline, helper, stage: WriteStage::Begun, snapshot: None, slow: SlowDisk::UNTOLD })
    }

    /// The step whose state it is of.
    pub fn step(&self) -> u64 {
        self.outline.extra.progress.step
    }

    /// Puts the state as it is, weight by weight, and returns when all is handed to the system. Collective.
    fn stream(
        mut self,
        model: &mut dyn Parameters,
        optimizer: Option<&mut Optimizer>,
        mesh: &Mesh,
    ) -> Result<Writing, Error> {
        self.settle(mesh)?;
        let outline = self.outline.clone();
        collect((model, optimizer, mesh), &outline.files, FileBytes::default(), |blocks| {
            if !blocks.is_empty() {
                self.helper.submit(WriteTask::Put(std::mem::take(blocks)));
            }
            if let Written::Emptied(emptied) = self.settle(mesh)? {
                *blocks = emptied;
            }
            Ok(())
        })?;
        Ok(self)
    }

    /// Whether this rank's helper is ready for the next stage.
    pub fn is_ready(&mut self) -> bool {
        self.helper.is_done(Duration::ZERO)
    }

    /// Begins the next stage, when the helpers of all ranks are ready. Collective.
    ///
    /// # Errors
    /// What this rank could not write, or that another could not; what the world reports.
    ///
    /// # Panics
    /// If this rank's helper is not ready.
    pub fn advance(mut self, mesh: &Mesh) -> Result<WriteProgress, Error> {
        let written = self.settle(mesh)?;
        self.stage = match self.stage {
            WriteStage::Begun => {
                self.snapshot.take().into_iter().for_each(|blocks| self.helper.submit(WriteTask::Put(blocks)));
                self.helper.submit(WriteTask::Sync);
                WriteStage::Put
            }
            WriteStage::Put => {
                self.helper.submit(WriteTask::Hash);
                WriteStage::Hashed
            }
            WriteStage::Hashed => {
                let Written::Checksums(own) = written else { unreachable!("hashing gives checksums") };
                self.helper.submit(WriteTask::Publish(of_all_ranks(&own, mesh)?));
                WriteStage::Published
            }
            WriteStage::Published => {
                if let Written::Unpruned(error) = written {
                    (self.slow.tell)(&format!(
                        "warning: the checkpoint of step {} is written, but an older one could not be removed: {error}",
                        self.step()
                    ));
                }
                return Ok(WriteProgress::Whole(self.outline.place.folder()));
            }
        };
        Ok(WriteProgress::UnderWay(Box::new(self)))
    }

    /// Goes on until it is whole. Collective.
    ///
    /// # Errors
    /// As [`Writing::advance`].
    pub fn finish(mut self, mesh: &Mesh) -> Result<PathBuf, Error> {
        loop {
            match self.advance(mesh)? {
                WriteProgress::UnderWay(writing) => self = *writing,
                WriteProgress::Whole(folder) => return Ok(folder),
            }
        }
    }

    /// Waits until the helpers of all ranks are ready, and tells what this rank's gave back. Collective.
    ///
    /// # Errors
    /// What this rank could not write, or that another could not, so that none waits for one that gave up.
    fn settle(&mut self, mesh: &Mesh) -> Result<Written, Error> {
        let (since, rank) = (Instant::now(), mesh.world.rank());
        let mut is_told = rank != 0;
        loop {
            let behind = if self.helper.is_done(MEETINGS_EVERY) { 0 } else { rank as u64 + 1 };
            let state = vec![behind, u64::from(self.helper.has_failed())];
            let all = mesh.world.all_reduce(Reduce::Max, state)?.into_u64();
            match (all[0], all[1]) {
                (0, 0) => return self.helper.outcome(),
                (0, _) => return Err(self.failure(mesh)?),
                (behind, _) if !is_told && since.elapsed() >= self.slow.after => {
                    is_told = true;
                    (self.slow.tell)(&format!(
                        "warning: all ranks have waited {} s for rank {} to write its part of the checkpoint of step {}: \
                         its disk is slow, or does not answer",
                        since.elapsed().as_secs(),
                        behind - 1,
                        self.step()
                    ));
                }
                _ => {}
            }
        }
    }

    /// What went wrong, on the first rank of those on which anything did.
    fn failure(&mut self, mesh: &Mesh) -> Result<Error, Error> {
        let own = self.helper.outcome().err();
        let told = own.as_ref().map(ToString::to_string).unwrap_or_default();
        let told = gather_bytes(told.into_bytes(), &mesh.world)?;
        self.helper.submit(WriteTask::Discard);
        let rank = told.iter().position(|text| !text.is_empty()).expect("a rank has failed");
        let reason = String::from_utf8_lossy(&told[rank]).into_owned();
        let (is_here, is_alone) = (mesh.world.rank() == rank, mesh.world.size() == 1);
        let of_rank = || Error::OfRank { path: self.outline.place.folder(), rank, is_here, reason };
        Ok(own.filter(|_| is_alone).unwrap_or_else(of_rank))
    }
}

/// The checksums of all files, of which each rank has made some. Collective.
fn of_all_ranks(own: &Checksums, mesh: &Mesh) -> Result<Checksums, Error> {
    let text = serde_json::to_vec(own).expect("names and digits are plain JSON");
    let parts = gather_bytes(text, &mesh.world)?;
    let parts = parts.iter().map(|part| serde_json::from_slice::<Checksums>(part).expect("a rank's own JSON"));
    Ok(parts.flatten().collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use guildhall_comm::threads;

    use super::*;
    use crate::parallel::MeshShape;

    const TIMEOUT: Duration = Duration::from_millis(500);
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

    /// A checkpoint without tensors, whose helpers take so long for each stage, by rank; what each rank has of it.
    fn written(run: &Path, slow: [Duration; 2], disks: &[Arc<DiskWatch>; 2]) -> Vec<Result<PathBuf, String>> {
        let ended = threads::run(2, threads::Options { timeout: TIMEOUT }, |world| {
            let mesh = Mesh::of(world, MeshShape::of(2, 1))?;
            let disk = disks[mesh.world.rank()].clone();
            let progress = TrainingProgress { step: 1, tokens: 0, seconds: 0.0, loss_trend: None };
            let extra = Extra { progress, data_fingerprint: String::new(), files: vec![("a".to_owned(), vec![1])] };
            let place = CheckpointPlace::OfRun { run: run.to_owned(), step: 1, keep: 0 };
            let files = CheckpointFiles { sets: Vec::new() };
            let slow_disk = SlowDisk { after: TIMEOUT, tell: |text| TOLD.lock().unwrap().push(text.to_owned()) };
            let mut writing =
                Writing { slow: slow_disk, ..Writing::open(place, files, extra, &mesh, (WritePace::Beside, disk))? };
            loop {
                writing.helper.submit(WriteTask::Linger(slow[mesh.world.rank()]));
                match writing.advance(&mesh)? {
                    WriteProgress::UnderWay(next) => writing = *next,
                    WriteProgress::Whole(folder) => return Ok::<_, Error>(folder),
                }
            }
        });
        ended.into_iter().map(|ended| ended.map_err(|failure| failure.to_string())).collect()
    }

    /// The others meet it again and again, so that none is missing for longer than it may be, and hear for whom they wait.
    #[test]
    fn a_rank_with_a_slow_disk_times_nobody_out() {
        for slow in [[2 * TIMEOUT, Duration::ZERO], [Duration::ZERO, 2 * TIMEOUT]] {
            let (run, begun) = (tempfile::tempdir().expect("a folder"), Instant::now());
            let folders = written(run.path(), slow, &Default::default());
            assert!(begun.elapsed() > 6 * TIMEOUT, "it was slow");
            assert!(folders.iter().all(|folder| folder.as_ref().unwrap().join("a").exists()), "{folders:?}");
            let told: Vec<String> = TOLD.lock().unwrap().drain(..).collect();
            let named = format!("for rank {} to write", usize::from(slow[0] < slow[1]));
            assert!(!told.is_empty() && told.iter().all(|text| text.contains(&named)), "{told:?}");
        }
    }

    /// All give the checkpoint up, at once where the thread of an earlier one still waits for the disk; when it no longer
    /// does, the next is written.
    #[test]
    fn a_rank_whose_disk_does_not_answer_is_not_waited_for() {
        // A busy disk takes less for a file of one byte.
        let (patience, hangs) = (Duration::from_secs(2), Duration::from_secs(6));
        for slow in [[hangs, Duration::ZERO], [Duration::ZERO, hangs]] {
            let run = tempfile::tempdir().expect("a folder");
            let disks = [(); 2].map(|()| Arc::new(DiskWatch::new(patience)));
            let rank = usize::from(slow[0] < slow[1]);
            let begun = Instant::now();
            for slow in [slow, [Duration::ZERO; 2]] {
                let ended = written(run.path(), slow, &disks);
                for (of, ended) in ended.into_iter().enumerate() {
                    let told = ended.unwrap_err();
                    let prefix = format!("rank {rank} could not write the checkpoint ");
                    assert!(told.contains(&prefix), "rank {of}: {told}");
                    assert!(told.contains("its file system has not answered for"), "{told}");
                }
            }
            assert!(begun.elapsed() < hangs, "the thread still waits");
            while disks[rank].waits_since().is_some() {
                std::thread::sleep(TIMEOUT / 10);
            }
            assert!(begun.elapsed() >= hangs, "it is known to wait");
            written(run.path(), [Duration::ZERO; 2], &disks).into_iter().for_each(|ended| drop(ended.unwrap()));
        }
    }
}
