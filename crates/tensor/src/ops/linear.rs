//! Matrix products: `y = x W^T + b` with weights stored `[out, in]`.

use crate::cpu::product::{Matrix, Product};
use crate::cpu::stored::scratch_len;
use crate::dtype::Dtype;
use crate::gradients::Gradients;
use crate::kernels;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

/// A tensor as a matrix of its last dim by all others.
pub(super) fn whole(tensor: &Tensor) -> Matrix {
    Matrix::new(0..tensor.rows(), tensor.cols())
}

/// `out[rows from first] (+)= a b`, counted.
pub(super) fn multiply(out: &mut Tensor, a: &Tensor, b: &Tensor, p: &Product) {
    let [rows, inner, cols] = p.dims();
    out.device().count_product(rows, inner, cols);
    kernels::multiply_into(out, a, b, p);
}

/// `out[first rows] = a b (+ bias)`, counted.
pub(super) fn linear_into(out: &mut Tensor, a: &Tensor, b: &Tensor, bias: Option<&Tensor>, read: [Matrix; 2]) {
    let [read_a, read_b] = read;
    let p = Product { a: read_a, b: read_b, first: 0, accumulate: false };
    let Some(bias) = bias else { return multiply(out, a, b, &p) };
    let [rows, inner, cols] = p.dims();
    out.device().count_product(rows, inner, cols);
    kernels::linear(out, a, b, bias, [&p.a, &p.b]);
}

/// Adds `g^T x` to the gradient of a weight of `shape`.
fn weight_gradient(gradients: &mut Gradients, to: Input, shape: &[usize], g: &Tensor, x: &Tensor) {
    if !gradients.wants(to) {
        return;
    }
    let (device, widths) = (g.device(), [g.cols(), x.cols()]);
    gradients.write_stored(device, to, shape, |dw, accumulate| {
        let mut scratch = scratch_for(dw, x.cols());
        device.count_product(widths[0], x.rows(), widths[1]);
        kernels::weight_gradient(dw, &mut scratch, g, x, widths, accumulate);
    });
}

/// The type in which two products with a factor of this type read a gradient: rounded once for both. A processor rounds it for
/// one alone while it packs.
fn type_for_products(g: &Tensor, factor: Dtype, are_wanted: [bool; 2]) -> Dtype {
    if g.device().is_wide() || are_wanted == [true; 2] { factor } else { Dtype::F32 }
}

/// A gradient as two products with a factor of this type read it.
pub(super) fn rounded_once(g: Tensor, factor: Dtype, are_wanted: [bool; 2]) -> Tensor {
    let dtype = type_for_products(&g, factor, are_wanted);
    g.into_dtype(dtype)
}

/// The f32 memory through which rows of `width` elements are written where they are stored in less.
pub(super) fn scratch_for(stored: &Tensor, width: usize) -> Tensor {
    let len = scratch_len(stored.dtype(), width, stored.len());
    Tensor::stale(stored.device(), &[len], Dtype::F32)
}

/// Adds the column sums of `gradient` to a bias's gradient.
pub(super) fn add_bias_gradient(gradients: &mut Gradients, bias: Input, gradient: &Tensor) {
    if !gradients.wants(bias) {
        return;
    }
    let mut sums = Tensor::stale(gradient.device(), &[gradient.cols()], Dtype::F32);
    kernels::column_sums(&mut sums, gradient, gradient.rows(), false);
    gradients.add(bias, sums);
}

/// The same, and the gradient in `dtype`: read once for both.
fn bias_gradient_and_rounded(gradients: &mut Gradients, bias: Input, gradient: Tensor, dtype: Dtype) -> Tensor {
    if gradient.dtype() == dtype || !gradients.wants(bias) {
        add_bias_gradient(gradients, bias, &gradient);
        return gradient.into_dtype(dtype);
    }
    let mut rounded = Tensor::stale(gradient.device(), gradient.shape(), dtype);
    let mut sums = Tensor::stale(gradient.device(), &[gradient.cols()], Dtype::F32);
    kernels::convert_and_sum(&mut rounded, &mut sums, &gradient);
    gradients.add(bias, sums);
    rounded
}

/// `x W^T + b` in `shape`.
fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, (shape, dtype): (&[usize], Dtype)) -> Tensor {
    let mut y = Tensor::stale(x.device(), shape, dtype);
    let bias = bias.map(|bias| bias.cast(dtype));
    linear_into(&mut y, x, weight, bias.as_ref(), [whole(x), whole(weight).t()]);
    y
}

/// The type of both, if they are of one.
pub(super) fn common_type(a: &Tensor, b: &Tensor) -> Dtype {
    if a.dtype() == b.dtype() { a.dtype() } else { Dtype::F32 }
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
            move || product(&x, &weight, bias.as_ref(), (&shape, dtype))
        };
        let (to_x, to_w, to_bias) = (self.input(), w.input(), bias.map(Var::input));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape().late_op("linear", (&shape, self.dtype()), &inputs, make, move |g, gradients| {
            let weight = weight.tensor();
            let are_wanted = [to_w, to_x].map(|input| gradients.wants(input));
            let dtype = type_for_products(&g, common_type(&x, &weight), are_wanted);
            let g = match to_bias {
                Some(to_bias) => bias_gradient_and_rounded(gradients, to_bias, g, dtype),
                None => g.into_dtype(dtype),
            };
            weight_gradient(gradients, to_w, weight.shape(), &g, &x);
            gradients.write(g.device(), to_x, x.shape(), |dx, accumulate| {
                let p = Product { a: whole(&g), b: whole(&weight), first: 0, accumulate };
                multiply(dx, &g, &weight, &p);
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
}
