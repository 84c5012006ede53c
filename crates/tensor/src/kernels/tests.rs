//! Kernels whose operands are f32 or bf16: of numbers in bf16 they make what they make of the same numbers in f32, rounded
//! once.

mod census;

use std::sync::Arc;

pub(super) use census::note;

use super::*;
use crate::cpu::select::NOWHERE;
use crate::device::Device;
use crate::draws::Purpose;
use crate::dtype::Dtype;

/// As many as two threads share, and neither whole vectors nor whole runs of columns.
const ROWS: usize = 150;
const WIDTH: usize = 117;

fn devices() -> [(&'static str, Arc<Device>); 2] {
    [("the host", Device::new(2)), ("an accelerator", Device::simulated(2).expect("a C++ compiler"))]
}

fn drawn(device: &Arc<Device>, shape: &[usize], stream: u64) -> Tensor {
    let draws = Draws::new(13, Purpose::Test, stream, 0);
    Tensor::from_fn(device, shape, |i| draws.normal(i as u64))
}

/// Compares, to the bit, what a kernel makes of x `[ROWS, width]` in bf16, and in f32. What it writes in the type of x has
/// one type in one case and the other in the other; the rest is f32 in both.
#[track_caller]
fn check(width: usize, kernel: impl Fn(&Tensor) -> Vec<Tensor>) {
    for (place, device) in devices() {
        let x = drawn(&device, &[ROWS, width], 0).cast(Dtype::Bf16);
        let (got, want) = (kernel(&x), kernel(&x.to_f32()));
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            compare_bits(&format!("output {i} on {place}"), got, want);
        }
    }
}

#[track_caller]
fn compare_bits(what: &str, got: &Tensor, want: &Tensor) {
    let bits = |of: &Tensor| of.to_vec().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let off = bits(got).into_iter().zip(bits(&want.cast(got.dtype()))).position(|(got, want)| got != want);
    assert_eq!((got.len(), off), (want.len(), None), "{what}: the first that differs");
}

/// Numbers of bf16, stored as those of `like`.
fn stored(like: &Tensor, shape: &[usize], stream: u64) -> Tensor {
    drawn(like.device(), shape, stream).cast(Dtype::Bf16).cast(like.dtype())
}

/// What a kernel writes to memory of this type: every element, whatever it last held.
fn made(like: &Tensor, shape: &[usize], dtype: Dtype, write: impl FnOnce(&mut Tensor)) -> Tensor {
    let mut out = Tensor::stale(like.device(), shape, dtype);
    out.fill(f32::NAN);
    write(&mut out);
    out
}

/// What a gradient's kernel writes, and what it adds to other numbers.
fn gradients(like: &Tensor, shape: &[usize], write: impl Fn(&mut Tensor, bool)) -> [Tensor; 2] {
    let mut sum = drawn(like.device(), shape, 9);
    write(&mut sum, true);
    [made(like, shape, Dtype::F32, |d| write(d, false)), sum]
}

#[test]
fn activations() {
    for f in [Pointwise::Relu, Pointwise::Gelu, Pointwise::Sigmoid, Pointwise::Softplus] {
        check(WIDTH, |x| {
            let g = drawn(x.device(), x.shape(), 1);
            let y = made(x, x.shape(), x.dtype(), |y| activate(y, x, f));
            let slopes = gradients(x, x.shape(), |dx, accumulate| activate_back(dx, x, &g, f, accumulate));
            [y].into_iter().chain(slopes).collect()
        });
    }
}

#[test]
fn gated_products() {
    const LIMIT: f32 = 0.9;
    check(2 * WIDTH, |x| {
        let (half, g) = ([ROWS, WIDTH], drawn(x.device(), &[ROWS, WIDTH], 1));
        let plain = made(x, &half, x.dtype(), |y| swiglu(y, x, WIDTH));
        let clamped = made(x, &half, x.dtype(), |y| clamped_swiglu(y, x, WIDTH, LIMIT));
        let of_plain = gradients(x, x.shape(), |dx, accumulate| swiglu_back(dx, x, &g, WIDTH, accumulate));
        let of_clamped =
            gradients(x, x.shape(), |dx, accumulate| clamped_swiglu_back(dx, x, &g, WIDTH, LIMIT, accumulate));
        [plain, clamped].into_iter().chain(of_plain).chain(of_clamped).collect()
    });
}

#[test]
fn sums_of_either_type() {
    for (place, device) in devices() {
        let [x, y] = [0, 1].map(|stream| drawn(&device, &[ROWS, WIDTH], stream).cast(Dtype::Bf16));
        let want = made(&x, x.shape(), Dtype::F32, |out| sum(out, &x.to_f32(), &y.to_f32()));
        let types = [Dtype::F32, Dtype::Bf16];
        for (of_out, of_x, of_y) in
            types.iter().flat_map(|a| types.iter().flat_map(move |b| types.map(|c| (*a, *b, c))))
        {
            let got = made(&x, x.shape(), of_out, |out| sum(out, &x.cast(of_x), &y.cast(of_y)));
            compare_bits(&format!("{of_out:?} = {of_x:?} + {of_y:?} on {place}"), &got, &want);
        }
    }
}

#[test]
fn norms() {
    check(WIDTH, |x| {
        let (device, rows) = (x.device(), [ROWS, 2]);
        let [w, b] = [1, 2].map(|stream| drawn(device, &[WIDTH], stream));
        let g = drawn(device, x.shape(), 3);
        let [mut inverse, mut moments] = [1, 2].map(|width| Tensor::stale(device, &rows[..width], Dtype::F32));
        let plain = made(x, x.shape(), x.dtype(), |y| rms_norm(y, &mut inverse, x, &w, 1e-5));
        let centred = made(x, x.shape(), x.dtype(), |y| layer_norm(y, &mut moments, x, &w, &b, 1e-5));
        let of_weights = [
            made(x, &[WIDTH], Dtype::F32, |dw| rms_norm_back_weight(dw, x, &g, &inverse)),
            made(x, &[WIDTH], Dtype::F32, |dw| layer_norm_back_weight(dw, x, &g, &moments)),
        ];
        let of_plain = gradients(x, x.shape(), |dx, accumulate| rms_norm_back(dx, x, &w, &g, &inverse, accumulate));
        let of_centred = gradients(x, x.shape(), |dx, accumulate| layer_norm_back(dx, x, &w, &g, &moments, accumulate));
        let all = [plain, centred, inverse, moments].into_iter().chain(of_weights);
        all.chain(of_plain).chain(of_centred).collect()
    });
}

#[test]
fn columns_of_matrices() {
    const REPEATS: usize = 3;
    let range = ColumnRange { of: WIDTH, first: 5, count: 71 };
    check(WIDTH, |x| {
        let some = made(x, &[ROWS, range.count], x.dtype(), |out| columns(out, x, range, false));
        let wide = gradients(x, &[ROWS, range.count], |out, accumulate| columns(out, x, range, accumulate));
        let few = stored(x, &[ROWS / REPEATS, 19], 1);
        // Of either type beside one of the other, too.
        let both = [x, &x.to_f32()]
            .map(|x| made(x, &[ROWS, WIDTH + 19], few.dtype(), |out| beside(out, x, &few, [WIDTH, 19], REPEATS)));
        [some].into_iter().chain(wide).chain(both).collect()
    });
}

/// Of numbers that bf16 does not hold.
#[test]
fn columns_are_summed_while_they_are_converted() {
    for (place, device) in devices() {
        let x = drawn(&device, &[ROWS, WIDTH], 0);
        let sums = made(&x, &[WIDTH], Dtype::F32, |sums| column_sums(sums, &x, ROWS, false));
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut found = Tensor::filled(&device, &[WIDTH], f32::NAN);
            let converted = made(&x, x.shape(), dtype, |out| convert_and_sum(out, &mut found, &x));
            compare_bits(&format!("{dtype:?} on {place}"), &converted, &x.cast(dtype));
            compare_bits(&format!("sums beside {dtype:?} on {place}"), &found, &sums);
        }
    }
}

#[test]
fn rows_by_index() {
    const TOKENS: usize = 140;
    let width = Width { k: 2, row: WIDTH };
    check(WIDTH, |x| {
        let index: Vec<u32> = (0..2 * TOKENS as u32).map(|i| i * 77 % ROWS as u32).collect();
        let places: Vec<u32> = index.iter().map(|&i| if i % 7 == 0 { u32::MAX } else { i }).collect();
        let [index, places] = [index, places].map(|rows| Tensor::from_index(x.device(), &rows));
        let (w, g) = (drawn(x.device(), &[TOKENS, 2], 1), drawn(x.device(), &[TOKENS, WIDTH], 2));
        let lines = [2 * TOKENS, WIDTH];
        let rows = made(x, &lines, x.dtype(), |out| gather(out, x, &index, WIDTH, false));
        let wide = gradients(x, &lines, |out, accumulate| gather(out, x, &index, WIDTH, accumulate));
        let sums = made(x, &[TOKENS, WIDTH], x.dtype(), |out| weighted_sum(out, x, &w, &places, width));
        let dw = made(x, &[TOKENS, 2], Dtype::F32, |dw| weighted_sum_back_weights(dw, x, &g, &places, width));
        let to: Vec<u32> = (0..ROWS as u32).map(|row| row * 77 % TOKENS as u32).collect();
        let to = Tensor::from_index(x.device(), &to);
        let added = gradients(x, &[TOKENS, WIDTH], |out, accumulate| scatter_add(out, x, &to, WIDTH, accumulate));
        [rows, sums, dw].into_iter().chain(wide).chain(added).collect()
    });
}

#[test]
fn rows_that_carry_others() {
    const CARRIERS: usize = 30;
    check(WIDTH, |x| {
        let order: Vec<u32> = (0..ROWS as u32).map(|i| i * 77 % ROWS as u32).collect();
        let carriers: Vec<u32> = (0..ROWS as u32).map(|i| if i % 5 == 0 { i / 5 } else { NOWHERE }).collect();
        let outs: Vec<u32> = (0..CARRIERS as u32).map(|c| 5 * c).collect();
        let at: Vec<u32> = outs.iter().map(|&out| order[out as usize]).collect();
        let [order, carriers, outs, at] = [order, carriers, outs, at].map(|rows| Tensor::from_index(x.device(), &rows));
        let (w, g) = (drawn(x.device(), &[CARRIERS, 1], 1), drawn(x.device(), x.shape(), 2));
        let carried = stored(x, &[CARRIERS, WIDTH], 3);
        let rows = made(x, x.shape(), x.dtype(), |out| carry(out, x, &w, &carried, &order, &carriers, WIDTH));
        let dw = made(x, &[CARRIERS, 1], Dtype::F32, |dw| carry_back_weights(dw, x, &g, &at, &outs, WIDTH));
        vec![rows, dw]
    });
}

#[test]
fn attention_with_relative_positions() {
    let shape = RelativeAttentionSizes { seq: ROWS / 2, heads: 2, head_dim: 8, reach: 41 };
    check(16, |q| {
        let device = q.device();
        let (kv, distances) = (stored(q, &[ROWS, 32], 1), stored(q, &[shape.reach, 16], 2));
        let ([u, v], g) = ([3, 4].map(|stream| drawn(device, &[2, 8], stream)), drawn(device, &[ROWS, 16], 5));
        let place = |t: u32| t % shape.seq as u32;
        let keys = [|t: u32| t.saturating_sub(40), |t: u32| t / 30 * 30];
        let [first, own] = keys.map(|key| {
            let keys: Vec<u32> = (0..ROWS as u32).map(|t| key(place(t))).collect();
            Tensor::from_index(device, &keys)
        });
        let mut lse = Tensor::stale(device, &[ROWS, 2], Dtype::F32);
        let out = made(q, q.shape(), Dtype::F32, |out| {
            relative_attention(out, &mut lse, q, &kv, &distances, &u, &v, &first, &own, shape);
        });
        let kept = out.cast(Dtype::Bf16).cast(q.dtype());
        let sizes = [q.len(), kv.len(), kv.len(), 2 * distances.len(), 2 * u.len(), 2 * v.len()];
        let mut slopes = sizes.map(|len| Tensor::filled(device, &[len], f32::NAN));
        let [dq, dkv, remembered, ddistances, du, dv] = slopes.each_mut();
        relative_attention_back(
            dq, dkv, remembered, ddistances, du, dv, q, &kv, &distances, &u, &v, &first, &own, &kept, &lse, &g, shape,
        );
        [out, lse].into_iter().chain(slopes).collect()
    });
}

/// By the gradient of values, to which what comes back is multiplied as it is.
#[test]
fn attention_of_bf16_rounds_what_comes_back() {
    const SEQ: usize = ROWS / 2;
    for (place, device) in devices() {
        let shape = AttentionSizes {
            rows: 2,
            seq: SEQ,
            key_seq: SEQ,
            heads: 2,
            kv_heads: 2,
            head_dim: 8,
            value_dim: 8,
            rotary_dim: 0,
            pairs: Default::default(),
            scale: 0.4,
        };
        let keys: Vec<u32> = (0..ROWS as u32).flat_map(|t| [0, t % SEQ as u32 + 1]).collect();
        let (keys, none) = (Tensor::from_index(&device, &keys), Tensor::zeros(&device, &[0]));
        let (qkv, g) = (drawn(&device, &[ROWS, 48], 0), drawn(&device, &[ROWS, 16], 1));
        let gradient_of_values = |qkv: &Tensor, g: &Tensor| {
            let mut lse = Tensor::stale(&device, &[ROWS, 2], Dtype::F32);
            let out =
                made(qkv, &[ROWS, 16], Dtype::F32, |out| attention(out, &mut lse, qkv, &keys, &none, &none, shape));
            let back = made(qkv, qkv.shape(), Dtype::F32, |dqkv| {
                attention_back(dqkv, qkv, &out, &lse, g, &keys, &none, &none, shape);
            });
            back.to_vec().chunks(48).flat_map(|line| line[32..].to_vec()).map(f32::to_bits).collect::<Vec<_>>()
        };
        for (dtype, rounds) in [(Dtype::Bf16, true), (Dtype::F32, false)] {
            let (qkv, rounded) = (qkv.cast(dtype), g.cast(Dtype::Bf16).to_f32());
            let same = gradient_of_values(&qkv, &g) == gradient_of_values(&qkv, &rounded);
            assert_eq!(same, rounds, "{dtype:?} on {place}");
        }
    }
}

/// By sorting, which keeps equal ones in their order: with ties, both zeros, NaN, and more asked for than there are.
#[test]
fn the_largest_of_each_row() {
    for (place, device) in devices() {
        for (rows, width, k) in [(600, 16, 4), (40, 5, 5), (7, 3, 4), (0, 4, 2), (300, 1, 1)] {
            let draws = Draws::new(3, Purpose::Test, width as u64, 0);
            let score = |i: usize| match draws.bits(i as u64) % 11 {
                0 => f32::NAN,
                1 => -0.0,
                2 => f32::NEG_INFINITY,
                few => few as f32 - 5.0,
            };
            let scores: Vec<f32> = (0..rows * width).map(score).collect();
            let of_row = |row: &[f32]| {
                let key = |&column: &u32| match row[column as usize] {
                    score if score.is_nan() => f32::NEG_INFINITY,
                    score => score + 0.0,
                };
                let mut columns: Vec<u32> = (0..width as u32).collect();
                columns.sort_by(|one, other| key(other).total_cmp(&key(one)));
                columns.resize(k.max(width), NOWHERE);
                columns[..k].to_vec()
            };
            let want: Vec<u32> = scores.chunks_exact(width).flat_map(of_row).collect();
            let got = Tensor::from_slice(&device, &[rows, width], &scores).top_k(k);
            assert_eq!(got.elements(0..rows * k).into_owned().into_u32s(), want, "{rows} x {width}, {k} on {place}");
        }
    }
}
