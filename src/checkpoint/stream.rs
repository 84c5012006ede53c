//! Writing a folder of tensors one after the other, by one process: of what is written one tensor is in memory at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Error;
use super::file_set::{FileSet, TensorKind};
use super::folder::{begin_beside, partial_beside, publish_beside, sync_folder};
use super::layout::{FileLayout, TensorList};
use super::manifest::{CheckpointManifest, Hasher, MANIFEST, TrainingProgress};

/// A folder that does not exist yet, and what it is to hold.
#[derive(Debug)]
pub struct NewFolder<'a> {
    pub folder: &'a Path,
    pub kind: TensorKind,
    pub tensors: &'a TensorList,
    /// Most bytes of a file of tensors, unless one tensor has more.
    pub file_bytes: u64,
    /// Further files: name and contents.
    pub small: Vec<(String, Vec<u8>)>,
    /// What makes it a checkpoint of this program, at step 0: of which prepared data.
    pub fingerprint: Option<String>,
}

/// Writes a folder, with the elements that `produce` gives of each tensor as they are in a file. Either the folder is whole
/// or it has no such name.
///
/// # Errors
/// A folder that exists or cannot be written; what `produce` says.
///
/// # Panics
/// If `produce` gives more or fewer bytes than a tensor has.
pub fn write_tensors<E: From<Error>>(
    new: NewFolder,
    mut produce: impl FnMut(&str) -> Result<Vec<u8>, E>,
) -> Result<(), E> {
    let partial = partial_beside(new.folder)?;
    begin_beside(&partial, new.folder)?;
    let written = write_files(&new, &partial, &mut produce);
    if written.is_err() {
        // The error is what there is to tell; what cannot be removed is found by the next write.
        let _ = fs::remove_dir_all(&partial);
    }
    written?;
    Ok(publish_beside(&partial, new.folder)?)
}

fn write_files<E: From<Error>>(
    new: &NewFolder,
    partial: &Path,
    produce: &mut impl FnMut(&str) -> Result<Vec<u8>, E>,
) -> Result<(), E> {
    let set = FileSet::new(new.kind, new.tensors, new.file_bytes);
    let mut sums = BTreeMap::new();
    for (name, layout) in &set.files {
        sums.insert(name.clone(), write_file(&partial.join(name), layout, produce)?);
    }
    for (name, contents) in set.index.iter().chain(&new.small) {
        let mut file = SummedFile::create(partial.join(name))?;
        file.write(contents)?;
        sums.insert(name.clone(), file.finish()?);
    }
    if let Some(fingerprint) = &new.fingerprint {
        let progress = TrainingProgress { step: 0, tokens: 0, seconds: 0.0, loss_trend: None };
        let mut file = SummedFile::create(partial.join(MANIFEST))?;
        file.write(&CheckpointManifest::new(progress, fingerprint.clone(), sums).sealed())?;
        file.finish()?;
    }
    Ok(sync_folder(partial)?)
}

/// Writes the tensors of one file, and returns its checksum.
fn write_file<E: From<Error>>(
    path: &Path,
    layout: &FileLayout,
    produce: &mut impl FnMut(&str) -> Result<Vec<u8>, E>,
) -> Result<String, E> {
    let mut file = SummedFile::create(path.to_owned())?;
    file.write(&layout.header)?;
    for (name, entry) in &layout.entries {
        let bytes = produce(name)?;
        assert_eq!(bytes.len() as u64, entry.bytes(), "bytes of {name}");
        file.write(&bytes)?;
    }
    Ok(file.finish()?)
}

/// A file whose checksum is known when it is written.
struct SummedFile {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: Hasher,
}

impl SummedFile {
    fn create(path: PathBuf) -> Result<SummedFile, Error> {
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        Ok(SummedFile { path, file: BufWriter::new(file), hasher: Hasher::default() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.hasher.take(bytes);
        self.file.write_all(bytes).map_err(Error::io("write", &self.path))
    }

    /// On the disk; returns the checksum.
    fn finish(self) -> Result<String, Error> {
        let path = &self.path;
        let file = self.file.into_inner().map_err(|error| Error::io("write", path)(error.into_error()))?;
        file.sync_all().map_err(Error::io("sync", path))?;
        Ok(self.hasher.finish())
    }
}
