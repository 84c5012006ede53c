//! Times the matrix products of the benchmarked decoders through the linear op: what `peers/pytorch/mm.py` times.
//!
//! `cargo bench --bench gemm [-- --threads N --steps N --dtype bf16 --backend cuda]`. Rows x out x in; forward is one product
//! (`y = x W^T`), backward two (`dW = g^T x`, `dx = g W`). One timed step repeats an op until it has done two GFLOP. `--shapes
//! 2048x256x256,64x1024x256` takes others.
//!
//! With `--experts E [--rows R --outer M --inner N]`, forward and backward of as many products of R rows each instead: by one
//! op, which an accelerator may do in one call, and by an op each.

#![allow(clippy::print_stdout)]

mod common;

use std::sync::Arc;

use anyhow::{Result, anyhow};
use common::{Flags, Measured, WARM_UP, dtype_name, median, milliseconds};
use guildhall::launch;
use guildhall::parallel;
use guildhall_tensor::{Device, Draws, Dtype, Parameter, Purpose, Tape, Tensor};
use serde_json::json;

/// Rows, outputs, inputs: projections, feed-forward and head of 2048 tokens; one expert's share; the swept layer's.
const SHAPES: [[usize; 3]; 9] = [
    [2048, 256, 256],
    [2048, 768, 256],
    [2048, 1024, 256],
    [2048, 256, 1024],
    [2048, 4096, 256],
    [512, 2048, 256],
    [512, 256, 1024],
    [1024, 2048, 512],
    [64, 1024, 256],
];
const FLOP_PER_STEP: usize = 2_000_000_000;

fn main() -> Result<()> {
    let flags = Flags::read();
    let (threads, steps) = (flags.get("--threads", 2), flags.steps());
    let dtype = flags.dtype();
    let config = parallel::Config { threads: Some(threads), backend: flags.backend(), ..parallel::Config::of(1, 1) };
    let experts = flags.get("--experts", 0);
    if experts > 0 {
        let shape = [flags.get("--rows", 256), flags.get("--outer", 1024), flags.get("--inner", 1024)];
        let runs = launch::run(&config, |rank| {
            Ok::<_, anyhow::Error>(by_expert(&rank.device, dtype, (experts, shape), steps))
        });
        let runs = launch::first_cause(runs, |_| false).map_err(|failure| anyhow!("{failure}"))?;
        print_experts((dtype, experts, shape), &runs[0]);
        return Ok(());
    }
    for shape in shapes(&flags)? {
        let runs = launch::run(&config, |rank| Ok::<_, anyhow::Error>(measure(&rank.device, dtype, shape, steps)));
        let runs = launch::first_cause(runs, |_| false).map_err(|failure| anyhow!("{failure}"))?;
        let (forward, backward) = &runs[0];
        print("fwd", 1, (dtype, shape), threads, forward);
        print("bwd", 2, (dtype, shape), threads, backward);
    }
    Ok(())
}

fn shapes(flags: &Flags) -> Result<Vec<[usize; 3]>> {
    let text: String = flags.get("--shapes", String::new());
    let shape = |text: &str| {
        let sides = text.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        sides.try_into().map_err(|_| anyhow!("--shapes {text}: write 2048x256x256"))
    };
    if text.is_empty() { Ok(SHAPES.to_vec()) } else { text.split(',').map(shape).collect() }
}

fn print(direction: &str, products: usize, (dtype, shape): (Dtype, [usize; 3]), threads: usize, ms: &[f64]) {
    let [rows, outer, inner] = shape;
    let gflops = (2 * products * rows * outer * inner) as f64 / median(ms) / 1e6;
    let measured = Measured {
        workload: &format!("mm {rows}x{outer}x{inner} {} {direction}", dtype_name(dtype)),
        tokens: rows,
        ms,
        losses: &[],
        notes: format!("{threads} threads, {gflops:.0} GFLOP/s, through the tape"),
    };
    measured.print(json!({ "gflops": gflops.round() }));
}

fn print_experts((dtype, experts, [rows, outer, inner]): (Dtype, usize, [usize; 3]), ms: &[Vec<f64>; 2]) {
    for (how, ms) in ["together", "one by one"].into_iter().zip(ms) {
        let gflops = (6 * experts * rows * outer * inner) as f64 / median(ms) / 1e6;
        let measured = Measured {
            workload: &format!("mm {experts} of {rows}x{outer}x{inner} {} {how}", dtype_name(dtype)),
            tokens: experts * rows,
            ms,
            losses: &[],
            notes: format!("forward and backward, {gflops:.0} GFLOP/s, through the tape"),
        };
        measured.print(json!({ "experts": experts, "gflops": gflops.round() }));
    }
}

/// Milliseconds of every timed step of all experts' products, by one op and by an op each.
fn by_expert(
    device: &Arc<Device>,
    dtype: Dtype,
    (experts, [rows, outer, inner]): (usize, [usize; 3]),
    steps: usize,
) -> [Vec<f64>; 2] {
    let numbers = |stream: u32, shape: &[usize]| {
        let draws = Draws::new(0, Purpose::Init, 0, stream);
        Tensor::from_fn(device, shape, |i| draws.uniform(i as u64) - 0.5)
    };
    // Each way's parts: weights, counts of rows, rows and gradients of results.
    let parts = |parts: usize| -> Vec<_> {
        let (each, counts) = (experts / parts * rows, vec![rows; experts / parts]);
        let part = |part: usize| {
            let weight = numbers(2 + part as u32, &[counts.len(), outer, inner]).into_dtype(dtype);
            let (x, gradient) = (numbers(0, &[each, inner]).into_dtype(dtype), numbers(1, &[each, outer]));
            (Parameter::new("weight", weight), counts.clone(), x, gradient)
        };
        (0..parts).map(part).collect()
    };
    [1, experts].map(|count| {
        let parts = parts(count);
        let step = |_| {
            let (ms, ()) = milliseconds(|| {
                for (weight, counts, x, gradient) in &parts {
                    weight.clear_gradient();
                    let tape = Tape::new(device);
                    let y = tape.leaf(x.clone()).grouped_linear(&tape.parameter(weight), None, counts);
                    tape.backward_from(&y, gradient.clone());
                }
                device.wait();
            });
            ms
        };
        (0..WARM_UP + steps).map(step).skip(WARM_UP).collect()
    })
}

/// Milliseconds of one forward, and of one backward, in every timed step.
fn measure(device: &Arc<Device>, dtype: Dtype, [rows, outer, inner]: [usize; 3], steps: usize) -> (Vec<f64>, Vec<f64>) {
    let numbers = |stream: u32, shape: [usize; 2]| {
        let draws = Draws::new(0, Purpose::Init, 0, stream);
        Tensor::from_fn(device, &shape, |i| draws.uniform(i as u64) - 0.5)
    };
    let (x, gradient) = (numbers(0, [rows, inner]).into_dtype(dtype), numbers(1, [rows, outer]));
    let weight = Parameter::new("weight", numbers(2, [outer, inner]).into_dtype(dtype));
    let repeats = (FLOP_PER_STEP / (2 * rows * outer * inner)).max(1);
    let step = |_| {
        let (mut forward, mut backward) = (0.0, 0.0);
        for _ in 0..repeats {
            weight.clear_gradient();
            let tape = Tape::new(device);
            let (ms, y) = milliseconds(|| {
                let y = tape.leaf(x.clone()).linear(&tape.parameter(&weight), None);
                device.wait();
                y
            });
            forward += ms;
            let (ms, ()) = milliseconds(|| {
                tape.backward_from(&y, gradient.clone());
                device.wait();
            });
            backward += ms;
        }
        (forward / repeats as f64, backward / repeats as f64)
    };
    (0..WARM_UP + steps).map(step).skip(WARM_UP).unzip()
}
