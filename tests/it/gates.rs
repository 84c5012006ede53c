//! Gates within training: the same on every mesh, within their limits, and harmless when a user's is wrong.

use std::ops::Range;
use std::sync::Arc;

use guildhall::launch;
use guildhall::model::Sizes;
use guildhall::moe::gates::{DistributedCapacityKeys, SigmoidKeys, SwipeKeys};
use guildhall::moe::gates::{Gate, GateDraws, Largest, Tokens};
use guildhall::moe::{
    self, BalanceScope, Capacity, Dialect, GateChoice, GateKind, Homes, Overflow, Peers, Routing, ScheduleKind,
    Selector, Weighting,
};
use guildhall::parallel::{self, Parameters};
use guildhall_tensor::{Device, RowIds, Tensor};

use crate::parity::{compare, run};
use crate::tiny::{Recipe, mixtral};
use crate::world::{MESHES, ONE, on_mesh, shape};

const ROWS: usize = 6;
/// Of 48 tokens: groups that no share of a rank is a whole number of, and a short last one.
const GROUP_TOKENS: usize = 20;

pub(crate) const GATES: &[GateKind] = GateKind::ALL;

pub(crate) const OVERFLOWS: [Overflow; 5] =
    [Overflow::Position, Overflow::Probability, Overflow::Random, Overflow::Reroute, Overflow::Node];

/// A gate with so many workers, if it knows any.
pub(crate) fn of_workers(gate: GateKind, workers: usize) -> GateChoice {
    match gate {
        GateKind::Swipe => GateChoice::Swipe(SwipeKeys { workers }),
        GateKind::DistributedCapacity => GateChoice::DistributedCapacity(DistributedCapacityKeys { workers }),
        gate => gate.into(),
    }
}

/// The sigmoid gate, whose bias moves by so much.
pub(crate) fn biased(bias_rate: f32) -> GateChoice {
    GateChoice::Sigmoid(SigmoidKeys { bias_rate, ..SigmoidKeys::default() })
}

/// A gate with two workers, or two groups of experts and a bias, where it knows them.
pub(crate) fn of_two_workers(gate: GateKind) -> GateChoice {
    match gate {
        GateKind::Sigmoid => {
            GateChoice::Sigmoid(SigmoidKeys { groups: 2, top_groups: 1, bias_rate: 0.05, ..SigmoidKeys::default() })
        }
        gate => of_workers(gate, 2),
    }
}

/// Two MoE layers of four experts, two workers and two nodes.
fn sizes(gate: GateKind, change: impl Fn(&mut moe::Config)) -> Sizes {
    let mut sizes = mixtral();
    // So many tokens that none follows itself at the beginning of a document: the two would attend to the same, score
    // the same in truth, and rounding, which differs between meshes, would decide who gets a place.
    sizes.model.vocab = 997;
    let moe = sizes.moe.as_mut().expect("experts");
    moe.gate = of_two_workers(gate);
    moe.top_k = gate.only_top_k().unwrap_or(2);
    moe.logical_nodes = 2;
    moe.group_tokens = Some(GROUP_TOKENS);
    change(moe);
    sizes
}

fn trains_alike(what: &str, sizes: Sizes) -> u64 {
    let recipe = Recipe { sizes, rows: ROWS, micro_batch: ROWS };
    let want = run(&recipe, ONE);
    for shape in MESHES {
        compare(&format!("{what} on {shape:?}"), &run(&recipe, shape), &want);
    }
    want.reports.iter().flat_map(|report| &report.moe).map(|record| record.dropped).sum()
}

#[test]
fn every_gate_trains_alike_on_every_mesh() {
    for &gate in GATES {
        trains_alike(&gate.name(), sizes(gate, |_| {}));
    }
}

/// Rows in several steps and hot experts on every rank, for routings of every kind: with drops, moves and empty slots.
#[test]
fn every_gate_trains_alike_in_steps_and_with_visitors() {
    for &gate in GATES {
        for (schedule, shadowing) in
            [(ScheduleKind::Smart, "off"), (ScheduleKind::Plain, "force:1"), (ScheduleKind::Smart, "force:2")]
        {
            let sizes = sizes(gate, |moe| {
                (moe.schedule, moe.shadowing) = (schedule, shadowing.to_owned());
                (moe.capacity_factor, moe.overflow) = (Some(0.9), Overflow::Probability);
            });
            trains_alike(&format!("{}, {schedule:?}, {shadowing}", gate.name()), sizes);
        }
    }
}

#[test]
fn every_overflow_policy_trains_alike_on_every_mesh() {
    for gate in [GateKind::Softmax, GateKind::Gshard, GateKind::DistributedCapacity, GateKind::Swipe] {
        for overflow in OVERFLOWS {
            let sizes = sizes(gate, |moe| (moe.capacity_factor, moe.overflow) = (Some(0.9), overflow));
            let dropped = trains_alike(&format!("{}, {overflow:?}", gate.name()), sizes);
            // Nine tenths of the places that are needed: some routes must go without.
            assert!(dropped > 0, "{}, {overflow:?}: nothing was dropped", gate.name());
        }
    }
}

#[test]
fn every_dialect_and_scope_trains_alike_on_every_mesh() {
    for dialect in [Dialect::Hf, Dialect::Megatron, Dialect::Deepseek, Dialect::Fastmoe] {
        for gate in [GateKind::Softmax, GateKind::Sigmoid] {
            trains_alike(&format!("{dialect:?}"), sizes(gate, |moe| moe.dialect = Some(dialect)));
        }
    }
    let scopes = [BalanceScope::MicroBatch, BalanceScope::GlobalBatch]
        .map(|s| [GateKind::Softmax, GateKind::Switch].map(|g| (s, g)));
    for (scope, gate) in scopes.concat().into_iter().chain([(BalanceScope::MicroBatch, GateKind::Noisy)]) {
        trains_alike(&format!("{}, {scope:?}", gate.name()), sizes(gate, |moe| moe.balance_scope = Some(scope)));
    }
    trains_alike("shared experts", sizes(GateKind::Softmax, |moe| moe.shared_experts = 2));
    trains_alike("residual", sizes(GateKind::Switch, |moe| (moe.residual, moe.capacity_factor) = (true, Some(0.9))));
}

/// Sequence and global-batch scope do not see micro-batches; groups of one row do not, either.
#[test]
fn micro_batches_change_nothing_where_they_must_not() {
    let gates = [GateKind::Softmax, GateKind::Gshard, GateKind::Sigmoid, GateKind::Noisy];
    // A noisy gate's losses are not of loads.
    for (scope, gates) in [(BalanceScope::Sequence, &gates[..]), (BalanceScope::GlobalBatch, &gates[..3])] {
        for &gate in gates {
            let sizes = sizes(gate, |moe| {
                (moe.balance_scope, moe.group_tokens, moe.capacity_factor) = (Some(scope), Some(8), Some(1.1));
            });
            let recipe = |micro_batch| Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch };
            let want = run(&recipe(ROWS), ONE);
            for micro_batch in [1, 2, 4] {
                let got = run(&recipe(micro_batch), shape(2, 2));
                compare(&format!("{}, {scope:?}, {micro_batch} rows", gate.name()), &got, &want);
            }
        }
    }
}

/// The routing of one rank's tokens in a world of one.
fn route(moe: &moe::Config, logits: &[f32], step: u64) -> Routing {
    let draws = GateDraws { seed: 3, step, layer: 0, trains: true };
    let bias = vec![0.0; moe.experts.largest()];
    let tokens = Tokens {
        logits,
        largest: None,
        experts: moe.experts.largest(),
        first: 0,
        ids: &[],
        bias: &bias,
        padding: &[],
        draws,
    };
    let of_rank = |rank: launch::Rank| {
        let homes = Homes::alone(0..tokens.len() as u64);
        moe.widest().selector().route(&[tokens], &Peers { group: &rank.world, homes: &homes, device: &rank.device })
    };
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(1, 1) };
    launch::run(&config, of_rank).remove(0).expect("a routing")
}

/// What a rank is shown of some tokens.
type Shown<'a> = (&'a [f32], Option<Largest<'a>>);

/// Fifty tokens of two ranks, in groups that both have a part in; the second rank's are two runs.
fn routed_on_two<'a>(moe: &moe::Config, shown: &(impl Fn(Range<usize>) -> Shown<'a> + Sync)) -> Vec<Routing> {
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 1) };
    let route = |rank: launch::Rank| {
        let of_rank = [[0..20u64, 20..20], [20..40, 40..50]];
        let (homes, mine) = (Homes::new([0..20, 20..50]), &of_rank[rank.world.rank()]);
        let (logits, largest) = shown(mine[0].start as usize..mine[1].end as usize);
        let draws = GateDraws { seed: 3, step: 1, layer: 0, trains: true };
        let first = mine[0].start;
        let bias = &[0.0; 6];
        let tokens = Tokens { logits, largest, experts: 6, first, ids: &[], bias, padding: &[], draws };
        let peers = Peers { group: &rank.world, homes: &homes, device: &rank.device };
        moe.widest().selector().route(&tokens.runs(&RowIds::new(mine.clone())), &peers)
    };
    launch::run(&config, route).into_iter().map(|routed| routed.expect("a routing")).collect()
}

/// A gate that goes by the largest logits decides alike whether it is shown those or only where they are, of a part of the
/// tokens, too; no other gate says so of itself.
#[test]
fn where_the_largest_logits_are_is_all_that_some_gates_ask() {
    const TOKENS: usize = 50;
    let (device, mut going) = (Device::new(1), Vec::new());
    for &kind in GATES {
        let moe = moe::Config { gate: kind.into(), ..moe::Config::of(6, kind.only_top_k().unwrap_or(2)) };
        let gate = moe.widest().selector().gate;
        if !gate.goes_by_largest() {
            continue;
        }
        going.push(kind);
        // Few values, so that many are equal.
        let scores = Tensor::from_fn(&device, &[TOKENS, 6], |i| (i * i % 7) as f32 - 3.0);
        let k = gate.slots();
        let (logits, experts) = (scores.to_vec(), scores.top_k(k).elements(0..TOKENS * k).into_owned());
        let experts = experts.into_u32s();
        for overflow in [None, Some(Overflow::Position), Some(Overflow::Random)] {
            let moe = moe::Config {
                capacity_factor: overflow.map(|_| 0.5),
                overflow: overflow.unwrap_or_default(),
                group_tokens: Some(25),
                ..moe.clone()
            };
            assert!(moe.widest().selector().goes_by_largest(), "{kind:?}, {overflow:?}");
            let [known, all] = [true, false].map(|is_known| {
                let shown = |of: Range<usize>| match is_known {
                    true => (&[][..], Some(Largest { experts: &experts[of.start * k..of.end * k], k })),
                    false => (&logits[of.start * 6..of.end * 6], None),
                };
                routed_on_two(&moe, &shown)
            });
            assert_eq!(known, all, "{kind:?}, {overflow:?}");
        }
        for overflow in [Overflow::Probability, Overflow::Reroute, Overflow::Node] {
            let moe = moe::Config { capacity_factor: Some(0.5), overflow, ..moe.clone() };
            assert!(!moe.widest().selector().goes_by_largest(), "{kind:?}, {overflow:?}");
        }
    }
    assert_eq!(going, [GateKind::Naive, GateKind::Noisy, GateKind::Switch, GateKind::Softmax]);
}

/// Of 64 tokens that all choose expert 0, which has 16 places, each survives as often as any other.
#[test]
fn random_token_selection_is_fair() {
    const TOKENS: usize = 64;
    const STEPS: u64 = 1000;
    let moe = moe::Config {
        gate: GateKind::Switch.into(),
        capacity_factor: Some(1.0),
        overflow: Overflow::Random,
        ..moe::Config::of(4, 1)
    };
    let logits = [1.0, 0.0, 0.0, 0.0].repeat(TOKENS);
    let mut survived = [0u32; TOKENS];
    for step in 0..STEPS {
        let routing = route(&moe, &logits, step);
        assert_eq!(routing.expert.iter().filter(|&&e| e == Routing::DROPPED).count(), 48);
        for (count, expert) in survived.iter_mut().zip(&routing.expert) {
            *count += u32::from(*expert == 0);
        }
    }
    // A count has mean 250 and variance 1000 * 1/4 * 3/4; given the fixed sum, the statistic has 63 degrees of freedom.
    let (mean, variance) = (STEPS as f64 / 4.0, STEPS as f64 * 3.0 / 16.0 * 64.0 / 63.0);
    let statistic: f64 = survived.iter().map(|&n| (f64::from(n) - mean).powi(2) / variance).sum();
    // The chance to be outside is 1e-4: under 28 or above 113.
    assert!((28.0..113.0).contains(&statistic), "chi-square {statistic}");
}

#[test]
fn capacity_and_workers_are_never_exceeded() {
    let logits: Vec<f32> = (0..96 * 6).map(|i| ((i * 7919) % 613) as f32 / 100.0 - (i % 6) as f32).collect();
    for overflow in OVERFLOWS {
        let moe = moe::Config { capacity_factor: Some(1.0), overflow, logical_nodes: 2, ..moe::Config::of(6, 2) };
        let routing = route(&moe, &logits, 1);
        let mut sent = [0; 6];
        routing.expert.iter().filter(|&&e| e != Routing::DROPPED).for_each(|&e| sent[e as usize] += 1);
        assert!(sent.iter().all(|&n| n <= 32), "{overflow:?}: {sent:?}");
        let twice = |pair: &[u32]| pair[0] == pair[1] && pair[0] != Routing::DROPPED;
        assert!(!routing.expert.chunks(2).any(twice), "{overflow:?}: an expert twice");
    }
    let moe = moe::Config { gate: of_workers(GateKind::Swipe, 3), ..moe::Config::of(6, 2) };
    let mut workers = [0; 3];
    let routing = route(&moe, &logits, 1);
    routing.expert.iter().filter(|&&e| e != Routing::DROPPED).for_each(|&e| workers[e as usize / 2] += 1);
    assert!(workers.iter().all(|&n| n <= 64), "{workers:?}");
}

/// The bias moves by the sign alone, once a step, and only in training.
#[test]
fn the_balancing_bias_follows_the_load() {
    let recipe = Recipe { sizes: sizes(GateKind::Sigmoid, |_| {}), rows: ROWS, micro_batch: 2 };
    let biases = on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let reports = recipe.train(&mut trainer, 1..=1);
        let mut biases = Vec::new();
        trainer.model.visit_buffers(&mut |buffer| {
            biases.push(buffer.value.f32s().to_vec());
        });
        (reports, biases)
    });
    let (reports, biases) = &biases[0];
    for (record, bias) in reports[0].moe.iter().zip(biases) {
        let mean = record.load.iter().sum::<u64>() as f64 / 4.0;
        let sign = |n: f64| if n == mean { 0.0 } else { (mean - n).signum() };
        let want: Vec<f32> = record.load.iter().map(|&n| 0.05 * sign(n as f64) as f32).collect();
        assert_eq!(*bias, want, "layer {}, load {:?}", record.layer, record.load);
    }
}

/// What a careless user may write: wrong about the first tokens alone.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    OutOfRange,
    Twice,
    TooFew,
}

impl Gate for Wrong {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        match self {
            _ if tokens.first > 0 => [0, 1].repeat(tokens.len()),
            Wrong::OutOfRange => [0, tokens.experts as u32].repeat(tokens.len()),
            Wrong::Twice => [1, 1].repeat(tokens.len()),
            Wrong::TooFew => vec![0; tokens.len()],
        }
    }

    fn slots(&self) -> usize {
        2
    }

    fn weighting(&self) -> Weighting {
        Weighting::Normalised
    }
}

/// One rank finds the mistake; the other, whose tokens compete with its, must not wait for it.
#[test]
fn a_wrong_gate_is_an_error_on_every_rank() {
    for (gate, says) in [
        (Wrong::OutOfRange, "chose expert 4 of 4 for token 0, which does not exist"),
        (Wrong::Twice, "chose expert 1 of 4 for token 0, which it has already"),
        (Wrong::TooFew, "gave 3 choices for 3 tokens of 2 each"),
    ] {
        let capacity = Capacity { factor: 1.0, eval_factor: 1.0, overflow: Overflow::Position, nodes: 1 };
        let selector = Selector { gate: Arc::new(gate), capacity: Some(capacity), group_tokens: None };
        let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
        let logits = [0.0; 12];
        let results = launch::run(&config, |rank| {
            let draws = GateDraws { seed: 0, step: 1, layer: 7, trains: true };
            let first = 3 * rank.world.rank() as u64;
            let tokens = Tokens {
                logits: &logits,
                largest: None,
                experts: 4,
                first,
                ids: &[],
                bias: &[0.0; 4],
                padding: &[],
                draws,
            };
            let homes = Homes::new([0..3, 3..6]);
            selector.route(&[tokens], &Peers { group: &rank.world, homes: &homes, device: &rank.device })
        });
        let messages: Vec<String> = results.into_iter().map(|r| r.expect_err("a wrong gate").to_string()).collect();
        assert!(messages[0].contains("layer 7") && messages[0].contains(says), "{messages:?}");
        assert!(!messages[1].is_empty());
    }
}
