//! Attention with relative positions over stretches, and what it is made of, against loops in f64.

use std::sync::Arc;

use guildhall_tensor::gradcheck::Operand;
use guildhall_tensor::ops::{KvCache, Relative, Stretches, reach, relative_attend_cached, sinusoids};
use guildhall_tensor::{Device, Tape, Tensor, Var};

use super::harness::{check, check_bf16, gradient_of, near, on_devices, random, rounding, tensor};
use super::reference::{StretchedAttention, linear};

fn case(
    (heads, head_dim): (usize, usize),
    documents: &[&[usize]],
    (stretch, memory): (usize, usize),
) -> StretchedAttention {
    let seq = documents[0].iter().sum();
    let documents = documents.iter().map(|row| row.to_vec()).collect();
    StretchedAttention { heads, head_dim, seq, documents, stretch, memory }
}

fn stretches(device: &Arc<Device>, case: &StretchedAttention) -> Arc<Stretches> {
    Arc::new(Stretches::new(device, &case.segments(), case.seq, case.stretch, case.memory))
}

/// Queries, keys and values twice, distances, u, v.
fn inputs(case: &StretchedAttention) -> [Operand; 6] {
    let (tokens, width) = (case.segments().len(), case.heads * case.head_dim);
    let kv = random(&[tokens, 2 * width], 2);
    let distances = random(&[reach(case.seq, case.stretch, case.memory), width], 4);
    let bias = |stream| random(&[case.heads, case.head_dim], stream);
    // The two differ in their gradients, not in their values.
    [random(&[tokens, width], 1), kv.clone(), kv, distances, bias(5), bias(6)]
}

fn relative(v: &[Var]) -> Relative<'_> {
    Relative { distances: &v[3], content_bias: &v[4], position_bias: &v[5] }
}

#[test]
fn relative_attention() {
    let cases = [
        // Small enough that every element's gradient is compared.
        case((1, 4), &[&[6]], (3, 2)),
        case((2, 3), &[&[4, 3], &[7]], (2, 3)),
        case((1, 4), &[&[7]], (2, 0)),
        case((2, 2), &[&[1, 1, 5]], (7, 7)),
        // Several blocks of 64: stretches and memories that begin inside blocks, at their edges, and far behind; the
        // last block ragged, documents that begin in it.
        case((2, 8), &[&[150]], (50, 37)),
        case((1, 8), &[&[192], &[65, 127]], (64, 64)),
        case((2, 4), &[&[10, 3, 180, 7]], (20, 130)),
        case((1, 16), &[&[200]], (100, 1)),
        // Heads that do not fit an accelerator's shared memory at once.
        case((1, 40), &[&[66]], (20, 40)),
    ];
    for case in cases {
        let op = |v: &[Var]| v[0].relative_attention([&v[1], &v[2]], relative(v), &stretches(v[0].device(), &case));
        // Sums over a head's columns twice, over the keys, and in the gradients of distances, u and v over all tokens.
        let tolerance = rounding(2 * case.head_dim + 2 * case.segments().len());
        check(&inputs(&case), tolerance, op, |v| case.forward(v));
        // The output is kept rounded to bf16, and every score's gradient is a difference with its product with the
        // upstream gradient: where a few tokens make small gradients, that is more than one rounding of the largest.
        if case.seq > 64 {
            check_bf16(&inputs(&case), op, |v| case.forward(v));
        }
    }
}

/// Large scores, where a softmax without its maximum would overflow.
#[test]
fn relative_attention_with_large_scores() {
    let case = case((2, 8), &[&[80]], (30, 20));
    let inputs = inputs(&case).map(|x| Operand { values: x.values.iter().map(|x| 4.0 * x).collect(), ..x });
    let op = |v: &[Var]| v[0].relative_attention([&v[1], &v[2]], relative(v), &stretches(v[0].device(), &case));
    // Scores reach a few hundred, whose rounding (200 * 2^-24) is the relative error of a weight.
    check(&inputs, 200.0 * rounding(0), op, |v| case.forward(v));
}

/// No rows: a rank may have none. What all ranks share gets zeros then, not what the memory last held.
#[test]
fn relative_attention_without_rows() {
    let empty = StretchedAttention { documents: vec![], ..case((2, 3), &[&[7]], (2, 3)) };
    let op = |v: &[Var]| v[0].relative_attention([&v[1], &v[2]], relative(v), &stretches(v[0].device(), &empty));
    check(&inputs(&empty), 0.0, op, |v| empty.forward(v));
}

/// Tokens one by one, and in pieces, give the rows of the attention over all of them.
#[test]
fn relative_attention_through_a_cache() {
    for (stretch, memory) in [(10, 7), (14, 30), (70, 70), (5, 0)] {
        let case = case((2, 8), &[&[70]], (stretch, memory));
        let inputs = inputs(&case);
        let wide: Vec<Vec<f64>> = inputs.iter().map(|x| x.values.iter().map(|&x| f64::from(x)).collect()).collect();
        let want: Vec<(usize, f64)> = case.forward(&wide).into_iter().enumerate().collect();
        on_devices(|device| {
            let tape = Tape::inference(device);
            let vars = inputs.each_ref().map(|x| tape.constant(tensor(device, x)));
            for piece in [1, 7, 70] {
                let (mut cache, mut got) = (KvCache::default(), Vec::new());
                for first in (0..70).step_by(piece) {
                    let [q, kv] = [(&inputs[0], 16), (&inputs[1], 32)].map(|(from, width)| {
                        Tensor::from_slice(device, &[piece, width], &from.values[first * width..][..piece * width])
                    });
                    let so_far = first + piece;
                    let stretches = Stretches::new(device, &vec![0; so_far], so_far, stretch, memory);
                    got.extend(relative_attend_cached(&q, &kv, relative(&vars), &stretches, &mut cache).to_vec());
                }
                near("cached attention", &got, &want, rounding(2 * 8 + 70));
            }
        });
    }
}

/// Both values are the product; the second says nothing of x.
#[test]
fn linear_twice() {
    for (rows, inner, outer) in [(0, 4, 3), (5, 7, 3), (150, 40, 70)] {
        // The oracle has the same x under two names, the second of which is not asked for its gradient.
        let (x, w) = (random(&[rows, inner], 1), random(&[outer, inner], 2));
        let remembered = x.values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let op = |v: &[Var]| {
            let [first, second] = v[0].linear_twice(&v[1]);
            first.scale(2.0).add(&second.scale(3.0))
        };
        let oracle = |v: &[Vec<f64>]| {
            let (first, second) = (linear(&v[0], &v[1], None, inner), linear(&remembered, &v[1], None, inner));
            first.iter().zip(&second).map(|(a, b)| 2.0 * a + 3.0 * b).collect()
        };
        check(&[x.clone(), w.clone()], 5.0 * rounding(inner.max(outer).max(rows)), op, oracle);
        on_devices(|device| {
            let tape = Tape::new(device);
            let (x, w) = (tape.leaf(tensor(device, &x)), tape.leaf(tensor(device, &w)));
            let second = &x.linear_twice(&w)[1];
            let gradients = tape.backward_from(second, Tensor::from_fn(device, &[rows, outer], |_| 1.0));
            assert!(gradients.of(&x).is_none(), "a constant has no gradient");
            assert_eq!(gradient_of(&gradients, &w).len(), inner * outer);
        });
    }
}

/// From the definition, at a few places.
#[test]
fn sinusoids_are_sines_then_cosines() {
    let table = sinusoids(40, 6);
    for (n, i) in [(0, 0), (1, 0), (39, 0), (17, 1), (39, 2)] {
        let angle = n as f64 / 10_000f64.powf(i as f64 / 3.0);
        assert_eq!(table[n * 6 + i], angle.sin() as f32);
        assert_eq!(table[n * 6 + 3 + i], angle.cos() as f32);
    }
}
