//! Surgery on encoder-decoders that learn tasks: both stacks lose or win experts, held-out parts say which are used, and
//! what results evaluates, translates and learns on.

use guildhall::data::tasks::parts;
use guildhall::data::{PAD, Row, Source, Split};
use serde_json::Value;

use crate::program::Workshop;
use crate::task_recipes::{LATEST, RUN, load, prepared, shop};

fn evaluated(shop: &Workshop, checkpoint: &str) -> Value {
    serde_json::from_str(&shop.succeeds(&format!("evaluate {checkpoint}")).out).unwrap()
}

/// The losses of all parts, which `evaluate` tells, and that of all.
fn losses(shop: &Workshop, checkpoint: &str) -> Vec<f64> {
    let told = evaluated(shop, checkpoint);
    let parts = told["tasks"].as_array().unwrap().iter().map(|part| part["loss"].as_f64().unwrap());
    parts.chain(told["eval_loss"].as_f64()).collect()
}

fn translated(shop: &Workshop, checkpoint: &str) -> String {
    shop.write("lines.txt", "the dog sleeps here.\nthe king falls today.\n");
    shop.succeeds(&format!("translate {checkpoint} --from en --to de lines.txt --max-tokens 6 --beams 2")).out
}

/// Sums in other orders, through four layers, of a mean over tokens.
const ROUNDING: f64 = 1e-5;

fn assert_near(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < ROUNDING), "{what}: {got:?}, not {want:?}");
}

/// It evaluates, translates, and begins a run on other ranks with the loss it has.
fn is_of_use(shop: &Workshop, checkpoint: &str, experts: usize) {
    let loss = *losses(shop, checkpoint).last().unwrap();
    assert!((2.0..6.5).contains(&loss), "{checkpoint}: {loss}");
    assert_eq!(translated(shop, checkpoint).lines().count(), 2);
    let on = format!("{checkpoint}-on");
    let begin = format!("train {checkpoint}/config.toml --set train.init={checkpoint} --set run.dir={on}");
    shop.succeeds(&format!("{begin} --set train.steps=2 --set train.eval_every=1 --ranks 2 --set parallel.expert=2"));
    let after = shop.series(&on, "eval_loss")[0].as_f64().unwrap();
    // A step at a high rate; new weights would have the loss of 330 tokens by chance, 5.8.
    assert!((after - loss).abs() < 0.6, "{after} after {loss}");
    let line = &shop.metrics(&on)[0];
    let layers = line["moe"].as_array().unwrap();
    assert_eq!(layers.len(), 2, "one layer of each stack: {line}");
    assert!(layers.iter().all(|layer| layer["load"].as_array().unwrap().len() == experts), "{line}");
}

/// How many routes of a layer `prune` says it counted.
fn routes(err: &str, layer: usize) -> u64 {
    let line = err.lines().find(|line| line.starts_with(&format!("kept     layer {layer}: "))).expect("a line a layer");
    let (_, rest) = line.split_once("% of its ").unwrap();
    rest.split_once(" routes").unwrap().0.parse().unwrap()
}

/// Each token of each held-out row of each part chooses two experts, in the encoder those that are read, in the decoder
/// those that are written, and padding chooses none.
#[test]
fn routes_of_all_held_out_parts_are_counted_in_both_stacks() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    let config = load(&shop, &[]);
    // Held-out texts are noised alike in all runs, by this seed.
    let parts = parts(&prepared(&config), &config.data, Split::HeldOut, [48, 32], 0).unwrap();
    let present = |row: &Row| row.segments.iter().filter(|&&segment| segment != PAD).count() as u64;
    for limit in [usize::MAX, 3] {
        let (mut read, mut written, mut rows) = (0, 0, 0);
        for part in &parts {
            for index in 0..part.rows.len().min(limit) {
                let row = part.rows.get(index, 0).unwrap();
                read += 2 * present(row.source.as_ref().unwrap());
                written += 2 * present(&row);
                rows += 1;
            }
        }
        let option = if limit == 3 { " --rows 3" } else { "" };
        let told = shop.succeeds(&format!("surgery prune {RUN} --keep 2{option} -o few{}", option.len())).err;
        assert_eq!([routes(&told, 1), routes(&told, 3)], [read, written], "{told}");
        assert!(told.contains(&format!("measured {rows} rows of held-out text, 7 parts of tasks")), "{told}");
    }
    is_of_use(&shop, "few0", 2);
}

#[test]
fn ranks_do_not_matter_to_who_is_kept() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    let kept = |options: &str, folder: &str| {
        let told = shop.succeeds(&format!("surgery prune {RUN} --keep 2 {options} -o {folder}")).err;
        told.lines().filter(|line| line.starts_with("kept")).map(str::to_owned).collect::<Vec<_>>()
    };
    let want = kept("", "one");
    assert_eq!(want.len(), 2, "{want:?}");
    assert_eq!(kept("--ranks 2", "four"), want);
    assert_eq!(kept("--set parallel.ranks=4 --set parallel.expert=2 --set parallel.tensor=2", "three"), want);
}

#[test]
fn who_keeps_all_translates_as_before() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    shop.succeeds(&format!("surgery prune {LATEST} --keep 4 -o all"));
    assert_eq!(losses(&shop, "all"), losses(&shop, LATEST));
    assert_eq!(translated(&shop, "all"), translated(&shop, LATEST));
    for by in ["gate", "random"] {
        shop.succeeds(&format!("surgery prune {RUN} --keep 2 --by {by} --rows 0 -o {by}"));
        is_of_use(&shop, by, 2);
    }
}

#[test]
fn branches_of_one_run_become_one() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    for seed in [1, 2] {
        let branch = format!("--set run.dir=branch{seed} --set train.seed={seed} --set train.steps=3");
        shop.succeeds(&format!("train tasks.toml --set train.init={LATEST} {branch}"));
    }
    let told = shop.succeeds("surgery aggregate branch1 branch2 -o both").err;
    assert!(["layer 1: rows times", "layer 3: rows times"].iter().all(|words| told.contains(words)), "{told}");
    is_of_use(&shop, "both", 8);
    // With itself and twice the choices, each token finds both twins of the experts it had.
    shop.succeeds(&format!("surgery aggregate {RUN} {LATEST} -o twins --set moe.top_k=4"));
    assert_near("twins", &losses(&shop, "twins"), &losses(&shop, LATEST));
}

const EXPERTS: &str =
    "[moe]\nexperts = 4\ntop_k = 2\nd_expert = 32\nlayers = { every = 2 }\nbalance_scope = \"micro_batch\"\n";

fn dense(shop: &Workshop) {
    let recipe = shop.read("tasks.toml");
    assert!(recipe.contains(EXPERTS));
    shop.write("dense.toml", &recipe.replace(EXPERTS, ""));
    shop.succeeds("train dense.toml --set run.dir=dense");
}

#[test]
fn a_dense_translator_gets_experts_in_both_stacks() {
    let shop = shop();
    dense(&shop);
    shop.succeeds("surgery upcycle dense --experts 4 --top-k 2 --layers every:2 -o upcycled");
    assert_near("upcycled", &losses(&shop, "upcycled"), &losses(&shop, "dense/checkpoints/latest"));
    assert_eq!(translated(&shop, "upcycled"), translated(&shop, "dense/checkpoints/latest"));
    is_of_use(&shop, "upcycled", 4);
}

#[test]
fn stacks_that_differ_are_not_one_model() {
    let shop = shop();
    dense(&shop);
    shop.succeeds("train tasks.toml");
    shop.succeeds("train tasks.toml --set run.dir=deep --set model.encoder_layers=4 --set model.source_seq=40");
    let cases: &[(&str, &[&str])] = &[
        (
            "aggregate runs/tasks deep -o out",
            &["model.encoder_layers is 4 in deep", "2 there", "model.source_seq is 40 in deep"],
        ),
        ("aggregate runs/tasks dense -o out", &["dense/checkpoints/step-000006 has no experts", "surgery upcycle"]),
        ("prune dense --keep 2 -o out", &["has no experts"]),
        ("prune runs/tasks --keep 5 -o out", &["--keep 5", "keep from 2 to 4"]),
        ("prune runs/tasks --keep 2 -o dense", &["dense exists already"]),
        ("upcycle runs/tasks --experts 4 -o out", &["experts already"]),
    ];
    for (arguments, words) in cases {
        shop.fails(&format!("surgery {arguments}"), 2, words);
        assert!(!shop.path("out").exists(), "{arguments} left something");
    }
}
