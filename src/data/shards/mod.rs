//! Tokens on disk: shards of fixed length and the ends of the documents.
//!
//! A split is one long sequence of tokens, every document followed by its end of text. It is cut into files
//! of `shard_tokens` tokens each, so the file and offset of a position are a division. Files are read by
//! position and not mapped into memory, which would be unsafe: a file cut short by someone else would be a
//! crash instead of an error.
//!
//! ```text
//! train-00000.tokens  u16 or u32, little-endian      train-00001.tokens ...
//! train.documents     u64, little-endian: the position after each document, end of text included
//! train.given         two u64 each, little-endian: stretches of tokens that are not predicted; of conversations alone
//! ```

mod read;
mod write;

pub use read::SplitReader;
pub(crate) use write::{SplitWriter, WriterShape};
