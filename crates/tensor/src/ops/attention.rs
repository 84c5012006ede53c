//! Self-attention over packed rows, with grouped key heads and rotary positions inside. Which keys a token sees is a
//! range a token: up to itself for decoders, its whole segment for encoders.

use std::ops::Range;

use crate::cpu::attention::{self as kernel, Shape, rotate};
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl AttentionShape {
    /// Columns of the fused projection: queries, keys, values.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// For every token of rows of length `seq`, the positions of its row that it sees when it looks back only: those of
/// its segment up to itself. Segments of a row are runs: they never resume.
#[track_caller]
pub fn causal_keys(segments: &[u32], seq: usize) -> Vec<Range<u32>> {
    let ranges = first_keys(segments, seq).into_iter().enumerate();
    ranges.map(|(t, first)| first..(t % seq) as u32 + 1).collect()
}

/// The same when it looks both ways: all positions of its segment.
#[track_caller]
pub fn segment_keys(segments: &[u32], seq: usize) -> Vec<Range<u32>> {
    let mut keys = causal_keys(segments, seq);
    for row in keys.chunks_exact_mut(seq) {
        for t in (1..seq).rev() {
            if row[t].start == row[t - 1].start {
                row[t - 1].end = row[t].end;
            }
        }
    }
    keys
}

/// For every token of rows of length `seq`, the first position of its row with the same segment.
#[track_caller]
pub(super) fn first_keys(segments: &[u32], seq: usize) -> Vec<u32> {
    assert!(segments.is_empty() || segments.len().is_multiple_of(seq), "{} tokens in rows of {seq}", segments.len());
    let mut first = vec![0; segments.len()];
    for (row, first) in segments.chunks_exact(seq).zip(first.chunks_exact_mut(seq)) {
        for t in 1..seq {
            first[t] = if row[t] == row[t - 1] { first[t - 1] } else { t as u32 };
        }
    }
    first
}

/// Cosines and sines `[positions.len(), head_dim / 2]` of rotary positions (Su et al. 2021), pair i turning by
/// `position * theta^(-2 i / head_dim)`.
pub fn rotary_tables(positions: &[u32], head_dim: usize, theta: f32) -> (Vec<f32>, Vec<f32>) {
    let half = head_dim / 2;
    let speeds: Vec<f64> = (0..half).map(|i| f64::from(theta).powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let angles = positions.iter().flat_map(|&p| speeds.iter().map(move |s| f64::from(p) * s));
    angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip()
}

impl Var {
    /// Attention of every token to those positions of its row that `keys` has for it. `self` is the fused projection
    /// `[rows * seq, (heads + 2 kv_heads) * head_dim]`; gives `[rows * seq, heads * head_dim]`. `keys` comes from
    /// [`causal_keys`] or [`segment_keys`], `rotary` from [`rotary_tables`] (none for learned positions).
    #[track_caller]
    pub fn attention(
        &self,
        shape: AttentionShape,
        seq: usize,
        keys: &[Range<u32>],
        rotary: Option<&(Vec<f32>, Vec<f32>)>,
    ) -> Var {
        let AttentionShape { heads, kv_heads, head_dim } = shape;
        let tokens = self.value().rows();
        assert_eq!(self.value().cols(), shape.width(), "columns of the fused projection");
        assert!(heads.is_multiple_of(kv_heads), "{shape:?}");
        assert!(tokens.is_multiple_of(seq) && keys.len() == tokens, "{tokens} tokens in rows of {seq}");
        let (device, qkv, rows) = (self.device().clone(), self.value().clone(), tokens / seq);
        let spec = Shape { rows, seq, heads, kv_heads, head_dim, keys: keys.to_vec(), rotary: rotary.cloned() };
        let mut out = Tensor::stale(&device, &[tokens, heads * head_dim], Dtype::F32);
        let mut lse = Tensor::stale(&device, &[tokens, heads], Dtype::F32);
        kernel::forward(&device, &spec, qkv.to_f32().f32s(), out.f32s_mut(), lse.f32s_mut());
        let out = out.cast(self.dtype());
        let (saved, to) = (out.clone(), self.input());
        self.tape().op("attention", out, &[self], move |g, gradients| {
            let mut dqkv = Tensor::stale(&device, qkv.shape(), Dtype::F32);
            let (out, qkv) = (saved.to_f32(), qkv.to_f32());
            kernel::backward(&device, &spec, qkv.f32s(), (out.f32s(), lse.f32s()), g.f32s(), dqkv.f32s_mut());
            gradients.add(to, dqkv);
        })
    }
}

/// Keys (rotated) and values of the tokens generated so far, for one layer.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

impl KvCache {
    /// Tokens held.
    pub fn len(&self, shape: AttentionShape) -> usize {
        self.keys.len() / (shape.kv_heads * shape.head_dim)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.values.clear();
    }
}

/// Attention of new tokens to the cache and themselves, without gradients: `qkv` `[n, width]` at the positions that
/// follow the cached ones; the new keys and values are added to the cache. Gives `[n, heads * head_dim]`.
pub fn attend_cached(
    qkv: &Tensor,
    shape: AttentionShape,
    rotary: Option<&(Vec<f32>, Vec<f32>)>,
    cache: &mut KvCache,
) -> Tensor {
    let AttentionShape { heads, kv_heads, head_dim: d } = shape;
    let qkv32 = qkv.to_f32();
    let mut out = Tensor::zeros(qkv.device(), &[qkv.rows(), heads * d]);
    for (t, (line, out)) in
        qkv32.f32s().chunks_exact(shape.width()).zip(out.f32s_mut().chunks_exact_mut(heads * d)).enumerate()
    {
        let turned = |from: &[f32]| {
            let mut to = from.to_vec();
            if let Some((cos, sin)) = rotary {
                rotate(&mut to, from, &cos[t * d / 2..], &sin[t * d / 2..], 1.0);
            }
            to
        };
        for kv in 0..kv_heads {
            cache.keys.extend(turned(&line[(heads + kv) * d..][..d]));
        }
        cache.values.extend_from_slice(&line[(heads + kv_heads) * d..]);
        for head in 0..heads {
            let query = turned(&line[head * d..][..d]);
            attend_one(&query, head * kv_heads / heads, kv_heads, cache, &mut out[head * d..][..d]);
        }
    }
    out.cast(qkv.dtype())
}

fn attend_one(query: &[f32], kv: usize, kv_heads: usize, cache: &KvCache, out: &mut [f32]) {
    let d = query.len();
    let scale = 1.0 / (d as f32).sqrt();
    let stride = kv_heads * d;
    let scores: Vec<f32> =
        cache.keys.chunks_exact(stride).map(|k| super::rows::dot(query, &k[kv * d..][..d]) * scale).collect();
    let top = scores.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f32 = weights.iter().sum();
    for (w, v) in weights.iter().zip(cache.values.chunks_exact(stride)) {
        out.iter_mut().zip(&v[kv * d..]).for_each(|(o, v)| *o += w / total * v);
    }
}
