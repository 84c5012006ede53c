//! From text on disk to batches of tokens.
//!
//! ```text
//!  data.sources -> sources (which files) -> documents (their texts) -> survey (what there is)
//!                                                                        |
//!            tokenizer <- sample of the text ----------------------------+
//!                |                                                       v
//!                +----> prepare: tokenise, split, write ------------> shards (folder on disk)
//!
//!  shards -> corpus -> pack (rows of a split) -> shuffle (order) -> batch (shares) -> loader
//! ```
//!
//! A [`Source`] of packed rows predicts the next token; [`Masked`] over it predicts hidden ones. Rows of pairs of texts, and
//! mixtures of sources, are in [`tasks`]. Of conversations ([`chat`]) only the answers are predicted. Everything after the shards is index arithmetic over positions, so the state of a
//! loader is the number of the step.
//!
//! Parallel text has readers of its own ([`pairs`]), which end in pairs of texts.
//!
//! Words: a *document* is a plain file, a line of JSONL or a row of Parquet, or a conversation in one of these; a *split* is the part of the
//! documents used for training or the part held out; a *row* is `seq` consecutive tokens of a split.

pub mod batch;
pub mod chat;
mod config;
pub mod corpus;
mod documents;
mod error;
mod expand;
mod fingerprint;
mod folder;
mod guard;
mod hub;
pub mod loader;
mod manifest;
mod mask;
pub mod pack;
pub mod pairs;
pub mod prepare;
pub mod shards;
pub mod shuffle;
pub mod source;
pub mod sources;
mod splits;
mod stages;
mod survey;
pub mod tasks;
mod tokenize;
pub mod tokenizer;

pub use batch::{Batch, BatchPlan, Counted, eval_batches};
pub use chat::{ChatEncoder, ChatTemplate, ConversationRows};
pub use config::{ChatLoss, Config, SourceSpec, SourceTable, TaskKind, TaskTable};
pub use corpus::{Corpus, CorpusCheck};
pub use error::Error;
pub use expand::expand;
pub use guard::keep_guarded_panics_quiet;
pub use loader::{Loader, StepBatches};
pub use manifest::{ChatEntry, CorpusManifest, GivenEntry, SkippedFiles, SourceEntry, SplitEntry};
pub use mask::Masked;
pub use pack::PackedRows;
pub use prepare::{is_prepared, prepare};
pub use shuffle::Permutation;
pub use source::{IGNORE, PAD, Row, Source};
pub use splits::Split;
pub use stages::PrepareStage;
pub use tokenizer::Tokenizer;
