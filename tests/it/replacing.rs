//! Experts that change ranks take all that belongs to them along: nothing is learned otherwise, wherever state is kept,
//! and a run that is resumed goes on as if it had not stopped.

use std::path::{Path, PathBuf};

use guildhall::checkpoint::{Destination, Extra, TrainingProgress, load_model, load_optimizer, open, save};
use guildhall::config;
use guildhall::model::Sizes;
use guildhall::moe::{self, GateKind, ScheduleKind};
use guildhall::optim::OffloadTarget;
use guildhall::parallel::{ExpertTable, Mesh, Order, PerLayer, Zero, reassigned};
use guildhall::train::{Replacing, StepReport, Trainer, divergence};
use guildhall_tensor::Dtype;
use serde_json::Value;

use crate::parity::{compare, run_prepared, train_on};
use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{Recipe, gpt2, mixtral, nllb, with};
use crate::world::{Shape, on_mesh, shape, sliced, whole_experts};
use crate::zero::{Files, Keeping, contents, keeping, ways};

const STEPS: u64 = 5;

/// Looks at the loads after every so many steps, and moves for any gain.
fn eager(every: u64) -> Replacing {
    Replacing { every, gain: 0.0, loads: Vec::new() }
}

fn recipe(sizes: Sizes, rows: usize) -> Recipe {
    // Of three choices the gradients are added in the order of their owners.
    let change = |moe: &mut moe::Config| (moe.experts, moe.top_k) = (8.into(), 2);
    Recipe { sizes: with(sizes, change), rows, micro_batch: rows }
}

fn write(run: &Path, trainer: &mut Trainer, step: u64) -> PathBuf {
    let progress = TrainingProgress { step, tokens: 0, seconds: 0.0, loss_trend: None };
    let extra = Extra { progress, data_fingerprint: String::new(), files: trainer.experts_files() };
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save(Destination::of(run), model, optimizer, mesh, extra).unwrap()
}

fn read(folder: &Path, trainer: &mut Trainer) {
    let source = open(folder).unwrap();
    trainer.adopt_experts(&source).unwrap();
    load_model(&source, &mut trainer.model).unwrap();
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer).unwrap();
}

/// What a run reports, and its weights and state as files; `None` never moves an expert.
fn trained(recipe: &Recipe, shape: Shape, keeping: &Keeping, every: Option<u64>) -> (Vec<StepReport>, Files) {
    let run = tempfile::tempdir().unwrap();
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = keeping.trainer(recipe, rank, mesh);
        trainer.replacing = every.map(eager);
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        let mesh = trainer.mesh.clone();
        assert_eq!(divergence(&mut trainer.model, &mesh).unwrap(), None, "{shape:?}, {keeping:?}");
        (reports, write(run.path(), &mut trainer, STEPS))
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0), "{shape:?}, {keeping:?}: ranks report differently");
    (ranks[0].0.clone(), contents(&ranks[0].1))
}

/// The same but for who owns what, and for the last bit of the gradient's norm: a sum over ranks in their order.
#[track_caller]
fn assert_learned_alike(what: &str, moved: &(Vec<StepReport>, Files), stayed: &(Vec<StepReport>, Files)) {
    for (got, want) in moved.0.iter().zip(&stayed.0) {
        let numbers = |r: &StepReport| (r.loss.to_bits(), r.balance.to_bits(), r.z.to_bits(), r.moe.clone());
        assert_eq!(numbers(got), numbers(want), "{what}, step {}", got.step);
        let apart = (got.gradient_norm / want.gradient_norm - 1.0).abs();
        assert!(apart < 1e-14, "{what}, step {}: norms {apart:e} apart", got.step);
    }
    for name in ["model.safetensors", "optimizer.safetensors"] {
        assert!(moved.1[name] == stayed.1[name], "{what}: {name} differs");
    }
}

fn moves(reports: &[StepReport]) -> usize {
    reports.iter().flat_map(|report| &report.replaced).map(|layer| layer.moved).sum()
}

#[test]
fn experts_that_move_learn_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let half = Sizes { dtype: Dtype::Bf16, ..mixtral() };
    for (number, (sizes, rows)) in [(mixtral(), 6), (half, 6), (gpt2(), 5), (nllb(), 4)].into_iter().enumerate() {
        // Of the first everything, of the others a part.
        let (first, step) = if number == 0 { (0, 1) } else { (number, 5) };
        let recipe = recipe(sizes, rows);
        for shape in [shape(2, 2), shape(4, 2), shape(4, 4)] {
            let stayed = trained(&recipe, shape, &keeping(Zero::Off), None);
            assert_eq!(moves(&stayed.0), 0);
            for keeping in ways(folder.path()).into_iter().skip(first).step_by(step) {
                let moved = trained(&recipe, shape, &keeping, Some(1));
                let what = format!("{:?} on {shape:?}, {keeping:?}", recipe.sizes.model.family);
                assert!(moves(&moved.0) >= 4, "{what}: few moves: {:?}", moved.0);
                assert_learned_alike(&what, &moved, &stayed);
            }
        }
    }
}

/// Groups of the other order, and several sets of experts in shares of three holders and more. Beside slices, the lanes of
/// a tensor group share out rows by their owners, so that sums come in another order.
#[test]
fn experts_move_on_every_kind_of_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let turned = |shape| Shape { order: Order::DataExpert, ..shape };
    for (number, shape) in [turned(shape(4, 2)), shape(8, 4), shape(6, 2)].into_iter().enumerate() {
        let recipe = recipe(if number == 1 { gpt2() } else { mixtral() }, 8);
        let stayed = trained(&recipe, shape, &keeping(Zero::Off), None);
        for keeping in ways(folder.path()).into_iter().skip(number).step_by(3) {
            let moved = trained(&recipe, shape, &keeping, Some(2));
            assert!(moves(&moved.0) > 0, "{shape:?}, {keeping:?}");
            assert_learned_alike(&format!("{shape:?}, {keeping:?}"), &moved, &stayed);
        }
    }
    let whole = whole_experts(4, 2, 2);
    for shape in [sliced(4, 2, 2), sliced(8, 2, 2), turned(sliced(8, 2, 2)), whole, turned(whole_experts(8, 2, 2))] {
        let recipe = recipe(mixtral(), 8);
        let run = |zero: Zero, replacing: Option<Replacing>| {
            let prepare = |trainer: &mut Trainer| trainer.replacing = replacing.clone();
            train_on(&recipe, shape, |_, mesh| mesh.clone().with_zero(zero), prepare)
        };
        let stayed = run(Zero::Off, None);
        for zero in Zero::ALL {
            let moved = run(zero, Some(eager(1)));
            assert!(moves(&moved.reports) > 0, "{shape:?}, {zero:?}");
            compare(&format!("{zero:?} on {shape:?}"), &moved, &stayed);
        }
    }
}

/// Where rows leave in several parts, or a token has more than two, their order hangs on their owners, so that sums come in
/// another order.
#[test]
fn what_else_decides_about_rows_learns_the_same() {
    let cases: [(&str, fn(&mut moe::Config)); 5] = [
        ("three choices", |moe| moe.top_k = 3),
        ("smart", |moe| moe.schedule = ScheduleKind::Smart),
        ("shadows", |moe| moe.shadowing = "force:2".into()),
        ("capacity", |moe| moe.capacity_factor = Some(1.0)),
        ("noise", |moe| moe.gate = GateKind::Noisy.into()),
    ];
    for (name, change) in cases {
        let mut recipe = recipe(mixtral(), 6);
        recipe.micro_batch = 3;
        change(recipe.sizes.moe.as_mut().expect("experts"));
        for shape in [shape(2, 2), shape(4, 4)] {
            let [moved, stayed] = [Some(eager(1)), None]
                .map(|replacing| run_prepared(&recipe, shape, |trainer| trainer.replacing = replacing.clone()));
            assert!(moves(&moved.reports) > 0, "{name} on {shape:?}");
            compare(&format!("{name} on {shape:?}"), &moved, &stayed);
        }
    }
}

/// Each layer with experts on as many ranks, and with as many experts, as it has.
#[test]
fn layers_of_different_degrees_move_by_themselves() {
    let mut recipe = recipe(mixtral(), 8);
    recipe.sizes.moe.as_mut().expect("experts").experts = PerLayer::Each(vec![8, 6]);
    let degrees = PerLayer::Each(vec![4, 2]);
    let train = |replacing: Option<Replacing>| {
        let change = |_: &_, mesh: &Mesh| Mesh::of_degrees(mesh.world.clone(), shape(4, 1), degrees.clone()).unwrap();
        train_on(&recipe, shape(4, 1), change, |trainer| trainer.replacing = replacing.clone())
    };
    let (moved, stayed) = (train(Some(eager(1))), train(None));
    let layers: Vec<usize> = moved.reports.iter().flat_map(|report| &report.replaced).map(|it| it.layer).collect();
    assert!([0, 1].iter().all(|layer| layers.contains(layer)), "{layers:?}");
    compare("degrees of 4 and 2", &moved, &stayed);
}

/// What the record says is what the rows then do: the loads before, summed by the owners that are told.
#[test]
fn records_tell_the_loads_of_owners() {
    let recipe = recipe(mixtral(), 6);
    let (reports, _) = trained(&recipe, shape(4, 4), &keeping(Zero::Off), Some(2));
    let mut owners = vec![(0..8).map(|expert| expert / 2).collect::<Vec<usize>>(); 2];
    for pair in reports.chunks_exact(2) {
        for told in &pair[1].replaced {
            let loads = |expert: usize| pair.iter().map(|report| report.moe[told.layer].load[expert]).sum::<u64>();
            let largest = |owners: &[usize]| {
                let of = |rank| (0..8).filter(|&expert| owners[expert] == rank).map(loads).sum::<u64>();
                (0..4).map(of).max().unwrap() as f64 / ((0..8).map(loads).sum::<u64>() as f64 / 4.0)
            };
            let expected = [&owners[told.layer], &told.owners].map(|owners| largest(owners));
            assert_eq!([told.imbalance_before, told.imbalance_after], expected);
            assert!(told.imbalance_after < told.imbalance_before, "{told:?}");
            owners[told.layer] = told.owners.clone();
        }
    }
    // Rows of the last step went to the owners of before it.
    let last = &reports[STEPS as usize - 1];
    for (sent, moe) in last.sent.iter().zip(&last.moe) {
        let arrived = |rank: usize| sent.rows.iter().map(|row| row[rank]).sum::<u64>();
        let of = |rank| (0..8).filter(|&e| owners[moe.layer][e] == rank).map(|e| moe.load[e]).sum::<u64>();
        assert_eq!((0..4).map(arrived).collect::<Vec<_>>(), (0..4).map(of).collect::<Vec<u64>>());
    }
    assert!(last.replaced.is_empty(), "step 5 is no second one");
}

/// Loads that are even enough are left alone.
#[test]
fn too_small_a_gain_moves_nothing() {
    let recipe = recipe(mixtral(), 6);
    let run = run_prepared(&recipe, shape(4, 4), |trainer| {
        trainer.replacing = Some(Replacing { gain: 0.9, ..eager(1) });
    });
    assert_eq!(moves(&run.reports), 0);
}

/// Stopped between two looks at the loads, with experts away from where the recipe has them: to the bit, on the same mesh,
/// and as ever up to the order of sums on another.
#[test]
fn stopping_and_continuing_with_moved_experts_changes_no_bit() {
    let recipe = recipe(mixtral(), 6);
    for (zero, offload) in [(Zero::Off, OffloadTarget::None), (Zero::Parameters, OffloadTarget::Host)] {
        let keeping = Keeping { offload, ..keeping(zero) };
        let run = tempfile::tempdir().unwrap();
        let prepared = |rank: &_, mesh: &_| {
            let mut trainer = keeping.trainer(&recipe, rank, mesh);
            trainer.replacing = Some(eager(2));
            trainer
        };
        let at_once = on_mesh(shape(4, 2), |rank, mesh| {
            let mut trainer = prepared(rank, mesh);
            let reports = recipe.train(&mut trainer, 1..=6);
            (reports, contents(&write(&run.path().join("at-once"), &mut trainer, 6)))
        });
        assert!(moves(&at_once[0].0[..2]) > 0 && moves(&at_once[0].0[2..]) > 0, "{:?}", at_once[0].0);
        let begun = on_mesh(shape(4, 2), |rank, mesh| {
            let mut trainer = prepared(rank, mesh);
            recipe.train(&mut trainer, 1..=3);
            write(run.path(), &mut trainer, 3)
        });
        let continued = on_mesh(shape(4, 2), |rank, mesh| {
            let mut trainer = prepared(rank, mesh);
            read(&begun[0], &mut trainer);
            let reports = recipe.train(&mut trainer, 4..=6);
            (reports, contents(&write(&run.path().join("continued"), &mut trainer, 6)))
        });
        assert_eq!(continued[0].0, at_once[0].0[3..], "{keeping:?}");
        assert!(continued[0].1 == at_once[0].1, "{keeping:?}");
        for other in [shape(2, 1), shape(4, 4), shape(2, 2)] {
            let reports = on_mesh(other, |rank, mesh| {
                let mut trainer = keeping.trainer(&recipe, rank, mesh);
                trainer.replacing = Some(eager(2));
                read(&begun[0], &mut trainer);
                recipe.train(&mut trainer, 4..=6)
            });
            for (got, want) in reports[0].iter().zip(&at_once[0].0[3..]) {
                assert!((got.loss / want.loss - 1.0).abs() < 1e-5, "{other:?}: {} {}", got.loss, want.loss);
                assert_eq!(got.moe, want.moe, "{other:?}");
            }
        }
    }
}

const STAYING: &str = "--ranks 4 --set parallel.expert=2 --set parallel.zero=1 --set moe.experts=8";

/// The program: the same weights with and without, lines that tell of it, and no trace of a stop.
#[test]
fn a_run_moves_experts_and_says_so() {
    let shop = Workshop::new();
    let moves = format!("{STAYING} --set parallel.replace_every=2 --set parallel.replace_gain=0");
    let moving = shop.train(&moves);
    assert!(moving.err.contains("changed ranks: rows of the busiest"), "{}", moving.err);
    shop.train(&format!("{STAYING} --set run.dir=staying"));
    assert_eq!(shop.series(RUN, "loss"), shop.series("staying", "loss"));
    assert!(shop.tensors(RUN, 6) == shop.tensors("staying", 6));
    let replaced = shop.series(RUN, "replaced");
    let is_told = |step: usize| !replaced[step - 1].is_null();
    assert!(is_told(2) && !is_told(1) && !is_told(3), "{replaced:?}");
    assert!(shop.series("staying", "replaced").iter().all(Value::is_null));
    assert!(shop.checkpoint(RUN, 6).join("experts.json").exists());
    assert!(!shop.checkpoint("staying", 6).join("experts.json").exists());

    shop.train(&format!("{moves} --set run.dir=stopped --set train.steps=3 --set train.schedule=constant"));
    shop.train(&format!("{moves} --set run.dir=at-once --set train.schedule=constant"));
    shop.train(&format!("{moves} --set run.dir=stopped --set train.schedule=constant --resume"));
    for field in ["loss", "grad_norm", "replaced", "sent"] {
        assert_eq!(shop.series("stopped", field), shop.series("at-once", field), "{field}");
    }
    assert!(shop.tensors("stopped", 6) == shop.tensors("at-once", 6));
    shop.succeeds(&format!("report {RUN}"));
    assert!(shop.read(&format!("{RUN}/report.html")).contains("<caption>Experts that changed ranks"));
    assert!(!shop.read("staying/report.html").contains("<caption>Experts that changed ranks"));
    shop.succeeds(&format!("plan {RECIPE} {}", moves.replace("--ranks 4", "--set parallel.ranks=4")));
}

/// Of tables that are equally good for ranks, that which gives nodes rows more evenly.
#[test]
fn a_run_moves_experts_by_its_nodes() {
    let shop = Workshop::new();
    let nodes = "parallel.node_link={ranks_per_node=2,latency_us=0,gbytes_per_s=1000}";
    let moves = "--set parallel.replace_every=1 --set parallel.replace_gain=0";
    shop.train(&format!("--ranks 4 --set parallel.expert=4 --set moe.experts=8 {moves} --set {nodes}"));
    let numbers = |value: &Value| -> Vec<u64> { serde_json::from_value(value.clone()).unwrap() };
    let mut tables: Vec<ExpertTable> = (0..2).map(|_| ExpertTable::new(&[0, 0, 1, 1, 2, 2, 3, 3], 4)).collect();
    let (mut moved, mut decided) = (0, 0);
    for line in shop.metrics(RUN) {
        for replaced in line["replaced"].as_array().into_iter().flatten() {
            let layer = replaced["layer"].as_u64().unwrap() as usize;
            let load = numbers(&line["moe"][layer]["load"]);
            let [here, elsewhere] =
                [[0, 0, 1, 1], [0, 1, 2, 3]].map(|nodes| reassigned(&load, &tables[layer], &nodes).owners());
            let owners: Vec<usize> = numbers(&replaced["owners"]).into_iter().map(|rank| rank as usize).collect();
            assert_eq!(owners, here, "step {}, layer {layer}", line["step"]);
            decided += usize::from(here != elsewhere);
            moved += 1;
            tables[layer] = ExpertTable::new(&owners, 4);
        }
    }
    assert!(moved > 0 && decided > 0, "{moved} moves, of which nodes decide {decided}");
}

/// What says who owned which expert is not believed if it is of another model.
#[test]
fn owners_of_another_model_are_refused() {
    let recipe = recipe(mixtral(), 6);
    let run = tempfile::tempdir().unwrap();
    let folders = on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.replacing = Some(eager(1));
        recipe.train(&mut trainer, 1..=1);
        write(run.path(), &mut trainer, 1)
    });
    let path = folders[0].join("experts.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    let cases = [
        (whole.replacen("\"layer\":1", "\"layer\":2", 1), "layers and experts"),
        (whole.replacen("\"load\":[", "\"load\":[1,", 1), "layers and experts"),
        (whole.replacen("\"load\":[", "\"load\":[1099511627777,", 1).replacen(",0]", "]", 1), "layers and experts"),
        (whole.replacen("owners", "holders", 1), "unknown field"),
        (whole[..20].to_owned(), "EOF"),
    ];
    for (text, words) in cases {
        assert_ne!(text, whole);
        std::fs::write(&path, text).unwrap();
        crate::program::reseal(&folders[0]);
        let said = on_mesh(shape(2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            trainer.replacing = Some(eager(1));
            trainer.adopt_experts(&open(&folders[0]).unwrap()).unwrap_err().to_string()
        });
        assert!(said[0].contains("experts.json is damaged") && said[0].contains(words), "{}", said[0]);
    }
}

#[test]
fn requests_that_cannot_be_met_say_why() {
    let shop = Workshop::new();
    let fails = |set: &str, words: &[&str]| {
        let set: String = set.split(' ').map(|set| format!(" --set {set}")).collect();
        shop.fails(&format!("train {RECIPE} --set parallel.ranks=4 {set}"), 2, words);
    };
    let every = "parallel.replace_every=2";
    fails(&format!("{every} parallel.expert=1"), &["parallel.replace_every", "every rank has all experts"]);
    fails(&format!("{every} parallel.expert=4"), &["parallel.replace_every", "every rank has one expert"]);
    fails(&format!("{every} parallel.expert=2 parallel.exchange=experts"), &["computes every row where its token is"]);
    fails(
        &format!("{every} parallel.expert=2 parallel.expert_table=[0,0,0,1]"),
        &["different numbers", "leave parallel.expert_table out"],
    );
    fails(
        &format!("{every} parallel.expert=2 moe.shadowing=force:1 moe.record=routes"),
        &["shadow sets", "moe.record"],
    );
    fails("parallel.replace_gain=0.1 parallel.expert=2", &["parallel.replace_gain", "moves no expert"]);
    fails(&format!("{every} parallel.expert=2 parallel.replace_gain=1"), &["parallel.replace_gain", "below 1"]);
    let given = config::load(&shop.path(RECIPE), &[every.to_owned(), "parallel.expert=2".to_owned()], Some(4)).unwrap();
    assert_eq!(given.config.parallel.replace_gain, 0.05);
}
