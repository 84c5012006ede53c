//! Every op against a loop in f64: values, and gradients against differences of the loop.

mod cross_attention;
mod golden;
mod harness;
mod reference;
mod relative_attention;
mod sliced;

use std::slice::from_ref;
use std::sync::Arc;

use guildhall_tensor::gradcheck::Operand;
use guildhall_tensor::ops::{
    AttentionShape, AttentionSpans, CachedTerms, KvCache, NOWHERE, NormMoments, RowGroup, attend_cached, causal_keys,
    log_sum_exp_rows, rotary_tables, segment_keys,
};
use guildhall_tensor::{Device, Draws, Dtype, Purpose, RowIds, Tape, Tensor, Var};
use harness::{
    BF16, all_near, check, check_bf16, check_bf16_chain, device, gradient_of, near, on_devices, random, rounding,
    tensor,
};
use reference as r;

/// `len` integers under `below`, with repeats.
fn integers(len: usize, below: usize, stream: u32) -> Vec<u32> {
    let draws = Draws::new(21, Purpose::Test, 0, stream);
    (0..len as u64).map(|i| draws.bits(i) % below as u32).collect()
}

/// Numbers around 1 that are all positive.
fn positive(shape: &[usize], stream: u32) -> Operand {
    let x = random(shape, stream);
    Operand { values: x.values.iter().map(|x| x.abs() + 0.1).collect(), ..x }
}

/// Weights of a norm, spread around 1.
fn gains(width: usize, stream: u32) -> Operand {
    let x = Operand::random(&[width], 0.3, stream);
    Operand { values: x.values.iter().map(|x| x + 1.0).collect(), ..x }
}

// --- products ---------------------------------------------------------------------------------------------------

#[test]
fn linear() {
    // Leading dims, inner, outer. The last is large enough for threads; 150 rows are not a multiple of a tile.
    for (lead, inner, outer) in [(vec![5], 7, 3), (vec![2, 3], 8, 17), (vec![1], 1, 1), (vec![3, 50], 40, 70)] {
        let rows: usize = lead.iter().product();
        let x = random(&[lead.clone(), vec![inner]].concat(), 1);
        let (w, b) = (random(&[outer, inner], 2), random(&[outer], 3));
        // The longest sums are over inner in the value, over outer and rows in the gradients.
        let tolerance = rounding(inner.max(outer).max(rows));
        let op = |v: &[Var]| v[0].linear(&v[1], None);
        check(&[x.clone(), w.clone()], tolerance, op, |v| r::linear(&v[0], &v[1], None, inner));
        let op = |v: &[Var]| v[0].linear(&v[1], Some(&v[2]));
        let oracle = |v: &[Vec<f64>]| r::linear(&v[0], &v[1], Some(&v[2]), inner);
        check(&[x.clone(), w.clone(), b.clone()], tolerance, op, oracle);
        check_bf16(&[x, w, b], op, oracle);
    }
}

#[test]
fn grouped_linear() {
    // Fewer experts than four a thread: each expert's weight gradient is split. More: an expert a thread.
    let many: Vec<usize> = (0..15).map(|e| e * 7 % 5).collect();
    let cases: [(&[usize], usize, usize); 7] = [
        (&[3, 0, 2, 1], 4, 5),
        (&[6], 3, 4),
        (&[0, 0, 0], 4, 3),
        (&[0, 0, 9], 5, 2),
        (&many, 3, 4),
        (&[0, 700, 40], 20, 24),
        (&[1100, 0, 1, 530, 0, 0, 3, 2, 1, 0, 0, 0, 5], 6, 9),
    ];
    for (counts, inner, outer) in cases {
        let rows = counts.iter().sum();
        let x = random(&[rows, inner], 1);
        let (w, b) = (random(&[counts.len(), outer, inner], 2), random(&[counts.len(), outer], 3));
        let tolerance = rounding(inner.max(outer).max(*counts.iter().max().unwrap()));
        let op = |v: &[Var]| v[0].grouped_linear(&v[1], None, counts);
        check(&[x.clone(), w.clone()], tolerance, op, |v| r::grouped_linear(&v[0], &v[1], None, inner, counts));
        let op = |v: &[Var]| v[0].grouped_linear(&v[1], Some(&v[2]), counts);
        let oracle = |v: &[Vec<f64>]| r::grouped_linear(&v[0], &v[1], Some(&v[2]), inner, counts);
        check(&[x.clone(), w.clone(), b.clone()], tolerance, op, oracle);
        check_bf16(&[x, w, b], op, oracle);
    }
}

#[test]
fn grouped_swiglu() {
    let cases: [(&[usize], usize, usize); 5] =
        [(&[3, 0, 2, 1], 4, 5), (&[6], 3, 4), (&[0, 0, 0], 4, 3), (&[0, 600, 40], 10, 17), (&[1; 13], 6, 9)];
    for (counts, outer, inner) in cases {
        let (rows, experts): (usize, usize) = (counts.iter().sum(), counts.len());
        let inputs =
            [random(&[rows, outer], 1), random(&[experts, 2 * inner, outer], 2), random(&[experts, outer, inner], 3)];
        let op = |v: &[Var]| v[0].grouped_swiglu(&v[1], &v[2], counts);
        let oracle = |v: &[Vec<f64>]| {
            let hidden = r::swiglu(&r::grouped_linear(&v[0], &v[1], None, outer, counts), inner);
            r::grouped_linear(&hidden, &v[2], None, inner, counts)
        };
        // Two products, one after the other, and an expert's rows in the weights' gradients.
        check(&inputs, 4.0 * rounding(outer + inner + counts.iter().max().unwrap()), op, oracle);
        // Each after the other, forward and back.
        check_bf16_chain(2, &inputs, op, oracle);
    }
}

/// Rows that need no gradient do not keep the weights from theirs.
#[test]
fn grouped_swiglu_of_constant_rows() {
    on_devices(|device| {
        let inputs = [random(&[5, 4], 1), random(&[2, 6, 4], 2), random(&[2, 4, 3], 3)];
        let gradients = |constant: bool| {
            let tape = Tape::new(device);
            let [x, gate_up, down] = inputs.each_ref().map(|i| tensor(device, i));
            let x = if constant { tape.constant(x) } else { tape.leaf(x) };
            let (gate_up, down) = (tape.leaf(gate_up), tape.leaf(down));
            let y = x.grouped_swiglu(&gate_up, &down, &[2, 3]);
            let back = tape.backward_from(&y, tensor(device, &random(&[5, 4], 4)));
            [gradient_of(&back, &gate_up), gradient_of(&back, &down)]
        };
        assert_eq!(gradients(true), gradients(false));
    });
}

/// No rows at all: a rank may have none. Gradients of weights are then zeros, not what the memory last held.
#[test]
fn products_without_rows() {
    let (x, w, b) = (random(&[0, 7], 1), random(&[3, 7], 2), random(&[3], 3));
    let op = |v: &[Var]| v[0].linear(&v[1], Some(&v[2]));
    check(&[x, w, b], 0.0, op, |_| vec![]);
}

// --- rows by index ----------------------------------------------------------------------------------------------

#[test]
fn gather_rows() {
    for (rows, width, picks) in [(6, 5, 11), (3, 4, 0), (40, 3, 400)] {
        let (x, index) = (random(&[rows, width], 1), integers(picks, rows, 1));
        let op = |v: &[Var]| v[0].gather_rows(&index);
        // A gradient is the sum of up to about 3 * picks / rows rows.
        check(from_ref(&x), rounding(3 * picks / rows), op, |v| r::gather_rows(&v[0], &index, width));
        check_bf16(&[x], op, |v| r::gather_rows(&v[0], &index, width));
    }
}

#[test]
fn scatter_add_rows() {
    for (rows, width, sources) in [(6, 5, 11), (3, 4, 0), (250, 3, 700)] {
        let (x, index) = (random(&[sources, width], 1), integers(sources, rows, 1));
        let op = |v: &[Var]| v[0].scatter_add_rows(&index, rows);
        let oracle = |v: &[Vec<f64>]| r::scatter_add_rows(&v[0], &index, rows, width);
        check(from_ref(&x), rounding(sources / rows + 10), op, oracle);
        check_bf16(&[x], op, oracle);
    }
}

#[test]
fn concat_rows() {
    let parts = [random(&[3, 5], 1), random(&[0, 5], 2), random(&[300, 5], 3)];
    let op = |v: &[Var]| Var::concat_rows(v.to_vec());
    check(&parts, rounding(1), op, |v| v.concat());
    check_bf16(&parts, op, |v| v.concat());
}

#[test]
fn columns() {
    for (rows, width, range) in [(3, 5, 1..4), (2, 4, 0..4), (0, 3, 1..2), (300, 7, 6..7)] {
        let of = |v: &[Vec<f64>]| v[0].chunks(width).flat_map(|line| line[range.clone()].to_vec()).collect();
        let x = random(&[rows, width], 1);
        check(from_ref(&x), rounding(1), |v| v[0].columns(range.clone()), of);
        check_bf16(from_ref(&x), |v| v[0].columns(range.clone()), of);
    }
}

#[test]
fn beside() {
    for (rows, repeats, widths) in [(3, 1, [4, 2]), (2, 3, [1, 5]), (0, 1, [2, 2]), (70, 5, [6, 3])] {
        let operands = [random(&[rows * repeats, widths[0]], 1), random(&[rows, widths[1]], 2)];
        let of = |v: &[Vec<f64>]| -> Vec<f64> {
            let line = |r: usize| {
                let other = &v[1][r / repeats * widths[1]..][..widths[1]];
                v[0][r * widths[0]..][..widths[0]].iter().chain(other).copied().collect::<Vec<f64>>()
            };
            (0..rows * repeats).flat_map(line).collect()
        };
        check(&operands, rounding(repeats), |v| v[0].beside(&v[1]), of);
        check_bf16(&operands, |v| v[0].beside(&v[1]), of);
    }
}

#[test]
fn carry_rows() {
    for (rows, width, every) in [(6, 5, 2), (7, 4, 1), (5, 3, 9), (0, 4, 1), (301, 5, 3)] {
        // An order without cycles of one or two, and the rows that carry from the last to the first.
        let order: Vec<u32> = (0..rows as u32).map(|i| (i + 2) % rows as u32).collect();
        let at: Vec<u32> = (0..rows as u32).rev().filter(|row| row % every == every - 1).collect();
        let (x, w) = (random(&[rows, width], 1), random(&[at.len(), 1], 2));
        let operands = [x, w, random(&[at.len(), width], 3)];
        let op = |v: &[Var]| v[0].carry_rows(&order, &at, &v[1], &v[2]);
        let oracle = |v: &[Vec<f64>]| r::carry_rows(&v[0], &v[1], &v[2], [&order, &at]);
        check(&operands, rounding(width), op, oracle);
        check_bf16(&operands, op, oracle);
    }
}

#[test]
#[should_panic(expected = "row 1 twice")]
fn an_order_has_each_row_once() {
    let tape = Tape::new(&device());
    let of = |shape: &[usize]| tape.constant(Tensor::from_fn(tape.device(), shape, |i| i as f32));
    of(&[3, 2]).carry_rows(&[0, 1, 1], &[1], &of(&[1, 1]), &of(&[1, 2]));
}

#[test]
fn weighted_sum_rows() {
    for (tokens, k, width) in [(5, 1, 4), (6, 2, 5), (7, 3, 3), (4, 2, 33), (300, 3, 5), (0, 2, 4)] {
        // Every third route is dropped; the others take their places from the last to the first.
        let kept: Vec<usize> = (0..tokens * k).filter(|route| route % 3 != 1).collect();
        let (rows, mut places) = (kept.len(), vec![NOWHERE; tokens * k]);
        kept.iter().zip((0..rows as u32).rev()).for_each(|(&route, place)| places[route] = place);
        let (x, w) = (random(&[rows, width], 1), random(&[tokens, k], 2));
        let op = |v: &[Var]| v[0].weighted_sum_rows(&v[1], &places);
        let oracle = |v: &[Vec<f64>]| r::weighted_sum_rows(&v[0], &v[1], &places, k, width);
        check(&[x.clone(), w.clone()], rounding(width.max(k)), op, oracle);
        check_bf16(&[x, w], op, oracle);
        // Three routes to a row, of different tokens or of one.
        let (shared, rows) = (|&place: &u32| if place == NOWHERE { place } else { place / 3 }, rows.div_ceil(3));
        let places: Vec<u32> = places.iter().map(shared).collect();
        let (x, w) = (random(&[rows, width], 1), random(&[tokens, k], 2));
        let op = |v: &[Var]| v[0].weighted_sum_rows(&v[1], &places);
        let oracle = |v: &[Vec<f64>]| r::weighted_sum_rows(&v[0], &v[1], &places, k, width);
        check(&[x.clone(), w.clone()], rounding(width.max(3 * k)), op, oracle);
        check_bf16(&[x, w], op, oracle);
    }
    let op = |v: &[Var]| v[0].weighted_sum_rows(&v[1], &[NOWHERE; 6]);
    check(&[random(&[2, 4], 1), random(&[3, 2], 2)], 0.0, op, |_| vec![0.0; 12]);
}

#[test]
fn embed() {
    // Ids and columns of the last two are more than an accelerator's block looks at, or adds to, at once.
    for (vocab, width, count) in [(7, 4, 12), (5, 3, 0), (9, 5, 800), (3, 4100, 6)] {
        let (table, ids) = (random(&[vocab, width], 1), integers(count, vocab, 1));
        let op = |v: &[Var]| v[0].embed(&ids, Dtype::F32);
        check(from_ref(&table), rounding(2 * count / vocab), op, |v| r::gather_rows(&v[0], &ids, width));
        let op = |v: &[Var]| {
            let rows = v[0].embed(&ids, Dtype::Bf16);
            assert_eq!(rows.dtype(), Dtype::Bf16);
            rows.cast(Dtype::F32)
        };
        check(from_ref(&table), BF16, op, |v| r::gather_rows(&v[0], &ids, width));
        check_bf16(&[table], |v| v[0].embed(&ids, Dtype::Bf16), |v| r::gather_rows(&v[0], &ids, width));
    }
}

// --- norms ------------------------------------------------------------------------------------------------------

/// Rows and widths, the latter around multiples of the 16 lanes; 200 rows are split over three threads.
const ROWS: [(usize, usize); 7] = [(3, 1), (4, 7), (2, 16), (3, 33), (5, 48), (200, 19), (0, 5)];

#[test]
fn rms_norm() {
    for (rows, width) in ROWS {
        let (x, w) = (random(&[rows, width], 1), gains(width, 2));
        let op = |v: &[Var]| v[0].rms_norm(&v[1], 1e-2);
        let oracle = |v: &[Vec<f64>]| r::rms_norm(&v[0], &v[1], f64::from(1e-2f32));
        check(&[x.clone(), w.clone()], rounding(width.max(rows)), op, oracle);
        check_bf16(&[x, w], op, oracle);
    }
}

/// Rows of which only some columns are here, with whatever sum of squares the others make.
#[test]
fn rms_norm_of_some_columns() {
    for (rows, width) in ROWS {
        let x = random(&[rows, width], 1);
        let sums = |v: &[Vec<f64>]| r::by_row(&v[0], width, |x| vec![x.iter().map(|x| x * x).sum()]);
        check(from_ref(&x), rounding(width), |v| v[0].square_sums(), sums);
        let (w, columns) = (gains(width, 2), 2 * width);
        let squares = random(&[rows, 1], 3);
        let squares = Operand { values: squares.values.iter().map(|s| 1.0 + s * s).collect(), ..squares };
        let op = |v: &[Var]| v[0].rms_norm_of(&v[1], &v[2], columns, 1e-2);
        let oracle = |v: &[Vec<f64>]| {
            let inverse = |row: usize| 1.0 / (v[2][row] / columns as f64 + f64::from(1e-2f32)).sqrt();
            v[0].iter().enumerate().map(|(i, x)| x * inverse(i / width) * v[1][i % width]).collect()
        };
        check(&[x, w, squares], rounding(width.max(rows)), op, oracle);
    }
}

#[test]
fn layer_norm() {
    for (rows, width) in ROWS {
        let (x, w, b) = (random(&[rows, width], 1), gains(width, 2), random(&[width], 3));
        let op = |v: &[Var]| v[0].layer_norm(&v[1], &v[2], 1e-2);
        let oracle = |v: &[Vec<f64>]| r::layer_norm(&v[0], &v[1], &v[2], f64::from(1e-2f32));
        check(&[x.clone(), w.clone(), b.clone()], rounding(width.max(rows)), op, oracle);
        check_bf16(&[x, w, b], op, oracle);
    }
}

/// A mean far from zero costs only the bits by which it exceeds the deviation.
#[test]
fn layer_norm_of_rows_far_from_zero() {
    let (x, w, b) = (random(&[4, 40], 1), gains(40, 2), random(&[40], 3));
    let x = Operand { values: x.values.iter().map(|x| x + 100.0).collect(), ..x };
    let oracle = |v: &[Vec<f64>]| r::layer_norm(&v[0], &v[1], &v[2], f64::from(1e-5f32));
    // The mean is off by a few 2^-24 of 100, which is seen against a deviation of 1.
    check(&[x, w, b], 4.0 * 100.0 / f64::from(1 << 24), |v| v[0].layer_norm(&v[1], &v[2], 1e-5), oracle);
}

/// The moments of rows, and rows from their norm and moments.
#[test]
fn inverse_of_norms() {
    for (rows, width) in ROWS {
        let (x, w, b) = (random(&[rows, width], 1), gains(width, 2), random(&[width], 3));
        let eps = f64::from(1e-2f32);
        for kind in [NormMoments::Centred, NormMoments::Plain] {
            let moments = |row: &[f64]| {
                let mean = if kind == NormMoments::Centred { row.iter().sum::<f64>() / row.len() as f64 } else { 0.0 };
                let squares = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
                vec![mean, (squares + eps).sqrt()]
            };
            let oracle = |v: &[Vec<f64>]| r::by_row(&v[0], width, moments);
            check(from_ref(&x), rounding(width.max(rows)), |v| v[0].row_moments(kind, 1e-2), oracle);
        }
        let m = positive(&[rows, 2], 4);
        let oracle = |v: &[Vec<f64>]| {
            let of_row = |(i, x): (usize, &f64)| {
                let (row, c) = (i / width, i % width);
                (x - v.get(3).map_or(0.0, |bias| bias[c])) / v[2][c] * v[1][2 * row + 1] + v[1][2 * row]
            };
            v[0].iter().enumerate().map(of_row).collect::<Vec<f64>>()
        };
        let three = [x.clone(), m.clone(), w.clone()];
        check(&three, rounding(width.max(rows)), |v| v[0].denormalise(&v[1], &v[2], None), oracle);
        check(
            &[&three[..], &[b]].concat(),
            rounding(width.max(rows)),
            |v| v[0].denormalise(&v[1], &v[2], Some(&v[3])),
            oracle,
        );
    }
}

/// What is normalised and then rebuilt has the gradient of the identity, and the norm's parameters have none.
#[test]
fn a_norm_and_its_inverse_are_the_identity() {
    let device = device();
    let (x, w, b) = (random(&[30, 24], 1), gains(24, 2), random(&[24], 3));
    for centred in [true, false] {
        let tape = Tape::new(&device);
        let [x, w, b] = [&x, &w, &b].map(|operand| tape.leaf(tensor(&device, operand)));
        let kind = if centred { NormMoments::Centred } else { NormMoments::Plain };
        let normed = if centred { x.layer_norm(&w, &b, 1e-5) } else { x.rms_norm(&w, 1e-5) };
        let back = normed.denormalise(&x.row_moments(kind, 1e-5), &w, centred.then_some(&b));
        let weights = Tensor::from_fn(&device, &[30, 24], |i| ((i * 7) % 11) as f32 - 5.0);
        let gradients = tape.backward(&back.dot_constant(weights.clone()));
        let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far(&back.value().to_vec(), &x.value().to_vec()) < 1e-5, "values");
        // Gradients of up to 5, each of some sums of 24 terms that cancel.
        assert!(far(&gradients.of(&x).unwrap().to_vec(), &weights.to_vec()) < 1e-4, "gradient of x");
        assert!(gradients.of(&w).unwrap().to_vec().iter().all(|dw| dw.abs() < 2e-4), "gradient of the weight");
    }
}

// --- activations ------------------------------------------------------------------------------------------------

/// From -12 to 12: far enough for both tails of the activations.
fn wide(shape: &[usize]) -> Operand {
    Operand { shape: shape.to_vec(), values: random(shape, 5).values.iter().map(|x| x * 4.0).collect() }
}

#[test]
fn gelu() {
    // Three threads take at least 2^13 elements each.
    for x in [wide(&[4, 25]), wide(&[3 << 13]), wide(&[0, 3])] {
        let oracle = |v: &[Vec<f64>]| v[0].iter().map(|&x| r::gelu(x)).collect();
        check(from_ref(&x), rounding(1), |v| v[0].gelu(), oracle);
        check_bf16(&[x], |v| v[0].gelu(), oracle);
    }
}

/// Gates and ups on both sides of the limits, but for a stretch around them where differences would span both.
#[test]
fn clamped_swiglu() {
    const LIMIT: f32 = 2.0;
    for (rows, width) in [(3, 4), (5, 33), (100, 8), (0, 3)] {
        let mut x = wide(&[rows, 2 * width]);
        let close = |x: f32| (x.abs() - LIMIT).abs() < 0.1;
        x.values.iter_mut().filter(|x| close(**x)).for_each(|x| *x *= 1.2);
        let oracle = |v: &[Vec<f64>]| {
            r::by_row(&v[0], 2 * width, |row| {
                let limit = f64::from(LIMIT);
                let one = |j: usize| {
                    let (gate, up) = (row[j].min(limit), row[width + j].clamp(-limit, limit));
                    gate / (1.0 + (-f64::from(1.702f32) * gate).exp()) * (up + 1.0)
                };
                (0..width).map(one).collect()
            })
        };
        check(from_ref(&x), rounding(4), |v| v[0].clamped_swiglu(LIMIT), oracle);
        check_bf16(&[x], |v| v[0].clamped_swiglu(LIMIT), oracle);
    }
}

#[test]
fn relu() {
    for shape in [vec![7], vec![3, 5], vec![300, 40]] {
        let x = random(&shape, 1);
        let oracle = |v: &[Vec<f64>]| v[0].iter().map(|x| x.max(0.0)).collect::<Vec<_>>();
        // The value is exact; differences of the oracle are not.
        check(from_ref(&x), rounding(1), |v| v[0].relu(), oracle);
        check_bf16(&[x], |v| v[0].relu(), oracle);
    }
    // At the corner the slope is 0, as PyTorch has it; a NaN stays one.
    on_devices(|device| {
        let tape = Tape::new(device);
        let x = tape.leaf(Tensor::from_slice(device, &[3], &[0.0, -0.0, f32::NAN]));
        let y = x.relu();
        assert!(y.value().to_vec()[2].is_nan());
        let gradients = tape.backward_from(&y, Tensor::from_slice(device, &[3], &[1.0; 3]));
        assert_eq!(gradient_of(&gradients, &x), [0.0; 3]);
    });
}

#[test]
fn swiglu() {
    for (rows, width) in [(3, 7), (2, 16), (1, 1), (100, 19), (0, 4)] {
        let x = wide(&[rows, 2 * width]);
        check(from_ref(&x), rounding(1), |v| v[0].swiglu(), |v| r::swiglu(&v[0], width));
        check_bf16(&[x], |v| v[0].swiglu(), |v| r::swiglu(&v[0], width));
    }
}

// --- softmax and sums -------------------------------------------------------------------------------------------

#[test]
fn softmax() {
    for (rows, width) in ROWS {
        let x = wide(&[rows, width]);
        check(from_ref(&x), rounding(width), |v| v[0].softmax(), |v| r::softmax(&v[0], width));
        check_bf16(&[x], |v| v[0].softmax(), |v| r::softmax(&v[0], width));
    }
}

/// Scores that would overflow or vanish on their own.
#[test]
fn softmax_of_large_scores() {
    let x = Operand { shape: vec![3, 3], values: vec![1e4, 1e4, 9999., -1e4, -1e4, -9999., 0., -200., 200.] };
    check(from_ref(&x), rounding(3), |v| v[0].softmax(), |v| r::softmax(&v[0], 3));
    let oracle = |v: &[Vec<f64>]| vec![r::weighted_square_log_sum_exp(&v[0], &[0.0, 0.0, 1.0], 3)];
    // The row's log-sum-exp is 200, good to 2^-24 of that; its probabilities are as good as their exponents.
    check(
        &[x],
        200.0 * rounding(0),
        |v| v[0].weighted_square_log_sum_exp(Tensor::from_slice(v[0].device(), &[3], &[0.0, 0.0, 1.0])),
        oracle,
    );
}

#[test]
fn weighted_square_log_sum_exp() {
    for (rows, width) in ROWS {
        let (x, weights) = (wide(&[rows, width]), random(&[rows], 6).values);
        let op = |v: &[Var]| v[0].weighted_square_log_sum_exp(Tensor::from_slice(v[0].device(), &[rows], &weights));
        let oracle = |v: &[Vec<f64>]| vec![r::weighted_square_log_sum_exp(&v[0], &weights, width)];
        check(from_ref(&x), rounding(width + rows), op, oracle);
        check_bf16(from_ref(&x), op, oracle);
        on_devices(|device| {
            let got = log_sum_exp_rows(&tensor(device, &x)).to_vec();
            let row = |x: &[f32]| r::log_sum_exp(&x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            let want: Vec<(usize, f64)> = x.values.chunks_exact(width).map(row).enumerate().collect();
            near("log-sum-exp", &got, &want, rounding(width));
        });
    }
}

/// k different columns of every row, in no order; with `holes`, every third choice is not made.
fn chosen((rows, width, k): (usize, usize, usize), holes: bool) -> Vec<u32> {
    let column = |i: usize| ((i / k * 5 + i % k * (width - 1)) % width) as u32;
    (0..rows * k).map(|i| if holes && i % 3 == 2 { NOWHERE } else { column(i) }).collect()
}

#[test]
fn selections() {
    type Op = fn(&Var, &[u32], usize) -> Var;
    let rules: [(Op, fn(&[f64]) -> Vec<f64>); 3] = [
        (|x, index, k| x.select(index, k), <[f64]>::to_vec),
        (|x, index, k| x.select_normalised(index, k), r::over_their_sum),
        (|x, index, k| x.select_softmax(index, k), r::softmax_of),
    ];
    for shape in [(4, 6, 2), (3, 5, 1), (2, 4, 4), (300, 12, 3), (0, 4, 2)] {
        let (rows, width, k) = shape;
        let x = positive(&[rows, width], 1);
        for (op, f) in rules {
            for index in [chosen(shape, false), chosen(shape, true)] {
                let oracle = |v: &[Vec<f64>]| r::select(&v[0], &index, k, width, f);
                check(from_ref(&x), rounding(k), |v| op(&v[0], &index, k), oracle);
                check_bf16(from_ref(&x), |v| op(&v[0], &index, k), oracle);
            }
        }
    }
}

/// Logits too far below the row's largest for a softmax over all of them to see.
#[test]
fn chosen_far_below_the_top_still_share_one() {
    let device = device();
    let x = Tensor::from_slice(&device, &[1, 3], &[300.0, 1.0, 1.0]);
    let y = Tape::new(&device).leaf(x).select_softmax(&[1, 2], 2);
    assert_eq!(y.value().to_vec(), [0.5, 0.5]);
}

/// Phi by Simpson's rule: an integral that knows nothing of series.
fn normal_cdf(z: f64) -> f64 {
    let (steps, from) = (4000, -12.0f64);
    let h = (z - from) / f64::from(steps);
    let density = |i: i32| (-0.5 * (from + f64::from(i) * h).powi(2)).exp();
    let weight = |i: i32| if i == 0 || i == steps { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
    (0..=steps).map(|i| weight(i) * density(i)).sum::<f64>() * h / 3.0 / (2.0 * std::f64::consts::PI).sqrt()
}

#[test]
fn chance_of_top() {
    for (rows, width, k) in [(3, 5, 2), (2, 2, 1), (1, 6, 5), (0, 3, 1)] {
        let inputs = [random(&[rows, width], 1), positive(&[rows, width], 2), random(&[rows, width], 3)];
        let op = |v: &[Var]| v[0].chance_of_top(&v[1], &v[2], k);
        let oracle = |v: &[Vec<f64>]| {
            let chance = |i: usize| {
                let row = &v[2][i / width * width..][..width];
                let mut sorted = row.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let threshold = if row[i % width] > sorted[k] { sorted[k] } else { sorted[k - 1] };
                normal_cdf((v[0][i] - threshold) / v[1][i])
            };
            (0..rows * width).map(chance).collect()
        };
        check(&inputs, rounding(32), op, oracle);
    }
}

#[test]
fn scatter_columns() {
    for shape in [(4, 6, 2), (3, 5, 1), (2, 4, 4), (0, 4, 2)] {
        let (rows, width, k) = shape;
        let (x, index) = (random(&[rows, k], 1), chosen(shape, true));
        let oracle = |v: &[Vec<f64>]| {
            let mut out = vec![0.0; rows * width];
            for (route, &column) in index.iter().enumerate().filter(|(_, column)| **column != NOWHERE) {
                out[route / k * width + column as usize] = v[0][route];
            }
            out
        };
        check(from_ref(&x), rounding(1), |v| v[0].scatter_columns(&index, width), oracle);
    }
}

#[test]
fn squared_variation() {
    for width in [1, 2, 7] {
        let elsewhere: Vec<f64> = (0..width).map(|e| 0.3 * e as f64).collect();
        let groups = [
            RowGroup { rows: vec![0, 2], elsewhere: Vec::new(), weight: 0.5, share: 1.0 },
            RowGroup { rows: vec![1, 3, 4], elsewhere, weight: 2.0, share: 1.0 },
        ];
        let x = positive(&[6, width], 1);
        let oracle = |v: &[Vec<f64>]| {
            let of_group = |group: &RowGroup| {
                let others = |e: usize| group.elsewhere.get(e).copied().unwrap_or_default();
                let sum = |e: usize| others(e) + group.rows.iter().map(|&r| v[0][r as usize * width + e]).sum::<f64>();
                let sums: Vec<f64> = (0..width).map(sum).collect();
                let mean = sums.iter().sum::<f64>() / width as f64;
                let variance = sums.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (width as f64 - 1.0).max(1.0);
                f64::from(group.weight) * variance / (mean * mean + 1e-10)
            };
            vec![groups.iter().map(of_group).sum()]
        };
        check(from_ref(&x), rounding(4 * width), |v| v[0].squared_variation(&groups), oracle);
    }
}

#[test]
fn mul_constant() {
    for len in [2, 30, 3 << 13] {
        let (x, w) = (random(&[len], 1), random(&[len], 2));
        let op = |v: &[Var]| v[0].mul_constant(&tensor(v[0].device(), &w));
        let oracle = |v: &[Vec<f64>]| v[0].iter().zip(&w.values).map(|(x, w)| x * f64::from(*w)).collect();
        check(from_ref(&x), rounding(1), op, oracle);
        check_bf16(&[x], op, oracle);
    }
}

#[test]
fn sigmoid_and_softplus() {
    for len in [2, 30, 3 << 13] {
        let x = wide(&[len]);
        let sigmoid = |v: &[Vec<f64>]| v[0].iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        check(from_ref(&x), rounding(1), |v| v[0].sigmoid(), sigmoid);
        check_bf16(from_ref(&x), |v| v[0].sigmoid(), sigmoid);
        let softplus = |v: &[Vec<f64>]| v[0].iter().map(|x| x.max(0.0) + (-x.abs()).exp().ln_1p()).collect();
        check(from_ref(&x), rounding(1), |v| v[0].softplus(), softplus);
        check_bf16(from_ref(&x), |v| v[0].softplus(), softplus);
    }
}

#[test]
fn dot_constant() {
    for len in [1, 30, 3 << 13] {
        let (x, w) = (random(&[len], 1), random(&[len], 2));
        let op = |v: &[Var]| v[0].dot_constant(tensor(v[0].device(), &w));
        let oracle = |v: &[Vec<f64>]| vec![v[0].iter().zip(&w.values).map(|(x, w)| x * f64::from(*w)).sum()];
        check(from_ref(&x), rounding(1), op, oracle);
        check_bf16(&[x], op, oracle);
    }
}

// --- elementwise ------------------------------------------------------------------------------------------------

#[test]
fn add_scale_and_reshape() {
    for shape in [vec![3, 4], vec![3 << 10, 8], vec![0, 4]] {
        let (x, y) = (random(&shape, 1), random(&shape, 2));
        let sum = |v: &[Vec<f64>]| v[0].iter().zip(&v[1]).map(|(x, y)| x + y).collect();
        check(&[x.clone(), y.clone()], rounding(1), |v| v[0].add(&v[1]), sum);
        check_bf16(&[x.clone(), y], |v| v[0].add(&v[1]), sum);
        let scaled = |v: &[Vec<f64>]| v[0].iter().map(|x| x * f64::from(-0.7f32)).collect();
        check(from_ref(&x), rounding(1), |v| v[0].scale(-0.7), scaled);
        check_bf16(from_ref(&x), |v| v[0].scale(-0.7), scaled);
        let flat = [shape.iter().product::<usize>()];
        // Exact; the differences are good to 1e-10.
        check(&[x], 1e-9, |v| v[0].reshape(&flat).reshape(&shape), |v| v[0].clone());
    }
}

/// f32 to bf16 rounds to nearest, ties to even; back is exact; the gradient passes unrounded.
#[test]
fn cast() {
    on_devices(|device| {
        // 1 + 2^-8 lies between 1 and 1 + 2^-7: a tie, as is 1 + 3 * 2^-8; 1 + 2^-8 + 2^-20 is none.
        let bit = 1.0 / 256.0;
        let values = [1.0, 1.0 + bit, 1.0 + 3.0 * bit, 1.0 + bit + bit / 4096.0, -0.3];
        let rounded = [1.0, 1.0, 1.0 + 4.0 * bit, 1.0 + 2.0 * bit, -0.300_781_25];
        let tape = Tape::new(device);
        let x = tape.leaf(Tensor::from_slice(device, &[5], &values));
        let y = x.cast(Dtype::Bf16);
        assert_eq!((y.dtype(), y.value().to_vec()), (Dtype::Bf16, rounded.to_vec()));
        let z = y.cast(Dtype::F32).cast(Dtype::F32);
        assert_eq!(z.value().to_vec(), rounded);
        let gradients = tape.backward_from(&z, Tensor::from_slice(device, &[5], &values));
        assert_eq!(gradient_of(&gradients, &x), values);
    });
}

#[test]
fn dropout() {
    let draws = Draws::new(3, Purpose::Dropout, 4, 5);
    for (rows, width, first) in [(4, 7, 0), (3, 5, 1 << 33), (1500, 9, 12)] {
        let op = |v: &[Var]| v[0].dropout(0.3, draws, RowIds::from(first..first + rows as u64));
        let kept = |i: usize| draws.uniform(first * width as u64 + i as u64) >= 0.3;
        let oracle = |v: &[Vec<f64>]| {
            let p = f64::from(0.3f32);
            v[0].iter().enumerate().map(|(i, x)| if kept(i) { x / (1.0 - p) } else { 0.0 }).collect()
        };
        check(&[random(&[rows, width], 1)], rounding(1), op, oracle);
        check_bf16(&[random(&[rows, width], 1)], op, oracle);
    }
}

/// The rows of a batch draw the same however they are cut.
#[test]
fn dropout_of_parts_is_part_of_the_dropout() {
    let (draws, x) = (Draws::new(3, Purpose::Dropout, 0, 1), random(&[10, 6], 1));
    on_devices(|device| {
        let run = |values: &[f32], rows: RowIds| {
            let x = Tensor::from_slice(device, &[values.len() / 6, 6], values);
            Tape::new(device).constant(x).dropout(0.5, draws, rows).value().to_vec()
        };
        let (head, tail) = x.values.split_at(4 * 6);
        let ids = |start: u64, rows: u64| RowIds::from(start..start + rows);
        assert_eq!([run(head, ids(100, 4)), run(tail, ids(104, 6))].concat(), run(&x.values, ids(100, 10)));
        assert_ne!(run(&x.values, ids(100, 10)), run(&x.values, ids(101, 10)));
        // In another order, too.
        let turned = [tail, head].concat();
        let want = [run(tail, ids(104, 6)), run(head, ids(100, 4))].concat();
        assert_eq!(run(&turned, RowIds::new([104..110, 100..104])), want);
    });
}

#[test]
fn dropout_keeps_its_fraction() {
    let (n, device) = (100_000, device());
    for p in [0.1f32, 0.5, 0.9] {
        let x = Tape::new(&device).constant(Tensor::from_fn(&device, &[100, n / 100], |_| 1.0));
        let y = x.dropout(p, Draws::new(1, Purpose::Dropout, 0, 0), RowIds::from(0..100)).value().to_vec();
        let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / n as f64;
        // Five standard errors of a fraction of n draws.
        let error = (f64::from(p * (1.0 - p)) / n as f64).sqrt();
        assert!((kept - f64::from(1.0 - p)).abs() < 5.0 * error, "kept {kept} at {p}");
    }
}

// --- attention --------------------------------------------------------------------------------------------------

/// `lengths[row]` are the lengths of the row's segments, whose sum is `seq`; positions start again in each.
fn attention_case(heads: usize, kv_heads: usize, head_dim: usize, lengths: &[&[usize]], rotates: bool) -> r::Attention {
    let (mut segments, mut positions) = (Vec::new(), Vec::new());
    for row in lengths {
        for (segment, &length) in row.iter().enumerate() {
            segments.extend(vec![segment as u32; length]);
            positions.extend(0..length as u32);
        }
    }
    let seq = lengths[0].iter().sum();
    let causal = true;
    r::Attention { heads, kv_heads, head_dim, seq, segments, causal, rotary: rotates.then_some((positions, 10_000.0)) }
}

fn shape_of(case: &r::Attention) -> AttentionShape {
    AttentionShape { heads: case.heads, kv_heads: case.kv_heads, head_dim: case.head_dim }
}

fn spans_of(device: &Arc<Device>, case: &r::Attention) -> AttentionSpans {
    let keys = if case.causal { causal_keys } else { segment_keys };
    let rotary = case.rotary.as_ref();
    let rotary = rotary.map(|(positions, theta)| rotary_tables(device, positions, case.head_dim, *theta as f32));
    AttentionSpans::new(device, case.seq, &keys(&case.segments, case.seq), rotary)
}

fn attend(x: &Var, case: &r::Attention) -> Var {
    x.attention(shape_of(case), &spans_of(x.device(), case))
}

#[test]
fn attention() {
    let cases = [
        attention_case(1, 1, 8, &[&[5]], false),
        attention_case(2, 1, 8, &[&[4, 3], &[7]], true),
        attention_case(3, 3, 10, &[&[1, 1, 1], &[2, 1]], true),
        // More than two blocks of 64, the last one ragged; segments that begin within a later block, so that whole
        // blocks of keys are skipped, and some that end a token before or after a block does.
        attention_case(4, 2, 8, &[&[70, 80], &[150]], true),
        attention_case(2, 2, 16, &[&[130, 70], &[63, 1, 65, 71], &[200]], false),
        attention_case(4, 1, 32, &[&[10, 3, 130, 7]], true),
        // More than one block of queries, of which a part sees keys of a block.
        attention_case(2, 1, 6, &[&[275, 90, 160]], true),
        // Heads that do not fit an accelerator's shared memory at once.
        attention_case(2, 1, 70, &[&[60, 10]], true),
        // Heads that an accelerator fills up to 64 numbers, and whole ones of 64 and 128.
        attention_case(2, 2, 40, &[&[90, 45], &[135]], true),
        attention_case(4, 2, 64, &[&[100, 30]], true),
        attention_case(1, 1, 128, &[&[70, 3]], true),
        // Numbers of columns that an accelerator's tensor cores do not have: odd, and odd in a third part.
        attention_case(2, 1, 9, &[&[90, 40]], false),
        attention_case(1, 1, 131, &[&[70]], false),
    ];
    let both_ways = cases.clone().map(|case| r::Attention { causal: false, ..case });
    for case in cases.into_iter().chain(both_ways) {
        let x = random(&[case.segments.len(), case.width()], 1);
        // Sums over the head's columns, over the keys, and in the gradient of a key over the queries of its group.
        let tolerance = rounding(case.head_dim + case.seq * case.heads / case.kv_heads);
        check(from_ref(&x), tolerance, |v| attend(&v[0], &case), |v| case.forward(&v[0]));
        // Scores and weighted values; back once more, and the scores' gradients times keys or queries.
        check_bf16_chain(3, &[x], |v| attend(&v[0], &case), |v| case.forward(&v[0]));
    }
}

/// Long rows are computed in larger blocks; texts that lie one behind the other in one are those of shorter rows.
#[test]
fn attention_in_long_rows() {
    for causal in [true, false] {
        let short = r::Attention { causal, ..attention_case(2, 1, 8, &[&[700], &[700], &[700]], true) };
        let long = r::Attention { causal, ..attention_case(2, 1, 8, &[&[700, 700, 700]], true) };
        let (x, weights) = (random(&[2100, short.width()], 1), random(&[2100, 16], 2));
        on_devices(|device| {
            let [short, long] = [&short, &long].map(|case| {
                let tape = Tape::new(device);
                let x = tape.leaf(tensor(device, &x));
                let y = attend(&x, case);
                let gradients = tape.backward(&y.dot_constant(tensor(device, &weights)));
                [y.value().to_vec(), gradient_of(&gradients, &x)]
            });
            // Sums over keys, and in a key's gradient over the queries of both heads.
            let tolerance = rounding(8 + 2 * 700);
            all_near("texts in a long row", &long[0], &short[0], tolerance);
            all_near("gradients of texts in a long row", &long[1], &short[1], tolerance);
        });
    }
}

/// Large scores, where a softmax without its maximum would overflow.
#[test]
fn attention_with_large_scores() {
    let case = attention_case(2, 1, 8, &[&[80]], false);
    let x = Operand::random(&[80, case.width()], 6.0, 1);
    // Scores reach about 100, whose rounding (100 * 2^-24) is the relative error of a weight.
    check(&[x], 100.0 * rounding(0), |v| attend(&v[0], &case), |v| case.forward(&v[0]));
}

/// Tokens one by one, and in pieces, give the rows of the attention over all of them.
#[test]
fn attention_through_a_cache() {
    for (heads, kv_heads, head_dim, rotates) in [(2, 2, 8, true), (4, 2, 40, true), (4, 1, 8, false)] {
        let case = attention_case(heads, kv_heads, head_dim, &[&[70]], rotates);
        let x = random(&[70, case.width()], 1);
        let want: Vec<(usize, f64)> =
            case.forward(&x.values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()).into_iter().enumerate().collect();
        on_devices(|device| {
            for piece in [1, 7, 70] {
                let (mut cache, mut got) = (KvCache::default(), Vec::new());
                for first in (0..70).step_by(piece) {
                    let new = &x.values[first * case.width()..][..piece * case.width()];
                    let new = Tensor::from_slice(device, &[piece, case.width()], new);
                    let positions: Vec<u32> = (first as u32..(first + piece) as u32).collect();
                    let rotary = rotates.then(|| rotary_tables(device, &positions, head_dim, 10_000.0));
                    let spans = AttentionSpans::new(device, piece, &[], rotary);
                    assert_eq!(cache.len(), first);
                    got.extend(
                        attend_cached(&new, shape_of(&case), &spans, &CachedTerms::default(), &mut cache).to_vec(),
                    );
                }
                near("cached attention", &got, &want, rounding(head_dim + 70));
                cache.clear();
                assert!(cache.is_empty());
            }
        });
    }
}

/// Of rows that end and begin with one segment's number, too.
#[test]
fn keys_are_of_the_own_segment() {
    let segments = [0, 0, 1, 1, 1, 1, 1, 9, 9, 9];
    assert_eq!(causal_keys(&segments, 5), [0..1, 0..2, 2..3, 2..4, 2..5, 0..1, 0..2, 2..3, 2..4, 2..5]);
    assert_eq!(segment_keys(&segments, 5), [0..2, 0..2, 2..5, 2..5, 2..5, 0..2, 0..2, 2..5, 2..5, 2..5]);
    assert_eq!(causal_keys(&[4, 5, 6], 3), [0..1, 1..2, 2..3]);
    assert_eq!(segment_keys(&[4, 5, 6], 3), [0..1, 1..2, 2..3]);
}

// --- the head ---------------------------------------------------------------------------------------------------

#[test]
fn linear_cross_entropy() {
    // 300 and 600 rows are more than one block, and 4200 are on an accelerator; 37 and 50 classes are no multiple of 16.
    let cases = [(6, 5, 11, 3), (4, 3, 37, 1), (300, 6, 37, 5), (600, 10, 50, 4), (4200, 4, 11, 3)];
    for (tokens, width, vocab, ignored) in cases {
        let mut targets = integers(tokens, vocab, 1);
        targets.iter_mut().step_by(ignored).for_each(|t| *t = NOWHERE);
        let (x, w, b) = (random(&[tokens, width], 1), random(&[vocab, width], 2), random(&[vocab], 3));
        let scale = 1.0 / tokens as f32;
        let op = |v: &[Var]| v[0].linear_cross_entropy(&v[1], v.get(2), &targets, scale);
        let oracle = |v: &[Vec<f64>]| {
            let head = (&v[1][..], v.get(2).map(|b| &b[..]));
            vec![r::linear_cross_entropy(&v[0], head, &targets, width, scale)]
        };
        for operands in [vec![x.clone(), w.clone()], vec![x.clone(), w.clone(), b]] {
            check(&operands, rounding(vocab.max(tokens)), op, oracle);
            check_bf16(&operands, op, oracle);
        }
        on_devices(|device| {
            let run = |tape: &Tape| op(&[tape.leaf(tensor(device, &x)), tape.leaf(tensor(device, &w))]);
            assert_eq!(run(&Tape::inference(device)).value().scalar(), run(&Tape::new(device)).value().scalar());
        });
    }
}

#[test]
fn linear_cross_entropy_of_ignored_targets_is_zero() {
    for tokens in [0, 5, 300] {
        let (x, w) = (random(&[tokens, 4], 1), random(&[9, 4], 2));
        let op = |v: &[Var]| v[0].linear_cross_entropy(&v[1], v.get(2), &vec![NOWHERE; tokens], 1.0);
        check(&[x, w, random(&[9], 3)], 0.0, op, |_| vec![0.0]);
    }
}

/// Logits far from zero, exact in f32: so is then the loss, though it is a difference of large numbers.
#[test]
fn linear_cross_entropy_of_large_logits() {
    let (x, w) = ([1024.0, -512.0], [1.0, 511.0 / 512.0, 0.5]);
    let want = r::linear_cross_entropy(&x.map(f64::from), (&w.map(f64::from), None), &[0, 2], 1, 1.0);
    on_devices(|device| {
        let tape = Tape::inference(device);
        let x = tape.constant(Tensor::from_slice(device, &[2, 1], &x));
        let w = tape.constant(Tensor::from_slice(device, &[3, 1], &w));
        let loss = x.linear_cross_entropy(&w, None, &[0, 2], 1.0);
        near("loss", &loss.value().to_vec(), &[(0, want)], rounding(3));
    });
}

#[test]
fn logits() {
    let (x, w, b) = (random(&[50, 30], 1), random(&[200, 30], 2), random(&[200], 3));
    let wide = |x: &Operand| x.values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let want = |b: Option<&[f64]>| r::linear(&wide(&x), &wide(&w), b, 30).into_iter().enumerate().collect::<Vec<_>>();
    let (want, shifted) = (want(None), want(Some(&wide(&b))));
    on_devices(|device| {
        let tape = Tape::inference(device);
        let [x, w, b] = [&x, &w, &b].map(|operand| tape.constant(tensor(device, operand)));
        let got = x.logits(&w, None);
        assert_eq!(got.shape(), [50, 200]);
        near("logits", &got.to_vec(), &want, rounding(30));
        near("logits with a bias", &x.logits(&w, Some(&b)).to_vec(), &shifted, rounding(31));
        // bf16 inputs are off by 2^-9 each, and the logits of 30 products by about that of their magnitude.
        let rough = x.cast(Dtype::Bf16).logits(&w.cast(Dtype::Bf16), None);
        near("logits of bf16", &rough.to_vec(), &want, BF16);
    });
}

// --- gradients that meet ----------------------------------------------------------------------------------------

#[test]
fn a_value_used_twice_gets_both_gradients() {
    let x = random(&[3, 4], 1);
    let times = |factor: f64| move |v: &[Vec<f64>]| v[0].iter().map(|x| x * factor).collect::<Vec<_>>();
    check(from_ref(&x), rounding(3), |v| v[0].add(&v[0]), times(2.0));
    check(from_ref(&x), rounding(3), |v| v[0].add(&v[0]).add(&v[0]), times(3.0));
    // The sum's gradient is shared by all of these before any of them is added to.
    let diamond = |v: &[Var]| {
        let (a, b) = (v[0].scale(2.0), v[0].reshape(&[12]).reshape(&[3, 4]));
        let sum = a.add(&b);
        sum.add(&a).add(&sum.add(&b)).add(&v[0])
    };
    check(from_ref(&x), rounding(8), diamond, times(10.0));
    // x x^T: both operands of one op.
    let square = |v: &[Vec<f64>]| r::matmul(&v[0], &r::transpose(&v[0], 4), 4);
    check(&[x], rounding(8), |v| v[0].linear(&v[0], None), square);
}

/// Adding gives both inputs one gradient in one memory; a later addition to either must not reach the other.
#[test]
fn gradients_in_shared_memory_stay_apart() {
    on_devices(|device| {
        let tape = Tape::new(device);
        let leaf = |stream| tape.leaf(tensor(device, &random(&[4], stream)));
        let (x, y) = (leaf(1), leaf(2));
        // Backward meets the sum first, the products after it: they add to x alone.
        let out = x.scale(3.0).add(&x.scale(5.0)).add(&x.add(&y));
        let gradients = tape.backward_from(&out, Tensor::from_slice(device, &[4], &[1.0; 4]));
        all_near("x", &gradient_of(&gradients, &x), &[9.0; 4], 0.0);
        all_near("y", &gradient_of(&gradients, &y), &[1.0; 4], 0.0);
    });
}
