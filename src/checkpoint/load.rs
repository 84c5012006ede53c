//! Reading a checkpoint into a model on any mesh: each rank reads the tensors it holds.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use guildhall_tensor::{Dtype, Tensor};
use half::bf16;

use super::Error;
use super::file_set::{FileSet, TensorKind, path_of};
use super::folder::{newest, step_folder, steps};
use super::held::{locals, prefix, tensors};
use super::layout::{TensorEntry, TensorList};
use super::manifest::CheckpointManifest;
use crate::optim::{Access, Optimizer, Strip};
use crate::parallel::{Mesh, Parameters, Piece, Placement};

/// An opened checkpoint.
#[derive(Clone, Debug)]
pub struct OpenCheckpoint {
    pub folder: PathBuf,
    pub manifest: CheckpointManifest,
}

/// Parameters that are no burden to any machine.
const SMALL: u64 = 1 << 20;

/// Opens a checkpoint, or the newest of a run, and compares every file with its checksum.
///
/// # Errors
/// A folder that is no checkpoint and no run with one, or a damaged file.
pub fn open(folder: &Path) -> Result<OpenCheckpoint, Error> {
    let folder = newest(folder).unwrap_or_else(|| folder.to_owned());
    let manifest = CheckpointManifest::read(&folder)?;
    manifest.verify(&folder)?;
    Ok(OpenCheckpoint { folder, manifest })
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
    for step in steps(run).into_iter().rev() {
        let folder = step_folder(run, step);
        match open(&folder) {
            Ok(whole) => return Ok(Some(NewestWhole { whole, damaged })),
            Err(error) if error.is_damage() => damaged.push((folder, error)),
            Err(error) => return Err(error),
        }
    }
    damaged.into_iter().next().map_or(Ok(None), |(_, error)| Err(error))
}

impl OpenCheckpoint {
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

    /// Holds that a model of so many parameters is not far larger than the checkpoint, before any memory is taken for it:
    /// what is wrong with one of about the size, [`check_fit`] tells by names.
    ///
    /// # Errors
    /// A model of more than twice the parameters there are.
    pub fn check_size(&self, parameters: u64) -> Result<(), Error> {
        let set = self.tensors(TensorKind::Model)?;
        let (path, there) =
            (path_of(&self.folder, &set), set.entries().map(|(_, entry)| entry.elements()).sum::<u64>());
        let reason = format!("it has {there} elements, the model {parameters} parameters");
        if parameters / 2 <= there.max(SMALL) { Ok(()) } else { Err(Error::Mismatch { path, reason }) }
    }
}

/// Holds that the checkpoint has every tensor of the model, and of the optimizer if there is one, and no other.
/// Collective.
///
/// # Errors
/// All that differs, by name, on every rank alike.
pub fn check_fit(
    source: &OpenCheckpoint,
    model: &mut dyn Parameters,
    optimizer: Option<&Optimizer>,
    mesh: &Mesh,
) -> Result<(), Error> {
    let locals = locals(model, optimizer);
    let kinds = [Some(TensorKind::Model), optimizer.map(|_| TensorKind::Optimizer)];
    kinds.into_iter().flatten().try_for_each(|kind| check_kind(source, kind, &tensors(kind, &locals, mesh)?))
}

fn check_kind(source: &OpenCheckpoint, kind: TensorKind, here: &TensorList) -> Result<(), Error> {
    let set = source.tensors(kind)?;
    let path = path_of(&source.folder, &set);
    let there: TensorList =
        set.entries().map(|(name, entry)| (name.clone(), (entry.dtype, entry.shape.clone()))).collect();
    let strangers = |of: &TensorList, other: &TensorList| {
        of.keys().filter(|name| !other.contains_key(*name)).cloned().collect::<Vec<String>>()
    };
    let changed = here.iter().filter_map(|(name, here)| {
        let there = there.get(name).filter(|there| *there != here)?;
        let told = |(dtype, shape): &(Dtype, Vec<usize>)| format!("{dtype:?} {shape:?}");
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
    let files = TensorFiles::open(source, TensorKind::Model)?;
    let mut outcome = Ok(());
    model.visit(&mut |weight| {
        let value = weight.parameter.stored();
        if outcome.is_ok() {
            outcome = value.with_kept(|kept, first| files.read_tensor(kept, first, &weight.placement));
        }
    });
    model.visit_buffers(&mut |buffer| {
        if outcome.is_ok() {
            outcome = files.read_tensor(&mut buffer.value, 0, &buffer.placement);
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
    let files = TensorFiles::open(source, TensorKind::Optimizer)?;
    optimizer.visit(model, Access::Write, |weight, mut tile| {
        let (placement, range) = (&weight.placement, tile.elements.clone());
        for (number, strip) in Strip::ALL.into_iter().enumerate().take(tile.strips.count) {
            let put = |first: usize, bytes: &[u8]| tile.write(number, first, &f32s(bytes));
            files.read((prefix(strip), Dtype::F32), placement, &range, put)?;
        }
        Ok(())
    })
}

/// The files of one kind.
struct TensorFiles {
    folder: PathBuf,
    set: FileSet,
}

impl TensorFiles {
    fn open(source: &OpenCheckpoint, kind: TensorKind) -> Result<TensorFiles, Error> {
        Ok(TensorFiles { folder: source.folder.clone(), set: source.tensors(kind)? })
    }

    /// Fills a tensor with the elements of a local weight from `first` on.
    fn read_tensor(&self, tensor: &mut Tensor, first: usize, placement: &Placement) -> Result<(), Error> {
        let (dtype, range) = (tensor.dtype(), first..first + tensor.len());
        self.read(("", dtype), placement, &range, |local, bytes| match dtype {
            Dtype::F32 => put_f32s(&mut tensor.f32s_mut()[local - first..], bytes),
            Dtype::Bf16 => put_bf16s(&mut tensor.bf16s_mut()[local - first..], bytes),
            Dtype::U32 => unreachable!("weights are numbers"),
        })
    }

    /// Hands elements `range` of a local weight to `put`, run by run: the first of them, and bytes.
    fn read(
        &self,
        (prefix, dtype): (&str, Dtype),
        placement: &Placement,
        range: &Range<usize>,
        mut put: impl FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        for piece in &placement.pieces {
            let (number, entry) = self.entry(&format!("{prefix}{}", piece.name), piece, dtype)?;
            // Not kept open: there may be more files than a process may have.
            let path = self.folder.join(&self.set.files[number].0);
            let file = File::open(&path).map_err(Error::io("open", &path))?;
            for run in piece.runs().filter_map(|run| run.within(range)) {
                let mut bytes = vec![0; run.len * dtype.bytes()];
                let start = entry.start + (run.global * dtype.bytes()) as u64;
                file.read_exact_at(&mut bytes, start).map_err(Error::io("read", &path))?;
                if !are_finite(dtype, &bytes) {
                    let reason = format!("{prefix}{} has values that are no finite numbers", piece.name);
                    return Err(Error::damaged(&path, reason));
                }
                put(run.local, &bytes);
            }
        }
        Ok(())
    }

    /// The tensor `name`, which must be what the piece is of, and the number of its file.
    fn entry(&self, name: &str, piece: &Piece, dtype: Dtype) -> Result<(usize, &TensorEntry), Error> {
        let path = || path_of(&self.folder, &self.set);
        let mismatch = |reason| Error::Mismatch { path: path(), reason };
        let (file, entry) = self.set.entry(name).ok_or_else(|| mismatch(format!("it has no tensor {name}")))?;
        if entry.shape != piece.shape || entry.dtype != dtype {
            let found = format!("{:?} {:?}", entry.dtype, entry.shape);
            return Err(mismatch(format!("{name} is {found} there, {dtype:?} {:?} in the model", piece.shape)));
        }
        Ok((file, entry))
    }
}

/// Whether elements as they are in a file are neither infinite nor NaN: training never writes such.
fn are_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().all(|&word| f32::from_le_bytes(word).is_finite()),
        Dtype::Bf16 => bytes.as_chunks().0.iter().all(|&half| bf16::from_le_bytes(half).is_finite()),
        Dtype::U32 => true,
    }
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
