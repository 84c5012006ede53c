//! What keeps a checkpoint's weights from beginning a run of another configuration, and models from becoming one.

use super::{Config, is_under};

/// Keys that names and shapes of tensors follow from.
const SHAPES: &[&str] = &[
    "train.dtype",
    "model.family",
    "model.vocab",
    "model.d_model",
    "model.layers",
    "model.encoder_layers",
    "model.query_rank",
    "model.kv_rank",
    "model.content_dim",
    "model.rotary_dim",
    "model.value_dim",
    "model.d_ff",
    "model.seq",
    "model.tie_embeddings",
    "moe.experts",
    "moe.d_expert",
    "moe.layers",
    "moe.shared_experts",
    "moe.residual",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.experts",
];

/// Every key in which the model of `now` has other tensors than that of `saved`, a sentence each. Keys that change a
/// tensor's shape only together with others are left to the tensors themselves.
pub fn misfits(saved: &Config, now: &Config) -> Vec<String> {
    let one_is_dense = saved.moe.is_none() || now.moe.is_none();
    let reads = |key: &&&str| match **key {
        "model.d_ff" => has_dense(saved) && has_dense(now),
        "model.seq" => now.model.blueprint().has_position_table(),
        "moe.layers" => !one_is_dense && layers_differ(saved, now),
        // Without adapters there, they begin as in any run.
        key if is_under(key, "lora") => saved.lora.is_some(),
        key if is_under(key, "moe") => !one_is_dense || key == "moe.experts",
        _ => true,
    };
    let unlike = saved.unlike(now);
    let differ = SHAPES.iter().filter(reads).filter_map(|shape| unlike.iter().find(|[key, ..]| key == shape));
    differ.map(|[key, was, is]| format!("{key} is {was} there, {is} in the recipe")).collect()
}

/// Keys of `[moe]` in which models may differ that become one: how many experts, how rows travel, what is recorded.
const FREE: &[&str] = &[
    "moe.experts",
    "moe.schedule",
    "moe.schedule_groups",
    "moe.shadowing",
    "moe.drop_duplicates",
    "moe.dead_after",
    "moe.pairs_every",
    "moe.record",
    "moe.replay",
];

/// Every key in which two models differ that are to become one with the experts of both: of `[model]`, of `[moe]` but for
/// `FREE`, and what they are stored as. The key, and its values in both.
pub fn unlike(one: &Config, other: &Config) -> Vec<[String; 3]> {
    let is_shared = |key: &str| {
        let counts = is_under(key, "model") || is_under(key, "moe") || key == "train.dtype";
        counts && !FREE.contains(&key)
    };
    one.unlike(other).into_iter().filter(|[key, ..]| is_shared(key)).collect()
}

/// Whether they name other layers, however they say so.
fn layers_differ(saved: &Config, now: &Config) -> bool {
    let is_moe = |config: &Config, layer| config.moe.as_ref().is_some_and(|moe| moe.layers.contains(layer));
    (0..now.model.layers.min(saved.model.layers)).any(|layer| is_moe(saved, layer) != is_moe(now, layer))
}

fn has_dense(config: &Config) -> bool {
    let is_moe = |layer| config.moe.as_ref().is_some_and(|moe| moe.layers.contains(layer));
    !(0..config.model.layers).all(is_moe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;

    #[test]
    fn keys_of_shapes_exist() {
        let paths = read::paths::<Config>();
        for key in SHAPES.iter().chain(FREE) {
            assert!(paths.contains_key(*key), "{key}");
        }
    }
}
