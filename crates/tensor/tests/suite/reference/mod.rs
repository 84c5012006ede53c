//! The ops as plain loops in f64, written from their definitions. Matrices are flat and row-major.

use std::ops::Range;

/// Sum over the middle index: `c[i, j] = sum_p a(i, p) b(p, j)`.
fn product(m: usize, n: usize, k: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let dot = |i: usize, j: usize| (0..k).map(|p| a(i, p) * b(p, j)).sum();
    (0..m * n).map(|at| dot(at / n, at % n)).collect()
}

/// `A B`, A `[m, k]`, B `[k, n]`.
pub(crate) fn matmul(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let n = b.len() / k;
    product(a.len() / k, n, k, |i, p| a[i * k + p], |p, j| b[p * n + j])
}

/// The transpose of `[rows, cols]`.
pub(crate) fn transpose(x: &[f64], cols: usize) -> Vec<f64> {
    let rows = x.len() / cols;
    (0..x.len()).map(|at| x[at % rows * cols + at / rows]).collect()
}

/// `x W^T + b`, W `[out, in]`.
pub(crate) fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, inner: usize) -> Vec<f64> {
    let outer = w.len() / inner;
    let mut y = product(x.len() / inner, outer, inner, |i, p| x[i * inner + p], |p, j| w[j * inner + p]);
    y.iter_mut().enumerate().for_each(|(at, y)| *y += bias.map_or(0.0, |b| b[at % outer]));
    y
}

/// Each run of rows through its own expert's weights, `w [E, out, in]`.
pub(crate) fn grouped_linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, inner: usize, counts: &[usize]) -> Vec<f64> {
    let (size, mut first) = (w.len() / counts.len(), 0);
    let mut y = Vec::new();
    for (e, count) in counts.iter().enumerate() {
        let bias = bias.map(|b| &b[e * size / inner..][..size / inner]);
        y.extend(linear(&x[first * inner..][..count * inner], &w[e * size..][..size], bias, inner));
        first += count;
    }
    y
}

/// Row i is row `index[i]` of x.
pub(crate) fn gather_rows(x: &[f64], index: &[u32], width: usize) -> Vec<f64> {
    index.iter().flat_map(|&i| x[i as usize * width..][..width].to_vec()).collect()
}

/// Row i of x is added to row `index[i]` of zeros.
pub(crate) fn scatter_add_rows(x: &[f64], index: &[u32], rows: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows * width];
    for (at, x) in x.iter().enumerate() {
        out[index[at / width] as usize * width + at % width] += x;
    }
    out
}

/// Row t is the sum over j of `weights[t, j]` times row `places[t, j]`; `u32::MAX` is no row.
pub(crate) fn weighted_sum_rows(x: &[f64], weights: &[f64], places: &[u32], k: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; weights.len() / k * width];
    for (route, &place) in places.iter().enumerate().filter(|(_, place)| **place != u32::MAX) {
        for c in 0..width {
            out[route / k * width + c] += weights[route] * x[place as usize * width + c];
        }
    }
    out
}

/// Row i is row `order[i]` of x; where that is `at[c]`, times `weights[c]` and with row c of `carried`.
pub(crate) fn carry_rows(x: &[f64], weights: &[f64], carried: &[f64], [order, at]: [&[u32]; 2]) -> Vec<f64> {
    let width = x.len().checked_div(order.len()).unwrap_or(0);
    let row = |&row: &u32| {
        let x = &x[row as usize * width..][..width];
        match at.iter().position(|&other| other == row) {
            None => x.to_vec(),
            Some(c) => (0..width).map(|i| weights[c] * x[i] + carried[c * width + i]).collect(),
        }
    };
    order.iter().flat_map(row).collect()
}

/// Applies `f` to every row of `width` elements.
pub(crate) fn by_row(x: &[f64], width: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    x.chunks_exact(width).flat_map(f).collect()
}

pub(crate) fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    by_row(x, w.len(), |row| {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(w).map(|(x, w)| x / (mean_square + eps).sqrt() * w).collect()
    })
}

pub(crate) fn layer_norm(x: &[f64], w: &[f64], b: &[f64], eps: f64) -> Vec<f64> {
    by_row(x, w.len(), |row| {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
        row.iter().zip(w).zip(b).map(|((x, w), b)| (x - mean) / (variance + eps).sqrt() * w + b).collect()
    })
}

/// The tanh form.
pub(crate) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// `silu(gate) * up` of rows `[gate | up]`.
pub(crate) fn swiglu(x: &[f64], width: usize) -> Vec<f64> {
    by_row(x, 2 * width, |row| (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i]).collect())
}

pub(crate) fn log_sum_exp(row: &[f64]) -> f64 {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln()
}

pub(crate) fn softmax(x: &[f64], width: usize) -> Vec<f64> {
    by_row(x, width, softmax_of)
}

/// `sum_r weights[r] logsumexp(x[r])^2`.
pub(crate) fn weighted_square_log_sum_exp(x: &[f64], weights: &[f32], width: usize) -> f64 {
    let rows = x.chunks_exact(width);
    rows.zip(weights).map(|(row, w)| f64::from(*w) * log_sum_exp(row).powi(2)).sum()
}

/// The chosen columns of each row (`u32::MAX`: none) after `f` of those there are; 0 where there is none.
pub(crate) fn select(x: &[f64], index: &[u32], k: usize, width: usize, f: fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let rows = x.chunks_exact(width).zip(index.chunks_exact(k));
    rows.flat_map(|(row, chosen)| {
        let there: Vec<f64> = chosen.iter().filter(|&&c| c != u32::MAX).map(|&c| row[c as usize]).collect();
        let mut results = f(&there).into_iter();
        let result = |&c: &u32| if c == u32::MAX { 0.0 } else { results.next().expect("one a choice") };
        chosen.iter().map(result).collect::<Vec<f64>>()
    })
    .collect()
}

pub(crate) fn over_their_sum(x: &[f64]) -> Vec<f64> {
    x.iter().map(|v| v / x.iter().sum::<f64>()).collect()
}

/// `scale` times the sum of -ln of the softmax at the targets that are not `u32::MAX`; the head is `(w, b)`.
pub(crate) fn linear_cross_entropy(
    x: &[f64],
    (w, b): (&[f64], Option<&[f64]>),
    targets: &[u32],
    inner: usize,
    scale: f32,
) -> f64 {
    let logits = linear(x, w, b, inner);
    let rows = logits.chunks_exact(w.len() / inner).zip(targets).filter(|(_, target)| **target != u32::MAX);
    f64::from(scale) * rows.map(|(row, &target)| log_sum_exp(row) - row[target as usize]).sum::<f64>()
}

/// A head's columns turned by its position: pair (i, i + d/2) by `position * theta^(-2 i / d)`.
pub(crate) fn rotary(x: &[f64], position: u32, theta: f64) -> Vec<f64> {
    let half = x.len() / 2;
    let angle = |i: usize| f64::from(position) * theta.powf(-((2 * i) as f64) / x.len() as f64);
    let low = (0..half).map(|i| x[i] * angle(i).cos() - x[half + i] * angle(i).sin());
    let high = (0..half).map(|i| x[half + i] * angle(i).cos() + x[i] * angle(i).sin());
    low.chain(high).collect()
}

/// What tells one attention call from another.
#[derive(Clone)]
pub(crate) struct Attention {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) seq: usize,
    /// The segment of every token; tokens see their own segment only.
    pub(crate) segments: Vec<u32>,
    /// Whether tokens see no later ones.
    pub(crate) causal: bool,
    /// Positions and theta of rotary embeddings.
    pub(crate) rotary: Option<(Vec<u32>, f64)>,
}

impl Attention {
    pub(crate) fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn part(&self, qkv: &[f64], token: usize, column: Range<usize>, rotates: bool) -> Vec<f64> {
        let part = qkv[token * self.width()..][column].to_vec();
        let Some((positions, theta)) = self.rotary.as_ref().filter(|_| rotates) else { return part };
        rotary(&part, positions[token], *theta)
    }

    /// The whole score matrix of every head, its softmax, and its product with the values.
    pub(crate) fn forward(&self, qkv: &[f64]) -> Vec<f64> {
        let (d, tokens) = (self.head_dim, self.segments.len());
        let heads = |first: usize, count: usize, rotates: bool| -> Vec<Vec<Vec<f64>>> {
            let one = |h: usize, t: usize| self.part(qkv, t, (first + h) * d..(first + h + 1) * d, rotates);
            (0..count).map(|h| (0..tokens).map(|t| one(h, t)).collect()).collect()
        };
        let q = heads(0, self.heads, true);
        let k = heads(self.heads, self.kv_heads, true);
        let v = heads(self.heads + self.kv_heads, self.kv_heads, false);
        let mut out = Vec::with_capacity(tokens * self.heads * d);
        for t in 0..tokens {
            for (h, q) in q.iter().enumerate() {
                let kv = h / (self.heads / self.kv_heads);
                let row = t / self.seq * self.seq..(t / self.seq + 1) * self.seq;
                let sees = |s: &usize| self.segments[*s] == self.segments[t] && !(self.causal && *s > t);
                let seen: Vec<usize> = row.filter(sees).collect();
                let score = |s: usize| q[t].iter().zip(&k[kv][s]).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                let weights = softmax_of(&seen.iter().map(|&s| score(s)).collect::<Vec<f64>>());
                out.extend((0..d).map(|c| weights.iter().zip(&seen).map(|(w, &s)| w * v[kv][s][c]).sum::<f64>()));
            }
        }
        out
    }
}

pub(crate) fn softmax_of(scores: &[f64]) -> Vec<f64> {
    let lse = log_sum_exp(scores);
    scores.iter().map(|s| (s - lse).exp()).collect()
}

/// What tells one call of attention over stretches from another.
#[derive(Clone)]
pub(crate) struct StretchedAttention {
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) seq: usize,
    /// Lengths of each row's documents.
    pub(crate) documents: Vec<Vec<usize>>,
    pub(crate) stretch: usize,
    pub(crate) memory: usize,
}

impl StretchedAttention {
    /// A number for every token that tells the documents of its row apart.
    pub(crate) fn segments(&self) -> Vec<u32> {
        let row = |lengths: &Vec<usize>| {
            let each = |(document, &length): (usize, &usize)| vec![document as u32; length];
            lengths.iter().enumerate().flat_map(each).collect::<Vec<u32>>()
        };
        self.documents.iter().flat_map(row).collect()
    }

    /// From queries `[T, H d]`, keys and values `[T, 2 H d]` as pairs of one stretch see them and as they are
    /// remembered, distances `[reach, H d]`, u and v `[H, d]`: document by document, stretch by stretch.
    pub(crate) fn forward(&self, inputs: &[Vec<f64>]) -> Vec<f64> {
        let width = self.heads * self.head_dim;
        let mut out = vec![0.0; inputs[0].len()];
        let mut begin = 0;
        for length in self.documents.iter().flatten() {
            for i in 0..*length {
                let own = i / self.stretch * self.stretch;
                let seen: Vec<(usize, usize)> =
                    (own.saturating_sub(self.memory)..=i).map(|j| (j, if j < own { 2 } else { 1 })).collect();
                for head in 0..self.heads {
                    let at = |input: usize, row: usize, width: usize, first: usize, c: usize| {
                        inputs[input][row * width + first + head * self.head_dim + c]
                    };
                    let score = |&(j, keys): &(usize, usize)| {
                        let term = |c: usize| {
                            let q = at(0, begin + i, width, 0, c);
                            (q + at(4, 0, 0, 0, c)) * at(keys, begin + j, 2 * width, 0, c)
                                + (q + at(5, 0, 0, 0, c)) * at(3, i - j, width, 0, c)
                        };
                        (0..self.head_dim).map(term).sum::<f64>() / (self.head_dim as f64).sqrt()
                    };
                    let weights = softmax_of(&seen.iter().map(score).collect::<Vec<f64>>());
                    for c in 0..self.head_dim {
                        let value = |&(j, keys): &(usize, usize)| at(keys, begin + j, 2 * width, width, c);
                        let sum = seen.iter().zip(&weights).map(|(pair, w)| w * value(pair)).sum();
                        out[(begin + i) * width + head * self.head_dim + c] = sum;
                    }
                }
            }
            begin += length;
        }
        out
    }
}
