//! Keys of `[moe]` that belong to a gate: in a recipe each is answered with its place, and a recipe that a run kept with
//! its results is read as if they stood there.

use toml::{Table, Value};

use super::source::{RecipeSource, join};
use crate::limits::Finding;
use crate::moe;

const GATE: &str = "moe.gate";

/// The key in `[moe]`, and in the gate.
const MOVED: &[(&str, &str)] = &[
    ("logical_workers", "workers"),
    ("groups", "groups"),
    ("top_groups", "top_groups"),
    ("route_scale", "route_scale"),
    ("bias_rate", "bias_rate"),
    ("outside", "outside"),
];

/// The answer to such a key.
pub(super) fn answer(path: &str, value: &Value, source: &RecipeSource) -> Option<Finding> {
    let (_, key) = MOVED.iter().find(|(old, _)| path == join("moe", old))?;
    let (gates, kind) = (moe::Config::gates_with(key), kind(source));
    let form = |kind: &str| format!("moe.gate = {{ kind = {kind:?}, {key} = {} }}", super::problem::shown(value));
    let remedy = match gates.contains(&kind) {
        true => format!("write {}", form(&kind)),
        false => format!("leave it out: {kind:?} has no such key; with one that has, write {}", form(gates.first()?)),
    };
    Some(Finding::new(format!("a key of the gate: {}", join(GATE, key)), remedy))
}

/// Puts the keys of a kept recipe into its gate. What the gate had no use for goes.
pub(super) fn carry(source: &mut RecipeSource) {
    let kind = kind(source);
    let Some(Value::Table(moe)) = source.table.get_mut("moe") else { return };
    let mut own = Table::new();
    for (old, key) in MOVED {
        let has = moe::Config::keys_of_gate(&kind).iter().any(|(known, _)| known == key);
        own.extend(moe.remove(*old).filter(|_| has).map(|value| ((*key).to_owned(), value)));
    }
    if !own.is_empty() && !moe.get("gate").is_some_and(Value::is_table) {
        own.insert("kind".into(), Value::String(kind));
        moe.insert("gate".into(), Value::Table(own));
    }
}

/// The gate's name, in either form.
fn kind(source: &RecipeSource) -> String {
    let kind = source.value("moe.gate.kind").or(source.value(GATE)).and_then(Value::as_str);
    kind.map_or_else(|| moe::Config::of(1, 1).gate.kind().name(), str::to_owned)
}
