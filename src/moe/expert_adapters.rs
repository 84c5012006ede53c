//! Adapters of a rank's experts: of routed ones one for each product of each expert, stacked as the matrices are, so that
//! gate and up have one A; of a network that every token passes, one for each matrix that is a target.

use std::fmt;
use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::{Device, Tape, Var};

use super::ExpertsShape;
use super::experts::ExpertTensors;
use crate::lora::{AdapterSizes, Adapters, FACTORS, GATE_AND_UP, LowRank, MatrixSlice};
use crate::parallel::operands::whole_to_parts;
use crate::parallel::{Init, Parameters, Slice, Spread, Weight};

/// The terms of the two products of experts.
#[derive(Debug, Default)]
pub(super) struct ExpertAdapters {
    products: [Option<ProductAdapters>; 2],
}

#[derive(Debug)]
enum ProductAdapters {
    Stack(Box<StackAdapter>),
    Parts(Adapters),
}

/// The factors of one product of every expert.
struct StackAdapter {
    /// `[L, rank, in]`.
    a: Weight,
    /// `[L, out, rank]`.
    b: Weight,
    scale: f32,
    /// The ranks that have slices of the same experts, and whether it is A that is whole on each of them, not B.
    slices: Arc<dyn Communicator>,
    a_is_whole: bool,
}

/// The matrices of the two products, with the names of the projections that they are.
fn matrices(shape: &ExpertsShape) -> [Vec<(&'static str, &'static str)>; 2] {
    match shape.activation.is_gated() {
        true => [vec![("w1", "gate_proj"), ("w3", "up_proj")], vec![("w2", "down_proj")]],
        false => [vec![("fc_in", "fc_in")], vec![("fc_out", "fc_out")]],
    }
}

impl ExpertAdapters {
    pub(super) fn new(
        (device, name): (&Arc<Device>, &str),
        shape: &ExpertsShape,
        sizes: &AdapterSizes,
        slices: &Arc<dyn Communicator>,
    ) -> ExpertAdapters {
        let [first, second] = matrices(shape);
        let is_routed = matches!(shape.spread, Spread::Expert(_) | Spread::ExpertTensor(_));
        let adapters = |number: usize, matrices: &[(&str, &str)]| match is_routed {
            true => {
                let stack = || StackAdapter::new((device, name), shape, sizes, (number, matrices), slices);
                sizes.config.experts.then(|| ProductAdapters::Stack(Box::new(stack())))
            }
            false => {
                let adapters = Adapters::new(device, Some(sizes), &beside(name, shape, number, matrices));
                (!adapters.is_empty()).then_some(ProductAdapters::Parts(adapters))
            }
        };
        ExpertAdapters { products: [adapters(0, &first), adapters(1, &second)] }
    }

    /// Whether each product has a term.
    pub(super) fn are_there(&self) -> [bool; 2] {
        [0, 1].map(|product| self.products[product].is_some())
    }

    /// A and B of each product that has a term.
    pub(super) fn on_tape(&self, tape: &Tape) -> Vec<Var> {
        let terms = self.products.iter().flatten().map(|product| match product {
            ProductAdapters::Stack(adapter) => adapter.on_tape(tape),
            ProductAdapters::Parts(adapters) => adapters.on_tape(tape).expect("some matrix is a target").as_stack(),
        });
        terms.flat_map(|LowRank { a, b }| [a, b]).collect()
    }
}

/// The matrices of a product of the one network that is beside the experts.
fn beside<'a>(
    name: &str,
    shape: &ExpertsShape,
    product: usize,
    matrices: &[(&'a str, &'a str)],
) -> Vec<MatrixSlice<'a>> {
    let whole = if product == 0 { [shape.d_expert, shape.d_model] } else { [shape.d_model, shape.d_expert] };
    let matrix = |&(part, target): &(&str, &'a str)| MatrixSlice {
        name: format!("{name}.{}.{part}", shape.local[0]),
        target,
        shape: whole,
        slice: shape.along(product),
        shared: false,
    };
    matrices.iter().map(matrix).collect()
}

impl fmt::Debug for StackAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StackAdapter { a, b, scale, slices, .. } = self;
        let slices = slices.size();
        f.debug_struct("StackAdapter")
            .field("a", a)
            .field("b", b)
            .field("scale", scale)
            .field("slices", &slices)
            .finish()
    }
}

impl StackAdapter {
    fn new(
        (device, name): (&Arc<Device>, &str),
        shape: &ExpertsShape,
        sizes: &AdapterSizes,
        (product, matrices): (usize, &[(&str, &str)]),
        slices: &Arc<dyn Communicator>,
    ) -> StackAdapter {
        let (count, d, f, rank) = (shape.local.len(), shape.d_model, shape.d_expert, sizes.config.rank);
        let factor = |tensors: &ExpertTensors, held: [usize; 2], init| {
            let is_sliced = tensors.iter().any(|(_, _, slice)| slice.is_some());
            let spread = if is_sliced { shape.spread() } else { shape.spread };
            let placement = shape.stack((device, name), spread, tensors);
            Weight::new(device, placement, &[count, held[0], held[1]], sizes.dtype, init).adapting()
        };
        let of = |part: &str, factor: usize, shape: [usize; 2], slice: Option<Slice>| {
            (format!("{part}.{}", FACTORS[factor]), shape.to_vec(), slice)
        };
        let (scale, slices, width) = (sizes.config.scale(), slices.clone(), shape.width());
        if product == 0 {
            let together = if matrices.len() > 1 { GATE_AND_UP } else { matrices[0].0 };
            let a = [of(together, 0, [rank, d], None)];
            let b: Vec<_> = matrices.iter().map(|(part, _)| of(part, 1, [f, rank], shape.along(0))).collect();
            StackAdapter {
                a: factor(&a, [rank, d], sizes.init(d)),
                b: factor(&b, [matrices.len() * width, rank], Init::Zeros),
                scale,
                slices,
                a_is_whole: true,
            }
        } else {
            let (a, b) = ([of(matrices[0].0, 0, [rank, f], shape.along(1))], [of(matrices[0].0, 1, [d, rank], None)]);
            StackAdapter {
                a: factor(&a, [rank, width], sizes.init(f)),
                b: factor(&b, [d, rank], Init::Zeros),
                scale,
                slices,
                a_is_whole: false,
            }
        }
    }

    fn on_tape(&self, tape: &Tape) -> LowRank {
        let [a, b] = [&self.a, &self.b].map(|factor| tape.parameter(&factor.parameter));
        // What is whole makes parts of a sum on every rank, and its gradients are parts of one too.
        let used = |factor: Var, is_whole: bool| match is_whole && self.slices.size() > 1 {
            true => whole_to_parts(factor, &self.slices).expect("nothing is sent on the way forward"),
            false => factor,
        };
        LowRank { a: used(a, self.a_is_whole), b: used(b, !self.a_is_whole).scale(self.scale) }
    }
}

impl Parameters for ExpertAdapters {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        for product in self.products.iter_mut().flatten() {
            match product {
                ProductAdapters::Stack(adapter) => {
                    f(&mut adapter.a);
                    f(&mut adapter.b);
                }
                ProductAdapters::Parts(adapters) => adapters.visit(f),
            }
        }
    }
}
