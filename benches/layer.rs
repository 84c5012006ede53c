//! Times one MoE feed-forward, forward and backward: what `peers/pytorch/layer.py` times.
//!
//! ```text
//! cargo bench --bench layer                                    4096 tokens, 256 wide, 1024 inside, 8 experts
//! cargo bench --bench layer -- --sweep                         512 wide, 2048 inside, 4 to 64 experts
//! cargo bench --bench layer -- --tokens S --model M --inner F --experts E --k K --dtype f32|bf16
//! cargo bench --bench layer -- --backend cuda                  on a GPU
//! cargo bench --bench layer -- --kernels                       and how long each kernel takes
//! ```
//!
//! Experts are two products with GELU between, or with `--gated` SwiGLU's three, and no biases; there are no auxiliary losses. The gradients of the
//! tokens and of all weights are computed.
//!
//! `--kernels` takes as many steps once more, in which every kernel is waited for, and prints a line a kernel below that of
//! the layer, the longest first: the milliseconds and the calls of a step. The timed steps have nothing of it.

#![allow(clippy::print_stdout)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use common::{Flags, Measured, WARM_UP, dtype_name, median, milliseconds};
use guildhall::launch::{self, Rank};
use guildhall::moe::{Outgoing, Plan, Routing, combine, dispatch, send_home};
use guildhall::parallel::{self, Mesh};
use guildhall_tensor::{Device, Draws, Dtype, KernelTime, Parameter, Purpose, Tape, Tensor, Var, to_host};
use serde_json::json;

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    model: usize,
    inner: usize,
    experts: usize,
    k: usize,
    dtype: Dtype,
    /// SwiGLU's experts.
    gated: bool,
}

impl Shape {
    /// Products of an expert, forward.
    fn products(self) -> usize {
        if self.gated { 3 } else { 2 }
    }
}

fn main() -> Result<()> {
    let flags = Flags::read();
    let sweep = flags.has("--sweep");
    let (model, inner) = if sweep { (512, 2048) } else { (256, 1024) };
    let shape = Shape {
        tokens: flags.get("--tokens", 4096),
        model: flags.get("--model", model),
        inner: flags.get("--inner", inner),
        experts: flags.get("--experts", 8),
        k: flags.get("--k", 2),
        dtype: flags.dtype(),
        gated: flags.has("--gated"),
    };
    let experts = if sweep { vec![4, 8, 16, 32, 64] } else { vec![shape.experts] };
    let threads = flags.get("--threads", 2);
    let config = parallel::Config { threads: Some(threads), backend: flags.backend(), ..parallel::Config::of(1, 1) };
    for experts in experts {
        let shape = Shape { experts, ..shape };
        let runs = launch::run(&config, |rank| measure(&rank, shape, flags.steps(), flags.has("--kernels")));
        let runs = launch::first_cause(runs, |_| false).map_err(|failure| anyhow!("{failure}"))?;
        let (ms, kernels) = &runs[0];
        print(shape, threads, ms);
        print_kernels(kernels, flags.steps());
    }
    Ok(())
}

fn print(shape: Shape, threads: usize, ms: &[f64]) {
    let Shape { tokens, model, inner, experts, k, dtype, gated } = shape;
    let gflops = (6 * shape.products() * tokens * k * model * inner) as f64 / median(ms) / 1e6;
    let (sort, activation) = if gated { ("moe-swiglu", "SwiGLU") } else { ("moe-ffn", "tanh GELU") };
    let measured = Measured {
        workload: &format!("{sort} S{tokens} M{model} F{inner} k{k} E{experts} {} fwd+bwd", dtype_name(dtype)),
        tokens,
        ms,
        losses: &[],
        notes: format!("{threads} threads, {activation}, {gflops:.0} GFLOP/s of the experts' products"),
    };
    measured.print(json!({ "experts": experts, "gflops": gflops.round() }));
}

/// Lines that none takes for the JSON of a layer.
fn print_kernels(kernels: &BTreeMap<&'static str, KernelTime>, steps: usize) {
    let mut kernels: Vec<_> = kernels.iter().collect();
    kernels.sort_by_key(|(_, kernel)| std::cmp::Reverse(kernel.time));
    for (name, KernelTime { calls, time, .. }) in kernels {
        let (ms, calls) = (time.as_secs_f64() * 1e3 / steps as f64, *calls as f64 / steps as f64);
        println!("{ms:>10.3} ms {calls:>8.1} calls  {name}");
    }
}

struct Layer {
    router: Parameter,
    first: Parameter,
    second: Parameter,
}

/// Milliseconds of every timed step and, of as many more, the kernels' times.
fn measure(
    rank: &Rank,
    shape: Shape,
    steps: usize,
    with_kernels: bool,
) -> Result<(Vec<f64>, BTreeMap<&'static str, KernelTime>)> {
    let mesh = Mesh::new(rank.world.clone(), rank.world.size())?;
    let Shape { tokens, model, inner, experts, dtype, .. } = shape;
    let (device, first) = (&rank.device, inner * (shape.products() - 1));
    let layer = Layer {
        router: Parameter::new("router", normal(device, &[experts, model], model)),
        first: Parameter::new("first", uniform(device, &[experts, first, model], model).cast(dtype)),
        second: Parameter::new("second", uniform(device, &[experts, model, inner], inner).cast(dtype)),
    };
    let x = normal(device, &[tokens, model], 1).cast(dtype);
    let gradient = normal(device, &[tokens, model], 1);
    let step = |_| {
        let (ms, result) = milliseconds(|| layer.step((rank, &mesh), &x, &gradient, shape));
        device.trim();
        result.map(|()| ms)
    };
    let ms = (0..WARM_UP + steps).map(step).collect::<Result<Vec<_>>>()?.split_off(WARM_UP);
    if with_kernels {
        // From this call on kernels are timed.
        device.take_kernel_times();
        (0..steps).try_for_each(|number| step(number).map(drop))?;
        return Ok((ms, device.take_kernel_times()));
    }
    Ok((ms, BTreeMap::new()))
}

impl Layer {
    fn step(&self, (rank, mesh): (&Rank, &Mesh), x: &Tensor, gradient: &Tensor, shape: Shape) -> Result<()> {
        for parameter in [&self.router, &self.first, &self.second] {
            parameter.clear_gradient();
        }
        let tape = Tape::new(&rank.device);
        let y = self.forward(mesh, &tape.leaf(x.clone()), shape)?;
        tape.try_backward_from(&y, gradient.clone()).map_err(|failure| anyhow!("{failure}"))?;
        rank.device.wait();
        Ok(())
    }

    fn forward(&self, mesh: &Mesh, x: &Var, shape: Shape) -> Result<Var> {
        let (tape, k) = (x.tape(), shape.k);
        // A router computes in f32 whatever the model is stored in.
        let logits = x.cast(Dtype::F32).linear(&tape.parameter(&self.router), None);
        let (experts, probabilities) = (logits.value().cols(), logits.softmax());
        // The device finds the largest, as for a model's gates; only their indices come to the host.
        let chosen = to_host(&[&logits.value().top_k(k)]).remove(0).into_u32s();
        let routing = Routing::new(chosen, k, experts);
        let weights = probabilities.select_normalised(&routing.expert, k);
        let plan = Plan::new(&routing, mesh.expert_table(experts), mesh.expert.rank()).exchange(mesh)?;
        let (step, arriving) =
            (&plan.steps[0], dispatch(&Outgoing::new(x, &plan.plan, &mesh.tensor), &plan, &mesh.expert)?);
        let rows = arriving.into_iter().next().expect("one step").finish()?;
        let (rows, counts) = (step.sorting.sort(rows), &step.sorting.rows_per_expert);
        let (first, second) = (tape.parameter(&self.first), tape.parameter(&self.second));
        let rows = if shape.gated {
            rows.grouped_swiglu(&first, &second, counts)
        } else {
            rows.grouped_linear(&first, None, counts).gelu().grouped_linear(&second, None, counts)
        };
        let rows = step.sorting.unsort(rows);
        Ok(combine(vec![send_home(rows, step, &mesh.expert)?.finish()?], &plan, &weights, &mesh.tensor)?)
    }
}

/// Normal draws of variance `1 / fan_in`, different for every shape.
fn normal(device: &Arc<Device>, shape: &[usize], fan_in: usize) -> Tensor {
    let stream = shape.iter().fold(fan_in as u32, |stream, &n| stream.wrapping_mul(31).wrapping_add(n as u32));
    let draws = Draws::new(0, Purpose::Init, 0, stream);
    let std = (fan_in as f32).sqrt().recip();
    Tensor::from_fn(device, shape, |i| draws.normal(i as u64) * std)
}

/// Draws of variance `1 / fan_in` that take little time: the weights of many experts.
fn uniform(device: &Arc<Device>, shape: &[usize], fan_in: usize) -> Tensor {
    let (mut state, width) = (fan_in as u64, (12.0 / fan_in as f32).sqrt());
    Tensor::from_fn(device, shape, |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * width
    })
}
