//! Attention block by block (Dao et al. 2022): the forward keeps one number per query, the log-sum-exp of its
//! scores; the backward computes each block of probabilities again from it. No S x S matrix is ever in memory.
//!
//! Queries, keys and values lie side by side in one matrix, `[T, (heads + 2 * kv_heads) * head_dim]`, as the fused
//! projection writes them, or in three; keys and values may then be of other tokens than queries. Work is split over
//! (row of the batch, kv head): the query heads that share a key head stay together, so nobody else adds to its gradient.

use std::ops::Range;

use crate::cpu::attention_blocks::{AttentionBlock, BlockSizes, blocks};
use crate::cpu::attention_call::{AttentionCall, AttentionSizes, HeadMatrix, Shared, store};
use crate::cpu::gemm::{ADD, InnerProducts, Into, SET, View};
use crate::cpu::math::exp;
use crate::cpu::rows::{dot, simd};
use crate::cpu::stored::StoredRef;
use crate::device::Device;

/// Memory of a thread, used for one head after the other.
struct HeadScratch<'a> {
    products: InnerProducts<'a>,
    q: HeadMatrix,
    k: HeadMatrix,
    v: HeadMatrix,
    /// What comes back to the head's outputs.
    dout: HeadMatrix,
    /// Gradients of queries, keys and values.
    slopes: [Vec<f32>; 3],
    /// Scores of a block, and sums of weighted values or the scores' gradients.
    block: [Vec<f32>; 2],
}

/// One (batch row, kv head) after the other, spread over the device's threads.
fn for_tasks(device: &Device, call: &AttentionCall, f: impl Fn(&mut HeadScratch, usize, usize) + Sync) {
    device.for_ranges(call.shape.rows * call.shape.kv_heads, 1, |range| {
        let [q, k, v, dout] = [(); 4].map(|()| HeadMatrix::new(call.in_bf16));
        let (products, slopes, block) = (InnerProducts::new(device), Default::default(), Default::default());
        let mut scratch = HeadScratch { products, q, k, v, dout, slopes, block };
        for task in range {
            simd(
                #[inline(always)]
                || f(&mut scratch, task / call.shape.kv_heads, task % call.shape.kv_heads),
            );
        }
    });
}

/// `out [T, heads * head_dim]` and `lse [T, heads]` from `qkv [T, width]`.
pub(crate) fn attention(
    device: &Device,
    out: &mut [f32],
    lse: &mut [f32],
    qkv: StoredRef,
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    shape: AttentionSizes,
) {
    forward(device, &AttentionCall::fused((shape, qkv.is_bf16()), keys, [cos, sin]), [qkv; 3], [out, lse]);
}

/// The same from `q [T, heads * head_dim]`, `k [keys, kv_heads * head_dim]` and `v [keys, kv_heads * value_dim]`, with
/// `bias` and `sinks` of [`AttentionCall`].
pub(crate) fn attention_apart(
    device: &Device,
    out: &mut [f32],
    lse: &mut [f32],
    q: StoredRef,
    k: StoredRef,
    v: StoredRef,
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    bias: &[f32],
    sinks: &[f32],
    shape: AttentionSizes,
) {
    forward(
        device,
        &AttentionCall::apart((shape, q.is_bf16()), keys, [cos, sin], [bias, sinks]),
        [q, k, v],
        [out, lse],
    );
}

fn forward(device: &Device, call: &AttentionCall, [q, k, v]: [StoredRef; 3], [out, lse]: [&mut [f32]; 2]) {
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let [of_q, of_k, of_v] = call.lines;
    for_tasks(
        device,
        call,
        #[inline(always)]
        |scratch, row, kv| {
            scratch.k.load(call, of_k, k, (row, kv));
            scratch.v.load(call, of_v, v, (row, kv));
            for head in kv * call.group()..(kv + 1) * call.group() {
                scratch.q.load(call, of_q, q, (row, head));
                forward_head(call, (row, head), scratch, (out, lse));
            }
        },
    );
}

/// Scores lie a key a line here, and a query a column: what is found for each query is then found for vectors of them.
#[inline(always)]
fn forward_head(
    call: &AttentionCall,
    (row, head): (usize, usize),
    HeadScratch { products, q, k, v, block: [scores, sums], .. }: &mut HeadScratch,
    (out, lse): (Shared, Shared),
) {
    let AttentionSizes { value_dim: d, seq, key_seq, heads, .. } = call.shape;
    let (seen, bias) = (&call.keys[row * seq..][..seq], call.bias_of(head));
    // The sink counts like a key of its own: it is the first that is seen.
    let (first_top, first_total) = call.sinks.get(head).map_or((f32::NEG_INFINITY, 0.0), |&sink| (sink, 1.0));
    let sizes = BlockSizes::of(call.shape);
    scores.resize(sizes.keys * sizes.queries, 0.0);
    sums.resize(sizes.queries * d, 0.0);
    let [mut top, mut total, mut shrink, mut sum] = [0.0; 4].map(|x| vec![x; sizes.queries]);
    for i in (0..seq).step_by(sizes.queries) {
        let queries = i..seq.min(i + sizes.queries);
        top.fill(first_top);
        total.fill(first_total);
        sums.fill(0.0);
        for block in blocks(seen, queries.clone(), sizes.keys, key_seq) {
            let ([n, keys], first) = (block.sizes(), block.queries.start - i);
            let here = first..first + n;
            turned_scores(scores, call, (products, [q, k], &bias), &block);
            let shrink = &mut shrink[here.clone()];
            let [top, total] = [&mut top[here.clone()], &mut total[here]];
            to_weights(scores, &block, [top, total, shrink, &mut sum[..n]]);
            let sums = &mut sums[first * d..];
            for (sums, &shrink) in sums.chunks_exact_mut(d).zip(&*shrink) {
                if shrink != 1.0 {
                    sums.iter_mut().for_each(|x| *x *= shrink);
                }
            }
            products.multiply(sums, d, View::new(scores, keys, n, n).t(), v.rows(block.keys.clone()), ADD);
        }
        for (r, token) in queries.map(|query| row * seq + query).enumerate() {
            // SAFETY: this head's columns of this row belong to this task.
            let (to, lse) = unsafe { (out.slice((token * heads + head) * d, d), lse.slice(token * heads + head, 1)) };
            // A query that sees no key gets nothing.
            let inverse = if total[r] > 0.0 { 1.0 / total[r] } else { 0.0 };
            to.iter_mut().zip(&sums[r * d..]).for_each(|(o, s)| *o = s * inverse);
            lse[0] = top[r] + total[r].ln();
        }
    }
}

/// The scores of a block, `[keys, queries]`.
#[inline(always)]
fn turned_scores(
    scores: &mut [f32],
    call: &AttentionCall,
    (products, [q, k], bias): (&InnerProducts, [&HeadMatrix; 2], &[f32]),
    block: &AttentionBlock,
) {
    let [n, _] = block.sizes();
    let (q, k) = (q.rows(block.queries.clone()), k.rows(block.keys.clone()));
    products.multiply(scores, n, k, q.t(), Into { alpha: call.shape.scale, accumulate: false });
    if !bias.is_empty() {
        // Distances fall by one from a query to the next.
        let nearest = call.first_distance(block.queries.end - 1);
        for (key, line) in block.keys.clone().zip(scores.chunks_exact_mut(n)) {
            line.iter_mut().rev().zip(&bias[nearest + key..]).for_each(|(score, bias)| *score += bias);
        }
    }
}

/// Scores of a block become weights, `exp(score - top)`, zero where invisible, with each query's `top` score so far; their `sum`
/// is added to its `total`. `shrink` becomes the factor of what was found with an earlier top.
#[inline(always)]
fn to_weights(scores: &mut [f32], block: &AttentionBlock, [top, total, shrink, sum]: [&mut [f32]; 4]) {
    let (n, is_whole) = (block.queries.len(), block.is_whole());
    let queries_of = |key| if is_whole { 0..n } else { block.queries_of(key) };
    shrink.copy_from_slice(top);
    sum.fill(0.0);
    for (key, line) in block.keys.clone().zip(scores.chunks_exact(n)) {
        let some = queries_of(key - block.keys.start);
        for (top, score) in top[some.clone()].iter_mut().zip(&line[some]) {
            *top = if *score > *top { *score } else { *top };
        }
    }
    for ((shrink, total), top) in shrink.iter_mut().zip(&mut *total).zip(&*top) {
        *shrink = if *shrink == *top { 1.0 } else { exp(*shrink - *top) };
        *total *= *shrink;
    }
    for (key, line) in block.keys.clone().zip(scores.chunks_exact_mut(n)) {
        let some = queries_of(key - block.keys.start);
        line[..some.start].fill(0.0);
        line[some.end..].fill(0.0);
        for ((x, top), sum) in line[some.clone()].iter_mut().zip(&top[some.clone()]).zip(&mut sum[some]) {
            *x = exp(*x - *top);
            *sum += *x;
        }
    }
    total.iter_mut().zip(&*sum).for_each(|(total, sum)| *total += sum);
}

/// `dqkv [T, width]` from the forward's inputs and outputs and `dout [T, heads * head_dim]`.
pub(crate) fn attention_back(
    device: &Device,
    dqkv: &mut [f32],
    qkv: StoredRef,
    out: StoredRef,
    lse: &[f32],
    dout: &[f32],
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    shape: AttentionSizes,
) {
    let to = [Shared::new(dqkv); 3];
    let none = [(); 2].map(|()| Shared::new(&mut []));
    backward(
        device,
        &AttentionCall::fused((shape, qkv.is_bf16()), keys, [cos, sin]),
        [qkv; 3],
        out,
        [lse, dout],
        (to, none),
    );
}

/// The same of queries, keys and values in matrices of their own. Every row of the batch gets a copy of the gradients of
/// `bias` and `sinks`.
pub(crate) fn attention_apart_back(
    device: &Device,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
    dbias: &mut [f32],
    dsinks: &mut [f32],
    q: StoredRef,
    k: StoredRef,
    v: StoredRef,
    out: StoredRef,
    lse: &[f32],
    dout: &[f32],
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    bias: &[f32],
    sinks: &[f32],
    shape: AttentionSizes,
) {
    let (to, terms) = ([dq, dk, dv].map(Shared::new), [dbias, dsinks].map(Shared::new));
    let call = AttentionCall::apart((shape, q.is_bf16()), keys, [cos, sin], [bias, sinks]);
    backward(device, &call, [q, k, v], out, [lse, dout], (to, terms));
}

fn backward(
    device: &Device,
    call: &AttentionCall,
    [q, k, v]: [StoredRef; 3],
    out: StoredRef,
    [lse, dout]: [&[f32]; 2],
    ([to_q, to_k, to_v], terms): ([Shared; 3], [Shared; 2]),
) {
    let AttentionSizes { head_dim: d, value_dim, seq, key_seq, .. } = call.shape;
    let [of_q, of_k, of_v] = call.lines;
    let of_out = call.output_lines();
    for_tasks(
        device,
        call,
        #[inline(always)]
        |scratch, row, kv| {
            let zeros = |slopes: &mut Vec<f32>, len: usize| {
                slopes.clear();
                slopes.resize(len, 0.0);
            };
            scratch.k.load(call, of_k, k, (row, kv));
            scratch.v.load(call, of_v, v, (row, kv));
            zeros(&mut scratch.slopes[1], key_seq * d);
            zeros(&mut scratch.slopes[2], key_seq * value_dim);
            for head in kv * call.group()..(kv + 1) * call.group() {
                scratch.q.load(call, of_q, q, (row, head));
                scratch.dout.load(call, of_out, StoredRef::F32(dout), (row, head));
                zeros(&mut scratch.slopes[0], seq * d);
                let own = backward_head(call, &SavedHead { out, lse, dout, row, head }, scratch);
                own.store(call, (row, head), terms);
                store(call, of_q, to_q, (row, head), &scratch.slopes[0]);
            }
            store(call, of_k, to_k, (row, kv), &scratch.slopes[1]);
            store(call, of_v, to_v, (row, kv), &scratch.slopes[2]);
        },
    );
}

struct SavedHead<'a> {
    out: StoredRef<'a>,
    lse: &'a [f32],
    dout: &'a [f32],
    row: usize,
    head: usize,
}

/// The gradients of what is of a head, of one row of the batch.
struct TermGradients {
    bias: Vec<f32>,
    sink: f32,
}

impl TermGradients {
    fn store(&self, call: &AttentionCall, (row, head): (usize, usize), [bias, sinks]: [Shared; 2]) {
        let (heads, distances) = (call.shape.heads, self.bias.len());
        for (i, d) in self.bias.iter().enumerate() {
            // SAFETY: this head's elements of this row's copy belong to this task.
            unsafe { bias.slice((row * distances + i) * heads + head, 1)[0] = *d };
        }
        if !call.sinks.is_empty() {
            // SAFETY: as above.
            unsafe { sinks.slice(row * heads + head, 1)[0] = self.sink };
        }
    }
}

#[inline(always)]
fn backward_head(
    call: &AttentionCall,
    saved: &SavedHead,
    HeadScratch { products, q, k, v, dout, slopes: [dq, dk, dv], block: [p, dp] }: &mut HeadScratch,
) -> TermGradients {
    let AttentionSizes { head_dim: d, value_dim, seq, key_seq, heads, scale, .. } = call.shape;
    let (bias, sink) = (call.bias_of(saved.head), call.sinks.get(saved.head));
    let mut terms = TermGradients { bias: vec![0.0; bias.len()], sink: 0.0 };
    let seen = &call.keys[saved.row * seq..][..seq];
    let token = |t: usize| (saved.row * seq + t) * heads + saved.head;
    let sizes = BlockSizes::of(call.shape);
    p.resize(sizes.queries * sizes.keys, 0.0);
    dp.resize(sizes.queries * sizes.keys, 0.0);
    let mut inner = vec![0.0; sizes.queries];
    for i in (0..seq).step_by(sizes.queries) {
        let queries = i..seq.min(i + sizes.queries);
        for (t, inner) in queries.clone().zip(&mut inner) {
            *inner = dot_stored(saved.out, token(t) * value_dim, &saved.dout[token(t) * value_dim..][..value_dim]);
            // A sink's weight takes from every value: its gradient is of a key whose value is zero.
            terms.sink -= sink.map_or(0.0, |sink| exp(sink - saved.lse[token(t)]) * *inner);
        }
        for block in blocks(seen, queries, sizes.keys, key_seq) {
            let ([n, keys], first, j) = (block.sizes(), block.queries.start, block.keys.start);
            let dout = dout.rows(block.queries.clone());
            scores(p, call, (products, [q, k], &bias), &block);
            products.multiply(dp, keys, dout, v.rows(block.keys.clone()).t(), SET);
            for (r, t) in block.queries.clone().enumerate() {
                let (p, dp) = (&mut p[r * keys..][..keys], &mut dp[r * keys..][..keys]);
                to_gradients(p, dp, block.keys_of(r), saved.lse[token(t)], inner[t - i], scale);
                if !bias.is_empty() {
                    let sums = &mut terms.bias[call.first_distance(t) + j..][..keys];
                    sums.iter_mut().zip(&*dp).for_each(|(sum, d)| *sum += d / scale);
                }
            }
            let p = View::new(p, n, keys, keys);
            let ds = View::new(dp, n, keys, keys);
            products.multiply(&mut dv[j * value_dim..], value_dim, p.t(), dout, ADD);
            products.multiply(&mut dq[first * d..], d, ds, k.rows(block.keys.clone()), ADD);
            products.multiply(&mut dk[j * d..], d, ds.t(), q.rows(block.queries.clone()), ADD);
        }
    }
    terms
}

/// The scores of a block, `[queries, keys]`.
#[inline(always)]
fn scores(
    scores: &mut [f32],
    call: &AttentionCall,
    (products, [q, k], bias): (&InnerProducts, [&HeadMatrix; 2], &[f32]),
    block: &AttentionBlock,
) {
    let [_, keys] = block.sizes();
    let (q, k) = (q.rows(block.queries.clone()), k.rows(block.keys.clone()));
    products.multiply(scores, keys, q, k.t(), Into { alpha: call.shape.scale, accumulate: false });
    if !bias.is_empty() {
        for (query, line) in block.queries.clone().zip(scores.chunks_exact_mut(keys)) {
            let bias = &bias[call.first_distance(query) + block.keys.start..][..keys];
            line.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
    }
}

/// Scores become probabilities in place, their gradients become the scores' gradients.
#[inline(always)]
pub(super) fn to_gradients(p: &mut [f32], dp: &mut [f32], seen: Range<usize>, lse: f32, inner: f32, scale: f32) {
    for line in [&mut *p, &mut *dp] {
        line[..seen.start].fill(0.0);
        line[seen.end..].fill(0.0);
    }
    for (p, dp) in p[seen.clone()].iter_mut().zip(&mut dp[seen]) {
        *p = exp(*p - lse);
        *dp = *p * (*dp - inner) * scale;
    }
}

/// The product with as many stored numbers from `at` on.
#[inline(always)]
pub(super) fn dot_stored(a: StoredRef, at: usize, b: &[f32]) -> f32 {
    match a {
        StoredRef::F32(a) => dot(&a[at..][..b.len()], b),
        StoredRef::Bf16(a) => dot(&a[at..][..b.len()], b),
        StoredRef::U32(_) => unreachable!("results are no indices"),
    }
}
