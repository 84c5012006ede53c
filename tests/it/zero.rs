//! ZeRO, tiles and offload: that none changes a bit, that each saves exactly what it promises, that a checkpoint of any is
//! one of all, and what becomes of state that cannot be kept.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{Extra, Progress, load_model, load_optimizer, open, save};
use guildhall::model::{Context, Sizes};
use guildhall::moe::Routings;
use guildhall::optim::{Offload, Optimizer, Settings};
use guildhall::parallel::{Axis, GradientSync, Mesh, Parameters, Zero};
use guildhall::train::{StepReport, Trainer};
use guildhall_tensor::{Cause, Dtype, Tape};

use crate::parity::{compare, run, run_with_mesh};
use crate::program::Workshop;
use crate::tiny::{HYPER, Recipe, bert, gpt2, mixtral};
use crate::world::{ONE, Shape, on_mesh, shape};

const STEPS: u64 = 3;

/// How a run keeps what belongs to its weights.
#[derive(Clone, Debug)]
struct Keeping {
    zero: Zero,
    tile: Option<usize>,
    offload: Offload,
}

fn keeping(zero: Zero) -> Keeping {
    Keeping { zero, tile: None, offload: Offload::None }
}

impl Keeping {
    fn trainer(&self, recipe: &Recipe, rank: &guildhall::launch::Rank, mesh: &Mesh) -> Trainer {
        let settings = Settings { hyper: HYPER, tile: self.tile, offload: self.offload.clone() };
        recipe.trainer_with(rank, &mesh.clone().with_zero(self.zero), settings).unwrap()
    }
}

type Files = BTreeMap<String, Vec<u8>>;

fn extra(step: u64) -> Extra {
    let progress = Progress { step, tokens: 40 * step, seconds: 1.5 };
    Extra { progress, data_fingerprint: "rows".to_owned(), files: Vec::new() }
}

fn write(run: &Path, trainer: &mut Trainer, step: u64) -> PathBuf {
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save((run, 0), model, optimizer, mesh, &extra(step)).unwrap()
}

fn read(folder: &Path, trainer: &mut Trainer) {
    let source = open(folder).unwrap();
    load_model(&source, &mut trainer.model).unwrap();
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer).unwrap();
}

fn contents(folder: &Path) -> Files {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap())).collect()
}

/// What a run reports, and the files of all its weights and state after it.
fn trained(recipe: &Recipe, shape: Shape, keeping: &Keeping) -> (Vec<StepReport>, Files) {
    let run = tempfile::tempdir().unwrap();
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = keeping.trainer(recipe, rank, mesh);
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        (reports, write(run.path(), &mut trainer, STEPS))
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0), "{shape:?}, {keeping:?}: ranks report differently");
    (ranks[0].0.clone(), contents(&ranks[0].1))
}

/// Every stage on the device, and places and tiles in turn.
fn ways(folder: &Path) -> Vec<Keeping> {
    let file = Offload::File(folder.to_owned());
    let places = [
        (None, Offload::None),
        (Some(7), Offload::None),
        (Some(64), Offload::Host),
        (None, Offload::Host),
        (Some(50), file.clone()),
        (None, file),
    ];
    let of = |zero| places.iter().map(move |(tile, offload)| Keeping { zero, tile: *tile, offload: offload.clone() });
    Zero::ALL.into_iter().flat_map(of).collect()
}

#[test]
fn neither_stages_nor_tiles_nor_places_change_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (mut dropping, half) = (gpt2(), Sizes { dtype: Dtype::Bf16, ..mixtral() });
    dropping.model.dropout = 0.2;
    for (sizes, rows) in [(mixtral(), 6), (half, 6), (dropping, 3), (bert(), 6)] {
        let recipe = Recipe { sizes, rows, micro_batch: rows };
        for shape in [shape(2, 1), shape(2, 2), shape(3, 1), shape(4, 2)] {
            let want = trained(&recipe, shape, &keeping(Zero::Off));
            for keeping in ways(folder.path()) {
                let got = trained(&recipe, shape, &keeping);
                assert_eq!(got.0, want.0, "{shape:?}, {keeping:?}");
                assert!(got.1 == want.1, "{:?} on {shape:?}, {keeping:?}: other state", recipe.sizes.model.family);
            }
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files have no names");
}

/// Where gradients are shares, those of every micro-batch are summed over ranks before they are summed over micro-batches.
#[test]
fn micro_batches_change_the_order_of_sums_and_nothing_else() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 2 };
    let whole = Recipe { micro_batch: 6, ..recipe.clone() };
    let want = run(&whole, ONE);
    for shape in [shape(2, 1), shape(2, 2), shape(4, 2)] {
        let of = |zero| trained(&recipe, shape, &keeping(zero));
        assert!(of(Zero::Optimizer) == of(Zero::Off), "{shape:?}");
        assert!(of(Zero::Parameters) == of(Zero::Gradients), "{shape:?}");
        for zero in Zero::ALL {
            let got = run_with_mesh(&recipe, shape, |mesh| mesh.with_zero(zero));
            compare(&format!("{zero:?} on {shape:?}"), &got, &want);
        }
    }
}

/// Trained by one, continued by another.
#[test]
fn any_way_continues_what_any_way_began() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe { sizes: Sizes { dtype: Dtype::Bf16, ..mixtral() }, rows: 6, micro_batch: 6 };
    let run = tempfile::tempdir().unwrap();
    let begun = on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = keeping(Zero::Gradients).trainer(&recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=2);
        write(run.path(), &mut trainer, 2)
    });
    for shape in [ONE, shape(2, 1), shape(4, 2)] {
        let mut want = None;
        for keeping in ways(folder.path()) {
            let other = tempfile::tempdir().unwrap();
            let ranks = on_mesh(shape, |rank, mesh| {
                let mut trainer = keeping.trainer(&recipe, rank, mesh);
                read(&begun[0], &mut trainer);
                let same = contents(&write(other.path(), &mut trainer, 2)) == contents(&begun[0]);
                let reports = recipe.train(&mut trainer, 3..=4);
                (same, reports, write(other.path(), &mut trainer, 4))
            });
            assert!(ranks.iter().all(|rank| rank.0), "{shape:?}, {keeping:?}: reading and writing changed something");
            let got = (ranks[0].1.clone(), contents(&ranks[0].2));
            assert!(*want.get_or_insert(got.clone()) == got, "{shape:?}, {keeping:?}");
        }
    }
}

// --- memory -----------------------------------------------------------------------------------------------------

/// Elements of this rank's weights: of those of one axis of holders all, and of its share of each.
fn elements(model: &mut dyn Parameters, mesh: &Mesh, holders: Axis) -> [u64; 2] {
    let mut sums = [0, 0];
    model.visit(&mut |weight| {
        if weight.placement.holders() == holders {
            let len = weight.parameter.len();
            sums[0] += len as u64;
            sums[1] += mesh.share(&weight.placement, len).len() as u64;
        }
    });
    sums
}

/// DeepSpeed's formulas, weights and gradients of `w` bytes with masters of 4 where w is 2: of N elements,
/// D holders and stage z, w N (z = 3: / D) weights, w N (z >= 2: / D) gradients, (8 or 12) N (z >= 1: / D) state.
#[test]
fn bytes_are_those_of_the_formulas() {
    for (dtype, w, state) in [(Dtype::F32, 4, 8), (Dtype::Bf16, 2, 12)] {
        let mut sizes = Sizes { dtype, ..mixtral() };
        // Lengths that four ranks divide; the router, which is f32 in any case, would be a term of its own.
        sizes.model.vocab = 32;
        let recipe = Recipe { sizes, rows: 4, micro_batch: 4 };
        for shape in [shape(2, 1), shape(4, 1), shape(4, 2), shape(4, 4)] {
            for zero in Zero::ALL {
                on_mesh(shape, |rank, mesh| {
                    let mut trainer = keeping(zero).trainer(&recipe, rank, mesh);
                    recipe.train(&mut trainer, 1..=1);
                    let mut routers = 0;
                    trainer.model.visit(&mut |weight| {
                        let is_router = weight.parameter.name().ends_with("gate.weight");
                        routers += if is_router { weight.parameter.len() as u64 } else { 0 };
                    });
                    let mesh = trainer.mesh.clone();
                    let dense = elements(&mut trainer.model, &mesh, Axis::Data)[0] - routers;
                    let experts = elements(&mut trainer.model, &mesh, Axis::ExpertData(shape.expert))[0];
                    let divisors = [shape.ranks as u64, (shape.ranks / shape.expert) as u64];
                    let bytes = |each: u64, router: u64, cut: bool| {
                        let [d, e] = if cut { divisors } else { [1, 1] };
                        (each * dense + router * routers) / d + each * experts / e
                    };
                    let live = |cause| rank.device.account().live(cause);
                    let what = format!("{dtype:?}, {shape:?}, {zero:?}");
                    assert_eq!(live(Cause::Parameters), bytes(w, 4, zero >= Zero::Parameters), "{what}: weights");
                    assert_eq!(live(Cause::Optimizer), bytes(state, 8, zero >= Zero::Optimizer), "{what}: state");
                    assert_eq!(live(Cause::Gradients), 0, "{what}: forgotten gradients");
                    synced(&recipe, &mut trainer);
                    assert_eq!(live(Cause::Gradients), bytes(w, 4, zero >= Zero::Gradients), "{what}: gradients");
                });
            }
        }
    }
}

/// Leaves the synced gradients of a step in the model.
fn synced(recipe: &Recipe, trainer: &mut Trainer) {
    let (mesh, batches) = (trainer.mesh.clone(), recipe.batches(&trainer.mesh, 1));
    let routings = Routings::NONE;
    let (valid_tokens, counted_tokens) = (24, 24);
    let context =
        Context { mesh: &mesh, seed: 0, step: 1, trains: true, valid_tokens, counted_tokens, routings: &routings };
    let mut sync = GradientSync::new(&trainer.sync, &mut trainer.model, &mesh);
    let tape = Tape::new(&trainer.device);
    let forward = trainer.model.forward(&tape, &batches.micro[0], &context).unwrap();
    tape.try_backward_telling(&forward.loss, &mut |gradient| Ok(sync.complete(gradient)?)).unwrap();
    sync.settle().unwrap();
    sync.finish().unwrap();
}

/// Away from the device, three tiles are there while an update runs: that and no more, whatever the model's size.
#[test]
fn tiles_bound_what_an_update_takes() {
    let peak = |width: usize, tile: Option<usize>| {
        let mut sizes = mixtral();
        sizes.moe.as_mut().expect("experts").d_expert = Some(width);
        let recipe = Recipe { sizes, rows: 2, micro_batch: 2 };
        let ranks = on_mesh(ONE, |rank, mesh| {
            let away = Keeping { zero: Zero::Off, tile, offload: Offload::Host };
            let mut trainer = away.trainer(&recipe, rank, mesh);
            recipe.train(&mut trainer, 1..=1);
            let elements = elements(&mut trainer.model, mesh, Axis::Data)[0]
                + elements(&mut trainer.model, mesh, Axis::ExpertData(mesh.expert.size()))[0];
            let host = trainer.optimizer.host().expect("state is on the host");
            assert_eq!((host.live_total(), host.peak_total()), (8 * elements, 8 * elements));
            assert_eq!(rank.device.account().live(Cause::Optimizer), 0);
            rank.device.account().peak(Cause::Optimizer)
        });
        ranks[0]
    };
    for width in [12, 24, 48] {
        assert_eq!(peak(width, Some(100)), 3 * 100 * 8);
        // The largest weight: the first matrices of four experts.
        assert_eq!(peak(width, None), 3 * (4 * 2 * 16 * width as u64) * 8);
    }
}

// --- the program ------------------------------------------------------------------------------------------------

/// Begun at one stage with state in files, interrupted by its last step, continued at another; evaluated and sampled on
/// ranks that share and on one that cannot.
#[test]
fn the_program_shares_resumes_evaluates_and_generates() {
    let shop = Workshop::new();
    // A rate that does not depend on how long a run was meant to be.
    let with = "--set train.schedule=\"constant\" --set train.batch_tokens=128 --set train.micro_batch=4";
    shop.train(&format!("{with} --ranks 2 --set run.dir=runs/whole"));
    let shared = format!("{with} --ranks 2 --set run.dir=runs/shared");
    let file = "--set memory.offload=\"file\" --set memory.tile=500";
    shop.train(&format!("{shared} --set train.steps=4 --set parallel.zero=2 {file}"));
    let offload = shop.summary("runs/shared")["offload"].clone();
    assert!(offload["moved_bytes"].as_u64().unwrap() > 0 && offload["host_bytes"] == 0, "{offload}");
    shop.train(&format!("{shared} --resume --set parallel.zero=3 --set memory.offload=\"host\""));
    assert!(shop.summary("runs/shared")["offload"]["host_bytes"].as_u64().unwrap() > 0);
    assert!(shop.tensors("runs/shared", 6) == shop.tensors("runs/whole", 6), "other weights or state");
    assert_eq!(shop.series("runs/shared", "eval_loss"), shop.series("runs/whole", "eval_loss"));
    assert!(shop.summary("runs/whole").get("offload").is_none());
    let said = |run: &str| shop.succeeds(&format!("generate {run}/checkpoints/latest --prompt the --tokens 5")).out;
    assert_eq!(said("runs/shared"), said("runs/whole"));
    shop.succeeds("evaluate runs/shared/checkpoints/latest --ranks 1");
    shop.fails("train tiny.toml --set parallel.zero=1 --ranks 1", 2, &["nobody to share with"]);
    fs::write(shop.path("taken"), "a file, not a folder").unwrap();
    let taken = "--set memory.offload=\"file\" --set memory.offload_dir=taken";
    let words = ["rank ", "bytes of optimizer state", "taken", "memory.offload_dir"];
    shop.fails(&format!("train tiny.toml --ranks 2 {taken}"), 2, &words);
}

// --- what cannot be kept ----------------------------------------------------------------------------------------

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let place = tempfile::tempdir().unwrap();
    let taken = place.path().join("taken");
    fs::write(&taken, "a file, not a folder").unwrap();
    let recipe = Recipe { sizes: mixtral(), rows: 2, micro_batch: 2 };
    on_mesh(ONE, |rank, mesh| {
        let mut trainer = keeping(Zero::Off).trainer(&recipe, rank, mesh);
        let settings = Settings { hyper: HYPER, tile: None, offload: Offload::File(taken.join("below")) };
        let error = Optimizer::new(&rank.device, &mut trainer.model, mesh, settings).expect_err("a file is in the way");
        let text = error.to_string();
        assert!(text.starts_with("rank 0 could not make room for its ") && text.contains("bytes of optimizer state"));
        assert!(text.contains("taken/below") && text.contains("memory.offload_dir"), "{text}");
    });
}
