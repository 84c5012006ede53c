//! Routings on disk: the mesh leaves no trace in them, every mesh and every gate follows them, and a file that cannot be
//! followed is refused.

use std::fs;
use std::path::Path;

use guildhall::model::Sizes;
use guildhall::moe::recording::Shape as Recorded;
use guildhall::moe::{self, GateKind, Overflow, Recording, Routings};
use guildhall::train::StepReport;

use crate::gates::of_two_workers;
use crate::parity::{STEPS, compare, run, run_with};
use crate::program::{RUN, Workshop, flip};
use crate::tiny::{Recipe, gpt2, mixtral, nllb};
use crate::world::{MESHES, ONE, Shape, shape};

pub(crate) const ROWS: usize = 6;

fn recipe(sizes: &Sizes, micro_batch: usize) -> Recipe {
    Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch }
}

pub(crate) fn recorded(sizes: &Sizes) -> Recorded {
    let moe = sizes.moe.as_ref().expect("experts");
    let layers = (0..sizes.model.layers).filter(|&layer| moe.layers.contains(layer)).map(|layer| layer as u32);
    let (experts, slots, layers) = (moe.experts.clone(), moe.widest().slots().into(), layers.collect());
    Recorded { experts, slots, seq: sizes.model.seq, rows: ROWS, layers, seed: 0, data: 0 }
}

fn recording(sizes: &Sizes, shape: Shape, micro_batch: usize, path: &Path) -> crate::parity::Run {
    let record = Some(Recording::create(path, recorded(sizes), 1).unwrap());
    run_with(&recipe(sizes, micro_batch), shape, Routings { record, ..Routings::NONE })
}

fn replaying(sizes: &Sizes, shape: Shape, micro_batch: usize, path: &Path) -> crate::parity::Run {
    let replay = Some(Recording::open(path, recorded(sizes), 1..=STEPS).unwrap());
    run_with(&recipe(sizes, micro_batch), shape, Routings { replay, ..Routings::NONE })
}

/// Two MoE layers of four experts.
fn gated(gate: GateKind, change: impl Fn(&mut moe::Config)) -> Sizes {
    let mut sizes = mixtral();
    // As many tokens as in the tests of gates, for the same reason: no ties that rounding would break.
    sizes.model.vocab = 997;
    let moe = sizes.moe.as_mut().expect("experts");
    moe.gate = of_two_workers(gate);
    moe.top_k = gate.only_top_k().unwrap_or(2);
    moe.logical_nodes = 2;
    change(moe);
    sizes
}

/// Weights and moments are compared too: the router learns as if its gate had chosen the same.
#[test]
fn the_mesh_leaves_no_trace_in_a_recording_and_every_mesh_follows_it() {
    let rerouted = gated(GateKind::Softmax, |moe| {
        (moe.capacity_factor, moe.overflow, moe.group_tokens) = (Some(0.8), Overflow::Reroute, Some(8));
    });
    let thinned = gated(GateKind::Gshard, |moe| {
        (moe.capacity_factor, moe.group_tokens) = (Some(0.9), Some(8));
    });
    // Slots: four experts.
    let chosen_by_experts = gated(GateKind::ExpertChoice, |moe| moe.group_tokens = Some(8));
    let folder = tempfile::tempdir().unwrap();
    let [first, again] = ["first", "again"].map(|name| folder.path().join(name));
    for sizes in [mixtral(), gpt2(), nllb(), rerouted, thinned, chosen_by_experts] {
        let name = sizes.moe.as_ref().expect("experts").gate.kind().name();
        let want = recording(&sizes, ONE, ROWS, &first);
        let bytes = fs::read(&first).unwrap();
        for (shape, micro_batch) in MESHES.into_iter().zip([2, 6, 4, 1, 3, 2]) {
            recording(&sizes, shape, micro_batch, &again);
            assert!(fs::read(&again).unwrap() == bytes, "{name} on {shape:?}: another file");
            let got = replaying(&sizes, shape, micro_batch, &first);
            compare(&format!("{name}, replayed on {shape:?}"), &got, &want);
            for (got, want) in got.reports.iter().zip(&want.reports) {
                assert!((got.loss - want.loss).abs() < 1e-6 * want.loss, "{name}: {} and {}", got.loss, want.loss);
            }
        }
    }
}

fn loads(reports: &[StepReport]) -> Vec<(Vec<u64>, u64)> {
    reports.iter().flat_map(|report| &report.moe).map(|record| (record.load.clone(), record.dropped)).collect()
}

/// Choices and drops are the file's, whatever the gate, its draws and its capacity would have said.
#[test]
fn another_gate_follows_the_recording() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let tight = |moe: &mut moe::Config| moe.capacity_factor = Some(0.7);
    for gate in [GateKind::Balanced, GateKind::Hash, GateKind::Gshard] {
        let want = loads(&recording(&gated(gate, tight), shape(2, 2), 4, &path).reports);
        for other in [GateKind::Softmax, GateKind::Noisy, GateKind::Sigmoid, GateKind::Swipe, GateKind::Sinkhorn] {
            let sizes = gated(other, |_| {});
            for shape in [ONE, shape(2, 2), shape(4, 2)] {
                let got = loads(&replaying(&sizes, shape, ROWS, &path).reports);
                assert_eq!(got, want, "{} on {shape:?} after {}", other.name(), gate.name());
            }
            assert_ne!(loads(&run(&recipe(&sizes, ROWS), ONE).reports), want, "{} by itself", other.name());
        }
    }
}

#[test]
fn a_record_of_a_replay_is_the_recording() {
    let folder = tempfile::tempdir().unwrap();
    let [first, again] = ["first", "again"].map(|name| folder.path().join(name));
    let sizes = gated(GateKind::Noisy, |_| {});
    recording(&sizes, ONE, ROWS, &first);
    let replay = Some(Recording::open(&first, recorded(&sizes), 1..=STEPS).unwrap());
    let record = Some(Recording::create(&again, recorded(&sizes), 1).unwrap());
    run_with(&recipe(&sizes, 4), shape(4, 2), Routings { replay, record, ..Routings::NONE });
    assert!(fs::read(&first).unwrap() == fs::read(&again).unwrap());
}

#[test]
fn a_continued_recording_is_cut_where_the_run_continues() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let sizes = mixtral();
    recording(&sizes, ONE, ROWS, &path);
    let whole = fs::read(&path).unwrap();
    let step_bytes = whole.len() / STEPS as usize;
    let resume = |done| Recording::resume(&path, recorded(&sizes), done);
    // Steps later than the checkpoint go, and half a step that a dying process left.
    fs::write(&path, [&whole[..], &[1; 9]].concat()).unwrap();
    resume(3).unwrap();
    assert!(fs::read(&path).unwrap() == whole);
    resume(2).unwrap();
    let two_steps = fs::read(&path).unwrap();
    assert!(whole.starts_with(&two_steps) && whole.len() - two_steps.len() <= step_bytes);
    let message = resume(3).unwrap_err().to_string();
    assert!(message.contains("holds the steps to 2 only") && message.contains("after step 3"), "{message}");
    let other = Recorded { seed: 1, ..recorded(&sizes) };
    let message = Recording::resume(&path, other, 2).unwrap_err().to_string();
    assert!(message.contains("train.seed: 0 there, 1 here"), "{message}");
    // A recording may begin in the middle of a run, and is then no recording of its beginning.
    fs::remove_file(&path).unwrap();
    assert_eq!(resume(7).unwrap().first(), 8);
    let message = Recording::open(&path, recorded(&sizes), 1..=9).unwrap_err().to_string();
    assert!(message.contains("begins at step 8, this run at step 1"), "{message}");
    assert_eq!(resume(2).unwrap().first(), 3, "all of the file is later than where the run continues");
}

// --- the program ---

/// The seconds and rates of two runs differ, their routings must not.
fn same_routing(shop: &Workshop, one: &str, other: &str) {
    assert_eq!(shop.routed(one), shop.routed(other), "{one} and {other}");
}

const RECORD: &str = "train tiny.toml --set train.schedule=constant --set moe.record=routes";
const REPLAY: &str = "train tiny.toml --set train.schedule=constant --set moe.replay=routes";

#[test]
fn a_run_is_recorded_at_two_ranks_and_replayed_at_one_and_four() {
    let shop = Workshop::new();
    let finished = shop.succeeds(&format!("{RECORD} --ranks 2 --set parallel.expert=2 --set run.dir=two"));
    assert!(finished.err.contains("routing  goes to routes, from step 1 on"), "{}", finished.err);
    for (run, mesh) in [("one", "1"), ("four", "4"), ("mixed", "4 --set parallel.expert=[2,4]")] {
        let finished = shop.succeeds(&format!("{REPLAY} --ranks {mesh} --set run.dir={run}"));
        assert!(finished.err.contains("routing  as recorded in routes"), "{}", finished.err);
        same_routing(&shop, "two", run);
    }
    // bf16 chooses otherwise, sooner or later; hash at once. A replay does not.
    for change in ["--set train.dtype=bf16", "--set moe.gate=hash"] {
        shop.succeeds(&format!("{REPLAY} {change} --ranks 2 --set run.dir=changed"));
        same_routing(&shop, "two", "changed");
    }
}

#[test]
fn a_resumed_run_goes_on_recording_and_evaluation_is_not_recorded() {
    let shop = Workshop::new();
    shop.succeeds(&format!("{RECORD} --set run.dir=whole --set moe.record=whole.routes --set train.eval_every=0"));
    shop.succeeds(&format!("{RECORD} --set train.steps=4"));
    // The checkpoint of step 4 is lost, its routing is not: the run continues after step 2, and ends at step 3.
    fs::remove_dir_all(shop.checkpoint(RUN, 4)).unwrap();
    shop.succeeds(&format!("{RECORD} --set train.steps=3 --resume"));
    let [whole, part] = ["whole.routes", "routes"].map(|name| fs::read(shop.path(name)).unwrap());
    assert!(whole.starts_with(&part) && (part.len() as f64 / whole.len() as f64 - 0.5).abs() < 0.01);
    shop.succeeds(&format!("{RECORD} --resume --ranks 2"));
    assert!(fs::read(shop.path("routes")).unwrap() == whole);
    // And a replay continues in the middle of the file.
    shop.succeeds(&format!("{REPLAY} --set run.dir=replayed --set train.steps=3"));
    shop.succeeds(&format!("{REPLAY} --set run.dir=replayed --resume"));
    same_routing(&shop, "whole", "replayed");
}

#[test]
fn a_recording_that_cannot_be_followed_is_a_wrong_request() {
    let shop = Workshop::new();
    let refused = |arguments: &str, words: &[&str]| {
        shop.fails(arguments, 2, words);
        assert!(!shop.path(RUN).join("metrics.jsonl").exists(), "{arguments}: something was begun");
    };
    refused(REPLAY, &["could not open the recording routes", "moe.replay"]);
    shop.succeeds(&format!("{RECORD} --set run.dir=recorded"));
    let whole = fs::read(shop.path("routes")).unwrap();
    for (change, words) in [
        ("moe.experts=8", ["moe.experts: 4 there, 8 here"]),
        ("moe.top_k=3", ["choices per token (moe.top_k; of expert_choice, moe.experts): 2 there, 3 here"]),
        ("model.layers=3", ["MoE layers: [0, 1] there, [0, 1, 2] here"]),
        ("train.batch_tokens=512", ["rows of a step (train.batch_tokens / model.seq): 8 there, 16 here"]),
        ("model.seq=16", ["model.seq: 32 there, 16 here"]),
        ("train.seed=5", ["train.seed: 0 there, 5 here"]),
        ("data.max_bytes=9000", ["training data: fingerprint"]),
        ("train.steps=7", ["routes holds whole steps to 6 only, step 7 is wanted: use a whole recording"]),
    ] {
        refused(&format!("{REPLAY} --set {change}"), &words);
    }
    refused(
        &format!("{REPLAY} --set moe.experts=8 --set train.seed=1"),
        &["moe.experts: 4 there, 8 here", "train.seed: 0 there, 1 here"],
    );
    for (bytes, words) in [
        (&whole[..whole.len() - 1], ["holds whole steps to 5 only, step 6 is wanted"]),
        (&whole[..40], ["not a recording of routings (cut off after 40 bytes)"]),
        (&b"a text"[..], ["not a recording of routings (its first bytes are others)"]),
        (&[&whole[..20], &[9], &whole[21..]].concat(), ["its header is damaged"]),
    ] {
        fs::write(shop.path("routes"), bytes).unwrap();
        refused(REPLAY, &words);
    }
    fs::write(shop.path("routes"), &whole).unwrap();
    for record in ["routes", "./routes", "link"] {
        let _ = std::os::unix::fs::symlink("routes", shop.path("link"));
        refused(&format!("{REPLAY} --set moe.record={record}"), &["the same file", "choose another"]);
    }
    refused(&format!("{REPLAY} --set moe.record=tiny.toml"), &["moe.record would overwrite tiny.toml"]);
    refused(&format!("{REPLAY} --set moe.record=no/such/file"), &["could not create the recording no/such/file"]);
    assert!(fs::read(shop.path("routes")).unwrap() == whole, "a refused request changes nothing");
}

/// One rank reads the bad block; the others must not wait for it.
#[test]
fn a_damaged_block_ends_every_rank_at_its_step() {
    let shop = Workshop::new();
    shop.succeeds(&format!("{RECORD} --set run.dir=recorded"));
    let length = fs::read(shop.path("routes")).unwrap().len();
    // The low byte of the last entry, which becomes another expert: of the last row, which the last rank has, in the last
    // layer and step.
    flip(&shop.path("routes"), length - 10);
    for ranks in [1, 4] {
        let replay = format!("{REPLAY} --ranks {ranks} --set parallel.timeout_s=60 --set run.dir=r{ranks}");
        shop.fails(&replay, 1, &["routes is damaged at step 6, layer 1, row 7", "no further than step 5"]);
        assert_eq!(shop.metrics(&format!("r{ranks}")).len(), 5);
    }
}
