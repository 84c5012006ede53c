//! Attention with queries, keys and values of their own, also of another text, against loops in f64.

use std::sync::Arc;

use guildhall_tensor::gradcheck::Operand;
use guildhall_tensor::ops::{AttentionShape, AttentionSpans, causal_keys, cross_keys, rotary_tables};
use guildhall_tensor::{Device, Tape, Tensor, Var};

use crate::harness::{check, check_bf16, gradient_of, on_threads, random, rounding};
use crate::reference::softmax_of;

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
    ];
    for case in cases {
        // Sums over the head's columns, over the keys, and in the gradient of a key over the queries of its group.
        let AttentionShape { heads, kv_heads, head_dim } = case.shape;
        let tolerance = rounding(head_dim + case.key_seq + case.seq * heads / kv_heads);
        check(&case.inputs(), tolerance, |v| case.attend(v), |v| case.forward(v));
        check_bf16(&case.inputs(), |v| case.attend(v), |v| case.forward(v));
    }
}

#[test]
fn attention_to_another_text_without_rows() {
    let case = Texts { segments: vec![], key_segments: vec![], ..texts(2, 2, 4, &[(&[5], &[3])]) };
    check(&case.inputs(), 0.0, |v| case.attend(v), |v| case.forward(v));
}

/// Apart or side by side, the numbers are the same to the bit, with rotary positions.
#[test]
fn queries_keys_and_values_may_lie_side_by_side() {
    let (shape, seq) = (AttentionShape { heads: 4, kv_heads: 2, head_dim: 6 }, 70);
    let (segments, positions) = (vec![0; 2 * seq], (0..2 * seq as u32).map(|t| t % seq as u32).collect::<Vec<_>>());
    let qkv = random(&[2 * seq, shape.width()], 1);
    on_threads(|device| {
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
