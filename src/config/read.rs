//! From a table to any `Deserialize` type, with every fault found instead of the first.
//!
//! Serde stops at the first error, and a value it refuses leaves nothing to go on with. So the table is read
//! again and again: whatever was refused is replaced by a *sample*, the simplest value that its type
//! accepts, until the rest goes through. The deserializer (`node.rs`) sees which keys and types a struct
//! asks for; no second list of keys exists that could fall behind the structs.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use toml::Value;

use super::node::ReadingState;
use super::rejection::{Expected, Rejection};

/// The outcome of reading.
pub(super) struct Reading<T> {
    /// What the table says, with samples at the paths of `broken`; absent if a type refuses its sample.
    pub(super) value: Option<T>,
    pub(super) faults: Vec<Rejection>,
    pub(super) broken: BTreeSet<String>,
}

/// Reads `value`, found at `root`; paths already known to be `broken` are not looked at.
pub(super) fn read<T: DeserializeOwned>(root: &str, value: &Value, broken: BTreeSet<String>) -> Reading<T> {
    let mut state = ReadingState::new(broken);
    let mut faults = Vec::new();
    let value = loop {
        match T::deserialize(state.node(root.into(), Some(value))) {
            Ok(read) => break Some(read),
            Err(fault) => {
                let first_time = state.set_aside(&fault);
                faults.push(fault);
                if !first_time {
                    break None;
                }
            }
        }
    };
    Reading { value, faults, broken: state.broken }
}

/// Every path a type can hold, optional parts included, with what it asks for.
pub(super) fn paths<T: DeserializeOwned>() -> BTreeMap<String, Expected> {
    let (mut all, mut variant, mut variants) = (BTreeMap::new(), 0, 1);
    while variant < variants {
        let state = ReadingState::of_every_key(variant);
        let refused = T::deserialize(state.node(String::new(), None)).err();
        assert!(refused.is_none(), "a type refuses its sample: {refused:?}");
        (variant, variants) = (variant + 1, state.variants.get());
        all.extend(state.expected.into_inner());
    }
    all
}
