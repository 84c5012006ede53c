//! The families that can be converted, one table each: names of tensors, keys of `config.json`, and what a recipe says
//! besides. A family is added by a file with its table and a line below.

mod deepseek_v3;
mod gpt2;
mod gpt_oss;
mod llama;
mod m2m;
mod switch;

use super::keys::{ForeignKey, Plain};
use super::map::MapRule;
use super::moe_layers::LayerKeys;

/// A family as Hugging Face's transformers has it.
#[derive(Debug)]
pub(super) struct ForeignFamily {
    /// `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// The class that is named in `architectures`.
    pub(super) architecture: &'static str,
    /// The family here, by its name in recipes.
    pub(super) family: &'static str,
    /// Those that it shares with others, and its own.
    pub(super) keys: &'static [&'static [ForeignKey]],
    /// Of the recipe, what every model of the family has.
    pub(super) recipe: &'static [(&'static str, Plain)],
    /// How `config.json` says which layers have experts; absent for dense models.
    pub(super) layers: Option<LayerKeys>,
    /// The first rule that fits a name is its.
    pub(super) map: &'static [MapRule],
    /// What names begin with that may be absent.
    pub(super) prefix: Option<&'static str>,
    /// Tensors that are another's elements once more, where the head is tied.
    pub(super) twins: &'static [(&'static str, &'static str)],
    /// Tensors that are no weights.
    pub(super) idle: &'static [&'static str],
}

impl ForeignFamily {
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static ForeignKey> + use<> {
        self.keys.iter().copied().flatten()
    }
}

pub(super) const ALL: &[&ForeignFamily] = &[
    &llama::MIXTRAL,
    &llama::LLAMA,
    &llama::OLMOE,
    &llama::QWEN2_MOE,
    &llama::QWEN3_MOE,
    &deepseek_v3::DEEPSEEK_V3,
    &gpt_oss::GPT_OSS,
    &gpt2::GPT2,
    &m2m::M2M,
    &m2m::NLLB_MOE,
    &switch::SWITCH,
];

/// The family of a `model_type`.
pub(super) fn of(model_type: &str) -> Option<&'static ForeignFamily> {
    ALL.iter().copied().find(|family| family.model_type == model_type)
}

/// The names of all, for messages.
pub(super) fn names() -> String {
    ALL.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ")
}
