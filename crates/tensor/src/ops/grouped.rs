//! Grouped products: rows sorted by expert, each run of rows times its own expert's weights.
//!
//! Rows of expert e are contiguous and experts come in order, `counts[e]` rows each (possibly none).

use super::linear::{common_type, rounded_once};
use crate::cpu::stored::scratch_len;
use crate::dtype::Dtype;
use crate::gradients::Gradients;
use crate::kernels;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

impl Var {
    /// `y[rows of e] = x[rows of e] W_e^T + b_e`: x `[R, in]` sorted by expert, w `[E, out, in]`, b `[E, out]`,
    /// `counts[e]` rows of expert e; gives `[R, out]` (Gale et al. 2022; FastMoE, 3.2).
    #[track_caller]
    pub fn grouped_linear(&self, w: &Var, bias: Option<&Var>, counts: &[usize]) -> Var {
        let [experts, outer, inner] = *w.shape() else { panic!("expert weights have three dims, got {:?}", w.shape()) };
        assert!(experts == counts.len() && inner == self.cols(), "x {:?}, w {:?}", self.shape(), w.shape());
        assert_eq!(self.value().rows(), counts.iter().sum::<usize>(), "rows against {counts:?}");
        if let Some(bias) = bias {
            assert_eq!(bias.shape(), [experts, outer], "biases of {experts} experts with {outer} outputs");
        }
        let (device, counts) = (self.device().clone(), counts.to_vec());
        let (x, weight) = (self.value().clone(), w.kept());
        let make = {
            let (x, weight, bias) = (x.clone(), w.value().clone(), bias.map(|bias| bias.value().clone()));
            let (counts, dtype) = (counts.clone(), self.dtype());
            move || product(&x, &weight, bias.as_ref(), &counts, dtype)
        };
        let (shape, dtype) = ([x.rows(), outer], self.dtype());
        let (to_x, to_w, to_bias) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape().late_stored_op("grouped_linear", (&shape, dtype), &inputs, make, move |g, gradients| {
            let weight = weight.tensor();
            let g = if to_bias.is_some() { g.into_f32() } else { g };
            if let Some(to_bias) = to_bias {
                gradients.write(&device, to_bias, &[experts, outer], |db, accumulate| {
                    kernels::grouped_bias_gradient(db, &g, &counts, accumulate);
                });
            }
            let are_wanted = [to_w, to_x].map(|input| gradients.wants(input));
            let g = rounded_once(g, common_type(&x, &weight), are_wanted);
            weight_gradient(gradients, (to_w, weight.shape()), &g, &x, &counts);
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                device.count_product(g.rows(), outer, inner);
                kernels::grouped_multiply(dx, &g, &weight, &counts, [outer, inner], false, accumulate);
            });
        })
    }
}

/// Each expert's rows times its weights, plus its bias.
fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, counts: &[usize], dtype: Dtype) -> Tensor {
    let (device, dims) = (x.device(), [weight.shape()[1], weight.shape()[2]]);
    let mut y = Tensor::stale(device, &[x.rows(), dims[0]], dtype);
    if let Some(bias) = bias {
        kernels::grouped_fill(&mut y, &bias.cast(dtype), counts);
    }
    device.count_product(x.rows(), dims[1], dims[0]);
    kernels::grouped_multiply(&mut y, x, weight, counts, dims, true, bias.is_some());
    y
}

/// Adds `g[rows of e]^T x[rows of e]` to the gradient of experts' weights `[E, out, in]`.
pub(super) fn weight_gradient(
    gradients: &mut Gradients,
    (to, shape): (Input, &[usize]),
    g: &Tensor,
    x: &Tensor,
    counts: &[usize],
) {
    let (device, widths) = (g.device(), [g.cols(), x.cols()]);
    gradients.write_stored(device, to, shape, |dw, accumulate| {
        device.count_product(widths[0], g.rows(), widths[1]);
        let piece = scratch_len(dw.dtype(), widths[1], widths[0] * widths[1]);
        let mut scratch = Tensor::stale(device, &[piece * device.threads().min(counts.len())], Dtype::F32);
        kernels::grouped_weight_gradient(dw, &mut scratch, g, x, counts, widths, accumulate);
    });
}
