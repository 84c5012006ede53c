//! How `config.json` says which layers have experts, and the same as a recipe says it.

use serde_json::{Value, json};

use crate::model;
use crate::moe::Layers;

/// The keys of a family that say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKeys {
    /// None: every layer has them.
    All,
    /// All but the first `first_k_dense_replace`.
    AllButFirst,
    /// Every `decoder_sparse_step`-th but those of `mlp_only_layers`.
    StepAndDense,
    /// Every `encoder_sparse_step`-th of the encoder and every `decoder_sparse_step`-th of the decoder.
    StepOfStacks,
    /// So many of each stack's, by a step that follows from the number: from the second on, or all.
    CountsOfStacks,
}

const COUNT_KEYS: [[&str; 2]; 2] =
    [["num_sparse_encoder_layers", "encoder_sparse_step"], ["num_sparse_decoder_layers", "decoder_sparse_step"]];

/// The step by which so many of `all` layers have experts.
fn step_of(count: usize, all: usize) -> usize {
    all.checked_div(count).unwrap_or(all)
}

/// Of `all` layers, those with experts by a step: the second is the first of them, unless all are.
fn sparse(step: usize, all: usize) -> Vec<usize> {
    (0..all).filter(|layer| step == 1 || step > 1 && layer % step == 1).collect()
}

impl LayerKeys {
    /// The layers with experts of a model of so many, or of two stacks of so many; `get` gives a key's value.
    ///
    /// # Errors
    /// What a key says that is no number or list.
    pub(super) fn layers(self, stacks: &[usize], get: impl Fn(&str) -> Option<Value>) -> Result<Vec<usize>, String> {
        let number = |name: &str, absent: usize| match get(name) {
            None => Ok(absent),
            Some(value) => value.as_u64().map(|n| n as usize).ok_or_else(|| format!("{name} is {value}, no number")),
        };
        let is_in = |layer: usize, step: usize| step > 0 && (layer + 1).is_multiple_of(step);
        match self {
            LayerKeys::All => Ok((0..stacks.iter().sum()).collect()),
            LayerKeys::AllButFirst => {
                let all = stacks.iter().sum();
                Ok((number("first_k_dense_replace", 3)?.min(all)..all).collect())
            }
            LayerKeys::StepAndDense => {
                let (step, dense) = (number("decoder_sparse_step", 1)?, get("mlp_only_layers").unwrap_or(json!([])));
                let list: Option<Vec<u64>> =
                    dense.as_array().map(|list| list.iter().filter_map(Value::as_u64).collect());
                let list = list.filter(|list| Some(list.len()) == dense.as_array().map(Vec::len));
                let list = list.ok_or_else(|| format!("mlp_only_layers is {dense}, no list of layers"))?;
                let all = 0..stacks.iter().sum();
                Ok(all.filter(|&layer| is_in(layer, step) && !list.contains(&(layer as u64))).collect())
            }
            LayerKeys::StepOfStacks => {
                let [encoder, decoder] = *stacks else { return Err("there are no two stacks".to_owned()) };
                let steps = (number("encoder_sparse_step", 4)?, number("decoder_sparse_step", 4)?);
                let below = (0..encoder).filter(|&layer| is_in(layer, steps.0));
                Ok(below
                    .chain((0..decoder).filter(|&layer| is_in(layer, steps.1)).map(|layer| encoder + layer))
                    .collect())
            }
            LayerKeys::CountsOfStacks => {
                let [encoder, decoder] = *stacks else { return Err("there are no two stacks".to_owned()) };
                let of = |[count_key, step_key]: [&str; 2], all: usize| {
                    let count = number(count_key, 3)?;
                    let (step, told) = (step_of(count, all), number(step_key, step_of(count, all))?);
                    match told == step {
                        true => Ok(sparse(step, all)),
                        false => {
                            Err(format!("{step_key} is {told}, but {count_key} = {count} of {all} come to {step}"))
                        }
                    }
                };
                let (below, above) = (of(COUNT_KEYS[0], encoder)?, of(COUNT_KEYS[1], decoder)?);
                Ok(below.into_iter().chain(above.into_iter().map(|layer| encoder + layer)).collect())
            }
        }
    }

    /// The keys, with the values that say so.
    ///
    /// # Errors
    /// That no values do.
    pub(super) fn keys(self, stacks: &[usize], layers: &[usize]) -> Result<Vec<(&'static str, Value)>, String> {
        let all: usize = stacks.iter().sum();
        let keys = match self {
            LayerKeys::All => Vec::new(),
            LayerKeys::AllButFirst => {
                vec![("first_k_dense_replace", json!(layers.first().copied().unwrap_or(all)))]
            }
            LayerKeys::StepAndDense => {
                let dense: Vec<usize> = (0..all).filter(|layer| !layers.contains(layer)).collect();
                vec![("decoder_sparse_step", json!(1)), ("mlp_only_layers", json!(dense))]
            }
            LayerKeys::StepOfStacks => {
                let encoder = stacks[0];
                // The first with experts says the step, if any does.
                let step = |first: Option<&usize>, before: usize| first.map_or(0, |first| first - before + 1);
                let steps = [
                    step(layers.iter().find(|&&layer| layer < encoder), 0),
                    step(layers.iter().find(|&&layer| layer >= encoder), encoder),
                ];
                vec![("encoder_sparse_step", json!(steps[0])), ("decoder_sparse_step", json!(steps[1]))]
            }
            LayerKeys::CountsOfStacks => {
                let ends = [0, stacks[0], all];
                let of = |stack: usize| {
                    let (first, end) = (ends[stack], ends[stack + 1]);
                    let own = layers.iter().filter(|layer| (first..end).contains(*layer));
                    let (own, size): (Vec<usize>, usize) = (own.map(|layer| layer - first).collect(), end - first);
                    let says_so = |count: &usize| sparse(step_of(*count, size), size) == own;
                    // What no number says, the comparison below finds.
                    let count = [own.len()].into_iter().chain(0..=size).find(says_so).unwrap_or(0);
                    let [count_key, step_key] = COUNT_KEYS[stack];
                    [(count_key, json!(count)), (step_key, json!(step_of(count, size)))]
                };
                [of(0), of(1)].concat()
            }
        };
        let get = |name: &str| keys.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone());
        match self.layers(stacks, get)? == layers {
            true => Ok(keys),
            false => Err(format!("layers {layers:?} of {all} have experts (moe.layers), which it cannot say")),
        }
    }
}

/// Layers of the stacks, or of the only one.
pub(super) fn stacks(model: &model::Config) -> Vec<usize> {
    model.stack_layers().map_or_else(|| vec![model.layers], Vec::from)
}

/// Numbers of layers as a recipe says them.
pub(super) fn recipe_value(layers: &[usize], all: usize) -> toml::Value {
    let list = Layers::List(layers.to_vec());
    let shortest = [Layers::All]
        .into_iter()
        .chain((2..=all).map(Layers::Every))
        .find(|which| (0..all).all(|layer| which.contains(layer) == list.contains(layer)));
    toml::Value::try_from(shortest.unwrap_or(list)).expect("numbers of layers that a model has")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_says_the_same_when_read() {
        for (keys, stacks, layers) in [
            (LayerKeys::All, vec![3], vec![0, 1, 2]),
            (LayerKeys::AllButFirst, vec![3], vec![0, 1, 2]),
            (LayerKeys::AllButFirst, vec![4], vec![3]),
            (LayerKeys::StepAndDense, vec![4], vec![1, 2]),
            (LayerKeys::StepAndDense, vec![4], vec![]),
            (LayerKeys::StepOfStacks, vec![4, 3], vec![1, 3, 6]),
            (LayerKeys::StepOfStacks, vec![2, 3], vec![2, 3, 4]),
            (LayerKeys::CountsOfStacks, vec![4, 2], vec![1, 3, 5]),
            (LayerKeys::CountsOfStacks, vec![2, 3], vec![0, 1, 3]),
            (LayerKeys::CountsOfStacks, vec![12, 3], vec![1, 5, 9, 12, 13, 14]),
        ] {
            let written = keys.keys(&stacks, &layers).unwrap_or_else(|error| panic!("{keys:?}: {error}"));
            let get = |name: &str| written.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone());
            assert_eq!(keys.layers(&stacks, get), Ok(layers), "{keys:?}");
        }
        assert!(LayerKeys::All.keys(&[2], &[1]).is_err());
        assert!(LayerKeys::AllButFirst.keys(&[4], &[1, 3]).is_err());
        assert!(LayerKeys::StepOfStacks.keys(&[4, 2], &[1, 2]).is_err());
        // Without experts in a stack, with the first of several, and by a step that no number comes to.
        for (stacks, layers) in [([4, 2], vec![1, 3]), ([4, 2], vec![0, 5]), ([5, 1], vec![1, 4, 5])] {
            assert!(LayerKeys::CountsOfStacks.keys(&stacks, &layers).is_err(), "{layers:?}");
        }
    }

    #[test]
    fn layers_are_said_as_short_as_can_be() {
        let text = |layers: &[usize]| recipe_value(layers, 4).to_string().replace(' ', "");
        assert_eq!([text(&[0, 1, 2, 3]), text(&[1, 3]), text(&[1, 2])], ["\"all\"", "{every=2}", "{list=[1,2]}"]);
    }
}
