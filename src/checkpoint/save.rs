//! Writing a checkpoint, all ranks together.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use guildhall_comm::Reduce;
use guildhall_tensor::{Dtype, Tensor};

use super::Error;
use super::folder::{fresh_partial, partial, prune, publish, sync_folder};
use super::layout::FileLayout;
use super::manifest::{MANIFEST, Manifest, Progress, sha256};
use crate::optim::Optimizer;
use crate::parallel::{Mesh, Parameters, Placement, Spread};

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// What a checkpoint holds besides tensors.
#[derive(Clone, Debug)]
pub struct Extra {
    pub progress: Progress,
    pub data_fingerprint: String,
    /// Further small files: name and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// Checkpoints kept, this one included; 0 keeps all.
    pub keep: usize,
}

/// A tensor this rank has a part in, with the prefix of its names in the file.
struct Local {
    file: &'static str,
    prefix: &'static str,
    placement: Placement,
    tensor: Tensor,
}

/// Writes `<run>/checkpoints/step-NNNNNN` and returns its path. Collective. Either the folder is whole or it has no
/// such name, whatever fails.
///
/// # Errors
/// What this rank could not write, or that another could not.
pub fn save(
    run: &Path,
    model: &mut dyn Parameters,
    optimizer: &Optimizer,
    mesh: &Mesh,
    extra: &Extra,
) -> Result<PathBuf, Error> {
    let step = extra.progress.step;
    let locals = locals(model, optimizer);
    let layouts = layouts(&locals, mesh)?;
    let leads = mesh.world.rank() == 0;
    let prepared = if leads { prepare(run, step, &layouts) } else { Ok(()) };
    agree(prepared, run, step, mesh)?;
    agree(write_own(&partial(run, step), &locals, &layouts, mesh), run, step, mesh)?;
    let finished = if leads { finish(run, extra) } else { Ok(()) };
    agree(finished, run, step, mesh)?;
    Ok(super::step_folder(run, step))
}

/// Every rank learns whether all succeeded, so that none waits for one that gave up.
fn agree(mine: Result<(), Error>, run: &Path, step: u64, mesh: &Mesh) -> Result<(), Error> {
    let failed = mesh.world.all_reduce(Reduce::Max, vec![u64::from(mine.is_err())])?.into_u64()[0];
    if failed > 0 && mesh.world.rank() == 0 {
        // The space it took may be just what is missing; what cannot be removed is found by the next write.
        let _ = std::fs::remove_dir_all(partial(run, step));
    }
    mine?;
    if failed > 0 { Err(Error::OtherRank { path: super::step_folder(run, step) }) } else { Ok(()) }
}

fn locals(model: &mut dyn Parameters, optimizer: &Optimizer) -> Vec<Local> {
    let mut locals = Vec::new();
    let mut slots = optimizer.slots.iter();
    model.visit(&mut |weight| {
        let slot = slots.next().expect("a slot for every weight");
        let states = [("m/", Some(&slot.m)), ("v/", Some(&slot.v)), ("master/", slot.master.as_ref())];
        let mut add = |file, prefix, tensor: &Tensor| {
            locals.push(Local { file, prefix, placement: weight.placement.clone(), tensor: tensor.clone() });
        };
        add(MODEL, "", weight.parameter.value());
        for (prefix, state) in states {
            if let Some(state) = state {
                add(OPTIMIZER, prefix, state);
            }
        }
    });
    model.visit_buffers(&mut |buffer| {
        let (placement, tensor) = (buffer.placement.clone(), buffer.value.clone());
        locals.push(Local { file: MODEL, prefix: "", placement, tensor });
    });
    locals
}

/// The layouts of both files, the same on every rank: each tells the others its tensors' names and shapes.
fn layouts(locals: &[Local], mesh: &Mesh) -> Result<BTreeMap<&'static str, FileLayout>, Error> {
    let mut layouts = BTreeMap::new();
    for file in [MODEL, OPTIMIZER] {
        let own = locals.iter().filter(|local| local.file == file).flat_map(|local| {
            local.placement.pieces.iter().map(move |piece| {
                (format!("{}{}", local.prefix, piece.name), local.tensor.dtype() == Dtype::Bf16, piece.shape.clone())
            })
        });
        let text = serde_json::to_vec(&own.collect::<Vec<_>>()).expect("names and shapes are plain JSON");
        let mut tensors = BTreeMap::new();
        for part in gather_bytes(text, mesh)? {
            let parts: Vec<(String, bool, Vec<usize>)> = serde_json::from_slice(&part).expect("a rank's own JSON");
            let dtype = |half| if half { Dtype::Bf16 } else { Dtype::F32 };
            tensors.extend(parts.into_iter().map(|(name, half, shape)| (name, (dtype(half), shape))));
        }
        layouts.insert(file, FileLayout::new(&tensors));
    }
    Ok(layouts)
}

fn gather_bytes(mine: Vec<u8>, mesh: &Mesh) -> Result<Vec<Vec<u8>>, Error> {
    let lengths: Vec<usize> = mesh.world.all_gather_u64(&[mine.len() as u64])?.iter().map(|&n| n as usize).collect();
    let total = lengths.iter().sum();
    let all = mesh.world.all_gather(mine, vec![0u8; total], lengths.clone())?.recv.into_u8();
    let mut rest = &all[..];
    let parts = lengths.iter().map(|&length| {
        let (part, tail) = rest.split_at(length);
        rest = tail;
        part.to_vec()
    });
    Ok(parts.collect())
}

fn prepare(run: &Path, step: u64, layouts: &BTreeMap<&'static str, FileLayout>) -> Result<(), Error> {
    let folder = fresh_partial(run, step)?;
    for (name, layout) in layouts {
        let path = folder.join(name);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        file.write_all(&layout.header).map_err(Error::io("write", &path))?;
        file.set_len(layout.file_bytes).map_err(Error::io("extend", &path))?;
    }
    Ok(())
}

/// Writes the tensors this rank answers for: those of experts on the first of the ranks that hold them, the others
/// on rank 0.
fn write_own(
    folder: &Path,
    locals: &[Local],
    layouts: &BTreeMap<&'static str, FileLayout>,
    mesh: &Mesh,
) -> Result<(), Error> {
    for (name, layout) in layouts {
        let path = folder.join(name);
        let file = OpenOptions::new().write(true).open(&path).map_err(Error::io("open", &path))?;
        for local in locals.iter().filter(|local| local.file == *name) {
            let answers = match local.placement.spread {
                Spread::Replicated => mesh.world.rank() == 0,
                Spread::Expert => mesh.expert_data.rank() == 0,
            };
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
        let range = piece.offset..piece.offset + piece.len();
        let bytes: Vec<u8> = match local.tensor.dtype() {
            Dtype::F32 => local.tensor.f32s()[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::Bf16 => local.tensor.bf16s()[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        file.write_all_at(&bytes, entry.start)?;
    }
    Ok(())
}

fn finish(run: &Path, extra: &Extra) -> Result<(), Error> {
    let folder = partial(run, extra.progress.step);
    for (name, contents) in &extra.files {
        write_durably(&folder.join(name), contents)?;
    }
    let mut files = BTreeMap::new();
    for name in [MODEL, OPTIMIZER].into_iter().chain(extra.files.iter().map(|(name, _)| name.as_str())) {
        files.insert(name.to_owned(), sha256(&folder.join(name))?);
    }
    let data_fingerprint = extra.data_fingerprint.clone();
    let manifest = Manifest::new(extra.progress.clone(), data_fingerprint, files);
    write_durably(&folder.join(MANIFEST), &manifest.sealed())?;
    sync_folder(&folder)?;
    publish(run, extra.progress.step)?;
    prune(run, extra.progress.step, extra.keep)
}

fn write_durably(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("sync", path))
}
