//! Weights: a parameter with its placement, and initial values that depend on the seed and tensors' names alone.

use std::sync::Arc;

use guildhall_tensor::{Cause, Device, Draws, Dtype, Parameter, Tensor};

use super::{Placement, Spread};

/// A parameter and its placement.
#[derive(Debug)]
pub struct Weight {
    pub parameter: Parameter,
    pub placement: Placement,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decays: bool,
    /// Whether it is a factor of a term of another weight, which is trained in the other's stead.
    pub adapts: bool,
    /// Whether it is a table `[V, D]` of which a token uses one row and nothing else uses any: rows of ids that nobody reads
    /// have gradients of zero.
    pub looked_up: bool,
}

/// Anything that has parameters. One traversal serves initialisation, the optimizer, gradient sync, checkpoints and
/// counting; its order is the same on every rank.
pub trait Parameters {
    /// Calls `f` with every weight.
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight));

    /// Calls `f` with every weight that is trained. A frozen one has no gradient to sum and no optimizer state: whatever
    /// numbers weights by their gradients counts these alone.
    fn visit_trained(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit(&mut |weight| {
            if !weight.parameter.is_frozen() {
                f(weight);
            }
        });
    }

    /// Calls `f` with everything else a checkpoint must hold.
    fn visit_buffers(&mut self, _f: &mut dyn FnMut(&mut Buffer)) {}
}

/// Numbers that are state but not learned by gradients, equal on every rank.
#[derive(Debug)]
pub struct Buffer {
    pub placement: Placement,
    pub value: Tensor,
}

/// How a weight starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with this standard deviation.
    Normal {
        std: f32,
        seed: u64,
    },
    /// Uniform from `-bound` to `bound`.
    Uniform {
        bound: f32,
        seed: u64,
    },
}

impl Weight {
    /// A weight that is one global tensor, the same on every rank.
    pub fn replicated(device: &Arc<Device>, name: &str, shape: &[usize], dtype: Dtype, init: Init) -> Weight {
        let placement = Placement::new(Spread::Replicated, [(name.to_owned(), shape.to_vec())]);
        Weight::new(device, placement, shape, dtype, init)
    }

    /// The same with gradients that are parts of a sum over the tensor group, or not.
    pub fn partial(self, partial: bool) -> Weight {
        Weight { placement: self.placement.partial(partial), ..self }
    }

    /// The same as a factor of a term of another weight.
    pub fn adapting(self) -> Weight {
        Weight { adapts: true, ..self }
    }

    /// The same as a table that is only looked up, or not.
    pub fn looked_up(self, looked_up: bool) -> Weight {
        Weight { looked_up, ..self }
    }

    /// A weight of `shape` made of the placement's pieces. Matrices decay; vectors do not.
    ///
    /// # Panics
    /// If the pieces do not fill the shape.
    #[track_caller]
    pub fn new(device: &Arc<Device>, placement: Placement, shape: &[usize], dtype: Dtype, init: Init) -> Weight {
        let _charge = device.charge(Cause::Parameters);
        let length: usize = placement.pieces.iter().map(|piece| piece.len()).sum();
        let mut value = Tensor::zeros(device, shape);
        assert_eq!(length, value.len(), "the pieces {:?} do not fill {shape:?}", placement.pieces);
        value.write_f32s(0..length, |elements| fill(elements, &placement, init));
        let decays = placement.pieces.iter().all(|piece| piece.shape.len() >= 2);
        let name = placement.pieces.first().map_or_else(String::new, |piece| piece.name.clone());
        let parameter = Parameter::new(name, value.cast(dtype));
        Weight { parameter, placement, decays, adapts: false, looked_up: false }
    }
}

fn fill(elements: &mut [f32], placement: &Placement, init: Init) {
    match init {
        Init::Zeros => elements.fill(0.0),
        Init::Ones => elements.fill(1.0),
        Init::Normal { std, seed } => draw(elements, placement, seed, |draws, i| draws.normal(i) * std),
        Init::Uniform { bound, seed } => {
            draw(elements, placement, seed, |draws, i| (2.0 * draws.uniform(i) - 1.0) * bound);
        }
    }
}

/// Every element by its tensor's draws and its number in the tensor.
fn draw(elements: &mut [f32], placement: &Placement, seed: u64, value: impl Fn(&Draws, u64) -> f32) {
    for piece in &placement.pieces {
        let draws = piece.draws(seed);
        for run in piece.runs() {
            let part = elements[run.local..run.local + run.len].iter_mut();
            part.zip(run.global as u64..).for_each(|(x, i)| *x = value(&draws, i));
        }
    }
}
