//! Attention over packed rows, with grouped key heads and rotary positions inside. Which keys a token sees is a range a
//! token: up to itself for decoders, its whole segment for encoders, a segment of another row for cross-attention.

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::attention::AttentionSizes;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
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

/// For every token of rows of length `seq`, the positions of its row of another text, of `key_seq` tokens, that have the
/// same segment; none if there is no such segment. In both texts a row's segments are runs, in the same order.
///
/// # Panics
/// If they are not.
#[track_caller]
pub fn cross_keys((segments, seq): (&[u32], usize), (key_segments, key_seq): (&[u32], usize)) -> Vec<Range<u32>> {
    assert_eq!(segments.len() * key_seq, key_segments.len() * seq, "as many rows of {seq} as of {key_seq}");
    let mut keys = Vec::with_capacity(segments.len());
    for (row, of) in segments.chunks_exact(seq).zip(key_segments.chunks_exact(key_seq)) {
        let mut seen = 0..0;
        for (t, segment) in row.iter().enumerate() {
            if t == 0 || row[t - 1] != *segment {
                let begin = of.iter().position(|key| key == segment);
                let run = |begin: usize| begin + of[begin..].iter().take_while(|key| *key == segment).count();
                let next = begin.map_or(seen.end..seen.end, |begin| begin as u32..run(begin) as u32);
                assert!(next.start >= seen.end, "segment {segment} stands before one that it follows");
                seen = next;
            }
            keys.push(seen.clone());
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
pub fn rotary_tables<'a>(
    device: &Arc<Device>,
    positions: impl Into<Index<'a>>,
    head_dim: usize,
    theta: f32,
) -> [Tensor; 2] {
    let positions = positions.into();
    let half = head_dim / 2;
    let speeds: Vec<f64> = (0..half).map(|i| f64::from(theta).powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let angle = |i: usize| f64::from(positions.at(i / half)) * speeds[i % half];
    let table = |f: fn(f64) -> f64| Tensor::from_fn(device, &[positions.len(), half], |i| f(angle(i)) as f32);
    [table(f64::cos), table(f64::sin)]
}

/// Which tokens see each other, and where they stand: what all layers' attention needs to know of a batch.
#[derive(Clone, Debug)]
pub struct AttentionSpans {
    /// Queries and keys of a row.
    seq: usize,
    key_seq: usize,
    /// `[T, 2]`: of every token the first position that it sees and the one after the last.
    keys: Tensor,
    /// Tokens that see each other, counted once for each that sees.
    pairs: f64,
    rotary: [Tensor; 2],
}

impl AttentionSpans {
    /// Rows of `seq` tokens, of which each sees the positions of its row that `keys` has for it ([`causal_keys`],
    /// [`segment_keys`]); `rotary` comes from [`rotary_tables`], none being for learned positions.
    pub fn new(device: &Arc<Device>, seq: usize, keys: &[Range<u32>], rotary: Option<[Tensor; 2]>) -> AttentionSpans {
        let ends: Vec<u32> = keys.iter().flat_map(|keys| [keys.start, keys.end]).collect();
        let pairs = keys.iter().map(|keys| keys.len() as f64).sum();
        AttentionSpans {
            seq,
            key_seq: seq,
            keys: Tensor::from_index(device, &ends),
            pairs,
            rotary: turns(device, rotary),
        }
    }

    /// The same where keys are of other rows, of `key_seq` tokens each ([`cross_keys`]).
    ///
    /// # Panics
    /// With rotary positions, which are of one text.
    #[track_caller]
    pub fn across(self, key_seq: usize) -> AttentionSpans {
        assert!(self.rotary[0].is_empty(), "positions of two texts have nothing to do with each other");
        AttentionSpans { key_seq, ..self }
    }

    /// The same of so many tokens on a device that knows sizes alone: each sees `seen` positions on average.
    pub fn counted(
        device: &Arc<Device>,
        (seq, tokens): (usize, usize),
        seen: f64,
        rotary: Option<[Tensor; 2]>,
    ) -> AttentionSpans {
        let keys = Tensor::from_index(device, Index::Counted(2 * tokens));
        AttentionSpans { seq, key_seq: seq, keys, pairs: tokens as f64 * seen, rotary: turns(device, rotary) }
    }

    /// Sizes of a call with so many queries and keys.
    fn shape(&self, [queries, keys]: [usize; 2], of: AttentionShape) -> AttentionSizes {
        let AttentionShape { heads, kv_heads, head_dim } = of;
        let (seq, key_seq) = (self.seq, self.key_seq);
        assert!(heads.is_multiple_of(kv_heads), "{of:?}");
        assert!(queries.is_multiple_of(seq) && self.keys.len() == 2 * queries, "{queries} tokens in rows of {seq}");
        assert_eq!(queries / seq * key_seq, keys, "as many rows of {key_seq} keys as of {seq} queries");
        AttentionSizes { rows: queries / seq, seq, key_seq, heads, kv_heads, head_dim }
    }
}

/// Tables, or none of no size.
fn turns(device: &Arc<Device>, rotary: Option<[Tensor; 2]>) -> [Tensor; 2] {
    rotary.unwrap_or_else(|| [(); 2].map(|()| Tensor::stale(device, &[0], Dtype::F32)))
}

impl Var {
    /// Attention of every token to those that it sees. `self` is the fused projection
    /// `[rows * seq, (heads + 2 kv_heads) * head_dim]`; gives `[rows * seq, heads * head_dim]`.
    #[track_caller]
    pub fn attention(&self, shape: AttentionShape, spans: &AttentionSpans) -> Var {
        let (AttentionShape { heads, head_dim, .. }, tokens) = (shape, self.value().rows());
        assert_eq!(self.value().cols(), shape.width(), "columns of the fused projection");
        let (device, qkv, spans) = (self.device().clone(), self.value().clone(), spans.clone());
        let shape = spans.shape([tokens, tokens], shape);
        let mut out = Tensor::stale(&device, &[tokens, heads * head_dim], Dtype::F32);
        let mut lse = Tensor::stale(&device, &[tokens, heads], Dtype::F32);
        let AttentionSpans { keys, rotary: [cos, sin], .. } = &spans;
        let attended = 2.0 * spans.pairs * (heads * head_dim) as f64;
        device.count_attended(attended);
        kernels::attention(&mut out, &mut lse, &qkv.to_f32(), keys, cos, sin, shape);
        let out = out.cast(self.dtype());
        let (saved, to) = (out.clone(), self.input());
        self.tape().op("attention", out, &[self], move |g, gradients| {
            let AttentionSpans { keys, rotary: [cos, sin], .. } = &spans;
            let mut dqkv = Tensor::stale(&device, qkv.shape(), Dtype::F32);
            let (out, qkv) = (saved.to_f32(), qkv.to_f32());
            device.count_attended(2.5 * attended);
            kernels::attention_back(&mut dqkv, &qkv, &out, &lse, &g, keys, cos, sin, shape);
            gradients.add(to, dqkv);
        })
    }
}

impl Var {
    /// The same of queries `[rows * seq, heads * head_dim]`, and keys and values `[rows * key_seq, kv_heads * head_dim]`,
    /// which may be of other tokens. A query that sees no key gives zeros.
    #[track_caller]
    pub fn attention_to(&self, [keys, values]: [&Var; 2], shape: AttentionShape, spans: &AttentionSpans) -> Var {
        let (AttentionShape { heads, kv_heads, head_dim }, queries) = (shape, self.value().rows());
        assert_eq!(self.value().cols(), heads * head_dim, "columns of queries");
        assert!([keys, values].iter().all(|of| of.value().cols() == kv_heads * head_dim), "columns of keys and values");
        assert_eq!(keys.value().rows(), values.value().rows(), "keys and values");
        let (device, spans) = (self.device().clone(), spans.clone());
        let shape = spans.shape([queries, keys.value().rows()], shape);
        let [q, k, v] = [self, keys, values].map(|of| of.value().clone());
        let mut out = Tensor::stale(&device, &[queries, heads * head_dim], Dtype::F32);
        let mut lse = Tensor::stale(&device, &[queries, heads], Dtype::F32);
        let AttentionSpans { keys: seen, rotary: [cos, sin], .. } = &spans;
        let attended = 2.0 * spans.pairs * (heads * head_dim) as f64;
        device.count_attended(attended);
        kernels::attention_apart(&mut out, &mut lse, &q.to_f32(), &k.to_f32(), &v.to_f32(), seen, cos, sin, shape);
        let out = out.cast(self.dtype());
        let (saved, to) = (out.clone(), [self, keys, values].map(Var::input));
        self.tape().op("attention", out, &[self, keys, values], move |g, gradients| {
            let AttentionSpans { keys: seen, rotary: [cos, sin], .. } = &spans;
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|of| Tensor::stale(&device, of.shape(), Dtype::F32));
            let (out, [q, k, v]) = (saved.to_f32(), [&q, &k, &v].map(Tensor::to_f32));
            device.count_attended(2.5 * attended);
            kernels::attention_apart_back(&mut dq, &mut dk, &mut dv, &q, &k, &v, &out, &lse, &g, seen, cos, sin, shape);
            to.into_iter().zip([dq, dk, dv]).for_each(|(to, gradient)| gradients.add(to, gradient));
        })
    }
}

/// Keys (rotated) and values of the tokens generated so far, for one layer.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    /// `[capacity, width]` each, of which the first `tokens` rows count.
    rows: Option<[Tensor; 2]>,
    tokens: usize,
}

impl KvCache {
    /// Tokens held.
    pub fn len(&self) -> usize {
        self.tokens
    }

    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = KvCache::default();
    }

    /// Keys and values with room for `more` rows `width` wide behind those that count, which are then counted too.
    pub(super) fn grow(&mut self, device: &Arc<Device>, more: usize, width: usize) -> [&mut Tensor; 2] {
        let needed = self.tokens + more;
        let rows = self.rows.get_or_insert_with(|| [(); 2].map(|()| Tensor::stale(device, &[0, width], Dtype::F32)));
        for part in &mut *rows {
            if part.rows() < needed {
                let mut larger = Tensor::stale(device, &[needed.next_power_of_two(), width], Dtype::F32);
                larger.copy_part(0, part, 0..self.tokens * width);
                *part = larger;
            } else if !part.is_unique() {
                *part = part.to_owned_copy();
            }
        }
        self.tokens = needed;
        rows.each_mut()
    }
}

/// Attention of new tokens to the cache and themselves, without gradients: `qkv` `[n, width]` at the positions that
/// follow the cached ones, of which `spans` has the tables; the new keys and values are added to the cache. Gives
/// `[n, heads * head_dim]`.
pub fn attend_cached(qkv: &Tensor, shape: AttentionShape, spans: &AttentionSpans, cache: &mut KvCache) -> Tensor {
    let AttentionShape { heads, kv_heads, head_dim } = shape;
    let (device, cached, seq) = (qkv.device(), cache.len(), qkv.rows());
    let shape = AttentionSizes { rows: 1, seq, key_seq: seq, heads, kv_heads, head_dim };
    let mut out = Tensor::stale(device, &[seq, heads * head_dim], Dtype::F32);
    let ([keys, values], [cos, sin]) = (cache.grow(device, seq, kv_heads * head_dim), &spans.rotary);
    kernels::attend_cached(&mut out, keys, values, &qkv.to_f32(), cos, sin, shape, cached);
    out.cast(qkv.dtype())
}

/// Queries, keys and values of the same tokens as one matrix, which [`attend_cached`] takes.
pub fn side_by_side(parts: &[&Tensor]) -> Tensor {
    let (rows, width) = (parts[0].rows(), parts.iter().map(|part| part.cols()).sum());
    let mut out = Tensor::stale(parts[0].device(), &[rows, width], parts[0].dtype());
    let mut column = 0;
    for part in parts {
        let cols = part.cols();
        (0..rows).for_each(|row| out.copy_part(row * width + column, part, row * cols..(row + 1) * cols));
        column += cols;
    }
    out
}
