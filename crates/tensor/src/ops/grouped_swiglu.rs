//! SwiGLU experts in one op: `y = (silu(x G^T) * (x U^T)) D^T` for rows sorted by expert.
//!
//! Only the gate and up values are kept; backward computes their product again, which costs an exponential an element
//! and saves a third of an MoE layer's activations.

use super::grouped::weight_gradient;
use super::linear::{common_type, rounded_once};
use crate::cpu::grouped_swiglu::Widths;
use crate::dtype::Dtype;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// Rows `[R, D]` sorted by expert, `counts[e]` of each; gate_up `[E, 2 F, D]`, each expert's gate above its up;
    /// down `[E, D, F]`; gives `[R, D]` (Shazeer 2020, one expert a group).
    #[track_caller]
    pub fn grouped_swiglu(&self, gate_up: &Var, down: &Var, counts: &[usize]) -> Var {
        let [experts, both, outer] = *gate_up.shape() else { panic!("gate_up of shape {:?}", gate_up.shape()) };
        let (inner, widths) = (both / 2, Widths { outer, inner: both / 2 });
        assert_eq!(down.shape(), [experts, outer, inner], "down against gate_up {:?}", gate_up.shape());
        assert!(experts == counts.len() && self.cols() == outer, "x {:?}, {counts:?}", self.shape());
        assert_eq!(self.value().rows(), counts.iter().sum::<usize>(), "rows against {counts:?}");
        let (device, counts) = (self.device().clone(), counts.to_vec());
        let (x, first, second) = (self.value().clone(), gate_up.kept(), down.kept());
        let (shape, dtype, late) = ([x.rows(), outer], self.dtype(), self.tape().is_late());
        let (kept, y) = forward(&x, [gate_up, down].map(Var::value), late, &counts);
        let make: Box<dyn FnOnce() -> Tensor> = match y {
            Some(y) => Box::new(move || y),
            None => {
                let (kept, second, counts) = (kept.clone(), down.value().clone(), counts.clone());
                Box::new(move || from_kept(&kept, &second, &counts))
            }
        };
        let (to_x, to_first, to_second) = (self.input(), gate_up.input(), down.input());
        self.tape().late_stored_op(
            "grouped_swiglu",
            (&shape, dtype),
            &[self, gate_up, down],
            make,
            move |g, gradients| {
                let (mut kept, first, second) = (kept, first.tensor(), second.tensor());
                // Going back reads it in any case.
                let g = rounded_once(g, common_type(&kept, &second), [true, gradients.wants(to_second)]);
                let mut hidden = Tensor::stale(&device, &[x.rows(), inner], kept.dtype());
                let mut go_back = |dx: &mut Tensor, accumulate| {
                    device.count_product(g.rows(), outer, inner);
                    device.count_product(g.rows(), both, outer);
                    kernels::swiglu_experts_back(
                        &mut kept,
                        &mut hidden,
                        dx,
                        &g,
                        &first,
                        &second,
                        &counts,
                        widths,
                        accumulate,
                    );
                };
                if gradients.wants(to_x) {
                    gradients.write(&device, to_x, x.shape(), go_back);
                } else {
                    // The weights' gradients need what going back leaves in `kept` and `hidden`.
                    go_back(&mut Tensor::stale(&device, x.shape(), Dtype::F32), false);
                }
                weight_gradient(gradients, (to_second, second.shape()), &g, &hidden, &counts);
                weight_gradient(gradients, (to_first, first.shape()), &kept, &x, &counts);
            },
        )
    }
}

/// Gate and up `[R, 2 F]`, and the result unless it is to come late, of the type of x.
fn forward(x: &Tensor, [first, second]: [&Tensor; 2], late: bool, counts: &[usize]) -> (Tensor, Option<Tensor>) {
    let (device, both, outer) = (x.device(), first.shape()[1], first.shape()[2]);
    let widths = Widths { outer, inner: both / 2 };
    let mut kept = Tensor::stale(device, &[x.rows(), both], x.dtype());
    device.count_product(x.rows(), outer, both);
    if late {
        kernels::gate_and_up(&mut kept, x, first, counts, widths);
        return (kept, None);
    }
    let mut y = Tensor::stale(device, &[x.rows(), outer], x.dtype());
    device.count_product(x.rows(), both / 2, outer);
    kernels::swiglu_experts(&mut kept, &mut y, x, first, second, counts, widths);
    (kept, Some(y))
}

/// The result from gate and up alone.
fn from_kept(kept: &Tensor, second: &Tensor, counts: &[usize]) -> Tensor {
    let (device, widths) = (kept.device(), Widths { outer: second.shape()[1], inner: second.shape()[2] });
    let mut y = Tensor::stale(device, &[kept.rows(), widths.outer], kept.dtype());
    device.count_product(kept.rows(), widths.inner, widths.outer);
    kernels::from_gate_and_up(&mut y, kept, second, counts, widths);
    y
}
