//! Moving rows by index: gather, scatter-add, a gather of rows that carry others, and the weighted sum that ends an MoE
//! layer.

use super::f32_like;
use crate::cpu::gather::Width;
use crate::cpu::select::NOWHERE;
use crate::dtype::Dtype;
use crate::index::{Index, Indices};
use crate::kernels;
use crate::tape::{BackwardError, Var};
use crate::tensor::Tensor;

impl Var {
    /// `out[i] = x[index[i]]`: x `[T, D]`, gives `[index.len(), D]`. Indices may repeat; gradients then add up.
    #[track_caller]
    pub fn gather_rows<'a>(&self, index: impl Into<Index<'a>>) -> Var {
        let index = index.into();
        let (rows, width, gathered, dtype) = (self.rows(), self.cols(), [index.len(), self.cols()], self.dtype());
        assert!(index.all(|i| (i as usize) < rows), "a row index is out of {rows} rows");
        let (to, shape, index) = (self.input(), self.shape().to_vec(), index.on(self.device()));
        let make = {
            let (x, index) = (self.clone(), index.clone());
            move || {
                let mut out = Tensor::stale(x.device(), &gathered, dtype);
                kernels::gather(&mut out, x.value(), &index, width, false);
                out
            }
        };
        self.tape().late_stored_op("gather_rows", (&gathered, dtype), &[self], make, move |g, gradients| {
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::scatter_add(dx, &g, &index, width, accumulate);
            });
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
        [own, all]: [Index; 2],
        complete: impl FnOnce(Tensor) -> Result<Tensor, BackwardError> + 'static,
    ) -> Var {
        let (rows, width) = (self.value().rows(), self.value().cols());
        let exists = |i: u32| (i as usize) < rows;
        assert!(own.all(exists) && all.all(exists), "a row index is out of {rows} rows");
        let (own, all) = (own.on(self.device()), all.on(self.device()));
        let mut out = Tensor::stale(self.device(), &[own.len(), width], self.dtype());
        kernels::gather(&mut out, self.value(), &own, width, false);
        let (to, shape) = (self.input(), self.shape().to_vec());
        self.tape().fallible_op("gather_rows_in_part", out, &[self], move |g, gradients| {
            let g = complete(g)?;
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::scatter_add(dx, &g, &all, width, accumulate);
            });
            Ok(())
        })
    }

    /// `out[index[i]] += x[i]` over zeros: x `[R, D]`, gives `[rows, D]`.
    #[track_caller]
    pub fn scatter_add_rows<'a>(&self, index: impl Into<Index<'a>>, rows: usize) -> Var {
        let index = index.into();
        assert_eq!(index.len(), self.value().rows(), "one target a row");
        assert!(index.all(|i| (i as usize) < rows), "a target is out of {rows} rows");
        let (width, index) = (self.value().cols(), index.on(self.device()));
        let mut out = Tensor::stale(self.device(), &[rows, width], Dtype::F32);
        kernels::scatter_add(&mut out, self.value(), &index, width, false);
        let (to, shape) = (self.input(), self.shape().to_vec());
        self.tape().op("scatter_add_rows", out.cast(self.dtype()), &[self], move |g, gradients| {
            gradients.write(g.device(), to, &shape, |dx, accumulate| {
                kernels::gather(dx, &g, &index, width, accumulate);
            });
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
        let mut out = Tensor::stale(tape.device(), &[rows, width], dtype);
        let (mut pieces, mut start) = (Vec::with_capacity(parts.len()), 0);
        for part in &parts {
            assert_eq!(part.value().cols(), width, "parts of one width");
            let piece = start..start + part.value().len();
            out.copy_part(piece.start, part.value(), 0..piece.len());
            start = piece.end;
            pieces.push((part.input(), part.shape().to_vec(), piece));
        }
        let inputs: Vec<&Var> = parts.iter().collect();
        tape.op("concat_rows", out, &inputs, move |g, gradients| {
            for (to, shape, piece) in pieces {
                let mut part = Tensor::stale(g.device(), &shape, Dtype::F32);
                part.copy_part(0, &g, piece);
                gradients.add(to, part);
            }
        })
    }

    /// All rows in another order, of which some carry rows of another tensor: `out[i] = x[order[i]]`, but where `order[i]`
    /// is `at[c]`, `weights[c] * x[order[i]] + carried[c]`. x `[R, D]`, order a permutation of its rows, at some of them,
    /// each once, weights `[C, 1]`, carried `[C, D]`; gives `[R, D]`.
    ///
    /// # Panics
    /// If `order` is no permutation, `at` has a row twice, or the lengths do not fit.
    #[track_caller]
    pub fn carry_rows<'a>(
        &self,
        order: impl Into<Index<'a>>,
        at: impl Into<Index<'a>>,
        weights: &Var,
        carried: &Var,
    ) -> Var {
        let (order, at) = (order.into(), at.into());
        let (rows, width, count) = (self.value().rows(), self.cols(), at.len());
        assert_eq!(order.len(), rows, "an order of {rows} rows");
        assert_eq!((weights.shape(), carried.shape()), (&[count, 1][..], &[count, width][..]), "rows that are carried");
        let CarrierPlaces { places, carriers, outs } = CarrierPlaces::new(&order, &at);
        let device = self.device().clone();
        let [places, carriers, outs] = [places, carriers, outs].map(|indices| Index::from(&indices).on(&device));
        let (order, at) = (order.on(&device), at.on(&device));
        let (x, w) = (self.value().clone(), weights.value().clone());
        let mut out = Tensor::stale(&device, &[rows, width], self.dtype());
        kernels::carry(&mut out, &x, &w.to_f32(), carried.value(), &order, &carriers, width);
        let [to_x, to_w, to_carried] = [self, weights, carried].map(Var::input);
        self.tape().op("carry_rows", out, &[self, weights, carried], move |g, gradients| {
            let w = w.to_f32();
            let mut dw = f32_like(&w);
            kernels::carry_back_weights(&mut dw, &x, &g, &at, &outs, width);
            gradients.add(to_w, dw);
            gradients.write(&device, to_carried, &[count, width], |dy, accumulate| {
                kernels::gather(dy, &g, &outs, width, accumulate);
            });
            gradients.write(&device, to_x, x.shape(), |dx, accumulate| {
                kernels::carry_back(dx, &g, &w, &places, &carriers, width, accumulate);
            });
        })
    }

    /// The end of an MoE layer: `out[t] = sum_j weights[t, j] * x[places[t * K + j]]`. x `[R, D]`, weights `[T, K]`;
    /// several routes may have the same place; a route without a place (`u32::MAX`) contributes nothing.
    #[track_caller]
    pub fn weighted_sum_rows<'a>(&self, weights: &Var, places: impl Into<Index<'a>>) -> Var {
        let places = places.into();
        let (tokens, k) = (weights.value().rows(), weights.value().cols());
        let (rows, row) = (self.value().rows(), self.value().cols());
        assert_eq!(places.len(), tokens * k, "one place a route");
        assert!(places.all(|p| p == NOWHERE || (p as usize) < rows), "a place is out of {rows} rows");
        let (device, width, places) = (self.device().clone(), Width { k, row }, places.on(self.device()));
        let (x, w) = (self.value().clone(), weights.value().clone());
        let mut out = Tensor::stale(&device, &[tokens, row], self.dtype());
        kernels::weighted_sum(&mut out, &x, &w.to_f32(), &places, width);
        let (to_x, to_w, shape) = (self.input(), weights.input(), self.shape().to_vec());
        self.tape().op("weighted_sum_rows", out, &[self, weights], move |g, gradients| {
            let w = w.to_f32();
            if gradients.wants(to_w) {
                let mut dw = f32_like(&w);
                kernels::weighted_sum_back_weights(&mut dw, &x, &g, &places, width);
                gradients.add(to_w, dw);
            }
            gradients.write(&device, to_x, &shape, |dx, accumulate| {
                kernels::weighted_sum_back_rows(dx, &g, &w, &places, width, accumulate);
            });
        })
    }
}

/// Where the rows of [`Var::carry_rows`] go.
struct CarrierPlaces {
    /// For each row of x, its place in the result.
    places: Indices,
    /// For each row of the result, the row that it carries, or [`NOWHERE`].
    carriers: Indices,
    /// For each row that is carried, its place in the result.
    outs: Indices,
}

impl CarrierPlaces {
    fn new(order: &Index, at: &Index) -> CarrierPlaces {
        let rows = order.len();
        if let Index::Counted(_) = order {
            let [places, carriers, outs] = [rows, rows, at.len()].map(Indices::Counted);
            return CarrierPlaces { places, carriers, outs };
        }
        let (mut places, mut carriers) = (vec![NOWHERE; rows], vec![NOWHERE; rows]);
        for place in 0..rows {
            let row = order.at(place) as usize;
            assert!(row < rows && places[row] == NOWHERE, "an order of {rows} rows that has row {row} twice");
            places[row] = place as u32;
        }
        let outs: Vec<u32> = (0..at.len()).map(|c| places[at.at(c) as usize]).collect();
        for (c, &out) in outs.iter().enumerate() {
            assert!(carriers[out as usize] == NOWHERE, "row {} carries twice", at.at(c));
            carriers[out as usize] = c as u32;
        }
        CarrierPlaces { places: Indices::Known(places), carriers: Indices::Known(carriers), outs: Indices::Known(outs) }
    }
}
