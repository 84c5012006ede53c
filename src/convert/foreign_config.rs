//! `config.json`, read into a recipe. No key is ignored: one that no table knows is refused.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::Error;
use super::families::{self, ForeignFamily};
use super::keys::{COMMON, ForeignKey, KeyMeaning, Plain};
use super::moe_layers::{recipe_value, stacks};
use super::quantization::{QUANTIZATION, packing};
use super::recipe_draft::RecipeDraft;
use super::written_config::built;
use crate::checkpoint::WeightPacking;
use crate::config::{self, Config};

/// The name of the file.
pub(super) const CONFIG: &str = "config.json";
/// The largest that is believed.
const BYTES_MAX: u64 = 4 << 20;

/// A `config.json`.
#[derive(Debug)]
pub(super) struct ForeignConfig {
    path: PathBuf,
    pub(super) family: &'static ForeignFamily,
    /// How some of the weights are packed.
    pub(super) packing: Option<WeightPacking>,
    /// By name, with points between objects within objects.
    values: BTreeMap<String, Value>,
}

/// A JSON object from a file of no great length.
pub(super) fn read_json(path: &Path) -> Result<Map<String, Value>, Error> {
    let bytes = read_small(path)?;
    let wrong = |reason: String| Error::Json { path: path.to_owned(), reason };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(wrong("it is no object".to_owned())),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn read_small(path: &Path) -> Result<Vec<u8>, Error> {
    let metadata = std::fs::metadata(path).map_err(Error::io("open", path))?;
    let wrong = |reason: &str| Err(Error::Json { path: path.to_owned(), reason: reason.to_owned() });
    if !metadata.is_file() {
        return wrong("it is no regular file");
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > BYTES_MAX { wrong("it is longer than any real one") } else { Ok(bytes) }
}

impl ForeignConfig {
    /// Reads the file of a folder.
    ///
    /// # Errors
    /// A file that is no JSON object; a family that there is no table of.
    pub(super) fn read(folder: &Path) -> Result<ForeignConfig, Error> {
        let path = folder.join(CONFIG);
        ForeignConfig::of(read_json(&path)?, path)
    }

    /// What an object says that would be at `path`.
    pub(super) fn of(object: Map<String, Value>, path: PathBuf) -> Result<ForeignConfig, Error> {
        let wrong = |problem: String| Error::Inexpressible { path: path.clone(), problems: vec![problem] };
        let told = object.get("model_type").unwrap_or(&Value::Null);
        let family = told.as_str().and_then(families::of);
        let family = family.ok_or_else(|| wrong(format!("model_type is {told}; known are {}", families::names())))?;
        let is_own = |class: &Value| class.as_str() == Some(family.architecture);
        if let Some(classes) = object.get("architectures").filter(|classes| !classes.is_null())
            && !classes.as_array().is_some_and(|classes| classes.iter().all(is_own))
        {
            return Err(wrong(format!("architectures is {classes}, here there is {}", family.architecture)));
        }
        let mut object = object;
        let packed = object.remove(QUANTIZATION).filter(|packed| !packed.is_null());
        let packing = packed.map(|packed| packing(&packed)).transpose().map_err(wrong)?;
        let mut values = BTreeMap::new();
        object.into_iter().for_each(|(name, value)| flatten(name, value, &mut values));
        Ok(ForeignConfig { path, family, packing, values })
    }

    fn keys(&self) -> impl Iterator<Item = &'static ForeignKey> {
        self.family.keys().chain(COMMON)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// The recipe that makes this model, with what of the file is of training elsewhere and is lost.
    ///
    /// # Errors
    /// All that no recipe can say; a recipe that is wrong.
    pub(super) fn recipe(&self, dtype: &str, end_of_text: Option<String>) -> Result<(Config, Vec<String>), Error> {
        let (mut recipe, mut notices, mut problems) = (RecipeDraft::default(), Vec::new(), Vec::new());
        let strange = self.values.keys().filter(|name| !self.keys().any(|key| key.is_of(name)));
        problems.extend(strange.map(|name| format!("{name} = {}: no table knows the key", self.values[name])));
        for key in self.family.keys() {
            self.take(key, &mut recipe, &mut notices).unwrap_or_else(|found| problems.extend(found));
        }
        recipe.set("model.family", &json!(self.family.family)).expect("nothing else names it");
        for (key, value) in self.family.recipe {
            recipe.set(key, &value.json()).unwrap_or_else(|problem| problems.push(problem));
        }
        let inexpressible = |problems| Error::Inexpressible { path: self.path.clone(), problems };
        if !problems.is_empty() {
            return Err(inexpressible(problems));
        }
        recipe.complete(dtype, end_of_text);
        let load = |recipe: &RecipeDraft| {
            let text = toml::to_string(&recipe.0).expect("a table is TOML");
            let loaded = config::load_text(&self.path, text);
            loaded.map_err(|problems| inexpressible(problems.as_slice().iter().map(|one| self.told(one)).collect()))
        };
        let mut config = load(&recipe)?.config;
        if let Some(which) = self.family.layers {
            let stacks = stacks(&config.model);
            let layers = which.layers(&stacks, |name| self.get(name).cloned());
            let layers = layers.map_err(|problem| inexpressible(vec![problem]))?;
            if layers.is_empty() {
                return Err(inexpressible(vec!["no layer has experts".to_owned()]));
            }
            recipe.section("moe").insert("layers".to_owned(), recipe_value(&layers, config.model.layers));
            config = load(&recipe)?.config;
        }
        let problems = self.misfits(&config);
        if problems.is_empty() { Ok((config, notices)) } else { Err(inexpressible(problems)) }
    }

    /// Whether rotary positions are stretched, in families that say it.
    fn stretches(&self) -> bool {
        self.family.keys().any(|key| match key.meaning {
            KeyMeaning::Stretch(kind, _) => key.names.iter().any(|name| self.get(name) == Some(&json!(kind))),
            _ => false,
        })
    }

    /// How many layers behind those of the model predict further tokens.
    pub(super) fn further_layers(&self) -> usize {
        let keys = self.family.keys().filter(|key| matches!(key.meaning, KeyMeaning::FurtherLayers));
        let told = keys.flat_map(|key| key.names).filter_map(|name| self.get(name)?.as_u64());
        told.max().unwrap_or(0) as usize
    }

    /// What one key says.
    fn take(&self, key: &ForeignKey, recipe: &mut RecipeDraft, notices: &mut Vec<String>) -> Result<(), Vec<String>> {
        if let KeyMeaning::IfStretched(meaning) = key.meaning {
            return self.take_stretched(&ForeignKey { names: key.names, meaning: *meaning }, recipe, notices);
        }
        let given: Vec<(&str, &Value)> = key.names.iter().filter_map(|name| Some((*name, self.get(name)?))).collect();
        let first = key.names[0];
        // Null is what a key of the recipe is not: nothing.
        let is_same = matches!(key.meaning, KeyMeaning::Same(..));
        let given: Vec<&(&str, &Value)> = given.iter().filter(|(_, value)| !is_same || !value.is_null()).collect();
        let given = given.into_iter();
        let problems: Vec<String> = match key.meaning {
            KeyMeaning::Same(_, Plain::Required) | KeyMeaning::Stated(_) if given.len() == 0 => {
                vec![format!("{first} is missing")]
            }
            KeyMeaning::Same(own, absent) if given.len() == 0 => {
                recipe.set(own, &absent.json()).err().into_iter().collect()
            }
            KeyMeaning::Same(own, _) => given
                .filter_map(|(name, value)| recipe.set(own, value).map_err(|text| format!("{name}: {text}")).err())
                .collect(),
            KeyMeaning::OrNone(own) => given
                .map(|(_, value)| if value.is_null() { json!(0) } else { (*value).clone() })
                .filter_map(|value| recipe.set(own, &value).map_err(|text| format!("{first}: {text}")).err())
                .collect(),
            KeyMeaning::Only(values) | KeyMeaning::Stated(values) => {
                let wrong = given.filter(|(_, value)| !values.iter().any(|only| only.is(value)));
                wrong
                    .map(|(name, value)| format!("{name} = {value}: here there is {} alone", values[0].json()))
                    .collect()
            }
            KeyMeaning::SumToOne(absent) => {
                let value = given.last().map_or(json!(absent), |(_, value)| (*value).clone());
                let dialect = value.as_bool().map(|sums| if sums { "hf" } else { "deepseek" });
                let wrong = || format!("{first} = {value}: it is no truth value");
                let set = dialect.ok_or_else(wrong).and_then(|dialect| recipe.set("moe.dialect", &json!(dialect)));
                set.err().into_iter().collect()
            }
            KeyMeaning::Training(usual) => {
                let other = given.filter(|(_, value)| !usual.is(value) && !value.is_null());
                notices.extend(
                    other.map(|(name, value)| format!("{name} = {value} is of training elsewhere and is left out")),
                );
                Vec::new()
            }
            KeyMeaning::Times(own, unit) => {
                self.quotient(first, unit).and_then(|n| recipe.set(own, &n)).err().into_iter().collect()
            }
            KeyMeaning::OwnHeadDim(absent) => self
                .own_head_dim(first, absent)
                .and_then(|n| recipe.set("model.head_dim", &n))
                .err()
                .into_iter()
                .collect(),
            KeyMeaning::RowLength(absent) => {
                let length = given.last().map_or(json!(absent), |(_, value)| (*value).clone());
                let problem = recipe.set("model.seq", &length).err();
                problem.into_iter().map(|text| format!("{first}: {text}")).collect()
            }
            KeyMeaning::Stretch(own, plain) => {
                let factor = if self.stretches() { Value::Null } else { plain.json() };
                let kinds = [Plain::Text(own), Plain::Text("default"), Plain::Null];
                let wrong = given.filter(|(_, value)| !kinds.iter().any(|kind| kind.is(value)));
                let wrong = wrong.map(|(name, value)| format!("{name} = {value}: here there are {own} and default"));
                wrong.chain(recipe.set("model.rope_factor", &factor).err()).collect()
            }
            KeyMeaning::IfStretched(_) => unreachable!("taken above"),
            KeyMeaning::HeadDim
            | KeyMeaning::Layers
            | KeyMeaning::Windows
            | KeyMeaning::FurtherLayers
            | KeyMeaning::Free(_) => Vec::new(),
        };
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// What one key says that says something only where positions are stretched.
    fn take_stretched(
        &self,
        key: &ForeignKey,
        recipe: &mut RecipeDraft,
        notices: &mut Vec<String>,
    ) -> Result<(), Vec<String>> {
        if self.stretches() {
            return self.take(key, recipe, notices);
        }
        let given = key.names.iter().filter_map(|name| Some((name, self.get(name)?)));
        let given = given.filter(|(_, value)| !value.is_null());
        let problem = |(name, value)| format!("{name} = {value}: positions are not stretched (rope_type)");
        let problems: Vec<String> = given.map(problem).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// The width of a head: where it is absent, this, or what classes of transformers have that do not know of one.
    fn own_head_dim(&self, name: &str, absent: Option<u64>) -> Result<Value, String> {
        let number = |name: &str| self.get(name).and_then(Value::as_u64);
        let of_each = || number("hidden_size")?.checked_div(number("num_attention_heads")?);
        let width = self.get(name).cloned().or_else(|| absent.or_else(of_each).map(Value::from));
        width.filter(|width| !width.is_null()).ok_or_else(|| format!("{name} = null: it is no number"))
    }

    /// How many times one whole number is another.
    fn quotient(&self, all: &str, unit: &str) -> Result<Value, String> {
        let number = |name: &str| self.get(name).and_then(Value::as_u64).filter(|&number| number > 0);
        match (number(all), number(unit)) {
            (Some(all), Some(one)) if all.is_multiple_of(one) => Ok(json!(all / one)),
            _ => {
                let told = |name: &str| self.get(name).unwrap_or(&Value::Null);
                Err(format!("{all} = {}: here it is a multiple of {unit} = {}", told(all), told(unit)))
            }
        }
    }

    /// What is wrong with a key of the recipe, by the key here that it is from.
    fn told(&self, problem: &config::Problem) -> String {
        let names = self.family.keys().filter(|key| key.meaning.is_of(&problem.key)).flat_map(|key| key.names);
        let name = names.copied().find(|name| self.get(name).is_some());
        let value = problem.value.as_deref().unwrap_or("absent");
        format!("{} = {value}: {}; {}", name.unwrap_or(&problem.key), problem.wrong, problem.remedy)
    }

    /// What the family has otherwise than a key says.
    fn misfits(&self, config: &Config) -> Vec<String> {
        let own = self.keys().filter_map(|key| Some((key, built(key.meaning, config)?)));
        let told = own.flat_map(|(key, own)| key.names.iter().map(move |name| (name, own.clone())));
        let wrong = told.filter_map(|(name, own)| Some((name, self.get(name)?, own)));
        let wrong = wrong.filter(|(_, value, own)| !value.is_null() && *value != own);
        wrong.map(|(name, value, own)| format!("{name} = {value}: here it is {own}")).collect()
    }

    /// Values of keys that say nothing of the model, to be kept.
    pub(super) fn free(object: &Map<String, Value>, family: &ForeignFamily) -> Map<String, Value> {
        let is_free = |name: &str| {
            let mut keys = family.keys().chain(COMMON);
            keys.any(|key| matches!(key.meaning, KeyMeaning::Free(_)) && key.is_of(name))
        };
        let kept = object.iter().filter(|(name, _)| is_free(name));
        kept.map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

fn flatten(name: String, value: Value, to: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(object) => {
            object.into_iter().for_each(|(key, value)| flatten(format!("{name}.{key}"), value, to))
        }
        value => drop(to.insert(name, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;
    use crate::moe::Weighting;

    const OLMOE: &str = r#"{
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "clip_qkv": null, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": true, "vocab_size": 50304
    }"#;
    const GPT_OSS: &str = r#"{
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": true,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
        "pad_token_id": 199999, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": false},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "transformers_version": "4.55.0", "use_cache": true, "vocab_size": 201088
    }"#;

    const DEEPSEEK_V3: &str = r#"{
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
        "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
    }"#;

    const QWEN3_MOE: &str = r#"{
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936
    }"#;

    /// As the classes of transformers have it that do not know of such a key, and as the one that has a number of its own.
    #[test]
    fn heads_without_a_width_have_that_of_transformers() {
        let width = |text: &str, absent: &str, told: Option<Value>| {
            let mut object: Map<String, Value> = serde_json::from_str(text).expect("an object");
            object.remove(absent);
            object.extend(told.map(|told| ("head_dim".to_owned(), told)));
            let read = ForeignConfig::of(object, CONFIG.into()).and_then(|file| file.recipe("bf16", None));
            read.map(|(config, _)| config.model.head_dim).map_err(|error| error.to_string())
        };
        assert_eq!(width(QWEN3_MOE, "head_dim", None), Ok(Some(64)));
        assert_eq!(width(QWEN3_MOE, "head_dim", Some(json!(128))), Ok(Some(128)));
        assert_eq!(width(GPT_OSS, "head_dim", None), Ok(Some(64)));
        assert!(width(QWEN3_MOE, "head_dim", Some(Value::Null)).is_err_and(|told| told.contains("head_dim = null")));
        assert!(width(QWEN3_MOE, "num_attention_heads", None).is_err_and(|told| told.contains("is missing")));
    }

    /// In files of older versions, which have rotary positions in other places than those that are written now.
    #[test]
    fn keys_of_published_models_are_known() {
        let read = |text: &str, more: &[(&str, Value)]| {
            let mut object: Map<String, Value> = serde_json::from_str(text).expect("an object");
            object.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            ForeignConfig::of(object, CONFIG.into()).and_then(|file| file.recipe("bf16", None))
        };
        let known = |read: Result<(Config, Vec<String>), Error>| {
            let (config, notices) = read.unwrap_or_else(|error| panic!("{error}"));
            assert!(notices.is_empty(), "{notices:?}");
            let moe = config.moe.expect("experts");
            (config.model, moe)
        };
        let (model, moe) = known(read(OLMOE, &[]));
        assert_eq!((model.seq, moe.d_expert, moe.top_k), (4096, Some(1024), 8));
        assert_eq!(moe.weighs(), Weighting::Probability);
        let windows = json!(["sliding_attention", "full_attention"].repeat(12));
        let (model, moe) = known(read(GPT_OSS, &[("layer_types", windows)]));
        assert_eq!((model.rope_factor, model.rope_pretrained), (Some(32.0), Some(4096)));
        assert_eq!((model.rope_theta, model.window, model.head_dim), (150_000.0, Some(128), Some(64)));
        assert_eq!(moe.experts.smallest(), 32);
        let (model, moe) = known(read(DEEPSEEK_V3, &[]));
        // What a recipe leaves out is as published.
        let left_out = model::Config { heads: 128, seq: 163_840, ..model::Config::of(129_280, (7168, 61, 128), 1) };
        let family = toml::Value::from("deepseek_v3").try_into().expect("a family");
        let left_out = model::Config { family, ..left_out };
        assert_eq!(model.blueprint(), left_out.blueprint());
        assert_eq!((moe.shared_experts, moe.layers.contains(2), moe.layers.contains(3)), (1, false, true));
        assert_eq!(moe.weighs(), Weighting::Sigmoid { scale: 2.5, normalised: true });
        // Moonlight's kind: plain positions, queries from the residual stream, one group.
        let plain = [("rope_scaling", Value::Null), ("q_lora_rank", Value::Null), ("n_group", json!(1))];
        let (model, _) = known(read(DEEPSEEK_V3, &[&plain[..], &[("topk_group", json!(1))]].concat()));
        assert_eq!((model.rope_factor, model.query_rank), (Some(1.0), Some(0)));
        let packed = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
        let refused = read(DEEPSEEK_V3, &[("quantization_config", packed)]).expect_err("packed weights").to_string();
        assert!(refused.contains("quantization_config.quant_method is \"fp8\""), "{refused}");
        let packed = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
        let windows = json!(["sliding_attention", "full_attention"].repeat(12));
        known(read(GPT_OSS, &[("quantization_config", packed), ("layer_types", windows)]));
    }
}
