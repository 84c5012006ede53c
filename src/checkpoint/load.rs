//! Reading a checkpoint into a model on any mesh: each rank reads the tensors it holds.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use guildhall_tensor::{Dtype, Tensor};
use half::bf16;

use super::Error;
use super::layout::FileLayout;
use super::manifest::Manifest;
use super::save::{MODEL, OPTIMIZER};
use crate::optim::Optimizer;
use crate::parallel::{Parameters, Piece, Placement};

/// An opened checkpoint.
#[derive(Clone, Debug)]
pub struct Source {
    pub folder: PathBuf,
    pub manifest: Manifest,
}

/// Opens a checkpoint and compares every file with its checksum.
///
/// # Errors
/// A folder that is no checkpoint, or a damaged file.
pub fn open(folder: &Path) -> Result<Source, Error> {
    let manifest = Manifest::read(folder)?;
    manifest.verify(folder)?;
    Ok(Source { folder: folder.to_owned(), manifest })
}

/// Fills the model's parameters and buffers.
///
/// # Errors
/// A file that cannot be read or does not fit the model.
pub fn load_model(source: &Source, model: &mut dyn Parameters) -> Result<(), Error> {
    let file = TensorFile::open(source.folder.join(MODEL))?;
    visit_all(model, &mut |weight, _| file.read(weight.parameter.value_mut(), "", &weight.placement))?;
    let mut outcome = Ok(());
    model.visit_buffers(&mut |buffer| {
        if outcome.is_ok() {
            outcome = file.read(&mut buffer.value, "", &buffer.placement);
        }
    });
    outcome
}

/// Fills the optimizer's state.
///
/// # Errors
/// As [`load_model`].
pub fn load_optimizer(source: &Source, model: &mut dyn Parameters, optimizer: &mut Optimizer) -> Result<(), Error> {
    let file = TensorFile::open(source.folder.join(OPTIMIZER))?;
    let slots = &mut optimizer.slots;
    visit_all(model, &mut |weight, index| {
        let slot = &mut slots[index];
        file.read(&mut slot.m, "m/", &weight.placement)?;
        file.read(&mut slot.v, "v/", &weight.placement)?;
        match &mut slot.master {
            Some(master) => file.read(master, "master/", &weight.placement),
            None => Ok(()),
        }
    })
}

/// Visits weights until one fails.
fn visit_all(
    model: &mut dyn Parameters,
    f: &mut dyn FnMut(&mut crate::parallel::Weight, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut outcome, mut index) = (Ok(()), 0);
    model.visit(&mut |weight| {
        if outcome.is_ok() {
            outcome = f(weight, index);
        }
        index += 1;
    });
    outcome
}

struct TensorFile {
    path: PathBuf,
    file: File,
    layout: FileLayout,
}

impl TensorFile {
    fn open(path: PathBuf) -> Result<TensorFile, Error> {
        let layout = FileLayout::read(&path)?;
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        Ok(TensorFile { path, file, layout })
    }

    fn read(&self, tensor: &mut Tensor, prefix: &str, placement: &Placement) -> Result<(), Error> {
        for piece in &placement.pieces {
            let bytes = self.piece(&format!("{prefix}{}", piece.name), piece, tensor.dtype())?;
            let range = piece.offset..piece.offset + piece.len();
            match tensor.dtype() {
                Dtype::F32 => {
                    for (to, from) in tensor.f32s_mut()[range].iter_mut().zip(bytes.chunks_exact(4)) {
                        *to = f32::from_le_bytes(from.try_into().expect("four bytes"));
                    }
                }
                Dtype::Bf16 => {
                    for (to, from) in tensor.bf16s_mut()[range].iter_mut().zip(bytes.chunks_exact(2)) {
                        *to = bf16::from_le_bytes(from.try_into().expect("two bytes"));
                    }
                }
            }
        }
        Ok(())
    }

    fn piece(&self, name: &str, piece: &Piece, dtype: Dtype) -> Result<Vec<u8>, Error> {
        let mismatch = |reason| Error::Mismatch { path: self.path.clone(), reason };
        let entry = self.layout.entries.get(name).ok_or_else(|| mismatch(format!("it has no tensor {name}")))?;
        if entry.shape != piece.shape || entry.dtype != dtype {
            let found = format!("{:?} {:?}", entry.dtype, entry.shape);
            return Err(mismatch(format!("{name} is {found} there, {dtype:?} {:?} in the model", piece.shape)));
        }
        let mut bytes = vec![0; entry.bytes() as usize];
        self.file.read_exact_at(&mut bytes, entry.start).map_err(Error::io("read", &self.path))?;
        Ok(bytes)
    }
}
