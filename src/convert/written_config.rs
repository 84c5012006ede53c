//! The `config.json` that says what a recipe does.

use serde_json::{Map, Value, json};
use toml::Table;

use super::families::ForeignFamily;
use super::keys::{COMMON, KeyMeaning};
use super::moe_layers::stacks;
use crate::config::Config;
use crate::moe::Weighting;

/// What a model of a family has, if the key says such a thing.
pub(super) fn built(meaning: KeyMeaning, config: &Config) -> Option<Value> {
    let print = config.model.blueprint();
    let window = |layer| if print.window_of(layer).is_some() { "sliding_attention" } else { "full_attention" };
    match meaning {
        KeyMeaning::HeadDim => Some(json!(print.heads.head_dim)),
        KeyMeaning::Windows => Some((0..config.model.layers).map(window).collect()),
        _ => None,
    }
}

/// The `config.json` of a family that says what a recipe does, as far as it can: what it cannot say,
/// reading it again shows.
///
/// # Errors
/// That the family has no such layers, or no experts, or must have some.
pub(super) fn written(config: &Config, family: &ForeignFamily, dtype: &str) -> Result<Map<String, Value>, String> {
    let recipe: Value = {
        let table: Table = config.to_toml().parse().expect("to_toml writes TOML");
        serde_json::to_value(table).expect("TOML's values are JSON's")
    };
    let of_recipe =
        |own: &str| own.split('.').try_fold(&recipe, |table, name| table.get(name)).cloned().unwrap_or(Value::Null);
    let stretched = config.model.blueprint().stretches_positions();
    let mut object = Map::new();
    for key in family.keys().chain(COMMON) {
        let meaning = match key.meaning {
            KeyMeaning::IfStretched(_) if !stretched => continue,
            KeyMeaning::IfStretched(meaning) => *meaning,
            other => other,
        };
        let value = match meaning {
            KeyMeaning::Same(own, _) => of_recipe(own),
            KeyMeaning::OwnHeadDim(_) => of_recipe("model.head_dim"),
            KeyMeaning::OrNone(own) => Some(of_recipe(own)).filter(|value| *value != json!(0)).unwrap_or_default(),
            KeyMeaning::Only(values) | KeyMeaning::Stated(values) => values[0].json(),
            KeyMeaning::Times(own, unit) => {
                json!(of_recipe(own).as_u64().unwrap_or(0) * object[unit].as_u64().unwrap_or(0))
            }
            KeyMeaning::RowLength(_) => json!(config.model.longest_row()),
            KeyMeaning::HeadDim | KeyMeaning::Windows => built(key.meaning, config).expect("built"),
            KeyMeaning::Stretch(kind, _) => json!(if stretched { kind } else { "default" }),
            KeyMeaning::FurtherLayers => json!(0),
            KeyMeaning::IfStretched(_) => unreachable!("within another"),
            KeyMeaning::SumToOne(_) => {
                let moe = config.moe.as_ref().ok_or("there are no experts")?;
                json!(moe.weighs() != Weighting::Probability)
            }
            KeyMeaning::Layers | KeyMeaning::Free(None) => continue,
            KeyMeaning::Training(value) | KeyMeaning::Free(Some(value)) => value.json(),
        };
        insert(&mut object, key.names[0], value);
    }
    if let Some(which) = family.layers {
        let moe = config.moe.as_ref().ok_or("there are no experts")?;
        let layers: Vec<usize> = (0..config.model.layers).filter(|layer| moe.layers.contains(*layer)).collect();
        for (name, value) in which.keys(&stacks(&config.model), &layers)? {
            insert(&mut object, name, value);
        }
    }
    object.insert("architectures".to_owned(), json!([family.architecture]));
    object.insert("model_type".to_owned(), json!(family.model_type));
    object.insert("dtype".to_owned(), json!(dtype));
    Ok(object)
}

/// Into the object that the name's points lead to. A null beside an object of that name is left out.
fn insert(object: &mut Map<String, Value>, name: &str, value: Value) {
    match name.split_once('.') {
        Some((first, rest)) => {
            let inner = object.entry(first).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
        None => drop(object.insert(name.to_owned(), value)),
    }
}
