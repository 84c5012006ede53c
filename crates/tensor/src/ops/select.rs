//! Columns chosen per row: how a router's scores become the weights of the chosen experts.
//!
//! `index` holds k columns a row; [`NOWHERE`] stands for a choice that was not made: its value is 0, it takes no part in
//! sums, and nothing flows back through it.

use crate::cpu::select::{Among, NOWHERE};
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Tensor {
    /// Columns of the k largest of each row of f32 scores `[T, E]`, the largest first: u32 `[T, k]`. Of equal ones the first
    /// comes first; NaN is least, and both zeros are one number. [`NOWHERE`] where there are no more.
    ///
    /// # Panics
    /// If the scores are not f32, or there are no columns, or `k` is 0.
    #[track_caller]
    pub fn top_k(&self, k: usize) -> Tensor {
        assert!(k > 0 && self.cols() > 0, "the {k} largest of {} columns", self.cols());
        let mut chosen = Tensor::stale(self.device(), &[self.rows(), k], Dtype::U32);
        kernels::top_k(&mut chosen, self, k, self.cols());
        chosen
    }
}

impl Var {
    /// Columns `index[r * k..][..k]` of each row r: x `[T, E]` gives `[T, k]`.
    #[track_caller]
    pub fn select<'a>(&self, index: impl Into<Index<'a>>, k: usize) -> Var {
        self.select_by("select", index.into(), k, Among::Plain)
    }

    /// The same, divided by their sum: how a top-k router's chosen probabilities become weights.
    #[track_caller]
    pub fn select_normalised<'a>(&self, index: impl Into<Index<'a>>, k: usize) -> Var {
        self.select_by("select_normalised", index.into(), k, Among::Normalised)
    }

    /// The softmax of the chosen columns among themselves.
    #[track_caller]
    pub fn select_softmax<'a>(&self, index: impl Into<Index<'a>>, k: usize) -> Var {
        self.select_by("select_softmax", index.into(), k, Among::Softmax)
    }

    #[track_caller]
    fn select_by(&self, name: &'static str, index: Index, k: usize, among: Among) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(index.len(), x.rows() * k, "k columns a row");
        assert!(index.all(|c| c == NOWHERE || (c as usize) < width), "a column is out of {width}");
        let (device, shape, index) = (self.device().clone(), x.shape().to_vec(), index.on(self.device()));
        let mut chosen = Tensor::stale(&device, &[x.rows(), k], Dtype::F32);
        let mut y = Tensor::stale(&device, &[x.rows(), k], Dtype::F32);
        kernels::select(&mut chosen, &mut y, &x, &index, k, width, among);
        let kept = y.clone();
        self.tape().op(name, y.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(&device, to, &shape, |dx, accumulate| {
                kernels::select_back(dx, &chosen, &kept, &g, &index, k, width, among, accumulate);
            });
        })
    }
}
