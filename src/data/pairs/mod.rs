//! Parallel text: pairs of files, tables of pairs, translation memories, and the translators' catalogues of programs.
//!
//! ```text
//!  PairSpec -> list (which files, which languages) -> open: records of one file -> Cleaner -> TextPair
//!
//!  record: lines of two files, a row of TSV, JSONL or Parquet, a unit of TMX, a message of .po or .mo; or, for tasks
//!          that read one text, a text of one language as a pair with itself
//! ```
//!
//! A record gives a pair or the reason to leave it out, which is counted; what the user has to mend is an error.
//! Readers are iterators that give the same each time, so a corpus may be surveyed first and written then.
//! [`MessageKeys`] says which texts are held out, by the text alone: whoever asks with the side that all languages
//! share keeps a sentence on one side in all of them.

pub mod catalogues;
mod clean;
mod held_out;
mod jsonl;
mod lines;
mod list;
mod markers;
mod markup;
mod parquet;
mod read;
mod skips;
mod texts;
mod tmx;
mod transcode;
mod tsv;

pub use clean::{Cleaner, Cleaning};
pub use held_out::MessageKeys;
pub use list::{PairFile, PairLayout, PairListing, PairSpec, list};
pub use read::{DirectionSummary, PairReader, PairSummary, TextPair, open, read_all};
pub use skips::{SkipReason, Skips};

use super::error::Error;

/// Two texts as they are stored.
type Texts = [String; 2];

/// What one record gave.
type FoundPair = Result<Texts, SkipReason>;

/// The records of a file, until one is an error.
type PairRecords<'a> = Box<dyn Iterator<Item = Result<FoundPair, Error>> + 'a>;
