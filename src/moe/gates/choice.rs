//! `moe.gate`: the name of a gate, or a table with its `kind` and the keys it has of its own.
//!
//! A gate is a file of this folder and a row of the table below: the file has the gate, its keys, their ranges and
//! defaults, and what else a recipe must know of it.

use std::fmt::Debug;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use super::Gate;
use crate::limits::{Bounds, Finding};
use crate::moe::{Config, LayerConfig};

/// What a recipe must know of a gate before there is one.
pub trait GateKeys: Debug {
    /// The gate of a layer.
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate>;

    /// The values that the keys may take, of every key.
    fn bounds(&self) -> &'static [(&'static str, Bounds)] {
        &[]
    }

    /// The `top_k` the gate is defined for, if it is only one.
    fn only_top_k(&self) -> Option<usize> {
        None
    }

    /// Whether `moe.logical_nodes` means anything to it.
    fn knows_nodes(&self) -> bool {
        false
    }

    /// Keys that do not fit the rest of the section.
    fn misfits(&self, _moe: &Config) -> Vec<(&'static str, Finding)> {
        Vec::new()
    }

    /// Why the gate moves nothing, if it does not.
    fn idle(&self, _moe: &Config) -> Option<&'static str> {
        None
    }
}

/// Makes of the table's rows the names, the values of `moe.gate`, and how they are written.
macro_rules! gates {
    ($($Kind:ident: $file:ident, $Gate:ident, $Keys:ident;)*) => {
        $(pub use super::$file::{$Gate, $Keys};)*

        /// The name of a gate; `docs/gates.md` defines each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum GateKind {
            $($Kind,)*
        }

        /// `moe.gate`. Which shape it is read from is known to `config`, which sees a table's `kind` first.
        #[derive(Clone, Debug, PartialEq, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum GateChoice {
            $($Kind($Keys),)*
        }

        impl GateKind {
            pub const ALL: &[GateKind] = &[$(GateKind::$Kind),*];
        }

        impl GateChoice {
            pub fn kind(&self) -> GateKind {
                match self {
                    $(GateChoice::$Kind(_) => GateKind::$Kind,)*
                }
            }

            pub fn keys(&self) -> &dyn GateKeys {
                match self {
                    $(GateChoice::$Kind(keys) => keys,)*
                }
            }
        }

        impl From<GateKind> for GateChoice {
            fn from(kind: GateKind) -> GateChoice {
                match kind {
                    $(GateKind::$Kind => GateChoice::$Kind($Keys::default()),)*
                }
            }
        }

        impl Serialize for GateChoice {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self {
                    $(GateChoice::$Kind(keys) => Kinded { kind: self.kind(), keys }.write(serializer),)*
                }
            }
        }
    };
}

gates! {
    Naive: naive, Naive, NaiveKeys;
    Noisy: noisy, Noisy, NoisyKeys;
    Gshard: gshard, GShard, GShardKeys;
    Switch: switch, Switch, SwitchKeys;
    Swipe: swipe, Swipe, SwipeKeys;
    DistributedCapacity: distributed_capacity, DistributedCapacity, DistributedCapacityKeys;
    Topology: topology, Topology, TopologyKeys;
    Hash: hash, Hash, HashKeys;
    Balanced: balanced, Balanced, BalancedKeys;
    Softmax: softmax, Softmax, SoftmaxKeys;
    Sigmoid: sigmoid, Sigmoid, SigmoidKeys;
    ExpertChoice: expert_choice, ExpertChoice, ExpertChoiceKeys;
    Sinkhorn: sinkhorn, Sinkhorn, SinkhornKeys;
}

/// The long form, as it is written.
#[derive(Serialize)]
struct Kinded<'a, K> {
    kind: GateKind,
    #[serde(flatten)]
    keys: &'a K,
}

impl<K: Serialize> Kinded<'_, K> {
    /// The short form where there are no keys.
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if size_of::<K>() == 0 { self.kind.serialize(serializer) } else { self.serialize(serializer) }
    }
}

impl Default for GateChoice {
    fn default() -> Self {
        GateKind::Softmax.into()
    }
}

impl PartialEq<GateKind> for GateChoice {
    fn eq(&self, kind: &GateKind) -> bool {
        self.kind() == *kind
    }
}

impl GateKind {
    /// The gate of a name.
    pub fn of(name: &str) -> Option<GateKind> {
        GateKind::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// The name in recipes.
    pub fn name(self) -> String {
        toml::Value::try_from(self).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// The `top_k` a gate is defined for, if it is only one.
    pub fn only_top_k(self) -> Option<usize> {
        GateChoice::from(self).keys().only_top_k()
    }

    /// The keys of its own, with the values they may take.
    pub fn bounds(self) -> &'static [(&'static str, Bounds)] {
        GateChoice::from(self).keys().bounds()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use toml::{Table, Value};

    use super::*;

    /// What is written of a gate: its name, and its keys.
    fn written(gate: &GateChoice) -> (String, Table) {
        match Value::try_from(gate).unwrap() {
            Value::Table(mut keys) => (keys.remove("kind").unwrap().as_str().unwrap().to_owned(), keys),
            name => (name.as_str().unwrap().to_owned(), Table::new()),
        }
    }

    /// The laws of [`GateKeys`], for every gate there is.
    #[test]
    fn a_gate_names_its_keys_bounds_them_and_is_defined_by_its_defaults() {
        for kind in GateKind::ALL {
            let gate = GateChoice::from(*kind);
            let (name, keys) = written(&gate);
            assert_eq!(GateKind::of(&name), Some(*kind));
            let bounds: BTreeMap<_, _> = kind.bounds().iter().copied().collect();
            assert_eq!(bounds.len(), kind.bounds().len(), "{name}: a key twice");
            for (key, value) in &keys {
                let range = bounds.get(&**key).unwrap_or_else(|| panic!("{name}: {key} has no bounds"));
                assert_eq!(range.remedy(value), None, "{name}: the default of {key}");
            }
            assert_eq!(bounds.len(), keys.len(), "{name}: bounds of keys that are not there");
            let moe = Config { gate: gate.clone(), ..Config::of(8, kind.only_top_k().unwrap_or(2)) };
            assert_eq!(gate.keys().misfits(&moe).len(), 0, "{name}");
            assert!(gate.keys().gate(&moe.widest()).slots() >= moe.top_k, "{name}");
        }
    }
}
