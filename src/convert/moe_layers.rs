//! How `config.json` says which layers have experts, and the same as a recipe says it.

use serde_json::{Value, json};

use crate::model;
use crate::moe::Layers;

/// The keys of a family that say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKeys {
    /// None: every layer has them.
    All,
    /// Every `decoder_sparse_step`-th but those of `mlp_only_layers`.
    StepAndDense,
    /// Every `encoder_sparse_step`-th of the encoder and every `decoder_sparse_step`-th of the decoder.
    StepOfStacks,
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
            (LayerKeys::StepAndDense, vec![4], vec![1, 2]),
            (LayerKeys::StepAndDense, vec![4], vec![]),
            (LayerKeys::StepOfStacks, vec![4, 3], vec![1, 3, 6]),
            (LayerKeys::StepOfStacks, vec![2, 3], vec![2, 3, 4]),
        ] {
            let written = keys.keys(&stacks, &layers).unwrap_or_else(|error| panic!("{keys:?}: {error}"));
            let get = |name: &str| written.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone());
            assert_eq!(keys.layers(&stacks, get), Ok(layers), "{keys:?}");
        }
        assert!(LayerKeys::All.keys(&[2], &[1]).is_err());
        assert!(LayerKeys::StepOfStacks.keys(&[4, 2], &[1, 2]).is_err());
    }

    #[test]
    fn layers_are_said_as_short_as_can_be() {
        let text = |layers: &[usize]| recipe_value(layers, 4).to_string().replace(' ', "");
        assert_eq!([text(&[0, 1, 2, 3]), text(&[1, 3]), text(&[1, 2])], ["\"all\"", "{every=2}", "{list=[1,2]}"]);
    }
}
