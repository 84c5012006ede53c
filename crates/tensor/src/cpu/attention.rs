//! Attention block by block (Dao et al. 2022): the forward keeps one number per query, the log-sum-exp of its
//! scores; the backward computes each block of probabilities again from it. No S x S matrix is ever in memory.
//!
//! Queries, keys and values lie side by side in one matrix, `[T, (heads + 2 * kv_heads) * head_dim]`, as the fused
//! projection writes them. Work is split over (row of the batch, kv head): the query heads that share a key head
//! stay together, so nobody else adds to its gradient.

use crate::cpu::gemm::{ADD, Into, SET, View, gemm_serial};
use crate::cpu::math::exp;
use crate::cpu::rows::{prefetch_run, simd};
use crate::device::Device;

/// Queries and keys per block.
pub(super) const BLOCK: usize = 64;

/// Sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) seq: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Shape {
    /// Columns of the fused projection.
    pub(crate) fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Sizes, masks and positions.
struct Call<'a> {
    shape: Shape,
    /// For every token, the first position of its row that it attends to and the one after the last; neither ever
    /// falls within a row.
    keys: &'a [[u32; 2]],
    /// Cosines and sines `[T, head_dim / 2]` of rotary positions, if any.
    rotary: Option<[&'a [f32]; 2]>,
}

impl<'a> Call<'a> {
    fn new(shape: Shape, keys: &'a [u32], cos: &'a [f32], sin: &'a [f32]) -> Call<'a> {
        Call { shape, keys: keys.as_chunks().0, rotary: (!cos.is_empty()).then_some([cos, sin]) }
    }

    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    fn key_column(&self, kv: usize) -> usize {
        (self.shape.heads + kv) * self.shape.head_dim
    }

    fn value_column(&self, kv: usize) -> usize {
        (self.shape.heads + self.shape.kv_heads + kv) * self.shape.head_dim
    }
}

/// A pointer that tasks writing disjoint elements may share.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32, usize);

// SAFETY: every task writes only the columns of its own heads in its own rows.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(data: &mut [f32]) -> Shared {
        Shared(data.as_mut_ptr(), data.len())
    }

    /// # Safety
    /// No other task touches these elements.
    #[expect(clippy::mut_from_ref, reason = "the point of the type; disjointness is the caller's promise")]
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [f32] {
        assert!(start + len <= self.1);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// One (batch row, kv head) after the other, spread over the device's threads.
fn for_tasks(device: &Device, call: &Call, f: impl Fn(usize, usize) + Sync) {
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
    qkv: &[f32],
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    shape: Shape,
) {
    let call = &Call::new(shape, keys, cos, sin);
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    for_tasks(
        device,
        call,
        #[inline(always)]
        |row, kv| {
            let k = load(call, qkv, row, call.key_column(kv), true);
            let v = load(call, qkv, row, call.value_column(kv), false);
            for head in kv * call.group()..(kv + 1) * call.group() {
                let q = load(call, qkv, row, head * call.shape.head_dim, true);
                forward_head(call, row, head, [&q, &k, &v], (out, lse));
            }
        },
    );
}

#[inline(always)]
fn forward_head(call: &Call, row: usize, head: usize, [q, k, v]: [&[f32]; 3], (out, lse): (Shared, Shared)) {
    let (d, seq) = (call.shape.head_dim, call.shape.seq);
    let seen = &call.keys[row * seq..][..seq];
    let mut scores = vec![0.0; BLOCK * BLOCK];
    let mut sums = vec![0.0; BLOCK * d];
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let mut top = [f32::NEG_INFINITY; BLOCK];
        let mut total = [0.0f32; BLOCK];
        sums.fill(0.0);
        for j in key_blocks(&seen[i..i + queries]) {
            let keys = BLOCK.min(seq - j);
            block_scores(&mut scores, call, q, k, (i, queries), (j, keys));
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
            let weights = View::new(&scores, queries, keys, BLOCK);
            gemm_serial(&mut sums, d, weights, View::new(&v[j * d..], keys, d, d), ADD);
        }
        for r in 0..queries {
            let token = row * seq + i + r;
            // SAFETY: this head's columns of this row belong to this task.
            let (to, lse) = unsafe {
                (out.slice((token * call.shape.heads + head) * d, d), lse.slice(token * call.shape.heads + head, 1))
            };
            let inverse = 1.0 / total[r];
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
    call: &Call,
    q: &[f32],
    k: &[f32],
    (i, queries): (usize, usize),
    (j, keys): (usize, usize),
) {
    let d = call.shape.head_dim;
    let (q, k) = (View::new(&q[i * d..], queries, d, d), View::new(&k[j * d..], keys, d, d));
    gemm_serial(scores, BLOCK, q, k.t(), Into { alpha: call.scale(), accumulate: false });
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
    qkv: &[f32],
    out: &[f32],
    lse: &[f32],
    dout: &[f32],
    keys: &[u32],
    cos: &[f32],
    sin: &[f32],
    shape: Shape,
) {
    let (call, dqkv) = (&Call::new(shape, keys, cos, sin), Shared::new(dqkv));
    let (d, seq) = (call.shape.head_dim, call.shape.seq);
    for_tasks(
        device,
        call,
        #[inline(always)]
        |row, kv| {
            let k = load(call, qkv, row, call.key_column(kv), true);
            let v = load(call, qkv, row, call.value_column(kv), false);
            let (mut dk, mut dv) = (vec![0.0; seq * d], vec![0.0; seq * d]);
            for head in kv * call.group()..(kv + 1) * call.group() {
                let q = load(call, qkv, row, head * d, true);
                let mut dq = vec![0.0; seq * d];
                let saved = Saved { out, lse, dout, row, head };
                backward_head(call, &saved, [&q, &k, &v], [&mut dq, &mut dk, &mut dv]);
                store(call, dqkv, row, head * d, &dq, true);
            }
            store(call, dqkv, row, call.key_column(kv), &dk, true);
            store(call, dqkv, row, call.value_column(kv), &dv, false);
        },
    );
}

struct Saved<'a> {
    out: &'a [f32],
    lse: &'a [f32],
    dout: &'a [f32],
    row: usize,
    head: usize,
}

#[inline(always)]
fn backward_head(call: &Call, saved: &Saved, [q, k, v]: [&[f32]; 3], [dq, dk, dv]: [&mut [f32]; 3]) {
    let (d, seq, heads) = (call.shape.head_dim, call.shape.seq, call.shape.heads);
    let seen = &call.keys[saved.row * seq..][..seq];
    let token = |t: usize| (saved.row * seq + t) * heads + saved.head;
    let (mut p, mut dp) = (vec![0.0; BLOCK * BLOCK], vec![0.0; BLOCK * BLOCK]);
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let mut inner = [0.0f32; BLOCK];
        for (r, x) in inner.iter_mut().enumerate().take(queries) {
            *x = dot(&saved.out[token(i + r) * d..][..d], &saved.dout[token(i + r) * d..][..d]);
        }
        let dout = View::new(&saved.dout[token(i) * d..], queries, d, heads * d);
        for j in key_blocks(&seen[i..i + queries]) {
            let keys = BLOCK.min(seq - j);
            block_scores(&mut p, call, q, k, (i, queries), (j, keys));
            gemm_serial(&mut dp, BLOCK, dout, View::new(&v[j * d..], keys, d, d).t(), SET);
            for r in 0..queries {
                let (from, to) = visible(&seen[i + r], j, keys);
                let (p, dp) = (&mut p[r * BLOCK..][..keys], &mut dp[r * BLOCK..][..keys]);
                to_gradients(p, dp, (from, to), saved.lse[token(i + r)], inner[r], call.scale());
            }
            let p = View::new(&p, queries, keys, BLOCK);
            let ds = View::new(&dp, queries, keys, BLOCK);
            gemm_serial(&mut dv[j * d..], d, p.t(), dout, ADD);
            gemm_serial(&mut dq[i * d..], d, ds, View::new(&k[j * d..], keys, d, d), ADD);
            gemm_serial(&mut dk[j * d..], d, ds.t(), View::new(&q[i * d..], queries, d, d), ADD);
        }
    }
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

#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Tokens to look ahead: one head's columns of the next token lie in another page.
const AHEAD: usize = 4;

/// One head's columns of one batch row as `[seq, head_dim]`, rotated by position if they are queries or keys.
#[inline(always)]
fn load(call: &Call, qkv: &[f32], row: usize, column: usize, rotates: bool) -> Vec<f32> {
    let d = call.shape.head_dim;
    let mut to = vec![0.0; call.shape.seq * d];
    for (t, line) in to.chunks_exact_mut(d).enumerate() {
        let token = row * call.shape.seq + t;
        let from = &qkv[token * call.shape.width() + column..][..d];
        prefetch_run(from.as_ptr().wrapping_add(AHEAD * call.shape.width()), d);
        match &call.rotary {
            Some([cos, sin]) if rotates => rotate(line, from, &cos[token * d / 2..], &sin[token * d / 2..], 1.0),
            _ => line.copy_from_slice(from),
        }
    }
    to
}

/// The adjoint of [`load`].
#[inline(always)]
fn store(call: &Call, to: Shared, row: usize, column: usize, from: &[f32], rotates: bool) {
    let d = call.shape.head_dim;
    for (t, from) in from.chunks_exact(d).enumerate() {
        let token = row * call.shape.seq + t;
        // SAFETY: this head's columns of this row belong to this task.
        let line = unsafe { to.slice(token * call.shape.width() + column, d) };
        prefetch_run(line.as_ptr().wrapping_add(AHEAD * call.shape.width()), d);
        match &call.rotary {
            Some([cos, sin]) if rotates => rotate(line, from, &cos[token * d / 2..], &sin[token * d / 2..], -1.0),
            _ => line.copy_from_slice(from),
        }
    }
}

/// Rotates the pairs (x[i], x[i + d/2]) by their angles, or back with `sign` -1.
#[inline(always)]
pub(crate) fn rotate(to: &mut [f32], from: &[f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = from.len() / 2;
    let ((low, high), (x, y)) = (to.split_at_mut(half), from.split_at(half));
    // Slices of one length: the loop then needs no checks and becomes vector code.
    let (high, y, cos, sin) = (&mut high[..half], &y[..half], &cos[..half], &sin[..half]);
    for i in 0..half {
        let s = sin[i] * sign;
        low[i] = x[i] * cos[i] - y[i] * s;
        high[i] = y[i] * cos[i] + x[i] * s;
    }
}
