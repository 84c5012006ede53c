//! What a noisy gate's losses are made of: the chance of being chosen, and how uneven sums over tokens are.

use super::f32_like;
use crate::cpu::variation::RowGroup;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// The chance that each column would be among the row's k largest if its own noise were drawn again:
    /// `Phi((clean - t) / sigma)`, t the k-th largest of `noisy`, or the next for those among the k themselves (Shazeer et
    /// al. 2017, eq. 9). Self is `clean`; all `[T, E]`, k < E. `noisy` lends its thresholds, with their gradient.
    #[track_caller]
    pub fn chance_of_top(&self, sigma: &Var, noisy: &Var, k: usize) -> Var {
        let (clean, spread, other) = (self.value().to_f32(), sigma.value().to_f32(), noisy.value().to_f32());
        let width = clean.cols();
        assert!(k < width && [spread.len(), other.len()] == [clean.len(); 2], "chances of top {k} of {width}");
        let mut against = Tensor::stale(self.device(), clean.shape(), Dtype::U32);
        kernels::thresholds(&mut against, &other, width, k);
        let (mut p, mut z) = (f32_like(&clean), f32_like(&clean));
        kernels::chances(&mut p, &mut z, &clean, &spread, &other, &against);
        let inputs = [self, sigma, noisy];
        let [to_clean, to_sigma, to_noisy] = inputs.map(Var::input);
        self.tape().op("chance_of_top", p, &inputs, move |g, gradients| {
            gradients.write(g.device(), to_clean, z.shape(), |d, add| {
                kernels::chances_back_clean(d, &z, &spread, &g, add);
            });
            gradients.write(g.device(), to_sigma, z.shape(), |d, add| {
                kernels::chances_back_sigma(d, &z, &spread, &g, add);
            });
            gradients.write(g.device(), to_noisy, z.shape(), |d, add| {
                kernels::chances_back_noisy(d, &z, &spread, &g, &against, width, add);
            });
        })
    }

    /// Puts column j of each row at column `index[r * k + j]` of a wider row of zeros: `[T, k]` gives `[T, width]`.
    #[track_caller]
    pub fn scatter_columns<'a>(&self, index: impl Into<Index<'a>>, width: usize) -> Var {
        let index = index.into();
        let (x, to, k) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(index.len(), x.len(), "one column an element");
        let (index, shape) = (index.on(self.device()), x.shape().to_vec());
        let mut out = Tensor::stale(self.device(), &[x.rows(), width], Dtype::F32);
        kernels::scatter_columns(&mut out, &x, &index, k, width);
        self.tape().op("scatter_columns", out, &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |d, add| {
                kernels::scatter_columns_back(d, &g, &index, k, width, add);
            });
        })
    }

    /// `sum_g share_g weight_g CV^2(sum of g's rows)`, whose slope along the rows is that of all shares together, with
    /// `CV^2(v) = var(v) / (mean(v)^2 + 1e-10)`, var with divisor E - 1; 0 for one column. x `[T, E]`; gives a scalar.
    #[track_caller]
    pub fn squared_variation(&self, groups: &[RowGroup]) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        let stale = |shape: &[usize]| Tensor::stale(self.device(), shape, Dtype::F32);
        let (mut value, mut slopes) = (stale(&[1]), stale(&[groups.len(), width]));
        kernels::squared_variation(&mut value, &mut slopes, &x, width, groups);
        let (groups, shape) = (groups.to_vec(), x.shape().to_vec());
        self.tape().op("squared_variation", value, &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |d, add| {
                kernels::squared_variation_back(d, &slopes, &g, width, &groups, add);
            });
        })
    }
}
