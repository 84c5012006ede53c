#![no_main]
//! Prepared text: the manifest, the tokenizer, tokens and the ends of documents.

use guildhall::data::{Corpus, CorpusCheck, Source, Split};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let Ok(corpus) = Corpus::open_with(folder.path(), CorpusCheck::Sizes) else { return };
    let Ok(rows) = corpus.rows(Split::Train, 4) else { return };
    for row in 0..rows.len().min(64) {
        let _ = rows.get(row, 0);
    }
});
