//! Models of this program become models that Hugging Face's transformers reads, and the other way round.
//!
//! ```text
//!   config.json ── keys of the family ──► recipe ──► names and shapes here ──► map of the family ──► views of the files there
//!   config.toml ◄── the same table ───── recipe ◄── names and shapes here ◄── the same table
//! ```
//!
//! A family is one table (`families/`): names of tensors with the cuts that lead from one layout to the other, and keys of
//! `config.json`. Either way tensors are read at their offsets and written one after the other, so that of a model one
//! tensor is in memory at a time.

mod audit;
mod error;
mod export;
mod families;
mod folder;
mod foreign_config;
mod keys;
mod map;
mod moe_layers;
mod peft;
#[cfg(test)]
mod published;
mod quantization;
mod recipe_draft;
mod write;
mod written_config;

pub use audit::{AuditReport, TensorSum, audit, compare};
pub use error::Error;
pub use folder::{ModelFolder, ModelKind, kind};
pub use peft::{ExportedAdapters, export_adapters};
pub use write::{Converted, convert};
