//! The map of a family: for every tensor here, where it is there. One table, read both ways.
//!
//! ```text
//!  here     model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight
//!  there    model.layers.{i}.mlp.experts.gate_up_proj, block {e} of a stack, the first half of its rows
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::families::ForeignFamily;
use crate::checkpoint::{
    ElementType, FileSet, PackedWeight, TensorCut, TensorEntry, TensorList, TensorView, WeightPacking,
};

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
    /// How its elements are packed, and the pattern of the tensor with their scales.
    packed: Option<(WeightPacking, &'static str)>,
}

/// All of the tensor of this name.
pub(super) const fn whole(name: &'static str) -> ForeignPlace {
    let cut = TensorCut { stack: None, transposed: false, part: [0, 1], in_turn: false };
    ForeignPlace { name, is_stacked: false, cut, packed: None }
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

    /// Codes, whose scales are in another tensor.
    pub(super) const fn packed(self, packing: WeightPacking, scales: &'static str) -> ForeignPlace {
        ForeignPlace { packed: Some((packing, scales)), ..self }
    }

    /// The place of a tensor whose name here has these parts.
    fn resolve(&self, parts: &Captures, experts: usize) -> FoundPlace {
        let expert = || parts.get("e").and_then(|text| text.parse().ok()).unwrap_or(0);
        let stack = self.is_stacked.then(|| [expert(), experts]);
        let packed = self.packed.map(|(packing, scales)| PackedWeight { packing, scales: parts.fill(scales) });
        FoundPlace { tensor: parts.fill(self.name), cut: TensorCut { stack, ..self.cut }, packed }
    }
}

/// A place with its names filled in.
#[derive(Clone)]
struct FoundPlace {
    tensor: String,
    cut: TensorCut,
    packed: Option<PackedWeight>,
}

impl FoundPlace {
    /// The same, packed if it is of eight bits: any matrix may be, and its scales are named after it.
    fn of_eight_bits(self, files: &FileSet, packing: Option<WeightPacking>) -> FoundPlace {
        let of = |tensor: &str| files.entry(tensor).map(|(_, entry)| entry.dtype);
        let packing = packing.filter(|packing| self.packed.is_none() && of(&self.tensor) == Some(packing.codes()));
        let packing = packing.filter(|packing| matches!(packing, WeightPacking::Fp8 { .. }));
        match packing {
            Some(packing) => {
                let scales = format!("{}_scale_inv", self.tensor);
                FoundPlace { packed: Some(PackedWeight { packing, scales }), ..self }
            }
            None => self,
        }
    }

    fn view(self, shape: &[usize], dtype: ElementType) -> TensorView {
        let FoundPlace { tensor, cut, packed } = self;
        TensorView { tensor, cut, packed, shape: shape.to_vec(), dtype }
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

/// The layer that a tensor is of, if it is one of these.
pub(super) fn layer_among(name: &str, layers: &Range<usize>) -> Option<usize> {
    let layer = captures("model.layers.{i}.{rest}", name)?.get("i")?.parse().ok()?;
    layers.contains(&layer).then_some(layer)
}

impl ForeignFamily {
    /// The places where a tensor may be there.
    fn places(&self, name: &str, experts: usize) -> Vec<FoundPlace> {
        let rules = self.map.iter().filter_map(|rule| Some((rule, captures(rule.here, name)?)));
        let Some((rule, parts)) = rules.into_iter().next() else { return Vec::new() };
        rule.there.iter().map(|place| place.resolve(&parts, experts)).collect()
    }

    /// The module there that has a matrix as its own, or as a block of a stack that transformers keeps in memory, and the cut
    /// that leads there; none if the matrix is a part of another.
    pub(super) fn module(&self, name: &str, experts: usize) -> Option<(String, TensorCut)> {
        let places = self.places(name, experts);
        let place = places.iter().find(|place| place.cut.stack.is_some()).or(places.first())?;
        let is_own = |cut: &TensorCut| cut.stack.is_some() || *cut == TensorCut::default();
        Some((place.tensor.clone(), place.cut)).filter(|(_, cut)| is_own(cut))
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
                Some(place) => drop(views.insert(name.clone(), place.view(shape, *dtype))),
                None => problems.push(format!("{} has no tensor for {name}", self.model_type)),
            }
        }
        if problems.is_empty() { Ok(views) } else { Err(problems) }
    }

    /// Where each of these tensors is in `files`, some of them packed if `packing` says how; tensors of layers `further` are
    /// nobody's.
    ///
    /// # Errors
    /// All that is missing, of another shape, or of no tensor here.
    pub(super) fn find(
        &self,
        here: &TensorList,
        experts: usize,
        files: &FileSet,
        packing: Option<WeightPacking>,
        further: &Range<usize>,
    ) -> Result<BTreeMap<String, TensorView>, Vec<String>> {
        let (mut views, mut problems, mut unfit) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        for (name, (dtype, shape)) in here {
            let places = self.places(name, experts);
            let mut known =
                places.iter().filter(|place| place.packed.as_ref().is_none_or(|own| Some(own.packing) == packing));
            let Some(place) =
                known.find_map(|place| self.there(place, files)).map(|place| place.of_eight_bits(files, packing))
            else {
                let packed = places.iter().filter_map(|place| Some([&place.tensor, &place.packed.as_ref()?.scales]));
                unfit.extend(packed.flatten().cloned());
                problems.push(missing(name, &places, files));
                continue;
            };
            let view = place.view(shape, *dtype);
            match misfit(&view, files) {
                None => drop(views.insert(name.clone(), view)),
                Some(problem) => {
                    unfit.extend([view.tensor].into_iter().chain(view.packed.map(|packed| packed.scales)));
                    problems.push(problem);
                }
            }
        }
        // Of a stack every block says the same; and a tensor that is told of already is not nobody's.
        let mut told = BTreeSet::new();
        problems.retain(|problem| told.insert(problem.clone()));
        problems
            .extend(self.left_over(&views, files, |name| unfit.contains(name) || layer_among(name, further).is_some()));
        if problems.is_empty() { Ok(views) } else { Err(problems) }
    }

    /// A place of the files, with or without the family's prefix.
    fn there(&self, place: &FoundPlace, files: &FileSet) -> Option<FoundPlace> {
        let name = place.tensor.as_str();
        let without = self.prefix.and_then(|prefix| name.strip_prefix(prefix));
        let own = [Some(name), without].into_iter().flatten().find(|name| files.entry(name).is_some())?;
        Some(FoundPlace { tensor: own.to_owned(), ..place.clone() })
    }

    /// Tensors of the files of which not every element is one of a tensor here, but for those that say nothing new or that
    /// something else `is_told` of.
    fn left_over(
        &self,
        views: &BTreeMap<String, TensorView>,
        files: &FileSet,
        is_told: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
        for (tensor, elements) in views.values().flat_map(TensorView::parts) {
            *taken.entry(tensor).or_default() += elements;
        }
        let idle = |name: &str| {
            let is_repeated = self.twin(name).is_some() || self.idle.iter().any(|pattern| is_of(pattern, name));
            is_repeated || is_told(name)
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

/// What is said of a tensor that is at none of its places, or is packed though nothing says how.
fn missing(name: &str, places: &[FoundPlace], files: &FileSet) -> String {
    let packed = places.iter().filter(|place| files.entry(&place.tensor).is_some());
    match packed.filter_map(|place| Some((place, place.packed.as_ref()?.packing))).next() {
        Some((place, packing)) => {
            let tensor = &place.tensor;
            format!("{tensor} is {}, and config.json does not say so (quantization_config)", packing.name())
        }
        None => format!("{} is missing", places.first().map_or(name, |place| &place.tensor)),
    }
}

/// What is wrong with the tensors there that a view is of.
fn misfit(view: &TensorView, files: &FileSet) -> Option<String> {
    let whole = view.cut.whole(&view.shape);
    let wrong = |name: &str, entry: &TensorEntry, want: &[usize]| {
        Some(format!("{name} is {:?}, by config.json it is {want:?}", entry.shape)).filter(|_| entry.shape != want)
    };
    let (tensor, entry) = (&view.tensor, files.entry(&view.tensor)?.1);
    let Some(PackedWeight { packing, scales }) = &view.packed else {
        let is_packed = entry.dtype.is_packed();
        let packed =
            is_packed.then(|| format!("{tensor} is {}, and config.json does not say how it is packed", entry.dtype));
        return packed.or_else(|| wrong(tensor, entry, &whole));
    };
    let has_parts = packing.has_parts() || view.cut == TensorCut::default();
    let Some([codes_shape, scales_shape]) = packing.shapes(&whole).filter(|_| has_parts) else {
        return Some(format!("{tensor} cannot be {}: by config.json it is {whole:?}", packing.name()));
    };
    let Some((_, scales_entry)) = files.entry(scales) else { return Some(format!("{scales} is missing")) };
    let of_type = |name: &str, entry: &TensorEntry, is_so: bool| {
        (!is_so).then(|| format!("{name} is {}, which {} has not", entry.dtype, packing.name()))
    };
    of_type(tensor, entry, entry.dtype == packing.codes())
        .or_else(|| of_type(scales, scales_entry, packing.has_scales_of(scales_entry.dtype)))
        .or_else(|| wrong(tensor, entry, &codes_shape))
        .or_else(|| wrong(scales, scales_entry, &scales_shape))
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
