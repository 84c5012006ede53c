//! Hosts of sequences on disk: a run that chose them is repeated to the bit by one that would choose others, and a file
//! that cannot be followed is refused, or left and said to be.

use std::fs;

use crate::program::{RUN, TENSORS, Workshop, flip};

/// Two micro-batches of four rows a step, two layers, one expert group of two hosts.
const TRAIN: &str = "train tiny.toml --set train.schedule=constant --set train.micro_batch=4 --set train.eval_every=0";
const MESH: &str = "--set parallel.ranks=2 --set parallel.expert=2";
const NOTE: &str = "note: hosts of sequences are decided anew: ";

fn record(shop: &Workshop, options: &str) {
    shop.succeeds(&format!("{TRAIN} {MESH} --set moe.record=routes --set parallel.migrate=force {options}"));
}

fn replay(options: &str) -> String {
    format!("{TRAIN} {MESH} --set moe.replay=routes --set parallel.migrate=auto --set run.dir=again {options}")
}

#[test]
fn a_run_whose_hosts_are_recorded_is_repeated_to_the_bit() {
    let shop = Workshop::new();
    record(&shop, "");
    let said = shop.succeeds(&replay("--set moe.record=both")).err;
    assert!(said.contains("hosts    as recorded in routes.hosts") && !said.contains(NOTE), "{said}");
    for name in TENSORS {
        let [want, got] = [RUN, "again"].map(|run| fs::read(shop.checkpoint(run, 6).join(name)).unwrap());
        assert!(got == want, "{name}");
    }
    let moved = |run: &str| shop.summary(run)["migrated"].as_u64().unwrap();
    // A quarter of four rows, in six steps of two micro-batches and two layers.
    assert!(moved("again") == moved(RUN) && moved(RUN) >= 24, "{} and {}", moved("again"), moved(RUN));
    for [first, again] in [["routes", "both"], ["routes.hosts", "both.hosts"]] {
        assert!(fs::read(shop.path(first)).unwrap() == fs::read(shop.path(again)).unwrap(), "{again}");
    }
    // By hand: a header of 68 bytes and 8 a layer with its hash; 12 bytes a row.
    assert_eq!(fs::read(shop.path("both.hosts")).unwrap().len(), 68 + 2 * 8 + 8 + 6 * 2 * 8 * 12);
}

#[test]
fn hosts_of_another_mesh_are_left_and_that_is_said_once() {
    let shop = Workshop::new();
    record(&shop, "");
    let says = |options: &str, words: &str| {
        let said = shop.succeeds(&replay(&format!("--set train.steps=1 {options}"))).err;
        assert_eq!(said.matches(NOTE).count(), usize::from(!words.is_empty()), "{options}: {said}");
        assert!(said.contains(words) && said.contains("routing  as recorded in routes"), "{options}: {said}");
    };
    says("", "");
    says("--set parallel.migrate=off", "");
    let otherwise = "routes.hosts was recorded otherwise";
    says("--set parallel.ranks=4", &format!("{otherwise} (parallel.ranks: 2 there, 4 here)"));
    says("--set train.micro_batch=2", &format!("{otherwise} (rows of a micro-batch: 4 there, 2 here)"));
    // A run without migration leaves no others' beside its routings.
    record(&shop, "--set parallel.migrate=off");
    says("", "routes.hosts is not there");
}

#[test]
fn a_resumed_run_goes_on_recording_hosts() {
    let shop = Workshop::new();
    record(&shop, "--set run.dir=whole --set moe.record=all");
    record(&shop, "--set train.steps=4");
    record(&shop, "--resume");
    for [whole, part] in [["all", "routes"], ["all.hosts", "routes.hosts"]] {
        assert!(fs::read(shop.path(whole)).unwrap() == fs::read(shop.path(part)).unwrap(), "{part}");
    }
}

#[test]
fn hosts_that_cannot_be_read_end_the_run_or_are_a_wrong_request() {
    let shop = Workshop::new();
    record(&shop, "");
    let hosts = fs::read(shop.path("routes.hosts")).unwrap();
    // The last row of the last layer of the last step.
    flip(&shop.path("routes.hosts"), hosts.len() - 9);
    let damaged = "routes.hosts is damaged at step 6, layer 1, row 7: its checksum does not fit";
    shop.fails(&replay("--set parallel.timeout_s=60"), 1, &[damaged, "no further than step 5"]);
    assert_eq!(shop.metrics("again").len(), 5);
    fs::remove_dir_all(shop.path("again")).unwrap();
    fs::write(shop.path("routes.hosts"), "none").unwrap();
    shop.fails(&replay(""), 2, &["routes.hosts is not a recording of hosts of sequences", "take it away"]);
}
