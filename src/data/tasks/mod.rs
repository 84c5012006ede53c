//! Rows of pairs of texts: what an encoder reads and a decoder writes, packed, corrupted where a task says so, and mixed
//! in given proportions.
//!
//! ```text
//!  data.tasks -> sources (which files) -> Gatherer (texts by language, held-out messages)
//!
//!    -> write: parts (task and direction), tokenizer with tags, shards by language, tables of pairs
//!
//!  documents of a split + pairs of them -> PairRows (several pairs a row, padded) -> Mixture -> batch
//!                                            reading the other text, one's own corrupted, or nothing
//! ```
//!
//! All of it is index arithmetic and draws by index, as everything behind the shards is.

mod corrupt;
mod gather;
mod index;
mod mixture;
mod pair_rows;
mod parts;
mod sources;
mod write;

pub use corrupt::{Corruption, TokenWords};
pub use gather::{Bitext, GatheredTexts, Gatherer, LanguageTexts};
pub use index::{LanguageEntry, LeftOutPart, PairIndex, PartEntry, ReadPairs};
pub use mixture::{BLOCK, Component, Mixture};
pub use pair_rows::{PairRows, PairTags, TextToRead};
pub use parts::{PartLabel, TaskPart, mixture, parts};
pub(super) use sources::TaskSources;
pub(super) use write::TaskTexts;
