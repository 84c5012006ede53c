//! Matrix products: `y = x W^T + b` with weights stored `[out, in]`, and plain products in three transpositions.

use crate::cpu::gemm::{SET, View, gemm, set_or_add};
use crate::cpu::rows::{for_rows, sum_over_rows};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::gradients::Gradients;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

/// Which operand of [`Var::matmul`] is transposed. Both never are: no layer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transpose {
    Neither,
    Left,
    Right,
}

/// A tensor as a matrix of its last dim by all others.
fn view(tensor: &Tensor) -> View<'_> {
    View::new(tensor.f32s(), tensor.rows(), tensor.cols(), tensor.cols())
}

/// Adds `g^T x` to the gradient of a weight of `shape`.
fn weight_gradient(gradients: &mut Gradients, to: Input, shape: &[usize], g: &Tensor, x: &Tensor) {
    if !gradients.wants(to) {
        return;
    }
    let (device, x) = (g.device(), x.to_f32());
    gradients.write_rows(device, to, shape, |rows, dw, accumulate| {
        gemm(device, dw, x.cols(), view(g).t().at_rows(rows), view(&x), set_or_add(accumulate));
    });
}

/// Adds the column sums of `gradient` to a bias's gradient.
pub(super) fn add_bias_gradient(gradients: &mut Gradients, bias: Input, gradient: &Tensor) {
    if !gradients.wants(bias) {
        return;
    }
    let (device, cols) = (gradient.device(), gradient.cols());
    let sums = column_sums(device, gradient.f32s(), cols);
    gradients.add(bias, Tensor::from_slice(device, &[cols], &sums));
}

/// The sums of the columns of rows `cols` wide.
pub(super) fn column_sums(device: &Device, x: &[f32], cols: usize) -> Vec<f32> {
    sum_over_rows(
        device,
        x.len().checked_div(cols).unwrap_or(0),
        cols,
        #[inline(always)]
        |rows, sum| {
            for row in x[rows.start * cols..rows.end * cols].chunks_exact(cols) {
                sum.iter_mut().zip(row).for_each(|(s, x)| *s += x);
            }
        },
    )
}

pub(super) fn fill_rows(device: &Device, out: &mut [f32], row: &[f32]) {
    for_rows(
        device,
        out,
        row.len(),
        64,
        #[inline(always)]
        |_, run| {
            run.chunks_exact_mut(row.len().max(1)).for_each(|line| line.copy_from_slice(row));
        },
    );
}

/// `x W^T + b` in `shape`, f32.
fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, shape: &[usize]) -> Tensor {
    let (device, outer) = (x.device(), weight.rows());
    let mut y = Tensor::stale(device, shape, Dtype::F32);
    if let Some(bias) = bias {
        fill_rows(device, y.f32s_mut(), bias.to_f32().f32s());
    }
    let how = set_or_add(bias.is_some());
    gemm(device, y.f32s_mut(), outer, view(&x.to_f32()), view(&weight.to_f32()).t(), how);
    y
}

impl Var {
    /// `x W^T + b`: x `[.., in]`, w `[out, in]`, b `[out]`; gives `[.., out]`.
    #[track_caller]
    pub fn linear(&self, w: &Var, bias: Option<&Var>) -> Var {
        let (inner, outer) = (self.cols(), w.shape()[0]);
        assert!(w.shape().len() == 2 && w.shape()[1] == inner, "x {:?}, w {:?}", self.shape(), w.shape());
        let (x, weight) = (self.value().clone(), w.kept());
        let mut shape = self.shape().to_vec();
        *shape.last_mut().expect("x has a last dim") = outer;
        if let Some(bias) = bias {
            assert_eq!(bias.shape(), [outer], "bias of a layer with {outer} outputs");
        }
        let make = {
            let (x, weight, bias) = (x.clone(), w.value().clone(), bias.map(|bias| bias.value().clone()));
            let (shape, dtype) = (shape.clone(), self.dtype());
            move || product(&x, &weight, bias.as_ref(), &shape).cast(dtype)
        };
        let (to_x, to_w, to_bias) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape().late_op("linear", (&shape, self.dtype()), &inputs, make, move |g, gradients| {
            let (device, weight) = (g.device().clone(), weight.tensor());
            if let Some(to_bias) = to_bias {
                add_bias_gradient(gradients, to_bias, &g);
            }
            weight_gradient(gradients, to_w, weight.shape(), &g, &x);
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                gemm(&device, dx, inner, view(&g), view(&weight.to_f32()), set_or_add(accumulate));
            });
        })
    }

    /// `x W^T` whose value is known, on the tape for w's gradient.
    pub(super) fn linear_again(&self, w: &Var, value: Tensor) -> Var {
        let (x, shape, to_w) = (self.value().clone(), w.shape().to_vec(), w.input());
        self.tape().op("linear", value, &[w], move |g, gradients| {
            weight_gradient(gradients, to_w, &shape, &g, &x);
        })
    }

    /// The product of two matrices (leading dims of a tensor count as rows), one of them possibly transposed.
    #[track_caller]
    pub fn matmul(&self, other: &Var, transpose: Transpose) -> Var {
        let (a, b) = (self.value().clone(), other.value().clone());
        let (a32, b32) = (a.to_f32(), b.to_f32());
        let (rows, cols) = match transpose {
            Transpose::Neither => (a.rows(), b.cols()),
            Transpose::Left => (a.cols(), b.cols()),
            Transpose::Right => (a.rows(), b.rows()),
        };
        let mut y = Tensor::stale(self.device(), &[rows, cols], Dtype::F32);
        match transpose {
            Transpose::Neither => gemm(self.device(), y.f32s_mut(), cols, view(&a32), view(&b32), SET),
            Transpose::Left => gemm(self.device(), y.f32s_mut(), cols, view(&a32).t(), view(&b32), SET),
            Transpose::Right => gemm(self.device(), y.f32s_mut(), cols, view(&a32), view(&b32).t(), SET),
        }
        let (to_a, to_b) = (self.input(), other.input());
        self.tape().op("matmul", y.cast(self.dtype()), &[self, other], move |g, gradients| {
            let device = g.device().clone();
            let (a, b) = (a.to_f32(), b.to_f32());
            gradients.write(&device, to_a, a.shape(), |da, accumulate| {
                let how = set_or_add(accumulate);
                match transpose {
                    Transpose::Neither => gemm(&device, da, a.cols(), view(&g), view(&b).t(), how),
                    Transpose::Left => gemm(&device, da, a.cols(), view(&b), view(&g).t(), how),
                    Transpose::Right => gemm(&device, da, a.cols(), view(&g), view(&b), how),
                }
            });
            gradients.write(&device, to_b, b.shape(), |db, accumulate| {
                let how = set_or_add(accumulate);
                match transpose {
                    Transpose::Neither => gemm(&device, db, b.cols(), view(&a).t(), view(&g), how),
                    Transpose::Left => gemm(&device, db, b.cols(), view(&a), view(&g), how),
                    Transpose::Right => gemm(&device, db, b.cols(), view(&g).t(), view(&a), how),
                }
            });
        })
    }
}
