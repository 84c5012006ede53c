//! Numbers of layers: what is asked of them, and how recipes write them.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};

use super::PerLayer;

impl Default for PerLayer {
    fn default() -> PerLayer {
        PerLayer::Same(1)
    }
}

impl From<usize> for PerLayer {
    fn from(number: usize) -> PerLayer {
        PerLayer::Same(number)
    }
}

impl PerLayer {
    /// Those of each layer; one number where they are equal.
    pub fn of_each(numbers: Vec<usize>) -> PerLayer {
        match numbers.first() {
            Some(&first) if numbers.iter().all(|&number| number == first) => PerLayer::Same(first),
            _ => PerLayer::Each(numbers),
        }
    }

    /// That of a layer, by its place among those with experts.
    ///
    /// # Panics
    /// If a list is too short; the configuration is checked before.
    pub fn at(&self, place: usize) -> usize {
        match self {
            PerLayer::Same(number) => *number,
            PerLayer::Each(list) => list[place],
        }
    }

    /// Those of each layer, where a list gives them.
    pub fn list(&self) -> Option<&[usize]> {
        match self {
            PerLayer::Same(_) => None,
            PerLayer::Each(list) => Some(list),
        }
    }

    /// Those of so many layers; of fewer if a list is shorter.
    pub fn of_layers(&self, layers: usize) -> Vec<usize> {
        match self {
            PerLayer::Same(number) => vec![*number; layers],
            PerLayer::Each(list) => list.iter().copied().take(layers).collect(),
        }
    }

    /// Every number that some layer has, the smallest first.
    pub fn distinct(&self) -> Vec<usize> {
        let mut all = match self {
            PerLayer::Same(number) => vec![*number],
            PerLayer::Each(list) => list.clone(),
        };
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Of a list without entries, 1.
    pub fn largest(&self) -> usize {
        self.distinct().pop().unwrap_or(1)
    }

    /// Of a list without entries, 1.
    pub fn smallest(&self) -> usize {
        self.distinct().first().copied().unwrap_or(1)
    }

    /// The same of other numbers.
    pub fn map(&self, f: impl Fn(usize) -> usize) -> PerLayer {
        match self {
            PerLayer::Same(number) => PerLayer::Same(f(*number)),
            PerLayer::Each(list) => PerLayer::Each(list.iter().map(|&number| f(number)).collect()),
        }
    }

    /// Every pair of numbers that some layer has, of these and of others.
    pub fn pairs(&self, others: &PerLayer) -> Vec<(usize, usize)> {
        let layers = self.list().or(others.list()).map_or(1, <[usize]>::len);
        let mut all: Vec<_> = self.of_layers(layers).into_iter().zip(others.of_layers(layers)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What `f` makes of these and others, layer by layer; a list if these are one, or if it differs.
    pub fn with(&self, others: &PerLayer, f: impl Fn(usize, usize) -> usize) -> PerLayer {
        match (self, others) {
            (PerLayer::Same(a), PerLayer::Same(b)) => PerLayer::Same(f(*a, *b)),
            _ => {
                let layers = self.list().or(others.list()).map_or(1, <[usize]>::len);
                let pairs = self.of_layers(layers).into_iter().zip(others.of_layers(layers));
                let made = pairs.map(|(a, b)| f(a, b)).collect();
                if self.list().is_some() { PerLayer::Each(made) } else { PerLayer::of_each(made) }
            }
        }
    }
}

impl fmt::Display for PerLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PerLayer::Same(number) => write!(f, "{number}"),
            PerLayer::Each(list) => write!(f, "{list:?}"),
        }
    }
}

impl<'de> Deserialize<'de> for PerLayer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PerLayer, D::Error> {
        struct NumberOrList;

        impl<'de> Visitor<'de> for NumberOrList {
            type Value = PerLayer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or a list of whole numbers")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<PerLayer, E> {
                let whole = usize::try_from(number).map_err(E::custom)?;
                Ok(PerLayer::Same(whole))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<PerLayer, E> {
                let whole = usize::try_from(number).map_err(E::custom)?;
                Ok(PerLayer::Same(whole))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PerLayer, A::Error> {
                let mut numbers = Vec::new();
                while let Some(number) = list.next_element()? {
                    numbers.push(number);
                }
                Ok(PerLayer::Each(numbers))
            }
        }

        deserializer.deserialize_u64(NumberOrList)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_told_apart_where_they_differ() {
        let each = |list: &[usize]| PerLayer::Each(list.to_vec());
        assert_eq!(PerLayer::of_each(vec![4, 4]), PerLayer::Same(4));
        assert_eq!(PerLayer::of_each(vec![4, 2]), each(&[4, 2]));
        assert_eq!((each(&[4, 2, 4]).at(1), PerLayer::Same(3).at(7)), (2, 3));
        assert_eq!((each(&[4, 2, 3]).largest(), each(&[4, 2, 3]).smallest()), (4, 2));
        assert_eq!((PerLayer::Same(3).of_layers(2), each(&[4, 2]).of_layers(3)), (vec![3, 3], vec![4, 2]));
        assert_eq!(each(&[4, 2, 4]).pairs(&PerLayer::Same(2)), [(2, 2), (4, 2)]);
        assert_eq!(each(&[4, 2, 4]).pairs(&each(&[1, 2, 2])), [(2, 2), (4, 1), (4, 2)]);
        assert_eq!(PerLayer::Same(8).with(&each(&[4, 2]), |a, b| a / b), each(&[2, 4]));
        assert_eq!(PerLayer::Same(8).with(&PerLayer::Same(2), |a, b| a / b), PerLayer::Same(4));
        assert_eq!(PerLayer::Same(2).with(&each(&[4, 2]), |a, _| a), PerLayer::Same(2));
        assert_eq!(each(&[8, 4]).with(&each(&[4, 2]), |a, b| a / b), each(&[2, 2]));
    }
}
