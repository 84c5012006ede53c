//! `guildhall verify`: it finds nothing where there is nothing, and every bug that is planted.

use std::collections::BTreeSet;
use std::path::PathBuf;

use guildhall::verify::BUGS;
use serde_json::Value;

use crate::program::{Finished, RECIPE, Workshop, wait_until};

/// Every bug can be planted in it: a bias balances the experts, and the others learn from a balance loss.
const BALANCED: &str = "--set moe.gate=sigmoid --set moe.gate.bias_rate=0.01 --set train.eval_every=0 \
                        --set parallel.timeout_s=2 --set model.init_std=0.1";

fn verify(shop: &Workshop, options: &str) -> Finished {
    shop.run(&format!("verify {RECIPE} {BALANCED} {options}"))
}

/// The reports in the one JSON document on standard output.
fn reports(finished: &Finished) -> Vec<Value> {
    serde_json::from_str(&finished.out).unwrap_or_else(|error| panic!("{error}: {}{}", finished.out, finished.err))
}

/// The report on one recipe.
fn json(finished: &Finished) -> Value {
    let [report] = <[Value; 1]>::try_from(reports(finished)).expect("one report");
    report
}

/// Asserts that a layout was left out, and why.
#[track_caller]
fn is_skipped(report: &Value, layout: &str, because: &str) {
    let skipped = report["skipped"].as_array().unwrap();
    let found = skipped.iter().find(|skipped| skipped["layout"] == layout).unwrap();
    assert!(found["reason"].as_str().unwrap().contains(because), "{found}");
}

fn names(report: &Value) -> Vec<String> {
    layouts(report).iter().map(|layout| layout["layout"].as_str().unwrap().to_owned()).collect()
}

/// What searches have left beside the runs.
fn left(shop: &Workshop) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(shop.path("runs")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn layouts(report: &Value) -> &Vec<Value> {
    report["layouts"].as_array().unwrap()
}

#[test]
fn a_recipe_is_the_same_in_every_layout() {
    let shop = Workshop::new();
    let finished = verify(&shop, "--ranks 2 --json");
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let report = json(&finished);
    let named = |name: &str| layouts(&report).iter().filter(|l| l["layout"].as_str().unwrap().contains(name)).count();
    for name in [
        "1 rank",
        "2 ranks",
        "2 ranks expert 2",
        "2 ranks tensor 2",
        "2 ranks expert [2, 1]",
        "expert_table uneven over 2",
        "micro_batch 1",
        "threads 2",
        "schedule smart",
        "shadowing force:1",
        "exchange experts",
        "migrate force",
        "condense above 1",
        "condense 0.8",
        "dtype bf16",
        "standby false",
        "overlap false",
        "bucket_bytes 1",
        "between_steps evaluation",
        "between_steps checkpoint",
    ] {
        assert!(named(name) > 0, "{name}: {}", finished.out);
    }
    for layout in layouts(&report) {
        assert_eq!(layout["outcome"], "same", "{layout}");
        let (error, allowed) = (&layout["differences"][0]["error"], &layout["differences"][0]["allowed"]);
        assert!(error.as_f64() <= allowed.as_f64(), "{layout}");
        if layout["tolerance"] == "bits" {
            assert_eq!(error.as_f64(), Some(0.0), "{layout}");
        }
    }
    is_skipped(&report, "1 rank, overlap false", "nobody to send to");
    assert_eq!(left(&shop), [""; 0].map(PathBuf::from), "nothing stays behind");
}

/// Dropping duplicates moves no bit where all rows leave at once. Where some stay or leave later, their gradients are added
/// up in other parts, and in half the bits those that stay are rounded on the way between slices, which without it they
/// need not go.
#[test]
fn where_rows_leave_in_parts_duplicates_are_another_order_of_sums() {
    let shop = Workshop::new();
    let text = |layout: &Value, key: &str| layout[key].as_str().unwrap().to_owned();
    let mut seen = BTreeSet::new();
    let found = ["schedule,shadowing,exchange,dtype", "migrate"].map(|only| {
        let finished =
            verify(&shop, &format!("--ranks 4 --full --json --set moe.top_k=3 --only mesh,drop_duplicates,{only}"));
        assert_eq!(finished.code, Some(0), "{}{}", finished.out, finished.err);
        json(&finished)
    });
    for layout in found.iter().flat_map(layouts) {
        let name = text(layout, "layout");
        if name.contains("drop_duplicates false") {
            let parts = ["schedule", "shadowing", "exchange", "migrate"].iter().any(|option| name.contains(option));
            let expected = match (parts, name.contains("bf16")) {
                (false, _) => "bits",
                (true, false) => "order of sums",
                (true, true) => "half the bits",
            };
            assert_eq!(text(layout, "tolerance"), expected, "{layout}");
            seen.insert(expected);
        }
    }
    assert_eq!(seen.len(), 3, "{found:?}");
}

/// A threshold that no tokens reach moves no bit of the same layout without it. One at which tokens share rows is another
/// recipe: all that has it is compared with one rank that has it, too.
#[test]
fn what_condenses_is_compared_with_one_rank_that_condenses() {
    let shop = Workshop::new();
    let finished = verify(&shop, "--ranks 4 --full --json --only mesh,migrate,condense,dtype,recompute");
    assert_eq!(finished.code, Some(0), "{}{}", finished.out, finished.err);
    let report = json(&finished);
    assert!(report["condensed_share"].as_f64() > Some(0.05), "{}", report["condensed_share"]);
    let text = |layout: &Value, key: &str| layout[key].as_str().unwrap().to_owned();
    let mut seen = BTreeSet::new();
    for layout in layouts(&report) {
        let [name, against, tolerance] = ["layout", "against", "tolerance"].map(|key| text(layout, key));
        assert_eq!(name.contains("condense 0.8"), against.contains("condense 0.8"), "{layout}");
        if name.contains("condense above 1") {
            assert_eq!(tolerance, "bits", "{layout}");
            assert!(!against.contains("condense"), "{layout}");
        }
        if name.contains("migrate force") && !name.contains("condense above 1") && !name.contains("recompute") {
            assert_ne!(tolerance, "bits", "{layout}");
            seen.insert((name.contains("bf16"), name.contains("condense")));
        }
    }
    assert_eq!(seen.len(), 4, "sequences move in both storage types, with shared rows and without: {report}");
    is_skipped(&report, "1 rank, migrate force", "nowhere to go");
}

/// A recipe that condenses is verified as it is, and besides without.
#[test]
fn a_recipe_that_condenses_is_its_own_reference() {
    let shop = Workshop::new();
    let own = "--set moe.condense=adaptive --set moe.condense_range=[0.7,0.5] --set moe.condense_warmup=1";
    let report = json(&verify(&shop, &format!("--ranks 2 --full --json --only mesh,condense {own}")));
    let found = names(&report);
    assert!(found.contains(&"2 ranks".to_owned()) && found.contains(&"2 ranks, condense off".to_owned()), "{found:?}");
    assert!(layouts(&report).iter().all(|layout| layout["outcome"] == "same"), "{report}");
    let off = layouts(&report).iter().find(|layout| layout["layout"] == "2 ranks, condense off").unwrap();
    assert_eq!(off["against"], "1 rank, condense off");
    assert!(report["condensed_share"].as_f64() > Some(0.05), "{}", report["condensed_share"]);
}

/// What shows each bug: a word of the worst difference or of the error, and options that let it show soon.
const CAUGHT: &[(&str, &str, &str)] = &[
    ("norm-counts-experts-per-rank", "--ranks 2", "gradient norm"),
    ("norm-counts-copies", "--ranks 2", "gradient norm"),
    ("expert-gradient-divided-by-expert-data-size", "--ranks 2", "gradient of model.layers.1.block_sparse_moe.experts"),
    ("router-gradient-lost", "--ranks 1", "gate.weight"),
    ("missing-expert-reduction", "--ranks 2", "the copies of model.layers.0.block_sparse_moe.experts"),
    ("aux-loss-scaled-by-ranks", "--ranks 2", "gate.weight"),
    ("aux-loss-scaled-by-micro-batches", "--ranks 1", "gate.weight"),
    (
        "gradients-accumulate-in-bf16",
        "--ranks 1 --only dtype,micro_batch --set train.batch_tokens=2048",
        "gradient of model",
    ),
    ("zero-row-rank-skips-collective", "--ranks 2", "rank 1"),
    ("partition-by-wrong-group", "--ranks 4 --only mesh,zero", "block_sparse_moe.experts"),
    ("recompute-routes-again", "--ranks 1 --only recompute", "were routed twice, and differently"),
    ("stale-duplicate", "--ranks 2", "experts"),
    ("drops-tokens-silently", "--ranks 2", "were routed differently, and not as its gate decides"),
    ("member-takes-another-clusters-output", "--ranks 1", "gradient of model"),
    ("member-joins-another-cluster", "--ranks 1", "share other rows, and not as similarity decides"),
    ("target-stays-behind", "--ranks 2 --steps 1 --only mesh,migrate", "gradient of model"),
    ("residual-stays-behind", "--ranks 2 --only mesh,migrate", "gradient of model"),
    ("bias-updated-twice", "--ranks 1", "e_score_correction_bias"),
    ("bias-counts-recomputation", "--ranks 1 --only recompute", "e_score_correction_bias"),
    ("bias-in-half-the-bits", "--ranks 1", "e_score_correction_bias"),
    ("bias-in-evaluation", "--ranks 1", "e_score_correction_bias"),
    ("bias-not-saved", "--ranks 1", "e_score_correction_bias"),
];

#[test]
fn every_planted_bug_is_caught_where_it_is() {
    let shop = Workshop::new();
    let named: Vec<&str> = CAUGHT.iter().map(|(name, _, _)| *name).collect();
    assert_eq!(named, BUGS.iter().map(|bug| bug.name).collect::<Vec<_>>(), "each bug has its line here");
    for (name, options, shown) in CAUGHT {
        let finished = verify(&shop, &format!("{options} --inject {name}"));
        assert_eq!(finished.code, Some(1), "{name}: {}{}", finished.out, finished.err);
        assert!(finished.out.ends_with(&format!("{name} is caught\n")), "{name}: {}", finished.out);
        let differs: String =
            finished.out.split_inclusive('\n').skip_while(|line| !line.starts_with(char::is_uppercase)).collect();
        assert!(differs.contains(shown), "{name} shows otherwise than in {shown:?}: {differs}");
        assert!(!finished.err.contains("error:"), "a result is no error: {}", finished.err);
    }
}

/// Where ranks without rows stay away, the others are told who does, and soon.
#[test]
fn a_rank_that_stays_away_is_named() {
    let shop = Workshop::new();
    let finished = verify(&shop, "--ranks 2 --json --inject zero-row-rank-skips-collective");
    let report = json(&finished);
    let failed = layouts(&report).iter().find(|layout| layout["outcome"] == "failed").expect("a failure");
    assert!(failed["layout"].as_str().unwrap().contains("micro_batch 1"), "{failed}");
    assert!(failed["messages"][0].as_str().unwrap().contains("rank 1"), "{failed}");
    assert!(report["bug"] == "zero-row-rank-skips-collective" && finished.code == Some(1), "{report}");
}

/// No bug shows where nothing is that it could break: it is not planted in vain, and the reason is told.
#[test]
fn a_bug_that_cannot_show_is_refused() {
    let shop = Workshop::new();
    let refused =
        |options: &str, words: &[&str]| shop.fails(&format!("verify {RECIPE} {BALANCED} {options}"), 2, words);
    refused(
        "--ranks 1 --inject stale-duplicate",
        &["stale-duplicate cannot show", "has a tensor group of two ranks", "--ranks"],
    );
    refused(
        "--ranks 2 --only mesh --inject bias-not-saved",
        &["reads a checkpoint between steps", "let between_steps vary"],
    );
    let sums = "--inject gradients-accumulate-in-bf16";
    refused(&format!("--ranks 1 {sums}"), &["adds up 64 micro-batches on a rank", "64 rows a step", "batch_tokens"]);
    let asked = format!("{sums} --set train.dtype=bf16 --set train.gradient_dtype=bf16");
    refused(&asked, &["cannot be planted", "train.gradient_dtype=f32"]);
    let astray = "--inject member-takes-another-clusters-output";
    refused(&format!("--ranks 2 --only mesh {astray}"), &["lets tokens share rows", "let condense vary"]);
    let joins = "--inject member-joins-another-cluster";
    refused(&format!("--ranks 2 --half {joins}"), &["chooses by itself in half the bits", "leave --half out"]);
    let competing = format!("{astray} --set moe.gate=expert_choice --set model.family=bert");
    shop.fails(&format!("verify {RECIPE} --set moe.balance_weight=0 {competing}"), 2, &["compete for experts"]);
    for bug in ["target-stays-behind", "residual-stays-behind"] {
        let one_rank = format!("--ranks 1 --inject {bug}");
        refused(&one_rank, &["moves sequences between ranks", "let migrate vary, or take more --ranks"]);
    }
    let competing = "--ranks 2 --set moe.capacity_factor=1.0 --inject aux-loss-scaled-by-micro-batches";
    refused(competing, &["has two micro-batches a step, for tokens of a micro-batch compete for places"]);
}

/// A bug that is planted and breaks nothing: this gate spreads tokens so evenly that no place is wanting.
#[test]
fn a_bug_that_does_not_show_is_told_as_not_caught() {
    let shop = Workshop::new();
    let finished =
        shop.run(&format!("verify {RECIPE} --ranks 2 --set moe.gate=balanced --inject drops-tokens-silently"));
    assert_eq!(finished.code, Some(0), "{}{}", finished.out, finished.err);
    assert!(finished.out.ends_with("drops-tokens-silently is NOT CAUGHT\n"), "{}", finished.out);
}

/// Sums in bf16 that a recipe asks for cost what they cost, however many they are; the same in f32 are all the same.
#[test]
fn sums_are_judged_by_what_they_are_stored_in() {
    let shop = Workshop::new();
    let options = "--ranks 2 --json --only mesh,dtype,micro_batch --set train.batch_tokens=4096 --set train.dtype=bf16";
    let allowed = ["f32", "bf16"].map(|gradients| {
        let finished = verify(&shop, &format!("{options} --set train.gradient_dtype={gradients}"));
        assert_eq!(finished.code, Some(0), "{gradients}: {}{}", finished.out, finished.err);
        let report = json(&finished);
        let many = |layout: &&Value| {
            let name = layout["layout"].as_str().unwrap();
            // What else is rounded: rows that travel between ranks.
            name.starts_with("1 rank") && name.contains("micro_batch 1") && name.contains("bf16")
        };
        let worst = layouts(&report).iter().filter(many).map(|l| l["differences"][0]["error"].as_f64().unwrap());
        worst.fold(0.0, f64::max)
    });
    // 128 sums, each rounded to eight bits, show; f32 ones are as good as one.
    assert!(allowed[1] > 2.0 * allowed[0], "{allowed:?}");
}

#[test]
fn requests_that_mean_nothing_are_refused() {
    let shop = Workshop::new();
    for (options, words) in [
        ("--inject no-such-bug", &["no-such-bug", "router-gradient-lost", "bias-not-saved"][..]),
        ("--inject bias-not-saved --set moe.gate.bias_rate=0", &["bias-not-saved", "moe.gate=sigmoid"]),
        ("--ranks 0", &["--ranks 0", "1 or more"]),
        ("--ranks 100000", &["--ranks 100000", "32 or fewer"]),
        ("--steps 0", &["--steps 0", "1 or more"]),
        ("--steps 7", &["--steps 7", "train.steps = 6"]),
        ("--set parallel.expert=3", &["parallel.expert"]),
        ("--only mesh,meshes,zeros", &["--only meshes,zeros", "no such option", "mesh, order", "recompute"]),
        ("--only=", &["no such option", "mesh, order"]),
        ("--full --ranks 8", &["combinations", "--full --sample 1000", "let fewer vary: --only"]),
        ("--full --sample 0", &["--sample 0", "1 or more"]),
        ("--sample 5", &["--full"]),
        ("--full --seed 5", &["--sample"]),
        ("no-such-recipe.toml", &["no-such-recipe.toml"]),
        ("--set data.sources=[\"nowhere\"]", &["nowhere", "matches no file"]),
    ] {
        shop.fails(&format!("verify {RECIPE} {BALANCED} {options}"), 2, words);
    }
}

/// The recipe's own mathematics are left alone: no other micro-batch where tokens of one compete.
#[test]
fn what_the_mathematics_depend_on_is_not_varied() {
    let shop = Workshop::new();
    let finished = shop.run(&format!("verify {RECIPE} --ranks 2 --json --set moe.capacity_factor=1.0"));
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let report = json(&finished);
    assert!(layouts(&report).iter().all(|layout| !layout["layout"].as_str().unwrap().contains("micro_batch")));
    is_skipped(&report, "micro_batch 1", "compete for places");
}

#[test]
fn only_the_options_that_are_named_vary() {
    let shop = Workshop::new();
    let pairs = verify(&shop, "--ranks 3 --json --only dtype,mesh");
    assert_eq!(pairs.code, Some(0), "{}", pairs.err);
    let meshes = ["1 rank", "2 ranks", "2 ranks expert 2", "2 ranks tensor 2", "2 ranks tensor 2 whole experts"];
    let more = ["2 ranks expert [2, 1]", "2 ranks tensor 2 expert 2 whole experts", "3 ranks"];
    let meshes = meshes.into_iter().chain(more);
    let of_both = |mesh: &str| [mesh.to_owned(), format!("{mesh}, dtype bf16")];
    let mut expected: Vec<String> = meshes.flat_map(of_both).collect();
    expected.sort();
    let mut found = names(&json(&pairs));
    found.sort();
    assert_eq!(found, expected);
    let full = verify(&shop, "--ranks 3 --json --full --only overlap,dtype,mesh");
    assert_eq!(full.code, Some(0), "{}", full.err);
    let (full, idle) = (json(&full), "1 rank, dtype bf16, overlap false");
    // On one rank, and where two have a slice or an expert each.
    assert_eq!(names(&full).len(), 2 * (2 * 8 - 3), "each of both, but nothing overlaps where no gradient travels");
    assert!(names(&full).contains(&"3 ranks, dtype bf16, overlap false".to_owned()));
    assert!(full["skipped"].as_array().unwrap().iter().any(|skipped| skipped["layout"] == idle), "{full}");
}

/// Of more combinations than can be run some are drawn: as many as were asked for, by the seed alone.
#[test]
fn a_sample_is_drawn_by_its_seed() {
    let shop = Workshop::new();
    let sample = |options: &str| verify(&shop, &format!("--ranks 8 --full {options}"));
    let of = |options: &str| json(&sample(options));
    let (five, again) = (of("--json --sample 5 --seed 3"), of("--json --sample 5 --seed 3"));
    let drawn = five["sample"].clone();
    let number = |key: &str| drawn[key].as_u64().unwrap();
    assert_eq!((number("seed"), number("layouts")), (3, 5));
    assert!(number("combinations") > 100_000 && number("drawn") >= 5, "{drawn}");
    assert_eq!(five["skipped"], again["skipped"]);
    assert_eq!((names(&five), &drawn), (names(&again), &again["sample"]));
    // What is drawn is compared with other layouts, at most one each.
    assert!((5..=10).contains(&names(&five).len()), "{:?}", names(&five));
    assert_ne!(names(&five), names(&of("--json --sample 5 --seed 4")));
    let more = of("--json --sample 7 --seed 3");
    assert!(names(&five).iter().all(|name| names(&more).contains(name)), "a larger sample has the smaller");
    let told = format!("of {} drawn from {} combinations by --seed 3\n", number("drawn"), number("combinations"));
    assert!(sample("--sample 5 --seed 3").out.contains(&format!("sample   5 layouts, {told}")));
    // A sample of all there is.
    let all = verify(&shop, "--ranks 2 --full --only threads,mesh --sample 1000 --json");
    let whole = verify(&shop, "--ranks 2 --full --only threads,mesh --json");
    let (mut all, mut whole) = (names(&json(&all)), names(&json(&whole)));
    all.sort();
    whole.sort();
    assert_eq!(all, whole);
}

#[test]
fn several_recipes_have_a_report_each() {
    let shop = Workshop::new();
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
    let both = |options: &str| shop.run(&format!("verify {RECIPE} dense.toml --ranks 1 --only threads {options}"));
    let finished = both("--json");
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let found: Vec<_> = reports(&finished).iter().map(|report| (report["recipe"].clone(), names(report))).collect();
    let layouts = ["1 rank", "1 rank, threads 2"].map(str::to_owned).to_vec();
    assert_eq!(found, [(RECIPE.into(), layouts.clone()), ("dense.toml".into(), layouts)]);
    let table = both("").out;
    for recipe in [RECIPE, "dense.toml"] {
        assert!(table.contains(&format!("recipe   {recipe}\nsame     1 to the bit\n")), "{table}");
    }
    // Whatever is wrong with one is told before any is run.
    let refused = both("--inject router-gradient-lost");
    refused.failed(2, &["router-gradient-lost", "dense.toml", "[moe]"]);
}

/// What was found is told, what was not run is counted, and no folder stays: wherever it was.
#[test]
fn a_search_can_be_stopped() {
    let shop = Workshop::new();
    let options = "--ranks 8 --steps 6 --full --json --only mesh,zero,dtype";
    for (signal, awaited) in [("INT", "verify "), ("TERM", "same ")] {
        let running = shop.start_logged(&format!("verify {RECIPE} {BALANCED} {options}"), "log");
        wait_until(awaited, || shop.read("log").contains(awaited));
        running.signal(signal);
        let finished = running.wait();
        let log = shop.read("log");
        assert_eq!(finished.code, Some(1), "{log}");
        assert!(log.ends_with("error: stopped: what was not run may differ\n"), "{log}");
        let report = json(&finished);
        assert!(report["left"].as_u64() > Some(0), "{report}");
        assert!(awaited != "same " || !layouts(&report).is_empty(), "{report}");
        assert_eq!(left(&shop), [""; 0].map(PathBuf::from));
    }
}

/// Nobody can clean up when it is killed; the next search does, and leaves alone what others are using.
#[test]
fn a_killed_search_is_cleaned_up_after() {
    let shop = Workshop::new();
    let start = || shop.start(&format!("verify {RECIPE} {BALANCED} --ranks 4 --full --only mesh,zero,recompute,dtype"));
    let killed = start();
    wait_until("a folder", || left(&shop).len() == 1);
    wait_until("a reference", || left(&shop).iter().all(|folder| folder.join("routes-0").exists()));
    killed.signal("KILL");
    killed.wait();
    let stale = left(&shop);
    assert_eq!(stale.len(), 1);
    let used = start();
    wait_until("another folder", || {
        left(&shop).iter().any(|folder| !stale.contains(folder) && folder.join("routes-0").exists())
    });
    let using = left(&shop);
    assert!(using.len() == 1 && using != stale, "{using:?}");
    assert_eq!(verify(&shop, "--ranks 1 --only threads").code, Some(0));
    assert_eq!(left(&shop), using, "in use");
    used.signal("TERM");
    assert_eq!(used.wait().code, Some(1));
    assert_eq!(left(&shop), [""; 0].map(PathBuf::from));
}
