//! Moving rows by index: gather, scatter-add, and the weighted sum that ends an MoE layer.

use super::f32_like;
use super::select::NOWHERE;
use crate::cpu::rows::for_rows;
use crate::dtype::Dtype;
use crate::tape::{Failure, Var};
use crate::tensor::Tensor;

/// `out[i] = x[index[i]]`.
pub(crate) fn gather(x: &Tensor, index: &[u32], out: &mut [f32], accumulate: bool) {
    let (width, x32) = (x.cols(), x.to_f32());
    let source = x32.f32s();
    for_rows(
        x.device(),
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (line, &from) in run.chunks_exact_mut(width).zip(&index[first..]) {
                let from = &source[from as usize * width..][..width];
                if accumulate {
                    line.iter_mut().zip(from).for_each(|(o, x)| *o += x);
                } else {
                    line.copy_from_slice(from);
                }
            }
        },
    );
}

/// For every target row, the source rows that add into it: turns a scatter, where threads would collide, into a
/// gather, where each owns its rows and adds in a fixed order.
struct Inverse {
    starts: Vec<u32>,
    sources: Vec<u32>,
}

impl Inverse {
    fn new(index: &[u32], targets: usize) -> Inverse {
        let mut starts = vec![0u32; targets + 1];
        for &to in index {
            starts[to as usize + 1] += 1;
        }
        for i in 0..targets {
            starts[i + 1] += starts[i];
        }
        let (mut next, mut sources) = (starts.clone(), vec![0u32; index.len()]);
        for (from, &to) in index.iter().enumerate() {
            sources[next[to as usize] as usize] = from as u32;
            next[to as usize] += 1;
        }
        Inverse { starts, sources }
    }

    fn of(&self, target: usize) -> &[u32] {
        &self.sources[self.starts[target] as usize..self.starts[target + 1] as usize]
    }
}

/// `out[index[i]] += x[i]`, rows that nothing adds to being zero.
fn scatter_add(x: &Tensor, index: &[u32], out: &mut [f32], accumulate: bool) {
    let (width, x32) = (x.cols(), x.to_f32());
    let (source, inverse) = (x32.f32s(), Inverse::new(index, out.len() / width.max(1)));
    for_rows(
        x.device(),
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                if !accumulate {
                    line.fill(0.0);
                }
                for &from in inverse.of(first + i) {
                    let from = &source[from as usize * width..][..width];
                    line.iter_mut().zip(from).for_each(|(o, x)| *o += x);
                }
            }
        },
    );
}

impl Var {
    /// `out[i] = x[index[i]]`: x `[T, D]`, gives `[index.len(), D]`. Indices may repeat; gradients then add up.
    #[track_caller]
    pub fn gather_rows(&self, index: &[u32]) -> Var {
        let (rows, gathered, dtype) = (self.rows(), [index.len(), self.cols()], self.dtype());
        assert!(index.iter().all(|&i| (i as usize) < rows), "a row index is out of {rows} rows");
        let (to, index, shape) = (self.input(), index.to_vec(), self.shape().to_vec());
        let make = {
            let (x, index) = (self.clone(), index.clone());
            move || {
                let mut out = Tensor::stale(x.device(), &gathered, Dtype::F32);
                gather(x.value(), &index, out.f32s_mut(), false);
                out.cast(dtype)
            }
        };
        self.tape().late_op("gather_rows", (&gathered, dtype), &[self], make, move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, &shape, |dx, accumulate| scatter_add(&g, &index, dx, accumulate));
        })
    }

    /// This rank's part of a `gather_rows` that several ranks do together: `out[i] = x[own[i]]`. Going back, `complete` makes
    /// of this part's gradient that of the whole, `out[i] = x[all[i]]`.
    ///
    /// # Panics
    /// If an index is none of x's rows.
    #[track_caller]
    pub fn gather_rows_in_part(
        &self,
        own: &[u32],
        all: Vec<u32>,
        complete: impl FnOnce(Tensor) -> Result<Tensor, Failure> + 'static,
    ) -> Var {
        let (rows, width) = (self.value().rows(), self.value().cols());
        assert!(own.iter().chain(&all).all(|&i| (i as usize) < rows), "a row index is out of {rows} rows");
        let mut out = Tensor::stale(self.device(), &[own.len(), width], Dtype::F32);
        gather(self.value(), own, out.f32s_mut(), false);
        let (to, shape) = (self.input(), self.shape().to_vec());
        self.tape().fallible_op("gather_rows_in_part", out.cast(self.dtype()), &[self], move |g, gradients| {
            let g = complete(g)?;
            let device = g.device().clone();
            gradients.write(&device, to, &shape, |dx, accumulate| scatter_add(&g, &all, dx, accumulate));
            Ok(())
        })
    }

    /// `out[index[i]] += x[i]` over zeros: x `[R, D]`, gives `[rows, D]`.
    #[track_caller]
    pub fn scatter_add_rows(&self, index: &[u32], rows: usize) -> Var {
        assert_eq!(index.len(), self.value().rows(), "one target a row");
        assert!(index.iter().all(|&i| (i as usize) < rows), "a target is out of {rows} rows");
        let mut out = Tensor::stale(self.device(), &[rows, self.value().cols()], Dtype::F32);
        scatter_add(self.value(), index, out.f32s_mut(), false);
        let (to, index, shape) = (self.input(), index.to_vec(), self.shape().to_vec());
        self.tape().op("scatter_add_rows", out.cast(self.dtype()), &[self], move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, &shape, |dx, accumulate| gather(&g, &index, dx, accumulate));
        })
    }

    /// All rows of `parts`, one part after the other: parts `[R_i, D]` give `[sum R_i, D]`.
    ///
    /// # Panics
    /// Without parts, or if their widths differ.
    #[track_caller]
    pub fn concat_rows(parts: Vec<Var>) -> Var {
        let rows: usize = parts.iter().map(|part| part.value().rows()).sum();
        let (width, tape, dtype) = (parts[0].value().cols(), parts[0].tape().clone(), parts[0].dtype());
        let mut out = Tensor::stale(tape.device(), &[rows, width], Dtype::F32);
        let (mut pieces, mut start) = (Vec::with_capacity(parts.len()), 0);
        for part in &parts {
            assert_eq!(part.value().cols(), width, "parts of one width");
            let piece = start..start + part.value().len();
            out.f32s_mut()[piece.clone()].copy_from_slice(part.value().to_f32().f32s());
            start = piece.end;
            pieces.push((part.input(), part.shape().to_vec(), piece));
        }
        let inputs: Vec<&Var> = parts.iter().collect();
        tape.op("concat_rows", out.cast(dtype), &inputs, move |g, gradients| {
            for (to, shape, piece) in pieces {
                gradients.add(to, Tensor::from_slice(g.device(), &shape, &g.f32s()[piece]));
            }
        })
    }

    /// The end of an MoE layer: `out[t] = sum_j weights[t, j] * x[places[t * K + j]]`. x `[R, D]`, weights `[T, K]`;
    /// every row of x is the place of one route; a route without a place (`u32::MAX`) contributes nothing.
    #[track_caller]
    pub fn weighted_sum_rows(&self, weights: &Var, places: &[u32]) -> Var {
        let (tokens, k) = (weights.value().rows(), weights.value().cols());
        let (rows, width) = (self.value().rows(), self.value().cols());
        assert_eq!(places.len(), tokens * k, "one place a route");
        assert!(places.iter().all(|&p| p == NOWHERE || (p as usize) < rows), "a place is out of {rows} rows");
        let (x, w, places) = (self.value().clone(), weights.value().clone(), places.to_vec());
        let mut out = Tensor::stale(self.device(), &[tokens, width], Dtype::F32);
        {
            let (x, w) = (x.to_f32(), w.to_f32());
            let (x, w) = (x.f32s(), w.f32s());
            for_rows(
                self.device(),
                out.f32s_mut(),
                width,
                64,
                #[inline(always)]
                |first, run| {
                    for (t, line) in run.chunks_exact_mut(width).enumerate() {
                        line.fill(0.0);
                        for route in (first + t) * k..(first + t + 1) * k {
                            if places[route] != NOWHERE {
                                let from = &x[places[route] as usize * width..][..width];
                                line.iter_mut().zip(from).for_each(|(o, x)| *o = w[route].mul_add(*x, *o));
                            }
                        }
                    }
                },
            );
        }
        let (to_x, to_w, shape) = (self.input(), weights.input(), self.shape().to_vec());
        self.tape().op("weighted_sum_rows", out.cast(self.dtype()), &[self, weights], move |g, gradients| {
            let device = g.device().clone();
            let (x, w) = (x.to_f32(), w.to_f32());
            let mut dw = f32_like(&w);
            weights_gradient(&device, dw.f32s_mut(), k, (x.f32s(), g.f32s(), width), &places);
            gradients.add(to_w, dw);
            gradients.write(&device, to_x, &shape, |dx, accumulate| {
                let routes = routes_of_places(&places, rows);
                for_rows(
                    &device,
                    dx,
                    width,
                    64,
                    #[inline(always)]
                    |first, run| {
                        for (line, &route) in run.chunks_exact_mut(width).zip(&routes[first..]) {
                            if !accumulate {
                                line.fill(0.0);
                            }
                            if route != NOWHERE {
                                let from = &g.f32s()[route as usize / k * width..][..width];
                                let weight = w.f32s()[route as usize];
                                line.iter_mut().zip(from).for_each(|(o, g)| *o = weight.mul_add(*g, *o));
                            }
                        }
                    },
                );
            });
        })
    }
}

/// `dw[t, j] = <x[place], g[t]>`.
fn weights_gradient(
    device: &crate::Device,
    dw: &mut [f32],
    k: usize,
    (x, g, width): (&[f32], &[f32], usize),
    places: &[u32],
) {
    for_rows(
        device,
        dw,
        k,
        64,
        #[inline(always)]
        |first, run| {
            for (i, out) in run.iter_mut().enumerate() {
                let route = first * k + i;
                *out = if places[route] == NOWHERE {
                    0.0
                } else {
                    let x = &x[places[route] as usize * width..][..width];
                    dot(x, &g[route / k * width..][..width])
                };
            }
        },
    );
}

/// The route that filled each place.
fn routes_of_places(places: &[u32], rows: usize) -> Vec<u32> {
    let mut routes = vec![NOWHERE; rows];
    for (route, &place) in places.iter().enumerate() {
        if place != NOWHERE {
            routes[place as usize] = route as u32;
        }
    }
    routes
}

/// A dot product in sixteen independent sums, which a loop in one sum would not allow to be vectors.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (xs, ys) = (x.chunks_exact(16), y.chunks_exact(16));
    let mut sum: f32 = xs.remainder().iter().zip(ys.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in xs.zip(ys) {
        for i in 0..16 {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    sum += lanes.iter().sum::<f32>();
    sum
}
