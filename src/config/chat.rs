//! What a recipe with conversations may say.

use super::Config;
use super::rules::{Rule, Unused, conflict};
use crate::limits::Finding;

pub(super) const RULES: &[Rule] =
    &[Rule { key: "data.sources", reads: &["data.sources", "model.family"], check: answers_follow }];

pub(super) const UNUSED: &[Unused] = &[
    Unused { key: "data.chat_template", reads: &["data.sources"], because: there_is_no_chat },
    Unused { key: "data.chat_date", reads: &["data.sources"], because: there_is_no_chat },
    Unused { key: "data.chat_loss", reads: &["data.sources"], because: there_is_no_chat },
    Unused {
        key: "data.held_out",
        reads: &["data.sources"],
        because: |config| config.data.names_held_out().then_some("a source names the split that is held out"),
    },
];

fn answers_follow(config: &Config) -> Option<Finding> {
    if !config.data.has_conversations() || config.model.is_causal() {
        return None;
    }
    let family = config.model.family.name();
    let wrong = format!("model.family = {family:?} fills gaps, and answers follow what they answer");
    conflict(wrong, "name a causal family, or leave out `chat = true`")
}

fn there_is_no_chat(config: &Config) -> Option<&'static str> {
    (!config.data.has_conversations()).then_some("no source holds conversations (chat = true)")
}
