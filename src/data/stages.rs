//! What preparing a corpus goes through, as it is told, and the sizes of pieces in which it is done.

/// What is being done, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrepareStage {
    /// Another process prepares the same corpus.
    Waiting,
    /// Reading every file once.
    Surveying { files_done: usize, files: usize },
    /// Training a tokenizer on a sample of this size.
    TrainingTokenizer { sample_bytes: u64 },
    /// Turning text into tokens.
    Tokenizing { bytes_done: u64, bytes: u64 },
}

/// The sizes of pieces in which work is done; they bound memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Longest stretch of text tokenised at once.
    pub(super) part_bytes: usize,
    /// Text tokenised between two writes, by all threads together.
    pub(super) chunk_bytes: usize,
    /// Text a tokenizer is trained on, for each entry of its vocabulary.
    pub(super) sample_bytes_per_entry: usize,
    pub(super) shard_tokens: u64,
}

pub(super) const LIMITS: Limits =
    Limits { part_bytes: 1 << 18, chunk_bytes: 1 << 24, sample_bytes_per_entry: 1 << 10, shard_tokens: 1 << 26 };
