//! Half the bits: what is lost by storing weights and activations in bf16, and sending them so, is what rounding loses on
//! one rank, whatever the mesh; gradients lose nothing more in however many micro-batches; and the bytes are half.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall::metrics::SentRows;
use guildhall::model::{Context, Sizes};
use guildhall::moe::migration::Migrating;
use guildhall::moe::recording::Shape as Recorded;
use guildhall::moe::{Condense, MigrationPolicy, Recording, Routings, StepFacts};
use guildhall::parallel::{
    Bucketing, Init, Mesh, Migrate, Parameters, PerLayer, SyncPlan, Weight, Zero, global_gradient_norm, sync_gradients,
};
use guildhall::train::{StepReport, Trainer};
use guildhall_comm::Collective;
use guildhall_tensor::{Dtype, Tape};

use crate::tiny::{
    Recipe, Tensors, bert, families, gpt2, gradient_shares, gradients, mixtral, transformer_xl, union, weights,
};
use crate::world::{ONE, Shape, on_mesh, shape, sliced};

const ROWS: usize = 6;
const STEPS: u64 = 10;

/// Weights, activations and gradients.
const WIDE: [Dtype; 2] = [Dtype::F32, Dtype::F32];
const MIXED: [Dtype; 2] = [Dtype::Bf16, Dtype::F32];
const HALF: [Dtype; 2] = [Dtype::Bf16, Dtype::Bf16];

fn stored(sizes: &Sizes, [dtype, gradients]: [Dtype; 2]) -> Recipe {
    Recipe { sizes: Sizes { dtype, gradients, ..sizes.clone() }, rows: ROWS, micro_batch: 3 }
}

/// Recordings are of rows of one length, in all stacks.
fn recordable() -> impl Iterator<Item = (&'static str, Sizes)> {
    families().into_iter().map(|(name, mut sizes)| {
        sizes.model.source_seq = None;
        (name, sizes)
    })
}

/// The f32 run's routings: what is compared is rounding, not choices that rounding flips.
fn recorded(sizes: &Sizes) -> Recorded {
    let moe = sizes.moe.as_ref().expect("experts");
    let layers = (0..sizes.model.layers).filter(|&layer| moe.layers.contains(layer)).map(|layer| layer as u32);
    let (experts, slots, layers) = (moe.experts.clone(), moe.widest().slots().into(), layers.collect());
    Recorded { experts, slots, seq: sizes.model.seq, rows: ROWS, layers, seed: 0, data: 0 }
}

/// What a run leaves: the losses, the first step's gradients, and the last step's weights.
struct Run {
    losses: Vec<f64>,
    gradients: Tensors,
    weights: Tensors,
}

fn run(recipe: &Recipe, shape: Shape, routings: Routings) -> Run {
    run_of(recipe, (shape, PerLayer::Same(shape.expert)), routings)
}

/// The same with experts spread as the degrees say.
fn run_of(recipe: &Recipe, (shape, degrees): (Shape, PerLayer), routings: Routings) -> Run {
    let routings = Arc::new(routings);
    let ranks = on_mesh(shape, |rank, _| {
        let mesh = &Mesh::of_degrees(rank.world.clone(), shape, degrees.clone()).unwrap();
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.routings = routings.clone();
        let first = first_gradients(&mut trainer, recipe, mesh);
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        (reports.iter().map(|report| report.loss).collect::<Vec<f64>>(), first, weights(&mut trainer.model))
    });
    let losses = ranks[0].0.clone();
    let gradients = union(ranks.iter().map(|rank| rank.1.clone()));
    Run { losses, gradients, weights: union(ranks.into_iter().map(|rank| rank.2)) }
}

/// The gradients of step 1 over all ranks and micro-batches, before any update.
fn first_gradients(trainer: &mut Trainer, recipe: &Recipe, mesh: &Mesh) -> Tensors {
    let batches = recipe.batches(mesh, 1);
    let routings = trainer.routings.clone();
    let facts = StepFacts { routings, ..StepFacts::of_training(trainer.seed, 1) };
    let context = Context { counted_tokens: 48, ..Context::of_training(mesh, facts, 40) };
    for batch in &batches.micro {
        let tape = Tape::new(&trainer.device);
        let forward = trainer.model.forward(&tape, batch, &context).unwrap();
        tape.try_backward(&forward.loss).unwrap();
    }
    sync_gradients(&mut trainer.model, mesh).unwrap();
    let found = gradients(&mut trainer.model);
    trainer.model.visit(&mut |weight| weight.parameter.clear_gradient());
    found
}

/// Distances of a run from another: of losses, gradients and weights, each as one vector.
fn errors(got: &Run, want: &Run) -> [f64; 3] {
    let losses: f64 = got.losses.iter().zip(&want.losses).map(|(a, b)| (a - b).powi(2)).sum();
    [losses.sqrt(), distance(&got.gradients, &want.gradients), distance(&got.weights, &want.weights)]
}

fn distance(a: &Tensors, b: &Tensors) -> f64 {
    assert!(a.keys().eq(b.keys()), "{:?} instead of {:?}", a.keys(), b.keys());
    let pairs = a.iter().flat_map(|(name, a)| a.iter().zip(&b[name]));
    pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>().sqrt()
}

/// Routings are those of the f32 run. Sums over ranks, rows and gradients that travel are rounded more often than on one
/// rank: that may cost half as much again, no more. Losses are ten numbers, whose roundings may cancel on one rank: they may
/// lose two and a half times as much (Switch, sliced: 2.3).
#[test]
fn meshes_lose_what_one_rank_loses() {
    let folder = tempfile::tempdir().unwrap();
    let mut lost = Vec::new();
    for (_, sizes) in recordable() {
        let path = folder.path().join(format!("{:?}", sizes.model.family));
        let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
        let want = run(&stored(&sizes, WIDE), ONE, Routings { record, ..Routings::NONE });
        for kept in [MIXED, HALF] {
            let replayed = |shape, degrees| {
                let replay = Some(Recording::open(&path, recorded(&sizes), 1..=STEPS).unwrap());
                run_of(&stored(&sizes, kept), (shape, degrees), Routings { replay, ..Routings::NONE })
            };
            let alone = errors(&replayed(ONE, PerLayer::Same(1)), &want);
            assert!(alone.iter().all(|&error| error > 0.0), "bf16 is stored in bf16");
            for (shape, degrees) in spreads() {
                let together = errors(&replayed(shape, degrees.clone()), &want);
                let bounds = [("losses", 2.5), ("gradients", 1.5), ("weights", 1.5)];
                for ((what, most), (error, alone)) in bounds.iter().zip(together.iter().zip(&alone)) {
                    if *error > most * alone {
                        let on = format!("{:?} {kept:?} on {shape:?}, {degrees}", sizes.model.family);
                        lost.push(format!("{on}, {what}: {error:.2e} against {alone:.2e}"));
                    }
                }
            }
        }
    }
    assert!(lost.is_empty(), "{}", lost.join("\n"));
}

/// Between two ranks sequences are forced to move. What moves is rounded elsewhere: a result that carries the residual row
/// together with it, and the gradients of a rank's weights after sums over other tokens. All other roundings are the same,
/// so that two such runs are closer to each other than to f32.
#[test]
fn sequences_that_move_lose_what_those_that_stay_lose() {
    let folder = tempfile::tempdir().unwrap();
    for (name, sizes) in recordable() {
        let path = folder.path().join(name);
        let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
        let want = run(&stored(&sizes, WIDE), ONE, Routings { record, ..Routings::NONE });
        for kept in [MIXED, HALF] {
            let [stays, moves] = [Migrate::Off, Migrate::Force].map(|migrate| {
                let replay = Some(Recording::open(&path, recorded(&sizes), 1..=STEPS).unwrap());
                let policy = Migrating::new(migrate, (None, 0.25), sizes.blueprint().stacks().len());
                let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
                run(&stored(&sizes, kept), shape(2, 2), Routings { replay, migration, ..Routings::NONE })
            });
            let (lost, more, apart) = (errors(&stays, &want), errors(&moves, &want), errors(&moves, &stays));
            // Losses are ten numbers, whose roundings may cancel; gradients, of the first step, are thousands. So are weights,
            // but AdamW divides a gradient near zero, which rounding may turn round, by its own size.
            for (which, (what, most)) in [("losses", 2.0), ("gradients", 0.75), ("weights", 1.5)].iter().enumerate() {
                let [lost, more, apart] = [lost, more, apart].map(|errors| errors[which]);
                let told = format!("{name} {kept:?}, {what}: {more:.1e} lost against {lost:.1e}, {apart:.1e} apart");
                assert!(apart > 0.0 && apart <= most * lost && more <= 2.0 * lost, "{told}");
            }
        }
    }
}

/// Meshes, and how far layers spread their experts on each.
fn spreads() -> impl Iterator<Item = (Shape, PerLayer)> {
    let mixed = [(shape(4, 4), vec![4, 2]), (sliced(4, 2, 1), vec![2, 1])].map(|(s, list)| (s, PerLayer::Each(list)));
    let alike = [shape(2, 2), shape(4, 2), sliced(4, 2, 2)].map(|shape| (shape, PerLayer::Same(shape.expert)));
    alike.into_iter().chain(mixed)
}

/// Eight significant bits in every weight and activation: a percent or so of the loss, after ten steps too.
#[test]
fn half_the_bits_give_nearly_the_loss() {
    for sizes in [mixtral(), gpt2(), bert(), transformer_xl()] {
        let losses = |kept, shape| run(&stored(&sizes, kept), shape, Routings::NONE).losses;
        let want = losses(WIDE, ONE);
        for (shape, kept) in [ONE, shape(2, 2), shape(4, 2)].into_iter().zip([MIXED, HALF, MIXED]) {
            for (step, (got, want)) in losses(kept, shape).iter().zip(&want).enumerate() {
                let error = (got / want - 1.0).abs();
                assert!(error < 0.02, "{shape:?}, step {}: {got} instead of {want}", step + 1);
                assert!(got != want, "bf16 is stored in bf16");
            }
        }
    }
}

// --- micro-batches ----------------------------------------------------------------------------------------------

/// Rows of a step that is cut into ever more micro-batches.
const MANY: usize = 256;

/// The summed gradients of a step of bf16 weights in so many micro-batches.
fn accumulated(gradients_in: Dtype, micro_batches: usize, (shape, zero): (Shape, Zero)) -> Tensors {
    let sizes = Sizes { dtype: Dtype::Bf16, gradients: gradients_in, ..mixtral() };
    let recipe = Recipe { sizes, rows: MANY, micro_batch: MANY / micro_batches };
    let ranks = on_mesh(shape, |rank, mesh| {
        let mesh = mesh.clone().with_zero(zero);
        let mut trainer = recipe.trainer(rank, &mesh);
        trainer.gradients(&recipe.batches(&mesh, 1), 1).unwrap();
        gradient_shares(&mut trainer.model, &mesh)
    });
    union(ranks)
}

/// Error of the gradient of a step in so many micro-batches, against that of all rows at once summed in f32.
fn error_of(gradients_in: Dtype, micro_batches: usize, way: (Shape, Zero)) -> f64 {
    let want = accumulated(Dtype::F32, 1, way);
    let zeros = want.iter().map(|(name, values)| (name.clone(), vec![0.0; values.len()])).collect();
    distance(&accumulated(gradients_in, micro_batches, way), &want) / distance(&want, &zeros)
}

/// Weights and activations of a row are rounded alike in whatever company it is, so that nothing but the sums differs:
/// by the order of f32 sums of 256 rows, a few of its last bits (2^-23 each), or with bf16 gradients by a rounding of
/// 2^-9 of the sum so far in each micro-batch.
#[test]
fn micro_batches_do_not_add_up_errors() {
    for way in [(ONE, Zero::Off), (shape(2, 1), Zero::Off), (shape(2, 1), Zero::Gradients)] {
        for micro_batches in [16, MANY / 2] {
            let error = error_of(Dtype::F32, micro_batches, way);
            assert!(error < 2f64.powi(-19), "{way:?}, {micro_batches} micro-batches: {error:.1e}");
        }
        let [few, many] = [1, MANY / 2].map(|micro_batches| error_of(Dtype::Bf16, micro_batches, way));
        assert!(few < 2f64.powi(-8) && many > 2.0 * few, "{way:?}: {few:.1e} and {many:.1e} in bf16");
    }
}

/// The table of docs/numerics.md, which says how to run this.
#[test]
#[ignore = "prints a table"]
#[allow(clippy::print_stdout, reason = "the table is what it is for")]
fn errors_by_micro_batches() {
    for n in [1, 4, 16, 64, MANY] {
        let [wide, half] = [Dtype::F32, Dtype::Bf16].map(|dtype| 100.0 * error_of(dtype, n, (ONE, Zero::Off)));
        println!("| {n} | {wide:.5} | {half:.2} |");
    }
}

// --- bytes ------------------------------------------------------------------------------------------------------

/// Bytes that each rank sends in one step, by group and collective, and the rows of dispatches that leave or reach it.
fn sent(recipe: &Recipe, shape: Shape, path: &std::path::Path) -> Vec<(BTreeMap<(String, &'static str), u64>, u64)> {
    let replay = Some(Recording::open(path, recorded(&recipe.sizes), 1..=1).unwrap());
    let routings = Arc::new(Routings { replay, ..Routings::NONE });
    on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.routings = routings.clone();
        trainer.sync = SyncPlan::new(&mut trainer.model, Bucketing { bytes: usize::MAX, overlap: true });
        let before = rank.ledger.snapshot();
        let report: StepReport = recipe.train(&mut trainer, 1..=1).remove(0);
        let own = rank.world.rank();
        let (group, place) = (own / shape.expert * shape.expert, own % shape.expert);
        let moved = |sent: &SentRows| -> u64 {
            let others = (0..shape.expert).filter(|&other| other != place);
            others.map(|other| sent.rows[own][other] + sent.rows[group + other][place]).sum()
        };
        let traffic = rank.ledger.snapshot().into_iter().map(|((group, kind), traffic)| {
            let earlier = before.get(&(group.clone(), kind)).map_or(0, |traffic| traffic.bytes);
            ((group, kind.name()), traffic.bytes - earlier)
        });
        (traffic.collect(), report.sent.iter().map(moved).sum())
    })
}

/// To the byte: rows out and home and their gradients, weights of visitors and theirs, and with `train.gradient_dtype =
/// "bf16"` the gradients of what is stored in bf16. The rest (routers' gradients, losses, counts) is what it was.
#[test]
fn what_travels_in_bf16_is_half() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let mut sizes = mixtral();
    let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
    run(&stored(&sizes, WIDE), ONE, Routings { record, ..Routings::NONE });
    for (shadowing, shape, kept) in [
        ("off", shape(2, 2), HALF),
        ("off", shape(4, 2), HALF),
        ("off", shape(4, 2), MIXED),
        ("force:4", shape(4, 2), HALF),
        ("force:4", shape(4, 2), MIXED),
    ] {
        sizes.moe.as_mut().expect("experts").shadowing = shadowing.to_owned();
        let [wide, half] = [WIDE, kept].map(|kept| sent(&stored(&sizes, kept), shape, &path));
        let (mut dense, mut experts) = (0, 0);
        on_mesh(ONE, |rank, mesh| {
            let (mut dense, mut experts) = (0, 0);
            stored(&sizes, WIDE).trainer(rank, mesh).model.visit(&mut |weight| match weight.parameter.name() {
                name if name.ends_with("gate.weight") => {}
                name if name.contains(".experts.") => experts += weight.parameter.len() as u64,
                _ => dense += weight.parameter.len() as u64,
            });
            (dense, experts)
        })
        .into_iter()
        .for_each(|counts| (dense, experts) = counts);
        for ((wide, rows), (half, again)) in wide.into_iter().zip(half) {
            assert_eq!(rows, again, "the same rows");
            let of = |sent: &BTreeMap<(String, &str), u64>, group: &str, kind| {
                sent.get(&(group.to_owned(), kind)).copied().unwrap_or(0)
            };
            let saved = |group: &str, kind| of(&wide, group, kind) - of(&half, group, kind);
            let width = sizes.model.d_model as u64;
            // Two bytes less an element. Rows go out and what came goes home, and their gradients the other way.
            assert_eq!(saved("expert", "all_to_all"), 2 * rows * width * 2, "{shape:?}");
            let less = if kept == HALF { 2 } else { 0 };
            let summed = |ranks: usize, elements: u64| 2 * (ranks as u64 - 1) * elements * less / ranks as u64;
            assert_eq!(saved("data", "all_reduce"), summed(shape.ranks, dense), "{shape:?}");
            let (copies, own) = (shape.ranks / shape.expert, experts / shape.expert as u64);
            assert_eq!(saved("expert_data", "all_reduce"), summed(copies, own), "{shape:?}");
            assert_eq!(saved("world", "all_reduce"), 0, "losses stay f64");
            // Two micro-batches, each with all experts on every rank.
            let visits = if shadowing == "off" { 0 } else { 2 * own * (shape.expert as u64 - 1) };
            assert_eq!(saved("expert", "all_gather"), visits * 2, "{shape:?}");
            assert_eq!(of(&half, "expert", "reduce_scatter"), visits * 2, "{shape:?}");
            assert_eq!(of(&wide, "expert", "reduce_scatter"), visits * 4, "{shape:?}");
        }
    }
}

/// Lanes divide the rows of clusters, results come from all of them, and so do the gradients of rows, which are spread over
/// the tokens that share one.
#[test]
fn shared_rows_are_gathered_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let mut sizes = mixtral();
    let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
    run(&stored(&sizes, WIDE), ONE, Routings { record, ..Routings::NONE });
    // Any two tokens are as similar as this: rounding changes no cluster.
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.condense, moe.condense_threshold) = (Condense::Static, -1.0);
    let gathered = |kept| {
        let recipe = stored(&sizes, kept);
        let replay = Some(Recording::open(&path, recorded(&sizes), 1..=1).unwrap());
        let routings = Arc::new(Routings { replay, ..Routings::NONE });
        on_mesh(sliced(4, 2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            trainer.routings = routings.clone();
            let report = recipe.train(&mut trainer, 1..=1).remove(0);
            assert!(report.moe.iter().all(|layer| layer.condensed.as_ref().is_some_and(|saved| saved.uncomputed > 0)));
            let tokens =
                recipe.batches(mesh, 1).micro.iter().map(|batch| (batch.rows * sizes.model.seq) as u64).sum::<u64>();
            // The head gathers three f32 of every token from the slices of the vocabulary, whatever is stored.
            rank.ledger.snapshot()[&("tensor".to_owned(), Collective::AllGather)].bytes - 3 * 4 * tokens
        })
    };
    let [wide, half] = [WIDE, HALF].map(gathered);
    assert!(half[0] > 0, "nothing is gathered");
    assert_eq!(wide, half.iter().map(|bytes| 2 * bytes).collect::<Vec<_>>());
}

// --- numbers that are not finite --------------------------------------------------------------------------------

/// One weight a rank, with a gradient of `value` everywhere; gives the norm after the sum over two ranks.
fn norm_of(dtype: Dtype, value: f32) -> Vec<f64> {
    struct One(Weight);
    impl Parameters for One {
        fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
            f(&mut self.0);
        }
    }
    on_mesh(shape(2, 1), |rank, mesh| {
        let mut one = One(Weight::replicated(&rank.device, "w", &[4], dtype, Init::Ones));
        one.0.parameter.with_gradient(|gradient| {
            *gradient = guildhall_tensor::Tensor::from_slice(&rank.device, &[4], &[value; 4]).cast(dtype);
        });
        sync_gradients(&mut one, mesh).unwrap();
        global_gradient_norm(&mut one, mesh).unwrap()
    })
}

/// Squares are summed in f64: gradients whose squares are beyond f32 have a norm, those whose sum over ranks is beyond
/// bf16 have none, on any rank.
#[test]
fn a_norm_overflows_where_its_gradients_do() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let large = f32::from_bits(0x7e80_0000); // 2^126
        for norm in norm_of(dtype, large) {
            assert!((norm / (4.0 * f64::from(large)) - 1.0).abs() < 1e-6, "{dtype:?}: {norm}");
        }
        assert!(norm_of(dtype, 2.0 * large).iter().all(|norm| !norm.is_finite()), "{dtype:?}");
        assert!(norm_of(dtype, f32::NAN).iter().all(|norm| norm.is_nan()), "{dtype:?}");
    }
}
