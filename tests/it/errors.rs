//! Everything that can go wrong, through the real program: the exit code, one message, and what is left on disk.

use std::fs;
use std::path::{Path, PathBuf};

use crate::program::{Finished, RECIPE, RUN, Workshop, damage, flip, skipped, wait_until};

const LATEST: &str = "runs/tiny/checkpoints/latest";

#[test]
fn wrong_recipes_are_refused_before_the_first_step() {
    let shop = Workshop::new();
    shop.write("file", "not a folder");
    shop.write("broken.toml", "[train]\nsteps = = 3\n");
    shop.write("short.txt", "too short");
    shop.write("misspelt.toml", &shop.read(RECIPE).replace("steps =", "stepz =").replace("[moe]", "[mo]"));
    let cases: &[(&str, &[&str])] = &[
        ("missing.toml", &["missing.toml", "No such file"]),
        ("corpus", &["corpus", "directory"]),
        ("broken.toml", &["broken.toml:2"]),
        ("misspelt.toml", &["train.stepz", "did you mean train.steps?", "mo ", "did you mean moe?"]),
        ("tiny.toml --set model.dmodel=4", &["model.dmodel", "did you mean model.d_model?"]),
        ("tiny.toml --set train.steps", &["--set train.steps", "no `=`"]),
        ("tiny.toml --set train.steps=many", &["train.steps = \"many\""]),
        ("tiny.toml --set train.lr=nan", &["train.lr = nan"]),
        ("tiny.toml --set model.heads=3", &["model.heads = 3", "model.d_model = 16"]),
        ("tiny.toml --ranks 0", &["--ranks 0"]),
        ("tiny.toml --ranks many", &["--ranks", "many"]),
        ("tiny.toml --ranks 3 --set parallel.expert=2", &["parallel.expert = 2", "parallel.ranks = 3"]),
        ("tiny.toml --ranks 3 --set parallel.expert=3", &["parallel.expert = 3", "moe.experts = 4"]),
        ("tiny.toml --set data.sources=[\"no/*.txt\"]", &["no/*.txt"]),
        ("tiny.toml --set data.sources=[]", &["data.sources"]),
        ("tiny.toml --set data.sources=[\"short.txt\"]", &["too small", "32"]),
        ("tiny.toml --set data.tokenizer=no.json", &["no.json"]),
        ("tiny.toml --set data.tokenizer=file", &["file"]),
        ("tiny.toml --set data.cache=file", &["file"]),
        ("tiny.toml --set run.dir=file", &["could not create file", "run.dir"]),
        ("tiny.toml --set run.dir=/proc/no", &["could not create /proc/no", "run.dir"]),
        ("tiny.toml --set model.d_model=1048576 --set model.layers=512", &["the run needs", "model's sizes"]),
        (
            "tiny.toml --set train.micro_batch=1048576 --set train.batch_tokens=33554432",
            &["rank 0 would need", "GB", "what fits: ", "--set train.micro_batch="],
        ),
        ("tiny.toml --frobnicate", &["--frobnicate"]),
        ("", &["RECIPE"]),
    ];
    for (arguments, words) in cases {
        shop.fails(&format!("train {arguments}"), 2, words);
    }
    assert!(!shop.path(RUN).join("metrics.jsonl").exists(), "a refused run has begun");
}

#[test]
fn all_problems_of_a_recipe_come_together() {
    let shop = Workshop::new();
    let wrong = "--set train.lr=0 --set model.seq=0 --set moe.expert=8 --ranks 70000";
    shop.fails(&format!("train {RECIPE} {wrong}"), 2, &["4 problems", "train.lr", "model.seq", "moe.expert", "70000"]);
    let cold = "generate no --prompt x --temperature nan --top-p 2";
    shop.fails(cold, 2, &["--temperature NaN", "--top-p 2"]);
}

#[test]
fn a_tokenizer_must_fit_the_model() {
    let shop = Workshop::new();
    shop.train("--set train.steps=1");
    fs::copy(shop.path(LATEST).join("tokenizer.json"), shop.path("own.json")).unwrap();
    let own = format!("train {RECIPE} --set data.tokenizer=own.json");
    shop.fails(&format!("{own} --set model.vocab=280"), 2, &["own.json", "300 entries", "model.vocab = 280"]);
    shop.succeeds(&format!("{own} --set train.steps=1"));
}

#[test]
fn a_folder_that_cannot_be_written_is_refused() {
    let shop = Workshop::new();
    let closed = shop.path("closed");
    fs::create_dir(&closed).unwrap();
    let mut permissions = fs::metadata(&closed).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&closed, permissions).unwrap();
    // Root writes everywhere.
    if fs::create_dir(closed.join("probe")).is_err() {
        shop.fails(&format!("train {RECIPE} --set run.dir=closed/run"), 2, &["closed/run", "Permission denied"]);
    }
}

#[test]
fn one_folder_serves_one_run() {
    let shop = Workshop::new();
    let run = shop.start(&format!("train {RECIPE} --set train.steps=1000000"));
    wait_until("the first step", || !shop.metrics(RUN).is_empty());
    for resume in ["", "--resume"] {
        let begun = shop.metrics(RUN).len();
        shop.fails(&format!("train {RECIPE} {resume}"), 2, &["runs/tiny is in use", "run.dir"]);
        assert!(shop.metrics(RUN).len() >= begun, "the refused run touched the log");
    }
    drop(run);
    assert!(!shop.path("runs/tiny/previous-1").exists(), "the refused run set the other aside");
    shop.train("");
}

#[test]
fn a_resumed_run_must_be_the_same_run() {
    let shop = Workshop::new();
    shop.train("");
    let before = shop.read("runs/tiny/config.toml");
    let cases: &[(&str, &[&str])] = &[
        ("--set train.lr=0.5", &["step-000006", "train.lr: was 0.01, now 0.5"]),
        ("--set train.seed=3 --set moe.top_k=1", &["train.seed: was 0, now 3", "moe.top_k: was 2, now 1"]),
        ("--set model.layers=3", &["model.layers: was 2, now 3"]),
        ("--set data.held_out=0.2", &["data.held_out"]),
        ("--set train.steps=4", &["6 steps", "train.steps is 4"]),
    ];
    for (change, words) in cases {
        shop.fails(&format!("train {RECIPE} --resume {change}"), 2, words);
    }
    shop.write("corpus/40.txt", "other text makes other data, also where the recipe has not changed");
    let resume = format!("train {RECIPE} --resume --set train.steps=8");
    shop.fails(&resume, 2, &["step-000006", "sources", "without --resume"]);
    assert_eq!(shop.read("runs/tiny/config.toml"), before, "a refused request left a trace");
    assert_eq!(shop.metrics(RUN).len(), 6);
    fs::remove_file(shop.path("corpus/40.txt")).unwrap();
    shop.succeeds(&resume);
}

#[test]
fn every_damaged_file_of_prepared_data_is_noticed() {
    let shop = Workshop::new();
    let folder = shop.path(shop.succeeds(&format!("prepare {RECIPE}")).out.trim_end());
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 4, "{files:?}");
    for path in files {
        let whole = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        for at in [0, whole.len() / 2, whole.len().saturating_sub(1)] {
            if !whole.is_empty() {
                flip(&path, at);
                shop.fails(&format!("train {RECIPE}"), 2, &["cache/", name]);
            }
        }
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        if !whole.is_empty() {
            shop.fails(&format!("prepare {RECIPE}"), 2, &["cache/", name, "delete"]);
        }
        fs::remove_file(&path).unwrap();
        shop.fails(&format!("prepare {RECIPE}"), 2, &["cache/", name]);
        fs::write(&path, whole).unwrap();
    }
    shop.train("");
}

#[test]
fn every_damaged_file_of_a_checkpoint_is_noticed() {
    let shop = Workshop::new();
    // The only one: with another there would be one to go back to.
    shop.train("--set train.keep=1");
    let commands = [
        format!("train {RECIPE} --resume --set train.steps=8 --set train.keep=1"),
        format!("evaluate {LATEST}"),
        format!("generate {LATEST} --prompt x --tokens 1"),
    ];
    for name in ["manifest.json", "model.safetensors", "optimizer.safetensors", "config.toml", "tokenizer.json"] {
        let path = shop.checkpoint(RUN, 6).join(name);
        let whole = fs::read(&path).unwrap();
        for (place, command) in [1, whole.len() / 2, whole.len() - 1].into_iter().zip(&commands) {
            flip(&path, place);
            shop.fails(command, 2, &[name, "damaged", "restore it"]);
            fs::write(&path, &whole).unwrap();
        }
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        commands.iter().for_each(|command| shop.fails(command, 2, &[name, "damaged"]));
        fs::write(&path, whole).unwrap();
    }
    commands.iter().for_each(|command| drop(shop.succeeds(command)));
}

/// A run goes back behind a damaged checkpoint, says so, keeps it, and ends as if nothing had been; with none that is whole it
/// is refused.
#[test]
fn a_damaged_checkpoint_costs_the_steps_since_the_one_before() {
    let shop = Workshop::new();
    let options = "--set train.checkpoint_every=2 --set train.keep=0";
    shop.train(&format!("{options} --set train.steps=8 --set run.dir=whole"));
    // Of each file whole blocks are left, as many as fit into so many hundredths of it.
    for (damaged, back, hundredths) in [(&[8][..], 6, 0), (&[8], 6, 10), (&[8], 6, 99), (&[6, 8], 4, 50)] {
        shop.train(&format!("{options} --set train.steps=8"));
        for &step in damaged {
            let path = shop.checkpoint(RUN, step).join("model.safetensors");
            let whole = fs::read(&path).unwrap();
            fs::write(&path, &whole[..whole.len() * hundredths / 100 / 4096 * 4096]).unwrap();
        }
        let said = shop.succeeds(&format!("train {RECIPE} {options} --set train.steps=8 --resume")).err;
        assert_eq!(said.matches("warning: ").count(), damaged.len(), "{said}");
        let names = |step| said.contains(&format!("step-{step:06}/model.safetensors is damaged"));
        assert!(damaged.iter().all(names), "{said}");
        assert!(said.contains(&format!("the run goes back to step {back}")), "{said}");
        assert!(said.contains(&format!("steps {} to 8", back + 1)), "{said}");
        let checkpoints = shop.path(RUN).join("checkpoints");
        damaged.iter().for_each(|step| assert!(checkpoints.join(format!("damaged-step-{step:06}")).exists()));
        assert!(shop.tensors("whole", 8) == shop.tensors(RUN, 8), "other weights");
        assert_eq!(shop.series(RUN, "loss"), shop.series("whole", "loss"));
    }
}

/// The same at every block of every file of the newest: the program says which is damaged, keeps it, and comes to the weights
/// of a run to which nothing happened.
#[test]
fn a_checkpoint_that_is_cut_at_any_block_costs_its_own_steps_alone() {
    let shop = Workshop::new();
    // So small that there are some dozen blocks.
    let options = "--set model.d_model=8 --set train.checkpoint_every=2 --set train.keep=0 --set train.steps=4";
    shop.train(&format!("{options} --set run.dir=whole"));
    let cut_from = |file: &Path| (0..fs::metadata(file).unwrap().len()).step_by(4096).collect::<Vec<_>>();
    let files = fs::read_dir(shop.checkpoint("whole", 4)).unwrap().map(|entry| entry.unwrap().path());
    let cuts: Vec<_> = files.flat_map(|file| cut_from(&file).into_iter().map(move |at| (file.clone(), at))).collect();
    assert!(cuts.len() > 20, "{cuts:?}");
    for (file, at) in cuts {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(shop.shell("rm -rf runs && mkdir runs && cp -r whole runs/tiny").code, Some(0));
        let copy = shop.checkpoint(RUN, 4).join(&name);
        fs::File::options().write(true).open(copy).unwrap().set_len(at).unwrap();
        let said = shop.succeeds(&format!("train {RECIPE} {options} --resume")).err;
        let told = said.lines().find(|line| line.starts_with("warning: ")).unwrap_or_default();
        assert!(told.contains(&name) && told.contains("goes back to step 2"), "{name} cut to {at} bytes: {said}");
        assert!(shop.path(RUN).join("checkpoints/damaged-step-000004").exists(), "{name}: it is kept");
        assert!(shop.tensors("whole", 4) == shop.tensors(RUN, 4), "{name} cut to {at} bytes: other weights");
        assert_eq!(shop.series(RUN, "loss"), shop.series("whole", "loss"), "{name} cut to {at} bytes");
    }
}

/// Any changed byte of a manifest matters: nothing else says at which step a run was.
#[test]
fn a_manifest_vouches_for_itself() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let path = shop.checkpoint(RUN, 2).join("manifest.json");
    let whole = fs::read_to_string(&path).unwrap();
    for (old, new) in
        [("\"step\": 2", "\"step\": 1"), ("\"tokens\": 5", "\"tokens\": 6"), ("}\n", "} \n"), (": ", ":  ")]
    {
        fs::write(&path, whole.replacen(old, new, 1)).unwrap();
        if whole.contains(old) {
            shop.fails(&format!("evaluate {LATEST}"), 2, &["manifest.json", "damaged"]);
        }
    }
}

#[test]
fn what_is_no_checkpoint_is_said_to_be_none() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let seen: &[(&str, &[&str])] = &[
        ("evaluate nowhere", &["nowhere is not a checkpoint", "that of a run"]),
        ("evaluate runs", &["runs is not a checkpoint"]),
        ("generate tiny.toml --prompt x", &["tiny.toml is not a checkpoint"]),
        ("evaluate runs/tiny/checkpoints/latest --rows 0", &["--rows 0"]),
        ("evaluate runs/tiny/checkpoints/latest --ranks 3 --set parallel.expert=2", &["parallel.expert = 2"]),
        ("evaluate runs/tiny/checkpoints/latest --set model.layers=3", &["does not fit the model", "layers.2"]),
        ("evaluate runs/tiny/checkpoints/latest --set model.layer=3", &["model.layer"]),
        ("generate runs/tiny/checkpoints/latest", &["--prompt"]),
        ("generate runs/tiny/checkpoints/latest --prompt x --tokens=-1", &["--tokens"]),
    ];
    seen.iter().for_each(|(arguments, words)| shop.fails(arguments, 2, words));
    let [of_run, newest] = ["runs/tiny", LATEST].map(|of| shop.succeeds(&format!("evaluate {of}")).out);
    assert_eq!(of_run, newest, "a run stands for its newest checkpoint");
    shop.succeeds("train tiny.toml --set train.steps=1 --set run.dir=on --set train.init=runs/tiny");
    shop.fails("train tiny.toml --set train.init=runs/tiny", 2, &["train.init", "run.dir"]);
    let long = "cat".repeat(40);
    shop.fails(&format!("generate {LATEST} --prompt {long}"), 2, &["--prompt has", "tokens", "32"]);
}

/// Nobody reads a line of a megabyte: its middle is left out.
#[test]
fn an_error_tells_no_more_of_a_line_than_is_read() {
    let shop = Workshop::new();
    let long = "ä".repeat(1 << 20);
    shop.write("long.toml", &format!("[train]\nsteps = \"{long}\n"));
    let told = shop.run("plan long.toml").err;
    assert!(told.contains(" bytes left out] ") && told.contains("long.toml:2"), "{} bytes", told.len());
    assert!(told.len() < 10_000, "{} bytes", told.len());
}

/// A result that nobody gets is a failure, unless its reader has left.
#[test]
fn standard_output_that_takes_nothing_is_noticed() {
    let shop = Workshop::new();
    shop.train("--set train.steps=1 --set train.eval_every=0");
    let generate = format!("\"$GUILDHALL\" generate {LATEST} --prompt x --tokens 1");
    let full = shop.shell(&format!("{generate} >/dev/full"));
    full.failed(1, &["standard output", "No space left on device"]);
    let left = shop.shell(&format!("({generate}; echo $? >code) | true"));
    assert_eq!((left.err.as_str(), shop.read("code").as_str()), ("", "0\n"));
}

#[test]
fn a_number_that_is_not_finite_ends_the_run_where_it_began() {
    let shop = Workshop::new();
    let hot = "--set train.lr=1e30 --set train.clip=0";
    for mesh in ["", "--ranks 2 --set parallel.expert=2"] {
        let words = ["step 2: ", "is not finite", "on rank", "layer ", "op ", "train.lr"];
        shop.fails(&format!("train {RECIPE} {hot} {mesh}"), 1, &words);
        let summary = shop.summary(RUN);
        assert_eq!((&summary["status"], &summary["steps"]), (&"failed".into(), &1.into()));
        assert!(shop.path("runs/tiny/report.html").exists());
        assert!(!shop.path("runs/tiny/checkpoints").exists(), "there was nothing worth saving");
    }
    // The last step's update shows only in the evaluation that follows it.
    let last = "--set train.steps=1 --set train.lr=3e38 --set train.weight_decay=100 --set train.schedule=constant";
    shop.fails(&format!("train {RECIPE} {last}"), 1, &["step 1", "held-out", "train.lr"]);
}

/// What a run leaves when a checkpoint finds no room, and that it goes on from there.
fn expect_mended(shop: &Workshop, last: Option<u64>) {
    assert_eq!(shop.summary(RUN)["status"], "failed");
    let entries = fs::read_dir(shop.path(RUN).join("checkpoints")).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()) {
        assert_eq!(damage(&folder), None, "half a checkpoint looks whole");
        assert!(last.is_some(), "{}", folder.display());
    }
    let finished = shop.train("--resume");
    let first = last.map_or(1, |last| last + 1);
    assert!(finished.err.contains(&format!("steps {first} to 6")), "{}", finished.err);
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
    shop.train("--set run.dir=whole");
    assert!(shop.tensors("whole", 6) == shop.tensors(RUN, 6));
    assert_eq!(shop.series("whole", "loss"), shop.series(RUN, "loss"));
}

/// Runs the program where no file may exceed some blocks (of 512 or 1024 bytes, shells differ).
pub(crate) fn limited(shop: &Workshop, blocks: u32, options: &str) -> Finished {
    shop.shell(&format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$GUILDHALL\" train {RECIPE} {options}"))
}

#[test]
fn a_checkpoint_without_room_fails_the_run_and_leaves_none() {
    for mesh in ["", "--ranks 2 --set parallel.expert=2", "--ranks 2 --set train.checkpoint_async=true"] {
        let shop = Workshop::new();
        shop.succeeds(&format!("prepare {RECIPE}"));
        let words = ["File too large", "runs/tiny/checkpoints", "no checkpoint had been written"];
        limited(&shop, 100, mesh).failed(1, &words);
        if mesh.is_empty() {
            expect_mended(&shop, None);
        }
    }
}

#[test]
fn a_later_checkpoint_without_room_leaves_the_earlier_ones() {
    let shop = Workshop::new();
    shop.train("--set train.steps=3 --set train.schedule=constant");
    let more = "--resume --set train.schedule=constant";
    limited(&shop, 100, more)
        .failed(1, &["File too large", "--resume continues from runs/tiny/checkpoints/step-000003"]);
    assert_eq!(damage(&shop.path(LATEST)), None);
    shop.train(more);
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
}

/// Neither its lines nor the last checkpoint find room.
#[test]
fn a_log_that_never_has_room_fails_the_run() {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    let options = "--set train.checkpoint_every=0 --set train.steps=60";
    let finished = limited(&shop, 8, options);
    finished.failed(1, &["File too large", "start again"]);
    let warned = "warning: metrics.jsonl lacks step ";
    assert!(finished.err.contains(warned) && finished.err.contains("steps are kept"), "{}", finished.err);
    shop.train(&format!("{options} --resume"));
    assert_eq!(shop.metrics(RUN).len(), 60);
}

/// Something stands in the way of checkpoints for a while: the run says so, tries again, and ends as if nothing had been.
#[test]
fn a_checkpoint_that_cannot_be_written_ends_no_run() {
    let shop = Workshop::new();
    let options = "--set train.steps=1000 --set train.checkpoint_every=100 --set train.keep=2 --set train.eval_every=0";
    shop.train(&format!("{options} --set run.dir=whole"));
    let beside = "--ranks 2 --set parallel.expert=2 --set train.checkpoint_async=true";
    for ranks in ["", "--ranks 2 --set parallel.expert=2", beside] {
        let running = shop.start_logged(&format!("train {RECIPE} {options} {ranks}"), "log");
        // The first has its link, too, when the second is there.
        wait_until("two checkpoints", || shop.checkpoint(RUN, 200).exists());
        shop.obstruct_checkpoints(RUN, "log", "warning: no checkpoint of step ");
        let finished = running.wait();
        let log = shop.read("log");
        assert_eq!(finished.code, Some(0), "{log}");
        assert!(log.contains("training goes on, and tries again after step "), "{log}");
        assert!(log.contains("is written, the first since step "), "{log}");
        assert!(log.contains(" is the newest") && !log.contains("no checkpoint is the newest"), "{log}");
        assert!(waits(&log).all(|due| due % 100 == 0), "tried again while the last is being written: {log}");
        assert_eq!(damage(&shop.checkpoint(RUN, 1000)), None);
        if ranks.is_empty() {
            assert!(shop.tensors("whole", 1000) == shop.tensors(RUN, 1000), "other weights");
        }
    }
}

/// The steps whose checkpoint had to wait for the one before.
fn waits(log: &str) -> impl Iterator<Item = u64> {
    let waits = log.split("was still being written when that of step ").skip(1);
    waits.map(|after| after.split(' ').next().unwrap().parse().unwrap())
}

/// The disk is full for a while: lines of the log wait for room, and none is lost.
#[test]
fn a_log_that_cannot_be_written_ends_no_run() {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    fs::create_dir(shop.path("disk")).unwrap();
    let options =
        "--set run.dir=disk/run --set train.steps=2000 --set train.checkpoint_every=0 --set train.eval_every=0";
    let wait = |what: &str| format!("for i in $(seq 600); do {what} && break; sleep 0.05; done; ");
    let script = [
        "mount -t tmpfs -o size=8m none disk || exit 77; ".to_owned(),
        format!("{{ \"$GUILDHALL\" train {RECIPE} {options} 2>train.log; echo $? >code; }} & "),
        wait("[ -s disk/run/metrics.jsonl ]"),
        "cat /dev/zero >disk/ballast 2>/dev/null; ".to_owned(),
        wait("grep -q 'steps are kept' train.log"),
        "rm disk/ballast; wait; cp -a disk/run .".to_owned(),
    ];
    shop.write("script", &script.concat());
    let finished = shop.shell("unshare --map-root-user --mount sh script");
    if finished.code == Some(77) || !shop.path("code").exists() {
        return skipped(&format!("no disk can be mounted: {}", finished.err));
    }
    let log = shop.read("train.log");
    assert_eq!((finished.code, shop.read("code").trim()), (Some(0), "0"), "{log}");
    assert!(log.contains("warning: metrics.jsonl lacks step "), "{log}");
    assert!(log.contains("note: metrics.jsonl has all steps again, also those since step "), "{log}");
    assert_eq!(shop.series("run", "step"), (1..=2000).map(serde_json::Value::from).collect::<Vec<_>>());
}

/// A disk that is really full, where the system lets a user mount one for himself.
#[test]
fn a_full_disk_fails_the_run_and_leaves_what_was_whole() {
    fill_the_disk("");
    fill_the_disk("--set train.checkpoint_async=true");
}

fn fill_the_disk(manner: &str) {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    fs::create_dir(shop.path("disk")).unwrap();
    let train = format!("\"$GUILDHALL\" train {RECIPE} --set run.dir=disk/run --set train.checkpoint_every=2 {manner}");
    let full = "mount -t tmpfs -o size=1600k none disk && head -c 1120k /dev/zero >disk/ballast || exit 77; ";
    let leave = "cp -a disk/run full; rm disk/ballast; ";
    let script =
        format!("{full}{train} 2>train.log; echo $? >code; {leave}{train} --resume >/dev/null && cp -a disk/run .");
    shop.write("script", &script);
    let finished = shop.shell("unshare --map-root-user --mount sh script");
    if !shop.path("code").exists() {
        return skipped(&format!("no disk can be mounted: {}", finished.err));
    }
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let code = shop.read("code").trim().parse().ok();
    let first = Finished { code, out: String::new(), err: shop.read("train.log") };
    first.failed(
        1,
        &["No space left on device", "disk/run", "--resume continues from disk/run/checkpoints/step-000002"],
    );
    assert_eq!(damage(&shop.checkpoint("full", 2)), None);
    assert_eq!(damage(&shop.path("full/checkpoints/latest")), None);
    assert_eq!(shop.series("run", "step"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(damage(&shop.checkpoint("run", 6)), None);
}
