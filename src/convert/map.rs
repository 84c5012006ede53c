//! The map of a family: for every tensor here, where it is there. One table, read both ways.
//!
//! ```text
//!  here     model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight
//!  there    model.layers.{i}.mlp.experts.gate_up_proj, block {e} of a stack, the first half of its rows
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use super::families::ForeignFamily;
use crate::checkpoint::{FileSet, TensorCut, TensorEntry, TensorList, TensorView};

/// A tensor here, and the places where it may be there: the first is where it is written.
///
/// Names are made of parts between points. A part in braces stands for any, or as the last, `{rest}`, for any number.
#[derive(Debug)]
pub(super) struct MapRule {
    pub(super) here: &'static str,
    pub(super) there: &'static [ForeignPlace],
}

/// A place in another layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForeignPlace {
    name: &'static str,
    /// Whether part `{e}` of the name here is the number of a block in a stack.
    is_stacked: bool,
    cut: TensorCut,
}

/// All of the tensor of this name.
pub(super) const fn whole(name: &'static str) -> ForeignPlace {
    let cut = TensorCut { stack: None, transposed: false, part: [0, 1], in_turn: false };
    ForeignPlace { name, is_stacked: false, cut }
}

impl ForeignPlace {
    /// Rows are columns there.
    pub(super) const fn transposed(self) -> ForeignPlace {
        ForeignPlace { cut: TensorCut { transposed: true, ..self.cut }, ..self }
    }

    /// Of its rows part `number` of so many.
    pub(super) const fn part(self, number: usize, of: usize) -> ForeignPlace {
        ForeignPlace { cut: TensorCut { part: [number, of], ..self.cut }, ..self }
    }

    /// Rows of the parts come in turn.
    pub(super) const fn in_turn(self) -> ForeignPlace {
        ForeignPlace { cut: TensorCut { in_turn: true, ..self.cut }, ..self }
    }

    /// Block `{e}` of a stack.
    pub(super) const fn stacked(self) -> ForeignPlace {
        ForeignPlace { is_stacked: true, ..self }
    }

    /// The name there and the cut, of a tensor whose name here has these parts.
    fn resolve(&self, parts: &Captures, experts: usize) -> (String, TensorCut) {
        let expert = || parts.get("e").and_then(|text| text.parse().ok()).unwrap_or(0);
        let stack = self.is_stacked.then(|| [expert(), experts]);
        (parts.fill(self.name), TensorCut { stack, ..self.cut })
    }
}

/// What the parts in braces of a pattern stand for.
struct Captures<'a>(BTreeMap<&'a str, String>);

impl Captures<'_> {
    fn get(&self, part: &str) -> Option<&str> {
        self.0.get(part).map(String::as_str)
    }

    fn fill(&self, pattern: &str) -> String {
        let mut name = pattern.to_owned();
        self.0.iter().for_each(|(part, text)| name = name.replace(&format!("{{{part}}}"), text));
        name
    }
}

/// What a name's parts are by a pattern, if it is of the pattern.
fn captures<'a>(pattern: &'a str, name: &str) -> Option<Captures<'a>> {
    let (mut found, mut names) = (BTreeMap::new(), name.split('.'));
    for part in pattern.split('.') {
        let Some(inner) = part.strip_prefix('{').and_then(|part| part.strip_suffix('}')) else {
            names.next().filter(|own| *own == part)?;
            continue;
        };
        let first = names.next()?;
        let text = match inner {
            "rest" => [first].into_iter().chain(names.by_ref()).collect::<Vec<_>>().join("."),
            _ => first.to_owned(),
        };
        found.insert(inner, text);
    }
    names.next().is_none().then_some(Captures(found))
}

/// Whether a name is of a pattern.
pub(super) fn is_of(pattern: &str, name: &str) -> bool {
    captures(pattern, name).is_some()
}

/// Whether a tensor is of one of these layers.
pub(super) fn is_of_layers(name: &str, layers: &Range<usize>) -> bool {
    let layer = captures("model.layers.{i}.{rest}", name).and_then(|parts| parts.get("i")?.parse().ok());
    layer.is_some_and(|layer| layers.contains(&layer))
}

impl ForeignFamily {
    /// The places where a tensor may be there.
    fn places(&self, name: &str, experts: usize) -> Vec<(String, TensorCut)> {
        let rules = self.map.iter().filter_map(|rule| Some((rule, captures(rule.here, name)?)));
        let Some((rule, parts)) = rules.into_iter().next() else { return Vec::new() };
        rule.there.iter().map(|place| place.resolve(&parts, experts)).collect()
    }

    /// The module there that has a matrix as its own, or as a block of a stack that transformers keeps in memory, and the cut
    /// that leads there; none if the matrix is a part of another.
    pub(super) fn module(&self, name: &str, experts: usize) -> Option<(String, TensorCut)> {
        let places = self.places(name, experts);
        let place = places.iter().find(|(_, cut)| cut.stack.is_some()).or(places.first())?;
        let is_own = |cut: &TensorCut| cut.stack.is_some() || *cut == TensorCut::default();
        Some(place.clone()).filter(|(_, cut)| is_own(cut))
    }

    /// Where each of these tensors is written there.
    ///
    /// # Errors
    /// Those that have no place, by name.
    pub(super) fn layout(
        &self,
        here: &TensorList,
        experts: usize,
    ) -> Result<BTreeMap<String, TensorView>, Vec<String>> {
        let (mut views, mut problems) = (BTreeMap::new(), Vec::new());
        for (name, (dtype, shape)) in here {
            match self.places(name, experts).into_iter().next() {
                Some((tensor, cut)) => {
                    views.insert(name.clone(), TensorView { tensor, cut, shape: shape.clone(), dtype: *dtype });
                }
                None => problems.push(format!("{} has no tensor for {name}", self.model_type)),
            }
        }
        if problems.is_empty() { Ok(views) } else { Err(problems) }
    }

    /// Where each of these tensors is in `files`; tensors of layers `further` are nobody's.
    ///
    /// # Errors
    /// All that is missing, of another shape, or of no tensor here.
    pub(super) fn find(
        &self,
        here: &TensorList,
        experts: usize,
        files: &FileSet,
        further: &Range<usize>,
    ) -> Result<BTreeMap<String, TensorView>, Vec<String>> {
        let (mut views, mut problems) = (BTreeMap::new(), Vec::new());
        for (name, (dtype, shape)) in here {
            let places = self.places(name, experts);
            let Some((tensor, cut, entry)) = places.iter().find_map(|(tensor, cut)| self.there(tensor, *cut, files))
            else {
                let first = places.first().map_or(name, |(tensor, _)| tensor);
                problems.push(format!("{first} is missing"));
                continue;
            };
            let (want, own) = (cut.whole(shape), cut.own(&entry.shape));
            if own.as_ref() != Some(shape) {
                problems.push(format!("{tensor} is {:?}, by config.json it is {want:?}", entry.shape));
                continue;
            }
            views.insert(name.clone(), TensorView { tensor, cut, shape: shape.clone(), dtype: *dtype });
        }
        problems.dedup();
        problems.extend(self.left_over(&views, files, further));
        if problems.is_empty() { Ok(views) } else { Err(problems) }
    }

    /// A tensor of the files by its name, with or without the family's prefix.
    fn there<'a>(
        &self,
        name: &str,
        cut: TensorCut,
        files: &'a FileSet,
    ) -> Option<(String, TensorCut, &'a TensorEntry)> {
        let without = self.prefix.and_then(|prefix| name.strip_prefix(prefix));
        let names = [Some(name), without].into_iter().flatten();
        names.into_iter().find_map(|name| Some((name.to_owned(), cut, files.entry(name)?.1)))
    }

    /// Tensors of the files of which not every element is one of a tensor here, but for those that say nothing new.
    fn left_over(&self, views: &BTreeMap<String, TensorView>, files: &FileSet, further: &Range<usize>) -> Vec<String> {
        let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
        for view in views.values() {
            *taken.entry(&view.tensor).or_default() += view.shape.iter().product::<usize>() as u64;
        }
        let idle = |name: &str| {
            let is_repeated = self.twin(name).is_some() || self.idle.iter().any(|pattern| is_of(pattern, name));
            is_repeated || is_of_layers(name, further)
        };
        let left = files.entries().filter_map(|(name, entry)| match taken.get(name.as_str()) {
            Some(&elements) if elements == entry.elements() => None,
            Some(elements) => {
                Some(format!("{name} has {} elements, of which {elements} are the model's", entry.elements()))
            }
            None if idle(name) => None,
            None => Some(format!("{name} is no tensor of {}", self.architecture)),
        });
        left.collect()
    }

    /// What the files have of values that follow from others and are computed here, if anything.
    pub(super) fn computed(&self, files: &FileSet) -> Option<String> {
        let is_idle = |name: &str| self.idle.iter().any(|pattern| is_of(pattern, name));
        let idle: Vec<&String> = files.entries().map(|(name, _)| name).filter(|name| is_idle(name)).collect();
        let first = idle.first()?;
        Some(format!("{first} is computed here and left out, and so are all {} of its kind", idle.len()))
    }

    /// The tensor that one repeats, in models whose head is tied.
    pub(super) fn twin(&self, name: &str) -> Option<&'static str> {
        self.twins.iter().find(|(twin, _)| *twin == name).map(|(_, of)| *of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_patterns_part_by_part() {
        let fill = |pattern, name, to: &str| captures(pattern, name).map(|parts| parts.fill(to));
        let name = "model.layers.3.self_attn.q_proj.weight";
        assert_eq!(
            fill("model.layers.{i}.self_attn.{rest}", name, "h.{i}.{rest}").as_deref(),
            Some("h.3.q_proj.weight")
        );
        assert_eq!(fill("{rest}", name, "{rest}").as_deref(), Some(name));
        assert_eq!(fill("model.layers.{i}.self_attn.q_proj.weight", name, "expert_{i}").as_deref(), Some("expert_3"));
        for pattern in
            ["model.layers.{i}", "model.{i}.self_attn.{rest}", "model.layers.{i}.self_attn.q_proj.weight.{rest}"]
        {
            assert!(!is_of(pattern, name), "{pattern}");
        }
    }
}
