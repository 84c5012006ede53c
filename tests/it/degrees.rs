//! Layers whose experts are spread over different numbers of ranks: they learn what one rank learns, in every way that
//! layers of one degree do, and what they leave has no trace of it.

use std::fs;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{Destination, Extra, TrainingProgress, load_model, load_optimizer, open, save};
use guildhall::launch::Rank;
use guildhall::model::Sizes;
use guildhall::moe::ScheduleKind;
use guildhall::parallel::{Mesh, Order, PerLayer, Zero};
use guildhall::train::Trainer;
use guildhall_tensor::{Dtype, Part, Recompute};
use serde_json::{Value, json};

use crate::parity::{Run, compare, run, train_on};
use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{Recipe, Tensors, Tolerance, all_near, gpt2, gradients, mixtral, nllb, state, union};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

/// A mesh, and the degrees of two layers with four experts.
type Mixed = (Shape, [usize; 2]);

const fn other_order(shape: Shape) -> Shape {
    Shape { order: Order::DataExpert, ..shape }
}

const PLAIN: [Mixed; 5] = [
    (shape(2, 1), [1, 2]),
    (shape(4, 1), [4, 2]),
    (shape(4, 1), [1, 4]),
    (shape(8, 1), [2, 4]),
    (other_order(shape(8, 1)), [4, 2]),
];

/// Whole experts beside slices of all else, and slices of experts.
const SLICED: [Mixed; 5] = [
    (whole_experts(4, 2, 1), [4, 2]),
    (other_order(whole_experts(8, 2, 1)), [2, 4]),
    (sliced(4, 2, 1), [2, 1]),
    (sliced(8, 2, 1), [2, 4]),
    (other_order(sliced(8, 2, 1)), [4, 1]),
];

fn of(rank: &Rank, (shape, degrees): Mixed) -> Mesh {
    Mesh::of_degrees(rank.world.clone(), shape, PerLayer::Each(degrees.to_vec())).unwrap()
}

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 6, micro_batch: 6 }
}

fn train(recipe: &Recipe, mixed: Mixed, change: impl Fn(Mesh) -> Mesh + Sync) -> Run {
    train_on(recipe, mixed.0, |rank, _| change(of(rank, mixed)), |_| ())
}

/// Four layers, the second and the fourth with experts.
fn every_second() -> Sizes {
    let mut sizes = gpt2();
    (sizes.model.layers, sizes.model.dropout) = (4, 0.2);
    sizes
}

#[test]
fn mixed_degrees_train_alike_on_every_mesh() {
    for (name, sizes) in [("mixtral", mixtral()), ("gpt2", every_second()), ("nllb", nllb())] {
        let want = run(&recipe(sizes.clone()), ONE);
        for micro_batch in [6, 4] {
            let recipe = Recipe { micro_batch, ..recipe(sizes.clone()) };
            for mixed in PLAIN.into_iter().chain(SLICED) {
                compare(&format!("{name} on {mixed:?}"), &train(&recipe, mixed, |mesh| mesh), &want);
            }
            for mixed in SLICED {
                let got = train(&recipe, mixed, |mesh| mesh.with_sequence(true));
                compare(&format!("{name} on {mixed:?}, tokens split"), &got, &want);
            }
        }
    }
}

/// Of degrees that do not divide each other, a group of one overlaps two of the other without holding either.
#[test]
fn groups_that_only_overlap_do_not_wait_for_each_other() {
    let mut sizes = mixtral();
    sizes.moe.as_mut().expect("experts").experts = 6.into();
    let recipe = recipe(sizes);
    let want = run(&recipe, ONE);
    for mixed in [(shape(6, 1), [2, 3]), (other_order(shape(6, 1)), [3, 2]), (sliced(12, 2, 1), [3, 2])] {
        let whole = train(&recipe, mixed, |mesh| mesh);
        compare(&format!("six experts on {mixed:?}"), &whole, &want);
        assert!(train(&recipe, mixed, |mesh| mesh.with_zero(Zero::Parameters)) == whole, "{mixed:?}");
    }
}

/// Every tensor's gradient by its name, and the norm of all.
fn first_gradients(recipe: &Recipe, shape: Shape, make: impl Fn(&Rank, &Mesh) -> Mesh + Sync) -> (Tensors, f64) {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, &make(rank, mesh));
        let batches = recipe.batches(&trainer.mesh, 1);
        let sums = trainer.gradients(&batches, 1).unwrap();
        (gradients(&mut trainer.model), sums.gradient_norm)
    });
    let norm = ranks[0].1;
    assert!(ranks.iter().all(|rank| rank.1 == norm), "{shape:?}: norms differ");
    (union(ranks.into_iter().map(|rank| rank.0)), norm)
}

#[test]
fn gradients_and_their_norm_are_those_of_one_rank() {
    let recipe = recipe(mixtral());
    let want = first_gradients(&recipe, ONE, |_, mesh| mesh.clone());
    for mixed in PLAIN.into_iter().chain(SLICED) {
        let got = first_gradients(&recipe, mixed.0, |rank, _| of(rank, mixed));
        // As in `parity`: sums in another order.
        all_near(&format!("{mixed:?}"), &got.0, &want.0, Tolerance { relative: 1e-5, floor: 2e-9 });
        assert!((got.1 / want.1 - 1.0).abs() < 1e-6, "{mixed:?}: {} instead of {}", got.1, want.1);
    }
}

#[test]
fn stages_and_second_runs_change_no_bit() {
    let ways = [PLAIN[1], PLAIN[4], SLICED[0], SLICED[3]];
    for (sizes, dtype) in
        [(mixtral(), Dtype::F32), (mixtral(), Dtype::Bf16), (every_second(), Dtype::F32), (nllb(), Dtype::F32)]
    {
        let recipe = recipe(Sizes { dtype, ..sizes });
        for mixed in ways {
            let want = train(&recipe, mixed, |mesh| mesh);
            for zero in Zero::ALL {
                let got = train(&recipe, mixed, |mesh| mesh.with_zero(zero));
                assert!(got == want, "{dtype:?} on {mixed:?}, {zero:?}");
            }
            for keep_communication in [true, false] {
                let again = Recompute::of(vec![Part::Block], keep_communication);
                let prepare = |trainer: &mut Trainer| trainer.recompute = again.clone();
                let make = |rank: &Rank, _: &Mesh| of(rank, mixed).with_zero(Zero::Parameters);
                let got = train_on(&recipe, mixed.0, make, prepare);
                assert!(got == want, "{dtype:?} on {mixed:?}, {again:?}");
            }
        }
    }
}

/// Rows arrive, layer by layer, where that layer's experts are.
#[test]
fn rows_between_ranks_are_the_loads_of_each_layer() {
    for (sizes, mixed) in [mixtral(), every_second(), nllb()].iter().flat_map(|sizes| PLAIN.map(|mixed| (sizes, mixed)))
    {
        for report in train(&recipe(sizes.clone()), mixed, |mesh| mesh).reports {
            for ((moe, sent), degree) in report.moe.iter().zip(&report.sent).zip(mixed.1) {
                let arrived = |place: usize| sent.rows.iter().map(|row| row[place]).sum::<u64>();
                let loads = moe.load.chunks(4 / degree).map(|loads| loads.iter().sum::<u64>());
                assert!(sent.rows.iter().all(|row| row.len() == degree), "{mixed:?}: {:?}", sent.rows);
                assert_eq!((0..degree).map(arrived).collect::<Vec<_>>(), loads.collect::<Vec<_>>(), "{mixed:?}");
            }
        }
    }
}

#[test]
fn schedules_and_shadows_change_nothing() {
    let want = run(&recipe(mixtral()), ONE);
    for (kind, shadowing, shadows) in [
        (ScheduleKind::Smart, "off", Some(0)),
        (ScheduleKind::Plain, "force:1", Some(1)),
        (ScheduleKind::Smart, "auto", None),
    ] {
        let mut sizes = mixtral();
        let moe = sizes.moe.as_mut().expect("experts");
        (moe.schedule, moe.shadowing) = (kind, shadowing.to_owned());
        let recipe = recipe(sizes);
        for mixed in PLAIN.into_iter().chain(SLICED) {
            let measured = |rank: &Rank, _: &Mesh| of(rank, mixed).measured(&rank.device, Dtype::F32).unwrap();
            let got = train_on(&recipe, mixed.0, measured, |_| ());
            compare(&format!("{kind:?}, {shadowing} on {mixed:?}"), &got, &want);
            let (shape, degrees) = mixed;
            let groups: usize = degrees.iter().map(|&degree| shape.at(degree).expert_data()).sum();
            if let Some(n) = shadows {
                assert!(got.reports.iter().all(|report| report.shadowed == (groups * n) as u64), "{mixed:?}");
            }
        }
    }
}

/// Speeds are those of the links that a degree's groups use.
#[test]
fn every_degree_is_measured() {
    on_mesh(shape(4, 1), |rank, _| {
        let mesh = of(rank, (shape(4, 1), [1, 4])).measured(&rank.device, Dtype::F32).unwrap();
        let bandwidth = |degree: usize| mesh.at(degree).rates().unwrap().bandwidth;
        assert!(bandwidth(1).is_infinite() && bandwidth(4).is_finite(), "{} and {}", bandwidth(1), bandwidth(4));
        assert_eq!((mesh.expert.size(), mesh.at(1).expert.size(), mesh.at(1).at(4).expert.size()), (4, 1, 4));
    });
}

// --- checkpoints ------------------------------------------------------------------------------------------------

fn write(run: &Path, trainer: &mut Trainer, step: u64) -> PathBuf {
    let extra = Extra {
        progress: TrainingProgress { step, tokens: 40 * step, seconds: 1.5, loss_trend: None },
        data_fingerprint: "rows".to_owned(),
        files: Vec::new(),
    };
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save(Destination::of(run), model, optimizer, mesh, extra).unwrap()
}

fn read(folder: &Path, trainer: &mut Trainer) {
    let source = open(folder).unwrap();
    load_model(&source, &mut trainer.model).unwrap();
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer).unwrap();
}

fn files(folder: &Path) -> Vec<Vec<u8>> {
    ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(folder.join(name)).unwrap()).into()
}

/// A run of mixed degrees goes on to the bit where it was left, and any other mesh goes on with it; what that one writes
/// without a step is what it read.
#[test]
fn any_degrees_continue_what_any_began() {
    for (dtype, began) in [
        (Dtype::F32, (shape(4, 1), [4, 2])),
        (Dtype::Bf16, (shape(4, 1), [4, 2])),
        (Dtype::F32, (sliced(4, 2, 1), [1, 2])),
    ] {
        let recipe = recipe(Sizes { dtype, ..mixtral() });
        let (run, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let left = on_mesh(began.0, |rank, _| {
            let mut trainer = recipe.trainer(rank, &of(rank, began).with_zero(Zero::Optimizer));
            recipe.train(&mut trainer, 1..=2);
            let folder = write(run.path(), &mut trainer, 2);
            recipe.train(&mut trainer, 3..=3);
            (folder, write(after.path(), &mut trainer, 3), state(&mut trainer))
        });
        let want = union(left.iter().map(|rank| rank.2.clone()));
        for goes_on in [began, (shape(4, 1), [2, 4]), (shape(2, 1), [1, 2]), (shape(4, 1), [2, 2]), (ONE, [1, 1])] {
            let (copy, end) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let ranks = on_mesh(goes_on.0, |rank, _| {
                let mut trainer = recipe.trainer(rank, &of(rank, goes_on));
                read(&left[0].0, &mut trainer);
                let copied = write(copy.path(), &mut trainer, 2);
                recipe.train(&mut trainer, 3..=3);
                (copied, write(end.path(), &mut trainer, 3), state(&mut trainer))
            });
            assert!(files(&ranks[0].0) == files(&left[0].0), "{goes_on:?} read and wrote something else");
            if goes_on == began {
                assert!(files(&ranks[0].1) == files(&left[0].1), "{goes_on:?} went on otherwise");
            }
            let lengths = |folder: &Path| files(folder).iter().map(Vec::len).collect::<Vec<_>>();
            assert_eq!(lengths(&ranks[0].1), lengths(&left[0].1), "{goes_on:?} after {began:?}");
            let got = union(ranks.into_iter().map(|rank| rank.2));
            if dtype == Dtype::F32 {
                // As in `parity`: gradients that are zero in truth move a weight by noise.
                let tolerance = Tolerance { relative: 1e-5, floor: 1e-6 };
                all_near(&format!("{goes_on:?} after {began:?}"), &got, &want, tolerance);
            }
        }
    }
}

// --- the program ------------------------------------------------------------------------------------------------

#[test]
fn the_program_trains_layers_of_several_degrees() {
    let shop = Workshop::new();
    let steady = "--set train.schedule=constant";
    shop.train(&format!("--ranks 4 --set parallel.expert=[4,2] {steady} --set moe.gate=balanced"));
    let summary = shop.summary(RUN);
    assert_eq!((&summary["expert"], &summary["expert_by_layer"]), (&json!(4), &json!([4, 2])));
    let groups: Vec<&String> = summary["traffic_by_group"].as_object().unwrap().keys().collect();
    for group in ["expert_2", "expert_4", "expert_data_2"] {
        assert!(groups.iter().any(|name| *name == group), "no {group}: {groups:?}");
    }
    assert!(!groups.iter().any(|name| *name == "expert" || *name == "expert_data"), "{groups:?}");
    let [accounted, predicted] = [&summary["peak_bytes"]["total"], &summary["predicted_peak_bytes"]];
    let ratio = accounted.as_f64().unwrap() / predicted.as_f64().unwrap();
    assert!((0.95..=1.0).contains(&ratio), "{accounted} of {predicted}");
    let rows = summary["rows_sent"].as_array().unwrap();
    // Six steps, two layers, a rank's quarter of 256 tokens with two choices each.
    let of_rank = |row: &Value| row.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>();
    let all_routes = |row: Vec<u64>| row.len() == 4 && row.iter().sum::<u64>() == 6 * 2 * 64 * 2;
    assert!(rows.iter().map(of_rank).all(all_routes), "{rows:?}");
    let page = fs::read_to_string(shop.path(RUN).join("report.html")).unwrap();
    assert!(page.contains("4 × 4, 2") && page.contains("Rows between ranks"), "the report of two degrees");

    // Another mesh goes on, and one rank evaluates.
    let resumed = format!("--resume --ranks 2 --set parallel.expert=[1,2] {steady} --set moe.gate=balanced");
    shop.train(&format!("{resumed} --set train.steps=8"));
    assert_eq!(shop.summary(RUN)["expert_by_layer"], json!([1, 2]));
    shop.succeeds(&format!("evaluate {RUN}/checkpoints/latest --ranks 1"));

    // The list of one number is the number: names and all.
    shop.train(&format!("--ranks 2 --set parallel.expert=[2,2] --set run.dir=alike {steady}"));
    shop.train(&format!("--ranks 2 --set parallel.expert=2 --set run.dir=number {steady}"));
    let [alike, number] = ["alike", "number"].map(|run| shop.summary(run));
    for key in ["expert", "traffic_by_group", "loss_last", "predicted_peak_bytes"] {
        assert_eq!(alike[key], number[key], "{key}");
    }
    assert!(alike.get("expert_by_layer").is_none());
}

#[test]
fn the_plan_names_the_groups_of_every_degree() {
    let shop = Workshop::new();
    let planned = shop.succeeds(&format!(
        "plan {RECIPE} --ranks 4 --set parallel.expert=[4,1] --device h100 --json --explain --search"
    ));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    let groups = &planned["groups"];
    assert_eq!(groups["expert_4"], json!([[0, 1, 2, 3]]));
    assert_eq!(groups["expert_data_1"], json!([[0, 1, 2, 3]]));
    assert_eq!(groups["expert_1"], json!([[0], [1], [2], [3]]));
    assert!(groups.get("expert").is_none(), "{groups}");
    let sent = planned["traffic"].as_array().unwrap();
    let bytes = |group: &str, collective: &str| {
        let one = sent.iter().find(|sent| sent["group"] == group && sent["collective"] == collective);
        one.map(|sent| sent["bytes"].as_u64().unwrap())
    };
    assert!(bytes("expert_4", "all_to_all") > Some(0) && bytes("expert_data_1", "all_reduce") > Some(0), "{sent:?}");
    assert_eq!((bytes("expert_1", "all_to_all"), bytes("expert_data_4", "all_reduce")), (Some(0), Some(0)), "{sent:?}");
    assert!(!planned["search"].as_array().unwrap().is_empty(), "the search has one degree");
}
