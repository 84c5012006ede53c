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
            KeyMeaning::SumToOne(absent) => put(recipe, "moe.dialect", self.dialect(first, absent)),
            KeyMeaning::Training(usual) => {
                let other = given.filter(|(_, value)| !usual.is(value) && !value.is_null());
                notices.extend(
                    other.map(|(name, value)| format!("{name} = {value} is of training elsewhere and is left out")),
                );
                Vec::new()
            }
            KeyMeaning::Times(own, unit) => put(recipe, own, self.quotient(first, unit)),
            KeyMeaning::OwnHeadDim(absent) => put(recipe, "model.head_dim", self.own_head_dim(first, absent)),
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

    /// How chosen experts are weighed, by whether their weights are made to add up to 1; absent means this.
    fn dialect(&self, name: &str, absent: bool) -> Result<Value, String> {
        let value = self.get(name).cloned().unwrap_or(json!(absent));
        let dialect = value.as_bool().map(|sums| if sums { "hf" } else { "deepseek" });
        dialect.map(Value::from).ok_or_else(|| format!("{name} = {value}: it is no truth value"))
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

/// Gives a key of the recipe its value, if there is one; what is wrong with it.
fn put(recipe: &mut RecipeDraft, key: &str, value: Result<Value, String>) -> Vec<String> {
    value.and_then(|value| recipe.set(key, &value)).err().into_iter().collect()
}

fn flatten(name: String, value: Value, to: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(object) => {
            object.into_iter().for_each(|(key, value)| flatten(format!("{name}.{key}"), value, to))
        }
        value => drop(to.insert(name, value)),
    }
}
