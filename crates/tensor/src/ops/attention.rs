//! Attention over packed rows, with grouped key heads and rotary positions inside. Which keys a token sees is a range a
//! token: up to itself for decoders, its whole segment for encoders, a segment of another row for cross-attention.

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::attention_call::AttentionSizes;
pub use crate::cpu::attention_call::TurningPairs;
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

    /// Factor on products of queries and keys.
    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
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

/// Of the keys that tokens of rows of length `seq` see when they look back only, the last `window`, a token itself among
/// them.
pub fn within_window(keys: Vec<Range<u32>>, seq: usize, window: usize) -> Vec<Range<u32>> {
    let last = |(t, keys): (usize, Range<u32>)| keys.start.max((t % seq + 1).saturating_sub(window) as u32)..keys.end;
    keys.into_iter().enumerate().map(last).collect()
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
    turning: TurningPairs,
}

impl AttentionSpans {
    /// Rows of `seq` tokens, of which each sees the positions of its row that `keys` has for it ([`causal_keys`],
    /// [`segment_keys`]); `rotary` comes from [`super::rotary_tables`], none being for learned positions.
    ///
    /// # Panics
    /// If a token sees from, or to, an earlier position than the one before it in its row.
    #[track_caller]
    pub fn new(device: &Arc<Device>, seq: usize, keys: &[Range<u32>], rotary: Option<[Tensor; 2]>) -> AttentionSpans {
        let falls = |pair: &[Range<u32>]| pair[1].start < pair[0].start || pair[1].end < pair[0].end;
        assert!(
            !keys.chunks(seq.max(1)).any(|row| row.windows(2).any(falls)),
            "what tokens of a row see never falls back"
        );
        let ends: Vec<u32> = keys.iter().flat_map(|keys| [keys.start, keys.end]).collect();
        let pairs = keys.iter().map(|keys| keys.len() as f64).sum();
        AttentionSpans {
            seq,
            key_seq: seq,
            keys: Tensor::from_index(device, &ends),
            pairs,
            rotary: turns(device, rotary),
            turning: TurningPairs::default(),
        }
    }

    /// The same where other pairs of a head's numbers turn together.
    pub fn turning(self, turning: TurningPairs) -> AttentionSpans {
        AttentionSpans { turning, ..self }
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
        let (pairs, rotary) = (tokens as f64 * seen, turns(device, rotary));
        AttentionSpans { seq, key_seq: seq, keys, pairs, rotary, turning: TurningPairs::default() }
    }

    /// Sizes of a call with so many queries and keys, where values are as wide as keys.
    fn shape(&self, [queries, keys]: [usize; 2], of: AttentionShape) -> AttentionSizes {
        let AttentionShape { heads, kv_heads, head_dim } = of;
        let (value_dim, scale) = (head_dim, of.scale());
        let (seq, key_seq) = (self.seq, self.key_seq);
        assert!(heads.is_multiple_of(kv_heads), "{of:?}");
        assert!(queries.is_multiple_of(seq) && self.keys.len() == 2 * queries, "{queries} tokens in rows of {seq}");
        assert_eq!(queries / seq * key_seq, keys, "as many rows of {key_seq} keys as of {seq} queries");
        let (rows, rotary_dim, pairs) = (queries / seq, self.rotary_dim(), self.turning);
        assert!(rotary_dim <= head_dim, "{rotary_dim} of {head_dim} numbers turn");
        AttentionSizes { rows, seq, key_seq, heads, kv_heads, head_dim, value_dim, rotary_dim, pairs, scale }
    }

    /// Numbers of a head that turn with positions: two for each angle of a token.
    fn rotary_dim(&self) -> usize {
        if self.rotary[0].is_empty() { 0 } else { 2 * self.rotary[0].cols() }
    }
}

/// What is done to attention's scores besides the masks; by default they are divided by the root of `head_dim` and no
/// more.
#[derive(Clone, Default)]
pub struct ScoreTerms {
    /// Factor on products of queries and keys, if it is another.
    pub scale: Option<f32>,
    /// `[seq - 1 + key_seq, heads]`, f32: added to scores by how much farther in its row the key is than the query, from
    /// `1 - seq` on; for [`attend_cached`] `[n, heads]`, from `1 - n` to 0.
    pub bias: Option<Var>,
    /// `[heads]`, f32: a score of each head that takes part in the softmax and has no value.
    pub sinks: Option<Var>,
}

impl ScoreTerms {
    fn on(&self, device: &Arc<Device>) -> [Tensor; 2] {
        let none = || Tensor::stale(device, &[0], Dtype::F32);
        [&self.bias, &self.sinks].map(|term| term.as_ref().map_or_else(none, |term| term.value().clone()))
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
        kernels::attention(&mut out, &mut lse, &qkv, keys, cos, sin, shape);
        let out = out.cast(self.dtype());
        let (saved, to) = (out.clone(), self.input());
        self.tape().op("attention", out, &[self], move |g, gradients| {
            let AttentionSpans { keys, rotary: [cos, sin], .. } = &spans;
            let mut dqkv = Tensor::stale(&device, qkv.shape(), Dtype::F32);
            device.count_attended(2.5 * attended);
            kernels::attention_back(&mut dqkv, &qkv, &saved, &lse, &g, keys, cos, sin, shape);
            gradients.add(to, dqkv);
        })
    }
}

impl Var {
    /// The same of queries `[rows * seq, heads * head_dim]`, and keys and values `[rows * key_seq, kv_heads * head_dim]`,
    /// which may be of other tokens. A query that sees no key gives zeros.
    #[track_caller]
    pub fn attention_to(&self, keys_values: [&Var; 2], shape: AttentionShape, spans: &AttentionSpans) -> Var {
        self.attention_with(keys_values, shape, spans, &ScoreTerms::default())
    }

    /// The same where more is done to scores. Values may be of another width than keys; the result is then of theirs.
    #[track_caller]
    pub fn attention_with(
        &self,
        [keys, values]: [&Var; 2],
        shape: AttentionShape,
        spans: &AttentionSpans,
        terms: &ScoreTerms,
    ) -> Var {
        let (AttentionShape { heads, kv_heads, head_dim }, queries) = (shape, self.value().rows());
        assert_eq!(self.value().cols(), heads * head_dim, "columns of queries");
        assert_eq!(keys.value().cols(), kv_heads * head_dim, "columns of keys");
        assert!(values.value().cols().is_multiple_of(kv_heads), "columns of values");
        assert_eq!(keys.value().rows(), values.value().rows(), "keys and values");
        let (device, spans) = (self.device().clone(), spans.clone());
        let value_dim = values.value().cols() / kv_heads;
        let plain = spans.shape([queries, keys.value().rows()], shape);
        let shape = AttentionSizes { value_dim, scale: terms.scale.unwrap_or(plain.scale), ..plain };
        let [bias, sinks] = terms.on(&device);
        assert!(bias.is_empty() || bias.shape() == [shape.seq - 1 + shape.key_seq, heads], "a bias for each distance");
        assert!(sinks.is_empty() || sinks.shape() == [heads], "a sink for each head");
        let [q, k, v] = [self, keys, values].map(|of| of.value().clone());
        let mut out = Tensor::stale(&device, &[queries, heads * value_dim], Dtype::F32);
        let mut lse = Tensor::stale(&device, &[queries, heads], Dtype::F32);
        let AttentionSpans { keys: seen, rotary: [cos, sin], .. } = &spans;
        // A score and a weighted value for each pair; backward has the score again, and a product for each gradient.
        let of_pairs =
            |products: [usize; 2]| spans.pairs * (heads * (products[0] * head_dim + products[1] * value_dim)) as f64;
        device.count_attended(of_pairs([1, 1]));
        kernels::attention_apart(&mut out, &mut lse, &q, &k, &v, seen, cos, sin, &bias, &sinks, shape);
        let again = of_pairs([3, 2]);
        let out = out.cast(self.dtype());
        let (saved, to) = (out.clone(), [self, keys, values].map(Var::input));
        let to_terms = [&terms.bias, &terms.sinks].map(|term| term.as_ref().map(Var::input));
        let inputs: Vec<&Var> = [self, keys, values].into_iter().chain(&terms.bias).chain(&terms.sinks).collect();
        self.tape().op("attention", out, &inputs, move |g, gradients| {
            let AttentionSpans { keys: seen, rotary: [cos, sin], .. } = &spans;
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|of| Tensor::stale(&device, of.shape(), Dtype::F32));
            let [mut dbias, mut dsinks] =
                [&bias, &sinks].map(|of| Tensor::stale(&device, &[shape.rows, of.len()], Dtype::F32));
            device.count_attended(again);
            kernels::attention_apart_back(
                &mut dq,
                &mut dk,
                &mut dv,
                &mut dbias,
                &mut dsinks,
                &q,
                &k,
                &v,
                &saved,
                &lse,
                &g,
                seen,
                cos,
                sin,
                &bias,
                &sinks,
                shape,
            );
            to.into_iter().zip([dq, dk, dv]).for_each(|(to, gradient)| gradients.add(to, gradient));
            for ((to, like), copies) in to_terms.into_iter().zip([&bias, &sinks]).zip([dbias, dsinks]) {
                let Some(to) = to else { continue };
                gradients.write(&device, to, like.shape(), |sum, accumulate| {
                    kernels::sum_copies(sum, &copies, accumulate);
                });
            }
        })
    }
}

/// Keys (rotated) and values of the tokens generated so far, for one layer.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    /// `[capacity, width]`, of which the first `tokens` rows count.
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

    /// Keys and values with room for `more` rows so wide behind those that count, which are then counted too.
    pub(super) fn grow(&mut self, device: &Arc<Device>, more: usize, widths: [usize; 2]) -> [&mut Tensor; 2] {
        let needed = self.tokens + more;
        let rows = self.rows.get_or_insert_with(|| widths.map(|width| Tensor::stale(device, &[0, width], Dtype::F32)));
        for (part, width) in rows.iter_mut().zip(widths) {
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

/// How [`attend_cached`] differs from plain attention to all earlier tokens.
#[derive(Clone, Default)]
pub struct CachedTerms {
    pub scores: ScoreTerms,
    /// How many tokens one sees, itself among them, if not all.
    pub window: Option<usize>,
}

/// Attention of new tokens to the cache and themselves, without gradients: `qkv` `[n, width]` at the positions that
/// follow the cached ones, of which `spans` has the tables; the new keys and values are added to the cache. Gives
/// `[n, heads * head_dim]`, or as many columns for each head as values have.
#[track_caller]
pub fn attend_cached(
    qkv: &Tensor,
    shape: AttentionShape,
    spans: &AttentionSpans,
    terms: &CachedTerms,
    cache: &mut KvCache,
) -> Tensor {
    let AttentionShape { heads, kv_heads, head_dim } = shape;
    let (device, cached, seq) = (qkv.device(), cache.len(), qkv.rows());
    let value_dim = (qkv.cols() - (heads + kv_heads) * head_dim) / kv_heads;
    let scale = terms.scores.scale.unwrap_or(shape.scale());
    let (rows, rotary_dim, pairs) = (1, spans.rotary_dim(), spans.turning);
    let shape =
        AttentionSizes { rows, seq, key_seq: seq, heads, kv_heads, head_dim, value_dim, rotary_dim, pairs, scale };
    let mut out = Tensor::stale(device, &[seq, heads * value_dim], Dtype::F32);
    let (widths, [cos, sin]) = ([head_dim, value_dim].map(|dim| kv_heads * dim), &spans.rotary);
    let ([keys, values], [bias, sinks]) = (cache.grow(device, seq, widths), terms.scores.on(device));
    let window = terms.window.unwrap_or(usize::MAX);
    kernels::attend_cached(&mut out, keys, values, &qkv.to_f32(), cos, sin, &bias, &sinks, shape, cached, window);
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
