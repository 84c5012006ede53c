//! Add, scale, dropout, cast, reshape, weighted sums to a scalar.

use super::f32_like;
use crate::cpu::rows::{for_rows, map, zip};
use crate::draws::Draws;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// `x + y`, of one shape. The gradient goes to both without a copy.
    #[track_caller]
    pub fn add(&self, other: &Var) -> Var {
        assert_eq!(self.shape(), other.shape(), "addends");
        let (a, b, dtype) = (self.clone(), other.clone(), self.dtype());
        let make = move || {
            let (x, y) = (a.value().to_f32(), b.value().to_f32());
            let mut out = f32_like(&x);
            zip(
                x.device(),
                out.f32s_mut(),
                x.f32s(),
                y.f32s(),
                false,
                #[inline(always)]
                |x, y| x + y,
            );
            out.cast(dtype)
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
        map(
            self.device(),
            out.f32s_mut(),
            x.f32s(),
            false,
            #[inline(always)]
            |x| x * factor,
        );
        self.tape().op("scale", out.cast(self.dtype()), &[self], move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, g.shape(), |dx, accumulate| {
                map(
                    &device,
                    dx,
                    g.f32s(),
                    accumulate,
                    #[inline(always)]
                    |g| g * factor,
                );
            });
        })
    }

    /// Zeroes each element with probability `p` and divides the others by `1 - p`. Element i of row r draws number
    /// `(first_row + r) * width + i`, so the rows of a batch draw the same wherever they are computed.
    #[track_caller]
    pub fn dropout(&self, p: f32, draws: Draws, first_row: u64) -> Var {
        assert!((0.0..1.0).contains(&p), "dropout with probability {p}");
        if p == 0.0 {
            return self.clone();
        }
        let (x, to, dtype) = (self.clone(), self.input(), self.dtype());
        let first = first_row * self.cols() as u64;
        let make = move || {
            let x = x.value().to_f32();
            let mut out = f32_like(&x);
            drop_elements(&x, out.f32s_mut(), false, (p, draws, first));
            out.cast(dtype)
        };
        self.tape().late_op("dropout", (self.shape(), dtype), &[self], make, move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, g.shape(), |dx, accumulate| {
                drop_elements(&g, dx, accumulate, (p, draws, first));
            });
        })
    }

    /// `x[i] * factors[i]`, the factors being constants.
    #[track_caller]
    pub fn mul_constant(&self, factors: &Tensor) -> Var {
        assert_eq!(self.value().len(), factors.len(), "one factor an element");
        let (x, to, factors) = (self.value().to_f32(), self.input(), factors.clone());
        let mut out = f32_like(&x);
        zip(
            self.device(),
            out.f32s_mut(),
            x.f32s(),
            factors.f32s(),
            false,
            #[inline(always)]
            |x, factor| x * factor,
        );
        let shape = x.shape().to_vec();
        self.tape().op("mul_constant", out.cast(self.dtype()), &[self], move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, &shape, |dx, accumulate| {
                zip(
                    &device,
                    dx,
                    g.f32s(),
                    factors.f32s(),
                    accumulate,
                    #[inline(always)]
                    |g, factor| g * factor,
                );
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
        let total: f64 = x.f32s().iter().zip(weights.f32s()).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        let value = Tensor::from_slice(self.device(), &[1], &[total as f32]);
        let shape = self.shape().to_vec();
        self.tape().op("dot_constant", value, &[self], move |g, gradients| {
            let (device, g) = (g.device().clone(), g.scalar());
            gradients.write(&device, to, &shape, |dx, accumulate| {
                map(
                    &device,
                    dx,
                    weights.f32s(),
                    accumulate,
                    #[inline(always)]
                    |w| w * g,
                );
            });
        })
    }
}

fn drop_elements(x: &Tensor, out: &mut [f32], accumulate: bool, (p, draws, first_index): (f32, Draws, u64)) {
    let keep = 1.0 / (1.0 - p);
    for_rows(
        x.device(),
        out,
        1,
        4096,
        #[inline(always)]
        |first, run| {
            for (i, (o, x)) in run.iter_mut().zip(&x.f32s()[first..]).enumerate() {
                let kept = if draws.uniform(first_index + (first + i) as u64) < p { 0.0 } else { x * keep };
                *o = if accumulate { *o + kept } else { kept };
            }
        },
    );
}
