//! Causal attention with relative positions (Dai et al. 2019), block by block as in [`super::attention`]: the forward
//! keeps one log-sum-exp a query, the backward computes each block of probabilities again.
//!
//! The score of query i and key j is `((q_i + u) . k_j + (q_i + v) . r_{i-j}) / sqrt(head_dim)`. Along a diagonal of a
//! block the distance i - j is the same, so a block of n queries and m keys needs n + m - 1 vectors r. They lie in
//! order of falling distance: a row of the product with them, shifted by one a query, then runs along the keys.
//!
//! Keys before a query's own stretch are *remembered*: their gradient is kept apart. Work is split over (row of the
//! batch, head).

use super::attention::{dot_stored, to_gradients};
use super::attention_call::Shared;
use super::gemm::{ADD, InnerProducts, SET, View};
use super::math::exp;
use super::relative_attention_call::{
    BLOCK, HeadOperands, RelativeAttentionCall, RelativeAttentionSizes, TOO_FAR, lines,
};
use super::rows::{for_rows, largest, simd, sum};
use super::stored::StoredRef;
use crate::device::Device;

/// Calls `f` for every (batch row, head), spread over the device's threads.
fn for_tasks(device: &Device, call: &RelativeAttentionCall, f: impl Fn(&InnerProducts, usize, usize) + Sync) {
    let (rows, heads) = (call.first_key.len() / call.shape.seq, call.shape.heads);
    device.for_ranges(rows * heads, 1, |range| {
        let products = InnerProducts::new(device);
        for task in range {
            simd(
                #[inline(always)]
                || f(&products, task / heads, task % heads),
            );
        }
    });
}

/// `out [T, H d]` and `lse [T, H]`.
pub(crate) fn relative_attention(
    device: &Device,
    out: &mut [f32],
    lse: &mut [f32],
    queries: StoredRef,
    keys_values: StoredRef,
    distances: StoredRef,
    content_bias: &[f32],
    position_bias: &[f32],
    first_key: &[u32],
    own_key: &[u32],
    shape: RelativeAttentionSizes,
) {
    let call = &RelativeAttentionCall {
        shape,
        queries,
        keys_values,
        distances,
        content_bias,
        position_bias,
        first_key,
        own_key,
    };
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    for_tasks(
        device,
        call,
        #[inline(always)]
        |products, row, head| forward_head(&HeadOperands::load(call, products, row, head), out, lse),
    );
}

#[inline(always)]
fn forward_head(head: &HeadOperands, out: Shared, lse: Shared) {
    let (d, seq, heads) = (head.shape.head_dim, head.shape.seq, head.shape.heads);
    let (mut scores, mut diagonals) = (vec![0.0; BLOCK * BLOCK], vec![0.0; 2 * BLOCK * BLOCK]);
    let mut sums = vec![0.0; BLOCK * d];
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let mut top = [f32::NEG_INFINITY; BLOCK];
        let mut total = [0.0f32; BLOCK];
        sums.fill(0.0);
        for j in head.key_blocks(i, queries) {
            let keys = BLOCK.min(seq - j);
            head.scores(&mut scores, &mut diagonals, (i, queries), (j, keys));
            for r in 0..queries {
                let (from, _, to) = head.visible(i + r, j, keys);
                let line = &mut scores[r * BLOCK..][..keys];
                let peak = largest(&line[from..to], top[r]);
                let shrink = if top[r] == peak { 1.0 } else { exp(top[r] - peak) };
                total[r] = total[r] * shrink + to_weights(line, from, to, peak);
                top[r] = peak;
                if shrink != 1.0 {
                    sums[r * d..][..d].iter_mut().for_each(|x| *x *= shrink);
                }
            }
            let weights = View::new(&scores, queries, keys, BLOCK);
            head.products.multiply(&mut sums, d, weights, lines(&head.values, j, keys, d), ADD);
        }
        for r in 0..queries {
            let at = (head.row * seq + i + r) * heads + head.head;
            // SAFETY: this head's columns of this row belong to this task.
            let (to, lse) = unsafe { (out.slice(at * d, d), lse.slice(at, 1)) };
            to.iter_mut().zip(&sums[r * d..]).for_each(|(o, s)| *o = s / total[r]);
            lse[0] = top[r] + total[r].ln();
        }
    }
}

/// Turns scores into `exp(score - peak)`, zero where invisible; returns their sum.
#[inline(always)]
fn to_weights(line: &mut [f32], from: usize, to: usize, peak: f32) -> f32 {
    line[..from].fill(0.0);
    line[to..].fill(0.0);
    line[from..to].iter_mut().for_each(|x| *x = exp(*x - peak));
    sum(&line[from..to])
}

/// Gradients of one head of one batch row, laid out as in [`HeadOperands`].
struct HeadSlopes {
    content: Vec<f32>,
    position: Vec<f32>,
    /// Of the query's own stretch, and of what it remembers.
    keys: [Vec<f32>; 2],
    values: [Vec<f32>; 2],
    distances: Vec<f32>,
}

/// What rows share, distances and the two biases, each row of the batch has a copy of its own of, one after the other;
/// [`sum_copies`] adds them up.
pub(crate) fn relative_attention_back(
    device: &Device,
    dq: &mut [f32],
    dkv: &mut [f32],
    remembered: &mut [f32],
    ddistances: &mut [f32],
    du: &mut [f32],
    dv: &mut [f32],
    queries: StoredRef,
    keys_values: StoredRef,
    distances: StoredRef,
    content_bias: &[f32],
    position_bias: &[f32],
    first_key: &[u32],
    own_key: &[u32],
    out: StoredRef,
    lse: &[f32],
    dout: &[f32],
    shape: RelativeAttentionSizes,
) {
    let call = &RelativeAttentionCall {
        shape,
        queries,
        keys_values,
        distances,
        content_bias,
        position_bias,
        first_key,
        own_key,
    };
    let (d, seq, width) = (shape.head_dim, shape.seq, shape.width());
    let [queries, keys_values, remembered] = [dq, dkv, remembered].map(Shared::new);
    let [distances, content_bias, position_bias] = [ddistances, du, dv].map(Shared::new);
    for_tasks(
        device,
        call,
        #[inline(always)]
        |products, row, head| {
            let slopes = backward_head(&HeadOperands::load(call, products, row, head), out, lse, dout);
            let mut query = slopes.content.clone();
            query.iter_mut().zip(&slopes.position).for_each(|(q, p)| *q += p);
            let store = |to: Shared, (first, width): (usize, usize), column: usize, from: &[f32]| {
                for (t, from) in from.chunks_exact(d).enumerate() {
                    // SAFETY: this head's columns of this row belong to this task.
                    unsafe { to.slice((first + t) * width + column, d) }.copy_from_slice(from);
                }
            };
            store(queries, (row * seq, width), head * d, &query);
            for (part, to) in [keys_values, remembered].into_iter().enumerate() {
                store(to, (row * seq, 2 * width), head * d, &slopes.keys[part]);
                store(to, (row * seq, 2 * width), width + head * d, &slopes.values[part]);
            }
            let near_first: Vec<f32> =
                slopes.distances[TOO_FAR * d..][..shape.reach * d].chunks_exact(d).rev().flatten().copied().collect();
            store(distances, (row * shape.reach, width), head * d, &near_first);
            store(content_bias, (row, width), head * d, &column_sums(&slopes.content, d));
            store(position_bias, (row, width), head * d, &column_sums(&slopes.position, d));
        },
    );
}

#[inline(always)]
fn backward_head(head: &HeadOperands, out: StoredRef, lse: &[f32], dout: &[f32]) -> HeadSlopes {
    let (shape, d, seq, heads) = (head.shape, head.shape.head_dim, head.shape.seq, head.shape.heads);
    let zeros = || vec![0.0; seq * d];
    let mut slopes = HeadSlopes {
        content: zeros(),
        position: zeros(),
        keys: [zeros(), zeros()],
        values: [zeros(), zeros()],
        distances: vec![0.0; head.distances.len()],
    };
    let token = |t: usize| (head.row * seq + t) * heads + head.head;
    let (mut p, mut dp) = (vec![0.0; BLOCK * BLOCK], vec![0.0; BLOCK * BLOCK]);
    let mut diagonals = vec![0.0; 2 * BLOCK * BLOCK];
    for i in (0..seq).step_by(BLOCK) {
        let queries = BLOCK.min(seq - i);
        let upstream = View::new(&dout[token(i) * d..], queries, d, heads * d);
        for j in head.key_blocks(i, queries) {
            let keys = BLOCK.min(seq - j);
            head.scores(&mut p, &mut diagonals, (i, queries), (j, keys));
            head.products.multiply(&mut dp, BLOCK, upstream, lines(&head.values, j, keys, d).t(), SET);
            for r in 0..queries {
                let (from, _, to) = head.visible(i + r, j, keys);
                let (p, dp) = (&mut p[r * BLOCK..][..keys], &mut dp[r * BLOCK..][..keys]);
                let at = token(i + r);
                let inner = dot_stored(out, at * d, &dout[at * d..][..d]);
                to_gradients(p, dp, from..to, lse[at], inner, shape.scale());
            }
            content_slopes(head, &mut slopes, [&p, &dp], upstream, ((i, queries), (j, keys)));
            position_slopes(head, &mut slopes, &mut diagonals, &dp, ((i, queries), (j, keys)));
        }
    }
    slopes
}

type Blocks = ((usize, usize), (usize, usize));

/// What probabilities `p` and the scores' gradients `ds` of a block say of queries, keys and values.
#[inline(always)]
fn content_slopes(
    head: &HeadOperands,
    slopes: &mut HeadSlopes,
    [p, ds]: [&[f32]; 2],
    upstream: View,
    ((i, queries), (j, keys)): Blocks,
) {
    let d = head.shape.head_dim;
    head.products.multiply(
        &mut slopes.content[i * d..],
        d,
        View::new(ds, queries, keys, BLOCK),
        lines(&head.keys, j, keys, d),
        ADD,
    );
    let content = lines(&head.content, i, queries, d);
    for part in 0..2 {
        let range = |r: usize| {
            let (from, own, to) = head.visible(i + r, j, keys);
            [own..to, from..own][part].clone()
        };
        if (0..queries).all(|r| range(r).is_empty()) {
            continue;
        }
        let only = |x: &[f32]| {
            let mut kept = vec![0.0; BLOCK * BLOCK];
            for r in 0..queries {
                kept[r * BLOCK..][range(r)].copy_from_slice(&x[r * BLOCK..][range(r)]);
            }
            kept
        };
        let (p, ds) = (only(p), only(ds));
        head.products.multiply(
            &mut slopes.values[part][j * d..],
            d,
            View::new(&p, queries, keys, BLOCK).t(),
            upstream,
            ADD,
        );
        head.products.multiply(
            &mut slopes.keys[part][j * d..],
            d,
            View::new(&ds, queries, keys, BLOCK).t(),
            content,
            ADD,
        );
    }
}

/// The same of queries and distances, by the diagonals.
#[inline(always)]
fn position_slopes(
    head: &HeadOperands,
    slopes: &mut HeadSlopes,
    diagonals: &mut [f32],
    ds: &[f32],
    ((i, queries), (j, keys)): Blocks,
) {
    let (d, count) = (head.shape.head_dim, queries + keys - 1);
    diagonals.fill(0.0);
    for r in 0..queries {
        diagonals[r * 2 * BLOCK + queries - 1 - r..][..keys].copy_from_slice(&ds[r * BLOCK..][..keys]);
    }
    let (diagonals, far) = (View::new(diagonals, queries, count, 2 * BLOCK), head.shape.farthest((i, queries), j) * d);
    head.products.multiply(
        &mut slopes.position[i * d..],
        d,
        diagonals,
        View::new(&head.distances[far..], count, d, d),
        ADD,
    );
    let position = lines(&head.position, i, queries, d);
    head.products.multiply(&mut slopes.distances[far..], d, diagonals.t(), position, ADD);
}

#[inline(always)]
fn column_sums(x: &[f32], d: usize) -> Vec<f32> {
    let mut sums = vec![0.0; d];
    x.chunks_exact(d).for_each(|row| sums.iter_mut().zip(row).for_each(|(s, x)| *s += x));
    sums
}

/// `to` (plus what it has, if `accumulate`) becomes the sum of the copies in `parts`, in their order.
pub(crate) fn sum_copies(device: &Device, to: &mut [f32], parts: &[f32], accumulate: bool) {
    let len = to.len();
    for_rows(
        device,
        to,
        1,
        1 << 12,
        #[inline(always)]
        |first, to| {
            if !accumulate {
                to.fill(0.0);
            }
            for part in parts.chunks_exact(len) {
                to.iter_mut().zip(&part[first..]).for_each(|(to, x)| *to += x);
            }
        },
    );
}
