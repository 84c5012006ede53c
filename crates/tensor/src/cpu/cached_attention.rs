//! Attention of new tokens to a cache and to themselves, one query after the other: for generation, without gradients.

use super::attention::{AttentionSizes, rotate};
use super::relative_attention::RelativeAttentionSizes;
use super::rows::dot;
use crate::device::Device;

pub(crate) fn attend_cached(
    _: &Device,
    out: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
    qkv: &[f32],
    cos: &[f32],
    sin: &[f32],
    shape: AttentionSizes,
    cached: usize,
) {
    let AttentionSizes { heads, kv_heads, head_dim: d, .. } = shape;
    let stride = kv_heads * d;
    for (t, (line, out)) in qkv.chunks_exact(shape.width()).zip(out.chunks_exact_mut(heads * d)).enumerate() {
        let turned = |from: &[f32], to: &mut [f32]| match cos.is_empty() {
            true => to.copy_from_slice(from),
            false => rotate(to, from, &cos[t * d / 2..], &sin[t * d / 2..], 1.0),
        };
        let seen = cached + t + 1;
        let new = (seen - 1) * stride..seen * stride;
        for kv in 0..kv_heads {
            turned(&line[(heads + kv) * d..][..d], &mut keys[new.start + kv * d..][..d]);
        }
        values[new].copy_from_slice(&line[(heads + kv_heads) * d..]);
        for head in 0..heads {
            let mut query = vec![0.0; d];
            turned(&line[head * d..][..d], &mut query);
            let column = head * kv_heads / heads * d;
            let scale = 1.0 / (d as f32).sqrt();
            let keys = keys[..seen * stride].chunks_exact(stride);
            let scores: Vec<f32> = keys.map(|k| dot(&query, &k[column..][..d]) * scale).collect();
            let rows = values[..seen * stride].chunks_exact(stride).map(|v| &v[column..]);
            weigh(&scores, rows, &mut out[head * d..][..d]);
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
    let top = scores.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f32 = weights.iter().sum();
    out.fill(0.0);
    for (weight, row) in weights.iter().zip(rows) {
        out.iter_mut().zip(row).for_each(|(o, x)| *o += weight / total * x);
    }
}
