//! Attention with relative positions over stretches of documents, as Transformer-XL has it (Dai et al. 2019).
//!
//! A document is read in *stretches* of some tokens. A token attends to the earlier tokens of its stretch and to the
//! last tokens before the stretch, the *memory*. Through a remembered token no gradient flows to what it was computed
//! from, but the projections that make its key and value do learn: so keys and values come twice, equal in value,
//! from [`Var::linear_twice`], and each attended pair sends its gradient to one of the two.

use std::sync::Arc;

use super::attention::{KvCache, first_keys};
use crate::cpu::relative_attention_call::RelativeAttentionSizes;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::gradients::Gradients;
use crate::index::Index;
use crate::kernels;
use crate::tape::{Input, Var};
use crate::tensor::Tensor;

/// Which tokens of its row each token sees.
#[derive(Clone, Debug)]
pub struct Stretches {
    seq: usize,
    reach: usize,
    /// Tokens that see each other, counted once for each that sees.
    pairs: f64,
    /// Of every token the first position that it sees.
    first_key: Tensor,
    /// Of every token the first position of its own stretch.
    own_key: Tensor,
}

impl Stretches {
    /// Of rows of `seq` tokens whose documents are told apart by `segments`; every document begins a stretch of
    /// `length` tokens and remembers up to `memory` tokens before it, its own alone.
    ///
    /// # Panics
    /// On a length of 0, or tokens that are no whole rows.
    #[track_caller]
    pub fn new(device: &Arc<Device>, segments: &[u32], seq: usize, length: usize, memory: usize) -> Stretches {
        let begins = first_keys(segments, seq);
        let place = |t: usize| t % seq.max(1);
        let own = |t: usize| begins[t] as usize + (place(t) - begins[t] as usize) / length * length;
        let own_key: Vec<u32> = (0..segments.len()).map(|t| own(t) as u32).collect();
        let first = |(own, begin): (&u32, &u32)| (*own as usize).saturating_sub(memory).max(*begin as usize) as u32;
        let first_key: Vec<u32> = own_key.iter().zip(&begins).map(first).collect();
        let pairs = first_key.iter().enumerate().map(|(t, &first)| (place(t) + 1) as f64 - f64::from(first)).sum();
        let [first_key, own_key] = [first_key, own_key].map(|keys| Tensor::from_index(device, &keys));
        Stretches { seq, reach: reach(seq, length, memory), pairs, first_key, own_key }
    }

    /// The same of so many tokens on a device that knows sizes alone, a document a row.
    pub fn counted(device: &Arc<Device>, (seq, tokens): (usize, usize), length: usize, memory: usize) -> Stretches {
        let seen = ((length as f64 + 1.0) / 2.0 + memory as f64).min(seq as f64);
        let [first_key, own_key] = [(); 2].map(|()| Tensor::from_index(device, Index::Counted(tokens)));
        Stretches { seq, reach: reach(seq, length, memory), pairs: tokens as f64 * seen, first_key, own_key }
    }

    fn shape(&self, heads: usize, head_dim: usize) -> RelativeAttentionSizes {
        RelativeAttentionSizes { seq: self.seq, heads, head_dim, reach: self.reach }
    }

    /// Distances between tokens that see each other: 0 to `reach - 1`.
    pub fn reach(&self) -> usize {
        self.reach
    }
}

/// Distances there can be between tokens of a row that see each other: 0 to one less than this.
pub fn reach(seq: usize, length: usize, memory: usize) -> usize {
    seq.min(length + memory)
}

/// Sines and cosines `[distances, width]` of the distances from 0 (Vaswani et al. 2017): column i is
/// `sin(n / 10000^(2 i / width))`, column `width / 2 + i` the cosine.
pub fn sinusoids(distances: usize, width: usize) -> Vec<f32> {
    let angle = |n: usize, i: usize| n as f64 / 10_000f64.powf(2.0 * i as f64 / width as f64);
    let row = |n: usize| {
        let sines = (0..width / 2).map(move |i| angle(n, i).sin());
        sines.chain((0..width / 2).map(move |i| angle(n, i).cos()))
    };
    (0..distances).flat_map(row).map(|x| x as f32).collect()
}

/// What makes a score besides query and key.
#[derive(Clone, Copy)]
pub struct Relative<'a> {
    /// `W_r R`: a vector for every distance from 0, `[reach, heads * head_dim]`.
    pub distances: &'a Var,
    /// u, `[heads, head_dim]`.
    pub content_bias: &'a Var,
    /// v, `[heads, head_dim]`.
    pub position_bias: &'a Var,
}

impl Relative<'_> {
    fn vars(&self) -> [&Var; 3] {
        [self.distances, self.content_bias, self.position_bias]
    }
}

impl Var {
    /// Attention with the scores `((q_i + u) . k_j + (q_i + v) . r_{i-j}) / sqrt(head_dim)`. `self` is the queries
    /// `[T, heads * head_dim]`; `keys_values` the keys and values side by side, `[T, 2 heads * head_dim]`, twice: the
    /// first gets the gradients of pairs within a stretch, the second those of remembered keys. Gives
    /// `[T, heads * head_dim]`.
    ///
    /// # Panics
    /// On shapes that do not fit each other.
    #[track_caller]
    pub fn relative_attention(&self, keys_values: [&Var; 2], relative: Relative, stretches: &Arc<Stretches>) -> Var {
        let [heads, head_dim] = relative.content_bias.shape() else { panic!("u has a row a head") };
        let (heads, head_dim, tokens) = (*heads, *head_dim, self.value().rows());
        let width = heads * head_dim;
        assert_eq!(relative.position_bias.shape(), [heads, head_dim], "v is shaped like u");
        assert_eq!(self.value().cols(), width, "columns of the queries");
        assert!(keys_values.iter().all(|kv| kv.shape() == [tokens, 2 * width]), "{:?}", keys_values.map(Var::shape));
        assert_eq!(relative.distances.shape(), [stretches.reach, width], "a vector for every distance");
        assert_eq!(stretches.first_key.len(), tokens, "tokens of the stretches");

        let [q, kv, distances] = [self, keys_values[0], relative.distances].map(|var| var.value().clone());
        let [u, v] = [relative.content_bias, relative.position_bias].map(|bias| bias.value().to_f32());
        let saved = Saved { stretches: stretches.clone(), q, kv, distances, u, v };
        let device = self.device().clone();
        let mut out = Tensor::stale(&device, &[tokens, width], Dtype::F32);
        let mut lse = Tensor::stale(&device, &[tokens, heads], Dtype::F32);
        saved.forward(&mut out, &mut lse);
        let out = out.cast(self.dtype());
        let (kept, to) = (out.clone(), [self, keys_values[0], keys_values[1]].map(Var::input));
        let to_relative = relative.vars().map(Var::input);
        let inputs: Vec<&Var> = [self].into_iter().chain(keys_values).chain(relative.vars()).collect();
        self.tape().op("relative_attention", out, &inputs, move |g, gradients| {
            saved.backward((&kept, &lse, &g), (to, to_relative), gradients);
        })
    }

    /// `x W^T` twice over, computed once: through the first value the gradient goes to x and w, through the second to
    /// w alone, as if x had been a constant. x `[.., in]`, w `[out, in]`.
    #[track_caller]
    pub fn linear_twice(&self, w: &Var) -> [Var; 2] {
        let first = self.linear(w, None);
        let constant = self.tape().constant(self.value().clone());
        let second = constant.linear_again(w, first.value().clone());
        [first, second]
    }
}

/// What the backward needs; u and v in f32.
struct Saved {
    stretches: Arc<Stretches>,
    q: Tensor,
    kv: Tensor,
    distances: Tensor,
    u: Tensor,
    v: Tensor,
}

impl Saved {
    /// Multiply-adds: content and position scores, and the sums of values.
    fn attended(&self) -> f64 {
        3.0 * self.stretches.pairs * self.q.cols() as f64
    }

    fn shape(&self) -> RelativeAttentionSizes {
        self.stretches.shape(self.u.shape()[0], self.u.shape()[1])
    }

    fn forward(&self, out: &mut Tensor, lse: &mut Tensor) {
        let Saved { q, kv, distances, u, v, stretches: of } = self;
        out.device().count_attended(self.attended());
        kernels::relative_attention(out, lse, q, kv, distances, u, v, &of.first_key, &of.own_key, self.shape());
    }

    fn backward(
        &self,
        (out, lse, g): (&Tensor, &Tensor, &Tensor),
        (to, to_relative): ([Input; 3], [Input; 3]),
        gradients: &mut Gradients,
    ) {
        let device = g.device().clone();
        device.count_attended(2.5 * self.attended());
        let rows = self.q.rows() / self.stretches.seq;
        let stale = |shape: &[usize]| Tensor::stale(&device, shape, Dtype::F32);
        let mut own = [&self.q, &self.kv, &self.kv].map(|x| stale(x.shape()));
        let shared = [&self.distances, &self.u, &self.v];
        let mut copies = shared.map(|x| stale(&[rows, x.len()]));
        {
            let ([dq, dkv, remembered], [ddistances, du, dv]) = (own.each_mut(), copies.each_mut());
            let (Saved { q, kv, distances, u, v, stretches: of }, shape) = (self, self.shape());
            kernels::relative_attention_back(
                dq,
                dkv,
                remembered,
                ddistances,
                du,
                dv,
                q,
                kv,
                distances,
                u,
                v,
                &of.first_key,
                &of.own_key,
                out,
                lse,
                g,
                shape,
            );
        }
        for (to, gradient) in to.into_iter().zip(own) {
            gradients.add(to, gradient);
        }
        for ((to, like), copies) in to_relative.into_iter().zip(shared).zip(copies) {
            gradients.write(&device, to, like.shape(), |sum, accumulate| {
                kernels::sum_copies(sum, &copies, accumulate);
            });
        }
    }
}

/// Attention of new tokens of one document to what `cache` holds of it and to themselves, without gradients: `q`
/// `[n, heads * head_dim]` and `kv` `[n, 2 heads * head_dim]` follow the cached tokens. The new keys and values are
/// added to the cache. `stretches` are those of cached and new tokens together, as one row.
///
/// # Panics
/// If there are stretches of another number of tokens.
#[track_caller]
pub fn relative_attend_cached(
    q: &Tensor,
    kv: &Tensor,
    relative: Relative,
    stretches: &Stretches,
    cache: &mut KvCache,
) -> Tensor {
    let (heads, d) = (relative.content_bias.shape()[0], relative.content_bias.shape()[1]);
    let (device, cached, shape) = (q.device(), cache.len(), stretches.shape(heads, d));
    let [keys, values] = cache.grow(device, q.rows(), [heads * d; 2]);
    assert_eq!(stretches.first_key.len(), cached + q.rows(), "stretches of the cached and the new tokens");
    let [distances, u, v] = relative.vars().map(|var| var.value().to_f32());
    let (q32, kv32, mut out) = (q.to_f32(), kv.to_f32(), Tensor::stale(device, q.shape(), Dtype::F32));
    let first_key = &stretches.first_key;
    kernels::relative_attend_cached(&mut out, keys, values, &q32, &kv32, &distances, &u, &v, first_key, shape, cached);
    out.cast(q.dtype())
}
