//! Attention with queries, keys and values of their own, also of another text, against loops in f64.

use std::sync::Arc;

use guildhall_tensor::gradcheck::Operand;
use guildhall_tensor::ops::{
    AttentionShape, AttentionSpans, CachedTerms, KvCache, ScoreTerms, TurningPairs, attend_cached, causal_keys,
    cross_keys, rotary_tables, within_window,
};
use guildhall_tensor::{Device, Dtype, Tape, Tensor, Var};

use super::harness::{check, check_bf16_chain, gradient_of, near, on_devices, random, rounding};
use super::reference::softmax_of;

/// Two texts in rows; a token of the first reads the tokens of the second that have its segment.
#[derive(Clone)]
struct Texts {
    shape: AttentionShape,
    seq: usize,
    key_seq: usize,
    segments: Vec<u32>,
    key_segments: Vec<u32>,
}

/// Lengths of the segments of each row, in both texts; a length may be 0.
fn texts(heads: usize, kv_heads: usize, head_dim: usize, rows: &[(&[usize], &[usize])]) -> Texts {
    let segments = |lengths: &[usize]| -> Vec<u32> {
        lengths.iter().enumerate().flat_map(|(segment, &length)| vec![segment as u32; length]).collect()
    };
    Texts {
        shape: AttentionShape { heads, kv_heads, head_dim },
        seq: rows[0].0.iter().sum(),
        key_seq: rows[0].1.iter().sum(),
        segments: rows.iter().flat_map(|row| segments(row.0)).collect(),
        key_segments: rows.iter().flat_map(|row| segments(row.1)).collect(),
    }
}

impl Texts {
    fn inputs(&self) -> [Operand; 3] {
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        let keys = |stream| random(&[self.key_segments.len(), kv_heads * head_dim], stream);
        [random(&[self.segments.len(), heads * head_dim], 1), keys(2), keys(3)]
    }

    fn spans(&self, device: &Arc<Device>) -> AttentionSpans {
        let keys = cross_keys((&self.segments, self.seq), (&self.key_segments, self.key_seq));
        AttentionSpans::new(device, self.seq, &keys, None).across(self.key_seq)
    }

    fn attend(&self, v: &[Var]) -> Var {
        v[0].attention_to([&v[1], &v[2]], self.shape, &self.spans(v[0].device()))
    }

    /// Every pair of a query and a key of its row, head by head.
    fn forward(&self, v: &[Vec<f64>]) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, head_dim: d } = self.shape;
        let mut out = Vec::new();
        for t in 0..self.segments.len() {
            let row = t / self.seq * self.key_seq..(t / self.seq + 1) * self.key_seq;
            let seen: Vec<usize> = row.filter(|&s| self.key_segments[s] == self.segments[t]).collect();
            for head in 0..heads {
                let q = &v[0][(t * heads + head) * d..][..d];
                let of = |x: &[f64], s: usize| x[(s * kv_heads + head * kv_heads / heads) * d..][..d].to_vec();
                let score =
                    |&s: &usize| q.iter().zip(of(&v[1], s)).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                let weights = softmax_of(&seen.iter().map(score).collect::<Vec<f64>>());
                let value = |c: usize| seen.iter().zip(&weights).map(|(&s, w)| w * of(&v[2], s)[c]).sum::<f64>();
                out.extend((0..d).map(value));
            }
        }
        out
    }
}

#[test]
fn attention_to_another_text() {
    let cases = [
        texts(1, 1, 4, &[(&[5], &[3])]),
        texts(2, 1, 8, &[(&[4, 3], &[2, 7]), (&[6, 1], &[8, 1])]),
        // Tokens whose segment the other text has not, in the middle and at the end: they read nothing.
        texts(3, 3, 6, &[(&[2, 2, 3], &[4, 0, 1]), (&[3, 4, 0], &[5, 0, 0])]),
        // Several blocks of 64, more keys than queries and fewer; segments that begin in later blocks.
        texts(4, 2, 8, &[(&[70, 10], &[130, 90]), (&[1, 79], &[10, 210])]),
        texts(2, 2, 16, &[(&[100, 100], &[63, 2])]),
        texts(1, 1, 4, &[(&[3, 270, 20], &[0, 90, 200])]),
        texts(2, 1, 67, &[(&[40, 5], &[70, 3])]),
    ];
    for case in cases {
        // Sums over the head's columns, over the keys, and in the gradient of a key over the queries of its group.
        let AttentionShape { heads, kv_heads, head_dim } = case.shape;
        let tolerance = rounding(head_dim + case.key_seq + case.seq * heads / kv_heads);
        check(&case.inputs(), tolerance, |v| case.attend(v), |v| case.forward(v));
        check_bf16_chain(3, &case.inputs(), |v| case.attend(v), |v| case.forward(v));
    }
}

#[test]
fn attention_to_another_text_without_rows() {
    let case = Texts { segments: vec![], key_segments: vec![], ..texts(2, 2, 4, &[(&[5], &[3])]) };
    check(&case.inputs(), 0.0, |v| case.attend(v), |v| case.forward(v));
}

/// Tokens that see nothing read zeros, also where there is nothing to see.
#[test]
fn attention_to_no_text() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 4 };
    let device = Device::new(2);
    let tape = Tape::new(&device);
    let spans = AttentionSpans::new(&device, 3, &[0..0, 0..0, 0..0], None).across(0);
    let [q, k, v] = [[3, 8], [0, 4], [0, 4]].map(|dims| tape.leaf(Tensor::zeros(&device, &dims)));
    let y = q.attention_to([&k, &v], shape, &spans);
    assert_eq!(y.value().to_vec(), [0.0; 24]);
    assert_eq!(gradient_of(&tape.backward(&y.dot_constant(y.value().clone())), &q), [0.0; 24]);
}

#[test]
#[should_panic(expected = "never falls back")]
fn what_tokens_see_does_not_fall_back() {
    let _ = AttentionSpans::new(&Device::new(1), 3, &[0..2, 1..3, 0..3], None);
}

/// Apart or side by side, the numbers are the same to the bit, with rotary positions.
#[test]
fn queries_keys_and_values_may_lie_side_by_side() {
    let (shape, seq) = (AttentionShape { heads: 4, kv_heads: 2, head_dim: 6 }, 70);
    let (segments, positions) = (vec![0; 2 * seq], (0..2 * seq as u32).map(|t| t % seq as u32).collect::<Vec<_>>());
    let qkv = random(&[2 * seq, shape.width()], 1);
    on_devices(|device| {
        let rotary = Some(rotary_tables(device, &positions, shape.head_dim, 1e4));
        let spans = AttentionSpans::new(device, seq, &causal_keys(&segments, seq), rotary);
        let columns = |from: usize, to: usize| {
            let part = qkv.values.chunks_exact(shape.width()).flat_map(|line| line[from..to].to_vec());
            Tensor::from_slice(device, &[2 * seq, to - from], &part.collect::<Vec<f32>>())
        };
        let parts = [columns(0, 24), columns(24, 36), columns(36, 48)];
        let tape = Tape::new(device);
        let [q, k, v] = parts.map(|part| tape.leaf(part));
        let fused = tape.leaf(columns(0, 48));
        let (apart, together) = (q.attention_to([&k, &v], shape, &spans), fused.attention(shape, &spans));
        assert_eq!(apart.value().to_vec(), together.value().to_vec());
        let weights = Tensor::from_fn(device, apart.shape(), |i| (i % 7) as f32 - 3.0);
        let gradients = tape.backward(&apart.dot_constant(weights.clone()).add(&together.dot_constant(weights)));
        let want = gradient_of(&gradients, &fused);
        let line = |t: usize| {
            [(&q, 24), (&k, 12), (&v, 12)]
                .map(|(part, width)| gradient_of(&gradients, part)[t * width..][..width].to_vec())
        };
        (0..2 * seq).for_each(|t| assert_eq!(line(t).concat(), want[t * 48..][..48], "token {t}"));
    });
}

#[test]
fn keys_of_another_text_have_the_queries_segment() {
    assert_eq!(
        cross_keys((&[0, 0, 1, 1, 2, 2], 3), (&[0, 1, 1, 1, 2, 2, 2, 2], 4)),
        [0..1, 0..1, 1..4, 0..0, 0..4, 0..4]
    );
    assert_eq!(cross_keys((&[7, 8, 9], 3), (&[7, 9], 2)), [0..1, 1..1, 1..2]);
    let crossed = std::panic::catch_unwind(|| cross_keys((&[0, 1], 2), (&[1, 0], 2)));
    assert!(crossed.is_err(), "segments of a row are in the same order in both texts");
}

/// Attention in a window, with a bias for each distance, sinks, another scale and values wider than keys: all at once.
struct Termed {
    heads: usize,
    kv_heads: usize,
    dims: [usize; 2],
    seq: usize,
    rows: usize,
    window: usize,
    /// The last numbers of a head that turn, neighbours together.
    turn: usize,
}

const THETA: f32 = 100.0;
const SCALE: f32 = 0.8;

impl Termed {
    fn shape(&self) -> AttentionShape {
        AttentionShape { heads: self.heads, kv_heads: self.kv_heads, head_dim: self.dims[0] }
    }

    fn distances(&self) -> usize {
        2 * self.seq - 1
    }

    fn inputs(&self) -> Vec<Operand> {
        let (tokens, [dim, value_dim]) = (self.rows * self.seq, self.dims);
        let shapes: [&[usize]; 5] = [
            &[tokens, self.heads * dim],
            &[tokens, self.kv_heads * dim],
            &[tokens, self.kv_heads * value_dim],
            &[self.distances(), self.heads],
            &[self.heads],
        ];
        shapes.iter().zip(1..).map(|(shape, stream)| random(shape, stream)).collect()
    }

    fn attend(&self, v: &[Var]) -> Var {
        let keys = within_window(causal_keys(&vec![0; self.rows * self.seq], self.seq), self.seq, self.window);
        let positions: Vec<u32> = (0..self.rows * self.seq).map(|t| (t % self.seq) as u32).collect();
        let spans = AttentionSpans::new(v[0].device(), self.seq, &keys, self.rotary(v[0].device(), &positions));
        let spans = spans.turning(TurningPairs::Neighbours);
        let terms = ScoreTerms { scale: Some(SCALE), bias: Some(v[3].clone()), sinks: Some(v[4].clone()) };
        v[0].attention_with([&v[1], &v[2]], self.shape(), &spans, &terms)
    }

    fn rotary(&self, device: &Arc<Device>, positions: &[u32]) -> Option<[Tensor; 2]> {
        (self.turn > 0).then(|| rotary_tables(device, positions, self.turn, THETA))
    }

    /// A head's numbers at a position.
    fn turned(&self, x: &[f64], position: usize) -> Vec<f64> {
        let still = x.len() - self.turn;
        let pair = |i: usize| {
            let angle = position as f64 * f64::from(THETA).powf(-2.0 * i as f64 / self.turn as f64);
            let (x, y) = (x[still + 2 * i], x[still + 2 * i + 1]);
            [x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()]
        };
        x[..still].iter().copied().chain((0..self.turn / 2).flat_map(pair)).collect()
    }

    fn forward(&self, v: &[Vec<f64>]) -> Vec<f64> {
        let (heads, kv_heads, [dim, value_dim]) = (self.heads, self.kv_heads, self.dims);
        let mut out = Vec::new();
        for t in 0..self.rows * self.seq {
            let (row, at) = (t / self.seq * self.seq, t % self.seq);
            let seen: Vec<usize> = (0..self.seq).filter(|&j| j <= at && at - j < self.window).collect();
            for head in 0..heads {
                let kv = head * kv_heads / heads;
                let score = |&j: &usize| {
                    let (q, k) = (&v[0][(t * heads + head) * dim..], &v[1][((row + j) * kv_heads + kv) * dim..]);
                    let (q, k) = (self.turned(&q[..dim], at), self.turned(&k[..dim], j));
                    let product: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                    product * f64::from(SCALE) + v[3][(self.seq - 1 + j - at) * heads + head]
                };
                let scores: Vec<f64> = seen.iter().map(score).chain([v[4][head]]).collect();
                let weights = softmax_of(&scores);
                let value = |c: usize| {
                    let of = |&j: &usize| v[2][((row + j) * kv_heads + kv) * value_dim + c];
                    seen.iter().zip(&weights).map(|(j, w)| w * of(j)).sum::<f64>()
                };
                out.extend((0..value_dim).map(value));
            }
        }
        out
    }
}

#[test]
fn attention_in_a_window_with_biases_and_sinks() {
    let cases = [
        Termed { heads: 2, kv_heads: 1, dims: [4, 6], seq: 5, rows: 2, window: 3, turn: 0 },
        Termed { heads: 2, kv_heads: 2, dims: [8, 4], seq: 9, rows: 1, window: 100, turn: 8 },
        // Several blocks, of which a window hides the first; four of six numbers turn.
        Termed { heads: 4, kv_heads: 2, dims: [6, 8], seq: 150, rows: 2, window: 40, turn: 4 },
        // More than one block of queries.
        Termed { heads: 2, kv_heads: 1, dims: [4, 6], seq: 300, rows: 1, window: 90, turn: 2 },
        Termed { heads: 2, kv_heads: 2, dims: [10, 6], seq: 12, rows: 2, window: 100, turn: 2 },
        // Heads that do not fit an accelerator's shared memory at once.
        Termed { heads: 1, kv_heads: 1, dims: [34, 66], seq: 70, rows: 1, window: 50, turn: 6 },
    ];
    for case in cases {
        let tolerance = rounding(case.dims[0] + case.seq * case.rows * case.heads / case.kv_heads);
        check(&case.inputs(), tolerance, |v| case.attend(v), |v| case.forward(v));
        // Biases and sinks are f32.
        let in_bf16 = |v: &[Var]| {
            let terms = v[3..].iter().map(|term| term.cast(Dtype::F32));
            case.attend(&v[..3].iter().cloned().chain(terms).collect::<Vec<Var>>())
        };
        check_bf16_chain(3, &case.inputs(), in_bf16, |v| case.forward(v));
    }
}

/// The same token by token and in pieces, as generation has it.
#[test]
fn a_cache_knows_windows_biases_and_sinks() {
    for (dims, window, turn) in [([4, 4], 7, 0), ([6, 8], 100, 4), ([4, 6], 8, 4)] {
        let case = Termed { heads: 4, kv_heads: 2, dims, seq: 30, rows: 1, window, turn };
        let inputs = case.inputs();
        let wide: Vec<Vec<f64>> = inputs.iter().map(|x| x.values.iter().map(|&x| f64::from(x)).collect()).collect();
        let want: Vec<(usize, f64)> = case.forward(&wide).into_iter().enumerate().collect();
        on_devices(|device| {
            for piece in [1, 6, 30] {
                let (tape, mut cache, mut got) = (Tape::inference(device), KvCache::default(), Vec::new());
                for first in (0..case.seq).step_by(piece) {
                    let line = |t: usize| {
                        let part = |x: &Operand| {
                            let width = x.shape[1];
                            x.values[t * width..][..width].to_vec()
                        };
                        inputs[..3].iter().flat_map(part).collect::<Vec<f32>>()
                    };
                    let new: Vec<f32> = (first..first + piece).flat_map(line).collect();
                    let new = Tensor::from_slice(device, &[piece, new.len() / piece], &new);
                    let so_far = first + piece;
                    let bias = &inputs[3].values[(case.seq - so_far) * case.heads..][..so_far * case.heads];
                    let constant = |shape: &[usize], values: &[f32]| {
                        Some(tape.constant(Tensor::from_slice(device, shape, values)))
                    };
                    let bias = constant(&[so_far, case.heads], bias);
                    let scores =
                        ScoreTerms { scale: Some(SCALE), bias, sinks: constant(&[case.heads], &inputs[4].values) };
                    let terms = CachedTerms { scores, window: Some(case.window) };
                    let positions: Vec<u32> = (first as u32..so_far as u32).collect();
                    let spans = AttentionSpans::new(device, piece, &[], case.rotary(device, &positions));
                    let spans = spans.turning(TurningPairs::Neighbours);
                    got.extend(attend_cached(&new, case.shape(), &spans, &terms, &mut cache).to_vec());
                }
                near("cached attention", &got, &want, rounding(40));
            }
        });
    }
}
