//! Columns chosen per row: how a router's scores become the weights of the chosen experts.
//!
//! `index` holds k columns a row; [`NOWHERE`] stands for a choice that was not made: its value is 0, it takes no part in
//! sums, and nothing flows back through it.

use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// A column that was not chosen.
pub const NOWHERE: u32 = u32::MAX;

/// What becomes of a row's chosen values, in place, and of the gradient: `(values out, gradient in place)`.
#[derive(Clone, Copy)]
struct Rule {
    name: &'static str,
    forward: fn(&mut [f32], &[u32]),
    /// From the chosen values `x`, the results `y` and their gradient `g` (which becomes the values' gradient).
    backward: fn(x: &[f32], y: &[f32], g: &mut [f32]),
}

impl Var {
    /// Columns `index[r * k..][..k]` of each row r: x `[T, E]` gives `[T, k]`.
    #[track_caller]
    pub fn select(&self, index: &[u32], k: usize) -> Var {
        self.select_by(index, k, Rule { name: "select", forward: |_, _| {}, backward: |_, _, _| {} })
    }

    /// The same, divided by their sum: how a top-k router's chosen probabilities become weights.
    #[track_caller]
    pub fn select_normalised(&self, index: &[u32], k: usize) -> Var {
        let backward = |x: &[f32], y: &[f32], g: &mut [f32]| {
            let (sum, inner) = (x.iter().sum::<f32>() + TINY, inner(y, g));
            g.iter_mut().for_each(|g| *g = (*g - inner) / sum);
        };
        let forward = |y: &mut [f32], _: &[u32]| {
            let sum = y.iter().sum::<f32>() + TINY;
            y.iter_mut().for_each(|y| *y /= sum);
        };
        self.select_by(index, k, Rule { name: "select_normalised", forward, backward })
    }

    /// The softmax of the chosen columns among themselves.
    #[track_caller]
    pub fn select_softmax(&self, index: &[u32], k: usize) -> Var {
        let backward = |_: &[f32], y: &[f32], g: &mut [f32]| {
            let inner = inner(y, g);
            g.iter_mut().zip(y).for_each(|(g, y)| *g = y * (*g - inner));
        };
        self.select_by(index, k, Rule { name: "select_softmax", forward: softmax_of_chosen, backward })
    }

    #[track_caller]
    fn select_by(&self, index: &[u32], k: usize, rule: Rule) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(index.len(), x.rows() * k, "k columns a row");
        assert!(index.iter().all(|&c| c == NOWHERE || (c as usize) < width), "a column is out of {width}");
        let index = index.to_vec();
        let mut chosen = Tensor::stale(self.device(), &[x.rows(), k], Dtype::F32);
        for (route, (slot, &column)) in chosen.f32s_mut().iter_mut().zip(&index).enumerate() {
            *slot = if column == NOWHERE { 0.0 } else { x.f32s()[route / k * width + column as usize] };
        }
        let mut y = Tensor::from_slice(self.device(), &[x.rows(), k], chosen.f32s());
        y.f32s_mut().chunks_exact_mut(k).zip(index.chunks_exact(k)).for_each(|(y, index)| (rule.forward)(y, index));
        let (kept, device, shape) = (y.clone(), self.device().clone(), x.shape().to_vec());
        self.tape().op(rule.name, y.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(&device, to, &shape, |dx, accumulate| {
                if !accumulate {
                    dx.fill(0.0);
                }
                let mut line = vec![0.0; k];
                for (r, dx) in dx.chunks_exact_mut(width).enumerate() {
                    let at = r * k..(r + 1) * k;
                    line.copy_from_slice(&g.f32s()[at.clone()]);
                    (rule.backward)(&chosen.f32s()[at.clone()], &kept.f32s()[at.clone()], &mut line);
                    for (&column, g) in index[at].iter().zip(&line).filter(|(column, _)| **column != NOWHERE) {
                        dx[column as usize] += g;
                    }
                }
            });
        })
    }
}

/// Keeps a sum of nothing from dividing: far below what rounding leaves of a sum of probabilities.
const TINY: f32 = 1e-20;

fn inner(y: &[f32], g: &[f32]) -> f32 {
    y.iter().zip(g.iter()).map(|(y, g)| y * g).sum()
}

fn softmax_of_chosen(y: &mut [f32], index: &[u32]) {
    let chosen = |(y, index): (&f32, &u32)| if *index == NOWHERE { f32::NEG_INFINITY } else { *y };
    let top = y.iter().zip(index).map(chosen).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (y, &index) in y.iter_mut().zip(index) {
        *y = if index == NOWHERE { 0.0 } else { (*y - top).exp() };
        sum += *y;
    }
    if sum > 0.0 {
        y.iter_mut().for_each(|y| *y /= sum);
    }
}
