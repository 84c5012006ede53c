#![no_main]
//! Text to train on: plain, JSONL, Parquet, compressed or not, all the way to tokens on disk and rows of them.

use guildhall::data::{Config, Source, Split, prepare};

/// The smallest that holds every byte.
const VOCAB: usize = 258;

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let config = serde_json::json!({ "sources": [folder.path()], "cache": folder.path().join("cache") });
    let config: Config = serde_json::from_value(config).expect("two keys of `[data]`");
    let Ok(corpus) = prepare(&config, VOCAB, &|_| {}) else { return };
    let Ok(rows) = corpus.rows(Split::Train, 4) else { return };
    for row in 0..rows.len().min(64) {
        rows.get(row, 0).expect("tokens that were just written");
    }
});
