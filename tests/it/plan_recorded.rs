//! Plans of what a run recorded: the same rows on the same mesh or on another take what is planned, and no less.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use guildhall::model::Sizes;
use guildhall::moe::recording::{ClusterFile, Clustering, Recording};
use guildhall::moe::{Condense, Config, GateKind, Routings, ScheduleKind};
use guildhall::parallel::{Axis, MeshShape};
use guildhall::plan::{
    Layout, Load, ModelPart, PlannedTraffic, RecomputePolicy, RecordedFiles, StepCost, Task, step, traffic,
};
use guildhall_comm::Collective;
use guildhall_tensor::{Dtype, Phase};

use crate::plan::plain;
use crate::program::{RECIPE, RUN, Workshop};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, gpt2, mixtral};
use crate::world::on_mesh;

pub(crate) const STEPS: u64 = 2;

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

pub(crate) fn clustering(sizes: &Sizes) -> Option<Clustering> {
    let condensation = sizes.moe.as_ref()?.condensation()?;
    Some(Clustering::new(&recorded(sizes), condensation.tokens))
}

fn clusters(path: &Path, sizes: &Sizes) -> Option<ClusterFile> {
    let follow = |own| ClusterFile::follow(&ClusterFile::beside(path), own, 1..=STEPS).unwrap().unwrap();
    clustering(sizes).map(follow)
}

pub(crate) fn condensing(mut sizes: Sizes, threshold: f64) -> Sizes {
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.condense, moe.condense_threshold) = (Condense::Static, threshold);
    sizes
}

/// Calls and bytes that the ranks of a mesh send in a run, by group and collective.
pub(crate) fn sent(recipe: &Recipe, layout: &Layout, routings: &Routings) -> BTreeMap<(String, Collective), [u64; 2]> {
    let ranks = on_mesh(layout.mesh, |rank, mesh| {
        let mesh = &mesh.clone().with_sequence(layout.sequence).with_rates(layout.rates);
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.routings = Arc::new(routings.clone());
        trainer.recompute = layout.recompute.segments();
        let before = rank.ledger.snapshot();
        recipe.train(&mut trainer, 1..=STEPS);
        (before, rank.ledger.snapshot())
    });
    let mut sums = BTreeMap::<_, [u64; 2]>::new();
    for (before, after) in ranks {
        for (key, sent) in after {
            let earlier = before.get(&key).copied().unwrap_or_default();
            let sum = sums.entry(key).or_default();
            (sum[0], sum[1]) = (sum[0] + sent.calls - earlier.calls, sum[1] + sent.bytes - earlier.bytes);
        }
    }
    sums.into_iter().filter(|(_, [calls, _])| *calls > 0).collect()
}

/// What was planned, by the names that ledgers have.
pub(crate) fn by_name(
    planned: BTreeMap<(Axis, Collective), PlannedTraffic>,
    layout: &Layout,
) -> BTreeMap<(String, Collective), [u64; 2]> {
    let named = planned.into_iter();
    named.map(|((axis, kind), sent)| ((layout.degrees.name(axis), kind), [sent.calls, sent.bytes])).collect()
}

/// Two tensor groups of two ranks, which slice experts in so many.
pub(crate) fn tensor(expert_tensor: usize) -> MeshShape {
    MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) }
}

pub(crate) fn split(layout: Layout) -> Layout {
    Layout { sequence: true, ..layout }
}

/// Whose blocks run again.
pub(crate) fn blocks(layout: Layout) -> Layout {
    Layout { recompute: RecomputePolicy::Blocks { keep: false }, ..layout }
}

/// One rank records its clusters. What ranks of other meshes send that condense themselves is what is planned from the
/// recording, in every group, to the byte: with lanes, steps, visitors, a last micro-batch that is smaller, and blocks that
/// run again. But for metrics, nowhere is more sent than without condensation.
#[test]
fn bytes_of_condensed_rows_are_those_of_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let ways: [(&str, fn(&mut Config)); 5] = [
        ("plain", |_| ()),
        ("steps", |moe| moe.schedule = ScheduleKind::Smart),
        ("visitors", |moe| moe.shadowing = "force:2".to_owned()),
        ("duplicates", |moe| moe.drop_duplicates = false),
        ("places", |moe| (moe.capacity_factor, moe.group_tokens) = (Some(0.8), Some(8))),
    ];
    for (name, change) in ways {
        let mut plain_sizes = mixtral();
        change(plain_sizes.moe.as_mut().expect("experts"));
        let sizes = condensing(plain_sizes.clone(), 0.5);
        let one = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch: ROWS };
        let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
        let create = |header| ClusterFile::create(&ClusterFile::beside(&path), header, 1).unwrap();
        let routings = Routings { record, record_clusters: clustering(&sizes).map(create), ..Routings::NONE };
        sent(&one, &plain(MeshShape::of(1, 1)), &routings);
        let (routes, clusters) = (open(&path, &sizes), clusters(&path, &sizes));
        for (layout, micro_batch) in [
            (plain(MeshShape::of(2, 2)), 6),
            (plain(MeshShape::of(4, 4)), 4),
            (plain(tensor(2)), 4),
            (plain(tensor(1)), 6),
            (blocks(plain(MeshShape::of(2, 2))), 4),
            (blocks(plain(tensor(2))), 6),
        ] {
            let layout = Layout { drop_duplicates: sizes.moe.as_ref().expect("experts").drop_duplicates, ..layout };
            let what = format!("{name} on {:?} by {micro_batch}", layout.mesh);
            let run = |sizes: &Sizes| {
                let recipe = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch };
                let routings = Routings { replay: Some(open(&path, sizes)), ..Routings::NONE };
                sent(&recipe, &layout, &routings)
            };
            let (counted, plain) = (run(&sizes), run(&plain_sizes));
            let own = layout.clone();
            let task = Task { sizes: sizes.clone(), layout: own, rows_per_step: ROWS, micro_batch, predicted: 1.0 };
            let files = RecordedFiles { routes: &routes, clusters: clusters.as_ref(), visits: None, hosts: None };
            let planned = task.traffic_recorded(files, 1..=STEPS).unwrap();
            let planned = by_name(planned, &layout);
            assert_eq!(planned, counted, "{what}");
            // What a step counts for its metrics is summed over the world: similarities too.
            let metrics = ("world".to_owned(), Collective::AllReduce);
            for (kind, [_, bytes]) in counted.iter().filter(|(kind, _)| **kind != metrics) {
                assert!(*bytes <= plain[kind][1], "{what}, {kind:?}: {bytes} in place of {}", plain[kind][1]);
            }
            let rows = ("expert".to_owned(), Collective::AllToAll);
            assert!(counted[&rows][1] < plain[&rows][1], "{what}");
        }
    }
}

/// By hand: one expert gets all 32 routes of a group of four sequences, which are compared in parts of 24 and 8.
#[test]
fn what_comparing_takes_is_planned() {
    let sizes = |threshold: f64| {
        let mut sizes = condensing(gpt2(), threshold);
        let moe = sizes.moe.as_mut().expect("experts");
        (moe.experts, moe.top_k, moe.condense_tokens, moe.condense_compared) = (1.into(), 1, Some(32), 24);
        sizes
    };
    let task = |sizes: Sizes, dtype: Dtype| {
        let layout = plain(MeshShape::of(1, 1));
        Task { sizes: Sizes { dtype, ..sizes }, layout, rows_per_step: 8, micro_batch: 4, predicted: 1.0 }
    };
    let off = {
        let mut sizes = sizes(1.5);
        sizes.moe.as_mut().expect("experts").condense = Condense::Off;
        sizes
    };
    let cost = |sizes: Sizes| step(&task(sizes, Dtype::F32), 0, &Load::Even { imbalance: 1.0 });
    let [compared, off] = [sizes(1.5), off].map(cost);
    let forward = |cost: &StepCost| cost.work[&(Phase::Forward, ModelPart::Routing)].multiply_adds;
    let layers = (0..gpt2().model.layers).filter(|&layer| gpt2().moe_of(layer).is_some()).count() as u64;
    let d = gpt2().model.d_model as u64;
    assert_eq!(forward(&compared) - forward(&off), 2 * layers * (24 * 24 + 8 * 8) * d);
}

/// A share of rows is saved in what is sent and computed.
#[test]
fn a_share_of_rows_is_planned() {
    let tensor = MeshShape { tensor: 2, expert_tensor: 2, ..MeshShape::of(4, 2) };
    for shape in [MeshShape::of(2, 2), tensor] {
        let of = |share: Option<f64>| {
            let sizes = if share.is_some() { condensing(mixtral(), 0.5) } else { mixtral() };
            let layout = Layout { condensed: share.unwrap_or(0.0), ..plain(shape) };
            let task = Task { sizes, layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
            step(&task, 0, &Load::Even { imbalance: 1.0 })
        };
        let [off, none, half] = [None, Some(0.0), Some(0.5)].map(of);
        let rows = |cost: &StepCost| traffic(&cost.messages)[&(Axis::Expert(2), Collective::AllToAll)].bytes;
        // Beside the rows travel their numbers: two experts' in each direction, of every layer.
        let numbers = |bytes: u64| bytes - 2 * 8 * 2;
        assert_eq!(rows(&none), rows(&off), "{shape:?}");
        assert_eq!(2 * numbers(rows(&half)), numbers(rows(&none)), "{shape:?}");
        let experts = |cost: &StepCost| cost.work[&(Phase::Forward, ModelPart::Experts)].multiply_adds;
        assert_eq!(2 * experts(&half), experts(&none), "{shape:?}");
        assert!(none.at_peak.total() >= half.at_peak.total(), "{shape:?}");
    }
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
        ("condensed", condensing(steep(mixtral(), GateKind::Softmax, "off"), 0.5)),
        ("condensed visitors", condensing(steep(mixtral(), GateKind::Softmax, "force:2"), 0.5)),
        ("compared", condensing(steep(gpt2(), GateKind::Softmax, "off"), 1.5)),
    ] {
        let one = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch: ROWS };
        let record = Some(Recording::create(&path, recorded(&sizes), 1).unwrap());
        let create = |header| ClusterFile::create(&ClusterFile::beside(&path), header, 1).unwrap();
        let record_clusters = clustering(&sizes).map(create);
        accounted(&one, &plain(MeshShape::of(1, 1)), &Routings { record, record_clusters, ..Routings::NONE });
        for (shape, sequence, micro_batch) in [
            (MeshShape::of(2, 2), false, 6),
            (MeshShape::of(2, 2), false, 4),
            (MeshShape::of(4, 4), false, 3),
            (tensor(2), false, 2),
            (tensor(1), false, 6),
            (tensor(2), true, 6),
        ] {
            if sequence && sizes.moe.as_ref().expect("experts").condenses() {
                continue;
            }
            let recipe = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch };
            let layout = Layout { sequence, drop_duplicates: true, ..plain(shape) };
            let routings = Routings { replay: Some(open(&path, &sizes)), ..Routings::NONE };
            let accounted = accounted(&recipe, &layout, &routings);
            let (routes, clusters) = (open(&path, &sizes), clusters(&path, &sizes));
            let files = RecordedFiles { routes: &routes, clusters: clusters.as_ref(), visits: None, hosts: None };
            let task = Task { sizes: sizes.clone(), layout, rows_per_step: ROWS, micro_batch, predicted: 1.0 };
            let recorded = task.recorded(files, 1..=STEPS).unwrap();
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

/// The program's bytes of rows are those of its own plan, on the mesh of the recording and on others.
#[test]
fn the_program_plans_the_bytes_of_what_it_recorded() {
    let shop = Workshop::new();
    let recipe = "--set train.eval_every=0 --set moe.condense=static --set moe.condense_threshold=0.5";
    let meshes = ["--ranks 2 --set parallel.expert=2", "--ranks 4 --set parallel.expert=4 --set train.micro_batch=4"];
    shop.train(&format!("{recipe} {} --set moe.record=routes --set run.dir=recorded", meshes[0]));
    let plan = |more: &str| shop.succeeds(&format!("plan {RECIPE} --json --set train.eval_every=0 {more}"));
    let json = |out: &str| serde_json::from_str::<serde_json::Value>(out).unwrap();
    let rows = |traffic: &serde_json::Value| {
        let of = |sent: &&serde_json::Value| sent["group"] == "expert" && sent["collective"] == "all_to_all";
        traffic.as_array().unwrap().iter().find(of).unwrap()["bytes"].as_u64().unwrap()
    };
    for mesh in meshes {
        shop.train(&format!("{recipe} {mesh} --set moe.replay=routes"));
        let counted = shop.summary(RUN)["traffic_by_group"]["expert"]["all_to_all"].clone();
        let planned = plan(&format!("--set moe.condense=static {mesh} --recording routes"));
        assert!(!planned.err.contains("note: moe.condense"), "{}", planned.err);
        let planned = json(&planned.out)["recorded"].clone();
        assert_eq!((planned["first"].as_u64(), planned["last"].as_u64()), (Some(1), Some(6)));
        assert_eq!(Some(rows(&planned["traffic"])), counted["bytes"].as_u64(), "{mesh}");
        let plain = json(&plan(&format!("{mesh} --recording routes")).out)["recorded"].clone();
        assert!(rows(&plain["traffic"]) > rows(&planned["traffic"]), "{mesh}");
    }
    let condensing = format!("--set moe.condense=static {}", meshes[0]);
    let most = plan(&condensing);
    assert!(most.err.contains("note: moe.condense: every route is taken to have a row of its own"), "{}", most.err);
    let share = shop.summary("recorded")["condensed"]["uncomputed_share"].as_f64().unwrap();
    let less = plan(&format!("{condensing} --condensed {share}"));
    assert!(!less.err.contains("note: moe.condense"), "{}", less.err);
    let [most, less] = [most, less].map(|planned| rows(&json(&planned.out)["traffic"]) as f64);
    // Whole rows of each expert, and their numbers, make it more by less than a twentieth.
    assert!((1.0 - share..1.05 - share).contains(&(less / most)), "{less} of {most} at {share}");
    let refused = |what: &str, words: &[&str]| shop.fails(&format!("plan {RECIPE} {what}"), 2, words);
    refused("--condensed 0.5", &["moe.condense is \"off\"", "plan without it"]);
    refused(&format!("{condensing} --condensed 1.5"), &["is not a share from 0 to below 1"]);
    refused(&format!("{condensing} --condensed 0.5 --recording routes"), &["routes.clusters has the clusters"]);
    std::fs::remove_file(shop.path("routes.clusters")).unwrap();
    let anew = shop.succeeds(&format!("plan {RECIPE} {condensing} --recording routes"));
    assert!(anew.err.contains("note: rows are not condensed as in the recorded run: routes.clusters is not there"));
    assert!(anew.out.contains("recorded sent by all ranks in steps 1 to 6 of routes"), "{}", anew.out);
}
