//! Gradients between ranks: that buckets and overlap change nothing but time, that buckets really start during backward
//! and alike on every rank, and what becomes of a run whose gradients are lost or no numbers.

use guildhall::moe::{ScheduleKind, StepFacts};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guildhall::data::{Row, StepBatches};
use guildhall::launch::{self, Rank};
use guildhall::model::{Config, Context, Sizes};
use guildhall::parallel::{self, Bucketing, GradientSync, Init, Mesh, Parameters, SyncPlan, Weight};
use guildhall::train::{Error, Trainer};
use guildhall_comm::wrap::{Death, Delay, Fault, Faults, Link, Network, Wrapper};
use guildhall_comm::{Communicator, Error as CommError, Pending, Request};
use guildhall_tensor::{Cause, Dtype, Tape};

use crate::parity::{run_prepared, train_on};
use crate::tiny::{BUCKETING, Recipe, gpt2, mixtral, nllb, same_bits, share, transformer_xl, weights};
use crate::world::{MESHES, ONE, SLICED, Shape, on_mesh, shape};

const EACH_ALONE: Bucketing = Bucketing { bytes: 1, overlap: true };
const AFTERWARDS: Bucketing = Bucketing { bytes: 1, overlap: false };

fn bucketed(bucketing: Bucketing) -> impl Fn(&mut Trainer) + Sync {
    move |trainer| trainer.sync = SyncPlan::new(&mut trainer.model, bucketing)
}

/// Every token goes to the first experts: scores are equal, and ties go to the lower.
fn route_to_the_first(trainer: &mut Trainer) {
    trainer.model.visit(&mut |weight| {
        if weight.parameter.name().ends_with("gate.weight") {
            weight.parameter.value_mut().f32s_mut().fill(0.0);
        }
    });
}

#[test]
fn neither_buckets_nor_overlap_change_a_bit() {
    let half = Sizes { dtype: Dtype::Bf16, ..mixtral() };
    for (sizes, rows) in [(mixtral(), 6), (gpt2(), 6), (half, 6), (mixtral(), 3)] {
        let recipe = Recipe { sizes, rows, micro_batch: 3 };
        for shape in MESHES {
            let want = run_prepared(&recipe, shape, bucketed(AFTERWARDS));
            for bytes in [1, 700, BUCKETING.bytes, usize::MAX] {
                for overlap in [true, false] {
                    let bucketing = Bucketing { bytes, overlap };
                    let got = run_prepared(&recipe, shape, bucketed(bucketing));
                    assert!(got == want, "{:?} on {shape:?}, {bucketing:?}", recipe.sizes);
                }
            }
        }
    }
}

/// Ranks with other numbers of experts, each with its visitors, while rows travel in steps: no two ranks of an expert
/// group have the same queue of experts, no two expert groups need have the same collectives.
#[test]
fn nor_with_uneven_experts_that_visit() {
    let mut sizes = mixtral();
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.schedule, moe.shadowing) = (ScheduleKind::Smart, "force:1".to_owned());
    let recipe = Recipe { sizes, rows: 6, micro_batch: 3 };
    for shape in [shape(2, 2), shape(4, 2)] {
        let train = |bucketing| {
            let uneven = |_: &Rank, mesh: &Mesh| mesh.clone().with_owners(&[1, 0, 1, 1]);
            train_on(&recipe, shape, uneven, bucketed(bucketing))
        };
        let want = train(AFTERWARDS);
        for bytes in [1, 700, 3000, usize::MAX] {
            assert!(train(Bucketing { bytes, overlap: true }) == want, "{shape:?}, {bytes}");
        }
    }
}

// --- what is started when ---------------------------------------------------------------------------------------

/// A communicator that writes down what is started, by group, for all that come from it.
struct Log {
    inner: Arc<dyn Communicator>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Wrapper for Log {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Log { inner, lines: self.lines.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, CommError> {
        self.lines.lock().unwrap().push(format!("{} {}", self.name(), request.operation));
        self.inner.start(request)
    }
}

/// What each rank starts in one step.
fn logs(recipe: &Recipe, shape: Shape, prepare: impl Fn(&mut Trainer) + Sync) -> Vec<Vec<String>> {
    on_mesh(shape, |rank, _| {
        let lines = Arc::default();
        let world = Arc::new(Log { inner: rank.world.clone(), lines: Arc::clone(&lines) });
        let mesh = Mesh::new(world, shape.expert).unwrap();
        let mut trainer = recipe.trainer(rank, &mesh);
        prepare(&mut trainer);
        lines.lock().unwrap().clear();
        recipe.train(&mut trainer, 1..=1);
        lines.lock().unwrap().clone()
    })
}

/// Tensor groups add activations up.
fn is_gradient(line: &str) -> bool {
    !line.starts_with("tensor ") && line.contains("all_reduce(Sum") && line.ends_with("f32)")
}

/// How many gradients have started when backward exchanges rows between experts for the last time, and how many do.
fn started_early(log: &[String]) -> (usize, usize) {
    let last = log.iter().rposition(|line| line.starts_with("expert all_to_all(") && line.ends_with("f32)"));
    let count = |lines: &[String]| lines.iter().filter(|line| is_gradient(line)).count();
    (count(&log[..last.expect("experts exchange rows")]), count(log))
}

#[test]
fn buckets_start_while_backward_goes_on() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 3 };
    let weights = on_mesh(ONE, |rank, mesh| {
        let mut weights = 0;
        recipe.trainer(rank, mesh).model.visit(&mut |_| weights += 1);
        weights
    })[0];
    for log in logs(&recipe, shape(2, 2), bucketed(EACH_ALONE)) {
        let (early, all) = started_early(&log);
        // Of the head, the last norm, the last layer and half of the first.
        assert!(early > weights / 2 && all == weights, "{early} and {all} of {weights}");
    }
    for log in logs(&recipe, shape(2, 2), bucketed(AFTERWARDS)) {
        assert_eq!(started_early(&log), (0, weights));
    }
    for log in logs(&recipe, shape(2, 2), bucketed(BUCKETING)) {
        assert_eq!(started_early(&log).1, 2, "what is small travels together, group by group");
    }
}

/// Ranks without rows, and experts without tokens, of which a rank may have no others.
#[test]
fn every_rank_starts_the_same_in_the_same_order() {
    for (rows, bucketing) in [(6, EACH_ALONE), (3, EACH_ALONE), (3, Bucketing { bytes: 2000, overlap: true })] {
        let recipe = Recipe { sizes: mixtral(), rows, micro_batch: 3 };
        for shape in MESHES {
            let logs = logs(&recipe, shape, |trainer| {
                bucketed(bucketing)(trainer);
                route_to_the_first(trainer);
            });
            // How many rows travel is each rank's own, and how many blocks of tokens a head has each tensor group's.
            let alike = |log: &[String]| -> Vec<String> {
                let kind = |line: &String| line.split('(').next().unwrap_or_default().to_owned();
                let log = log.iter().filter(|line| !line.starts_with("tensor all_gather("));
                log.map(|line| if is_gradient(line) { line.clone() } else { kind(line) }).collect()
            };
            for (rank, log) in logs.iter().enumerate() {
                assert_eq!(alike(log), alike(&logs[0]), "rank {rank} of {shape:?}");
            }
        }
    }
}

#[test]
fn experts_without_tokens_have_gradients_of_zero() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 3 };
    for shape in MESHES {
        on_mesh(shape, |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            route_to_the_first(&mut trainer);
            let batches = recipe.batches(mesh, 1);
            let context = first_step(mesh);
            let plan = SyncPlan::new(&mut trainer.model, EACH_ALONE);
            let mut sync = GradientSync::new(&plan, &mut trainer.model, mesh);
            let tape = Tape::new(&rank.device);
            let forward = trainer.model.forward(&tape, &batches.micro[0], &context).unwrap();
            assert!(forward.loads.iter().all(|load| load.counts.load[2..] == [0, 0]), "{:?}", forward.loads);
            tape.try_backward_telling(&forward.loss, &mut |gradient| Ok(sync.complete(gradient)?)).unwrap();
            sync.finish().unwrap();
            trainer.model.visit(&mut |weight| {
                let gradient = weight.parameter.with_gradient(|gradient| gradient.to_vec());
                for piece in &weight.placement.pieces {
                    let part = &gradient[piece.offset..piece.offset + piece.len()];
                    let idle = ["experts.2.", "experts.3."].iter().any(|name| piece.name.contains(name));
                    assert_eq!(part.iter().all(|&x| x == 0.0), idle, "{} on {shape:?}", piece.name);
                }
            });
        });
    }
}

/// Of a backward that is looked at by itself.
fn first_step(mesh: &Mesh) -> Context {
    Context::of_training(mesh, StepFacts::of_training(0, 1), 1)
}

/// Gradients on their way are counted, and copying them costs no more than a bucket. There are never more than four bytes
/// of them a parameter, or two where they are stored in two.
#[test]
fn gradients_are_counted_once_wherever_they_are() {
    let [wide, half] = [Dtype::F32, Dtype::Bf16];
    for (dtype, gradients, bytes) in
        [(wide, wide, 1), (wide, wide, 4096), (half, half, 1), (half, half, 4096), (half, wide, 1), (half, wide, 4096)]
    {
        let recipe = Recipe { sizes: Sizes { dtype, gradients, ..mixtral() }, rows: 6, micro_batch: 6 };
        on_mesh(shape(2, 2), |rank, mesh| {
            let account = rank.device.account();
            let mut trainer = recipe.trainer(rank, mesh);
            let (mut all, mut routers) = (0, 0);
            trainer.model.visit(&mut |weight| {
                let own = if weight.parameter.name().ends_with("gate.weight") { &mut routers } else { &mut all };
                *own += weight.parameter.len() as u64;
            });
            let all = all * gradients.bytes() as u64 + routers * 4;
            let plan = SyncPlan::new(&mut trainer.model, Bucketing { bytes, overlap: true });
            let mut sync = GradientSync::new(&plan, &mut trainer.model, mesh);
            let tape = Tape::new(&rank.device);
            let context = first_step(mesh);
            let forward = trainer.model.forward(&tape, &recipe.batches(mesh, 1).micro[0], &context).unwrap();
            tape.try_backward_telling(&forward.loss, &mut |gradient| Ok(sync.complete(gradient)?)).unwrap();
            let communication = account.live(Cause::Communication);
            assert_eq!(account.live(Cause::Gradients) + if bytes == 1 { 0 } else { communication }, all, "under way");
            sync.finish().unwrap();
            assert_eq!(account.live(Cause::Gradients), all, "back");
            assert_eq!(account.peak(Cause::Gradients), all, "{gradients:?} in buckets of {bytes}");
        });
    }
}

// --- rows of tables ---------------------------------------------------------------------------------------------

/// Models with a table that is only read, of more rows than a step has tokens.
fn with_large_tables() -> [Sizes; 4] {
    let large = |sizes: Sizes| {
        let model = Config { vocab: LARGE_VOCAB, tie_embeddings: false, ..sizes.model };
        Sizes { model, ..sizes }
    };
    let half = Sizes { dtype: Dtype::Bf16, gradients: Dtype::Bf16, ..mixtral() };
    [mixtral(), half, transformer_xl(), nllb()].map(large)
}

/// Of 6 rows with as much to read there are fewer tokens.
const LARGE_VOCAB: usize = 200;

fn all_rows_travel(trainer: &mut Trainer) {
    bucketed(EACH_ALONE)(trainer);
    trainer.model.visit(&mut |weight| weight.looked_up = false);
}

#[test]
fn rows_that_nobody_reads_do_not_travel_and_no_bit_changes() {
    for sizes in with_large_tables() {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 3 };
        for shape in MESHES.into_iter().chain(SLICED) {
            let want = run_prepared(&recipe, shape, all_rows_travel);
            let got = run_prepared(&recipe, shape, bucketed(EACH_ALONE));
            assert!(got == want, "{:?} on {shape:?}", recipe.sizes);
        }
    }
}

#[test]
fn as_many_rows_travel_as_are_read() {
    let recipe = Recipe { sizes: with_large_tables()[0].clone(), rows: 6, micro_batch: 3 };
    let width = recipe.sizes.model.d_model;
    let batches = on_mesh(ONE, |_, mesh| recipe.batches(mesh, 1)).remove(0);
    let mut read: Vec<u32> = batches.micro.into_iter().flat_map(|batch| batch.tokens).collect();
    read.sort_unstable();
    read.dedup();
    let sums_of = |log: &[String], rows: usize| {
        let end = format!(" {} x f32)", rows * width);
        log.iter().filter(|line| is_gradient(line) && line.ends_with(&end)).count()
    };
    let mesh = shape(4, 2);
    for log in logs(&recipe, mesh, bucketed(EACH_ALONE)) {
        assert_eq!(
            [sums_of(&log, read.len()), sums_of(&log, LARGE_VOCAB)],
            [1, 1],
            "of the table and the head\n{log:#?}"
        );
    }
    for log in logs(&recipe, mesh, all_rows_travel) {
        assert_eq!([sums_of(&log, read.len()), sums_of(&log, LARGE_VOCAB)], [0, 2]);
    }
    let many = Recipe { rows: 60, ..recipe };
    for log in logs(&many, mesh, bucketed(EACH_ALONE)) {
        assert_eq!(sums_of(&log, LARGE_VOCAB), 2, "a step has more tokens than the table rows");
    }
}

// --- what overlap hides -----------------------------------------------------------------------------------------

/// Seconds that rank 0 waits in `settle` for messages that an emulated link takes 30 ms each for, where backward
/// completes a gradient every 30 ms.
fn waited(overlap: bool) -> f64 {
    struct Many(Vec<Weight>);
    impl Parameters for Many {
        fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
            self.0.iter_mut().for_each(f);
        }
    }
    let pause = Duration::from_millis(30);
    let link = Link { latency: pause, message: Duration::ZERO, bandwidth: f64::INFINITY };
    let network = Network { ranks_per_node: 2, within: link, between: Link::FREE };
    on_mesh(shape(2, 1), |rank, _| {
        let mesh = Mesh::of(Delay::wrap(rank.world.clone(), network), shape(2, 1)).unwrap();
        let weight = |n| Weight::replicated(&rank.device, &format!("w{n}"), &[4], Dtype::F32, Init::Ones);
        let mut many = Many((0..8).map(weight).collect());
        let plan = SyncPlan::new(&mut many, Bucketing { bytes: 1, overlap });
        let mut sync = GradientSync::new(&plan, &mut many, &mesh);
        for weight in many.0.iter().rev() {
            std::thread::sleep(pause);
            sync.complete(weight.parameter.gradient()).unwrap();
        }
        let begun = Instant::now();
        sync.settle().unwrap();
        begun.elapsed().as_secs_f64()
    })[0]
}

/// A link's time passes while backward goes on: of eight messages one is left to wait for, and without overlap all. What
/// threads themselves take to add is not hidden, nor is it said to be.
#[test]
fn overlap_hides_the_time_of_links() {
    let [with, without] = [true, false].map(waited);
    assert!(without >= 8.0 * 0.03, "{without} s for eight messages one after the other");
    assert!(with < without / 2.0, "{with} s of {without} s are still waited for");
}

// --- failures ---------------------------------------------------------------------------------------------------

/// Rank 1 dies at each of its operations in turn, noticed or not: nobody waits for it, and everybody names it.
#[test]
fn a_rank_that_dies_anywhere_in_a_step_ends_all() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 3 };
    let config = parallel::Config { threads: Some(1), timeout_s: 60, ..parallel::Config::of(2, 2) };
    // The mesh is made by five splits; what follows is the step.
    let setup = 5;
    let step = logs(&recipe, shape(2, 2), bucketed(EACH_ALONE)).swap_remove(1);
    for at_operation in 0..setup + step.len() {
        let announced = at_operation % 2 == 0;
        let results = launch::run(&config, |rank| {
            let death = Death { at_operation: at_operation as u64, announced };
            let death = (rank.world.rank() == 1).then_some(death);
            let faults = Faults { seed: 0, delay_max: Duration::ZERO, death };
            let mesh = Mesh::new(Fault::wrap(rank.world.clone(), faults), 2)?;
            let mut trainer = recipe.trainer(&rank, &mesh);
            bucketed(EACH_ALONE)(&mut trainer);
            trainer.step(&recipe.batches(&mesh, 1), 1)
        });
        let own = format!("rank 1 aborted the world: died at its operation {at_operation}");
        for (rank, result) in results.into_iter().enumerate() {
            let failure = result.expect_err("no rank goes on alone");
            let wanted = if announced || rank == 1 { &own } else { "rank 1 aborted the world" };
            assert!(failure.to_string().contains(wanted), "rank {rank}: {failure}");
            let gradient = at_operation >= setup && is_gradient(&step[at_operation - setup]);
            let in_backward = failure.to_string().contains(" in backward: ");
            assert!(in_backward || !gradient || rank == 0, "every bucket starts in backward, but {failure:?}");
        }
    }
}

/// Token 8 is broken and occurs on rank 1 only. Its numbers reach all ranks with the gradients, the blame does not.
#[test]
fn a_number_that_is_not_finite_is_found_on_the_rank_where_it_began() {
    [Dtype::F32, Dtype::Bf16].into_iter().for_each(check_blame);
}

fn check_blame(dtype: Dtype) {
    let recipe = Recipe { sizes: Sizes { dtype, ..mixtral() }, rows: 2, micro_batch: 2 };
    let errors = on_mesh(shape(2, 1), |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let width = recipe.sizes.model.d_model;
        trainer.model.visit(&mut |weight| {
            if weight.parameter.name() == "model.embed_tokens.weight" {
                let (mut value, place) = (weight.parameter.value_mut(), 8 * width);
                value.store_f32s(place, &[f32::INFINITY]);
            }
        });
        let before = weights(&mut trainer.model);
        let own = rank.world.rank();
        let micro = vec![share(own..own + 1, 8, |place| row(8 * place as u32))];
        let error = trainer.step(&StepBatches { step: 1, micro }, 1).expect_err("infinity is no number");
        for (name, after) in weights(&mut trainer.model) {
            assert!(same_bits(&before[&name], &after), "{name} changed");
        }
        error
    });
    assert!(matches!(errors[0], Error::NonFiniteElsewhere { step: 1 }), "{}", errors[0]);
    let Error::NonFinite { what: "the loss", rank: 1, micro: 0, place, .. } = &errors[1] else {
        panic!("{}", errors[1]);
    };
    assert!(place.contains("embedding"), "{place}");
}

/// Eight tokens from `first` on, one document.
fn row(first: u32) -> Row {
    let tokens: Vec<u32> = (first..first + 8).collect();
    Row { targets: tokens.clone(), tokens, segments: vec![0; 8], positions: (0..8).collect(), ..Row::default() }
}
