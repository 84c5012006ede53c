//! Add, scale, dropout, cast, reshape, weighted sums to a scalar.

use super::{f32_like, stale_like};
use crate::draws::Draws;
use crate::dtype::Dtype;
use crate::kernels;
use crate::row_ids::RowIds;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `x + y`, of one shape. The gradient goes to both without a copy.
    #[track_caller]
    pub fn add(&self, other: &Var) -> Var {
        assert_eq!(self.shape(), other.shape(), "addends");
        let (a, b, dtype) = (self.clone(), other.clone(), self.dtype());
        let make = move || {
            let mut out = stale_like(a.value());
            kernels::sum(&mut out, a.value(), b.value());
            out
        };
        let (to_x, to_y) = (self.input(), other.input());
        self.tape().late_op("add", (self.shape(), dtype), &[self, other], make, move |g, gradients| {
            gradients.add(to_x, g.clone());
            gradients.add(to_y, g);
        })
    }

    /// `x * factor`.
    pub fn scale(&self, factor: f32) -> Var {
        let (x, to) = (self.value().to_f32(), self.input());
        let mut out = f32_like(&x);
        kernels::scale(&mut out, &x, factor, false);
        self.tape().op("scale", out.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(g.device(), to, g.shape(), |dx, accumulate| {
                kernels::scale(dx, &g, factor, accumulate);
            });
        })
    }

    /// Zeroes each element with probability `p` and divides the others by `1 - p`. Element i of row r draws number
    /// `rows[r] * width + i`, so the rows of a batch draw the same wherever they are computed.
    ///
    /// # Panics
    /// If there are not as many rows.
    #[track_caller]
    pub fn dropout(&self, p: f32, draws: Draws, rows: RowIds) -> Var {
        assert!((0.0..1.0).contains(&p), "dropout with probability {p}");
        assert_eq!(rows.len(), self.rows(), "a number for every row");
        if p == 0.0 {
            return self.clone();
        }
        let (x, to, dtype) = (self.clone(), self.input(), self.dtype());
        let again = rows.clone();
        let make = move || {
            let x = x.value().to_f32();
            let mut out = f32_like(&x);
            kernels::drop_elements(&mut out, &x, p, draws, &again, false);
            out.cast(dtype)
        };
        self.tape().late_op("dropout", (self.shape(), dtype), &[self], make, move |g, gradients| {
            gradients.write(g.device(), to, g.shape(), |dx, accumulate| {
                kernels::drop_elements(dx, &g, p, draws, &rows, accumulate);
            });
        })
    }

    /// `x[i] * factors[i]`, the factors being constants.
    #[track_caller]
    pub fn mul_constant(&self, factors: &Tensor) -> Var {
        assert_eq!(self.value().len(), factors.len(), "one factor an element");
        let (x, to, factors) = (self.value().to_f32(), self.input(), factors.clone());
        let mut out = f32_like(&x);
        kernels::multiply(&mut out, &x, &factors, false);
        let shape = x.shape().to_vec();
        self.tape().op("mul_constant", out.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::multiply(dx, &g, &factors, accumulate);
            });
        })
    }

    /// The same values stored as `dtype`.
    pub fn cast(&self, dtype: Dtype) -> Var {
        if self.dtype() == dtype {
            return self.clone();
        }
        let to = self.input();
        self.tape().op("cast", self.value().cast(dtype), &[self], move |g, gradients| gradients.add(to, g))
    }

    /// The same elements under another shape.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Var {
        let (to, before) = (self.input(), self.shape().to_vec());
        self.tape().op("reshape", self.value().reshape(shape), &[self], move |g, gradients| {
            gradients.add(to, g.reshape(&before));
        })
    }

    /// `sum_i weights[i] * x[i]` over all elements, the weights being constants. Scalar.
    #[track_caller]
    pub fn dot_constant(&self, weights: Tensor) -> Var {
        assert_eq!(self.value().len(), weights.len(), "one weight an element");
        let (x, to) = (self.value().to_f32(), self.input());
        let mut value = Tensor::stale(self.device(), &[1], Dtype::F32);
        kernels::dot(&mut value, &x, &weights);
        let shape = self.shape().to_vec();
        self.tape().op("dot_constant", value, &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::scale_by(dx, &weights, &g, accumulate);
            });
        })
    }
}
