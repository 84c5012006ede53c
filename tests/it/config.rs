//! Recipes and overrides: what is accepted, what is derived, and that every mistake is reported, together
//! with its place and the way out.

use std::fs;
use std::path::PathBuf;

use clap::{CommandFactory, Parser};
use guildhall::cli::{Cli, Command};
use guildhall::config::{self, Config, Loaded, Problems};
use guildhall::config::{LrSchedule, StorageType};
use guildhall::launch;
use guildhall::model::Role;
use guildhall::moe::gates::{SigmoidKeys, SwipeKeys, TopologyKeys};
use guildhall::moe::{GateChoice, GateKind, Layers};
use guildhall::parallel::{Migrate, PerLayer};
use guildhall::train;
use tempfile::TempDir;

/// A small recipe nothing is wrong with; tests change a line of it or override a key.
const RECIPE: &str = r#"[train]
steps = 100
batch_tokens = 512
lr = 1e-3

[parallel]
ranks = 4
expert = 2

[model]
vocab = 300
d_model = 48
layers = 4
heads = 4
seq = 64

[moe]
experts = 8

[data]
sources = ["corpus/*.txt"]
"#;

/// The same without experts.
fn dense() -> String {
    RECIPE.replace("[moe]\nexperts = 8\n", "").replace("expert = 2\n", "")
}

struct Folder {
    folder: TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Folder { folder }
    }

    fn recipe(&self, toml: &str) -> PathBuf {
        let path = self.folder.path().join("tiny.toml");
        fs::write(&path, toml).expect("a recipe in the temporary folder");
        path
    }

    fn load(&self, toml: &str, overrides: &[&str], ranks: Option<usize>) -> Result<Loaded, Problems> {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        config::load(&self.recipe(toml), &overrides, ranks)
    }
}

fn load(toml: &str, overrides: &[&str]) -> Result<Loaded, Problems> {
    Folder::new().load(toml, overrides, None)
}

fn valid(toml: &str, overrides: &[&str]) -> Config {
    match load(toml, overrides) {
        Ok(loaded) => loaded.config,
        Err(problems) => panic!("{overrides:?}: {problems}"),
    }
}

/// Exactly as many problems as expectations, and each expectation's parts together in one of them.
#[track_caller]
fn check(toml: &str, overrides: &[&str], expected: &[&[&str]]) {
    let Err(problems) = load(toml, overrides) else {
        panic!("{overrides:?} is accepted");
    };
    for parts in expected {
        let holds = |line: &String| parts.iter().all(|part| line.contains(part));
        let lines: Vec<String> = problems.as_slice().iter().map(ToString::to_string).collect();
        assert!(lines.iter().any(holds), "{parts:?} is not in: {problems}");
    }
    assert_eq!(problems.as_slice().len(), expected.len(), "{problems}");
}

/// One override, one problem, which names the key and the override.
#[track_caller]
fn check_set(given: &str, parts: &[&str]) {
    let (key, origin) = (given.split('=').next().unwrap_or(given), format!("--set {given}"));
    let parts: Vec<&str> = parts.iter().copied().chain([key, origin.as_str()]).collect();
    check(RECIPE, &[given], &[&parts]);
}

#[test]
fn what_is_left_out_is_derived() {
    let config = valid(RECIPE, &[]);
    let moe = config.moe.as_ref().expect("the recipe has experts");
    assert_eq!(config.rows_per_step(), 8);
    assert_eq!(config.train.micro_batch, Some(8));
    assert_eq!(config.model.kv_heads, Some(4));
    assert_eq!(config.model.d_ff, Some(192));
    assert_eq!(moe.d_expert, Some(192));
    assert_eq!(config.run.dir, PathBuf::from("runs/tiny"));
    assert_eq!(config.parallel.timeout_s, 300);
}

#[test]
fn experts_are_as_wide_as_a_dense_layer_is_said_to_be() {
    let moe = valid(RECIPE, &["model.d_ff=100"]).moe.expect("the recipe has experts");
    assert_eq!(moe.d_expert, Some(100));
}

#[test]
fn experts_of_equal_compute_share_the_width_of_a_dense_layer() {
    let equal = valid(RECIPE, &["moe.equal_compute=true", "moe.top_k=3"]);
    assert_eq!((equal.moe.expect("experts").d_expert, equal.model.d_ff), (Some(64), Some(192)));
    valid(RECIPE, &["moe.equal_compute=true", "moe.top_k=2", "moe.d_expert=96"]);
    let width = "moe.d_expert = 64 is not model.d_ff / moe.top_k = 96";
    check(RECIPE, &["moe.equal_compute=true", "moe.d_expert=64"], &[&["moe.equal_compute", width]]);
    let remedy = "of moe.top_k, the nearest valid values are 4 and 6";
    check(RECIPE, &["moe.equal_compute=true", "moe.top_k=5"], &[&["5 does not divide model.d_ff = 192", remedy]]);
}

#[test]
fn one_network_at_most_is_beside_the_experts() {
    assert!(valid(RECIPE, &["moe.residual=true"]).moe.expect("experts").residual);
    check(RECIPE, &["moe.residual=true", "moe.shared_experts=2"], &[&["moe.residual = true", "leave one"]]);
}

#[test]
fn sections_of_defaults_alone_may_be_left_out() {
    let toml = dense().replace("[parallel]\nranks = 4\n", "");
    let config = valid(&toml, &[]);
    assert_eq!((config.parallel.ranks, config.parallel.expert), (1, PerLayer::Same(1)));
    assert_eq!(config.moe, None);
}

#[test]
fn the_resolved_recipe_means_the_same_and_needs_no_notice() {
    let tables = RECIPE.replace(r#""corpus/*.txt""#, r#""a", { path = "b", field = "c" }, { path = "d" }"#);
    for (toml, overrides) in [
        (RECIPE, vec![]),
        (&dense(), vec![]),
        (&dense(), vec!["model.family=gpt2", "model.d_model=45", "model.heads=9"]),
        (&tables, vec!["data.max_bytes=1_000", "data.tokenizer='a \"b\".json'"]),
        (RECIPE, vec!["moe.layers={every=2}", "train.schedule=constant", "parallel.threads=3"]),
        (RECIPE, vec!["moe.layers.list=[1,3]", "model.dropout=0.1", "moe.z_weight=1e-30"]),
        (RECIPE, vec!["moe.d_expert=7", "train.micro_batch=2", "train.seed=9223372036854775807"]),
        (RECIPE, vec!["moe.equal_compute=true", "moe.residual=true", "train.init=some/checkpoint"]),
    ] {
        let config = valid(toml, &overrides);
        let again = load(&config.to_toml(), &[]).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(again.config, config, "{overrides:?}");
        assert_eq!(again.notices, Vec::<String>::new(), "{overrides:?}");
        assert_eq!(again.config.to_toml(), config.to_toml());
    }
}

#[test]
fn overrides_are_toml_and_bare_words_are_strings() {
    let overrides = [
        "run.dir=/tmp/x",
        "train.lr = 2e-3",
        "train.clip=0",
        "train.dtype=bf16",
        "train.schedule=\"linear\"",
        "train.steps=0x10",
        "moe.layers={every=2}",
        "data.sources=[\"a\", {path=\"b=c\", field=\"d\"}]",
        "data.tokenizer=tok/a#b.json",
        "model.tie_embeddings=true",
    ];
    let config = valid(RECIPE, &overrides);
    assert_eq!(config.run.dir, PathBuf::from("/tmp/x"));
    assert_eq!((config.train.lr, config.train.clip), (2e-3, 0.0));
    assert_eq!((config.train.dtype, config.train.schedule), (StorageType::Bf16, LrSchedule::Linear));
    assert_eq!(config.train.steps, 16);
    assert_eq!(config.moe.expect("experts").layers, Layers::Every(2));
    assert_eq!(config.data.sources.len(), 2);
    assert_eq!(config.data.tokenizer, "tok/a#b.json");
    assert!(config.model.tie_embeddings);
}

#[test]
fn a_later_override_wins() {
    assert_eq!(valid(RECIPE, &["train.lr=1", "train.lr=2"]).train.lr, 2.0);
    let overrides = ["moe.layers={every=2}", "moe.layers=all"];
    assert_eq!(valid(RECIPE, &overrides).moe.expect("experts").layers, Layers::All);
}

#[test]
fn an_override_can_add_a_section() {
    let config = valid(&dense(), &["moe.experts=4", "parallel.expert=2"]);
    assert_eq!(config.moe.expect("experts").experts, PerLayer::Same(4));
}

#[test]
fn malformed_overrides_are_problems() {
    for (given, wrong) in [
        ("train.lr", "there is no `=`"),
        ("=1", "`` is not a dotted key"),
        ("train..lr=1", "`train..lr` is not a dotted key"),
        ("train.l r=1", "`train.l r` is not a dotted key"),
        ("train.lr=", "nothing after `=`"),
        ("moe.layers={every=2", "not TOML"),
        ("data.sources=[\"a\"", "not TOML"),
        ("run.dir=\"x", "not TOML"),
    ] {
        check(RECIPE, &[given], &[&[&format!("--set {given}: "), wrong]]);
    }
}

#[test]
fn unknown_names_are_reported_with_what_was_meant() {
    check_set("moe.topk=1", &["no such key", "did you mean moe.top_k?"]);
    check_set("moe.expert=1", &["did you mean moe.experts?"]);
    check_set("train.bacth_tokens=64", &["did you mean train.batch_tokens?"]);
    check_set("train.top_k=1", &["did you mean moe.top_k?"]);
    check_set("train.learning_rate=1", &["no such key", "valid here: steps, seed, ", "dtype"]);
    check_set("lr=1", &["no such key", "did you mean train.lr?"]);
    check(RECIPE, &["optimizer.lr=1"], &[&["no such section", "valid here: run, train, "]]);
    for section in ["run", "train", "parallel", "model", "moe", "data"] {
        check_set(&format!("{section}.zzz=1"), &["no such key", "valid here: "]);
    }
    check(RECIPE, &["modle.seq=64"], &[&["modle", "no such section", "did you mean model?"]]);
    check(
        RECIPE,
        &["data.sources=[{path=\"a\", feild=\"b\"}]"],
        &[&["data.sources[0].feild = \"b\"", "did you mean data.sources[0].field?"]],
    );
    check(&format!("{RECIPE}\n\"model.vocab\" = 3"), &[], &[&["data.\"model.vocab\" = 3", "no such key"]]);
}

#[test]
fn a_misspelt_name_is_one_problem_and_not_also_a_missing_one() {
    let toml = RECIPE.replace("vocab = 300", "vocabb = 300");
    check(&toml, &[], &[&["model.vocabb = 300", "did you mean model.vocab?"]]);
    let toml = RECIPE.replace("[model]", "[modell]");
    check(&toml, &[], &[&["modell (", "no such section", "did you mean model?"]]);
}

#[test]
fn every_missing_key_is_reported_where_it_belongs() {
    check(
        "",
        &[],
        &[
            &["train.steps (", "tiny.toml)", "missing", "add steps to [train]: a whole number"],
            &["train.batch_tokens"],
            &["train.lr", "a number"],
            &["model.vocab"],
            &["model.d_model"],
            &["model.layers"],
            &["model.heads"],
            &["model.seq"],
            &["data.sources", "names no text"],
        ],
    );
    let toml = RECIPE.replace("heads = 4\n", "");
    check(&toml, &[], &[&["model.heads (", "tiny.toml:10)", "missing"]]);
    check(
        &dense(),
        &["moe.top_k=1"],
        &[&["moe.experts (--set moe.top_k=1)", "no [moe] section", "leave --set moe.top_k=1 out"]],
    );
    check_set("data.sources=[{field=\"x\"}]", &["data.sources[0].path", "missing"]);
}

#[test]
fn every_wrong_type_is_reported_with_what_was_meant() {
    check_set("train.steps=many", &["\"many\"", "a string does not fit", "give a whole number"]);
    check_set("train.steps=1e3", &["train.steps = 1000.0", "did you mean 1000?"]);
    check_set("train.steps='40'", &["a string where a whole number", "did you mean 40?"]);
    check_set("train.steps=2000-01-01", &["a date does not fit"]);
    check_set("train.lr='1e-3'", &["a string where a number is expected", "did you mean 1e-3?"]);
    check_set("train.lr=[1]", &["a list does not fit", "give a number"]);
    check_set("train.lr.x=1", &["{ x = 1 }", "a table does not fit"]);
    check_set("train.dtype=fp32", &["not one of \"f32\", \"bf16\"", "did you mean \"f32\"?"]);
    check_set("train.dtype=float16", &["give one of \"f32\", \"bf16\""]);
    check_set("train.dtype={f32=1}", &["a table does not fit", "give one of \"f32\""]);
    check_set("model.tie_embeddings=True", &["did you mean true?"]);
    check_set("model.tie_embeddings=maybe", &["give true or false"]);
    check_set("run.dir=7", &["did you mean \"7\"?"]);
    check_set("data.sources=corpus", &["did you mean [\"corpus\"]?"]);
    check_set("data.sources=[\"a\", 3]", &["data.sources[1] = 3", "give a path or a table"]);
    check_set("moe.layers=2", &["\"all\", { every = 2 } or { list = [1, 3] }"]);
    check_set("moe.layers=every", &["\"every\"", "{ every = 2 }"]);
    check_set("moe.layers={all=1}", &["\"all\""]);
    check_set("moe.layers={every=1,list=[1]}", &["a table does not fit"]);
    check_set("moe.layers={every='x'}", &["moe.layers.every = \"x\"", "give a whole number"]);
    check_set("moe.layers={list=3}", &["moe.layers.list = 3", "did you mean [3]?"]);
    check_set("moe.layers={list=[1,-1]}", &["moe.layers.list[1] = -1", "a whole number, 0 or more"]);
    check_set("moe=8", &["moe = 8", "a whole number does not fit", "give a section"]);
    check_set("train=8", &["train = 8", "give a section"]);
    check_set("data.cache=' '", &["empty", "leave it out"]);
    check_set("data.sources=['']", &["data.sources[0] = \"\"", "empty"]);
}

#[test]
fn numbers_out_of_range_are_reported_with_the_nearest_valid_one() {
    let nearest = |value: &str| format!("the nearest valid value is {value}");
    for size in [
        "train.steps",
        "train.batch_tokens",
        "train.micro_batch",
        "parallel.ranks",
        "parallel.expert",
        "parallel.threads",
        "parallel.timeout_s",
        "parallel.bucket_bytes",
        "model.vocab",
        "model.d_model",
        "model.layers",
        "model.heads",
        "model.kv_heads",
        "model.d_ff",
        "model.seq",
        "moe.experts",
        "moe.top_k",
        "moe.d_expert",
        "data.max_bytes",
    ] {
        check_set(&format!("{size}=0"), &[" = 0 ", &nearest("1")]);
        check_set(&format!("{size}=-3"), &[" = -3 ", &nearest("1")]);
    }
    for count in ["train.seed", "train.warmup_steps", "train.keep", "train.checkpoint_every"] {
        check_set(&format!("{count}=-1"), &[&nearest("0")]);
    }
    check_set("parallel.ranks=65537", &["from 1 to 65536", &nearest("65536")]);
    check_set("model.d_model=9223372036854775807", &[&nearest("1048576")]);
    for above_zero in ["train.lr", "train.eps", "model.init_std", "model.norm_eps", "model.rope_theta"] {
        for bad in ["0", "-1.5", "nan", "inf", "1e-60"] {
            check_set(&format!("{above_zero}={bad}"), &["above 0.0", "a usual value is "]);
        }
    }
    for from_zero in ["train.clip", "train.weight_decay", "moe.balance_weight", "moe.z_weight"] {
        check_set(&format!("{from_zero}=-0.1"), &["at least 0.0", &nearest("0.0")]);
        check_set(&format!("{from_zero}=inf"), &["a finite number", "a usual value is "]);
    }
    for below_one in ["train.beta1", "train.beta2", "model.dropout"] {
        check_set(&format!("{below_one}=1"), &["at least 0.0 and below 1.0", "a usual value is 0."]);
        check_set(&format!("{below_one}=-1"), &[&nearest("0.0")]);
    }
    check_set("train.lr_end=1.5", &["at most 1.0", &nearest("1.0")]);
    check_set("data.held_out=0.6", &["at most 0.5", &nearest("0.5")]);
}

#[test]
fn sizes_that_do_not_fit_each_other_are_reported_with_the_nearest_that_do() {
    check_set("model.heads=5", &["does not divide model.d_model = 48", "4 and 6"]);
    check_set("model.heads=16", &["even width per head, 48 / 16 is 3", "12 and 24"]);
    check(RECIPE, &["model.d_model=45", "model.heads=3"], &[&["model.d_model is 45", "set model.d_model to 46"]]);
    check_set("model.kv_heads=3", &["does not divide model.heads = 4", "2 and 4"]);
    check_set("train.batch_tokens=500", &["not a multiple of model.seq = 64", "448 and 512"]);
    check_set("train.batch_tokens=5", &["the nearest valid value is 64"]);
    check_set("train.micro_batch=3", &["does not divide the 8 rows", "2 and 4"]);
    check_set("moe.top_k=9", &["more than moe.experts = 8", "value is 8"]);
    check_set("moe.layers={every=0}", &["every = 1"]);
    check_set("moe.layers={every=5}", &["selects no layer", "{ every = 4 }"]);
    check_set("moe.layers={list=[]}", &["selects no layer", "from 0 to 3"]);
    check_set("moe.layers={list=[4, 0, 7]}", &["layer 4, 7 is beyond", "the last one is 3"]);
    check_set("model.vocab=257", &["data.tokenizer = \"bpe\"", "value is 258"]);
    check_set("data.sources=[]", &["names no text"]);
    check(
        RECIPE,
        &["train.eval_every=5", "data.held_out=0"],
        &[&["train.eval_every = 5", "data.held_out is 0", "never"]],
    );
    check(&dense(), &["model.family=gpt2", "model.kv_heads=2"], &[&["model.kv_heads = 2", "gpt2"]]);
}

#[test]
fn gates_whose_keys_do_not_fit_are_refused() {
    let refused = |set: &[&str], parts: &[&str]| check(RECIPE, set, &[parts]);
    refused(&["moe.gate=swipe", "moe.gate.workers=3"], &["moe.gate.workers", "divide moe.experts = 8", "2 and 4"]);
    refused(&["moe.gate=topology", "moe.logical_nodes=5"], &["moe.logical_nodes", "divide moe.experts = 8", "4 and 8"]);
    refused(&["moe.gate=sigmoid", "moe.gate.groups=3"], &["moe.gate.groups", "divide moe.experts = 8", "2 and 4"]);
    refused(
        &["moe.gate=noisy", "moe.balance_scope=global_batch"],
        &["moe.balance_scope", "\"noisy\"", "\"sequence\" or \"micro_batch\""],
    );
    valid(RECIPE, &["moe.gate=noisy", "moe.balance_scope=micro_batch"]);
    let grouped = ["moe.gate=sigmoid", "moe.gate.groups=4"];
    let megatron = [grouped[0], grouped[1], "moe.dialect=megatron"];
    let with = |first: &[&'static str], rest: &[&'static str]| [first, rest].concat();
    refused(&with(&grouped, &["moe.top_k=3", "moe.gate.top_groups=1"]), &["moe.gate.top_groups", "value is 2"]);
    valid(RECIPE, &with(&grouped, &["moe.top_k=4", "moe.gate.top_groups=3"]));
    refused(&with(&megatron, &["moe.top_k=4", "moe.gate.top_groups=3"]), &["as many in each", "2 and 4"]);
    valid(RECIPE, &with(&megatron, &["moe.top_k=4", "moe.gate.top_groups=2"]));
    refused(
        &["moe.gate=sigmoid", "moe.gate.groups=2", "moe.dialect=megatron", "moe.top_k=5", "moe.gate.top_groups=2"],
        &["moe.gate.top_groups", "leave moe.dialect out"],
    );
    refused(&["moe.gate=sigmoid", "moe.dialect=hf"], &["moe.dialect", "weights of its own"]);
}

#[test]
fn what_is_unusual_and_sound_is_accepted() {
    valid(RECIPE, &["model.vocab=100", "data.tokenizer=tok.json"]);
    valid(RECIPE, &["train.batch_tokens=64", "parallel.ranks=64"]);
    valid(RECIPE, &["train.eval_every=0", "data.held_out=0"]);
    valid(RECIPE, &["moe.experts=2", "moe.top_k=2"]);
    valid(&dense(), &["model.family=gpt2", "model.d_model=45", "model.heads=15"]);
    valid(RECIPE, &["train.warmup_steps=100", "train.lr_end=1", "train.clip=0"]);
}

#[test]
fn impossible_meshes_name_the_valid_ones() {
    check_set(
        "parallel.expert=3",
        &["does not divide parallel.ranks = 4 nor moe.experts = 8", "valid values: 1, 2, 4"],
    );
    check(
        RECIPE,
        &["moe.experts=7"],
        &[&["parallel.expert = 2 (", "does not divide moe.experts = 7", "valid values: 1"]],
    );
    check(
        RECIPE,
        &["parallel.ranks=3"],
        &[&["parallel.expert = 2 (", "tiny.toml:8", "does not divide parallel.ranks = 3"]],
    );
    check(
        RECIPE,
        &["parallel.tensor=4", "parallel.expert=1", "model.heads=6", "model.kv_heads=3", "model.d_ff=98"],
        &[&["parallel.tensor = 4 (--set", "does not cut model.heads = 6 nor model.kv_heads = 3 into", "is 1"]],
    );
    check(
        &dense(),
        &["parallel.tensor=4", "model.kv_heads=2", "model.d_ff=98"],
        &[&["does not cut model.d_ff = 98 into equal slices", "is 2"]],
    );
    check(&dense(), &["parallel.expert=2"], &[&["parallel.expert = 2", "no [moe] section", "set it to 1"]]);
}

/// Four layers, eight experts, four ranks.
#[test]
fn layers_may_spread_their_experts_differently() {
    let config = valid(RECIPE, &["parallel.expert=[4, 1, 2, 2]"]);
    assert_eq!(config.parallel.expert, PerLayer::Each(vec![4, 1, 2, 2]));
    assert_eq!(valid(&config.to_toml(), &[]), config);
    valid(RECIPE, &["parallel.expert=[4, 2]", "moe.layers={ every = 2 }"]);
    let toml = RECIPE.replace("expert = 2", "expert = [2, 4, 4, 1]");
    assert_eq!(valid(&toml, &[]).parallel.expert.distinct(), [1, 2, 4]);

    let refused = |overrides: &[&str], parts: &[&str]| check(RECIPE, overrides, &[parts]);
    refused(&["parallel.expert=[4, 2, 2]"], &["a list of 3, but 4 layers have experts", "one number for all"]);
    let two = "moe.layers={ list = [1, 3] }";
    refused(&["parallel.expert=[4, 2, 2]", two], &["a list of 3, but 2 layers have experts"]);
    let uneven = ["3 of layer 3 does not divide parallel.ranks = 4 nor moe.experts = 8", "valid values: 1, 2, 4"];
    refused(&["parallel.expert=[4, 3]", two], &uneven);
    refused(&["parallel.expert=[4, 0, 1, 1]"], &["must be a whole number from 1 to 65536", "is 1"]);
    refused(&["parallel.expert=[4, \"two\", 1, 1]"], &["a whole number, or a list of one for each layer"]);
    refused(&["parallel.expert=[]"], &["a list of 0, but 4 layers"]);
    check(&dense(), &["parallel.expert=[1]"], &[&["parallel.expert = [1]", "no [moe] section"]]);
}

/// What other keys ask of a degree they ask of every layer's.
#[test]
fn every_layers_degree_suits_the_other_keys() {
    let degrees = "parallel.expert=[4, 2, 2, 1]";
    let refused = |overrides: &[&str], parts: &[&str]| check(RECIPE, overrides, &[parts]);
    let table = "parallel.expert_table=[0, 1, 0, 1, 0, 1, 0, 1]";
    refused(&[degrees, table], &["parallel.expert_table", "groups of one size, not of [4, 2, 2, 1]", "one number"]);
    valid(RECIPE, &["parallel.expert=[2, 2, 2, 2]", table]);
    let smart = ["moe.schedule=smart", "moe.schedule_groups=2"];
    refused(&[degrees, smart[0], smart[1]], &["does not cut the 1 ranks of an expert group", "is 1"]);
    valid(RECIPE, &["parallel.expert=[4, 2, 2, 2]", smart[0], smart[1]]);
    let mesh = ["parallel.ranks=12", "parallel.tensor=2", "parallel.expert_tensor=1", "moe.experts=6"];
    let shadowed = [&mesh[..], &["moe.shadowing=force:1", "parallel.expert=[2, 6, 3, 1]"]].concat();
    refused(&shadowed, &["moe.shadowing", "would shadow different experts", "3 of layer 2"]);
    let alone = |expert: &str| load(RECIPE, &[expert, "parallel.order=data_expert"]);
    assert!(alone("parallel.expert=[4, 2, 1, 1]").is_ok(), "the groups of two have an order");
    assert!(alone("parallel.expert=[4, 4, 1, 1]").is_err(), "nobody else holds the same");
    let notices = load(RECIPE, &["parallel.zero=1", "parallel.expert=[4, 2, 1, 1]"]).expect("a stage").notices;
    assert!(notices.iter().any(|notice| notice.contains("of such layers: with parallel.expert = 4")), "{notices:?}");
}

#[test]
fn ranks_that_see_the_same_tokens_shadow_the_same_experts() {
    let mesh =
        ["parallel.ranks=6", "parallel.tensor=2", "parallel.expert=3", "parallel.expert_tensor=1", "moe.experts=6"];
    valid(RECIPE, &mesh);
    let shadowed = [&mesh[..], &["moe.shadowing=force:1"]].concat();
    check(RECIPE, &shadowed, &[&["moe.shadowing", "would shadow different experts", "set it to \"off\""]]);
}

/// Where experts travel no row does: nothing is left to shadow, or to send in steps.
#[test]
fn experts_travel_or_rows_do() {
    const EXPERTS: &str = "parallel.exchange=experts";
    valid(RECIPE, &[EXPERTS]);
    valid(RECIPE, &[EXPERTS, "parallel.expert=[2, 1, 1, 2]"]);
    let refused = |overrides: &[&str], parts: &[&str]| check(RECIPE, &[&[EXPERTS], overrides].concat(), &[parts]);
    let (shadows, smart) = (["moe.shadowing=auto"], ["moe.schedule=smart"]);
    let excludes =
        |what: &str| format!("parallel.exchange = \"experts\" (--set {EXPERTS}): excludes {what}: all experts");
    refused(&shadows, &[&excludes("moe.shadowing = \"auto\""), "set moe.shadowing to \"off\", or parallel.exchange"]);
    refused(&smart, &[&excludes("moe.schedule = \"smart\""), "set moe.schedule to \"plain\", or parallel.exchange"]);
    let both = excludes("moe.shadowing = \"auto\" and moe.schedule = \"smart\"");
    refused(&[shadows, smart].concat(), &[&both, "no row travels"]);
    valid(RECIPE, &["parallel.exchange=tokens", shadows[0], smart[0]]);
    refused(&["parallel.expert=1"], &["parallel.exchange", "nothing uses it", "every rank has all experts"]);
    check(&dense(), &[EXPERTS], &[&["parallel.exchange", "no [moe] section"]]);
    check_set("parallel.exchange=rows", &["tokens", "experts"]);
    let toml = RECIPE.replace("expert = 2", "expert = 1\nexchange = \"experts\"");
    let notices = load(&toml, &[]).expect("a sound recipe").notices;
    assert!(notices.iter().any(|notice| notice.starts_with("parallel.exchange (")), "{notices:?}");
}

/// Of two ranks in a group and eight experts.
#[test]
fn tables_schedules_and_shadows_that_cannot_be_name_what_can() {
    let table = |table: &str, parts: &[&str]| check_set(&format!("parallel.expert_table={table}"), parts);
    table("[0, 1]", &["has 2 entries, moe.experts is 8", "the rank of each of the 8 experts"]);
    table("[0, 0, 0, 0, 1, 1, 1, 2]", &["no rank 2 in a group of parallel.expert = 2", "the last one is 1"]);
    table("[1, 1, 1, 1, 1, 1, 1, 1]", &["rank 0 of 2 would hold no expert", "at least one"]);
    check(&dense(), &["parallel.expert_table=[0]"], &[&["parallel.expert_table", "no [moe] section"]]);
    load(RECIPE, &["moe.experts=7", "parallel.expert_table=[0, 1, 1, 0, 1, 1, 0]"])
        .expect("seven experts on two ranks");
    check(
        RECIPE,
        &["moe.experts=7"],
        &[&["parallel.expert = 2", "does not divide moe.experts = 7", "or give every expert its rank"]],
    );
    let smart = ["moe.schedule=smart", "moe.schedule_groups=3"];
    check(RECIPE, &smart, &[&["moe.schedule_groups = 3", "the 2 ranks of an expert group", "2"]]);
    check_set("moe.schedule_groups=2", &["nothing uses it", "has one step"]);
    for key in ["moe.schedule=smart", "moe.shadowing=force:1"] {
        check(RECIPE, &["parallel.expert=1", key], &[&[key.split_once('=').unwrap().0, "no row travels"]]);
    }
    check_set("moe.shadowing=on", &["not a way to shadow", "off, auto, and force:N"]);
    check_set("moe.shadowing=force:0", &["not a way to shadow", "off, auto, and force:N"]);
    check_set("moe.shadowing=force:9", &["more than moe.experts = 8", "force:8"]);
}

#[test]
fn ranks_of_the_command_line_go_before_the_recipes_mesh() {
    let folder = Folder::new();
    let toml = RECIPE.replace("expert = 2", "expert = 4");
    let loaded = folder.load(&toml, &[], Some(6)).expect("ranks that force another mesh");
    assert_eq!((loaded.config.parallel.ranks, loaded.config.parallel.expert), (6, PerLayer::Same(2)));
    let [notice] = loaded.notices.as_slice() else {
        panic!("one notice: {:?}", loaded.notices);
    };
    for part in ["parallel.expert = 4 (", "tiny.toml:8", "does not divide --ranks 6", "2 is used"] {
        assert!(notice.contains(part), "{notice}");
    }
    let loaded = folder.load(&toml, &[], Some(8)).expect("ranks that suit the mesh");
    assert_eq!((loaded.config.parallel.expert, loaded.notices.len()), (PerLayer::Same(4), 0));
    assert!(folder.load(&toml, &["parallel.ranks=6"], Some(6)).is_ok());
    let toml = RECIPE.replace("expert = 2", "expert = [4, 2, 1, 1]");
    let loaded = folder.load(&toml, &[], Some(6)).expect("ranks that force other degrees");
    assert_eq!(loaded.config.parallel.expert, PerLayer::Each(vec![2, 2, 1, 1]));
    assert!(loaded.notices[0].contains("[2, 2, 1, 1] is used instead"), "{:?}", loaded.notices);
    // Of expert groups of two there is nothing to be said on one rank.
    let toml = RECIPE
        .replace("expert = 2", "expert = 2\nexpert_table = [0, 0, 0, 0, 0, 0, 0, 1]")
        .replace("[moe]", "[moe]\nschedule = \"smart\"\nschedule_groups = 2");
    let loaded = folder.load(&toml, &[], Some(1)).expect("one rank of a recipe for two");
    let left_out =
        |key: &str| loaded.notices.iter().any(|notice| notice.starts_with(key) && notice.contains("left out"));
    assert!(left_out("parallel.expert_table") && left_out("moe.schedule_groups"), "{:?}", loaded.notices);
    assert_eq!(loaded.config.parallel.expert_table, None);
}

#[test]
fn ranks_do_not_go_before_the_command_line() {
    let folder = Folder::new();
    let refused = |overrides: &[&str], ranks: usize| {
        let loaded = folder.load(RECIPE, overrides, Some(ranks));
        loaded.expect_err("two options that exclude each other").to_string()
    };
    let message = refused(&["parallel.expert=2"], 3);
    assert!(message.contains("(--set parallel.expert=2): impossible mesh"), "{message}");
    let message = refused(&["parallel.ranks=2"], 3);
    assert!(message.contains("--ranks 3 says something else"), "{message}");
    let message = refused(&[], 0);
    assert!(message.contains("parallel.ranks = 0 (--ranks 0)"), "{message}");
}

#[test]
fn what_has_no_effect_is_an_error_when_typed_and_a_notice_in_a_recipe() {
    check_set("train.eval_rows=3", &["nothing uses it", "train.eval_every = 0"]);
    check(RECIPE, &["train.schedule=constant", "train.lr_end=0.2"], &[&["train.lr_end = 0.2", "has no end"]]);
    check(&dense(), &["model.family=gpt2", "model.rope_theta=5"], &[&["model.rope_theta", "mixtral"]]);
    check(RECIPE, &["moe.d_expert=64", "model.d_ff=32"], &[&["model.d_ff = 32", "every layer is MoE"]]);

    let toml = RECIPE.replace("lr = 1e-3", "lr = 1e-3\nlr_end = 0.2");
    let notices = |overrides: &[&str]| load(&toml, overrides).expect("a sound recipe").notices;
    assert_eq!(notices(&[]), Vec::<String>::new());
    let [notice] = &notices(&["train.schedule=constant"])[..] else {
        panic!("one notice");
    };
    assert!(notice.starts_with("train.lr_end (") && notice.contains("tiny.toml:5) is not used"), "{notice}");
}

/// Of a recipe for one rank every key that needs others is announced, and each is an error when typed.
#[test]
fn what_one_rank_has_no_use_for_is_announced() {
    let keys = [
        ("parallel", "overlap = false"),
        ("parallel", "bucket_bytes = 99"),
        ("parallel", "standby = false"),
        ("parallel", "link = { latency_us = 1, gbytes_per_s = 1 }"),
        ("parallel", "node_link = { ranks_per_node = 2, latency_us = 1, gbytes_per_s = 1 }"),
        ("parallel", "sequence = true"),
        ("parallel", "order = \"data_expert\""),
        ("parallel", "expert_tensor = 1"),
        ("parallel", "expert_table = [0, 0, 0, 0, 0, 0, 0, 0]"),
        ("memory", "keep_communication = false"),
        ("moe", "schedule = \"smart\""),
        ("moe", "schedule_groups = 1"),
        ("moe", "shadowing = \"auto\""),
        ("moe", "drop_duplicates = false"),
        ("moe", "balance_scope = \"micro_batch\""),
    ];
    let plain =
        RECIPE.replace("ranks = 4\nexpert = 2\n", "").replace("experts = 8", "experts = 8\nbalance_weight = 0.0");
    let plain = plain + "[memory]\nrecompute = \"block\"\n";
    let with = |lines: &[(&str, &str)]| {
        let put = |text: String, (section, line): &(&str, &str)| {
            text.replace(&format!("[{section}]\n"), &format!("[{section}]\n{line}\n"))
        };
        load(&lines.iter().fold(plain.clone(), put), &[]).unwrap_or_else(|problems| panic!("{problems}")).notices
    };
    assert_eq!(with(&[]), [""; 0]);
    let notices = with(&keys);
    for (section, line) in keys {
        let key = format!("{section}.{}", line.split(' ').next().unwrap());
        let told = |notice: &&String| notice.starts_with(&format!("{key} (")) && notice.contains("is not used: ");
        assert_eq!(notices.iter().filter(told).count(), 1, "{key}: {notices:?}");
        // Steps of a schedule are only read by the smart one.
        let set: Vec<String> = match key.as_str() {
            "moe.schedule_groups" => continue,
            _ => vec![format!("{section}.{}", line.replacen(" = ", "=", 1))],
        };
        check(
            &plain,
            &set.iter().map(String::as_str).collect::<Vec<_>>(),
            &[&[&key, "nothing uses it", "leave it out"]],
        );
    }
    assert_eq!(notices.len(), keys.len(), "{notices:?}");
}

#[test]
fn sequences_migrate_where_they_can() {
    let config = valid(RECIPE, &["parallel.migrate=auto", "parallel.migrate_candidates=2", "parallel.migrate_slack=0"]);
    let parallel = &config.parallel;
    assert_eq!((parallel.migrate, parallel.migrate_candidates, parallel.migrate_slack), (Migrate::Auto, Some(2), 0.0));
    assert_eq!(valid(&config.to_toml(), &[]), config);
    check_set("parallel.migrate=on", &["one of \"off\", \"auto\", \"force\""]);
    check_set("parallel.migrate_candidates=2", &["nothing uses it", "moves no sequence"]);
    check_set("parallel.migrate_slack=0.5", &["nothing uses it", "moves no sequence"]);
    check(RECIPE, &["parallel.migrate=auto", "parallel.migrate_slack=-1"], &[&["parallel.migrate_slack", "is 0"]]);
    check(RECIPE, &["parallel.migrate=auto", "parallel.migrate_candidates=0"], &[&["migrate_candidates", "is 1"]]);
    // Three ranks of an expert group are a tensor group and a half.
    let mesh =
        ["parallel.ranks=6", "parallel.tensor=2", "parallel.expert=3", "parallel.expert_tensor=1", "moe.experts=6"];
    let cut = [&mesh[..], &["parallel.migrate=force"]].concat();
    check(RECIPE, &cut, &[&["parallel.migrate", "parallel.expert = 3", "see the same tokens", "set it to \"off\""]]);
    let idle = |overrides: &[&str], because: &str| {
        let set = [overrides, &["parallel.migrate=force"]].concat();
        let notices = load(RECIPE, &set).unwrap_or_else(|problems| panic!("{problems}")).notices;
        let told = |notice: &&String| notice.contains("parallel.migrate") && notice.contains(because);
        assert_eq!(notices.iter().filter(told).count(), 1, "{notices:?}");
    };
    idle(&["parallel.ranks=1", "parallel.expert=1"], "nowhere to go");
    idle(&["parallel.expert=1"], "nowhere to go");
    idle(&["parallel.tensor=2", "parallel.expert_tensor=1"], "nowhere to go");
    // Where all results are computed at home, only a forced migration moves anything.
    let visited = |migrate: &str| load(RECIPE, &["parallel.exchange=experts", migrate]).unwrap().notices;
    let told = |notices: Vec<String>| notices.iter().filter(|notice| notice.contains("nothing can be saved")).count();
    let ways = ["parallel.migrate=auto", "parallel.migrate=force", "parallel.migrate=off"];
    assert_eq!(ways.map(|migrate| told(visited(migrate))), [1, 0, 0]);
    assert!(!load(RECIPE, &["parallel.migrate=force"]).unwrap().notices.iter().any(|n| n.contains("migrate")));
    let notices = load(&dense(), &["parallel.migrate=auto"]).unwrap().notices;
    assert!(notices.iter().any(|notice| notice.contains("no [moe] section")), "{notices:?}");
}

#[test]
fn links_are_whole_and_in_use() {
    let link = valid(RECIPE, &["parallel.link={latency_us=20,gbytes_per_s=0.5}"]).parallel.link.expect("a link");
    assert_eq!((link.latency_us, link.gbytes_per_s), (20.0, 0.5));
    check(RECIPE, &["parallel.link={latency_us=20}"], &[&["parallel.link.gbytes_per_s", "missing"]]);
    check_set("parallel.link=fast", &["parallel.link = \"fast\"", "{ latency_us = 20, gbytes_per_s = 10 }"]);
    check_set("parallel.overlap=1", &["did you mean true?"]);
    let link = |latency: &str, gbytes: &str| format!("parallel.link={{latency_us={latency},gbytes_per_s={gbytes}}}");
    let wrong = |given: &str, parts: &[&str]| check(RECIPE, &[given], &[parts]);
    wrong(&link("-1", "1"), &["parallel.link.latency_us = -1", "the nearest valid value is 0.0"]);
    wrong(&link("2e9", "1"), &["parallel.link.latency_us = 2000000000.0", "the nearest valid value is 1000000000.0"]);
    wrong(&link("1", "0"), &["parallel.link.gbytes_per_s = 0", "the nearest valid value is 1e-6"]);
    wrong(&link("1", "inf"), &["parallel.link.gbytes_per_s = inf", "a usual value is 10.0"]);
    let nodes = |ranks: usize| format!("parallel.node_link={{ranks_per_node={ranks},latency_us=1,gbytes_per_s=1}}");
    valid(RECIPE, &[&nodes(2), &link("1", "1")]);
    wrong(&nodes(0), &["parallel.node_link.ranks_per_node = 0", "the nearest valid value is 1"]);
    wrong(&nodes(4), &["parallel.node_link", "nothing uses it: all ranks are on one node"]);
    check(RECIPE, &[&nodes(1), &link("1", "1")], &[&["parallel.link", "every message crosses nodes"]]);
    for idle in
        ["parallel.bucket_bytes=9", "parallel.overlap=false", "parallel.standby=false", &link("1", "1"), &nodes(2)]
    {
        let given = ["parallel.ranks=1", "parallel.expert=1", idle];
        check(RECIPE, &given, &[&["nothing uses it: parallel.ranks = 1 has nobody to send to"]]);
    }
}

#[test]
fn a_section_overridden_whole_says_what_it_drops() {
    let toml = RECIPE.replace("experts = 8", "experts = 8\ntop_k = 1");
    let loaded = load(&toml, &["moe={experts=4}"]).expect("a whole section");
    assert_eq!(loaded.config.moe.expect("experts").top_k, 2);
    let [notice] = loaded.notices.as_slice() else {
        panic!("one notice: {:?}", loaded.notices);
    };
    assert!(notice.contains("moe.top_k (") && notice.contains("replaces the whole section"), "{notice}");
}

#[test]
fn all_problems_are_reported_together_in_the_order_of_the_recipe() {
    let toml = RECIPE
        .replace("steps = 100", "steps = \"many\"")
        .replace("lr = 1e-3", "lr = -1")
        .replace("ranks = 4", "ranks = 3")
        .replace("heads = 4", "heads = 5\nhaeds = 5")
        .replace("seq = 64", "")
        .replace("sources =", "source =");
    let overrides = ["moe.top_k=9", "train.dtype=f16", "nonsense"];
    let Err(problems) = load(&toml, &overrides) else {
        panic!("nothing is wrong");
    };
    let keys: Vec<&str> = problems.as_slice().iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "train.steps",
            "train.lr",
            "parallel.expert",
            "model.seq",
            "model.heads",
            "model.haeds",
            "data.source",
            "",
            "train.dtype",
            "moe.top_k",
        ]
    );
    let message = problems.to_string();
    assert!(message.starts_with("10 problems in the configuration:\n  train.steps = "), "{message}");
    assert_eq!(message.lines().count(), 11);
}

/// The layers of two stacks need not be added up by hand. The recipe is refused for its data, and for that alone.
#[test]
fn layers_of_both_stacks_are_added_up() {
    let without = RECIPE.replace("\nlayers = 4", "");
    assert_ne!(without, RECIPE);
    let keys = |overrides: &[&str]| -> Vec<String> {
        let overrides: Vec<&str> = ["model.family=m2m"].iter().chain(overrides).copied().collect();
        let problems = load(&without, &overrides).expect_err("there are no tasks");
        problems.as_slice().iter().map(|problem| problem.key.clone()).collect()
    };
    assert_eq!(keys(&["model.encoder_layers=6", "model.decoder_layers=3"]), ["data.tasks"]);
    assert_eq!(keys(&["model.encoder_layers=6"]), ["model.layers", "data.tasks"]);
}

#[test]
fn a_message_is_a_sentence_with_its_place() {
    let folder = Folder::new();
    let toml = RECIPE.replace("experts = 8", "experts = 8\n\ntop_k = 9");
    let problems = folder.load(&toml, &[], None).expect_err("more than there are");
    let file = folder.folder.path().join("tiny.toml");
    let expected = format!(
        "1 problem in the configuration:\n  moe.top_k = 9 ({}:20): more than moe.experts = 8; the nearest \
         valid value is 8",
        file.display()
    );
    assert_eq!(problems.to_string(), expected);
}

#[test]
fn values_of_a_list_have_their_own_lines() {
    let toml = RECIPE.replace(r#"["corpus/*.txt"]"#, "[\n  \"a\",\n  7,\n  { path = 1 },\n]");
    check(&toml, &[], &[&["data.sources[1] = 7", "tiny.toml:23)"], &["data.sources[2].path = 1", "tiny.toml:24)"]]);
}

#[test]
fn a_default_that_does_not_fit_is_called_a_default() {
    let toml = RECIPE.replace("experts = 8", "experts = 1").replace("expert = 2\n", "");
    check(&toml, &[], &[&["moe.top_k = 2 (default)", "more than moe.experts = 1"]]);
}

#[test]
fn syntax_errors_name_line_and_column_and_come_with_bad_overrides() {
    let toml = RECIPE.replace("lr = 1e-3", "lr = = 1").replace("seq = 64", "seq = ");
    check(
        &toml,
        &["x"],
        &[
            &["tiny.toml:4: column 6: not TOML", "correct `lr = = 1`"],
            &["tiny.toml:15: column ", "not TOML"],
            &["--set x"],
        ],
    );
    check(&format!("{RECIPE}sources = []"), &[], &[&["tiny.toml:22: column 1: not TOML: duplicate key"]]);
}

#[test]
fn a_recipe_that_cannot_be_read_is_a_problem() {
    let folder = Folder::new();
    folder.recipe(RECIPE);
    let refused = |name: &str| {
        let path = folder.folder.path().join(name);
        config::load(&path, &["x".into()], None).expect_err("no such recipe").to_string()
    };
    let message = refused("tny.toml");
    assert!(message.contains("cannot be read") && message.contains("did you mean "), "{message}");
    assert!(message.contains("tiny.toml?") && message.contains("--set x"), "{message}");
    let message = refused("");
    assert!(message.contains("give the path of a recipe"), "{message}");
}

/// What is written as a whole number and is too large for one is answered as any number out of range is.
#[test]
fn numbers_past_64_bits_are_out_of_range() {
    for (key, most) in [("moe.experts", "1048576"), ("model.seq", "1048576"), ("train.steps", "9223372036854775807")] {
        for large in ["9223372036854775808", "18446744073709551616", "1e30", "99999999999999999999999999"] {
            check_set(&format!("{key}={large}"), &["must be a whole number", &format!("value is {most}")]);
        }
        check_set(&format!("{key}=-1e30"), &["value is 1"]);
    }
    check(RECIPE, &["parallel.expert=[2, 1e30, 2, 2]"], &[&["parallel.expert = [2, ", "value is 65536"]]);
    for large in ["9223372036854775808", "-9223372036854775809", "99999999999999999999999999"] {
        let toml = RECIPE.replace("experts = 8", &format!("experts = {large}"));
        let parts = ["column 11: a number that 64 bits do not hold", "whole numbers end at 9223372036854775807"];
        check(&toml, &[], &[&parts]);
    }
}

/// Sizes that are possible one by one, and together would be past counting.
#[test]
fn sizes_past_counting_are_refused_together() {
    let of = |set: &[&str], parts: &[&str]| check(RECIPE, set, &[parts]);
    let wide = "model.d_model=1048576";
    let experts = ["moe.experts=1048576", "moe.d_expert=4194304", wide];
    of(&experts, &["model.d_model = 1048576", "the model would have about", "1e16", "lower it, or model.layers"]);
    let shared = ["moe.shared_experts=1048576", "moe.d_expert=4194304", wide];
    of(&shared, &["model.d_model = 1048576", "parameters"]);
    let step = ["moe.experts=65536", "moe.top_k=65536", "train.batch_tokens=2147483648", "moe.d_expert=64"];
    of(&step, &["train.batch_tokens = 2147483648", "a step would make about", "numbers of its tokens"]);
    check_set("model.layers=1048576", &["from 1 to 8192"]);
    // The largest models that anybody writes about are far from it.
    valid(RECIPE, &["model.d_model=16384", "model.layers=128", "moe.experts=512", "train.batch_tokens=16777216"]);
}

#[test]
fn keys_of_experts_ask_for_experts() {
    for key in ["record", "replay"] {
        let set = format!("moe.{key}=routes");
        check(&dense(), &[&set], &[&["moe.experts", &set, "the recipe has no [moe] section", "out, or add experts"]]);
        let toml = dense() + &format!("[moe]\n{key} = \"routes\"\n");
        check(&toml, &[], &[&["moe.experts (", "missing", "add experts to [moe]", "leave out [moe]", "dense model"]]);
    }
}

/// Whatever a key is set to, there is an answer, and an accepted configuration can be written down.
#[test]
fn no_value_of_any_key_is_beyond_an_answer() {
    let (folder, everything) = (Folder::new(), ["data.max_bytes=1", "parallel.threads=1"]);
    let resolved: toml::Table = valid(RECIPE, &everything).to_toml().parse().expect("TOML");
    for (section, keys) in &resolved {
        for key in keys.as_table().expect("a section").keys() {
            for value in [
                "-1",
                "0",
                "1",
                "3",
                "9223372036854775807",
                "0.5",
                "-1e300",
                "1e300",
                "nan",
                "-inf",
                "word",
                "true",
                "[]",
                "[[1]]",
                "{}",
                "{every=0}",
                "{a={b=1}}",
                "2000-01-01",
                "''",
            ] {
                let given = format!("{section}.{key}={value}");
                if let Ok(loaded) = folder.load(RECIPE, &[&given], Some(2)) {
                    let again = folder.load(&loaded.config.to_toml(), &[], None);
                    assert_eq!(again.expect(&given).config, loaded.config, "{given}");
                }
            }
        }
    }
}

#[test]
fn a_resumed_run_may_change_only_what_does_not_reach_the_numbers() {
    let saved = valid(RECIPE, &[]);
    let differences = |overrides: &[&str]| config::differences(&saved, &valid(RECIPE, overrides));
    assert_eq!(differences(&[]), Vec::<String>::new());
    let free = [
        "train.steps=200",
        "run.dir=elsewhere",
        "train.checkpoint_every=5",
        "train.keep=1",
        "train.eval_every=5",
        "train.eval_rows=6",
        "parallel.ranks=2",
        "parallel.expert=1",
        "parallel.threads=1",
        "parallel.timeout_s=9",
        "parallel.bucket_bytes=1",
        "parallel.standby=false",
        "parallel.overlap=false",
        "parallel.link={latency_us=1,gbytes_per_s=1}",
        "data.cache=there",
        "moe.dead_after=3",
        "moe.record=routes",
    ];
    assert_eq!(differences(&free), Vec::<String>::new());
    let fixed = ["train.lr=2e-3", "model.dropout=0.1", "data.max_bytes=7", "data.sources=[\"b\"]", "moe.replay=routes"];
    assert_eq!(
        differences(&fixed),
        [
            "data.max_bytes: was absent, now 7",
            "data.sources: was [\"corpus/*.txt\"], now [\"b\"]",
            "model.dropout: was 0.0, now 0.1",
            "moe.replay: was absent, now \"routes\"",
            "train.lr: was 0.001, now 0.002",
        ]
    );
}

/// Moments of frozen weights are in no checkpoint.
#[test]
fn what_is_trained_stays_the_same_on_resume() {
    let of = |overrides: &[&str]| valid(RECIPE, overrides);
    let differences = |one: &[&str], other: &[&str]| config::differences(&of(one), &of(other));
    let freeze = "train.freeze=[\"router\",\"head\"]";
    assert_eq!(differences(&[], &["train.only=experts"]), ["train.only: was \"all\", now \"experts\""]);
    assert_eq!(differences(&[freeze], &[]), ["train.freeze: was [\"router\", \"head\"], now absent"]);
    assert_eq!(differences(&[freeze], &["train.freeze=[\"head\",\"router\",\"head\"]"]), Vec::<String>::new());
}

#[test]
fn what_is_frozen_exists_and_leaves_something() {
    let only = valid(RECIPE, &["train.only=experts"]);
    assert_eq!(only.frozen(), [Role::Embedding, Role::Attention, Role::Norms, Role::Router, Role::Head]);
    assert_eq!(train::sizes(&only).frozen, only.frozen());
    assert_eq!(valid(RECIPE, &["train.freeze=[\"router\"]"]).frozen(), [Role::Router]);
    assert!(valid(RECIPE, &[]).frozen().is_empty());
    check_set("train.only=expert", &["experts"]);
    check_set("train.only=half", &["all", "experts", "lora"]);
    check(RECIPE, &["train.freeze=[\"gate\"]"], &[&["train.freeze", "gate", "router"]]);
    check(&dense(), &["train.only=experts"], &[&["train.only", "no experts", "no [moe] section", "set it to \"all\""]]);
    check(
        &dense(),
        &["train.freeze=[\"router\"]"],
        &[&["no weights of \"router\"", "no [moe] section", "leave it out"]],
    );
    let tied = "model.tie_embeddings=true";
    check(RECIPE, &["train.freeze=[\"head\"]", tied], &[&["no weights of \"head\"", "the table is the embedding's"]]);
    valid(RECIPE, &["train.freeze=[\"head\"]", tied, "model.family=bert"]);
    for (role, because) in [("feed_forward", "every layer has experts"), ("shared_experts", "moe.shared_experts")] {
        let set = format!("train.freeze=[\"{role}\"]");
        check(RECIPE, &[&set], &[&["train.freeze", role, because]]);
    }
    valid(RECIPE, &["train.freeze=[\"feed_forward\"]", "moe.layers={every=2}"]);
    let all = "train.freeze=[\"embedding\",\"attention\",\"norms\",\"router\",\"experts\",\"head\"]";
    check(RECIPE, &[all], &[&["train.freeze", "nothing is left to train", "every part", "leave a part out"]]);
    let none = ["train.only=experts", "train.freeze=[\"experts\"]"];
    check(RECIPE, &none, &[&["train.freeze", "nothing is left to train", "train.only"]]);
    // What is frozen already is frozen for nothing.
    let twice = ["train.only=experts", "train.freeze=[\"router\"]"];
    check(RECIPE, &twice, &[&["train.freeze", "nothing uses it", "freezes everything else", "leave it out"]]);
    let toml = RECIPE.replace("lr = 1e-3\n", "lr = 1e-3\nonly = \"experts\"\nfreeze = [\"router\"]\n");
    let notices = load(&toml, &[]).expect("valid").notices;
    assert!(notices.len() == 1 && notices[0].contains("train.freeze"), "{notices:?}");
}

#[test]
fn a_dense_model_is_not_resumed_with_experts() {
    let (without, with) = (valid(&dense(), &[]), valid(&dense(), &["moe.experts=4"]));
    let differences = config::differences(&without, &with);
    assert!(differences.contains(&"moe.experts: was absent, now 4".into()), "{differences:?}");
}

#[test]
fn the_command_line_is_read() {
    Cli::command().debug_assert();
    let line = "guildhall train a.toml --ranks 2 --resume --set train.lr=1 --set run.dir=x";
    let Command::Train(train) = Cli::parse_from(line.split(' ')).command else {
        panic!("another command");
    };
    assert_eq!((train.ranks, train.resume), (Some(2), true));
    assert_eq!(train.overrides.set, ["train.lr=1", "run.dir=x"]);
    let Command::Generate(generate) = Cli::parse_from(["guildhall", "generate", "c", "--prompt", "Once"]).command
    else {
        panic!("another command");
    };
    assert_eq!((generate.tokens, generate.seed, generate.top_k), (128, 0, 40));
    assert_eq!((generate.temperature, generate.top_p), (0.8, 0.95));
}

#[test]
fn a_wrong_command_line_is_a_bad_request() {
    for line in [
        "guildhall",
        "guildhall trian a.toml",
        "guildhall train",
        "guildhall train a.toml --rank 2",
        "guildhall train a.toml --ranks two",
        "guildhall prepare a.toml --ranks 2",
        "guildhall generate c",
        "guildhall evaluate c --rows",
    ] {
        let refused = Cli::try_parse_from(line.split(' ')).expect_err(line);
        assert_eq!(refused.exit_code(), 2, "{line}");
    }
}

#[test]
fn shares_need_somebody_to_share_with() {
    check_set("parallel.zero=4", &["a whole number from 0 to 3", "the nearest valid value is 3"]);
    check_set("memory.tile=0", &["at least 1"]);
    check(
        RECIPE,
        &["parallel.zero=2", "parallel.tensor=4", "parallel.expert=1"],
        &[&["nobody to share with", "from 8 on"]],
    );
    check(&dense(), &["parallel.zero=1", "parallel.ranks=1"], &[&["nobody to share with", "set it to 0"]]);
    assert_eq!(valid(RECIPE, &["parallel.zero=3"]).parallel.zero, 3);
    // Slices have one holder each, whole experts four.
    let whole_experts = ["parallel.zero=2", "parallel.tensor=4", "parallel.expert=1", "parallel.expert_tensor=1"];
    assert_eq!(valid(RECIPE, &whole_experts).parallel.zero, 2);
}

/// Experts without a second holder keep all that is theirs; a recipe's stage goes where there is one rank.
#[test]
fn stages_say_what_they_do_not_do() {
    let notices = |toml: &str, overrides: &[&str]| load(toml, overrides).expect("valid").notices;
    let stage = RECIPE.replace("expert = 2\n", "expert = 4\nzero = 2\n");
    let said = notices(&stage, &[]);
    assert!(
        said.len() == 1 && said[0].contains("saves nothing on experts") && said[0].contains("expert = 4"),
        "{said:?}"
    );
    assert!(notices(&stage, &["parallel.expert=2"]).is_empty());
    assert!(notices(&stage, &["parallel.zero=0"]).is_empty());
}

/// Methods of several workers or nodes, where there is one.
#[test]
fn gates_that_move_nothing_are_announced() {
    let said = |overrides: &[&str]| load(RECIPE, overrides).expect("valid").notices;
    for (idle, missing, busy) in [
        (&["moe.gate=swipe"][..], "moe.gate.workers is 1", "moe.gate.workers=4"),
        (&["moe.gate=topology"], "moe.logical_nodes is 1", "moe.logical_nodes=2"),
        (&["moe.gate=distributed_capacity", "moe.gate.workers=2"], "moe.capacity_factor", "moe.capacity_factor=1.5"),
        (&["moe.gate=distributed_capacity", "moe.capacity_factor=1.5"], "moe.gate.workers is 1", "moe.gate.workers=8"),
        (&["moe.overflow=node", "moe.capacity_factor=1.5"], "moe.logical_nodes is 1", "moe.logical_nodes=4"),
    ] {
        let notices = said(idle);
        let parts = [missing, "moves nothing", "set it", &format!("--set {}", idle[0])];
        assert!(notices.len() == 1 && parts.iter().all(|part| notices[0].contains(part)), "{idle:?}: {notices:?}");
        let moves = said(&[idle, &[busy]].concat());
        assert!(!moves.iter().any(|notice| notice.contains("moves nothing")), "{idle:?} with {busy}: {moves:?}");
    }
}

/// A gate has the keys of its file and no others, in either form and wherever they are given.
#[test]
fn a_gate_has_keys_of_its_own() {
    let with = |gate: &str| RECIPE.replace("experts = 8", &format!("experts = 8\n{gate}"));
    let table = with("gate = { kind = \"sigmoid\", groups = 4, top_groups = 2, route_scale = 2.5, bias_rate = 1e-3 }");
    let keys = SigmoidKeys { groups: 4, top_groups: 2, route_scale: 2.5, normalised: true, bias_rate: 1e-3 };
    let gate = |toml: &str, set: &[&str]| valid(toml, set).moe.expect("experts").gate;
    assert_eq!(gate(&table, &[]), GateChoice::Sigmoid(keys.clone()));
    let section =
        with("[moe.gate]\nkind = \"sigmoid\"\ngroups = 4\ntop_groups = 2\nroute_scale = 2.5\nbias_rate = 1e-3");
    assert_eq!(gate(&section, &[]), GateChoice::Sigmoid(keys.clone()));
    let word = with("gate = \"sigmoid\"");
    let sets = ["moe.gate.groups=4", "moe.gate.top_groups=2", "moe.gate.route_scale=2.5", "moe.gate.bias_rate=1e-3"];
    assert_eq!(gate(&word, &sets), GateChoice::Sigmoid(keys.clone()));
    assert_eq!(gate(RECIPE, &[&["moe.gate.kind=sigmoid"], &sets[..]].concat()), GateChoice::Sigmoid(keys.clone()));
    assert_eq!(gate(RECIPE, &[&sets[..], &["moe.gate.kind=sigmoid"]].concat()), GateChoice::Sigmoid(keys.clone()));
    assert_eq!(gate(&with("gate = { kind = \"softmax\" }"), &[]), GateChoice::from(GateKind::Softmax));
    assert_eq!(gate(&word, &[]), GateChoice::from(GateKind::Sigmoid));
    for toml in [&table, &word, RECIPE] {
        let resolved = valid(toml, &[]);
        assert_eq!(valid(&resolved.to_toml(), &[]), resolved);
    }
    assert!(valid(RECIPE, &[]).to_toml().contains("gate = \"softmax\""));
}

#[test]
fn wrong_keys_of_a_gate_are_answered_where_they_stand() {
    let with = |gate: &str| RECIPE.replace("experts = 8", &format!("experts = 8\ngate = {gate}"));
    let wrong = |gate: &str, parts: &[&str]| check(&with(gate), &[], &[&[parts, &["tiny.toml:19)"]].concat()]);
    wrong("{ kind = \"softmax\", groups = 4 }", &["moe.gate.groups = 4", "\"softmax\" has no such key", "\"sigmoid\""]);
    wrong("{ kind = \"sigmoid\", workers = 4 }", &["moe.gate.workers", "\"swipe\" and \"distributed_capacity\""]);
    wrong("{ kind = \"sigmoid\", group = 4 }", &["moe.gate.group = 4", "did you mean moe.gate.groups?"]);
    wrong("{ kind = \"sigmoid\", depth = 4 }", &["moe.gate.depth = 4", "valid here: groups, top_groups"]);
    wrong("{ kind = \"softmax\", depth = 4 }", &["moe.gate.depth = 4", "leave it out"]);
    wrong("{ kind = \"sigmoid\", groups = \"4\" }", &["moe.gate.groups", "did you mean 4?"]);
    wrong("{ kind = \"sigmoid\", groups = 0 }", &["moe.gate.groups = 0", "the nearest valid value is 1"]);
    wrong("{ kind = \"sigmoid\", bias_rate = -1 }", &["moe.gate.bias_rate = -1", "the nearest valid value is 0.0"]);
    wrong("{ kind = \"sigmod\", groups = 4 }", &["moe.gate.kind = \"sigmod\"", "did you mean \"sigmoid\"?"]);
    wrong("{ groups = 4 }", &["moe.gate.kind", "missing", "add kind to [moe.gate]: one of \"naive\""]);
    wrong("\"sigmod\"", &["moe.gate = \"sigmod\"", "did you mean \"sigmoid\"?"]);
    wrong("4", &["moe.gate = 4", "a whole number does not fit", "\"sigmoid\""]);
    check_set("moe.gate.outside=0.3", &["moe.gate.kind", "missing", "--set moe.gate.outside=0.3"]);
    check(RECIPE, &["moe.gate=topology", "moe.gate.outside=2"], &[&["moe.gate.outside = 2", "value is 1.0"]]);
}

/// The flat keys of other versions, each with the place that it has now.
#[test]
fn a_key_that_a_gate_has_names_its_place() {
    for (old, kind, new) in [
        ("logical_workers = 4", "swipe", "workers = 4"),
        ("logical_workers = 4", "distributed_capacity", "workers = 4"),
        ("groups = 4", "sigmoid", "groups = 4"),
        ("top_groups = 2", "sigmoid", "top_groups = 2"),
        ("route_scale = 2.5", "sigmoid", "route_scale = 2.5"),
        ("bias_rate = 0.01", "sigmoid", "bias_rate = 0.01"),
        ("outside = 0.3", "topology", "outside = 0.3"),
    ] {
        let toml = RECIPE.replace("experts = 8", &format!("experts = 8\ngate = {kind:?}\n{old}"));
        let place = format!("write moe.gate = {{ kind = {kind:?}, {new} }}");
        check(&toml, &[], &[&[&format!("moe.{old} ("), "a key of the gate", &place, "tiny.toml:20)"]]);
        let set = old.replace(" = ", "=");
        check(
            RECIPE,
            &[&format!("moe.{set}")],
            &[&[&format!("moe.{old} (--set"), "leave it out: \"softmax\"", "write moe.gate = { kind ="]],
        );
    }
}

/// A run that was kept by another version goes on: its flat keys are read where they belong.
#[test]
fn a_kept_recipe_with_flat_keys_means_what_it_meant() {
    let flat = "logical_workers = 2\nlogical_nodes = 1\ngroups = 4\ntop_groups = 2\nroute_scale = 2.5\nbias_rate = 0.001\n\
                outside = 0.25";
    let kept = |kind: &str| {
        let folder = Folder::new();
        let path = folder.recipe(&RECIPE.replace("experts = 8", &format!("experts = 8\n{kind}{flat}")));
        let loaded = config::load_kept(&path, &[], None).unwrap_or_else(|problems| panic!("{problems}"));
        loaded.config.moe.expect("experts").gate
    };
    let keys = SigmoidKeys { groups: 4, top_groups: 2, route_scale: 2.5, normalised: true, bias_rate: 1e-3 };
    assert_eq!(kept("gate = \"sigmoid\"\n"), GateChoice::Sigmoid(keys));
    assert_eq!(kept("gate = \"swipe\"\n"), GateChoice::Swipe(SwipeKeys { workers: 2 }));
    assert_eq!(kept("gate = \"topology\"\n"), GateChoice::Topology(TopologyKeys { outside: 0.25 }));
    assert_eq!(kept("gate = \"gshard\"\n"), GateChoice::from(GateKind::Gshard));
    assert_eq!(kept(""), GateChoice::from(GateKind::Softmax));
}

#[test]
fn another_gate_says_what_it_drops() {
    let gate = "gate = { kind = \"sigmoid\", bias_rate = 0.01 }";
    let toml = RECIPE.replace("experts = 8", &format!("experts = 8\n{gate}"));
    for set in ["moe.gate=switch", "moe.gate.kind=switch", "moe.gate={ kind = \"switch\" }"] {
        let loaded = load(&toml, &["moe.top_k=1", set]).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(loaded.config.moe.expect("experts").gate, GateChoice::from(GateKind::Switch));
        let [notice] = loaded.notices.as_slice() else { panic!("{set}: {:?}", loaded.notices) };
        assert!(notice.contains("moe.gate.bias_rate (") && notice.contains(set), "{notice}");
    }
    let kept = load(&toml, &["moe.gate.kind=sigmoid", "moe.gate.groups=2"]).expect("valid");
    assert_eq!(kept.notices, Vec::<String>::new());
    let keys = SigmoidKeys { groups: 2, bias_rate: 0.01, ..SigmoidKeys::default() };
    assert_eq!(kept.config.moe.expect("experts").gate, GateChoice::Sigmoid(keys));
    let differences = config::differences(&valid(&toml, &[]), &valid(&toml, &["moe.gate.bias_rate=0.02"]));
    assert_eq!(differences, ["moe.gate.bias_rate: was 0.01, now 0.02"]);
    let differences = config::differences(&valid(RECIPE, &[]), &valid(RECIPE, &["moe.gate=hash"]));
    assert_eq!(differences, ["moe.gate: was \"softmax\", now \"hash\""]);
}

/// Every gate that lets later tokens decide, in models that read from left to right and in one that does not.
#[test]
fn causal_models_are_told_of_gates_that_look_ahead() {
    let said =
        |toml: &str, set: &[&str]| load(toml, set).unwrap_or_else(|problems| panic!("{set:?}: {problems}")).notices;
    let ahead = "lets later tokens of a causal model decide";
    let bert = ["model.family=bert", "data.mask_rate=0.15"];
    for (set, how) in [
        (&["moe.gate=swipe", "moe.gate.workers=2"][..], "in training"),
        (&["moe.gate=sinkhorn"], "in training"),
        (&["moe.gate=topology", "moe.logical_nodes=2"], "in evaluation too"),
    ] {
        let notices = said(RECIPE, set);
        assert!(notices.len() == 1 && notices[0].contains(ahead) && notices[0].contains(how), "{set:?}: {notices:?}");
        assert_eq!(said(RECIPE, &[set, &bert].concat()), Vec::<String>::new(), "{set:?}");
    }
    for kind in GateKind::ALL.iter().filter(|kind| **kind != GateKind::ExpertChoice) {
        let top_k = kind.only_top_k().unwrap_or(2);
        let notices = said(RECIPE, &[&format!("moe.gate={}", kind.name()), &format!("moe.top_k={top_k}")]);
        let told = notices.iter().any(|notice| notice.contains(ahead));
        assert_eq!(told, *kind == GateKind::Sinkhorn, "{}: {notices:?}", kind.name());
    }
    check_set("moe.gate=expert_choice", &["a causal model must not see", "the later ones included", "\"softmax\""]);
    assert_eq!(said(RECIPE, &[&["moe.gate=expert_choice"][..], &bert].concat()), Vec::<String>::new());
}

/// Rows of 64 tokens, eight in a micro-batch of four ranks.
#[test]
fn condensation_that_cannot_be_names_what_can() {
    let on = "moe.condense=static";
    let refused = |overrides: &[&str], parts: &[&str]| check(RECIPE, &[&[on], overrides].concat(), &[parts]);
    assert!(valid(RECIPE, &[]).moe.expect("experts").condensation().is_none());
    for gate in ["sinkhorn", "swipe", "topology"] {
        let gate = [&format!("moe.gate={gate}")[..], "moe.top_k=2"];
        refused(&gate, &["moe.condense = \"static\"", "tokens compete for experts", "\"softmax\"", "\"off\""]);
    }
    valid(RECIPE, &[on, "moe.gate=hash", "moe.capacity_factor=1.0", "moe.overflow=random"]);
    for (given, nearest) in [("2.5", "2.0"), ("-1.5", "-1.0")] {
        refused(&[&format!("moe.condense_threshold={given}")], &["moe.condense_threshold", nearest]);
    }
    let seq = valid(RECIPE, &[]).model.seq;
    let rows = valid(RECIPE, &["train.micro_batch=8", &format!("train.batch_tokens={}", 8 * seq)]).rows_per_step();
    assert_eq!(rows, 8);
    let of = |tokens: usize| {
        let given = [
            format!("moe.condense_tokens={tokens}"),
            "train.micro_batch=8".to_owned(),
            format!("train.batch_tokens={}", 8 * seq),
        ];
        let set: Vec<&str> = [on].into_iter().chain(given.iter().map(String::as_str)).collect();
        load(RECIPE, &set)
    };
    for tokens in [seq / 2, seq, 2 * seq] {
        of(tokens).unwrap_or_else(|problems| panic!("{tokens}: {problems}"));
    }
    for tokens in [seq - 1, 3 * seq, 4 * seq] {
        let problems = of(tokens).expect_err("a group on two ranks").to_string();
        assert!(problems.contains("moe.condense_tokens") && problems.contains("must lie on one rank"), "{problems}");
    }
    refused(&["moe.condense_history=[0.2, 0.8]"], &["moe.condense_history", "S1 = 0.2 is not above S2 = 0.8"]);
    refused(&["moe.condense_history=[0.8]"], &["1 numbers, not two", "[0.8, 0.2]"]);
    let moving = ["moe.condense_history=[0.8, 0.2]", "parallel.migrate=auto"];
    refused(&moving, &["moe.condense_history", "on the rank that compared", "parallel.migrate to \"off\""]);
    let split = ["parallel.ranks=4", "parallel.tensor=2", "parallel.sequence=true"];
    refused(&split, &["parallel.sequence", "more than shared rows save", "set it to false"]);
    valid(RECIPE, &split);
    let adaptive = ["moe.condense=adaptive", "moe.condense_range=[0.9]"];
    check(RECIPE, &adaptive, &[&["moe.condense_range", "1 numbers, not two", "the first and the last"]]);
    for key in ["gradient=literal", "tokens=8", "clusters=star", "compared=9", "history=[0.8, 0.2]"] {
        check_set(&format!("moe.condense_{key}"), &["nothing uses it", "condenses nothing"]);
    }
    refused(&["moe.condense_slope=2"], &["nothing uses it", "\"adaptive\""]);
    check(RECIPE, &["moe.condense=paper", "moe.condense_threshold=0.5"], &[&["nothing uses it", "\"static\""]]);
    let said = |overrides: &[&str]| load(RECIPE, overrides).expect("valid").notices;
    let notices = said(&[on, "moe.condense_clusters=star"]);
    assert!(notices.len() == 1 && notices[0].contains("lets later tokens of a causal model"), "{notices:?}");
    assert_eq!(said(&[on, "moe.condense_clusters=leader"]), Vec::<String>::new());
}

/// A group larger than all there is to group.
#[test]
fn groups_of_more_tokens_than_a_micro_batch_are_announced() {
    let said = |overrides: &[&str]| load(RECIPE, overrides).expect("valid").notices;
    let notices = said(&["moe.capacity_factor=1.5", "moe.group_tokens=513"]);
    let parts = ["moe.group_tokens = 513 (--set", "moves nothing", "fewer tokens"];
    assert!(notices.len() == 1 && parts.iter().all(|part| notices[0].contains(part)), "{notices:?}");
    assert_eq!(said(&["moe.capacity_factor=1.5", "moe.group_tokens=512"]), Vec::<String>::new());
    assert_eq!(said(&["moe.capacity_factor=1.5", "moe.group_tokens=129", "train.micro_batch=2"]).len(), 1);
}

/// No gradient travels where every weight has one holder; split tokens give norms others.
#[test]
fn what_no_gradient_travels_by_is_announced() {
    let alone = ["parallel.ranks=2", "parallel.tensor=2", "parallel.expert=1"];
    let toml = RECIPE.replace("ranks = 4\nexpert = 2\n", "ranks = 2\ntensor = 2\noverlap = false\nbucket_bytes = 99\n");
    let notices = load(&toml, &[]).expect("valid").notices;
    for (key, idle) in [("parallel.overlap", "overlap=false"), ("parallel.bucket_bytes", "bucket_bytes=99")] {
        let told = |notice: &&String| notice.starts_with(key) && notice.contains("every weight is on one rank alone");
        assert_eq!(notices.iter().filter(told).count(), 1, "{notices:?}");
        let set = format!("parallel.{idle}");
        check(
            RECIPE,
            &[&alone[..], &[&set]].concat(),
            &[&[key, "nothing uses it", "on one rank alone", "leave it out"]],
        );
        for busy in [
            &["parallel.ranks=4", "parallel.tensor=2", "parallel.expert=1"][..],
            &["parallel.ranks=2", "parallel.tensor=2", "parallel.expert=1", "parallel.sequence=true"],
            // Whole experts that both have.
            &["parallel.ranks=2", "parallel.tensor=2", "parallel.expert=1", "parallel.expert_tensor=1"],
            // Heads of keys and values that two of four use.
            &["parallel.tensor=4", "parallel.expert=1", "model.kv_heads=2"],
        ] {
            valid(RECIPE, &[busy, &[&set]].concat());
        }
    }
}

/// Nor where experts alone are trained, and each has one holder.
#[test]
fn frozen_weights_send_no_gradients() {
    let only = ["train.only=experts", "parallel.overlap=false"];
    check(RECIPE, &[&only[..], &["parallel.expert=4"]].concat(), &[&["parallel.overlap", "experts alone are trained"]]);
    valid(RECIPE, &only);
    valid(RECIPE, &["train.freeze=[\"head\"]", "parallel.overlap=false", "parallel.expert=4"]);
}

/// Every family and mesh: what a recipe is told is what ranks that have made the model keep.
#[test]
fn a_tile_that_holds_every_share_is_announced() {
    for given in [
        "",
        "parallel.zero=2",
        "parallel.ranks=2 parallel.tensor=2 parallel.expert=1",
        "parallel.tensor=2 parallel.zero=1 parallel.sequence=true",
        "parallel.tensor=2 parallel.expert_tensor=1 parallel.zero=3",
        "parallel.expert_table=[0,0,0,0,0,1,1,1]",
        "parallel.expert=[4,2,1,2] parallel.zero=1",
        "moe.layers={every=2} model.d_ff=3000",
        "moe.shared_experts=9 parallel.tensor=2",
        "moe.experts=512 moe.d_expert=1 parallel.zero=1",
        "model.family=gpt2 model.seq=512 moe.d_expert=8 parallel.tensor=2 parallel.sequence=true parallel.zero=1",
        "model.family=bert moe.d_expert=8 moe.experts=2 parallel.tensor=4 parallel.expert=1",
        "model.family=transformer_xl model.segment=16 model.memory=16 model.d_model=512 moe.d_expert=8 moe.experts=2",
        "model.heads=4 model.kv_heads=2 model.d_model=512 parallel.tensor=4 parallel.expert=1 moe.d_expert=8",
        "model.d_model=512 moe.d_expert=8 moe.experts=2 parallel.zero=1",
        "train.only=experts parallel.zero=1",
        "train.freeze=[\"experts\"]",
        "train.freeze=[\"embedding\",\"experts\"] parallel.tensor=2",
        "train.freeze=[\"embedding\",\"experts\"] model.tie_embeddings=true parallel.tensor=2",
        "train.freeze=[\"embedding\",\"experts\",\"head\",\"attention\"] moe.layers={every=2} parallel.zero=2",
    ] {
        let overrides: Vec<&str> = given.split_whitespace().collect();
        let config = valid(RECIPE, &overrides);
        let kept = launch::run(&config.parallel, |rank| {
            let trainer = train::trainer(&rank, &config)?;
            Ok::<_, train::Error>(trainer.optimizer.shards().iter().map(|shard| shard.range.len()).max())
        });
        let largest = kept.into_iter().map(|kept| kept.expect("a trainer").expect("weights")).max().expect("ranks");
        let told = |tile: usize| {
            let tile = format!("memory.tile={tile}");
            let notices = load(RECIPE, &[&overrides[..], &[&tile]].concat()).expect("valid").notices;
            notices.iter().any(|n| n.starts_with("memory.tile = ") && n.contains("moves nothing"))
        };
        assert!(told(largest) && !told(largest - 1), "{given}: {largest}");
    }
}

#[test]
fn a_budget_is_an_amount_of_memory() {
    let bytes = |set: &str| valid(RECIPE, &[set]).memory.budget_bytes();
    assert_eq!(bytes("memory.budget=512 MiB"), Some(512 << 20));
    assert_eq!(bytes("memory.budget=1000000"), Some(1_000_000));
    for wrong in ["memory.budget=plenty", "memory.budget=-1", "memory.budget=0", "memory.budget=12 apples"] {
        check_set(wrong, &["not an amount of memory", "512 MiB"]);
    }
    check_set("memory.budget=[1]", &["a number of bytes, or text such as"]);
}

#[test]
fn files_of_state_are_in_the_run_unless_told_otherwise() {
    let memory = |overrides: &[&str]| valid(RECIPE, overrides).memory;
    let kept = memory(&["memory.offload=\"file\"", "run.dir=\"runs/x\""]);
    assert_eq!(kept.offload_dir, Some(PathBuf::from("runs/x/offload")));
    let told = memory(&["memory.offload=\"file\"", "memory.offload_dir=\"/scratch\""]);
    assert_eq!(told.offload_dir, Some(PathBuf::from("/scratch")));
    assert_eq!(memory(&[]).offload_dir, None);
    check_set("memory.offload_dir=\"x\"", &["nothing uses it", "only memory.offload = \"file\""]);
    check_set("memory.offload=\"disk\"", &["host"]);
}

/// A launcher says how many ranks there are where the recipe does not, or training is elastic; what was typed stands.
#[test]
fn a_launchers_processes_are_ranks_unless_a_number_was_typed() {
    let folder = TempDir::new().unwrap();
    let (recipe, silent) = (folder.path().join("told.toml"), folder.path().join("silent.toml"));
    fs::write(&recipe, RECIPE).unwrap();
    fs::write(&silent, RECIPE.replace("ranks = 4\n", "")).unwrap();
    let elastic = ["train.elastic=true".to_owned()];
    let ranks = |recipe: &PathBuf, set: &[String], typed| {
        config::load_launched(recipe, set, typed, Some(2)).unwrap().config.parallel.ranks
    };
    assert_eq!(ranks(&silent, &[], None), 2);
    assert_eq!(ranks(&recipe, &[], None), 4);
    assert_eq!(ranks(&recipe, &elastic, None), 2);
    assert_eq!(ranks(&recipe, &elastic, Some(4)), 4);
}
