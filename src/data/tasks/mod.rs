//! Rows of pairs of texts: what an encoder reads and a decoder writes, packed, corrupted where a task says so, and mixed
//! in given proportions.
//!
//! ```text
//!  pairs of texts -> Gatherer (texts by language, held-out messages)
//!
//!  documents of a split + pairs of them -> PairRows (several pairs a row, padded) -> Mixture -> batch
//!                                            reading the other text, one's own corrupted, or nothing
//! ```
//!
//! All of it is index arithmetic and draws by index, as everything behind the shards is.

mod corrupt;
mod gather;
mod mixture;
mod pair_rows;

pub use corrupt::{Corruption, TokenWords};
pub use gather::{Bitext, GatheredTexts, Gatherer, LanguageTexts};
pub use mixture::{BLOCK, Component, Mixture};
pub use pair_rows::{PairRows, PairTags, TextToRead};
