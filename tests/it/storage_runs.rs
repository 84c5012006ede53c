//! Runs whose checkpoints are several files, or are written while training goes on: every command reads them, and they are
//! the checkpoints of a run that waits.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{RECIPE, RUN, Workshop, damage, skipped, wait_until};

/// A model of four files of a MiB, and an optimizer of eight.
const LARGE: &str = "--set model.d_model=64 --set moe.d_expert=512";
const SEVERAL: &str = "--set train.checkpoint_file_mib=1";
const BESIDE: &str = "--set train.checkpoint_async=true";
const MESH: &str = "--ranks 2 --set parallel.expert=2";

/// The files of a checkpoint that do not tell when and how it was written.
fn state(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()));
    named.filter(|(name, _)| !["manifest.json", "config.toml"].contains(&name.as_str())).collect()
}

/// What a manifest says, but for the time, and the checksum of the recipe.
fn manifest(folder: &Path) -> Value {
    let mut manifest: Value = serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap();
    ["seconds", "sha256"].iter().for_each(|key| drop(manifest.as_object_mut().unwrap().remove(*key)));
    manifest["files"].as_object_mut().unwrap().remove("config.toml");
    manifest
}

#[test]
fn a_run_writes_beside_its_steps_what_it_would_between_them() {
    let shop = Workshop::new();
    for (mesh, options) in [
        ("", ""),
        (MESH, SEVERAL),
        (MESH, "--set train.checkpoint_every=1 --set train.dtype=bf16 --set memory.offload=file"),
        (
            "--ranks 4 --set parallel.expert=2 --set parallel.zero=2",
            "--set parallel.replace_every=1 --set parallel.replace_gain=0",
        ),
    ] {
        let options = format!("{LARGE} {mesh} --set train.keep=0 --set train.steps=10 {options}");
        shop.train(&format!("{options} --set run.dir=waits"));
        let said = shop.train(&format!("{options} {BESIDE}")).err;
        for step in [2, 4, 6, 8, 10] {
            let [want, got] = ["waits", RUN].map(|run| shop.checkpoint(run, step));
            assert!(state(&want) == state(&got), "{options}: step {step} differs");
            assert_eq!(manifest(&want), manifest(&got), "{options}: step {step}");
        }
        assert_eq!(shop.series("waits", "loss"), shop.series(RUN, "loss"), "{options}");
        // Four stages do not end in two steps.
        assert!(said.contains("was still being written when that of step"), "{said}");
        expect_predicted(&shop);
    }
}

/// The copy is in the account, and the plan has foreseen it.
fn expect_predicted(shop: &Workshop) {
    let summary = shop.summary(RUN);
    let number = |at: &str| summary.pointer(at).and_then(Value::as_f64).unwrap_or_else(|| panic!("{at}: {summary}"));
    let (counted, copy, skewed) =
        (number("/peak_bytes/total"), number("/peak_bytes/checkpoint"), number("/predicted_skewed_bytes"));
    assert!(copy > 0.0 && counted <= skewed, "{counted} counted, {skewed} predicted");
}

#[test]
fn every_command_reads_several_files() {
    let shop = Workshop::new();
    let recipe = format!("train {RECIPE} {LARGE} --set train.schedule=constant --set train.steps=6");
    shop.succeeds(&format!("{recipe} --set run.dir=one"));
    shop.succeeds(&format!("{recipe} --set run.dir=several {SEVERAL} {MESH}"));
    shop.succeeds(&format!("{recipe} --set run.dir=again {SEVERAL}"));
    let listed = |run: &str| state(&shop.checkpoint(run, 6)).into_keys().collect::<Vec<_>>();
    let several = listed("several");
    assert!(several.contains(&"model.safetensors.index.json".to_owned()), "{several:?}");
    assert!(several.contains(&"optimizer-00001-of-00008.safetensors".to_owned()), "{several:?}");
    assert_eq!(several, listed("again"), "files do not depend on the mesh");
    assert!(!several.contains(&"model.safetensors".to_owned()), "{several:?}");

    for command in ["evaluate RUN/checkpoints/latest --rows 8", "generate RUN --prompt the --tokens 20 --temperature 0"]
    {
        let [one, again] = ["one", "again"].map(|run| shop.succeeds(&command.replace("RUN", run)).out);
        assert_eq!(one, again, "{command}");
    }
    // On with one file where there were several, and the other way round.
    shop.succeeds(&format!("{recipe} --set run.dir=one {SEVERAL} --set train.steps=8 --resume"));
    shop.succeeds(&format!("{recipe} --set run.dir=again --set train.steps=8 {BESIDE} --resume"));
    shop.succeeds(&format!("{recipe} --set run.dir=eight --set train.steps=8"));
    assert!(shop.tensors("again", 8) == shop.tensors("eight", 8), "it went on otherwise");
    assert_eq!(shop.series("one", "loss"), shop.series("eight", "loss"));
    // From their weights.
    for run in ["one", "again"] {
        shop.succeeds(&format!("{recipe} --set run.dir=from-{run} --set train.init={run}/checkpoints/step-000006"));
    }
    assert!(shop.tensors("from-one", 6) == shop.tensors("from-again", 6), "other weights to begin with");
}

#[test]
fn surgery_reads_and_writes_several_files() {
    let shop = Workshop::new();
    let recipe = format!("train {RECIPE} {LARGE} --set train.steps=2");
    shop.succeeds(&format!("{recipe} --set run.dir=one"));
    shop.succeeds(&format!("{recipe} --set run.dir=several {SEVERAL}"));
    let prune = |run: &str| {
        let out = format!("out/{run}");
        shop.succeeds(&format!("surgery prune {run} --keep 2 -o {out}"));
        shop.path(&out)
    };
    let [one, several] = ["one", "several"].map(prune);
    assert!(one.join("model.safetensors").exists());
    assert!(several.join("model.safetensors.index.json").exists(), "in files of the size that its recipe says");
    let [one, several] = ["out/one", "out/several"].map(|of| shop.succeeds(&format!("evaluate {of} --rows 4")).out);
    assert_eq!(one, several);
}

/// Ctrl-C while a checkpoint is under way: it becomes whole, and so does the last.
#[test]
fn an_interrupted_run_finishes_what_it_writes() {
    let shop = Workshop::new();
    let options = format!("{LARGE} {MESH} --set train.keep=0 --set train.checkpoint_every=5 --set train.eval_every=0");
    shop.train(&format!("{options} --set train.steps=60 --set run.dir=whole"));
    let running = shop.start(&format!("train {RECIPE} {options} {BESIDE} --set train.steps=60"));
    let checkpoints = shop.path(RUN).join("checkpoints");
    let mut under_way = None;
    wait_until("a checkpoint under way", || {
        let mut entries = fs::read_dir(&checkpoints).into_iter().flatten().flatten();
        let name = |entry: fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix(".partial-")?.to_owned());
        under_way = entries.find_map(name);
        under_way.is_some()
    });
    running.signal("INT");
    let ended = running.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(damage(&checkpoints.join(under_way.unwrap())), None);
    let left: Vec<String> = fs::read_dir(&checkpoints)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    shop.train(&format!("{options} {BESIDE} --set train.steps=60 --resume"));
    assert!(shop.tensors("whole", 60) == shop.tensors(RUN, 60), "it went on otherwise");
}

/// A checkpoint that found something in its way is tried again long before the next is due, at a step that was told.
#[test]
fn a_checkpoint_that_could_not_be_written_is_tried_again_in_ten_steps() {
    let shop = Workshop::new();
    let options = "--set train.steps=3000 --set train.checkpoint_every=1000 --set train.eval_every=0";
    let running = shop.start_logged(&format!("train {RECIPE} {options}"), "log");
    wait_until("a step", || !shop.metrics(RUN).is_empty());
    shop.obstruct_checkpoints(RUN, "log", "warning: no checkpoint of step 1000: ");
    let finished = running.wait();
    let log = shop.read("log");
    assert_eq!(finished.code, Some(0), "{log}");
    let number = |text: &str| text.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap();
    let told: Vec<u64> = log.split("and tries again after step ").skip(1).map(number).collect();
    // Ten steps later, then twenty.
    let tries = (0..told.len()).map(|tries| 990 + (10 << (tries + 1))).collect::<Vec<u64>>();
    assert_eq!(told, tries, "{log}");
    let written = told.last().expect("a warning tells when");
    let note = format!("note: the checkpoint of step {written} is written, the first since step 1000\n");
    assert!(log.contains(&note), "no {note:?}: {log}");
    assert_eq!(damage(&shop.checkpoint(RUN, *written)), None);
}

/// Somebody else uses an old checkpoint, here by a mount: it stays, under another name or its own, and costs no other.
#[test]
fn an_old_checkpoint_that_cannot_be_removed_costs_no_other() {
    let shop = Workshop::new();
    let options = "--set train.keep=1 --set train.eval_every=0";
    shop.train(&format!("{options} --set train.steps=2"));
    let script = format!(
        "mkdir {RUN}/checkpoints/step-000002/busy && mount -t tmpfs none {RUN}/checkpoints/step-000002/busy || exit 77; \
         touch mounted; exec $GUILDHALL train {RECIPE} {options} --resume"
    );
    shop.write("script", &script);
    let ended = shop.shell("unshare --map-root-user --mount sh script");
    if !shop.path("mounted").exists() {
        return skipped("nobody may mount anything");
    }
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let told = "warning: the checkpoint of step 4 is written, but an older one could not be removed: could not remove ";
    assert!(ended.err.contains(told), "{}", ended.err);
    assert_eq!(damage(&shop.checkpoint(RUN, 6)), None);
    assert!(!shop.checkpoint(RUN, 4).exists(), "what can be removed is");
}

#[test]
fn a_copy_that_does_not_fit_is_refused_with_its_bytes() {
    let shop = Workshop::new();
    shop.train(&format!("{LARGE} {MESH}"));
    let of_rank = shop.summary(RUN)["predicted_skewed_bytes"].as_u64().unwrap() / 2;
    let budget = format!("--set memory.budget={}", of_rank + 1024);
    shop.train(&format!("{LARGE} {MESH} {budget}"));
    let words = ["the copy of its state that train.checkpoint_async writes", "5.15 MB", "train.checkpoint_async=false"];
    shop.fails(&format!("train {RECIPE} {LARGE} {MESH} {budget} {BESIDE}"), 2, &words);
    // And what is asked for has an effect, or is refused.
    let words = ["train.checkpoint_async", "no step comes after it"];
    shop.fails(&format!("train {RECIPE} {BESIDE} --set train.checkpoint_every=0"), 2, &words);
    shop.fails(&format!("train {RECIPE} --set train.checkpoint_file_mib=-1"), 2, &["train.checkpoint_file_mib"]);
}
