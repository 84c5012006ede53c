//! Attention of new tokens to a cache and to themselves, one query after the other: for generation, without gradients.

use super::attention_call::{AttentionSizes, turn};
use super::relative_attention_call::RelativeAttentionSizes;
use super::rows::{dot, largest};
use crate::device::Device;

pub(crate) fn attend_cached(
    _: &Device,
    out: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
    qkv: &[f32],
    cos: &[f32],
    sin: &[f32],
    bias: &[f32],
    sinks: &[f32],
    shape: AttentionSizes,
    cached: usize,
    window: usize,
) {
    let AttentionSizes { heads, kv_heads, head_dim: d, value_dim, scale, .. } = shape;
    let (stride, value_stride, width) = (kv_heads * d, kv_heads * value_dim, shape.width());
    for (t, (line, out)) in qkv.chunks_exact(width).zip(out.chunks_exact_mut(heads * value_dim)).enumerate() {
        let turned = |from: &[f32], to: &mut [f32]| turn(to, from, [cos, sin], t, &shape, 1.0);
        let own = cached + t;
        let seen = (own + 1).saturating_sub(window)..own + 1;
        for kv in 0..kv_heads {
            turned(&line[(heads + kv) * d..][..d], &mut keys[own * stride + kv * d..][..d]);
        }
        values[own * value_stride..][..value_stride].copy_from_slice(&line[(heads + kv_heads) * d..]);
        for head in 0..heads {
            let mut query = vec![0.0; d];
            turned(&line[head * d..][..d], &mut query);
            let kv = head * kv_heads / heads;
            // The last distance is 0.
            let bias = |j: usize| match bias.len() / heads {
                0 => 0.0,
                distances => bias[(distances - 1 + j - own) * heads + head],
            };
            let score = |j: usize| dot(&query, &keys[j * stride + kv * d..][..d]) * scale + bias(j);
            let mut scores: Vec<f32> = seen.clone().map(score).collect();
            // A sink is scored like a key and has no value.
            scores.extend(sinks.get(head));
            let rows = seen.clone().map(|j| &values[j * value_stride + kv * value_dim..][..value_dim]);
            weigh(&scores, rows, &mut out[head * value_dim..][..value_dim]);
        }
    }
}

pub(crate) fn relative_attend_cached(
    _: &Device,
    out: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
    q: &[f32],
    kv: &[f32],
    distances: &[f32],
    u: &[f32],
    v: &[f32],
    first_key: &[u32],
    shape: RelativeAttentionSizes,
    cached: usize,
) {
    let (d, width) = (shape.head_dim, shape.width());
    for (line, i) in kv.chunks_exact(2 * width).zip(cached..) {
        let (key, value) = line.split_at(width);
        keys[i * width..][..width].copy_from_slice(key);
        values[i * width..][..width].copy_from_slice(value);
    }
    for (i, (query, out)) in (cached..).zip(q.chunks_exact(width).zip(out.chunks_exact_mut(width))) {
        let seen = first_key[i] as usize..i + 1;
        for head in (0..width).step_by(d) {
            let biased = |bias: &[f32]| -> Vec<f32> {
                query[head..head + d].iter().zip(&bias[head..]).map(|(q, b)| q + b).collect()
            };
            let (content, position) = (biased(u), biased(v));
            let score = |j: usize| {
                let (key, distance) = (&keys[j * width + head..][..d], &distances[(i - j) * width + head..][..d]);
                (dot(&content, key) + dot(&position, distance)) / (d as f32).sqrt()
            };
            let scores: Vec<f32> = seen.clone().map(score).collect();
            weigh(&scores, values[seen.start * width + head..].chunks(width), &mut out[head..head + d]);
        }
    }
}

/// The mean of rows, each weighted by its softmaxed score.
fn weigh<'a>(scores: &[f32], rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32]) {
    let top = largest(scores, f32::NEG_INFINITY);
    let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f32 = weights.iter().sum();
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(rows) {
        out.iter_mut().zip(row).for_each(|(o, x)| *o += weight / total * x);
    }
}
