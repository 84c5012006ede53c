//! Writing a checkpoint, all ranks together.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use guildhall_comm::Reduce;
use guildhall_tensor::{Dtype, Tensor};
use half::bf16;

use super::Error;
use super::checksums::checksums;
use super::folder::{self, fresh_partial, partial, prune, publish, sync_folder};
use super::held::{Local, MODEL, OPTIMIZER, layout, locals, prefix};
use super::layout::{FileLayout, TensorEntry};
use super::manifest::{CheckpointManifest, MANIFEST, TrainingProgress};
use super::rows::{RowExchange, is_of_even_columns};
use crate::optim::{Access, Optimizer, Strip};
use crate::parallel::{Axis, ContiguousRun, Mesh, Parameters, Placement, Spread, gather_bytes};

/// What a checkpoint holds besides tensors.
#[derive(Clone, Debug)]
pub struct Extra {
    pub progress: TrainingProgress,
    pub data_fingerprint: String,
    /// Further small files: name and contents.
    pub files: Vec<(String, Vec<u8>)>,
}

/// A folder that is written under another name until it is whole.
struct PartialFolder {
    partial: PathBuf,
    folder: PathBuf,
}

/// Where a run has its checkpoints.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The run's folder.
    pub run: &'a Path,
    /// How many of the newest stay; 0 keeps all.
    pub keep: usize,
}

/// Writes `<run>/checkpoints/step-NNNNNN` and returns its path; of all checkpoints up to it the newest stay. Collective. Either the folder is whole or it has no such name, whatever fails.
///
/// # Errors
/// What this rank could not write, or that another could not.
pub fn save(
    to: Destination,
    model: &mut dyn Parameters,
    optimizer: &mut Optimizer,
    mesh: &Mesh,
    extra: &Extra,
) -> Result<PathBuf, Error> {
    let (Destination { run, keep }, step) = (to, extra.progress.step);
    let place = PartialFolder { partial: partial(run, step), folder: super::step_folder(run, step) };
    let locals = locals(model, Some(optimizer));
    let contents = |folder: &Path, layouts: &Layouts| {
        let model_written = write_model(Target::open(folder, MODEL, layouts, mesh), model, mesh)?;
        let written = write_optimizer(Target::open(folder, OPTIMIZER, layouts, mesh), model, optimizer, mesh)?;
        Ok(model_written.and(written))
    };
    place.write(&layouts(&locals, &[MODEL, OPTIMIZER], mesh)?, mesh, extra, || fresh_partial(run, step), contents)?;
    let named = || publish(run, step).and_then(|()| prune(run, step, keep));
    place.agree(mesh, named)?;
    Ok(place.folder)
}

/// Writes a checkpoint of a model alone, without an optimizer's state, as `folder`, which must not exist yet.
/// Collective. Either the folder is whole or it has no such name.
///
/// # Errors
/// As [`save`]; a folder that exists.
pub fn export(folder: &Path, model: &mut dyn Parameters, mesh: &Mesh, extra: &Extra) -> Result<(), Error> {
    let place = PartialFolder { partial: folder::partial_beside(folder)?, folder: folder.to_owned() };
    let begin = || folder::begin_beside(&place.partial, folder);
    let locals = locals(model, None);
    let contents =
        |folder: &Path, layouts: &Layouts| write_model(Target::open(folder, MODEL, layouts, mesh), model, mesh);
    place.write(&layouts(&locals, &[MODEL], mesh)?, mesh, extra, begin, contents)?;
    place.agree(mesh, || folder::publish_beside(&place.partial, folder))
}

impl PartialFolder {
    /// Fills the folder under its other name, which `begin` creates, with `contents`, of which each rank writes its part.
    fn write(
        &self,
        layouts: &Layouts,
        mesh: &Mesh,
        extra: &Extra,
        begin: impl FnOnce() -> Result<(), Error>,
        contents: impl FnOnce(&Path, &Layouts) -> Result<WriteResult, Error>,
    ) -> Result<(), Error> {
        self.agree(mesh, || begin().and_then(|()| prepare(&self.partial, layouts)))?;
        self.agree_all(contents(&self.partial, layouts)?, mesh)?;
        self.agree(mesh, || write_extra(&self.partial, extra))?;
        // The large ones first, so that they are different ranks'.
        let names: Vec<&str> =
            layouts.keys().copied().chain(extra.files.iter().map(|(name, _)| name.as_str())).collect();
        let sums = checksums(&self.partial, &names, mesh)?;
        let sums = self.agree_on(sums, mesh)?;
        self.agree(mesh, || seal(&self.partial, extra, sums))
    }

    /// What rank 0 does for all.
    fn agree(&self, mesh: &Mesh, f: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.agree_all(if mesh.world.rank() == 0 { f() } else { Ok(()) }, mesh)
    }

    /// Every rank learns whether all succeeded, so that none waits for one that gave up.
    fn agree_all(&self, mine: WriteResult, mesh: &Mesh) -> Result<(), Error> {
        self.agree_on(mine, mesh)
    }

    fn agree_on<T>(&self, mine: Result<T, Error>, mesh: &Mesh) -> Result<T, Error> {
        let failed = mesh.world.all_reduce(Reduce::Max, vec![u64::from(mine.is_err())])?.into_u64()[0];
        if failed > 0 && mesh.world.rank() == 0 {
            // The space it took may be just what is missing; what cannot be removed is found by the next write.
            let _ = std::fs::remove_dir_all(&self.partial);
        }
        if failed == 0 {
            return mine;
        }
        let told = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let told = gather_bytes(told.into_bytes(), &mesh.world)?;
        mine?;
        let rank = told.iter().position(|text| !text.is_empty()).expect("a rank has failed");
        let reason = String::from_utf8_lossy(&told[rank]).into_owned();
        Err(Error::OtherRank { path: self.folder.clone(), rank, reason })
    }
}

/// What became of a rank's part, for all to agree on; a rank that could not write goes on exchanging with others.
type WriteResult = Result<(), Error>;

type Layouts = BTreeMap<&'static str, FileLayout>;

fn layouts(locals: &[Local], files: &[&'static str], mesh: &Mesh) -> Result<Layouts, Error> {
    files.iter().map(|&file| Ok((file, layout(file, locals, mesh)?))).collect()
}

fn prepare(partial: &Path, layouts: &Layouts) -> Result<(), Error> {
    for (name, layout) in layouts {
        let path = partial.join(name);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        file.write_all(&layout.header).map_err(Error::io("write", &path))?;
        file.set_len(layout.file_bytes).map_err(Error::io("extend", &path))?;
    }
    Ok(())
}

/// A file that all ranks write to.
struct Target<'a> {
    path: PathBuf,
    /// What went wrong first; nothing is written after it.
    file: Result<File, Error>,
    layout: &'a FileLayout,
    mesh: &'a Mesh,
}

/// Writes the shares of weights, and the buffers, that this rank answers for.
///
/// # Errors
/// What a group reports.
fn write_model(mut target: Target, model: &mut dyn Parameters, mesh: &Mesh) -> Result<WriteResult, Error> {
    let mut outcome = Ok(());
    model.visit(&mut |weight| {
        let (placement, value) = (&weight.placement, weight.parameter.stored());
        if outcome.is_ok() && mesh.answers(placement) {
            let share = mesh.share(placement, value.len());
            let write = |kept: &mut Tensor, first| target.write("", placement, &share, &ElementSlice::of(kept, first));
            outcome = value.with_kept(write);
        }
    });
    model.visit_buffers(&mut |buffer| {
        let (placement, value) = (&buffer.placement, &buffer.value);
        if outcome.is_ok() && mesh.answers(placement) {
            let share = mesh.share(placement, value.len());
            outcome = target.write("", placement, &share, &ElementSlice::of(value, 0));
        }
    });
    outcome?;
    Ok(target.finish())
}

/// The same of an optimizer's state.
///
/// # Errors
/// What a group reports, or moving state does.
fn write_optimizer(
    mut target: Target,
    model: &mut dyn Parameters,
    optimizer: &mut Optimizer,
    mesh: &Mesh,
) -> Result<WriteResult, Error> {
    optimizer.visit(model, Access::Read, |weight, tile| {
        let placement = &weight.placement;
        if !mesh.answers(placement) {
            return Ok(());
        }
        let share = mesh.share(placement, weight.parameter.len());
        let (start, end) = (tile.elements.start, tile.elements.end);
        let own = share.start.max(start)..share.end.min(end);
        for (number, strip) in Strip::ALL.into_iter().enumerate().take(tile.strips.count) {
            let elements = ElementSlice { first: start, data: ElementData::F32(&tile.read(number)) };
            target.write(prefix(strip), placement, &own, &elements)?;
        }
        Ok::<_, Error>(())
    })?;
    Ok(target.finish())
}

/// Elements of a local weight from number `first` on.
struct ElementSlice<'a> {
    first: usize,
    data: ElementData<'a>,
}

/// Elements as they are stored.
enum ElementData<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> ElementSlice<'a> {
    fn of(tensor: &'a Tensor, first: usize) -> ElementSlice<'a> {
        let data = match tensor.dtype() {
            Dtype::F32 => ElementData::F32(tensor.f32s()),
            Dtype::Bf16 => ElementData::Bf16(tensor.bf16s()),
            Dtype::U32 => unreachable!("weights are numbers"),
        };
        ElementSlice { first, data }
    }

    fn bytes(&self, run: &ContiguousRun) -> Vec<u8> {
        let range = run.local - self.first..run.local + run.len - self.first;
        match self.data {
            ElementData::F32(all) => all[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
            ElementData::Bf16(all) => all[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    fn size(&self) -> usize {
        match self.data {
            ElementData::F32(_) => 4,
            ElementData::Bf16(_) => 2,
        }
    }
}

impl<'a> Target<'a> {
    fn open(folder: &Path, name: &'static str, layouts: &'a Layouts, mesh: &'a Mesh) -> Target<'a> {
        let path = folder.join(name);
        let file = OpenOptions::new().write(true).open(&path).map_err(Error::io("open", &path));
        Target { path, file, layout: &layouts[name], mesh }
    }

    /// Writes elements `range` of a local weight, which are among `elements`. Collective for what is
    /// cut by columns evenly; parts of rows of other lengths are written where they belong.
    ///
    /// # Errors
    /// What a group reports; what the file does is kept.
    fn write(
        &mut self,
        prefix: &str,
        placement: &Placement,
        range: &Range<usize>,
        elements: &ElementSlice,
    ) -> Result<(), Error> {
        let (layout, mesh) = (self.layout, self.mesh);
        let axis = if placement.spread == Spread::Tensor { Axis::Tensor } else { Axis::ExpertTensor };
        let group = mesh.group(axis);
        for piece in &placement.pieces {
            let entry = &layout.entries[&format!("{prefix}{}", piece.name)];
            let runs: Vec<ContiguousRun> = piece.runs().filter_map(|run| run.within(range)).collect();
            match is_of_even_columns(piece, group.size()) {
                true => {
                    let together = |runs: &[ContiguousRun]| runs.iter().flat_map(|run| elements.bytes(run)).collect();
                    let rows = RowExchange::of(piece, group, elements.size());
                    for runs in rows.batches(&runs) {
                        let blocks = rows.exchange(runs, together(runs))?;
                        blocks.iter().for_each(|block| self.put(entry, block.global, elements.size(), &block.bytes));
                    }
                }
                false => runs.iter().for_each(|run| self.put(entry, run.global, elements.size(), &elements.bytes(run))),
            }
        }
        Ok(())
    }

    fn put(&mut self, entry: &TensorEntry, global: usize, size: usize, bytes: &[u8]) {
        if let Ok(file) = &self.file {
            let written = file.write_all_at(bytes, entry.start + (global * size) as u64);
            if let Err(error) = written.map_err(Error::io("write", &self.path)) {
                self.file = Err(error);
            }
        }
    }

    fn finish(self) -> WriteResult {
        self.file?.sync_all().map_err(Error::io("sync", &self.path))
    }
}

/// The small files.
fn write_extra(folder: &Path, extra: &Extra) -> Result<(), Error> {
    extra.files.iter().try_for_each(|(name, contents)| write_durably(&folder.join(name), contents))
}

/// The manifest, last.
fn seal(folder: &Path, extra: &Extra, files: BTreeMap<String, String>) -> Result<(), Error> {
    let manifest = CheckpointManifest::new(extra.progress.clone(), extra.data_fingerprint.clone(), files);
    write_durably(&folder.join(MANIFEST), &manifest.sealed())?;
    sync_folder(folder)
}

fn write_durably(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("sync", path))
}
