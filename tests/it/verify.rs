//! `guildhall verify`: it finds nothing where there is nothing, and every bug that is planted.

use guildhall::verify::BUGS;
use serde_json::Value;

use crate::program::{Finished, RECIPE, Workshop};

/// Every bug can be planted in it: a bias balances the experts, and the others learn from a balance loss.
const BALANCED: &str = "--set moe.gate=sigmoid --set moe.bias_rate=0.01 --set train.eval_every=0 \
                        --set parallel.timeout_s=2 --set model.init_std=0.1";

fn verify(shop: &Workshop, options: &str) -> Finished {
    shop.run(&format!("verify {RECIPE} {BALANCED} {options}"))
}

/// The one JSON document on standard output.
fn json(finished: &Finished) -> Value {
    serde_json::from_str(&finished.out).unwrap_or_else(|error| panic!("{error}: {}{}", finished.out, finished.err))
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
        "dtype bf16",
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
    let skipped = report["skipped"].as_array().unwrap();
    let idle = skipped.iter().find(|skipped| skipped["layout"] == "1 rank, overlap false").unwrap();
    assert!(idle["reason"].as_str().unwrap().contains("nobody to send to"), "{idle}");
    let left = std::fs::read_dir(shop.path("runs")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "nothing stays behind");
}

/// What shows each bug: a word of the worst difference or of the error, and options that let it show soon.
const CAUGHT: &[(&str, &str, &str)] = &[
    ("norm-counts-experts-per-rank", "--ranks 2", "gradient norm"),
    ("expert-gradient-divided-by-expert-data-size", "--ranks 2", "gradient of model.layers.1.block_sparse_moe.experts"),
    ("router-gradient-lost", "--ranks 1", "gate.weight"),
    ("missing-expert-reduction", "--ranks 2", "the copies of model.layers.0.block_sparse_moe.experts"),
    ("aux-loss-scaled-by-ranks", "--ranks 2", "gate.weight"),
    ("aux-loss-scaled-by-micro-batches", "--ranks 1", "gate.weight"),
    ("zero-row-rank-skips-collective", "--ranks 2", "rank 1"),
    ("stale-duplicate", "--ranks 2", "experts"),
    ("drops-tokens-silently", "--ranks 2", "were routed differently, and not as its gate decides"),
    ("bias-updated-twice", "--ranks 1", "e_score_correction_bias"),
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
        let differs: String = finished.out.split_inclusive('\n').skip_while(|line| line.starts_with("same")).collect();
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

/// No bug shows where nothing is that it could break.
#[test]
fn a_bug_that_does_not_show_is_told_as_not_caught() {
    let shop = Workshop::new();
    let finished = verify(&shop, "--ranks 1 --inject stale-duplicate");
    assert_eq!(finished.code, Some(0), "{}", finished.out);
    assert!(finished.out.ends_with("stale-duplicate is NOT CAUGHT\n"), "{}", finished.out);
}

#[test]
fn requests_that_mean_nothing_are_refused() {
    let shop = Workshop::new();
    for (options, words) in [
        ("--inject no-such-bug", &["no-such-bug", "router-gradient-lost", "bias-not-saved"][..]),
        ("--inject bias-not-saved --set moe.bias_rate=0", &["bias-not-saved", "moe.gate=sigmoid"]),
        ("--ranks 0", &["--ranks 0", "1 or more"]),
        ("--steps 0", &["--steps 0", "1 or more"]),
        ("--steps 7", &["--steps 7", "train.steps = 6"]),
        ("--set parallel.expert=3", &["parallel.expert"]),
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
    let skipped = report["skipped"].as_array().unwrap();
    let told = skipped.iter().find(|skipped| skipped["layout"] == "micro_batch 1").unwrap();
    assert!(told["reason"].as_str().unwrap().contains("compete for places"), "{told}");
}
