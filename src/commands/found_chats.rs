//! What is said of a corpus of conversations: how many there are, what of them is learned, and what was left out.

use crate::data::{ConversationRows, CorpusManifest, Source, Split, SplitEntry};

/// A line for what there is, and one for what was left out.
pub(super) fn told(manifest: &CorpusManifest) -> Vec<String> {
    let Some(chat) = &manifest.chat else { return Vec::new() };
    let learned = |split: &SplitEntry| split.tokens - split.given.as_ref().map_or(0, |given| given.tokens);
    let mut lines = vec![format!(
        "chats    {} conversations: {} tokens to learn and {} held out, the others are given",
        chat.conversations,
        learned(&manifest.train),
        learned(&manifest.held_out)
    )];
    let mut left_out = |count: u64, why: &str| {
        if count > 0 {
            lines.push(format!("left out {count} conversations {why}"));
        }
    };
    left_out(chat.without_answers, "in which nobody answers");
    left_out(chat.forged, "with the name of a special token in a message, which this tokenizer cannot write as text");
    lines
}

/// A line for the conversations that are longer than a row.
pub(super) fn longer(rows: &ConversationRows, split: Split) -> Vec<String> {
    let (longer, unanswered, seq) = (rows.longer(), rows.unanswered(), rows.seq());
    let mut lines = Vec::new();
    if longer > 0 {
        lines.push(format!(
            "longer   {longer} conversations of the {split} split have more than model.seq = {seq} tokens: of these the first \
             {seq} are learned"
        ));
    }
    if unanswered > 0 {
        lines.push(format!(
            "left out {unanswered} conversations of the {split} split without an answer in their first {seq} tokens"
        ));
    }
    lines
}
