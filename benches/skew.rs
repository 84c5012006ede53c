//! Times one MoE layer, forward and backward, while some experts get far more rows than others, over links that charge
//! for messages: plainly, with the smart schedule, with shadowing, and with both; each with ranks that keep their threads to
//! themselves, and with ranks whose threads stand by while they wait (`parallel.standby`).
//!
//! ```text
//! cargo bench --bench skew -- [--ranks 2] [--gbytes-per-s 0.125] [--latency-us 50] [--tokens 4096] [--steps 9]
//! cargo bench --bench skew -- --gbytes-per-s 0         messages cost what they cost between threads
//! ```
//!
//! A token's two experts are drawn without return with chances that fall as `1 / rank^s` (Zipf) for several s; rank 0
//! holds the most popular. The four ways take turns. The links are an emulation: these are not times of a network.

#![allow(clippy::print_stdout)]

mod common;

use std::sync::Arc;

use anyhow::{Result, anyhow};
use common::{Flags, Measured, WARM_UP, milliseconds};
use guildhall::launch::{self, Rank};
use guildhall::moe::gates::{BalanceKind, Gate, Perturbation, Tokens};
use guildhall::moe::migration::FollowingWork;
use guildhall::moe::{
    Activation, BalanceScope, Beside, Experts, ExpertsShape, Facts, GateState, History, Homes, Importance, MoeLayer,
    Router, Selector, Shadowing, StepFacts, Transport, Weighting,
};
use guildhall::parallel::{self, Init, LinkCost, Mesh, Parameters, Rows, Spread};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape, Tensor};
use serde_json::json;

const MODEL: usize = 256;
const INNER: usize = 1024;
const EXPERTS: usize = 8;
const K: usize = 2;
const EXPONENTS: [f64; 4] = [0.0, 0.5, 1.0, 1.5];
const WAYS: [&str; 4] = ["plain", "smart", "shadowing", "smart, shadowing"];

/// Experts by popularity alone.
#[derive(Clone, Copy, Debug)]
struct Zipf {
    exponent: f64,
}

impl Gate for Zipf {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let draws = Draws::new(1, Purpose::Gate, 0, 0);
        let choice = |t: usize| {
            let mut left: Vec<(u32, f64)> =
                (0..tokens.experts).map(|e| (e as u32, ((e + 1) as f64).powf(-self.exponent))).collect();
            let pick = |j: usize| {
                let u = f64::from(draws.uniform((tokens.first + t as u64) * K as u64 + j as u64));
                let mut at = u * left.iter().map(|(_, chance)| chance).sum::<f64>();
                let below = |(_, chance): &(u32, f64)| {
                    at -= chance;
                    at < 0.0
                };
                let place = left.iter().position(below).unwrap_or(left.len() - 1);
                left.remove(place).0
            };
            (0..K).map(pick).collect::<Vec<u32>>()
        };
        (0..tokens.len()).flat_map(choice).collect()
    }

    fn slots(&self) -> usize {
        K
    }

    fn weighting(&self) -> Weighting {
        Weighting::Normalised
    }
}

fn main() -> Result<()> {
    let flags = Flags::read();
    let (ranks, tokens): (usize, usize) = (flags.get("--ranks", 2), flags.get("--tokens", 4096));
    let link = LinkCost {
        message_us: 0.0,
        latency_us: flags.get("--latency-us", 50.0),
        gbytes_per_s: flags.get("--gbytes-per-s", 0.125),
    };
    let threads = (flags.get("--threads", 2) / ranks).max(1);
    let of = |standby| parallel::Config {
        threads: Some(threads),
        link: (link.gbytes_per_s > 0.0).then_some(link),
        standby,
        ..parallel::Config::of(ranks, ranks)
    };
    for (exponent, standby) in EXPONENTS.into_iter().flat_map(|exponent| [(exponent, false), (exponent, true)]) {
        let config = of(standby);
        let runs = launch::run(&config, |rank| measure(&rank, exponent, tokens / ranks, flags.steps()));
        let runs = launch::first_cause(runs, |_| false).map_err(|failure| anyhow!("{failure}"))?;
        for (way, name) in WAYS.iter().enumerate() {
            // A step ends when the last rank is through.
            let slowest = |step: usize| runs.iter().map(|run| run[way].ms[step]).fold(0.0, f64::max);
            let ms: Vec<f64> = (WARM_UP..WARM_UP + flags.steps()).map(slowest).collect();
            let measured = Measured {
                workload: &format!(
                    "moe layer S{tokens} M{MODEL} F{INNER} k{K} E{EXPERTS} x{ranks}, zipf {exponent}, {name}{}",
                    if standby { ", standby" } else { "" }
                ),
                tokens,
                ms: &ms,
                losses: &[],
                notes: match config.link {
                    Some(link) => format!("emulated link of {} us and {} GB/s", link.latency_us, link.gbytes_per_s),
                    None => "no emulated link".to_owned(),
                },
            };
            measured.print(json!({
                "zipf": exponent,
                "way": name,
                "standby": standby,
                "shadowed": runs[0][way].shadowed,
                "busiest_rank_share": runs[0][way].busiest,
            }));
        }
    }
    Ok(())
}

/// One way's steps on one rank.
#[derive(Default)]
struct Run {
    ms: Vec<f64>,
    shadowed: usize,
    /// Rows of the rank with most, of all rows, if nothing is shadowed.
    busiest: f64,
}

fn measure(rank: &Rank, exponent: f64, tokens: usize, steps: usize) -> Result<[Run; 4]> {
    let (device, ranks) = (&rank.device, rank.world.size());
    let mesh = Mesh::new(rank.world.clone(), ranks)?.measured(device, Dtype::F32)?;
    let normal = |stream: u32| {
        let draws = Draws::new(0, Purpose::Test, rank.world.rank() as u64, stream);
        Tensor::from_fn(device, &[tokens, MODEL], |i| draws.normal(i as u64))
    };
    let (x, gradient) = (normal(0), normal(1));
    let importance = Importance::new(&vec![0; tokens], tokens, vec![true; tokens], 1.0);
    let mut layer = layer(rank, &mesh, exponent);
    let mut runs: [Run; 4] = Default::default();
    for step in 0..(WARM_UP + steps) * WAYS.len() {
        let (way, run) = (step % WAYS.len(), &mut runs[step % WAYS.len()]);
        layer.transport.groups = if way % 2 == 1 { ranks } else { 1 };
        layer.transport.shadowing = if way >= 2 { Shadowing::Auto } else { Shadowing::Off };
        layer.visit(&mut |weight| weight.parameter.clear_gradient());
        let stream = mesh.stream(Rows::consecutive((rank.world.rank() * tokens) as u64, tokens));
        let facts = Facts {
            importance: &importance,
            homes: &Homes::default(),
            history: &History::default(),
            step: &StepFacts::of_training(0, 1),
        };
        // So that no rank's lateness in one step is another's in the next.
        rank.world.barrier()?;
        let (ms, output) = milliseconds(|| -> Result<_> {
            let tape = Tape::new(device);
            let output = layer.forward(&tape.leaf(x.clone()), &stream, &facts, &mesh)?;
            tape.try_backward_from(&output.y, gradient.clone()).map_err(|failure| anyhow!("{failure}"))?;
            Ok((output.shadowed.len(), output.counts.load))
        });
        let (shadowed, load) = output?;
        device.trim();
        run.ms.push(ms);
        run.shadowed = shadowed;
        let share = load.len() / ranks;
        let busiest = load.chunks(share).map(|load| load.iter().sum::<u64>()).max().unwrap_or(0);
        run.busiest = busiest as f64 / load.iter().sum::<u64>() as f64;
    }
    Ok(runs)
}

fn layer(rank: &Rank, mesh: &Mesh, exponent: f64) -> MoeLayer {
    let (device, transport) = (&rank.device, Transport::plain(EXPERTS, mesh));
    let shape = ExpertsShape {
        local: transport.table.of(mesh.expert.rank()).to_vec(),
        d_model: MODEL,
        d_expert: INNER,
        activation: Activation::Gelu,
        spread: Spread::Expert(mesh.expert.size()),
        slice: (0, 1),
    };
    let init = Init::Normal { std: 0.05, seed: 0 };
    MoeLayer {
        condensation: None,
        is_causal: true,
        following: FollowingWork::default(),
        index: 0,
        stack: 0,
        router: Router::new(device, "gate", (EXPERTS, MODEL), init, Perturbation::None),
        selector: Selector { gate: Arc::new(Zipf { exponent }), capacity: None, group_tokens: None },
        experts: Box::new(Experts::new(device, "experts", &shape, Dtype::F32, [init; 2])),
        transport,
        beside: Beside::Nothing,
        output_masking: 0.0,
        balance: BalanceKind::AllChoices,
        balance_scope: BalanceScope::Sequence,
        state: GateState::default(),
    }
}
