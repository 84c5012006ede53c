//! Reading a checkpoint into a model on any mesh: each rank reads the tensors it holds.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guildhall_tensor::{Dtype, ElementsMut, Tensor};
use half::bf16;

use super::Error;
use super::element::ElementType;
use super::file_set::{FileSet, TensorKind};
use super::folder::{newest, step_folder, steps};
use super::held::{locals, prefix, tensors};
use super::layout::TensorList;
use super::manifest::{CheckpointManifest, MANIFEST, TrainingProgress};
use super::tensor_files::TensorFiles;
use crate::optim::{Access, Optimizer, Strip};
use crate::parallel::{Mesh, Parameters, Placement};

/// An opened checkpoint.
#[derive(Clone, Debug)]
pub struct OpenCheckpoint {
    pub folder: PathBuf,
    pub manifest: CheckpointManifest,
    /// Tensors that are read by other names or in other types than the files' own.
    pub read_as: BTreeMap<TensorKind, Arc<TensorFiles>>,
}

/// Parameters that are no burden to any machine.
const SMALL: u64 = 1 << 20;

/// Opens a checkpoint, or the newest of a run, and compares every file with its checksum.
///
/// # Errors
/// A folder that is no checkpoint and no run with one, or a damaged file.
pub fn open(folder: &Path) -> Result<OpenCheckpoint, Error> {
    let of_run = newest(folder)?;
    if let Some(manifest) = of_run.as_ref().map(|folder| folder.join(MANIFEST))
        && !manifest.try_exists().map_err(Error::io("find", &manifest))?
    {
        return Err(Error::damaged(&manifest, "it is missing"));
    }
    let folder = of_run.unwrap_or_else(|| folder.to_owned());
    let manifest = CheckpointManifest::read(&folder)?;
    manifest.verify(&folder)?;
    Ok(OpenCheckpoint { folder, manifest, read_as: BTreeMap::new() })
}

/// What a run can be continued from.
#[derive(Debug)]
pub struct NewestWhole {
    pub whole: OpenCheckpoint,
    /// Newer ones that are damaged, with what is wrong; the newest first.
    pub damaged: Vec<(PathBuf, Error)>,
}

/// Opens the newest checkpoint of a run whose files are all as they were written; none if the run has no checkpoint.
///
/// # Errors
/// A file that cannot be read; if no checkpoint is whole, what is wrong with the newest.
pub fn open_newest_whole(run: &Path) -> Result<Option<NewestWhole>, Error> {
    let mut damaged = Vec::new();
    for step in steps(run)?.into_iter().rev() {
        let folder = step_folder(run, step);
        match open(&folder) {
            Ok(whole) => return Ok(Some(NewestWhole { whole, damaged })),
            Err(error) if error.is_damage() => damaged.push((folder, error)),
            Err(error) => return Err(error),
        }
    }
    damaged.into_iter().next().map_or(Ok(None), |(_, error)| Err(error))
}

/// Opens a checkpoint of which another process has compared every file with its checksum.
///
/// # Errors
/// A folder that is no checkpoint.
pub fn open_found_whole(folder: &Path) -> Result<NewestWhole, Error> {
    let manifest = CheckpointManifest::read(folder)?;
    let whole = OpenCheckpoint { folder: folder.to_owned(), manifest, read_as: BTreeMap::new() };
    Ok(NewestWhole { whole, damaged: Vec::new() })
}

impl OpenCheckpoint {
    /// A model that another program has written, and small files of its folder, as if this one had: at step 0, of no data.
    pub fn foreign(folder: &Path, tensors: Arc<TensorFiles>, small: impl Iterator<Item = String>) -> OpenCheckpoint {
        let progress = TrainingProgress { step: 0, tokens: 0, seconds: 0.0, loss_trend: None };
        let small = small.map(|name| (name, String::new())).collect();
        let manifest = CheckpointManifest::new(progress, String::new(), small);
        OpenCheckpoint { folder: folder.to_owned(), manifest, read_as: [(TensorKind::Model, tensors)].into() }
    }

    /// A file of the checkpoint that has been compared with its checksum.
    ///
    /// # Errors
    /// A manifest that does not list it.
    pub fn file(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.folder.join(name);
        match self.manifest.files.contains_key(name) {
            true => Ok(path),
            false => Err(Error::damaged(&path, "its manifest does not list it")),
        }
    }

    /// The layouts of the files of one kind.
    ///
    /// # Errors
    /// Files that are missing, or contradict themselves, each other or the manifest.
    pub fn tensors(&self, kind: TensorKind) -> Result<FileSet, Error> {
        FileSet::read(kind, &self.folder, self.manifest.files.keys())
    }

    /// The same, to be read.
    ///
    /// # Errors
    /// As [`OpenCheckpoint::tensors`].
    pub fn files(&self, kind: TensorKind) -> Result<Arc<TensorFiles>, Error> {
        let own = || self.tensors(kind).map(|set| Arc::new(TensorFiles::new(&self.folder, set)));
        self.read_as.get(&kind).cloned().map_or_else(own, Ok)
    }

    /// Holds that a model of so many parameters is not far larger than the checkpoint, before any memory is taken for it:
    /// what is wrong with one of about the size, [`check_fit`] tells by names.
    ///
    /// # Errors
    /// A model of more than twice the parameters there are.
    pub fn check_size(&self, parameters: u64) -> Result<(), Error> {
        let files = self.files(TensorKind::Model)?;
        let (path, there) = (files.path(), files.set().entries().map(|(_, entry)| entry.elements()).sum::<u64>());
        let reason = format!("it has {there} elements, the model {parameters} parameters");
        if parameters / 2 <= there.max(SMALL) { Ok(()) } else { Err(Error::Mismatch { path, reason }) }
    }
}

/// Holds that the checkpoint has every tensor of the model, and no other. Collective.
///
/// # Errors
/// All that differs, by name, on every rank alike.
pub fn check_fit(source: &OpenCheckpoint, model: &mut dyn Parameters, mesh: &Mesh) -> Result<(), Error> {
    let here = tensors(TensorKind::Model, &locals(model, None), mesh)?;
    check_list(&*source.files(TensorKind::Model)?, &here)
}

/// Holds that files have the tensors that are to be had `here`, and no others.
///
/// # Errors
/// All that differs, by name.
pub(super) fn check_list(files: &TensorFiles, here: &TensorList) -> Result<(), Error> {
    let (path, there) = (files.path(), files.list());
    let strangers = |of: &TensorList, other: &TensorList| {
        of.keys().filter(|name| !other.contains_key(*name)).cloned().collect::<Vec<String>>()
    };
    let changed = here.iter().filter_map(|(name, here)| {
        let there = there.get(name).filter(|there| *there != here)?;
        let told = |(dtype, shape): &(ElementType, Vec<usize>)| format!("{dtype:?} {shape:?}");
        Some(format!("{name} is {} there, {} in the model", told(there), told(here)))
    });
    let listed = [
        ("it has no tensor ", ", ", strangers(here, &there)),
        ("the model has no tensor ", ", ", strangers(&there, here)),
        ("", "; ", changed.collect()),
    ];
    let lists = listed.iter().filter(|(_, _, names)| !names.is_empty());
    let reason: Vec<String> = lists.map(|(what, joint, names)| format!("{what}{}", some_of(names, joint))).collect();
    if reason.is_empty() { Ok(()) } else { Err(Error::Mismatch { path, reason: reason.join("; ") }) }
}

/// The first names, and how many more there are.
fn some_of(names: &[String], joint: &str) -> String {
    const SHOWN: usize = 4;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(joint),
        Some(more) => format!("{}{joint}and {more} more", names[..SHOWN].join(joint)),
    }
}

/// Fills the model's parameters and buffers.
///
/// # Errors
/// A file that cannot be read or does not fit the model.
pub fn load_model(source: &OpenCheckpoint, model: &mut dyn Parameters) -> Result<(), Error> {
    let files = source.files(TensorKind::Model)?;
    let mut outcome = Ok(());
    model.visit(&mut |weight| {
        let value = weight.parameter.stored();
        if outcome.is_ok() {
            outcome = value.with_kept(|kept, first| read_tensor(&files, kept, first, &weight.placement));
        }
    });
    model.visit_buffers(&mut |buffer| {
        if outcome.is_ok() {
            outcome = read_tensor(&files, &mut buffer.value, 0, &buffer.placement);
        }
    });
    outcome
}

/// Fills the optimizer's state.
///
/// # Errors
/// As [`load_model`].
pub fn load_optimizer(
    source: &OpenCheckpoint,
    model: &mut dyn Parameters,
    optimizer: &mut Optimizer,
) -> Result<(), Error> {
    let files = source.files(TensorKind::Optimizer)?;
    optimizer.visit(model, Access::Write, |weight, mut tile| {
        let (placement, range) = (&weight.placement, tile.elements.clone());
        for (number, strip) in Strip::ALL.into_iter().enumerate().take(tile.strips.count) {
            let put = |first: usize, bytes: &[u8]| tile.write(number, first, &f32s(bytes));
            read(&files, (prefix(strip), Dtype::F32), placement, &range, put)?;
        }
        Ok(())
    })
}

/// Fills a tensor with the elements of a local weight from `first` on.
fn read_tensor(files: &TensorFiles, tensor: &mut Tensor, first: usize, placement: &Placement) -> Result<(), Error> {
    let (dtype, range) = (tensor.dtype(), first..first + tensor.len());
    read(files, ("", dtype), placement, &range, |local, bytes| {
        let start = local - first;
        tensor.write_elements(start..start + bytes.len() / dtype.bytes(), |elements| match elements {
            ElementsMut::F32(to) => put_f32s(to, bytes),
            ElementsMut::Bf16(to) => put_bf16s(to, bytes),
            ElementsMut::U32(_) => unreachable!("weights are numbers"),
        });
    })
}

/// Hands elements `range` of a local weight to `put`, run by run: the first of them, and bytes.
fn read(
    files: &TensorFiles,
    (prefix, dtype): (&str, Dtype),
    placement: &Placement,
    range: &Range<usize>,
    mut put: impl FnMut(usize, &[u8]),
) -> Result<(), Error> {
    for piece in &placement.pieces {
        let name = format!("{prefix}{}", piece.name);
        let mismatch = |reason| Error::Mismatch { path: files.path(), reason };
        let tensor = files.open(&name)?.ok_or_else(|| mismatch(format!("it has no tensor {name}")))?;
        if tensor.shape != piece.shape || tensor.dtype != ElementType::of(dtype) {
            let found = format!("{:?} {:?}", tensor.dtype, tensor.shape);
            let here = format!("{dtype:?} {:?}", piece.shape);
            return Err(mismatch(format!("{name} is {found} there, {here} in the model")));
        }
        for run in piece.runs_within(range) {
            put(run.local, &tensor.read(run.global, run.len)?);
        }
    }
    Ok(())
}

/// Elements as they are in a file.
fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The same written to the front of `to`.
fn put_f32s(to: &mut [f32], bytes: &[u8]) {
    to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, from)| *to = f32::from_le_bytes(*from));
}

fn put_bf16s(to: &mut [bf16], bytes: &[u8]) {
    to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, from)| *to = bf16::from_le_bytes(*from));
}
