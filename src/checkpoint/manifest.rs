//! `manifest.json`: what a checkpoint is and how to tell that it is whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;
use super::error::all_of;
use super::file_set::is_plain;

/// The manifest's file name. It is written last.
pub(super) const MANIFEST: &str = "manifest.json";
/// The format that is written, and the oldest that is read. `docs/checkpoints.md` says what each is.
const FORMAT: u32 = 3;
const OLDEST: u32 = 1;

/// How far the run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingProgress {
    /// Optimizer steps taken.
    pub step: u64,
    /// Valid tokens trained on.
    pub tokens: u64,
    /// Wall-clock seconds of training.
    pub seconds: f64,
    /// The losses that thresholds of condensation follow: of the first step, of the last, and smoothed. Absent if
    /// nothing follows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_trend: Option<[f64; 3]>,
}

/// What every manifest says, of whatever format.
#[derive(Deserialize)]
struct Stated {
    format: Option<u32>,
}

/// A checkpoint's description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointManifest {
    /// Of the files, the names and shapes of tensors, and the keys of the recipe.
    pub format: u32,
    #[serde(flatten)]
    pub progress: TrainingProgress,
    /// Of the prepared data, whose order resuming continues.
    pub data_fingerprint: String,
    /// sha256 of every other file, by name.
    pub files: BTreeMap<String, String>,
    /// sha256 of this file without these digits.
    sha256: String,
}

impl CheckpointManifest {
    pub(super) fn new(
        progress: TrainingProgress,
        data_fingerprint: String,
        files: BTreeMap<String, String>,
    ) -> CheckpointManifest {
        CheckpointManifest { format: FORMAT, progress, data_fingerprint, files, sha256: String::new() }
    }

    /// The file's contents, with their own checksum.
    pub(super) fn sealed(mut self) -> Vec<u8> {
        let text =
            |manifest: &CheckpointManifest| serde_json::to_vec_pretty(manifest).expect("a manifest is plain JSON");
        self.sha256 = hexadecimal(Sha256::digest(text(&self)));
        text(&self)
    }

    /// # Errors
    /// A folder without a manifest, or one of another format.
    pub fn read(folder: &Path) -> Result<CheckpointManifest, Error> {
        let path = folder.join(MANIFEST);
        let not = |reason: String| Error::NotACheckpoint { path: folder.to_owned(), reason };
        let is_there = |name: &str| folder.join(name).exists();
        if !path.exists() && is_there("config.json") && !is_there("config.toml") {
            return Err(not("it is a model of Hugging Face, of which `guildhall convert` makes one".to_owned()));
        }
        let read = || io::read_to_string(regular(&path)?);
        let text = read().map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::InvalidData | ErrorKind::Other => {
                not(format!("{}: {error}", path.display()))
            }
            // It may be whole all the same.
            _ => Error::io("read", &path)(error),
        })?;
        let stated: Stated = serde_json::from_str(&text).map_err(|error| Error::damaged(&path, error.to_string()))?;
        // First: what another format says need not make sense in this one.
        match stated.format {
            None => return Err(not(format!("{} names no format", path.display()))),
            Some(OLDEST..=FORMAT) => {}
            Some(format) => return Err(Error::Format { path: folder.to_owned(), format, reads: (OLDEST, FORMAT) }),
        }
        let manifest: CheckpointManifest =
            serde_json::from_str(&text).map_err(|error| Error::damaged(&path, error.to_string()))?;
        if hexadecimal(Sha256::digest(text.replacen(&manifest.sha256, "", 1))) != manifest.sha256 {
            return Err(Error::damaged(&path, "its contents differ from its checksum"));
        }
        manifest.check(&text).map_err(|reason| Error::damaged(&path, reason))?;
        Ok(manifest)
    }

    /// What no program of this format has written is not believed, whatever its checksum.
    fn check(&self, text: &str) -> Result<(), String> {
        let (told, known) = (serde_json::from_str::<serde_json::Value>(text), serde_json::to_value(self));
        if told.ok() != known.ok() {
            return Err("it says more than this program understands".to_owned());
        }
        if !(self.progress.seconds >= 0.0 && self.progress.seconds.is_finite()) {
            return Err(format!("it took {} seconds", self.progress.seconds));
        }
        let strange = self.files.keys().find(|name| !is_plain(name));
        strange.map_or(Ok(()), |name| Err(format!("it lists {name:?}, which is no file of this folder")))
    }

    /// Compares every file with its checksum.
    ///
    /// # Errors
    /// Every file that is missing or differs.
    pub fn verify(&self, folder: &Path) -> Result<(), Error> {
        let checked = self.files.iter().map(|(name, expected)| {
            let path = folder.join(name);
            match sha256(&path)? == *expected {
                true => Ok(()),
                false => Err(Error::damaged(&path, "its contents differ from its checksum")),
            }
        });
        all_of(checked).map(drop)
    }
}

/// Opens a file that has an end: what is read from a pipe or a device may have none.
pub(super) fn regular(path: &Path) -> io::Result<File> {
    match std::fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// The sha256 of a file, in hexadecimal, as `sha256sum` prints it.
fn sha256(path: &Path) -> Result<String, Error> {
    let mut file = regular(path).map_err(Error::io("open", path))?;
    let mut hasher = Hasher::default();
    hasher.read(&mut file, usize::MAX).map_err(Error::io("read", path))?;
    Ok(hasher.finish())
}

/// A checksum in the making.
#[derive(Default)]
pub(super) struct Hasher {
    sha256: Sha256,
    buffer: Vec<u8>,
}

impl Hasher {
    /// Takes bytes that are at hand.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
    }

    /// Takes up to `limit` bytes from where the file is; returns how many there were.
    pub(super) fn read(&mut self, file: &mut File, limit: usize) -> io::Result<usize> {
        self.buffer.resize(1 << 20, 0);
        let mut taken = 0;
        while taken < limit {
            let wanted = self.buffer.len().min(limit - taken);
            match file.read(&mut self.buffer[..wanted])? {
                0 => break,
                n => {
                    self.sha256.update(&self.buffer[..n]);
                    taken += n;
                }
            }
        }
        Ok(taken)
    }

    /// In hexadecimal, as `sha256sum` prints it.
    pub(super) fn finish(self) -> String {
        hexadecimal(self.sha256.finalize())
    }
}

fn hexadecimal(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
