//! Writing a checkpoint, all ranks together.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use guildhall_comm::Reduce;
use guildhall_tensor::Dtype;

use super::Error;
use super::folder::{self, fresh_partial, partial, prune, publish, sync_folder};
use super::held::{Local, MODEL, OPTIMIZER, layout, locals};
use super::layout::FileLayout;
use super::manifest::{MANIFEST, Manifest, Progress, sha256};
use crate::optim::Optimizer;
use crate::parallel::{Mesh, Parameters};

/// What a checkpoint holds besides tensors.
#[derive(Clone, Debug)]
pub struct Extra {
    pub progress: Progress,
    pub data_fingerprint: String,
    /// Further small files: name and contents.
    pub files: Vec<(String, Vec<u8>)>,
}

/// A folder that is written under another name until it is whole.
struct Place {
    partial: PathBuf,
    folder: PathBuf,
}

/// Writes `<run>/checkpoints/step-NNNNNN` and returns its path; of all checkpoints up to it the newest `keep` stay (0:
/// all). Collective. Either the folder is whole or it has no such name, whatever fails.
///
/// # Errors
/// What this rank could not write, or that another could not.
pub fn save(
    (run, keep): (&Path, usize),
    model: &mut dyn Parameters,
    optimizer: &Optimizer,
    mesh: &Mesh,
    extra: &Extra,
) -> Result<PathBuf, Error> {
    let step = extra.progress.step;
    let place = Place { partial: partial(run, step), folder: super::step_folder(run, step) };
    let locals = locals(model, Some(optimizer));
    place.write((&locals, &[MODEL, OPTIMIZER]), mesh, extra, || fresh_partial(run, step))?;
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
    let place = Place { partial: folder::partial_beside(folder)?, folder: folder.to_owned() };
    let begin = || folder::begin_beside(&place.partial, folder);
    place.write((&locals(model, None), &[MODEL]), mesh, extra, begin)?;
    place.agree(mesh, || folder::publish_beside(&place.partial, folder))
}

impl Place {
    /// Fills the folder under its other name, which `begin` creates.
    fn write(
        &self,
        (locals, files): (&[Local], &[&'static str]),
        mesh: &Mesh,
        extra: &Extra,
        begin: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let layouts = files.iter().map(|&file| Ok((file, layout(file, locals, mesh)?)));
        let layouts: Layouts = layouts.collect::<Result<_, Error>>()?;
        self.agree(mesh, || begin().and_then(|()| prepare(&self.partial, &layouts)))?;
        self.agree_all(write_own(&self.partial, locals, &layouts, mesh), mesh)?;
        self.agree(mesh, || finish(&self.partial, &layouts, extra))
    }

    /// What rank 0 does for all.
    fn agree(&self, mesh: &Mesh, f: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.agree_all(if mesh.world.rank() == 0 { f() } else { Ok(()) }, mesh)
    }

    /// Every rank learns whether all succeeded, so that none waits for one that gave up.
    fn agree_all(&self, mine: Result<(), Error>, mesh: &Mesh) -> Result<(), Error> {
        let failed = mesh.world.all_reduce(Reduce::Max, vec![u64::from(mine.is_err())])?.into_u64()[0];
        if failed > 0 && mesh.world.rank() == 0 {
            // The space it took may be just what is missing; what cannot be removed is found by the next write.
            let _ = std::fs::remove_dir_all(&self.partial);
        }
        mine?;
        if failed > 0 { Err(Error::OtherRank { path: self.folder.clone() }) } else { Ok(()) }
    }
}

type Layouts = BTreeMap<&'static str, FileLayout>;

fn prepare(partial: &Path, layouts: &Layouts) -> Result<(), Error> {
    for (name, layout) in layouts {
        let path = partial.join(name);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        file.write_all(&layout.header).map_err(Error::io("write", &path))?;
        file.set_len(layout.file_bytes).map_err(Error::io("extend", &path))?;
    }
    Ok(())
}

/// Writes the pieces this rank answers for: of the ranks that hold the same, the first does.
fn write_own(folder: &Path, locals: &[Local], layouts: &Layouts, mesh: &Mesh) -> Result<(), Error> {
    for (name, layout) in layouts {
        let path = folder.join(name);
        let file = OpenOptions::new().write(true).open(&path).map_err(Error::io("open", &path))?;
        for local in locals.iter().filter(|local| local.file == *name) {
            let placement = &local.placement;
            let answers = mesh.answers(placement) && mesh.holders(placement).rank() == 0;
            if answers {
                write_pieces(&file, local, layout).map_err(Error::io("write", &path))?;
            }
        }
        file.sync_all().map_err(Error::io("sync", &path))?;
    }
    Ok(())
}

fn write_pieces(file: &File, local: &Local, layout: &FileLayout) -> std::io::Result<()> {
    for piece in &local.placement.pieces {
        let entry = &layout.entries[&format!("{}{}", local.prefix, piece.name)];
        for run in piece.runs() {
            let range = run.local..run.local + run.len;
            let (bytes, size): (Vec<u8>, usize) = match local.tensor.dtype() {
                Dtype::F32 => (local.tensor.f32s()[range].iter().flat_map(|x| x.to_le_bytes()).collect(), 4),
                Dtype::Bf16 => (local.tensor.bf16s()[range].iter().flat_map(|x| x.to_le_bytes()).collect(), 2),
            };
            file.write_all_at(&bytes, entry.start + (run.global * size) as u64)?;
        }
    }
    Ok(())
}

/// The small files, the manifest last.
fn finish(folder: &Path, layouts: &Layouts, extra: &Extra) -> Result<(), Error> {
    for (name, contents) in &extra.files {
        write_durably(&folder.join(name), contents)?;
    }
    let mut files = BTreeMap::new();
    for name in layouts.keys().copied().chain(extra.files.iter().map(|(name, _)| name.as_str())) {
        files.insert(name.to_owned(), sha256(&folder.join(name))?);
    }
    let data_fingerprint = extra.data_fingerprint.clone();
    let manifest = Manifest::new(extra.progress.clone(), data_fingerprint, files);
    write_durably(&folder.join(MANIFEST), &manifest.sealed())?;
    sync_folder(folder)
}

fn write_durably(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("sync", path))
}
