//! The `[lora]` section of a recipe: which matrices get adapters, and how large ones.

use std::fmt;

use serde::de::value::EnumAccessDeserializer;
use serde::de::{Deserializer, EnumAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Adapters, which are trained instead of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The inner width of an adapter.
    pub rank: usize,
    /// What the product of the factors is multiplied by, times the rank; absent means the rank.
    #[serde(default)]
    pub alpha: Option<f32>,
    #[serde(default)]
    pub targets: Targets,
    /// Whether every matrix of every routed expert has one too.
    #[serde(default)]
    pub experts: bool,
}

/// Projections, by their names in checkpoints, which are those of Hugging Face's Llama and Mixtral.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Every one that the model has.
    All,
    QProj,
    KProj,
    VProj,
    OProj,
    /// Of latent attention: to a narrow vector for queries, and from it.
    QAProj,
    QBProj,
    /// The same for keys and values.
    KvAProjWithMqa,
    KvBProj,
    /// Of distances, in Transformer-XL.
    RProj,
    GateProj,
    UpProj,
    DownProj,
    /// The first product of a feed-forward that is not gated.
    FcIn,
    FcOut,
}

impl Target {
    const NAMES: [&str; 15] = [
        "all",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "r_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "fc_in",
        "fc_out",
    ];

    /// The name in recipes, and but for `all` the last part of tensors' names.
    pub fn name(self) -> &'static str {
        Target::NAMES[self as usize]
    }
}

/// The projections that get adapters: one word, or a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets(pub Vec<Target>);

impl Default for Targets {
    fn default() -> Targets {
        Targets(vec![Target::All])
    }
}

impl Config {
    pub fn alpha(&self) -> f32 {
        self.alpha.unwrap_or(self.rank as f32)
    }

    /// What the product of the factors is multiplied by.
    pub fn scale(&self) -> f32 {
        self.alpha() / self.rank as f32
    }

    /// Whether projections of this name get adapters.
    pub fn targets(&self, name: &str) -> bool {
        let is_one = Target::NAMES[1..].contains(&name);
        is_one && self.targets.0.iter().any(|target| *target == Target::All || target.name() == name)
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [Target::All] => Target::All.serialize(serializer),
            targets => targets.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Targets, D::Error> {
        struct WordOrList;

        impl<'de> Visitor<'de> for WordOrList {
            type Value = Targets;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a projection, or a list of them")
            }

            fn visit_enum<A: EnumAccess<'de>>(self, word: A) -> Result<Targets, A::Error> {
                Ok(Targets(vec![Target::deserialize(EnumAccessDeserializer::new(word))?]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Targets, A::Error> {
                let mut targets = Vec::new();
                while let Some(target) = list.next_element()? {
                    targets.push(target);
                }
                Ok(Targets(targets))
            }
        }

        deserializer.deserialize_enum("Targets", &Target::NAMES, WordOrList)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_recipes() {
        for name in Target::NAMES {
            let target: Target = toml::Value::from(name).try_into().expect("a name");
            assert_eq!(target.name(), name);
        }
    }
}
