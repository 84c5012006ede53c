//! Plans of what a run recorded: the same rows on the same mesh or on another take what is planned, and no less.

use std::path::Path;

use guildhall::model::Sizes;
use guildhall::moe::recording::Recording;
use guildhall::moe::{GateKind, Routings};
use guildhall::parallel::MeshShape;
use guildhall::plan::{Layout, Task};
use std::sync::Arc;

use crate::plan::plain;
use crate::program::{RECIPE, RUN, Workshop};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, gpt2, mixtral};
use crate::world::on_mesh;

const STEPS: u64 = 2;

/// The most that a rank of a mesh held in a run that wrote or followed `routings`.
fn accounted(recipe: &Recipe, layout: &Layout, routings: &Routings) -> u64 {
    let peaks = on_mesh(layout.mesh, |rank, mesh| {
        let mesh = &mesh.clone().with_sequence(layout.sequence).with_rates(layout.rates);
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.routings = Arc::new(routings.clone());
        recipe.train(&mut trainer, 1..=STEPS);
        rank.device.account().peak_total()
    });
    peaks.into_iter().max().unwrap()
}

fn open(path: &Path, sizes: &Sizes) -> Recording {
    Recording::open(path, recorded(sizes), 1..=STEPS).unwrap()
}

/// One rank records; others follow, with lanes, several micro-batches, visitors, a gate that fills experts unevenly.
#[test]
fn what_was_recorded_on_one_rank_is_planned_on_any_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let steep = |mut sizes: Sizes, gate: GateKind, shadowing: &str| {
        sizes.model.init_std = 0.3;
        let moe = sizes.moe.as_mut().expect("experts");
        (moe.gate, moe.shadowing) = (gate.into(), shadowing.to_owned());
        sizes
    };
    let tensor = |expert_tensor| MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) };
    for (name, sizes) in [
        ("softmax", steep(mixtral(), GateKind::Softmax, "off")),
        ("gshard", steep(gpt2(), GateKind::Gshard, "off")),
        ("expert choice", steep(mixtral(), GateKind::ExpertChoice, "off")),
        ("visitors", steep(mixtral(), GateKind::Softmax, "force:2")),
    ] {
        let one = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch: ROWS };
        let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
        accounted(&one, &plain(MeshShape::of(1, 1)), &Routings { record, ..Routings::NONE });
        for (shape, sequence, micro_batch) in [
            (MeshShape::of(2, 2), false, 6),
            (MeshShape::of(2, 2), false, 4),
            (MeshShape::of(4, 4), false, 3),
            (tensor(2), false, 2),
            (tensor(1), false, 6),
            (tensor(2), true, 6),
        ] {
            let recipe = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch };
            let layout = Layout { sequence, drop_duplicates: true, ..plain(shape) };
            let routings = Routings { replay: Some(open(&path, &sizes)), ..Routings::NONE };
            let accounted = accounted(&recipe, &layout, &routings);
            let task = Task { sizes: sizes.clone(), layout, rows_per_step: ROWS, micro_batch, predicted: 1.0 };
            let recorded = task.recorded(&open(&path, &sizes), 1..=STEPS).unwrap();
            let planned = recorded.heaviest(&task).at_peak.total();
            let ratio = planned as f64 / accounted as f64;
            // As other plans (I8).
            assert!(
                (1.0..=1.05).contains(&ratio),
                "{name} on {shape:?} by {micro_batch}: {planned} planned for {:?}, {accounted} accounted: {ratio}",
                recorded.skew
            );
        }
    }
}

/// The program's own plan of its own recording bounds its own run, and tells of files that are none of the recipe's.
#[test]
fn the_program_plans_what_it_recorded() {
    let shop = Workshop::new();
    let recipe = "--ranks 2 --set parallel.expert=2 --set train.eval_every=0 --set model.init_std=0.2";
    shop.train(&format!("{recipe} --set moe.record=routes"));
    let accounted = shop.summary(RUN)["peak_bytes"]["total"].as_u64().unwrap();
    let plan = |more: &str| {
        let planned = shop.succeeds(&format!("plan {RECIPE} {recipe} --json --imbalance recorded:routes {more}"));
        serde_json::from_str::<serde_json::Value>(&planned.out).unwrap()
    };
    let planned = plan("");
    let [mean, most] = [0, 1].map(|i| planned["imbalance"][i].as_f64().unwrap());
    assert!(1.0 < mean && mean <= most && most <= 2.0, "{mean} {most}");
    let peak = planned["bytes_total_skewed"].as_u64().unwrap() * 2;
    assert!(accounted <= peak, "{accounted} of {peak}");
    assert!(plan("--search")["search"][0]["fits"].as_bool().unwrap());
    let refused = |what: &str, words: &[&str]| shop.fails(&format!("plan {RECIPE} {what}"), 2, words);
    refused("--imbalance recorded:nowhere", &["could not open the recording nowhere"]);
    refused(&format!("--imbalance recorded:{RECIPE}"), &["is not a recording of routings"]);
    refused("--imbalance recorded:routes --set moe.experts=2", &["moe.experts: 4 there, 2 here"]);
}
