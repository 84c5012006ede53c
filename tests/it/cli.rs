//! What the commands do, seen from outside: files, standard output, exit codes.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::program::{Finished, PROGRAM, RECIPE, RUN, TENSORS, Workshop, damage, ended, wait_until};

fn numbers(values: &[Value]) -> Vec<f64> {
    values.iter().map(|value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))).collect()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn a_run_leaves_what_it_promises() {
    let shop = Workshop::new();
    let finished = shop.train("");
    assert_eq!(finished.out, "", "training has no result on standard output");
    for word in
        ["24.1 k parameters", "runs/tiny: steps 1 to 6", "step 6/6", "done     6 steps", "runs/tiny/report.html"]
    {
        assert!(finished.err.contains(word), "no {word:?} in: {}", finished.err);
    }
    let names = fs::read_dir(shop.path(RUN)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left = [".lock", "checkpoints", "config.toml", "metrics.jsonl", "report.html", "summary.json"];
    assert_eq!(names.collect::<BTreeSet<_>>(), left.map(String::from).into());
    let report = shop.read("runs/tiny/report.html");
    assert!(report.contains("<html") && report.trim_end().ends_with("</html>"), "{} bytes", report.len());
}

/// Links that take time take it, are shown, and change nothing else; nor do other ways of sending gradients.
#[test]
fn how_gradients_travel_shows_in_the_time_alone() {
    let shop = Workshop::new();
    let mesh = "--ranks 2 --set parallel.expert=2 --set parallel.threads=1";
    shop.train(mesh);
    for (dir, how) in [
        ("slow", "--set parallel.link={latency_us=1500,gbytes_per_s=1}"),
        ("nodes", "--set parallel.node_link={ranks_per_node=1,latency_us=1500,gbytes_per_s=1}"),
        ("late", "--set parallel.overlap=false --set parallel.bucket_bytes=1"),
    ] {
        let run = shop.train(&format!("{mesh} {how} --set run.dir={dir}"));
        let told = run.err.lines().find(|line| line.starts_with("link "));
        let want = match dir {
            "slow" => Some("link     emulated: 1500 us and 1 GB/s for messages between ranks"),
            "nodes" => Some("link     emulated: 1500 us and 1 GB/s for messages between nodes of one rank"),
            _ => None,
        };
        assert_eq!(told, want);
        assert_eq!(
            (shop.series(dir, "loss"), shop.series(dir, "grad_norm")),
            (shop.series(RUN, "loss"), shop.series(RUN, "grad_norm"))
        );
        if want.is_some() {
            // Six steps with far more than twenty collectives each.
            let seconds = shop.summary(dir)["seconds"].as_f64().unwrap();
            assert!(seconds > 6.0 * 20.0 * 1.5e-3, "{seconds}");
        }
    }
}

/// A short try of a recipe that was made for a longer run, and what the end proposes, typed as it is.
#[test]
fn a_short_try_runs_and_its_last_line_is_a_command() {
    let shop = Workshop::new();
    shop.write("long.toml", &shop.read(RECIPE).replace("lr = 1e-2", "lr = 1e-2\nwarmup_steps = 30\nmicro_batch = 8"));
    let tried =
        shop.succeeds("train long.toml --set train.steps=2 --set train.batch_tokens=64 --set run.dir=runs/tiny");
    for word in [
        "note: train.warmup_steps = 30 (long.toml",
        "is longer than train.steps = 2: the learning rate ends at 2/30 of train.lr",
        "note: train.micro_batch = 8 (long.toml",
        "is more than the 2 rows of a step",
    ] {
        assert!(tried.err.contains(word), "no {word:?} in: {}", tried.err);
    }
    assert_eq!(numbers(&shop.series(RUN, "lr")), [1e-2 / 30.0, 2e-2 / 30.0].map(|lr: f64| lr));
    let next = |finished: &Finished| {
        let line = finished.err.lines().find_map(|line| line.strip_prefix("next     ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no proposal in: {}", finished.err))
    };
    let proposed = shop.shell(&next(&tried));
    assert_eq!(proposed.code, Some(0), "{}: {}", next(&tried), proposed.err);
    // With a folder that a shell would read as several words.
    let odd = shop.succeeds(
        "train long.toml --ranks 2 --set parallel.expert=2 --set train.steps=1 --set run.dir=runs/Ada's$IFS--run",
    );
    let rows = odd.err.lines().find(|line| line.starts_with("rows ")).expect("rows went to two ranks");
    for proposed in [next(&odd), rows.split_once(": ").expect("a proposal").1.to_owned()] {
        assert!(proposed.contains(r"Ada'\''s$IFS--run"), "{proposed}");
        let done = shop.shell(&proposed);
        assert_eq!(done.code, Some(0), "{proposed}: {}", done.err);
    }
    // Rows of sliced experts are shared by the ranks of a tensor group, up to one more or less: that is no skew.
    let sliced = shop.succeeds("train long.toml --ranks 2 --set parallel.tensor=2 --set train.steps=1");
    assert!(!sliced.err.lines().any(|line| line.starts_with("rows ")), "{}", sliced.err);
    // Found by its name, or started by a path below the working folder.
    std::os::unix::fs::symlink(PROGRAM, shop.path("guildhall")).unwrap();
    let again = "train long.toml --set train.steps=2 --set train.batch_tokens=64";
    for (start, told) in [
        (format!("PATH=\"$PWD:$PATH\" && guildhall {again}"), "guildhall generate "),
        (format!("\"$PWD/guildhall\" {again}"), "./guildhall generate "),
        (format!("./guildhall {again}"), "./guildhall generate "),
    ] {
        let finished = shop.shell(&start);
        assert!(next(&finished).starts_with(told), "{start}: {}", next(&finished));
    }
}

#[test]
fn the_configuration_of_a_run_is_its_recipe_resolved() {
    let shop = Workshop::new();
    shop.train("--ranks 2 --set train.steps=1 --set train.lr=0.25");
    let load = |name: &str, overrides: &[&str], ranks| {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        guildhall::config::load(&shop.path(name), &overrides, ranks).unwrap()
    };
    let saved = load("runs/tiny/config.toml", &[], None);
    assert_eq!(saved.config, load(RECIPE, &["train.steps=1", "train.lr=0.25"], Some(2)).config);
    assert_eq!(saved.notices, Vec::<String>::new());
    shop.succeeds("train runs/tiny/config.toml --resume --set train.steps=2");
    assert_eq!(shop.series(RUN, "step"), [1, 2], "the resolved recipe is a recipe");
}

#[test]
fn metrics_have_a_line_a_step_with_every_field() {
    let shop = Workshop::new();
    shop.train("--set train.warmup_steps=2");
    let lines = shop.metrics(RUN);
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
    let fields = "balance_loss grad_norm loss lr moe seconds sent step tokens tokens_per_s waiting_s z_loss";
    let (mut loads, mut told) = ([0.0; 2], [0.0; 2]);
    for line in &lines {
        let mut found = keys(line);
        let evaluates = line["step"].as_u64().unwrap().is_multiple_of(3);
        assert_eq!(found.remove("eval_loss"), evaluates, "{line}");
        assert_eq!(found, fields.split(' ').collect(), "{line}");
        assert_eq!(line["moe"].as_array().unwrap().len(), 2, "{line}");
        for (layer, moe) in line["moe"].as_array().unwrap().iter().enumerate() {
            assert_eq!((&moe["layer"], &moe["dropped"]), (&layer.into(), &0.into()), "{line}");
            let load = numbers(moe["load"].as_array().unwrap());
            assert_eq!((load.len(), load.iter().sum::<f64>()), (4, 512.0), "256 tokens to 2 of 4 experts: {line}");
            assert!((0.0..=1.0).contains(&moe["entropy"].as_f64().unwrap()), "{line}");
            loads[layer] += load[0];
            // Checkpoints are saved after steps 4 and 6; the lines between tell nothing.
            let Some(counted) = moe["co_activation"].as_array() else { continue };
            let (pairs, steps) = (numbers(counted), line["step"].as_f64().unwrap() - told[layer]);
            assert_eq!((pairs.len(), pairs.iter().sum::<f64>()), (6, 256.0 * steps), "a pair a token: {line}");
            // {0, 1}, {0, 2}, {0, 3}: all that chose expert 0.
            assert_eq!(pairs[..3].iter().sum::<f64>(), loads[layer], "{line}");
            (told[layer], loads[layer]) = (line["step"].as_f64().unwrap(), 0.0);
        }
        assert_eq!(line["waiting_s"].as_array().unwrap().len(), 1, "{line}");
        let kept = |layer: u64| serde_json::json!({ "layer": layer, "rows": [[512]] });
        assert_eq!(line["sent"], serde_json::json!([kept(0), kept(1)]), "a single rank keeps all");
    }
    assert_eq!(told, [6.0, 6.0], "the last line tells");
    let series = |field| numbers(&shop.series(RUN, field));
    assert_eq!(series("lr")[..2], [0.005, 0.01]);
    for field in ["seconds", "tokens"] {
        assert!(series(field).is_sorted_by(|a, b| a < b), "{field}: {:?}", series(field));
    }
    assert!(series("tokens_per_s").iter().all(|&rate| rate > 0.0));
}

#[test]
fn the_summary_has_every_number() {
    let shop = Workshop::new();
    shop.train("--ranks 4 --set parallel.expert=2");
    let (summary, lines) = (shop.summary(RUN), shop.metrics(RUN));
    let number = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("{name} in {summary}"));
    assert_eq!((&summary["status"], &summary["steps"]), (&"done".into(), &6.into()));
    assert_eq!((&summary["loss_first"], &summary["loss_last"]), (&lines[0]["loss"], &lines[5]["loss"]));
    assert_eq!(summary["eval_loss"], lines[5]["eval_loss"]);
    assert_eq!((&summary["ranks"], &summary["expert"]), (&4.into(), &2.into()));
    assert!(number("tokens_per_s") > 0.0 && number("seconds") > 0.0 && number("peak_rss_mb") >= 1.0);
    // Token table and head; per layer attention, two norms, router and four experts of three matrices; last norm.
    let layer = |experts: usize| 4 * 16 * 16 + 2 * 16 + 4 * 16 + experts * 3 * 16 * 32;
    let parameters = |experts| (2 * 300 * 16 + 2 * layer(experts) + 16) as f64;
    assert_eq!((number("params_total"), number("params_active")), (parameters(4), parameters(2)));

    let causes =
        ["activations", "checkpoint", "communication", "gradients", "optimizer", "other", "parameters", "total"];
    assert_eq!(keys(&summary["peak_bytes"]), causes.into());
    let peak = |cause: &str| summary["peak_bytes"][cause].as_f64().unwrap();
    let sum: f64 = causes[..7].iter().map(|cause| peak(cause)).sum();
    assert!(peak("total") <= sum && peak("total") >= peak("parameters") + peak("optimizer"), "{summary}");
    let ranks = summary["peak_bytes_by_rank"].as_array().unwrap();
    assert_eq!(ranks.len(), 4, "{summary}");
    for cause in causes {
        let sum: f64 = ranks.iter().map(|rank| rank[cause].as_f64().unwrap()).sum();
        assert_eq!(sum, peak(cause), "{cause} over ranks");
    }
    // Every rank has two of four experts, and room for rows on their way.
    let even = |cause: &str| ranks.iter().all(|rank| rank[cause] == ranks[0][cause]);
    assert!(even("parameters") && even("gradients") && even("optimizer"), "{summary}");
    assert!(ranks.iter().all(|rank| rank["communication"].as_f64() > Some(0.0)), "{summary}");
    assert_eq!((number("routes"), number("routes_dropped")), (6.0 * 2.0 * 512.0, 0.0));
    let rows = summary["rows_sent"].as_array().unwrap();
    let rows: Vec<Vec<f64>> = rows.iter().map(|row| numbers(row.as_array().unwrap())).collect();
    assert!(rows.len() == 4 && rows.iter().all(|row| row.len() == 2 && row.iter().sum::<f64>() == 6.0 * 2.0 * 128.0));
    for rank in 0..4 {
        let waited: f64 = lines.iter().map(|line| line["waiting_s"][rank].as_f64().unwrap()).sum();
        let total = summary["waiting_s"][rank].as_f64().unwrap();
        assert!((total - waited).abs() < 1e-6 && 0.0 < total && total < number("seconds"), "{summary}");
    }
    for kind in ["all_gather", "all_reduce", "all_to_all"] {
        let calls = |traffic: &Value| traffic[kind]["calls"].as_u64().unwrap_or(0);
        let groups = summary["traffic_by_group"].as_object().unwrap().values();
        assert_eq!(groups.map(calls).sum::<u64>(), calls(&summary["traffic"]), "{summary}");
        assert!(summary["traffic"][kind]["bytes"].as_u64().unwrap() > 0, "{summary}");
    }
}

/// Of 64 experts and tokens with one choice each, some get nothing for long. Whether the run evaluates meanwhile, or
/// stops and continues, changes nothing of that.
#[test]
fn dead_experts_are_those_of_so_many_steps_whatever_happens_between() {
    let shop = Workshop::new();
    let options = "--set moe.experts=64 --set moe.top_k=1 --set train.schedule=constant";
    let dead = |run: &str| shop.summary(run)["dead_experts"].as_array().unwrap().clone();
    let ends = |run: &str, after: u64, more: &str| {
        shop.train(&format!("{options} --set moe.dead_after={after} --set run.dir={run} {more}"));
        dead(run)
    };
    let want = ends("whole", 4, "--set train.eval_every=0");
    let loads = shop.series("whole", "moe");
    let starved = |steps: usize| {
        let idle = |moe: &Value, layer: usize, e: usize| moe[layer]["load"][e] == 0;
        let pairs = (0..2).flat_map(|layer| (0..64).map(move |e| (layer, e)));
        pairs.filter(|&(layer, e)| loads[6 - steps..].iter().all(|moe| idle(moe, layer, e))).count()
    };
    assert!(want.len() == starved(4) && starved(4) > starved(6), "{} and {}", starved(4), starved(6));
    let of_step = |line: &Value, layer: usize| line[layer]["dead"].as_array().map_or(0, Vec::len);
    assert!((0..2).map(|layer| of_step(&loads[5], layer)).sum::<usize>() == starved(1), "dead in the last step");
    assert_eq!(ends("evaluating", 4, "--set train.eval_every=1"), want);
    assert_eq!(ends("longer", 6, "").len(), starved(6));
    ends("stopped", 4, "--set train.steps=3");
    assert_eq!(ends("stopped", 4, "--resume"), want);
    shop.fails("train tiny.toml --set moe.dead_after=0", 2, &["moe.dead_after", "the nearest valid value is 1"]);
}

#[test]
fn checkpoints_are_whole_and_the_newest_has_a_link() {
    let shop = Workshop::new();
    shop.train("--set train.keep=2 --set train.steps=7");
    let folder = shop.path(RUN).join("checkpoints");
    let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.collect::<BTreeSet<_>>(), ["latest", "step-000006", "step-000007"].map(String::from).into());
    assert_eq!(fs::read_link(folder.join("latest")).unwrap().to_str(), Some("step-000007"));
    for step in [6, 7] {
        assert_eq!(damage(&shop.checkpoint(RUN, step)), None);
    }
}

#[test]
fn the_loss_falls_on_every_mesh() {
    let shop = Workshop::new();
    let meshes = ["", "--ranks 2 --set parallel.expert=2", "--ranks 4 --set parallel.expert=2", "--ranks 4"];
    let runs: Vec<Value> = meshes
        .iter()
        .map(|mesh| {
            shop.train(&format!("{mesh} --set train.steps=60 --set train.eval_every=0 --set train.checkpoint_every=0"));
            shop.summary(RUN)
        })
        .collect();
    let loss = |summary: &Value, name: &str| summary[name].as_f64().unwrap();
    for (mesh, summary) in meshes.iter().zip(&runs) {
        let (first, last) = (loss(summary, "loss_first"), loss(summary, "loss_last"));
        assert!((first - 300f64.ln()).abs() < 0.1 && last < 0.8 * first, "{mesh}: {first} to {last}");
        assert!(summary.get("eval_loss").is_none(), "{mesh}: train.eval_every = 0 means never");
        assert!((last - loss(&runs[0], "loss_last")).abs() < 1e-3, "{mesh}: {last}");
    }
    let spread: Vec<bool> = runs.iter().map(|run| run["traffic"]["all_to_all"]["bytes"].as_u64() > Some(0)).collect();
    assert_eq!(spread, [false, true, true, false], "tokens travel where experts are spread");
}

#[test]
fn resuming_without_a_checkpoint_starts_at_step_0() {
    let shop = Workshop::new();
    let finished = shop.train("--resume --set train.checkpoint_every=0");
    assert!(finished.err.contains("runs/tiny has no checkpoint yet: starting at step 0"), "{}", finished.err);
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
}

/// Both runs must have taken the same steps to the bit.
fn expect_equal_runs(shop: &Workshop, runs: [&str; 2], step: u64) {
    let [whole, resumed] = runs;
    for field in ["step", "loss", "eval_loss", "grad_norm", "lr", "tokens"] {
        assert_eq!(shop.series(whole, field), shop.series(resumed, field), "{field}");
    }
    assert_eq!(shop.routed(whole), shop.routed(resumed), "what was routed");
    let equal = shop.tensors(whole, step).iter().zip(&shop.tensors(resumed, step)).map(|(a, b)| a == b).collect();
    assert_eq!(Vec::from_iter(TENSORS.into_iter().zip::<Vec<bool>>(equal)), TENSORS.map(|name| (name, true)));
}

#[test]
fn a_longer_run_in_a_moved_folder_equals_one_in_one_go() {
    let shop = Workshop::new();
    let options = "--ranks 2 --set parallel.expert=2 --set train.schedule=constant --set model.dropout=0.1";
    shop.train(&format!("{options} --set train.steps=10 --set run.dir=whole"));
    shop.train(&format!("{options} --set train.steps=5"));
    fs::rename(shop.path(RUN), shop.path("moved")).unwrap();
    let finished = shop.train(&format!("{options} --resume --set train.steps=10 --set run.dir=moved"));
    assert!(finished.err.contains("moved: steps 6 to 10"), "{}", finished.err);
    expect_equal_runs(&shop, ["whole", "moved"], 10);
    assert_eq!(shop.summary("moved")["loss_first"], shop.summary("whole")["loss_first"]);
}

#[test]
fn ctrl_c_saves_and_the_rest_can_follow() {
    let shop = Workshop::new();
    let options = format!("train {RECIPE} --ranks 2 --set train.steps=400 --set train.checkpoint_every=0");
    let run = shop.start(&options);
    wait_until("the first steps", || shop.metrics(RUN).len() > 5);
    run.signal("INT");
    let finished = run.wait();
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let taken = shop.metrics(RUN).len() as u64;
    assert!((6..400).contains(&taken), "{taken} steps before the signal");
    assert!(finished.err.contains(&format!("stopped  after {taken} steps")), "{}", finished.err);
    assert_eq!(shop.summary(RUN)["status"], "interrupted");
    assert_eq!(damage(&shop.checkpoint(RUN, taken)), None);

    let finished = shop.succeeds(&format!("{options} --resume"));
    assert!(finished.err.contains(&format!("steps {} to 400", taken + 1)), "{}", finished.err);
    assert_eq!(shop.summary(RUN)["status"], "done");
    shop.succeeds(&format!("{options} --set run.dir=whole"));
    expect_equal_runs(&shop, ["whole", RUN], 400);
}

#[test]
fn a_new_run_sets_the_earlier_one_aside() {
    let shop = Workshop::new();
    shop.train("--set train.seed=7");
    let before = (shop.read("runs/tiny/metrics.jsonl"), shop.tensors(RUN, 6));
    for number in 1..3 {
        let aside = format!("runs/tiny/previous-{number}");
        let finished = shop.train("");
        assert!(finished.err.contains(&aside) && finished.err.contains("--resume would have"), "{}", finished.err);
        assert!(shop.path(&aside).join("report.html").exists());
        assert_eq!(shop.metrics(RUN).len(), 6);
    }
    let after = (shop.read("runs/tiny/previous-1/metrics.jsonl"), shop.tensors("runs/tiny/previous-1", 6));
    assert!(before == after, "what was set aside has changed");
    shop.succeeds("evaluate runs/tiny/previous-1/checkpoints/latest");
}

#[test]
fn a_finished_run_may_be_resumed_and_changes_nothing() {
    let shop = Workshop::new();
    shop.train("");
    let before = (shop.read("runs/tiny/metrics.jsonl"), shop.tensors(RUN, 6), shop.summary(RUN));
    fs::remove_file(shop.path("runs/tiny/checkpoints/latest")).unwrap();
    fs::remove_file(shop.path("runs/tiny/summary.json")).unwrap();
    let finished = shop.train("--resume");
    assert!(finished.err.contains("all 6 steps are done already"), "{}", finished.err);
    let summary = shop.summary(RUN);
    for field in ["status", "steps", "loss_first", "loss_last", "eval_loss"] {
        assert_eq!(summary[field], before.2[field], "{field}");
    }
    assert!(summary["tokens_per_s"].as_f64() > Some(0.0), "{summary}");
    assert!((shop.read("runs/tiny/metrics.jsonl"), shop.tensors(RUN, 6)) == (before.0, before.1));
    shop.succeeds("evaluate runs/tiny/checkpoints/latest");
}

#[test]
fn evaluation_gives_the_loss_that_training_saw() {
    let shop = Workshop::new();
    shop.train("--ranks 2");
    let figures = |options: &str| -> Value {
        let finished = shop.succeeds(&format!("evaluate runs/tiny/checkpoints/latest {options}"));
        assert_eq!(finished.out.lines().count(), 1, "{}", finished.out);
        serde_json::from_str(&finished.out).unwrap()
    };
    let loss = |figures: &Value| figures["eval_loss"].as_f64().unwrap();
    let all = figures("");
    assert_eq!(all["eval_loss"], shop.summary(RUN)["eval_loss"]);
    assert_eq!(all["step"], 6);
    assert!((all["perplexity"].as_f64().unwrap() - loss(&all).exp()).abs() < 1e-9);
    for mesh in ["--ranks 1", "--ranks 4", "--ranks 4 --set parallel.expert=4"] {
        assert!((loss(&figures(mesh)) - loss(&all)).abs() < 1e-5, "{mesh}");
    }
    let rows = all["rows"].as_u64().unwrap();
    let some = figures("--rows 3");
    assert_eq!(some["rows"], 3);
    assert_ne!(loss(&some), loss(&all));
    assert_eq!(figures(&format!("--rows {}", 10 * rows)), all, "no more rows than there are");
}

#[test]
fn generation_is_a_function_of_its_seed() {
    let shop = Workshop::new();
    shop.train("--ranks 2 --set parallel.expert=2 --set train.steps=40 --set train.eval_every=0");
    let text = |prompt: &str, options: &str| {
        let mut command = shop.command(&format!("generate runs/tiny/checkpoints/latest {options}"));
        command.args(["--prompt", prompt]);
        let generated = ended(command);
        assert_eq!(generated.code, Some(0), "{}", generated.err);
        generated.out
    };
    let first = text("the cat", "--tokens 20 --seed 1");
    assert!(first.starts_with("the cat") && first.ends_with('\n') && first.len() > 12, "{first:?}");
    assert_eq!(first, text("the cat", "--tokens 20 --seed 1"));
    assert_ne!(first, text("the cat", "--tokens 20 --seed 2"));
    assert_eq!(text("the cat", "--tokens 0"), "the cat\n");
    assert_eq!(text("", "--tokens 0"), "\n", "what begins a text is not part of it");
    assert!(text("", "--tokens 20").trim().len() > 3);
    let greedy = |seed| text("the", &format!("--tokens 200 --temperature 0 --seed {seed}"));
    assert_eq!(greedy(1), greedy(2));
    assert!(greedy(1).len() > 150, "200 tokens of a model that sees 32 at once: {}", greedy(1));
    let odd = "\u{1f41f} d\u{e9}j\u{e0} vu\n\t ";
    assert_eq!(text(odd, "--tokens 0"), format!("{odd}\n"));
}

/// A model may have more entries than its tokenizer found words for; drawing one of those says nothing.
#[test]
fn only_tokens_that_mean_something_are_drawn() {
    let shop = Workshop::new();
    shop.train("--set model.vocab=4000 --set train.steps=1 --set train.eval_every=0");
    let latest = "runs/tiny/checkpoints/latest";
    shop.succeeds(&format!("generate {latest} --prompt x --tokens 40 --temperature 50 --top-k 0 --top-p 1"));
}

#[test]
fn data_is_prepared_once_for_all_runs() {
    let shop = Workshop::new();
    let first = shop.succeeds(&format!("prepare {RECIPE}"));
    let folder = first.out.trim_end();
    assert!(folder.starts_with("cache/") && shop.path(folder).join("manifest.json").exists(), "{folder}");
    assert!(first.err.contains("tokenizing") && first.err.contains("prepared in"), "{}", first.err);
    let cached = |finished: &Finished| {
        assert!(finished.err.contains("found in") && !finished.err.contains("tokenizing"), "{}", finished.err);
    };
    let again = shop.succeeds(&format!("prepare {RECIPE}"));
    assert_eq!(again.out, first.out);
    cached(&again);
    cached(&shop.train("--set train.steps=1 --set model.d_model=8"));
    let other = shop.succeeds(&format!("prepare {RECIPE} --set data.held_out=0.2"));
    assert_ne!(other.out, first.out);
    shop.write("corpus/40.txt", "one more text");
    assert_ne!(shop.succeeds(&format!("prepare {RECIPE}")).out, first.out);
}

#[test]
fn every_command_explains_itself() {
    let shop = Workshop::new();
    for command in [
        "train",
        "prepare",
        "evaluate",
        "generate",
        "surgery",
        "surgery moefy",
        "surgery aggregate",
        "surgery prune",
        "report",
    ] {
        let help = shop.succeeds(&format!("{command} --help")).out;
        assert!(help.contains("Example:") && help.contains(&format!("guildhall {command} ")), "{help}");
    }
    assert_eq!(shop.succeeds("--version").out, format!("guildhall {}\n", env!("CARGO_PKG_VERSION")));
}
