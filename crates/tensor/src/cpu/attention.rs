//! Attention block by block (Dao et al. 2022): the forward keeps one number per query, the log-sum-exp of its
//! scores; the backward computes each block of probabilities again from it. No S x S matrix is ever in memory.
//!
//! Queries, keys and values lie side by side in one matrix, `[T, (heads + 2 * kv_heads) * head_dim]`, as the fused
//! projection writes them, or in three; keys and values may then be of other tokens than queries. Work is split over
//! (row of the batch, kv head): the query heads that share a key head stay together, so nobody else adds to its gradient.

use crate::cpu::attention_call::{AttentionCall, AttentionSizes, Shared, load, store};
use crate::cpu::gemm::{ADD, Into, SET, View, gemm_serial};
use crate::cpu::math::exp;
use crate::cpu::rows::simd;
use crate::cpu::stored::{StoredNumber, StoredRef};
use crate::device::Device;

/// Queries and keys per block.
pub(super) const BLOCK: usize = 64;

/// One (batch row, kv head) after the other, spread over the device's threads.
fn for_tasks(device: &Device, call: &AttentionCall, f: impl Fn(usize, usize) + Sync) {
    device.for_ranges(call.shape.rows * call.shape.kv_heads, 1, |range| {
        for task in range {
            simd(
                #[inline(always)]
                || f(task / call.shape.kv_heads, task % call.shape.kv_heads),
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
        |row, kv| {
            let k = load(call, of_k, k, (row, kv));
            let v = load(call, of_v, v, (row, kv));
            for head in kv * call.group()..(kv + 1) * call.group() {
                let q = load(call, of_q, q, (row, head));
                forward_head(call, row, head, [&q, &k, &v], (out, lse));
            }
        },
    );
}

#[inline(always)]
fn forward_head(call: &AttentionCall, row: usize, head: usize, [q, k, v]: [&[f32]; 3], (out, lse): (Shared, Shared)) {
    let (d, seq, key_seq) = (call.shape.value_dim, call.shape.seq, call.shape.key_seq);
    let (seen, bias) = (&call.keys[row * seq..][..seq], call.bias_of(head));
    // The sink counts like a key of its own: it is the first that is seen.
    let (first_top, first_total) = call.sinks.get(head).map_or((f32::NEG_INFINITY, 0.0), |&sink| (sink, 1.0));
    let mut scores = vec![0.0; BLOCK * BLOCK];
    let mut sums = vec![0.0; BLOCK * d];
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let mut top = [first_top; BLOCK];
        let mut total = [first_total; BLOCK];
        sums.fill(0.0);
        for j in key_blocks(&seen[i..i + queries]) {
            let keys = BLOCK.min(key_seq - j);
            block_scores(&mut scores, call, [q, k, &bias], (i, queries), (j, keys));
            for r in 0..queries {
                let (from, to) = visible(&seen[i + r], j, keys);
                let line = &mut scores[r * BLOCK..][..keys];
                let peak = line[from..to].iter().fold(top[r], |a, &b| a.max(b));
                let shrink = if top[r] == peak { 1.0 } else { exp(top[r] - peak) };
                total[r] = total[r] * shrink + to_weights(line, from, to, peak);
                top[r] = peak;
                if shrink != 1.0 {
                    sums[r * d..][..d].iter_mut().for_each(|x| *x *= shrink);
                }
            }
            let weights = View::new(&scores, queries, keys, BLOCK).rounded(call.in_bf16);
            gemm_serial(&mut sums, d, weights, View::new(&v[j * d..], keys, d, d), ADD);
        }
        for r in 0..queries {
            let token = row * seq + i + r;
            // SAFETY: this head's columns of this row belong to this task.
            let (to, lse) = unsafe {
                (out.slice((token * call.shape.heads + head) * d, d), lse.slice(token * call.shape.heads + head, 1))
            };
            // A query that sees no key gets nothing.
            let inverse = if total[r] > 0.0 { 1.0 / total[r] } else { 0.0 };
            for (o, s) in to.iter_mut().zip(&sums[r * d..]) {
                *o = s * inverse;
            }
            lse[0] = top[r] + total[r].ln();
        }
    }
}

/// The starts of the key blocks that any of these queries sees.
fn key_blocks(seen: &[[u32; 2]]) -> impl Iterator<Item = usize> + use<> {
    // Bounds never fall, so the first query sees the earliest key of all, and the last query the latest.
    let (first, end) = (seen[0][0] as usize, seen[seen.len() - 1][1] as usize);
    (first / BLOCK * BLOCK..end).step_by(BLOCK)
}

/// Which keys of block `j` a query sees that sees these of its row, as a range within the block.
#[inline(always)]
fn visible(&[start, end]: &[u32; 2], j: usize, keys: usize) -> (usize, usize) {
    let from = (start as usize).saturating_sub(j).min(keys);
    let to = (end as usize).saturating_sub(j).min(keys);
    (from, to.max(from))
}

#[inline(always)]
fn block_scores(
    scores: &mut [f32],
    call: &AttentionCall,
    [q, k, bias]: [&[f32]; 3],
    (i, queries): (usize, usize),
    (j, keys): (usize, usize),
) {
    let d = call.shape.head_dim;
    let (q, k) = (View::new(&q[i * d..], queries, d, d).rounded(call.in_bf16), View::new(&k[j * d..], keys, d, d));
    gemm_serial(scores, BLOCK, q, k.t(), Into { alpha: call.shape.scale, accumulate: false });
    if !bias.is_empty() {
        for (r, line) in scores.chunks_exact_mut(BLOCK).enumerate().take(queries) {
            let bias = &bias[call.first_distance(i + r) + j..][..keys];
            line[..keys].iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
    }
}

/// Turns scores into `exp(score - peak)`, zero where invisible; returns their sum.
#[inline(always)]
pub(super) fn to_weights(line: &mut [f32], from: usize, to: usize, peak: f32) -> f32 {
    line[..from].fill(0.0);
    line[to..].fill(0.0);
    let mut lanes = [0.0f32; 16];
    let visible = &mut line[from..to];
    let mut chunks = visible.chunks_exact_mut(16);
    for chunk in &mut chunks {
        for (x, lane) in chunk.iter_mut().zip(&mut lanes) {
            *x = exp(*x - peak);
            *lane += *x;
        }
    }
    let mut sum: f32 = lanes.iter().sum();
    for x in chunks.into_remainder() {
        *x = exp(*x - peak);
        sum += *x;
    }
    sum
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
    for_tasks(
        device,
        call,
        #[inline(always)]
        |row, kv| {
            let k = load(call, of_k, k, (row, kv));
            let v = load(call, of_v, v, (row, kv));
            let (mut dk, mut dv) = (vec![0.0; key_seq * d], vec![0.0; key_seq * value_dim]);
            for head in kv * call.group()..(kv + 1) * call.group() {
                let q = load(call, of_q, q, (row, head));
                let mut dq = vec![0.0; seq * d];
                let saved = SavedHead { out, lse, dout, row, head };
                let own = backward_head(call, &saved, [&q, &k, &v], [&mut dq, &mut dk, &mut dv]);
                own.store(call, (row, head), terms);
                store(call, of_q, to_q, (row, head), &dq);
            }
            store(call, of_k, to_k, (row, kv), &dk);
            store(call, of_v, to_v, (row, kv), &dv);
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
    [q, k, v]: [&[f32]; 3],
    [dq, dk, dv]: [&mut [f32]; 3],
) -> TermGradients {
    let AttentionSizes { head_dim: d, value_dim, seq, key_seq, heads, scale, .. } = call.shape;
    let (bias, sink, in_bf16) = (call.bias_of(saved.head), call.sinks.get(saved.head), call.in_bf16);
    let mut terms = TermGradients { bias: vec![0.0; bias.len()], sink: 0.0 };
    let seen = &call.keys[saved.row * seq..][..seq];
    let token = |t: usize| (saved.row * seq + t) * heads + saved.head;
    let (mut p, mut dp) = (vec![0.0; BLOCK * BLOCK], vec![0.0; BLOCK * BLOCK]);
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let mut inner = [0.0f32; BLOCK];
        for (r, x) in inner.iter_mut().enumerate().take(queries) {
            let at = token(i + r) * value_dim;
            *x = dot_stored(saved.out, at, &saved.dout[at..][..value_dim]);
            // A sink's weight takes from every value: its gradient is of a key whose value is zero.
            terms.sink -= sink.map_or(0.0, |sink| exp(sink - saved.lse[token(i + r)]) * *x);
        }
        let dout =
            View::new(&saved.dout[token(i) * value_dim..], queries, value_dim, heads * value_dim).rounded(in_bf16);
        for j in key_blocks(&seen[i..i + queries]) {
            let keys = BLOCK.min(key_seq - j);
            block_scores(&mut p, call, [q, k, &bias], (i, queries), (j, keys));
            gemm_serial(&mut dp, BLOCK, dout, View::new(&v[j * value_dim..], keys, value_dim, value_dim).t(), SET);
            for r in 0..queries {
                let (from, to) = visible(&seen[i + r], j, keys);
                let (p, dp) = (&mut p[r * BLOCK..][..keys], &mut dp[r * BLOCK..][..keys]);
                to_gradients(p, dp, (from, to), saved.lse[token(i + r)], inner[r], scale);
                if !bias.is_empty() {
                    let sums = &mut terms.bias[call.first_distance(i + r) + j..][..keys];
                    sums.iter_mut().zip(&*dp).for_each(|(sum, d)| *sum += d / scale);
                }
            }
            let p = View::new(&p, queries, keys, BLOCK);
            let ds = View::new(&dp, queries, keys, BLOCK).rounded(in_bf16);
            gemm_serial(&mut dv[j * value_dim..], value_dim, p.t(), dout, ADD);
            gemm_serial(&mut dq[i * d..], d, ds, View::new(&k[j * d..], keys, d, d), ADD);
            gemm_serial(&mut dk[j * d..], d, ds.t(), View::new(&q[i * d..], queries, d, d), ADD);
        }
    }
    terms
}

/// Scores become probabilities in place, their gradients become the scores' gradients.
#[inline(always)]
pub(super) fn to_gradients(
    p: &mut [f32],
    dp: &mut [f32],
    (from, to): (usize, usize),
    lse: f32,
    inner: f32,
    scale: f32,
) {
    for line in [&mut *p, &mut *dp] {
        line[..from].fill(0.0);
        line[to..].fill(0.0);
    }
    for (p, dp) in p[from..to].iter_mut().zip(&mut dp[from..to]) {
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

#[inline(always)]
fn dot<T: StoredNumber>(a: &[T], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x.wide() * y).sum()
}
