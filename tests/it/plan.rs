//! What a plan says against what happens: bytes that were alive and bytes that were sent, by real runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use guildhall::checkpoint::{Destination, Extra, TrainingProgress, WritePace, Writing};
use guildhall::config;
use guildhall::data::Batch;
use guildhall::launch::{self, Rank};
use guildhall::memory::RecomputedOp;
use guildhall::metrics::Imbalance;
use guildhall::model::Sizes;
use guildhall::moe::migration::Migrating;
use guildhall::moe::recording::{self, Decisions};
use guildhall::moe::{BalanceScope, Dialect, Expert, GateKind, MigrationPolicy, Mixed, Routings, ScheduleKind};
use guildhall::optim::{self, Settings};
use guildhall::parallel::{
    self, Axis, Exchange, Mesh, MeshShape, Migrate, Order, Parameters, PerLayer, Rates, Weight, Zero,
};
use guildhall::plan::{
    Candidate, Layout, Load, Machine, Offload, RankRows, RecomputePolicy, RowCounts, Task, search, seconds, step,
    step_of, traffic,
};
use guildhall::train::{self, StepReport, Trainer};
use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype, Tape, Tensor, Var};
use serde_json::Value;

use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{BUCKETING, HYPER, Recipe, bert, families, gpt2, mixtral, nllb, ungrouped};
use crate::world::on_mesh;

/// What one rank's third step came to.
struct Seen {
    peak: u64,
    /// Of the host, where state is in its memory.
    host: Option<u64>,
    traffic: BTreeMap<(String, Collective), [u64; 2]>,
    report: StepReport,
    predicted: f64,
}

fn run(recipe: &Recipe, layout: &Layout, place: &optim::OffloadTarget) -> Vec<Seen> {
    run_noting(recipe, layout, place, &Decisions::default())
}

/// The same with the routings noted.
fn run_noting(recipe: &Recipe, layout: &Layout, place: &optim::OffloadTarget, decisions: &Decisions) -> Vec<Seen> {
    let run = tempfile::tempdir().unwrap();
    on_mesh(layout.mesh, |rank: &Rank, mesh: &Mesh| {
        let mesh = match &layout.degrees {
            PerLayer::Same(_) => mesh.clone(),
            degrees => Mesh::of_degrees(rank.world.clone(), layout.mesh, degrees.clone()).unwrap(),
        };
        let mesh = mesh.with_sequence(layout.sequence).with_zero(Zero::ALL[usize::from(layout.zero)]);
        let mesh = &mesh.with_rates(layout.rates).with_exchange(layout.exchange);
        let tile = layout.tile.map(|tile| tile as usize);
        let settings = Settings { hyper: HYPER, tile, offload: place.clone() };
        let mut trainer = recipe.trainer_with(rank, mesh, settings).unwrap();
        trainer.recompute = layout.recompute.segments();
        trainer.routings = Arc::new(Routings { decisions: Some(decisions.clone()), ..Routings::NONE });
        let _copy = layout.copies_state.then(|| copied(&mut trainer, run.path()));
        let before = rank.ledger.snapshot();
        let report = recipe.train(&mut trainer, 1..=1).remove(0);
        let after = rank.ledger.snapshot();
        let difference = |key: &(String, Collective)| {
            let [now, earlier] = [&after, &before].map(|map| map.get(key).copied().unwrap_or_default());
            [now.calls - earlier.calls, now.bytes - earlier.bytes]
        };
        let all = after.keys().map(|key| (key.clone(), difference(key)));
        Seen {
            peak: rank.device.account().peak_total(),
            host: trainer.optimizer.host().map(|host| host.peak_total()),
            traffic: all.filter(|(_, [calls, _])| *calls > 0).collect(),
            report,
            predicted: predicted(recipe, mesh, 1),
        }
    })
}

/// A checkpoint that does not get on, and whose copy is held as long.
fn copied(trainer: &mut Trainer, run: &Path) -> Writing {
    let Trainer { device, model, optimizer, mesh, .. } = trainer;
    let progress = TrainingProgress { step: 1, tokens: 0, seconds: 0.0, loss_trend: None };
    let extra = Extra { progress, data_fingerprint: String::new(), files: Vec::new() };
    let to = Destination { pace: WritePace::InTurn, ..Destination::of(run) };
    Writing::of_snapshot(to, device, (model, optimizer, mesh), extra).unwrap()
}

#[test]
fn copies_of_the_state_are_foreseen() {
    for sizes in [mixtral(), gpt2(), Sizes { dtype: Dtype::Bf16, ..mixtral() }] {
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        for (shape, zero, offload) in [
            (MeshShape::of(1, 1), 0, Offload::None),
            (MeshShape::of(2, 1), 0, Offload::None),
            (MeshShape::of(2, 2), 1, Offload::Host),
            (MeshShape::of(4, 2), 3, Offload::None),
        ] {
            let layout = Layout { zero, offload, copies_state: true, ..plain(shape) };
            check(&format!("{shape:?}, ZeRO {zero}, {offload:?}"), &recipe, layout);
        }
    }
}

/// The largest share of a micro-batch's tokens on this rank that go through the head.
fn predicted(recipe: &Recipe, mesh: &Mesh, step: u64) -> f64 {
    let share = |batch: &Batch| batch.valid() as f64 / batch.tokens.len().max(1) as f64;
    match recipe.sizes.model.is_causal() {
        true => 1.0,
        false => recipe.batches(mesh, step).micro.iter().map(share).fold(0.0, f64::max),
    }
}

/// Rows to and from a rank in one micro-batch, of a step of one.
fn rows(report: &StepReport, shape: MeshShape, rank: usize) -> Load {
    let of = |sent: &guildhall::metrics::SentRows| {
        let axis = Axis::Expert(sent.rows[rank].len());
        let place = shape.place(axis, rank);
        let group = &shape.groups(axis)[place.group];
        let receive = group.iter().map(|&from| sent.rows[from][place.index] as usize).collect();
        (sent.layer, RowCounts { send: sent.rows[rank].iter().map(|&rows| rows as usize).collect(), receive })
    };
    Load::Counted(report.sent.iter().map(of).collect())
}

/// Rows from each rank to each expert, as they were routed in one micro-batch of all rows.
fn table(decisions: &recording::Seen, recipe: &Recipe, shape: MeshShape) -> Load {
    let layers = (0..recipe.sizes.model.layers).filter(|&layer| recipe.sizes.moe_of(layer).is_some());
    let of = |layer: usize| {
        let rows = |rank: usize| {
            let first = recipe.rows * rank / shape.ranks * recipe.sizes.model.row_length_of(layer);
            decisions.decisions[&(1, layer as u32, first as u64)].routing.rows()
        };
        let rows = |rank| RankRows { sent: rows(rank), ..RankRows::default() };
        (layer, (0..shape.ranks).map(rows).collect())
    };
    Load::Table(Arc::new(layers.map(of).collect()))
}

pub(crate) fn check(what: &str, recipe: &Recipe, layout: Layout) {
    let place = match layout.offload {
        Offload::None => optim::OffloadTarget::None,
        Offload::Host | Offload::File => optim::OffloadTarget::Host,
    };
    check_in(what, recipe, layout, &place);
}

fn check_in(what: &str, recipe: &Recipe, layout: Layout, place: &optim::OffloadTarget) {
    let (shape, decisions) = (layout.mesh, Decisions::default());
    let seen = run_noting(recipe, &layout, place, &decisions);
    let decisions = decisions.seen();
    for (rank, seen) in seen.iter().enumerate() {
        let task = Task {
            sizes: recipe.sizes.clone(),
            layout: layout.clone(),
            rows_per_step: recipe.rows,
            micro_batch: recipe.micro_batch,
            predicted: seen.predicted,
        };
        let load = match task.micro_batches() {
            1 if seen.report.shadowed == 0 => rows(&seen.report, shape, rank),
            // Rows that stay for a visitor are none of those that were sent.
            1 if shape.tensor == 1 => table(&decisions, recipe, shape),
            _ => Load::Even { imbalance: 1.0 },
        };
        let cost = step(&task, rank, &load);
        let sent: BTreeMap<(String, Collective), [u64; 2]> = traffic(&cost.messages)
            .into_iter()
            .map(|((axis, collective), traffic)| {
                ((layout.degrees.name(axis), collective), [traffic.calls, traffic.bytes])
            })
            .collect();
        assert_eq!(sent, seen.traffic, "{what}, {shape:?}, rank {rank}: traffic");
        if let Some(host) = seen.host {
            assert_eq!(cost.offloaded, host, "{what}, {shape:?}, rank {rank}: on the host");
        }
        let (accounted, predicted) = (seen.peak, cost.at_peak.total());
        let ratio = accounted as f64 / predicted as f64;
        assert!((0.95..=1.0).contains(&ratio), "{what}, {shape:?}, rank {rank}: {accounted} of {predicted}: {ratio}");
    }
}

pub(crate) fn plain(shape: MeshShape) -> Layout {
    Layout { drop_duplicates: true, ..Layout::of(shape, BUCKETING) }
}

fn balanced(sizes: Sizes) -> Sizes {
    let mut sizes = sizes;
    sizes.moe.iter_mut().for_each(|moe| moe.gate = GateKind::Balanced.into());
    sizes
}

/// Every family, dense and with experts, in f32 and bf16, on ranks that hold all experts and some.
#[test]
fn bytes_predicted_are_bytes_counted() {
    for (name, sizes) in families() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for moe in [sizes.moe.clone(), None] {
                for shape in [MeshShape::of(1, 1), MeshShape::of(2, 2), MeshShape::of(4, 2)] {
                    if moe.is_none() && shape.expert > 1 {
                        continue;
                    }
                    let sizes = Sizes { dtype, moe: moe.clone(), ..sizes.clone() };
                    let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
                    check(&format!("{name} {dtype:?} {}", moe.is_some()), &recipe, plain(shape));
                }
            }
        }
    }
}

#[test]
fn micro_batches_add_up() {
    for (name, sizes) in families() {
        for micro_batch in [4, 2] {
            let recipe = Recipe { sizes: balanced(sizes.clone()), rows: 8, micro_batch };
            check(&format!("{name} in micro-batches of {micro_batch}"), &recipe, plain(MeshShape::of(2, 2)));
        }
    }
}

/// Of a recipe whose model predicts every token, on one rank.
fn task_of(recipe: &Recipe) -> Task {
    let Recipe { sizes, rows, micro_batch } = recipe.clone();
    Task { sizes, layout: plain(MeshShape::of(1, 1)), rows_per_step: rows, micro_batch, predicted: 1.0 }
}

/// What is planned for the largest imbalance of a run's first steps bounds every rank's peak, and not by more than a fifth.
fn check_skewed(what: &str, recipe: &Recipe, layout: Layout) -> Imbalance {
    // With sequences that migrate the plan has as many on each rank as there may be; copies of those on their way it has not.
    let (least, most_planned) =
        layout.migrating.as_ref().map_or((1.0, 1.2), |policy| (0.9, 1.2 * (1.0 + policy.slack)));
    // The mean over layers gives those of both stacks the same weight, whatever the lengths of their rows: 0.02 was the
    // most that was missing.
    let lengths = recipe.sizes.model.row_lengths();
    let least = if lengths.iter().any(|length| *length != lengths[0]) { least - 0.05 } else { least };
    let seen = on_mesh(layout.mesh, |rank, mesh| {
        let mesh = &mesh.clone().with_rates(layout.rates).with_exchange(layout.exchange);
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.recompute = layout.recompute.segments();
        let migration = layout.migrating.clone().map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        trainer.routings = Arc::new(Routings { migration, ..Routings::NONE });
        let reports = recipe.train(&mut trainer, 1..=2);
        let imbalance = reports.iter().map(|report| report.imbalance).fold(Imbalance::EVEN, Imbalance::max);
        let predicted = (1..=2).map(|step| predicted(recipe, mesh, step)).fold(0.0, f64::max);
        (rank.device.account().peak_total(), imbalance, predicted)
    });
    let imbalance = seen[0].1;
    assert!(seen.iter().all(|rank| rank.1 == imbalance), "{what}: ranks disagree");
    let (sizes, rows_per_step, micro_batch) = (recipe.sizes.clone(), recipe.rows, recipe.micro_batch);
    let predicted = seen.iter().map(|rank| rank.2).fold(0.0, f64::max);
    let task = Task { sizes, layout, rows_per_step, micro_batch, predicted };
    let Imbalance { mean, most } = imbalance;
    let predicted = step(&task, task.fullest(), &Load::Skewed { mean, most }).at_peak.total();
    let accounted = seen.iter().map(|rank| rank.0).max().unwrap();
    let ratio = predicted as f64 / accounted as f64;
    assert!(
        (least..=most_planned).contains(&ratio),
        "{what}: {predicted} planned for {imbalance:?}, {accounted} accounted: {ratio}"
    );
    imbalance
}

/// The repository's models, of two layers, and others of other seeds, widths and skews, in one micro-batch and in several.
#[test]
fn the_measured_imbalance_bounds_the_peak() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let sizes = |name: &str, set: &[&str]| {
        let set: Vec<String> = ["model.layers=2"].iter().chain(set).map(|set| (*set).to_owned()).collect();
        let loaded = config::load(&root.join(name).with_extension("toml"), &set, None).unwrap();
        train::sizes(&loaded.config)
    };
    let cases = [
        ("quickstart", sizes("quickstart", &[])),
        ("gpt2", sizes("gpt2", &[])),
        ("mixtral", sizes("mixtral", &[])),
        ("transformer_xl", sizes("transformer_xl", &[])),
        ("bert", sizes("bert", &[])),
        ("choosy experts", sizes("bert", &["train.seed=3", "model.init_std=0.2", "moe.d_expert=256"])),
        ("wide experts", sizes("quickstart", &["train.seed=7", "model.d_model=128", "moe.d_expert=512"])),
        ("a steep router", sizes("gpt2", &["train.seed=11", "model.init_std=0.1", "moe.experts=4"])),
        ("narrow", sizes("mixtral", &["train.seed=23", "model.d_model=64", "moe.balance_weight=0.0"])),
    ];
    let ways = [
        (MeshShape::of(2, 2), 8, RecomputePolicy::Nothing),
        (MeshShape::of(2, 2), 2, RecomputePolicy::Blocks { keep: true }),
        (MeshShape::of(4, 4), 4, RecomputePolicy::Nothing),
    ];
    let mut most = Imbalance::EVEN;
    for (number, (name, sizes)) in cases.into_iter().enumerate() {
        // Two models in every way, and each of the others in one.
        let is_all = ["mixtral", "choosy experts"].contains(&name);
        let own = if is_all { ways.as_slice() } else { &ways[number % ways.len()..][..1] };
        for (shape, micro_batch, recompute) in own.iter().cloned() {
            let recipe = Recipe { sizes: sizes.clone(), rows: 8, micro_batch };
            let layout = Layout { recompute, ..plain(shape) };
            most = most.max(check_skewed(&format!("{name} on {shape:?} by {micro_batch}"), &recipe, layout));
        }
    }
    assert!(most.most > 1.3 && most.mean > 1.1, "no case was skewed: {most:?}");
}

/// Sequences that migrate: a host may have as many more as the slack allows.
#[test]
fn hosts_that_get_sequences_have_room_for_them() {
    for (name, sizes) in families() {
        for (shape, micro_batch, slack) in
            [(MeshShape::of(2, 2), 8, 0.25), (MeshShape::of(4, 4), 16, 1.0), (MeshShape::of(4, 2), 8, 0.5)]
        {
            let recipe = Recipe { sizes: sizes.clone(), rows: 16, micro_batch };
            let stacks = sizes.blueprint().stacks().len();
            let migrating = Migrating::new(Migrate::Force, (None, slack), stacks);
            let layout = Layout { migrating, ..plain(shape) };
            check_skewed(&format!("{name} on {shape:?} by {micro_batch} with {slack}"), &recipe, layout);
        }
    }
}

/// Of steep routers, whose hot experts visit: many and few, as many as pay, in a shallow model and a deeper one.
#[test]
fn the_measured_imbalance_bounds_visits() {
    let mut visited = 0;
    for (name, sizes) in families() {
        for (shadowing, rates) in [
            ("force:1", Layout::of(MeshShape::of(1, 1), BUCKETING).rates),
            ("force:2", Layout::of(MeshShape::of(1, 1), BUCKETING).rates),
            ("force:4", Layout::of(MeshShape::of(1, 1), BUCKETING).rates),
            ("auto", Rates { flops: 1e12, bandwidth: 1e6, latency: 0.0, memory: f64::INFINITY }),
            ("auto", Rates { flops: 1e9, bandwidth: 1e9, latency: 0.0, memory: f64::INFINITY }),
        ] {
            for (shape, micro_batch, std) in
                [(MeshShape::of(4, 4), 16, 0.5), (MeshShape::of(4, 4), 8, 0.1), (MeshShape::of(2, 2), 16, 0.2)]
            {
                let mut sizes = sizes.clone();
                sizes.model.init_std = std;
                sizes.moe.iter_mut().for_each(|moe| (moe.shadowing, moe.experts) = (shadowing.to_owned(), 8.into()));
                let recipe = Recipe { sizes, rows: 16, micro_batch };
                let what = format!("{name}, {shadowing} at {rates:?} on {shape:?} by {micro_batch} of {std}");
                let layout = Layout { rates, ..plain(shape) };
                let seen = check_skewed(&what, &recipe, layout);
                visited += usize::from(seen.most > 1.3);
            }
        }
    }
    assert!(visited > 0, "no case was skewed");
}

/// Even rows have no imbalance, and all on one rank as many as there are ranks.
#[test]
fn imbalance_counts_rows_over_an_even_share() {
    let of = |gate: GateKind, shape: MeshShape, top_k: Option<usize>| {
        let mut sizes = mixtral();
        sizes.moe.iter_mut().for_each(|moe| moe.gate = gate.into());
        if let Some(top_k) = top_k {
            sizes.moe.iter_mut().for_each(|moe| moe.top_k = top_k);
        }
        let recipe = Recipe { sizes, rows: 8, micro_batch: 4 };
        on_mesh(shape, |rank, mesh| recipe.train(&mut recipe.trainer(rank, mesh), 1..=1)[0].imbalance)[0]
    };
    assert_eq!(of(GateKind::Balanced, MeshShape::of(2, 2), None), Imbalance::EVEN);
    // Every token goes to every expert.
    assert_eq!(of(GateKind::Softmax, MeshShape::of(4, 4), Some(4)), Imbalance::EVEN);
    assert_eq!(of(GateKind::Softmax, MeshShape::of(1, 1), None), Imbalance::EVEN);
    let uneven = of(GateKind::Softmax, MeshShape::of(4, 4), None);
    let Imbalance { mean, most } = uneven;
    assert!(1.0 < mean && mean <= most && most <= 4.0, "{uneven:?}");
}

/// Gates that keep more on the tape, losses that talk, rows in several steps, networks beside the experts.
#[test]
fn what_layers_do_besides_is_predicted_too() {
    let gates = [GateKind::Noisy, GateKind::Sigmoid, GateKind::Gshard, GateKind::ExpertChoice, GateKind::Naive];
    for gate in gates {
        let mut sizes = mixtral();
        sizes.moe.iter_mut().for_each(|moe| moe.gate = gate.into());
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check(&format!("{gate:?}"), &recipe, plain(MeshShape::of(4, 2)));
    }
    for dialect in [Dialect::Hf, Dialect::Megatron, Dialect::Deepseek, Dialect::Fastmoe] {
        let mut sizes = mixtral();
        sizes.moe.iter_mut().for_each(|moe| moe.dialect = Some(dialect));
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check(&format!("{dialect:?}"), &recipe, plain(MeshShape::of(4, 2)));
    }
    for (residual, shared_experts) in [(true, 0), (false, 2)] {
        let mut sizes = gpt2();
        sizes.moe.iter_mut().for_each(|moe| {
            (moe.residual, moe.shared_experts) = (residual, shared_experts);
            (moe.schedule, moe.capacity_factor) = (ScheduleKind::Smart, Some(1.0));
        });
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check("beside", &recipe, plain(MeshShape::of(2, 2)));
    }
}

/// Optimizer state, gradients and weights in shares.
#[test]
fn shares_are_predicted() {
    for (name, sizes) in families() {
        for (zero, dtype, gradients, micro_batch) in [
            (1, Dtype::F32, Dtype::F32, 8),
            (1, Dtype::Bf16, Dtype::Bf16, 4),
            (2, Dtype::F32, Dtype::F32, 4),
            (2, Dtype::Bf16, Dtype::F32, 4),
            (3, Dtype::F32, Dtype::F32, 8),
        ] {
            let recipe = Recipe { sizes: Sizes { dtype, gradients, ..balanced(sizes.clone()) }, rows: 8, micro_batch };
            check(&format!("{name} {dtype:?} at stage {zero}"), &recipe, Layout { zero, ..plain(MeshShape::of(4, 2)) });
        }
    }
}

/// Slices of layers and of experts, and the rows of a tensor group sent once or by everyone.
#[test]
fn tensor_groups_are_predicted() {
    for (name, sizes) in families() {
        for (expert_tensor, drop_duplicates, sequence) in
            [(2, true, false), (2, false, false), (1, true, false), (2, true, true), (1, true, true)]
        {
            let mut sizes = balanced(sizes.clone());
            sizes.model.kv_heads = Some(4);
            sizes.moe.iter_mut().for_each(|moe| moe.drop_duplicates = drop_duplicates);
            let shape = MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) };
            let layout = Layout { drop_duplicates, sequence, ..plain(shape) };
            let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
            check(&format!("{name} experts in {expert_tensor}, {drop_duplicates}, {sequence}"), &recipe, layout);
        }
    }
}

/// Layers whose experts are spread over different numbers of ranks, with everything that follows a weight's holders.
#[test]
fn degrees_that_differ_are_predicted() {
    for (name, sizes) in [("mixtral", mixtral()), ("bert", bert())] {
        for (degrees, expert_tensor, zero, sequence) in [
            ([1, 2], 0, 0, false),
            ([4, 2], 0, 0, false),
            ([2, 4], 0, 3, false),
            ([4, 1], 0, 1, false),
            ([2, 1], 2, 0, false),
            ([1, 2], 2, 2, true),
            ([4, 2], 1, 0, true),
        ] {
            let mut sizes = balanced(sizes.clone());
            sizes.model.kv_heads = Some(4);
            let tensor = if expert_tensor == 0 { 1 } else { 2 };
            let mesh = MeshShape { tensor, expert_tensor: expert_tensor.max(1), ..MeshShape::of(4, 1) };
            let layout = Layout { degrees: PerLayer::Each(degrees.to_vec()), zero, sequence, ..plain(mesh) };
            let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
            check(&format!("{name} of {degrees:?}, experts in {expert_tensor}, stage {zero}"), &recipe, layout);
        }
    }
    // A rank that is alone with its layer's experts receives its own rows, whatever another layer's does.
    let layout = Layout { degrees: PerLayer::Each(vec![1, 1]), ..plain(MeshShape::of(4, 1)) };
    let task = Task { sizes: mixtral(), layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
    let [even, uneven] = [1.0, 4.0].map(|imbalance| step(&task, 0, &Load::Even { imbalance }));
    assert_eq!(even, uneven);
    // Not balanced: rows as they were counted.
    let layout = Layout { degrees: PerLayer::Each(vec![4, 2]), ..plain(MeshShape::of(4, 1)) };
    check("rows as counted", &Recipe { sizes: mixtral(), rows: 8, micro_batch: 8 }, layout);
}

/// Layers with different numbers of experts, each on as many ranks or on its own.
#[test]
fn uneven_layers_are_predicted() {
    for (name, sizes) in [("mixtral", mixtral()), ("bert", bert()), ("nllb", nllb())] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (experts, degrees, [tensor, expert_tensor], zero) in [
                ([4, 2], PerLayer::Same(1), [1, 1], 0),
                ([4, 2], PerLayer::Same(2), [1, 1], 0),
                ([2, 6], PerLayer::Same(2), [1, 1], 3),
                ([4, 3], PerLayer::Each(vec![4, 1]), [1, 1], 1),
                ([4, 2], PerLayer::Each(vec![1, 2]), [2, 2], 0),
                ([4, 2], PerLayer::Same(2), [2, 2], 2),
                ([8, 4], PerLayer::Same(4), [2, 1], 0),
            ] {
                let mut sizes = Sizes { dtype, ..balanced(sizes.clone()) };
                sizes.model.kv_heads = Some(4);
                sizes.moe.iter_mut().for_each(|moe| moe.experts = PerLayer::Each(experts.to_vec()));
                let mesh = MeshShape { tensor, expert_tensor, ..MeshShape::of(4, degrees.largest()) };
                let layout = Layout { degrees: degrees.clone(), zero, ..plain(mesh) };
                let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
                check(&format!("{name} of {experts:?} on {degrees}, {tensor} slices, stage {zero}"), &recipe, layout);
            }
        }
    }
}

/// Operations that run again, each alone and all, and blocks with and without what came from others.
fn recomputations() -> Vec<RecomputePolicy> {
    let each = RecomputedOp::ALL.map(|operation| RecomputePolicy::Operations(vec![operation]));
    let all = [RecomputePolicy::Operations(RecomputedOp::ALL.to_vec())];
    let blocks = [true, false].map(|keep| RecomputePolicy::Blocks { keep });
    each.into_iter().chain(all).chain(blocks).collect()
}

#[test]
fn what_runs_again_is_predicted() {
    for (name, sizes) in families() {
        for recompute in recomputations() {
            for (moe, dtype, shape) in [
                (sizes.moe.clone(), Dtype::F32, MeshShape::of(2, 2)),
                (sizes.moe.clone(), Dtype::Bf16, MeshShape::of(2, 1)),
                (None, Dtype::F32, MeshShape::of(1, 1)),
            ] {
                let recipe = Recipe { sizes: Sizes { moe, dtype, ..sizes.clone() }, rows: 8, micro_batch: 8 };
                let layout = Layout { recompute: recompute.clone(), ..plain(shape) };
                check(&format!("{name} {dtype:?}, {recompute:?}"), &recipe, layout);
            }
        }
    }
}

/// With slices, split tokens, shares, several micro-batches and gates that talk.
#[test]
fn what_runs_again_on_meshes_is_predicted() {
    for (name, sizes) in families() {
        for recompute in recomputations() {
            for (expert_tensor, sequence, zero) in [(2, false, 0), (1, true, 0), (2, true, 1), (2, false, 3)] {
                let mut sizes = balanced(sizes.clone());
                sizes.model.kv_heads = Some(4);
                let shape = MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) };
                let layout = Layout { sequence, zero, recompute: recompute.clone(), ..plain(shape) };
                // How many tokens a masked model predicts differs between micro-batches.
                let micro_batch = if zero == 0 && sizes.model.is_causal() { 4 } else { 8 };
                let recipe = Recipe { sizes, rows: 8, micro_batch };
                check(&format!("{name} {expert_tensor} {sequence} {zero}, {recompute:?}"), &recipe, layout);
            }
        }
    }
    for gate in [GateKind::Noisy, GateKind::Sigmoid, GateKind::Gshard, GateKind::ExpertChoice] {
        for recompute in recomputations() {
            let mut sizes = mixtral();
            sizes.moe.iter_mut().for_each(|moe| moe.gate = gate.into());
            sizes.moe.iter_mut().for_each(|moe| moe.balance_scope = Some(BalanceScope::MicroBatch));
            let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
            let layout = Layout { recompute: recompute.clone(), ..plain(MeshShape::of(4, 2)) };
            check(&format!("{gate:?}, {recompute:?}"), &recipe, layout);
        }
    }
}

/// State of the optimizer in memory of the host and in files, in tiles and whole.
#[test]
fn state_elsewhere_is_predicted() {
    let folder = tempfile::tempdir().unwrap();
    for place in
        [optim::OffloadTarget::Host, optim::OffloadTarget::File(folder.path().to_owned()), optim::OffloadTarget::None]
    {
        for (name, sizes) in families() {
            for (dtype, tile, zero, rows) in [
                (Dtype::F32, None, 0, 4),
                (Dtype::F32, Some(64), 1, 4),
                (Dtype::Bf16, None, 0, 4),
                (Dtype::Bf16, Some(64), 2, 4),
                (Dtype::F32, Some(64), 2, 8),
                (Dtype::Bf16, Some(64), 3, 8),
                (Dtype::F32, Some(64), 0, 8),
            ] {
                let sizes = Sizes { dtype, gradients: dtype, ..balanced(sizes.clone()) };
                // How many tokens a masked model predicts differs between micro-batches.
                let rows = if sizes.model.is_causal() { rows } else { 4 };
                // Micro-batches so small that the update takes most.
                let recipe = Recipe { sizes, rows, micro_batch: 4 };
                let offload = if place == optim::OffloadTarget::None { Offload::None } else { Offload::Host };
                let layout = Layout { offload, tile, zero, ..plain(MeshShape::of(4, 2)) };
                check_in(&format!("{name} {dtype:?}, tiles of {tile:?}, {place:?}"), &recipe, layout, &place);
            }
        }
    }
}

/// Experts that visit every rank of their group: with sliced and whole experts, rows in steps, blocks that run again.
#[test]
fn visits_are_predicted() {
    for (name, sizes) in families() {
        for visiting in [1, 3, 4] {
            for (shape, recompute, schedule) in [
                (MeshShape::of(2, 2), RecomputePolicy::Nothing, ScheduleKind::Plain),
                (MeshShape::of(4, 4), RecomputePolicy::Blocks { keep: true }, ScheduleKind::Smart),
                (MeshShape::of(4, 2), RecomputePolicy::Blocks { keep: false }, ScheduleKind::Plain),
                (
                    MeshShape { tensor: 2, expert_tensor: 2, ..MeshShape::of(4, 2) },
                    RecomputePolicy::Operations(vec![RecomputedOp::Experts]),
                    ScheduleKind::Plain,
                ),
            ] {
                let mut sizes = balanced(sizes.clone());
                sizes.model.kv_heads = Some(4);
                let force = |moe: &mut guildhall::moe::Config| {
                    (moe.shadowing, moe.schedule) = (format!("force:{visiting}"), schedule);
                };
                sizes.moe.iter_mut().for_each(force);
                let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
                let layout = Layout { recompute: recompute.clone(), ..plain(shape) };
                check(&format!("{name}, {visiting} visit, {recompute:?}"), &recipe, layout);
            }
        }
    }
}

/// All experts travel instead of rows: with sliced and whole experts, both in shares, in several micro-batches, where
/// layers' degrees differ, and in blocks that run again.
#[test]
fn travelling_experts_are_predicted() {
    let exchange = Exchange::Experts;
    for (name, sizes) in families() {
        let of = |expert_tensor| MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) };
        let turned = MeshShape { order: Order::DataExpert, ..MeshShape::of(4, 2) };
        for (shape, recompute, zero, sequence, dtype) in [
            (MeshShape::of(2, 2), RecomputePolicy::Nothing, 0, false, Dtype::F32),
            (MeshShape::of(4, 4), RecomputePolicy::Blocks { keep: true }, 0, false, Dtype::Bf16),
            (turned, RecomputePolicy::Blocks { keep: false }, 3, false, Dtype::F32),
            (of(2), RecomputePolicy::Operations(vec![RecomputedOp::Experts]), 0, false, Dtype::F32),
            (of(2), RecomputePolicy::Nothing, 1, true, Dtype::Bf16),
            (of(1), RecomputePolicy::Nothing, 2, true, Dtype::F32),
        ] {
            let mut sizes = Sizes { dtype, ..balanced(sizes.clone()) };
            sizes.model.kv_heads = Some(4);
            // How many tokens a masked model predicts differs between micro-batches.
            let micro_batch = if sizes.model.is_causal() && zero == 3 { 4 } else { 8 };
            let layout = Layout { exchange, recompute: recompute.clone(), zero, sequence, ..plain(shape) };
            let recipe = Recipe { sizes, rows: 8, micro_batch };
            check(&format!("{name}, experts travel, {recompute:?} at stage {zero}"), &recipe, layout);
        }
    }
    let of_layers = Layout { exchange, degrees: PerLayer::Each(vec![4, 1]), ..plain(MeshShape::of(4, 1)) };
    check("of two degrees", &Recipe { sizes: balanced(mixtral()), rows: 8, micro_batch: 8 }, of_layers);
    // Rows as they were routed: no skew moves any.
    let steep = |gate: GateKind| {
        let mut sizes = mixtral();
        sizes.model.init_std = 0.5;
        sizes.moe.iter_mut().for_each(|moe| moe.gate = gate.into());
        Recipe { sizes, rows: 16, micro_batch: 16 }
    };
    for shape in [MeshShape::of(2, 2), MeshShape::of(4, 4)] {
        let layout = Layout { exchange, ..plain(shape) };
        check("a steep router", &steep(GateKind::Softmax), layout.clone());
        let task = Task { layout: layout.clone(), ..task_of(&steep(GateKind::Softmax)) };
        assert_eq!(task.skew(), Load::Even { imbalance: 1.0 }, "{shape:?}: no rank computes rows of others");
        let loads = [Load::Even { imbalance: 1.0 }, Load::Skewed { mean: 2.0, most: 2.0 }];
        let [even, skewed] = loads.map(|load| step(&task, 0, &load));
        assert_eq!(even, skewed, "{shape:?}: whatever a load says");
        assert_eq!(check_skewed("a steep router", &steep(GateKind::Softmax), layout.clone()), Imbalance::EVEN);
        // Where experts choose, tokens of one rank may be chosen more.
        let mut recipe = Recipe { rows: 4, micro_batch: 4, ..steep(GateKind::ExpertChoice) };
        recipe.sizes.moe.iter_mut().for_each(|moe| moe.top_k = 1);
        let chosen = check_skewed("experts choose", &recipe, layout);
        assert!(chosen.most > 1.1, "{shape:?}: {chosen:?}");
    }
}

/// Rows so many that some experts had better travel, and so few, of computation so cheap, that none had: the layer decides,
/// in the plan too.
#[test]
fn visits_that_pay_are_predicted() {
    // Experts of a group that tokens take whole are as hot as each other: no visit of one of them pays.
    for (name, sizes) in families().map(ungrouped) {
        for (rows, flops, pays) in [(64, 1e12, true), (4, 1e30, false)] {
            let mut sizes = sizes.clone();
            sizes.moe.iter_mut().for_each(|moe| moe.shadowing = "auto".to_owned());
            let recipe = Recipe { sizes, rows, micro_batch: rows };
            let layout = Layout {
                rates: Rates { flops, bandwidth: 1e6, latency: 0.0, memory: f64::INFINITY },
                ..plain(MeshShape::of(4, 4))
            };
            let shadowed = run(&recipe, &layout, &optim::OffloadTarget::None)[0].report.shadowed;
            assert_eq!(shadowed > 0, pays, "{name}, {rows} rows: {shadowed}");
            check(&format!("{name}, visits by {rows} rows"), &recipe, layout);
        }
    }
}

/// Experts that take so many bytes more while they compute, as if an op had one temporary more.
#[derive(Debug)]
struct Padded(Box<dyn Expert>);

const PADDING: usize = 100_000;

impl Expert for Padded {
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        self.0.weights(tape)
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        let _temporary = Tensor::zeros(rows.device(), &[PADDING]);
        self.0.apply(weights, rows, counts)
    }
}

impl Parameters for Padded {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.visit(f);
    }
}

fn pad(trainer: &mut Trainer) {
    for layer in 0..trainer.model.sizes().model.layers {
        if let Some(layer) = trainer.model.moe_layer(layer) {
            let plain: Box<dyn Expert> = Box::new(Mixed(Vec::new()));
            let own = std::mem::replace(&mut layer.experts, plain);
            layer.experts = Box::new(Padded(own));
        }
    }
}

/// There is one description of a step. Who changes what an op takes for a moment changes the plan, in no other place.
#[test]
fn a_temporary_of_an_op_moves_the_plan() {
    let recipe = Recipe { sizes: balanced(mixtral()), rows: 8, micro_batch: 8 };
    let layout = plain(MeshShape::of(2, 2));
    let accounted = |change: fn(&mut Trainer)| {
        on_mesh(layout.mesh, |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            change(&mut trainer);
            recipe.train(&mut trainer, 1..=1);
            rank.device.account().peak_total()
        })[1]
    };
    let (sizes, layout) = (recipe.sizes.clone(), layout.clone());
    let task = Task { sizes, layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
    let planned = |change: fn(&mut Trainer)| step_of(&task, 1, &Load::Even { imbalance: 1.0 }, change).at_peak.total();
    let [before, after] = [planned(|_| ()), planned(pad)];
    assert!(after >= before + 3 * PADDING as u64, "{before} {after}: the temporary is the peak");
    assert_eq!(after - before, accounted(pad) - accounted(|_| ()), "in the plan as in the run");
}

/// Heads of keys and values that serve the queries of several ranks.
#[test]
fn shared_keys_and_values_are_predicted() {
    for recompute in [RecomputePolicy::Nothing, RecomputePolicy::Blocks { keep: true }] {
        let mut sizes = balanced(mixtral());
        sizes.model.kv_heads = Some(2);
        let shape = MeshShape { tensor: 4, expert_tensor: 4, ..MeshShape::of(4, 1) };
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check("two heads on four ranks", &recipe, Layout { recompute, ..plain(shape) });
    }
}

/// Eight layers of experts on very many ranks, a row a data rank.
fn at_scale(ranks: usize, tensor: usize) -> Task {
    let mut sizes = gpt2();
    (sizes.model.heads, sizes.model.d_model, sizes.model.layers) = (8, 64, 8);
    (sizes.model.kv_heads, sizes.model.seq) = (Some(8), 1024);
    sizes.moe.iter_mut().for_each(|moe| (moe.experts, moe.top_k) = (16.into(), 1));
    let mesh = MeshShape { tensor, expert_tensor: tensor, ..MeshShape::of(ranks, 16) };
    let (rows_per_step, layout) = (ranks / tensor, Layout::of(mesh, BUCKETING));
    Task { sizes, layout, rows_per_step, micro_batch: rows_per_step, predicted: 1.0 }
}

/// Bytes of rows between the ranks of an expert group, without the counts they are told by.
fn row_bytes(task: &Task) -> u64 {
    let sent = traffic(&step(task, 0, &Load::Even { imbalance: 1.0 }).messages);
    let layers = (0..8).filter(|&layer| task.sizes.moe_of(layer).is_some()).count() as u64;
    sent[&(Axis::Expert(16), Collective::AllToAll)].bytes - layers * 15 * 8
}

/// The closed forms of DeepSpeed-TED: dropping duplicates divides the bytes of rows by T; keeping what collectives gave
/// makes two passes of three.
#[test]
fn thousands_of_ranks_send_what_the_closed_forms_say() {
    for ranks in [128, 1024, 4096] {
        let task = at_scale(ranks, 4);
        // Four layers; there, back, and both again for the gradients; fifteen of sixteen rows leave.
        let baseline = 4 * 4 * 1024 * 64 * 4 * 15 / 16;
        assert_eq!(row_bytes(&task), baseline, "{ranks} ranks");
        let with = |layout: Layout| Task { layout, ..task.clone() };
        let dropping = Layout { drop_duplicates: true, ..task.layout.clone() };
        assert_eq!(row_bytes(&with(dropping)), baseline / 4, "{ranks} ranks, without duplicates");
        let again = |keep| with(Layout { recompute: RecomputePolicy::Blocks { keep }, ..task.layout.clone() });
        assert_eq!([row_bytes(&again(false)), row_bytes(&again(true))], [baseline * 3 / 2, baseline], "{ranks} ranks");
        let sums = |task: &Task| {
            let sent = traffic(&step(task, 0, &Load::Even { imbalance: 1.0 }).messages);
            [Axis::Tensor, Axis::ExpertTensor]
                .map(|axis| sent[&(axis, Collective::AllReduce)].calls)
                .iter()
                .sum::<u64>()
        };
        // Two a block each way; the embedding's and the head's are in no block.
        assert_eq!([&again(false), &again(true)].map(sums), [8 * 6 + 2, 8 * 4 + 2], "{ranks} ranks");
    }
}

/// The steeper the popularity of experts, the more the rank of the hottest takes; what it sends is as much.
#[test]
fn steeper_loads_take_more() {
    let task = at_scale(64, 1);
    let of = |load: &Load| step(&task, 0, load);
    let loads = [0.0, 0.5, 1.0, 2.0].map(|exponent| Load::Zipf { exponent });
    let costs: Vec<_> = loads.iter().map(of).collect();
    let even = of(&Load::Even { imbalance: 1.0 });
    assert_eq!((costs[0].at_peak, &costs[0].messages), (even.at_peak, &even.messages), "without a slope");
    let worst = of(&Load::Even { imbalance: 16.0 });
    let peaks: Vec<u64> = costs.iter().chain([&worst]).map(|cost| cost.at_peak.total()).collect();
    assert!(peaks.windows(2).all(|pair| pair[0] < pair[1]), "{peaks:?}");
    let rest = of(&task.rest(&Load::Even { imbalance: 8.0 })).at_peak.total();
    assert!(rest < even.at_peak.total(), "what one rank has more others have less");
}

/// Recomputing takes less, keeping what was received takes some of it back.
#[test]
fn recomputation_saves_memory() {
    let task = at_scale(128, 4);
    let peak = |recompute| {
        let layout = Layout { recompute, ..task.layout.clone() };
        step(&Task { layout, ..task.clone() }, 0, &Load::Even { imbalance: 1.0 }).at_peak.total()
    };
    let [all, again, kept] =
        [RecomputePolicy::Nothing, RecomputePolicy::Blocks { keep: false }, RecomputePolicy::Blocks { keep: true }]
            .map(peak);
    assert!(again < kept && kept < all, "{again} {kept} {all}");
}

/// Over the link to the host goes what a gradient is stored in, whatever the host keeps: once a step, and where gradients
/// are shared, once a micro-batch. Back come f32 sums.
#[test]
fn sums_leave_as_gradients_are_stored() {
    // A byte a second: nothing else takes as long.
    let machine = Machine { host: 1.0, ..Machine::known("a100-40g").unwrap() };
    let of = |gradients: Dtype, (shape, zero): (MeshShape, u8)| {
        let sizes = Sizes { dtype: Dtype::Bf16, gradients, ..gpt2() };
        let layout = Layout { zero, offload: Offload::Host, ..plain(shape) };
        let task = Task { sizes, layout, rows_per_step: 8, micro_batch: 4, predicted: 1.0 };
        let cost = step(&task, 0, &Load::Even { imbalance: 1.0 });
        (seconds(&task, &cost, &machine), cost)
    };
    let sizes = gpt2();
    let layers = (0..sizes.model.layers).filter_map(|layer| sizes.moe_of(layer));
    let routers: u64 = layers.map(|moe| (moe.experts * sizes.model.d_model) as u64).sum();
    for (shape, journeys) in [((MeshShape::of(1, 1), 0), 1.0), ((MeshShape::of(4, 2), 2), 2.0)] {
        let [wide, half] = [Dtype::F32, Dtype::Bf16].map(|gradients| of(gradients, shape));
        assert_eq!(wide.1.leaving_sums, wide.1.offloaded_sums);
        // Routers' gradients are f32 always; ranks that share them have a fourth each.
        let routers = routers / shape.0.ranks as u64;
        assert_eq!(half.1.leaving_sums, half.1.offloaded_sums / 2 + 2 * routers);
        for (seconds, cost) in [&wide, &half] {
            assert!((seconds.behind - journeys * cost.leaving_sums as f64).abs() < 1.0, "{seconds:?}");
        }
        assert_eq!(half.1.offloaded_sums, wide.1.offloaded_sums, "what is kept is f32");
        assert!((half.0.moving - wide.0.moving).abs() < 1.0, "so it comes back: {:?} {:?}", half.0, wide.0);
    }
}

#[test]
fn the_search_finds_the_fastest_that_fits() {
    let (task, even) = (at_scale(64, 4), Load::Even { imbalance: 1.0 });
    let mut machine = Machine::known("a100-40g").unwrap();
    let found = search(&task, &machine, &even);
    assert!(found.len() > 50 && found.iter().all(|candidate| candidate.fits), "{} layouts", found.len());
    assert!(found.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
    let own = Layout { drop_duplicates: true, ..task.layout.clone() };
    let own = Task { layout: own, ..task.clone() };
    let taken = seconds(&own, &step(&own, own.fullest(), &even), &machine).total();
    assert!(found.iter().any(|candidate| candidate.layout == own.layout && candidate.seconds == taken));
    assert!(found[0].seconds <= taken);
    // A device that holds the smallest of these alone: others have to make do with less.
    let smallest = found.iter().map(|candidate| candidate.bytes.total()).min().unwrap();
    machine.memory = smallest + smallest / 7 + 8;
    let found = search(&task, &machine, &even);
    let fits = |candidate: &Candidate| candidate.bytes.total() <= machine.usable();
    assert!(found.iter().all(|candidate| candidate.fits == fits(candidate)));
    assert!(found[0].fits && !found[found.len() - 1].fits);
    assert!(found.iter().any(|c| c.fits && c.layout.recompute != RecomputePolicy::Nothing));
}

/// Every layout that the search tries is one that a recipe can be set to, and the plan of the recipe so set is the
/// search's. A device that holds little makes it try all there is.
#[test]
fn what_the_search_proposes_can_be_set() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml");
    let given = ["model.layers=2", "model.d_model=64", "model.heads=8", "model.kv_heads=2", "train.batch_tokens=2048"];
    let given: Vec<String> = given.iter().map(|&set| set.to_owned()).collect();
    let load = |set: &[String]| {
        let all: Vec<String> = given.iter().chain(set).cloned().collect();
        let config = config::load(&recipe, &all, Some(8)).map_err(|error| format!("{set:?}: {error}")).unwrap();
        Task::of(&config.config, train::sizes(&config.config))
    };
    let (task, even) = (load(&[]), Load::Even { imbalance: 1.0 });
    let mut machine = Machine::known("v100-16g").unwrap();
    let roomy = search(&task, &machine, &even);
    assert!(roomy.iter().all(|candidate| candidate.fits));
    let smallest = roomy.iter().map(|candidate| candidate.bytes.total()).min().unwrap();
    machine.memory = smallest / 2;
    let mut found = search(&task, &machine, &even);
    // Of a machine that is its own host, state goes to files.
    found.extend(search(&task, &Machine { host_memory: None, ..machine.clone() }, &even));
    let some = |what: &str, is: &dyn Fn(&Candidate) -> bool| assert!(found.iter().any(is), "no candidate {what}");
    some("fits", &|c| c.fits);
    some("is too large", &|c| !c.fits);
    some("splits tokens", &|c| c.layout.sequence);
    some("shares weights", &|c| c.layout.zero == 3);
    some("runs operations again", &|c| matches!(c.layout.recompute, RecomputePolicy::Operations(_)));
    some("runs exchanges again", &|c| c.layout.recompute == RecomputePolicy::Blocks { keep: false });
    some("has state on the host", &|c| c.layout.offload == Offload::Host);
    some("has state in files", &|c| c.layout.offload == Offload::File);
    for candidate in roomy.iter().chain(&found) {
        let task = load(&candidate.set);
        assert_eq!((&task.layout, task.micro_batch), (&candidate.layout, candidate.micro_batch), "{:?}", candidate.set);
        let cost = step(&task, task.fullest(), &even);
        let taken = seconds(&task, &cost, &machine).total();
        assert_eq!((cost.at_peak, taken), (candidate.bytes, candidate.seconds), "{:?}", candidate.set);
    }
}

/// The program's own plan of a run, the run's header, and what the run then took.
#[test]
fn the_program_plans_what_it_trains() {
    let shop = Workshop::new();
    let recipe = "--ranks 2 --set parallel.expert=2 --set moe.gate=balanced --set train.eval_every=0";
    let planned = shop.succeeds(&format!("plan {RECIPE} {recipe} --json --explain --search"));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    let run = shop.train(recipe);
    let summary = shop.summary(RUN);
    let predicted = planned["bytes_total"].as_u64().unwrap() * 2;
    assert_eq!(summary["predicted_peak_bytes"].as_u64(), Some(predicted));
    let accounted = summary["peak_bytes"]["total"].as_u64().unwrap();
    assert!(accounted <= predicted && accounted * 20 >= predicted * 19, "{accounted} of {predicted}");
    assert!(run.err.contains("B predicted: 2 x (parameters "), "{}", run.err);
    assert_eq!(planned["groups"]["expert"], serde_json::json!([[0, 1]]));
    assert!(planned["search"][0]["fits"].as_bool().unwrap(), "{}", planned["search"][0]);
    let named = |options: &str| {
        let planned = shop.succeeds(&format!("plan {RECIPE} {recipe} --device h100 --json {options}")).out;
        serde_json::from_str::<Value>(&planned).unwrap()["bytes"].clone()
    };
    assert_ne!(named(""), planned["bytes"], "a device that is named is an accelerator");
    assert_eq!(named(""), named("--set parallel.backend=simulated"));
    let bytes = |imbalance: &str| {
        let planned =
            shop.succeeds(&format!("plan {RECIPE} {recipe} --set moe.gate=softmax --json --imbalance {imbalance}"));
        let planned: Value = serde_json::from_str(&planned.out).unwrap();
        ["bytes_total_least", "bytes_total_skewed"].map(|key| planned[key].as_u64().unwrap())
    };
    let ([least, worst], [_, zipf]) = (bytes("worst"), bytes("zipf:1.5"));
    assert!(least < zipf && zipf < worst, "{least} {zipf} {worst}");
    assert_eq!(bytes("2")[1], worst, "all rows on one of two ranks");
    let text = shop.succeeds(&format!("plan {RECIPE} {recipe} --imbalance 2")).out;
    for word in ["active per token", "memory ", "parameters", "fits: this-machine", "traffic ", "all_reduce", "time "] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    let shop = Workshop::new();
    shop.fails(&format!("train {RECIPE} --ranks 2048"), 2, &["2048", "at most 1024", "guildhall plan"]);
    let many = shop.succeeds(&format!("plan {RECIPE} --ranks 4096 --set train.batch_tokens=131072 --device h100")).out;
    assert!(many.contains("fits: h100"), "{many}");
    shop.fails(&format!("plan {RECIPE} --device abacus"), 2, &["abacus", "this-machine", "h200"]);
    shop.fails(&format!("plan {RECIPE} --imbalance 0.5"), 2, &["--imbalance 0.5", "between 1"]);
    for nonsense in ["zipf:-1", "zipf:", "worse", "1,2,3", "nan", "zipf:inf"] {
        shop.fails(&format!("plan {RECIPE} --imbalance {nonsense}"), 2, &["--imbalance", "zipf:S", "worst"]);
    }
    shop.fails(&format!("plan {RECIPE} --set parallel.ranks=4 --set parallel.expert=3"), 2, &["valid values: 1, 2, 4"]);
    let large = "--set model.d_model=16384 --set model.d_ff=65536 --set model.layers=64 --set moe.d_expert=65536";
    shop.fails(
        &format!("train {RECIPE} {large}"),
        2,
        &["this machine has", "most of it", "nearest comes", "model's sizes"],
    );
}

/// The largest sizes that a recipe may have are planned, and are numbers.
#[test]
fn the_largest_sizes_are_planned_without_a_wrapped_number() {
    let shop = Workshop::new();
    for sizes in [
        "--set model.d_model=1048576 --set model.heads=4 --set moe.d_expert=64 --set moe.experts=1024",
        "--set moe.experts=1048576 --set moe.top_k=1024",
        "--set moe.experts=1048576 --ranks 65536 --set parallel.expert=65536 --set train.batch_tokens=2097152",
        "--set model.vocab=16777216 --set model.d_model=1048576 --set model.heads=4 --ranks 65536 --set parallel.zero=3",
        "--set train.batch_tokens=2147483648 --ranks 65536",
        "--set model.seq=1048576 --set train.batch_tokens=2147483648",
        "--set moe.shared_experts=1048576",
        "--set parallel.bucket_bytes=9223372036854775807 --set memory.tile=9223372036854775807 --ranks 2",
        "--set train.steps=9223372036854775807 --set train.warmup_steps=9223372036854775807",
    ] {
        let planned = shop.succeeds(&format!("plan {RECIPE} {sizes} --device h100 --json"));
        let planned: Value = serde_json::from_str(&planned.out).unwrap();
        let total = planned["bytes_total"].as_u64().unwrap();
        // A sum that was held at the largest number would be no sum.
        assert!(total > 1000 && total < u64::MAX / 2, "{sizes}: {planned}");
        let (seconds, own) = (planned["seconds_total"].as_f64().unwrap(), planned["parameters"]["total"].as_u64());
        assert!(seconds > 0.0 && seconds.is_finite() && own < Some(u64::MAX / 2), "{sizes}: {planned}");
    }
}

/// What follows `what fits: ` up to the bracket: options of a command.
fn proposed(text: &str) -> String {
    let (_, rest) = text.split_once("what fits: ").unwrap_or_else(|| panic!("no remedy in: {text}"));
    rest.split_once(" (").unwrap().0.to_owned()
}

/// A run above its budget is refused with what would fit, and that fits; the plan says the same.
#[test]
fn a_run_above_its_budget_is_told_what_fits() {
    let shop = Workshop::new();
    let recipe = format!("{RECIPE} --ranks 2 --set train.steps=2 --set train.eval_every=0");
    let planned = shop.succeeds(&format!("plan {recipe} --json"));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    let budget = planned["bytes_total"].as_u64().unwrap() * 3 / 4;
    let tight = format!("{recipe} --set memory.budget={budget}");
    let refused = shop.run(&format!("train {tight}"));
    refused.failed(2, &["rank 1 would need", "most of it", "memory.budget lets"]);
    let remedy = proposed(&refused.err);
    assert!(remedy.starts_with("--set "), "{remedy}");
    assert!(!shop.path(RUN).exists(), "a refused run has begun");
    let planned = shop.succeeds(&format!("plan {tight}")).out;
    assert!(planned.contains("does not fit") && planned.contains("memory.budget is"), "{planned}");
    assert!(planned.lines().last().unwrap().starts_with("remedy   what fits: --set "), "{planned}");
    let run = shop.succeeds(&format!("train {tight} {remedy}"));
    let held = shop.summary(RUN)["peak_bytes_by_rank"].clone();
    let held: Vec<u64> = held.as_array().unwrap().iter().map(|rank| rank["total"].as_u64().unwrap()).collect();
    assert!(held.iter().all(|&held| held <= budget), "{held:?} of {budget}: {}", run.err);
    let hopeless = format!("{recipe} --set memory.budget=1000");
    let words = ["none of ", "layouts tried fits", "nearest comes --set ", "most of it", "more ranks"];
    shop.fails(&format!("train {hopeless}"), 2, &words);
    assert!(shop.succeeds(&format!("plan {hopeless}")).out.contains("remedy   none of "));
}

/// Where tokens compete for the places of a micro-batch, another one trains otherwise.
#[test]
fn a_search_says_where_micro_batches_are_part_of_the_mathematics() {
    let shop = Workshop::new();
    let says = |set: &str| {
        let out = shop.succeeds(&format!("plan {RECIPE} --search --set train.micro_batch=1 {set}")).out;
        out.contains("note     another train.micro_batch trains otherwise")
    };
    assert!(!says(""));
    assert!(says("--set moe.capacity_factor=1.0"));
    assert!(!says("--set moe.capacity_factor=1.0 --set moe.group_tokens=16"));
}

/// Rows that do not spread evenly are more on some rank than an even share: what they may come to is what has to fit.
#[test]
fn a_run_that_may_grow_beyond_its_budget_is_refused() {
    let shop = Workshop::new();
    let uneven = "--ranks 2 --set parallel.expert=2 --set moe.top_k=1 --set moe.d_expert=512 --set train.eval_every=0";
    let recipe = format!("{RECIPE} {uneven} --set train.steps=2");
    let planned = shop.succeeds(&format!("plan {recipe} --json"));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    shop.succeeds(&format!("train {recipe}"));
    let summary = shop.summary(RUN);
    let most = summary["peak_bytes_by_rank"].as_array().unwrap().iter().map(|rank| rank["total"].as_u64().unwrap());
    let budget = most.max().unwrap() - 1;
    assert!(budget > planned["bytes_total"].as_u64().unwrap(), "rows spread evenly");
    assert!(budget < planned["bytes_total_skewed"].as_u64().unwrap(), "rows spread worse than was thought");
    let tight = format!("{recipe} --set memory.budget={budget} --set run.dir=runs/tight");
    let ended = shop.run(&format!("train {tight}"));
    // What early rows may come to is refused beforehand.
    ended.failed(2, &["rank 1 would need", "most of it activations", "memory.budget lets", "what fits: --set "]);
    shop.succeeds(&format!("train {tight}-less {}", proposed(&ended.err)));
}

/// A rank that goes beyond its budget in a step ends the run on all ranks, and says of what it had too much.
#[test]
fn a_budget_ends_the_run_of_a_rank_that_breaks_it() {
    let recipe = Recipe { sizes: balanced(gpt2()), rows: 8, micro_batch: 8 };
    let shape = MeshShape::of(2, 2);
    let peak = run(&recipe, &plain(shape), &optim::OffloadTarget::None)[1].peak;
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 2) };
    let train = |limit: u64| {
        let ended = launch::run(&config, |rank| {
            let mesh = Mesh::of(rank.world.clone(), shape)?;
            if rank.world.rank() == 1 {
                rank.device.account().limit(limit);
            }
            let mut trainer = recipe.trainer(&rank, &mesh);
            (1..=2).try_for_each(|step| trainer.step(&recipe.batches(&mesh, step), step).map(drop))
        });
        assert!(ended.iter().all(|rank| rank.is_ok() == ended[0].is_ok()), "some ranks went on");
        launch::first_cause(ended, train::Error::is_consequence).map_err(|failure| failure.to_string())
    };
    train(peak).unwrap();
    let told = train(peak - 1).unwrap_err();
    for word in ["step 1, rank 1: ", " MiB more for ", "of at most", "parameters", "optimizer", "gradients"] {
        assert!(told.contains(word), "no {word:?} in: {told}");
    }
}

/// GPT-3's shapes with experts in every second layer, 16-bit weights and gradients, sharded optimizer state: bytes of a
/// rank's weights, gradients and optimizer state (DeepSpeed-TED's setting).
fn ted_states(layers: usize, ranks: usize, tensor: usize) -> f64 {
    let mut sizes = Sizes { dtype: Dtype::Bf16, gradients: Dtype::Bf16, ..gpt2() };
    let model = &mut sizes.model;
    (model.d_model, model.layers, model.heads, model.kv_heads, model.seq) = (4096, layers, 32, Some(32), 2048);
    (model.d_ff, model.vocab) = (None, 51_200);
    sizes.moe.iter_mut().for_each(|moe| (moe.experts, moe.top_k, moe.d_expert) = (16.into(), 1, None));
    let mesh = MeshShape { tensor, expert_tensor: tensor, ..MeshShape::of(ranks, 16) };
    let layout = Layout {
        zero: 1,
        drop_duplicates: true,
        recompute: RecomputePolicy::Blocks { keep: true },
        ..Layout::of(mesh, BUCKETING)
    };
    let rows = ranks / tensor;
    let task = Task { sizes, layout, rows_per_step: rows, micro_batch: rows, predicted: 1.0 };
    let peaks = step(&task, task.fullest(), &Load::Even { imbalance: 1.0 }).peaks;
    [Cause::Parameters, Cause::Gradients, Cause::Optimizer].map(|cause| peaks.of(cause) as f64).iter().sum()
}

/// `4 N (1/T + (E + 2)/G)` bytes for a base of N = 12 L D^2 parameters (spec of DeepSpeed-TED, derived there without the
/// vocabulary, biases and norms, which are the few percent more).
#[test]
fn states_are_those_of_the_memory_model_of_ted() {
    let formula = |layers: usize, ranks: usize, tensor: usize| {
        let base = 12.0 * layers as f64 * 4096f64.powi(2);
        4.0 * base * (1.0 / tensor as f64 + 18.0 / ranks as f64)
    };
    for (ranks, tensor) in [(128, 1), (128, 4), (512, 8)] {
        let ratio = ted_states(32, ranks, tensor) / formula(32, ranks, tensor);
        assert!((1.0..1.06).contains(&ratio), "{ranks} ranks, slices of {tensor}: {ratio}");
    }
    // The largest bases in 30 GB of 512 ranks: slices make them several times larger.
    let largest = |tensor: usize| (1..).map(|n| 8 * n).take_while(|&l| ted_states(l, 512, tensor) < 30e9).last();
    let [whole, four, eight] = [1, 4, 8].map(|tensor| largest(tensor).unwrap() as f64);
    let expected = |tensor: f64| (1.0 + 18.0 / 512.0) / (1.0 / tensor + 18.0 / 512.0);
    for (layers, tensor) in [(four, 4.0), (eight, 8.0)] {
        let ratio = layers / whole / expected(tensor);
        assert!((0.85..1.15).contains(&ratio), "{layers} layers against {whole}: {ratio} of the formula");
    }
}
