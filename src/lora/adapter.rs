//! The adapters of one matrix, and of matrices that stand one above the other.

use std::sync::Arc;

use guildhall_tensor::{Device, Dtype, Tape};

use super::{Config, LowRank};
use crate::parallel::{Buffer, Init, Parameters, Placement, Slice, Spread, Weight};

/// The last parts of the names of the two factors, in the order A, B; PEFT's.
pub const FACTORS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// What stands for gate and up in the name of the A of both.
pub const GATE_AND_UP: &str = "w13";

/// Whether a tensor is a factor of an adapter, by its name.
pub fn is_factor(name: &str) -> bool {
    FACTORS.iter().any(|factor| name.strip_suffix(factor).is_some_and(|rest| rest.ends_with('.')))
}

/// The factors of the tensor `name`, `<matrix>.weight`, if they are among the tensors that `exist`: A may be one that gate and
/// up of an expert share.
pub fn factors_of(name: &str, exist: impl Fn(&str) -> bool) -> Option<[String; 2]> {
    let matrix = name.strip_suffix(".weight")?;
    let (expert, _) = matrix.rsplit_once('.')?;
    let [a, b] = FACTORS.map(|factor| format!("{matrix}.{factor}"));
    let shared = format!("{expert}.{GATE_AND_UP}.{}", FACTORS[0]);
    let a = [a, shared].into_iter().find(|a| exist(a))?;
    exist(&b).then_some([a, b])
}

/// What a model's adapters are made from.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSizes {
    pub config: Config,
    /// Storage type of the factors.
    pub dtype: Dtype,
    /// Seed of their initial values.
    pub seed: u64,
}

impl AdapterSizes {
    /// How A starts, of so many inputs: as PEFT's, uniform up to the root of a third of Kaiming He's variance.
    pub fn init(&self, inputs: usize) -> Init {
        Init::Uniform { bound: 1.0 / (inputs as f32).sqrt(), seed: self.seed }
    }
}

/// A matrix `[out, in]` and what of it is held here.
#[derive(Clone, Debug)]
pub struct MatrixSlice<'a> {
    /// Of the tensor without `.weight`.
    pub name: String,
    /// The name of the projection.
    pub target: &'a str,
    pub shape: [usize; 2],
    pub slice: Option<Slice>,
    /// Whether every rank has all of it and uses some outputs.
    pub shared: bool,
}

/// The two factors of one matrix's term.
#[derive(Debug)]
struct Adapter {
    a: Weight,
    b: Weight,
    scale: f32,
}

impl Adapter {
    fn new(device: &Arc<Device>, sizes: &AdapterSizes, matrix: &MatrixSlice) -> Adapter {
        let ([outputs, inputs], rank) = (matrix.shape, sizes.config.rank);
        let is_cut = matrix.slice.is_some_and(|slice| slice.len < matrix.shape[slice.dim]);
        let factor = |number: usize, shape: [usize; 2], dim: usize, init| {
            let slice = matrix.slice.filter(|slice| slice.dim == dim);
            let (spread, partial) = match slice {
                Some(_) => (Spread::Tensor, false),
                None => (Spread::Replicated, is_cut || matrix.shared),
            };
            let tensor = (format!("{}.{}", matrix.name, FACTORS[number]), shape.to_vec(), slice);
            let placement = Placement::sliced(spread, [tensor]).partial(partial);
            let here = placement.pieces[0].local_shape();
            Weight::new(device, placement, &here, sizes.dtype, init).adapting()
        };
        Adapter {
            a: factor(0, [rank, inputs], 1, sizes.init(inputs)),
            b: factor(1, [outputs, rank], 0, Init::Zeros),
            scale: sizes.config.scale(),
        }
    }

    /// The term, whose b has the scale.
    fn on_tape(&self, tape: &Tape) -> LowRank {
        let [a, b] = [&self.a, &self.b].map(|factor| tape.parameter(&factor.parameter));
        LowRank { a, b: b.scale(self.scale) }
    }
}

impl Parameters for Adapter {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.a);
        f(&mut self.b);
    }
}

/// A model without its adapters.
pub struct Unadapted<'a>(pub &'a mut dyn Parameters);

impl Parameters for Unadapted<'_> {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.visit(&mut |weight| {
            if !weight.adapts {
                f(weight);
            }
        });
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.0.visit_buffers(f);
    }
}

/// Adapters of matrices that stand one above the other, of which some have one.
#[derive(Debug)]
pub struct Adapters {
    /// Outputs here, and the adapter.
    parts: Vec<(usize, Option<Adapter>)>,
}

impl Adapters {
    /// Of those matrices that are targets; of none without sizes.
    pub fn new(device: &Arc<Device>, sizes: Option<&AdapterSizes>, matrices: &[MatrixSlice]) -> Adapters {
        let part = |matrix: &MatrixSlice| {
            let sizes = sizes.filter(|sizes| sizes.config.targets(matrix.target));
            let outputs = matrix.slice.filter(|slice| slice.dim == 0).map_or(matrix.shape[0], |slice| slice.len);
            (outputs, sizes.map(|sizes| Adapter::new(device, sizes, matrix)))
        };
        Adapters { parts: matrices.iter().map(part).collect() }
    }

    /// How many outputs the matrices have here.
    pub fn outputs(&self) -> usize {
        self.parts.iter().map(|(outputs, _)| outputs).sum()
    }

    /// Whether no matrix has an adapter.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(|(_, adapter)| adapter.is_none())
    }

    /// The term of all of them.
    pub fn on_tape(&self, tape: &Tape) -> Option<LowRank> {
        let part = |(outputs, adapter): &(usize, Option<Adapter>)| {
            (adapter.as_ref().map(|adapter| adapter.on_tape(tape)), *outputs)
        };
        LowRank::stacked(tape, self.parts.iter().map(part).collect())
    }
}

impl Parameters for Adapters {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.parts.iter_mut().filter_map(|(_, adapter)| adapter.as_mut()).for_each(|adapter| adapter.visit(f));
    }
}
