//! Clusters on disk: the mesh leaves no trace in them, every mesh follows them whatever threshold it has, and a file that
//! cannot be followed is refused, or left and said to be.

use std::fs;
use std::path::Path;

use guildhall::model::Sizes;
use guildhall::moe::recording::{ClusterFile, Clustering};
use guildhall::moe::{Condense, Config, Recording, Routings};
use guildhall::parallel::Mesh;

use crate::parity::{Run, STEPS, compare, run_on};
use crate::program::{RUN, TENSORS, Workshop, flip};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, bert, mixtral, nllb};
use crate::world::{MESHES, ONE, Shape, shape, sliced, whole_experts};

fn condensing(mut sizes: Sizes, threshold: f64, change: impl FnOnce(&mut Config)) -> Sizes {
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.condense, moe.condense_threshold) = (Condense::Static, threshold);
    change(moe);
    sizes
}

fn clustering(sizes: &Sizes) -> Clustering {
    Clustering::new(&recorded(sizes), sizes.moe.as_ref().expect("experts").condense_tokens)
}

fn recording_to(path: &Path, sizes: &Sizes) -> Routings {
    Routings {
        record: Some(Recording::create(path, recorded(sizes), 1).unwrap()),
        record_clusters: Some(ClusterFile::create(&ClusterFile::beside(path), clustering(sizes), 1).unwrap()),
        ..Routings::NONE
    }
}

fn following(path: &Path, sizes: &Sizes) -> Routings {
    let clusters = ClusterFile::follow(&ClusterFile::beside(path), clustering(sizes), 1..=STEPS).unwrap().unwrap();
    Routings { replay_clusters: Some(clusters), ..following_routes(path, sizes) }
}

fn following_routes(path: &Path, sizes: &Sizes) -> Routings {
    Routings { replay: Some(Recording::open(path, recorded(sizes), 1..=STEPS).unwrap()), ..Routings::NONE }
}

fn train(sizes: &Sizes, (shape, micro_batch): (Shape, usize), routings: Routings) -> Run {
    let recipe = Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch };
    run_on(&recipe, shape, routings, |_, mesh: &Mesh| mesh.clone())
}

/// Routes without a row of their own, by layer and step.
fn uncomputed(run: &Run) -> Vec<u64> {
    let layers = run.reports.iter().flat_map(|report| &report.moe);
    layers.map(|layer| layer.condensed.as_ref().expect("a layer that condenses").uncomputed).collect()
}

/// What was compared is no part of what is followed.
fn without_similarities(mut run: Run) -> Run {
    for layer in run.reports.iter_mut().flat_map(|report| &mut report.moe) {
        let condensed = layer.condensed.as_mut().expect("a layer that condenses");
        (condensed.similarity, condensed.remembered) = (Vec::new(), 0);
    }
    run.reports.iter_mut().for_each(|report| report.condense_threshold = None);
    run
}

/// Groups of half a sequence, of one and of two; dropped routes; an encoder and a decoder. Those who follow have a
/// threshold above 1, by which nothing would be condensed.
#[test]
fn the_mesh_leaves_no_trace_in_clusters_and_every_mesh_follows_them() {
    let folder = tempfile::tempdir().unwrap();
    let [first, again] = ["first", "again"].map(|name| folder.path().join(name));
    let cases: [(&str, Sizes, fn(&mut Config)); 5] = [
        ("a sequence", mixtral(), |_| ()),
        ("half a sequence", mixtral(), |moe| moe.condense_tokens = Some(4)),
        ("two sequences", bert(), |moe| moe.condense_tokens = Some(16)),
        ("places", mixtral(), |moe| (moe.capacity_factor, moe.group_tokens) = (Some(0.8), Some(8))),
        ("two stacks", nllb(), |_| ()),
    ];
    for (name, sizes, change) in cases {
        let [sizes, above] = [0.5, 1.5].map(|threshold| condensing(sizes.clone(), threshold, change));
        let want = without_similarities(train(&sizes, (ONE, ROWS), recording_to(&first, &sizes)));
        assert!(uncomputed(&want).iter().sum::<u64>() > 20, "{name}: {:?}", uncomputed(&want));
        let bytes = |path: &Path| fs::read(ClusterFile::beside(path)).unwrap();
        let whole = bytes(&first);
        let by_two = sizes.moe.as_ref().expect("experts").condense_tokens == Some(16);
        let mut meshes: Vec<(Shape, usize)> = match by_two {
            true => vec![(ONE, 2), (shape(1, 1), 4)],
            false => MESHES.into_iter().zip([2, 6, 4, 1, 3, 2]).collect(),
        };
        meshes.push((if by_two { sliced(2, 2, 1) } else { sliced(4, 2, 2) }, 6));
        meshes.extend((!by_two).then_some((whole_experts(4, 2, 4), 4)));
        for mesh in meshes {
            train(&sizes, mesh, recording_to(&again, &sizes));
            assert!(bytes(&again) == whole, "{name} on {mesh:?}: another file");
            let both = Routings { replay: None, replay_clusters: None, ..recording_to(&again, &above) };
            let got = following(&first, &above);
            let both = Routings { replay: got.replay, replay_clusters: got.replay_clusters, ..both };
            let got = without_similarities(train(&above, mesh, both));
            compare(&format!("{name}, followed on {mesh:?}"), &got, &want);
            assert!(bytes(&again) == whole, "{name} on {mesh:?}: another file of those who follow");
        }
        let anew = train(&above, (ONE, ROWS), following_routes(&first, &above));
        assert_eq!(uncomputed(&anew).iter().sum::<u64>(), 0, "{name}: without the file the threshold decides");
    }
}

/// On the same mesh a run is repeated to the bit, with blocks that run again too.
#[test]
fn a_run_whose_clusters_are_followed_is_repeated_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let [sizes, above] = [0.5, 1.5].map(|threshold| condensing(mixtral(), threshold, |_| ()));
    for mesh in [(ONE, 4), (shape(4, 4), 6), (sliced(4, 2, 2), 6)] {
        let want = train(&sizes, mesh, recording_to(&path, &sizes));
        let got = train(&above, mesh, following(&path, &above));
        assert!(without_similarities(got) == without_similarities(want), "{mesh:?}: other bits");
    }
}

// --- the program ---

const TRAIN: &str = "train tiny.toml --set train.schedule=constant --set train.eval_every=0 --set moe.condense=static";
const NOTE: &str = "note: clusters are decided anew: ";

fn record(shop: &Workshop, options: &str) -> String {
    shop.succeeds(&format!("{TRAIN} --set moe.record=routes --set moe.condense_threshold=0.6 {options}")).err
}

fn replay(options: &str) -> String {
    format!("{TRAIN} --set moe.replay=routes --set moe.condense_threshold=1.5 --set run.dir=again {options}")
}

/// The share of routes without a row of their own.
fn uncomputed_share(shop: &Workshop, run: &str) -> f64 {
    shop.summary(run)["condensed"]["uncomputed_share"].as_f64().unwrap()
}

#[test]
fn a_run_whose_clusters_are_recorded_is_repeated_to_the_bit() {
    let shop = Workshop::new();
    let mesh = "--set parallel.ranks=2 --set parallel.expert=2";
    let said = record(&shop, mesh);
    assert!(!said.contains("clusters"), "{said}");
    let said = shop.succeeds(&replay(&format!("{mesh} --set moe.record=both"))).err;
    assert!(said.contains("clusters as recorded in routes.clusters") && !said.contains(NOTE), "{said}");
    for name in TENSORS {
        let [want, got] = [RUN, "again"].map(|run| fs::read(shop.checkpoint(run, 6).join(name)).unwrap());
        assert!(got == want, "{name}");
    }
    assert_eq!(uncomputed_share(&shop, "again"), uncomputed_share(&shop, RUN));
    assert!(uncomputed_share(&shop, RUN) > 0.0);
    let read = |name: &str| fs::read(shop.path(name)).unwrap();
    assert!(read("routes.clusters") == read("both.clusters"));
    // By hand: a header of 48 bytes and 4 a layer with its hash; a byte for each of 32 tokens' two routes, and a hash.
    assert_eq!(read("both.clusters").len(), 48 + 2 * 4 + 8 + 6 * 2 * 8 * (32 * 2 + 8));
    // Other meshes follow it too.
    shop.succeeds(&replay("--ranks 4"));
    assert_eq!(uncomputed_share(&shop, "again"), uncomputed_share(&shop, RUN));
}

#[test]
fn clusters_that_do_not_fit_are_left_and_that_is_said_once() {
    let shop = Workshop::new();
    record(&shop, "");
    let says = |options: &str, words: &str| {
        let said = shop.succeeds(&replay(&format!("--set train.steps=1 {options}"))).err;
        assert_eq!(said.matches(NOTE).count(), usize::from(!words.is_empty()), "{options}: {said}");
        assert!(said.contains(words) && said.contains("routing  as recorded in routes"), "{options}: {said}");
        assert_eq!(said.contains("clusters as recorded"), options.is_empty(), "{options}: {said}");
    };
    says("", "");
    let plain = "train tiny.toml --set train.schedule=constant --set train.eval_every=0";
    let said = shop.succeeds(&format!("{plain} --set moe.replay=routes --set run.dir=again --set train.steps=1")).err;
    assert!(!said.contains("clusters"), "a run that does not condense has none to follow: {said}");
    let otherwise = "routes.clusters was recorded otherwise";
    says("--set moe.condense_tokens=16", &format!("{otherwise} (moe.condense_tokens: 32 there, 16 here)"));
    // The clusters of a run with another seed, beside routings that are not theirs.
    fs::rename(shop.path("routes"), shop.path("routes of seed 0")).unwrap();
    record(&shop, "--set train.seed=1");
    fs::rename(shop.path("routes of seed 0"), shop.path("routes")).unwrap();
    says("--set moe.condense_threshold=0.9", &format!("{otherwise} (it belongs to other routings)"));
    // A run that does not condense leaves no others' beside its routings.
    shop.succeeds(&format!("{plain} --set moe.record=routes"));
    says("--set moe.condense_threshold=0.9", "routes.clusters is not there");
}

#[test]
fn a_resumed_run_goes_on_recording_clusters() {
    let shop = Workshop::new();
    record(&shop, "--set run.dir=whole --set moe.record=all");
    record(&shop, "--set train.steps=4");
    fs::remove_dir_all(shop.checkpoint(RUN, 4)).unwrap();
    record(&shop, "--set train.steps=3 --resume");
    let read = |name: &str| fs::read(shop.path(name)).unwrap();
    assert!(read("all.clusters").starts_with(&read("routes.clusters")));
    assert!(read("all.clusters") != read("routes.clusters"));
    record(&shop, "--ranks 2 --resume");
    for [whole, part] in [["all", "routes"], ["all.clusters", "routes.clusters"]] {
        assert!(read(whole) == read(part), "{part}");
    }
}

/// One rank reads the bad block; the others must not wait for it.
#[test]
fn clusters_that_cannot_be_read_end_the_run_or_are_a_wrong_request() {
    let shop = Workshop::new();
    record(&shop, "");
    let (clusters, routes) = (fs::read(shop.path("routes.clusters")).unwrap(), fs::read(shop.path("routes")).unwrap());
    flip(&shop.path("routes.clusters"), clusters.len() - 9);
    let damaged = "routes.clusters is damaged at step 6, layer 1, row 7: its checksum does not fit";
    shop.fails(&replay("--ranks 4 --set parallel.timeout_s=60"), 1, &[damaged, "no further than step 5"]);
    assert_eq!(shop.metrics("again").len(), 5);
    fs::remove_dir_all(shop.path("again")).unwrap();
    // The same run with another rate, of which the header says nothing: other routes, at the second step at the latest.
    record(&shop, "--set train.lr=0.5 --set run.dir=other --set moe.record=others");
    fs::copy(shop.path("others.clusters"), shop.path("routes.clusters")).unwrap();
    shop.fails(&replay(""), 1, &["routes.clusters is damaged at step"]);
    fs::remove_dir_all(shop.path("again")).unwrap();
    let refused = |options: &str, words: &[&str]| {
        shop.fails(&replay(options), 2, words);
        assert!(!shop.path("again").join("metrics.jsonl").exists(), "{options}: something was begun");
    };
    for (bytes, words) in [
        (&clusters[..clusters.len() - 1], ["routes.clusters holds whole steps to 5 only, step 6 is wanted"]),
        (&clusters[..40], ["routes.clusters is not a recording of clusters (cut off after 40 bytes): take it away"]),
        (&b"a text"[..], ["routes.clusters is not a recording of clusters (its first bytes are others)"]),
        (&routes[..], ["routes.clusters is not a recording of clusters (its first bytes are others)"]),
        (&[&clusters[..20], &[9], &clusters[21..]].concat(), ["its header is damaged"]),
    ] {
        fs::write(shop.path("routes.clusters"), bytes).unwrap();
        refused("", &words);
    }
    // No file of a recording is begun where another cannot be.
    shop.write("new.clusters", "a text");
    fs::write(shop.path("routes.clusters"), &clusters).unwrap();
    refused("--set moe.record=new", &["moe.record would overwrite new.clusters, which is not a recording"]);
    assert!(!shop.path("new").exists() && shop.read("new.clusters") == "a text");
    std::os::unix::fs::symlink("routes.clusters", shop.path("linked.clusters")).unwrap();
    refused("--set moe.record=linked", &["the same file, linked.clusters"]);
    assert!(fs::read(shop.path("routes.clusters")).unwrap() == clusters, "a refused request changes nothing");
}
