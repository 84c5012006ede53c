//! AdamW on strips of a tensor, against the update of one element written down; and sums of squares.

use std::sync::Arc;

use guildhall_tensor::ops::{AdamW, SquareSums, Strips};
use guildhall_tensor::{Device, Draws, Dtype, Purpose, Tensor, to_host};

const RULE: AdamW =
    AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3, gradient_scale: 0.5 };

fn drawn(device: &Arc<Device>, len: usize, number: u32) -> Tensor {
    let draws = Draws::new(5, Purpose::Test, 0, number);
    Tensor::from_fn(device, &[len], |i| draws.normal(i as u64))
}

/// Weight, m and v after a step.
fn element([w, g, m, v]: [f32; 4]) -> [f32; 3] {
    let g = g * RULE.gradient_scale;
    let (m, v) = (RULE.beta1 * m + (1.0 - RULE.beta1) * g, RULE.beta2 * v + (1.0 - RULE.beta2) * g * g);
    let correct = |beta: f32| 1.0 / (1.0 - f64::from(beta).powi(3)) as f32;
    let update = m * correct(RULE.beta1) / ((v * correct(RULE.beta2)).sqrt() + RULE.eps);
    [w * (1.0 - RULE.lr * RULE.weight_decay) - RULE.lr * update, m, v]
}

/// The kernels of accelerators, each of whose results is compared with the CPU's on the way.
fn simulated() -> Arc<Device> {
    Device::simulated(1).expect("a C++ compiler")
}

/// State `[m | v | master | gradient]`, of which a tile in the middle is worked on: of each way to hand over the gradient,
/// and of weights and gradients of both types, on as many threads as a device has and by the kernels of
/// accelerators.
#[test]
fn a_tile_is_updated_and_nothing_beside_it() {
    const STRIDE: usize = 20_000;
    let (first, len) = (37, 16_411);
    let cases = [
        (1, Dtype::F32, Dtype::F32, false),
        (2, Dtype::F32, Dtype::F32, true),
        (2, Dtype::Bf16, Dtype::F32, false),
        (1, Dtype::Bf16, Dtype::Bf16, false),
        (2, Dtype::Bf16, Dtype::F32, true),
    ];
    let accelerator = simulated();
    let on_host = cases.map(|(threads, dtype, gradients, is_strip)| (Device::new(threads), dtype, gradients, is_strip));
    let accelerated = cases.map(|(_, dtype, gradients, is_strip)| (accelerator.clone(), dtype, gradients, is_strip));
    for (device, dtype, gradients, is_strip) in on_host.into_iter().chain(accelerated) {
        let own = if dtype == Dtype::F32 { 2 } else { 3 };
        let strips = Strips { first, stride: STRIDE, count: own + usize::from(is_strip), len };
        let mut state: Vec<f32> = drawn(&device, 4 * STRIDE, 0).to_vec();
        state[STRIDE..2 * STRIDE].iter_mut().for_each(|v| *v = v.abs());
        let mut state = Tensor::from_slice(&device, &[4 * STRIDE], &state);
        let (mut weights, gradient) =
            (drawn(&device, STRIDE, 1).cast(dtype), drawn(&device, STRIDE, 2).cast(gradients));
        let (before, weights_before, from) = (state.to_vec(), weights.to_vec(), 11);
        match is_strip {
            true => RULE.update_by_strip((&mut weights, 5), (&mut state, strips)),
            false => RULE.update((&mut weights, 5), (&gradient, from), (&mut state, strips)),
        }
        let (mut want, mut want_weights, sent) = (before.clone(), weights_before.clone(), gradient.to_vec());
        for i in 0..len {
            let at = |strip: usize| strips.range(strip).start + i;
            let g = if is_strip { before[at(own)] } else { sent[from + i] };
            let w = if own == 3 { before[at(2)] } else { weights_before[5 + i] };
            let [w, m, v] = element([w, g, before[at(0)], before[at(1)]]);
            (want[at(0)], want[at(1)]) = (m, v);
            if own == 3 {
                want[at(2)] = w;
            }
            want_weights[5 + i] = w;
        }
        let want_weights = Tensor::from_slice(&device, &[STRIDE], &want_weights).cast(dtype).to_vec();
        let what = format!("{} threads, {dtype:?}, {gradients:?}, {is_strip}", device.threads());
        // The compiler may fuse a product and a sum: one rounding of each term.
        let near = |got: &[f32], want: &[f32], bound: f32| {
            got.iter().zip(want).all(|(g, w)| g == w || (g - w).abs() <= bound * w.abs().max(1.0))
        };
        assert!(near(&state.to_vec(), &want, 1e-6), "{what}: state");
        let bound = if dtype == Dtype::F32 { 1e-6 } else { 1e-2 };
        assert!(near(&weights.to_vec(), &want_weights, bound), "{what}: weights");
        let beside = |all: &[f32], range: std::ops::Range<usize>| [&all[..range.start], &all[range.end..]].concat();
        assert_eq!(beside(&weights.to_vec(), 5..5 + len), beside(&weights_before, 5..5 + len), "{what}");
        for strip in 0..4 {
            let range = strip * STRIDE + first..strip * STRIDE + first + len;
            let [got, was] = [&state.to_vec(), &before].map(|all| {
                beside(
                    &all[strip * STRIDE..(strip + 1) * STRIDE],
                    range.start - strip * STRIDE..range.end - strip * STRIDE,
                )
            });
            assert_eq!(got, was, "{what}: strip {strip}");
        }
    }
}

/// The same bits on any number of threads, of f32 and of what is stored in less; added to what is there.
#[test]
fn squares_are_summed_in_f64() {
    let sums = |device: &Arc<Device>, dtype: Dtype| {
        let x = drawn(device, 200_003, 7).cast(Dtype::Bf16).cast(dtype);
        let mut sums = SquareSums::zeros(device, 3);
        sums.add(1, &x, 10..150_000);
        sums.add(1, &x, 150_000..200_003);
        sums.add(2, &x, 4..5);
        let crossings = device.crossings();
        let got = to_host(&[sums.tensor()]).remove(0).into_f64s();
        assert_eq!(device.crossings() - crossings, 1);
        let exact =
            |range: std::ops::Range<usize>| x.to_vec()[range].iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        // Of 2e5 terms in another order.
        assert!((got[1] / exact(10..200_003) - 1.0).abs() < 1e-13 && got[2] == exact(4..5) && got[0] == 0.0, "{got:?}");
        got
    };
    let want = sums(&Device::new(1), Dtype::F32);
    for (threads, dtype) in [(2, Dtype::F32), (1, Dtype::Bf16), (3, Dtype::Bf16)] {
        assert_eq!(sums(&Device::new(threads), dtype), want, "{threads}, {dtype:?}");
    }
    // In another order, but in the same one for both types.
    assert_eq!(sums(&simulated(), Dtype::F32), sums(&simulated(), Dtype::Bf16));
}

/// More tiles than a block of an accelerator has threads, the last of them short; of tiles of one block and of several. The
/// numbers are of sizes so different that their sums are rounded.
#[test]
fn tiles_of_one_call_have_the_bits_of_a_call_for_each() {
    const LEN: usize = 70 * SquareSums::BLOCK + 12_345;
    let range = 7..LEN;
    let sums = |device: &Arc<Device>, dtype: Dtype, tile: usize| {
        let draws = Draws::new(5, Purpose::Test, 0, 9);
        let x = Tensor::from_fn(device, &[LEN], |i| (4.0 * draws.normal(i as u64)).exp());
        let x = x.cast(Dtype::Bf16).cast(dtype);
        let mut sums = SquareSums::zeros(device, 2);
        for sum in 0..2 {
            sums.add(sum, &x, 3..5);
        }
        sums.add_tiles(0, &x, range.clone(), tile);
        for first in range.clone().step_by(tile) {
            sums.add(1, &x, first..LEN.min(first + tile));
        }
        let [at_once, one_by_one] = to_host(&[sums.tensor()]).remove(0).into_f64s().try_into().expect("two sums");
        assert_eq!(at_once.to_bits(), one_by_one.to_bits(), "{dtype:?} by {tile}: {at_once} and {one_by_one}");
        at_once
    };
    let mut found = Vec::new();
    for blocks in [1, 3, 16] {
        let sums = |device: &Arc<Device>, dtype| sums(device, dtype, blocks * SquareSums::BLOCK);
        let want = sums(&Device::new(1), Dtype::F32);
        for device in [Device::new(1), Device::new(3), simulated()] {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                assert_eq!(sums(&device, dtype).to_bits(), want.to_bits(), "{blocks} blocks, {dtype:?}, {device:?}");
            }
        }
        found.push(want.to_bits());
    }
    found.dedup();
    assert!(found.len() > 1, "sums that any order gives show nothing of it");
}

#[test]
#[should_panic(expected = "no whole blocks")]
fn tiles_are_whole_blocks() {
    let device = Device::new(1);
    SquareSums::zeros(&device, 1).add_tiles(0, &Tensor::zeros(&device, &[9]), 0..9, 100);
}
