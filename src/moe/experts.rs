//! The experts of one rank: two-layer networks whose weights are stacked, so that one grouped product runs them all.

use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::{Device, Dtype, Part, Tape, Var};

use super::expert_adapters::ExpertAdapters;
use crate::lora::{AdapterSizes, grouped_product};
use crate::parallel::operands::whole_as_parts;
use crate::parallel::{Init, Parameters, Placement, Slice, Spread, Weight};

/// What is between an expert's two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU, with biases.
    Gelu,
    /// ReLU, with biases.
    Relu,
    /// ReLU, without.
    PlainRelu,
    /// `silu(gate) * up`, without.
    SwiGlu,
    /// GPT-OSS's `gate sigmoid(1.702 gate) (up + 1)`, clamped, with biases.
    ClampedSwiGlu,
}

/// What clamped gates and ups do not exceed, in every GPT-OSS.
const LIMIT: f32 = 7.0;

impl Activation {
    pub fn has_biases(self) -> bool {
        match self {
            Activation::Gelu | Activation::Relu | Activation::ClampedSwiGlu => true,
            Activation::PlainRelu | Activation::SwiGlu => false,
        }
    }

    /// Whether the first product has two parts, gate and up.
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::SwiGlu | Activation::ClampedSwiGlu)
    }

    /// From the first product, `[T, F]` or if gated `[T, 2 F]`, to the second, `[T, F]`.
    pub fn forward(self, hidden: &Var) -> Var {
        match self {
            Activation::Gelu => hidden.gelu(),
            Activation::Relu | Activation::PlainRelu => hidden.relu(),
            Activation::SwiGlu => hidden.swiglu(),
            Activation::ClampedSwiGlu => hidden.clamped_swiglu(LIMIT),
        }
    }
}

/// Sizes of a stack of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Global numbers of the experts held here.
    pub local: Vec<usize>,
    pub d_model: usize,
    pub d_expert: usize,
    pub activation: Activation,
    /// [`Spread::Expert`], or [`Spread::Replicated`] for experts that every rank, or every group of slices, holds.
    pub spread: Spread,
    /// Which slice of the inner width is held here, and how many there are.
    pub slice: (usize, usize),
}

/// Tensors of an expert, or what is held of them: what follows its number in their names, shapes, slices.
pub(super) type ExpertTensors = [(String, Vec<usize>, Option<Slice>)];

impl ExpertsShape {
    /// How matrices are spread that have slices, if there are several.
    pub(super) fn spread(&self) -> Spread {
        match self.spread {
            spread if self.slice.1 == 1 => spread,
            Spread::Expert(degree) | Spread::ExpertTensor(degree) => Spread::ExpertTensor(degree),
            Spread::Replicated | Spread::Tensor => Spread::Tensor,
        }
    }

    /// The slice of a matrix whose inner width is along `dim`, if there are several.
    pub(super) fn along(&self, dim: usize) -> Option<Slice> {
        (self.slice.1 > 1).then(|| Slice::share(dim, self.d_expert, self.slice))
    }

    /// The inner width here.
    pub(super) fn width(&self) -> usize {
        Slice::share(0, self.d_expert, self.slice).len
    }

    /// Where the tensors of all experts here lie, named `<name>.<expert>.<part>`.
    pub(super) fn stack(&self, (device, name): (&Device, &str), spread: Spread, parts: &ExpertTensors) -> Placement {
        let of = |&e: &usize| {
            let named = |(part, shape, slice): &(String, Vec<usize>, Option<Slice>)| {
                (format!("{name}.{e}.{part}"), shape.clone(), *slice)
            };
            parts.iter().map(named).collect::<Vec<_>>()
        };
        // Where there are only sizes nobody asks for an expert's name: one piece stands for those of all.
        let all = |(part, shape, slice): &(String, Vec<usize>, Option<Slice>)| {
            let slice = slice.map(|slice| Slice { dim: slice.dim + 1, ..slice });
            (format!("{name}.{part}"), [&[self.local.len()], &shape[..]].concat(), slice)
        };
        match device.has_data() {
            true => Placement::sliced(spread, self.local.iter().flat_map(of).collect::<Vec<_>>()),
            false => Placement::sliced(spread, parts.iter().map(all)),
        }
    }
}

/// A rank's experts, whatever they are: rows in, rows out. Always all of them at once, so that one can be grouped.
pub trait Expert: Parameters + std::fmt::Debug {
    /// The weights on the tape, each with one entry an expert along its first dim.
    fn weights(&self, tape: &Tape) -> Vec<Var>;

    /// What experts with these weights make of rows `[R, D]` sorted by expert, `counts[e]` of each; gives `[R, D]` in the
    /// same order. The weights are this rank's own, or those of experts that visit it.
    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var;

    /// Whether experts differ in nothing but their weights, so that any rank can run those of another.
    fn are_alike(&self) -> bool {
        true
    }

    /// Whether what an expert makes of a row is a function of that row alone, not of its neighbours, its place or chance.
    /// Only then tokens may share rows (`moe.condense`): all would receive what another one's row was made of.
    fn is_of_the_row_alone(&self) -> bool {
        true
    }

    /// Names the weights after other experts, as many as there are, whose values are about to be here; false if they keep
    /// their names, so that these experts cannot move to other ranks.
    fn rename(&mut self, _experts: &[usize]) -> bool {
        false
    }

    /// Ranks over which each expert is sliced; what [`Expert::apply`] gives is then a term of a sum over them.
    fn slices(&self) -> usize {
        1
    }

    /// [`Expert::apply`] with this rank's own weights.
    fn forward(&self, rows: &Var, counts: &[usize]) -> Var {
        self.apply(&self.weights(rows.tape()), rows, counts)
    }
}

/// Experts of several kinds in one layer: each entry runs the next `n` local experts.
#[derive(Debug)]
pub struct Mixed(pub Vec<(usize, Box<dyn Expert>)>);

impl Expert for Mixed {
    /// Those of every kind, one kind after the other.
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        self.0.iter().flat_map(|(_, kind)| kind.weights(tape)).collect()
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        let (mut expert, mut row, mut weight) = (0, 0, 0);
        let part = |(n, kind): &(usize, Box<dyn Expert>)| {
            let counts = &counts[expert..expert + n];
            let own = row as u32..(row + counts.iter().sum::<usize>()) as u32;
            let weights = &weights[weight..weight + kind.weights(rows.tape()).len()];
            (expert, row, weight) = (expert + n, row + own.len(), weight + weights.len());
            kind.apply(weights, &rows.gather_rows(own), counts)
        };
        Var::concat_rows(self.0.iter().map(part).collect())
    }

    fn are_alike(&self) -> bool {
        false
    }

    fn is_of_the_row_alone(&self) -> bool {
        self.0.iter().all(|(_, kind)| kind.is_of_the_row_alone())
    }
}

impl Parameters for Mixed {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.iter_mut().for_each(|(_, kind)| kind.visit(f));
    }
}

/// A rank's experts, all of one kind.
#[derive(Debug)]
pub struct Experts {
    /// What precedes an expert's number in the names of its tensors.
    name: String,
    /// Global numbers of those held here.
    local: Vec<usize>,
    activation: Activation,
    slice: (usize, usize),
    /// `[L, F or 2 F, D]`: gated, each expert's gate above its up. F is the slice's width.
    first: Weight,
    first_bias: Option<Weight>,
    /// `[L, D, F]`.
    second: Weight,
    /// Whole on every rank, and added by the first.
    second_bias: Option<Weight>,
    adapters: ExpertAdapters,
}

impl Experts {
    /// Weights named `<name>.<expert>.{w1,w3,w2}.weight` (gated, as Mixtral's) or `.{fc_in,fc_out}.weight`, and `.bias`.
    pub fn new(device: &Arc<Device>, name: &str, shape: &ExpertsShape, dtype: Dtype, inits: [Init; 2]) -> Experts {
        let (d, f, count) = (shape.d_model, shape.d_expert, shape.local.len());
        let along = |dim| shape.along(dim);
        let width = shape.width();
        let stack = |spread, parts: &[_]| shape.stack((device, name), spread, parts);
        let weight =
            |parts: &[_], held: &[usize], init| Weight::new(device, stack(shape.spread(), parts), held, dtype, init);
        let (into, back): (&[&str], &str) = match shape.activation.is_gated() {
            true => (&["w1", "w3"], "w2"),
            false => (&["fc_in"], "fc_out"),
        };
        let names = |part: &str| into.iter().map(|of| format!("{of}.{part}")).collect::<Vec<_>>();
        let [weights, biases] = ["weight", "bias"].map(names);
        let parts = |names: &'_ [String], shape: &[usize]| {
            names.iter().map(|name| (name.clone(), shape.to_vec(), along(0))).collect::<Vec<_>>()
        };
        let has_biases = shape.activation.has_biases();
        let inner = into.len() * width;
        let second_bias = || {
            let placement = stack(shape.spread, &[(format!("{back}.bias"), vec![d], None)]);
            Weight::new(device, placement, &[count, d], dtype, Init::Zeros)
        };
        Experts {
            name: name.to_owned(),
            local: shape.local.clone(),
            activation: shape.activation,
            slice: shape.slice,
            first: weight(&parts(&weights, &[f, d]), &[count, inner, d], inits[0]),
            first_bias: has_biases.then(|| weight(&parts(&biases, &[f]), &[count, inner], Init::Zeros)),
            second: weight(&[(format!("{back}.weight"), vec![d, f], along(1))], &[count, d, width], inits[1]),
            second_bias: has_biases.then(second_bias),
            adapters: ExpertAdapters::default(),
        }
    }

    /// The same with the adapters that are asked for; `group` has a slice of the experts on each rank.
    #[must_use]
    pub fn adapted(
        self,
        device: &Arc<Device>,
        shape: &ExpertsShape,
        sizes: &AdapterSizes,
        group: &Arc<dyn Communicator>,
    ) -> Experts {
        Experts { adapters: ExpertAdapters::new((device, &self.name), shape, sizes, group), ..self }
    }
}

impl Expert for Experts {
    /// The matrices, then the biases if there are any, then the terms of the matrices.
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        let on_tape = |weight: &Weight| tape.parameter(&weight.parameter);
        let biases = [
            self.first_bias.as_ref().map(on_tape),
            self.second_bias.as_ref().map(|bias| whole_as_parts(on_tape(bias), self.slice.0)),
        ];
        [&self.first, &self.second]
            .into_iter()
            .map(on_tape)
            .chain(biases.into_iter().flatten())
            .chain(self.adapters.on_tape(tape))
            .collect()
    }

    fn rename(&mut self, experts: &[usize]) -> bool {
        assert_eq!(experts.len(), self.local.len(), "as many experts as before");
        let (name, local) = (self.name.clone(), std::mem::replace(&mut self.local, experts.to_vec()));
        self.visit(&mut |weight| {
            let pieces = &mut weight.placement.pieces;
            let of_each = pieces.len() / local.len();
            for (piece, place) in pieces.iter_mut().zip(0..) {
                let (old, new) = (local[place / of_each], experts[place / of_each]);
                let part = piece.name.strip_prefix(&format!("{name}.{old}.")).expect("an expert's tensor");
                piece.name = format!("{name}.{new}.{part}");
            }
        });
        true
    }

    fn slices(&self) -> usize {
        self.slice.1
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        let (activation, adapts, counts) = (self.activation, self.adapters.are_there(), counts.to_vec());
        rows.tape().segment(Part::Experts, rows, weights, move |rows, weights| {
            let [first, second] = of_products(activation, adapts, weights);
            run(activation, rows, [&first, &second], &counts)
        })
    }
}

/// Of an expert's weights those of each product: its matrix, its bias, its term.
fn of_products(activation: Activation, adapts: [bool; 2], weights: &[Var]) -> [Vec<Var>; 2] {
    let (matrices, rest) = weights.split_at(2);
    let (biases, terms) = rest.split_at(if activation.has_biases() { 2 } else { 0 });
    let (first, second) = terms.split_at(if adapts[0] { 2 } else { 0 });
    assert_eq!(second.len(), if adapts[1] { 2 } else { 0 }, "{} weights for {activation:?}", weights.len());
    let of = |product: usize, term: &[Var]| {
        [&matrices[product]].into_iter().chain(biases.get(product)).chain(term).cloned().collect()
    };
    [of(0, first), of(1, second)]
}

/// Rows sorted by expert through these experts.
fn run(activation: Activation, rows: &Var, [first, second]: [&[Var]; 2], counts: &[usize]) -> Var {
    match (activation, first, second) {
        (Activation::SwiGlu, [first], [second]) => rows.grouped_swiglu(first, second, counts),
        (activation, first, second) => {
            let (hidden, counts) = (grouped_product(rows, first, counts), counts.to_vec());
            rows.tape().segment(Part::Activation, &hidden, second, move |hidden, second| {
                grouped_product(&activation.forward(hidden), second, &counts)
            })
        }
    }
}

impl Parameters for Experts {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.first);
        self.first_bias.iter_mut().for_each(&mut *f);
        f(&mut self.second);
        self.second_bias.iter_mut().for_each(&mut *f);
        self.adapters.visit(f);
    }
}
