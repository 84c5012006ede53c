//! `manifest.json`: what a checkpoint is and how to tell that it is whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;

/// The manifest's file name. It is written last.
pub(super) const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 1;

/// How far the run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps taken.
    pub step: u64,
    /// Valid tokens trained on.
    pub tokens: u64,
    /// Wall-clock seconds of training.
    pub seconds: f64,
}

/// A checkpoint's description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    #[serde(flatten)]
    pub progress: Progress,
    /// Of the prepared data, whose order resuming continues.
    pub data_fingerprint: String,
    /// sha256 of every other file, by name.
    pub files: BTreeMap<String, String>,
    /// sha256 of this file without these digits.
    sha256: String,
}

impl Manifest {
    pub(super) fn new(progress: Progress, data_fingerprint: String, files: BTreeMap<String, String>) -> Manifest {
        Manifest { format: FORMAT, progress, data_fingerprint, files, sha256: String::new() }
    }

    /// The file's contents, with their own checksum.
    pub(super) fn sealed(mut self) -> Vec<u8> {
        let text = |manifest: &Manifest| serde_json::to_vec_pretty(manifest).expect("a manifest is plain JSON");
        self.sha256 = hexadecimal(Sha256::digest(text(&self)));
        text(&self)
    }

    /// # Errors
    /// A folder without a manifest, or one of another format.
    pub fn read(folder: &Path) -> Result<Manifest, Error> {
        let path = folder.join(MANIFEST);
        let not = |reason: String| Error::NotACheckpoint { path: folder.to_owned(), reason };
        let text = std::fs::read_to_string(&path).map_err(|error| not(format!("{}: {error}", path.display())))?;
        let manifest: Manifest =
            serde_json::from_str(&text).map_err(|error| Error::damaged(&path, error.to_string()))?;
        if hexadecimal(Sha256::digest(text.replacen(&manifest.sha256, "", 1))) != manifest.sha256 {
            return Err(Error::damaged(&path, "its contents differ from its checksum"));
        }
        if manifest.format != FORMAT {
            return Err(not(format!("it has format {}, this program reads {FORMAT}", manifest.format)));
        }
        Ok(manifest)
    }

    /// Compares every file with its checksum.
    ///
    /// # Errors
    /// The first file that is missing or differs.
    pub fn verify(&self, folder: &Path) -> Result<(), Error> {
        for (name, expected) in &self.files {
            let path = folder.join(name);
            if sha256(&path)? != *expected {
                return Err(Error::damaged(&path, "its contents differ from its checksum"));
            }
        }
        Ok(())
    }
}

/// The sha256 of a file, in hexadecimal, as `sha256sum` prints it.
pub(super) fn sha256(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(Error::io("read", path))? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    Ok(hexadecimal(hasher.finalize()))
}

fn hexadecimal(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
