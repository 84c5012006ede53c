#![no_main]
//! `tokenizer.json`: what it makes of a text can be decoded, or is an error.

use std::fs;

use guildhall::data::Tokenizer;

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::scratch();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, input).expect("a file");
    let Ok(tokenizer) = Tokenizer::open(&path, None) else { return };
    for text in ["", "a token", "größer 漢字\n\t", "</s><|endoftext|>"] {
        if let Ok(tokens) = tokenizer.encode(text) {
            assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocab()));
            let _ = tokenizer.decode(&tokens);
        }
    }
});
