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
        let mut value = Tensor::stale(device, shape, Dtype::F32);
        assert_eq!(length, value.len(), "the pieces {:?} do not fill {shape:?}", placement.pieces);
        init.write(&mut value, &placement);
        let decays = placement.pieces.iter().all(|piece| piece.shape.len() >= 2);
        let name = placement.pieces.first().map_or_else(String::new, |piece| piece.name.clone());
        let parameter = Parameter::new(name, value.cast(dtype));
        Weight { parameter, placement, decays, adapts: false, looked_up: false }
    }
}

impl Init {
    /// Over all elements. Each depends on its own number alone, so threads share them.
    fn write(self, value: &mut Tensor, placement: &Placement) {
        match self {
            Init::Zeros => value.fill(0.0),
            Init::Ones => value.fill(1.0),
            Init::Normal { std, seed } => value.write_f32s_by_threads(|first, part| {
                draw(first, part, placement, seed, Draws::normals);
                part.iter_mut().for_each(|x| *x *= std);
            }),
            Init::Uniform { bound, seed } => value.write_f32s_by_threads(|first, part| {
                draw(first, part, placement, seed, Draws::uniforms);
                part.iter_mut().for_each(|x| *x = (2.0 * *x - 1.0) * bound);
            }),
        }
    }
}

/// The elements from `first` on, each by its tensor's draws and its number in the tensor.
fn draw(first: usize, part: &mut [f32], placement: &Placement, seed: u64, draw: impl Fn(&Draws, u64, &mut [f32])) {
    let range = first..first + part.len();
    for piece in &placement.pieces {
        let draws = piece.draws(seed);
        for run in piece.runs_within(&range) {
            draw(&draws, run.global as u64, &mut part[run.local - first..][..run.len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Slice;
    use super::*;

    /// In parts of other sizes, on other devices, and of slices whose runs are short.
    #[test]
    fn initial_values_depend_on_the_seed_and_numbers_alone() {
        let columns = Slice { dim: 1, start: 3, len: 37 };
        let tensors = || [("a".into(), vec![250, 50], Some(columns)), ("b".into(), vec![17, 37], None)];
        let placement = || Placement::sliced(Spread::Tensor, tensors());
        let (std, bound, seed) = (0.02, 0.3, 5);
        let each = |value: fn(&Draws, u64) -> f32| -> Vec<f32> {
            let of_piece = |piece: &crate::parallel::Piece| {
                let (draws, runs) = (piece.draws(seed), piece.runs());
                let numbers = runs.flat_map(|run| run.global..run.global + run.len);
                numbers.map(|number| value(&draws, number as u64)).collect::<Vec<_>>()
            };
            placement().pieces.iter().flat_map(of_piece).collect()
        };
        let normal: Vec<f32> = each(Draws::normal).iter().map(|x| x * std).collect();
        let uniform: Vec<f32> = each(Draws::uniform).iter().map(|x| (2.0 * x - 1.0) * bound).collect();
        for device in [Device::new(1), Device::new(3), Device::simulated(2).expect("a C++ compiler")] {
            let weight = |init| {
                let weight = Weight::new(&device, placement(), &[267, 37], Dtype::F32, init);
                weight.parameter.value().to_vec()
            };
            assert_eq!(weight(Init::Normal { std, seed }), normal, "{device:?}");
            assert_eq!(weight(Init::Uniform { bound, seed }), uniform, "{device:?}");
            assert_eq!(weight(Init::Ones), vec![1.0; normal.len()], "{device:?}");
        }
    }
}
