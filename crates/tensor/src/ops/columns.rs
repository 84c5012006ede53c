//! Some columns of a matrix, and the columns of two matrices side by side.

use std::ops::Range;

use crate::cpu::columns::ColumnRange;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// The columns of `range`: x `[R, W]` gives `[R, range.len()]`.
    ///
    /// # Panics
    /// If there are none, or x has fewer.
    #[track_caller]
    pub fn columns(&self, range: Range<usize>) -> Var {
        let (rows, of) = (self.value().rows(), self.value().cols());
        let columns = ColumnRange { of, first: range.start, count: range.len() };
        assert!(!range.is_empty() && range.end <= of, "columns {range:?} of {of}");
        let mut out = Tensor::stale(self.device(), &[rows, columns.count], self.dtype());
        kernels::columns(&mut out, self.value(), columns, false);
        let (to, shape) = (self.input(), self.shape().to_vec());
        self.tape().op("columns", out, &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::columns_back(dx, &g, columns, accumulate);
            });
        })
    }

    /// The columns of x and, behind them, those of `other`, of which each row stands beside as many consecutive rows of x:
    /// x `[n R, A]` and other `[R, B]` give `[n R, A + B]`.
    ///
    /// # Panics
    /// If x has no multiple of other's rows.
    #[track_caller]
    pub fn beside(&self, other: &Var) -> Var {
        let (rows, few) = (self.value().rows(), other.value().rows());
        assert!(rows.is_multiple_of(few), "{rows} rows beside {few}");
        let repeats = rows.checked_div(few).unwrap_or(1).max(1);
        let widths @ [width, other_width] = [self, other].map(|part| part.value().cols());
        let of = width + other_width;
        let mut out = Tensor::stale(self.device(), &[rows, of], self.dtype());
        kernels::beside(&mut out, self.value(), other.value(), widths, repeats);
        let to = [self, other].map(Var::input);
        self.tape().op("beside", out, &[self, other], move |g, gradients| {
            let [to_x, to_other] = to;
            gradients.write(g.device(), to_x, &[rows, width], |dx, accumulate| {
                kernels::columns(dx, &g, ColumnRange { of, first: 0, count: width }, accumulate);
            });
            gradients.write(g.device(), to_other, &[few, other_width], |dy, accumulate| {
                let columns = ColumnRange { of, first: width, count: other_width };
                kernels::beside_back(dy, &g, columns, repeats, accumulate);
            });
        })
    }
}
