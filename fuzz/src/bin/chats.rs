#![no_main]
//! Conversations and the chat template that writes them, all the way to tokens on disk.

use guildhall::data::{Config, prepare};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let at = |name: &str| folder.path().join(name);
    let sources = serde_json::json!([{ "path": at("chats.jsonl"), "chat": true }]);
    let config = serde_json::json!({ "sources": sources, "tokenizer": at("tokenizer.json"), "cache": at("cache") });
    let config: Config = serde_json::from_value(config).expect("three keys of `[data]`");
    let _ = prepare(&config, 1 << 16, &|_| {});
});
