//! The members of a JSON object one by one: reading it as a map would keep the last of two of one name in silence.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::Value;

/// In their order, no name twice.
pub(super) struct Members(pub(super) Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Members, D::Error> {
        deserializer.deserialize_map(OneByOne)
    }
}

struct OneByOne;

impl<'de> Visitor<'de> for OneByOne {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let (mut members, mut names) = (Vec::new(), std::collections::BTreeSet::new());
        while let Some((name, value)) = map.next_entry::<String, Value>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{name:?} is there twice")));
            }
            members.push((name, value));
        }
        Ok(Members(members))
    }
}
