//! Over how many ranks one set of experts is spread, layer by layer.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{Axis, MeshShape};

/// Expert-parallel degrees of a run's layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Degrees {
    /// Of all layers with experts.
    Same(usize),
    /// Of each layer with experts, in their order.
    Each(Vec<usize>),
}

impl Default for Degrees {
    fn default() -> Degrees {
        Degrees::Same(1)
    }
}

impl Degrees {
    /// Those of each layer, where a list gives them.
    pub fn list(&self) -> Option<&[usize]> {
        match self {
            Degrees::Same(_) => None,
            Degrees::Each(list) => Some(list),
        }
    }

    /// Every degree that some layer has, the smallest first.
    pub fn distinct(&self) -> Vec<usize> {
        let mut all = match self {
            Degrees::Same(degree) => vec![*degree],
            Degrees::Each(list) => list.clone(),
        };
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Of a list without entries, 1.
    pub fn largest(&self) -> usize {
        self.distinct().pop().unwrap_or(1)
    }

    /// The same of other numbers.
    pub fn map(&self, f: impl Fn(usize) -> usize) -> Degrees {
        match self {
            Degrees::Same(degree) => Degrees::Same(f(*degree)),
            Degrees::Each(list) => Degrees::Each(list.iter().map(|&degree| f(degree)).collect()),
        }
    }

    /// Every axis of meshes that differ in these degrees alone.
    pub fn axes(&self, shape: &MeshShape) -> Vec<Axis> {
        let mut axes: Vec<Axis> = self.distinct().iter().flat_map(|&degree| shape.at(degree).axes()).collect();
        axes.sort_unstable();
        axes.dedup();
        axes
    }

    /// The name of an axis's groups in traffic and messages: with the degree of the experts, where there are several.
    pub fn name(&self, axis: Axis) -> String {
        match axis {
            Axis::Expert(degree) | Axis::ExpertData(degree) if self.distinct().len() > 1 => {
                format!("{}_{degree}", axis.name())
            }
            _ => axis.name().to_owned(),
        }
    }
}

impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Degrees::Same(degree) => write!(f, "{degree}"),
            Degrees::Each(list) => write!(f, "{list:?}"),
        }
    }
}

impl<'de> Deserialize<'de> for Degrees {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Degrees, D::Error> {
        struct NumberOrList;

        impl<'de> Visitor<'de> for NumberOrList {
            type Value = Degrees;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or a list of whole numbers")
            }

            fn visit_u64<E: de::Error>(self, degree: u64) -> Result<Degrees, E> {
                let whole = usize::try_from(degree).map_err(E::custom)?;
                Ok(Degrees::Same(whole))
            }

            fn visit_i64<E: de::Error>(self, degree: i64) -> Result<Degrees, E> {
                let whole = usize::try_from(degree).map_err(E::custom)?;
                Ok(Degrees::Same(whole))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Degrees, A::Error> {
                let mut degrees = Vec::new();
                while let Some(degree) = list.next_element()? {
                    degrees.push(degree);
                }
                Ok(Degrees::Each(degrees))
            }
        }

        deserializer.deserialize_u64(NumberOrList)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_degrees_apart_where_there_are_several() {
        let names = |degrees: Degrees| {
            degrees.axes(&MeshShape::of(4, 1)).into_iter().map(|axis| degrees.name(axis)).collect::<Vec<_>>()
        };
        let plain = ["world", "tensor", "data", "expert", "expert_tensor", "expert_data"];
        assert_eq!(names(Degrees::Same(2)), plain);
        assert_eq!(names(Degrees::Each(vec![2, 2])), plain);
        let several =
            ["world", "tensor", "data", "expert_1", "expert_4", "expert_tensor", "expert_data_1", "expert_data_4"];
        assert_eq!(names(Degrees::Each(vec![4, 1, 4])), several);
    }
}
