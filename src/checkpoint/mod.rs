//! Checkpoints: global tensors in safetensors files, written beside and renamed, checked when read.
//!
//! ```text
//!  <run>/checkpoints/step-000200/     whole, or not there
//!      model.safetensors              every weight under its global name
//!      optimizer.safetensors          m/<name>, v/<name>, and master/<name> for 16-bit weights
//!      config.toml  tokenizer.json    what is needed to use it alone
//!      manifest.json                  step, progress, sha256 of every file and of itself
//!  <run>/checkpoints/latest -> step-000200
//! ```
//!
//! The mesh that wrote a checkpoint leaves no trace: a file's header is a function of the model alone, and each rank
//! writes its own tensors at the offsets the header gives. Two equal states make files that are equal byte for byte.

mod collect;
mod cut;
mod element;
mod error;
mod file_set;
mod folder;
mod held;
mod helper;
mod layout;
mod load;
mod manifest;
mod members;
mod packed;
mod retype;
mod rows;
mod save;
mod stream;
mod tensor_files;
mod writer;

pub use collect::snapshot_bytes;
pub use cut::TensorCut;
pub use element::ElementType;
pub use error::Error;
pub use file_set::{FileSet, TensorKind, check_within};
pub use folder::{CHECKPOINTS, LATEST, link_latest, newest, set_damaged_aside, step_folder};
pub use helper::{DiskWatch, WritePace};
pub use layout::{FileLayout, TensorEntry, TensorList};
pub use load::{
    NewestWhole, OpenCheckpoint, check_fit, load_model, load_optimizer, open, open_found_whole, open_newest_whole,
};
pub use manifest::{CheckpointManifest, TrainingProgress};
pub use packed::{PackedWeight, WeightPacking};
pub use retype::retyped;
pub use save::{Destination, Extra, SlowDisk, WriteProgress, Writing, export, save};
pub use stream::{NewFolder, write_tensors};
pub use tensor_files::{LowRankSum, TensorFiles, TensorView};
