//! What a plan says against what happens: bytes that were alive and bytes that were sent, by real runs.

use std::collections::BTreeMap;

use guildhall::data::Batch;
use guildhall::launch::Rank;
use guildhall::model::Sizes;
use guildhall::moe::{GateKind, ScheduleKind};
use guildhall::parallel::{Axis, Degrees, Mesh, MeshShape, Zero};
use guildhall::plan::{Layout, Load, Machine, Recompute, RowCounts, Task, search, seconds, step, traffic};
use guildhall::train::StepReport;
use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype};
use serde_json::Value;

use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{BUCKETING, Recipe, bert, gpt2, mixtral, transformer_xl};
use crate::world::on_mesh;

/// What one rank's third step came to.
struct Seen {
    peak: u64,
    traffic: BTreeMap<(String, Collective), [u64; 2]>,
    report: StepReport,
    predicted: f64,
}

fn train(recipe: &Recipe, layout: &Layout) -> Vec<Seen> {
    on_mesh(layout.mesh, |rank: &Rank, mesh: &Mesh| {
        let mesh = match &layout.degrees {
            Degrees::Same(_) => mesh.clone(),
            degrees => Mesh::of_degrees(rank.world.clone(), layout.mesh, degrees.clone()).unwrap(),
        };
        let mesh = &mesh.with_sequence(layout.sequence).with_zero(Zero::ALL[usize::from(layout.zero)]);
        let mut trainer = recipe.trainer(rank, mesh);
        let before = rank.ledger.snapshot();
        let report = recipe.train(&mut trainer, 1..=1).remove(0);
        let after = rank.ledger.snapshot();
        let difference = |key: &(String, Collective)| {
            let [now, earlier] = [&after, &before].map(|map| map.get(key).copied().unwrap_or_default());
            [now.calls - earlier.calls, now.bytes - earlier.bytes]
        };
        let all = after.keys().map(|key| (key.clone(), difference(key)));
        let batches = recipe.batches(mesh, 1);
        let share = |batch: &Batch| batch.valid() as f64 / batch.tokens.len().max(1) as f64;
        let most = batches.micro.iter().map(share).fold(0.0, f64::max);
        Seen {
            peak: rank.device.account().peak_total(),
            traffic: all.filter(|(_, [calls, _])| *calls > 0).collect(),
            report,
            predicted: if recipe.sizes.model.family.is_causal() { 1.0 } else { most },
        }
    })
}

/// Rows to and from a rank in one micro-batch, of a step of one.
fn rows(report: &StepReport, shape: MeshShape, rank: usize) -> Load {
    let of = |sent: &guildhall::metrics::SentRows| {
        let axis = Axis::Expert(sent.rows[rank].len());
        let place = shape.place(axis, rank);
        let group = &shape.groups(axis)[place.group];
        let receive = group.iter().map(|&from| sent.rows[from][place.index]).collect();
        (sent.layer, RowCounts { send: sent.rows[rank].clone(), receive })
    };
    Load::Counted(report.sent.iter().map(of).collect())
}

fn check(what: &str, recipe: &Recipe, layout: Layout) {
    let shape = layout.mesh;
    let seen = train(recipe, &layout);
    for (rank, seen) in seen.iter().enumerate() {
        let task = Task {
            sizes: recipe.sizes.clone(),
            layout: layout.clone(),
            rows_per_step: recipe.rows,
            micro_batch: recipe.micro_batch,
            predicted: seen.predicted,
        };
        let load = match task.micro_batches() {
            1 => rows(&seen.report, shape, rank),
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
        let (accounted, predicted) = (seen.peak, cost.at_peak.total());
        let ratio = accounted as f64 / predicted as f64;
        assert!((0.95..=1.0).contains(&ratio), "{what}, {shape:?}, rank {rank}: {accounted} of {predicted}: {ratio}");
    }
}

fn plain(shape: MeshShape) -> Layout {
    Layout { drop_duplicates: true, ..Layout::of(shape, BUCKETING) }
}

fn families() -> [(&'static str, Sizes); 4] {
    [("mixtral", mixtral()), ("gpt2", gpt2()), ("bert", bert()), ("transformer_xl", transformer_xl())]
}

fn balanced(sizes: Sizes) -> Sizes {
    let mut sizes = sizes;
    sizes.moe.iter_mut().for_each(|moe| moe.gate = GateKind::Balanced);
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

/// Gates that keep more on the tape, losses that talk, rows in several steps, networks beside the experts.
#[test]
fn what_layers_do_besides_is_predicted_too() {
    let gates = [GateKind::Noisy, GateKind::Sigmoid, GateKind::Gshard, GateKind::ExpertChoice, GateKind::Naive];
    for gate in gates {
        let mut sizes = mixtral();
        sizes.moe.iter_mut().for_each(|moe| moe.gate = gate);
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check(&format!("{gate:?}"), &recipe, plain(MeshShape::of(4, 2)));
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
        for (zero, dtype, micro_batch) in
            [(1, Dtype::F32, 8), (1, Dtype::Bf16, 4), (2, Dtype::F32, 4), (3, Dtype::F32, 8)]
        {
            let recipe = Recipe { sizes: Sizes { dtype, ..balanced(sizes.clone()) }, rows: 8, micro_batch };
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
            let layout = Layout { degrees: Degrees::Each(degrees.to_vec()), zero, sequence, ..plain(mesh) };
            let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
            check(&format!("{name} of {degrees:?}, experts in {expert_tensor}, stage {zero}"), &recipe, layout);
        }
    }
    // A rank that is alone with its layer's experts receives its own rows, whatever another layer's does.
    let layout = Layout { degrees: Degrees::Each(vec![1, 1]), ..plain(MeshShape::of(4, 1)) };
    let task = Task { sizes: mixtral(), layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
    let [even, uneven] = [1.0, 4.0].map(|imbalance| step(&task, 0, &Load::Even { imbalance }));
    assert_eq!(even, uneven);
    // Not balanced: rows as they were counted.
    let layout = Layout { degrees: Degrees::Each(vec![4, 2]), ..plain(MeshShape::of(4, 1)) };
    check("rows as counted", &Recipe { sizes: mixtral(), rows: 8, micro_batch: 8 }, layout);
}

/// Eight layers of experts on very many ranks, a row a data rank.
fn at_scale(ranks: usize, tensor: usize) -> Task {
    let mut sizes = gpt2();
    (sizes.model.heads, sizes.model.d_model, sizes.model.layers) = (8, 64, 8);
    (sizes.model.kv_heads, sizes.model.seq) = (Some(8), 1024);
    sizes.moe.iter_mut().for_each(|moe| (moe.experts, moe.top_k) = (16, 1));
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
        let again = |keep| with(Layout { recompute: Recompute::Blocks { keep }, ..task.layout.clone() });
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

/// Recomputing takes less, keeping what was received takes some of it back.
#[test]
fn recomputation_saves_memory() {
    let task = at_scale(128, 4);
    let peak = |recompute| {
        let layout = Layout { recompute, ..task.layout.clone() };
        step(&Task { layout, ..task.clone() }, 0, &Load::Even { imbalance: 1.0 }).at_peak.total()
    };
    let [all, again, kept] =
        [Recompute::Nothing, Recompute::Blocks { keep: false }, Recompute::Blocks { keep: true }].map(peak);
    assert!(again < kept && kept < all, "{again} {kept} {all}");
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
    assert!(found.iter().any(|candidate| candidate.mesh == task.layout.mesh && candidate.seconds == taken));
    assert!(found[0].seconds <= taken);
    // A device that holds the smallest alone.
    let mut bytes: Vec<u64> = found.iter().map(|candidate| candidate.bytes.total()).collect();
    bytes.sort_unstable();
    machine.memory = bytes[0] + bytes[0] / 7 + 8;
    let found = search(&task, &machine, &even);
    assert_eq!(found[0].bytes.total(), bytes[0]);
    assert!(found[0].fits && !found[found.len() - 1].fits);
}

/// The program's own plan of a run, the run's header, and what the run then took.
#[test]
fn the_program_plans_what_it_trains() {
    let shop = Workshop::new();
    let recipe = "--ranks 2 --set parallel.expert=2 --set moe.gate=balanced --set train.eval_every=0";
    let planned = shop.succeeds(&format!("plan {RECIPE} {recipe} --device h100 --json --explain --search"));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    let run = shop.train(recipe);
    let summary = shop.summary(RUN);
    let predicted = planned["bytes_total"].as_u64().unwrap() * 2;
    assert_eq!(summary["predicted_peak_bytes"].as_u64(), Some(predicted));
    let accounted = summary["peak_bytes"]["total"].as_u64().unwrap();
    assert!(accounted <= predicted && accounted * 20 >= predicted * 19, "{accounted} of {predicted}");
    assert!(run.err.contains("B predicted: 2 x (parameters "), "{}", run.err);
    assert_eq!(planned["groups"]["expert"], serde_json::json!([[0, 1]]));
    let best = planned["search"][0]["set"].as_str().unwrap();
    assert!(best.contains("parallel.tensor=") && planned["search"][0]["fits"].as_bool().unwrap(), "{best}");
    let text = shop.succeeds(&format!("plan {RECIPE} {recipe} --imbalance 2")).out;
    for word in ["active per token", "memory ", "parameters", "fits: this-machine", "traffic ", "all_reduce", "time "] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    let shop = Workshop::new();
    shop.fails(&format!("plan {RECIPE} --device abacus"), 2, &["abacus", "this-machine", "h200"]);
    shop.fails(&format!("plan {RECIPE} --imbalance 0.5"), 2, &["--imbalance 0.5", "between 1"]);
    shop.fails(&format!("plan {RECIPE} --set parallel.ranks=4 --set parallel.expert=3"), 2, &["valid values: 1, 2, 4"]);
    let large = "--set model.d_model=16384 --set model.d_ff=65536 --set model.layers=64 --set moe.d_expert=65536";
    shop.fails(&format!("train {RECIPE} {large}"), 2, &["this machine has", "most is optimizer", "plan --search"]);
}

/// GPT-3's shapes with experts in every second layer, 16-bit weights and gradients, sharded optimizer state: bytes of a
/// rank's weights, gradients and optimizer state (DeepSpeed-TED's setting).
fn ted_states(layers: usize, ranks: usize, tensor: usize) -> f64 {
    let mut sizes = Sizes { dtype: Dtype::Bf16, ..gpt2() };
    let model = &mut sizes.model;
    (model.d_model, model.layers, model.heads, model.kv_heads, model.seq) = (4096, layers, 32, Some(32), 2048);
    (model.d_ff, model.vocab) = (None, 51_200);
    sizes.moe.iter_mut().for_each(|moe| (moe.experts, moe.top_k, moe.d_expert) = (16, 1, None));
    let mesh = MeshShape { tensor, expert_tensor: tensor, ..MeshShape::of(ranks, 16) };
    let layout = Layout {
        zero: 1,
        drop_duplicates: true,
        recompute: Recompute::Blocks { keep: true },
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
