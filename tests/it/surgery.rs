//! Surgery: a moefied model computes what the dense one did, keeps every tensor it can, and is a checkpoint that other
//! commands begin with.

use std::fs;

use guildhall::model::{Context, Family, Model, Sizes, count};
use guildhall::moe::{self, Dialect, GateKind, Layers};
use guildhall::parallel::{Parameters, PerLayer};
use guildhall::surgery::{Error, moefy};
use guildhall_tensor::{Dtype, Tape};
use serde_json::Value;

use crate::program::{RECIPE, Workshop, flip};
use crate::tiny::{Recipe, Tensors, Tolerance, bert, gpt2, mixtral, near, same_bits, transformer_xl, weights};
use crate::world::{ONE, on_mesh, shape};

const DENSE: &str = "dense/checkpoints/latest";
/// Weights of up to four experts sum to one within 4 * 2^-24 a layer, and their sum is rounded as often; two layers.
const ROUNDING: Tolerance = Tolerance { relative: 2e-6, floor: 0.0 };

fn dense(sizes: Sizes) -> Sizes {
    Sizes { moe: None, ..sizes }
}

fn logits(model: &Model, recipe: &Recipe, mesh: &guildhall::parallel::Mesh, tape: &Tape) -> Vec<f32> {
    let batch = &recipe.batches(mesh, 1).micro[0];
    let context = Context::of_inference(mesh, 1);
    model.logits(tape, batch, &context).unwrap().to_vec()
}

#[track_caller]
fn computes_the_same(sizes: &Sizes, config: &moe::Config, what: &str) {
    for shape in [ONE, shape(2, 2), shape(4, 2)] {
        let recipe = Recipe { sizes: sizes.clone(), rows: 4, micro_batch: 4 };
        on_mesh(shape, |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            recipe.train(&mut trainer, 1..=2);
            let tape = Tape::inference(&rank.device);
            let want = logits(&trainer.model, &recipe, mesh, &tape);
            let model = moefy(&rank.device, &mut trainer.model, config, 9, mesh).unwrap();
            near(&format!("{what}, {shape:?}"), &logits(&model, &recipe, mesh, &tape), &want, ROUNDING);
        });
    }
}

#[test]
fn a_moefied_model_computes_the_same() {
    for sizes in [dense(mixtral()), dense(gpt2())] {
        for top_k in 1..=4 {
            computes_the_same(&sizes, &moe::Config::of(4, top_k), &format!("top {top_k}"));
        }
        for dialect in [Dialect::Hf, Dialect::Megatron, Dialect::Fastmoe] {
            let config = moe::Config { dialect: Some(dialect), gate: GateKind::Naive.into(), ..moe::Config::of(4, 2) };
            computes_the_same(&sizes, &config, &format!("{dialect:?}"));
        }
        let config = moe::Config { layers: Layers::List(vec![1]), residual: true, ..moe::Config::of(4, 2) };
        computes_the_same(&sizes, &config, "residual");
    }
}

/// A dense model of one rank, and what `config` makes of it.
fn both(sizes: &Sizes, config: &moe::Config) -> (Tensors, Tensors) {
    let models = on_mesh(ONE, |rank, mesh| {
        let mut dense = Model::new(&rank.device, sizes, mesh);
        let mut model = moefy(&rank.device, &mut dense, config, 9, mesh).unwrap();
        (weights(&mut dense), weights(&mut model))
    });
    models.into_iter().next().expect("one rank")
}

/// (in a dense layer, in an expert), written from docs/checkpoints.md.
fn parts(family: Family) -> &'static [(&'static str, &'static str)] {
    match family {
        Family::Gpt2 | Family::Bert | Family::TransformerXl => &[
            ("fc_in.weight", "fc_in.weight"),
            ("fc_in.bias", "fc_in.bias"),
            ("fc_out.weight", "fc_out.weight"),
            ("fc_out.bias", "fc_out.bias"),
        ],
        Family::Mixtral | Family::Llama => {
            &[("gate_proj.weight", "w1.weight"), ("up_proj.weight", "w3.weight"), ("down_proj.weight", "w2.weight")]
        }
        other => panic!("{other:?} has no tiny model"),
    }
}

#[test]
fn every_tensor_is_kept_copied_or_new() {
    let families =
        [(mixtral(), Dtype::Bf16), (gpt2(), Dtype::F32), (bert(), Dtype::F32), (transformer_xl(), Dtype::Bf16)];
    for (sizes, dtype) in families {
        let sizes = Sizes { dtype, ..dense(sizes) };
        let config = moe::Config { layers: Layers::Every(2), ..moe::Config::of(3, 2) };
        let (old, mut new) = both(&sizes, &config);
        for expert in 0..3 {
            for (dense, part) in parts(sizes.model.family) {
                let copy = new.remove(&format!("model.layers.1.block_sparse_moe.experts.{expert}.{part}"));
                let original = &old[&format!("model.layers.1.mlp.{dense}")];
                assert!(same_bits(&copy.expect(part), original), "expert {expert}, {part}");
            }
        }
        let router = new.remove("model.layers.1.block_sparse_moe.gate.weight").expect("a router");
        let rms = (router.iter().map(|x| x * x).sum::<f32>() / router.len() as f32).sqrt();
        // A standard deviation of 0.3, estimated from 48 numbers: four of its own.
        assert!((rms - 0.3).abs() < 4.0 * 0.3 / (2.0f32 * 48.0).sqrt(), "the router's deviation is {rms}");
        for (name, values) in &new {
            assert!(same_bits(values, &old[name]), "{name} has changed");
        }
        assert_eq!(new.len() + parts(sizes.model.family).len(), old.len(), "one feed-forward is gone, nothing else");
    }
}

/// Experts of equal compute are those of a fresh model, the biases zero, the second matrix's deviation smaller by the
/// root of twice the layers.
#[test]
fn divided_experts_are_new() {
    let sizes = dense(gpt2());
    for top_k in [1, 2, 3] {
        let config = moe::Config { equal_compute: true, ..moe::Config::of(4, top_k) };
        let (old, new) = both(&sizes, &config);
        let part = |e: usize, part: &str| &new[&format!("model.layers.0.block_sparse_moe.experts.{e}.{part}")];
        let deviation = |x: &[f32]| (x.iter().map(|x| f64::from(x * x)).sum::<f64>() / x.len() as f64).sqrt();
        for e in 0..4 {
            let width = 24 / top_k;
            assert_eq!(part(e, "fc_in.weight").len(), width * 16);
            assert!(part(e, "fc_in.bias").iter().chain(part(e, "fc_out.bias")).all(|&b| b == 0.0));
            // Of at least 128 numbers: five standard errors.
            let error = 5.0 / (2.0 * (width * 16) as f64).sqrt();
            assert!((deviation(part(e, "fc_in.weight")) / 0.3 - 1.0).abs() < error, "expert {e}");
            assert!((deviation(part(e, "fc_out.weight")) / 0.15 - 1.0).abs() < error, "expert {e}");
            assert!(e == 0 || part(e, "fc_in.weight") != part(0, "fc_in.weight"), "experts differ");
            assert_ne!(part(e, "fc_in.weight"), &old["model.layers.0.mlp.fc_in.weight"]);
        }
        assert!(same_bits(
            &new["model.layers.0.self_attn.q_proj.weight"],
            &old["model.layers.0.self_attn.q_proj.weight"]
        ));
    }
}

#[test]
fn what_cannot_be_moefied_is_refused() {
    let refusals: [(Sizes, moe::Config, fn(&Error) -> bool); 3] = [
        (mixtral(), moe::Config::of(4, 2), |error| matches!(error, Error::AlreadyMoe { experts: PerLayer::Same(4) })),
        (dense(mixtral()), moe::Config { d_expert: Some(7), ..moe::Config::of(4, 2) }, |error| {
            matches!(error, Error::Width { d_expert: 7, d_ff: 24 })
        }),
        (dense(mixtral()), moe::Config { shared_experts: 1, ..moe::Config::of(4, 2) }, |error| {
            matches!(error, Error::Shared(1))
        }),
    ];
    for (sizes, config, expected) in refusals {
        let errors = on_mesh(ONE, |rank, mesh| {
            let mut model = Model::new(&rank.device, &sizes, mesh);
            moefy(&rank.device, &mut model, &config, 0, mesh).err()
        });
        assert!(errors[0].as_ref().is_some_and(expected), "{errors:?}");
    }
}

/// The counts that a run announces are those of the model it makes.
#[test]
fn counts_are_what_models_hold() {
    let changes: [fn(&mut moe::Config); 5] = [
        |_| {},
        |moe| moe.residual = true,
        |moe| moe.shared_experts = 2,
        |moe| moe.gate = GateKind::Noisy.into(),
        |moe| (moe.d_expert, moe.equal_compute) = (None, true),
    ];
    for sizes in [mixtral(), gpt2()] {
        for change in changes {
            let mut sizes = sizes.clone();
            change(sizes.moe.as_mut().expect("experts"));
            let held = on_mesh(ONE, |rank, mesh| {
                let (mut held, mut experts) = (0, 0);
                Model::new(&rank.device, &sizes, mesh).visit(&mut |weight| {
                    held += weight.parameter.len() as u64;
                    let is_expert = weight.placement.pieces[0].name.contains(".experts.");
                    experts += if is_expert { weight.parameter.len() as u64 } else { 0 };
                });
                (held, experts)
            });
            let counts = count(&sizes);
            assert_eq!((counts.total, counts.experts), held[0], "{:?}", sizes.moe);
        }
    }
}

// --- through the program ----------------------------------------------------------------------------------------

/// A workshop with a dense run in `dense`.
fn with_dense_run(options: &str) -> Workshop {
    let shop = Workshop::new();
    let text = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    assert!(!text.contains("moe"));
    shop.write("dense.toml", &text);
    let steps = "--set train.steps=60 --set train.eval_every=60 --set train.checkpoint_every=0";
    shop.succeeds(&format!("train dense.toml --set run.dir=dense {steps} {options}"));
    shop
}

fn eval_loss(shop: &Workshop, checkpoint: &str) -> f64 {
    let finished = shop.succeeds(&format!("evaluate {checkpoint}"));
    serde_json::from_str::<Value>(&finished.out).unwrap()["eval_loss"].as_f64().unwrap()
}

#[test]
fn a_moefied_checkpoint_generates_evaluates_and_trains() {
    let shop = with_dense_run("--ranks 2");
    let finished = shop.succeeds(&format!("surgery moefy {DENSE} --experts 4 --layers every:2 -o out/moe"));
    assert_eq!(finished.out, "out/moe\n");
    for words in ["of step 60", "4 copies of the feed-forward in layers 1, top-2", "computes what it did", "AdamW"] {
        assert!(finished.err.contains(words), "no {words:?} in {}", finished.err);
    }
    let text = |checkpoint: &str| {
        shop.succeeds(&format!("generate {checkpoint} --prompt the --tokens 30 --temperature 0")).out
    };
    assert_eq!(text("out/moe"), text(DENSE));
    let (before, loss) = (eval_loss(&shop, DENSE), eval_loss(&shop, "out/moe"));
    let manifest: Value = serde_json::from_str(&shop.read("out/moe/manifest.json")).unwrap();
    assert_eq!((&manifest["step"], &manifest["tokens"]), (&0.into(), &0.into()));
    assert!(!shop.path("out/moe/optimizer.safetensors").exists());
    // A mean over some thousand tokens of what differs by rounding.
    assert!((loss / before - 1.0).abs() < 1e-5, "{before} to {loss}");
    let loaded = guildhall::config::load(&shop.path("out/moe/config.toml"), &[], None).unwrap();
    assert_eq!(loaded.notices, Vec::<String>::new());
    assert_eq!(loaded.config.moe.expect("experts").layers, Layers::Every(2));

    fs::copy(shop.path("out/moe/config.toml"), shop.path("on.toml")).unwrap();
    let begin = "train on.toml --set train.init=out/moe --set run.dir=on --ranks 2 --set parallel.expert=2 \
                 --set train.eval_every=5 --set train.checkpoint_every=4 --set train.steps=";
    let finished = shop.succeeds(&format!("{begin}8"));
    assert!(finished.err.contains("init     the weights of out/moe"), "{}", finished.err);
    let losses: Vec<f64> = shop.series("on", "loss").iter().map(|loss| loss.as_f64().unwrap()).collect();
    // A batch of 256 tokens is some tenths off; a model that begins anew is at 5.7.
    assert!(losses.iter().all(|&loss| (loss - before).abs() < 1.0), "{losses:?} after a held-out {before}");
    // A run that goes on needs its beginning no more.
    fs::remove_dir_all(shop.path("out/moe")).unwrap();
    shop.fails(&format!("{begin}9"), 2, &["out/moe", "not a checkpoint"]);
    shop.succeeds(&format!("{begin}10 --resume --set train.init=elsewhere"));
    assert_eq!(shop.series("on", "step").len(), 10);
}

/// In 16 bits the optimizer's f32 masters are what is trained: they too must begin with the loaded weights.
#[test]
fn masters_begin_with_the_weights_of_init() {
    let shop = with_dense_run("--set train.dtype=bf16");
    shop.succeeds(&format!("surgery moefy {DENSE} --experts 3 --top-k 1 -o moe"));
    let loss = eval_loss(&shop, "moe");
    assert!(loss < 4.5, "the dense model has learned something: {loss} of {}", 300f64.ln());
    shop.succeeds(
        "train moe/config.toml --set train.init=moe --set run.dir=on --set train.lr=1e-6 --set train.steps=2",
    );
    assert!((eval_loss(&shop, "on/checkpoints/latest") / loss - 1.0).abs() < 0.01);
}

#[test]
fn divided_experts_are_announced_as_new() {
    let shop = with_dense_run("");
    let finished = shop.succeeds(&format!("surgery moefy {DENSE} --experts 4 --top-k 2 --divide --seed 5"));
    let out = finished.out.trim_end();
    assert!(out.ends_with("dense/checkpoints/step-000060-moe"), "{out}");
    assert!(finished.err.contains("width 32 = 64 / 2") && finished.err.contains("new values"), "{}", finished.err);
    shop.succeeds(&format!("generate {out} --prompt a --tokens 3"));
    shop.succeeds(&format!("train {out}/config.toml --set train.init={out} --set run.dir=on --set train.steps=2"));
    // Other seeds draw other experts, the same draws the same.
    for (seed, same) in [(5, true), (6, false)] {
        let again = format!("again-{seed}");
        shop.succeeds(&format!("surgery moefy {DENSE} --experts 4 --divide --seed {seed} -o {again}"));
        let bytes = |folder: &str| fs::read(shop.path(folder).join("model.safetensors")).unwrap();
        assert_eq!(bytes(&again) == bytes(out), same, "seed {seed}");
    }
}

#[test]
fn wrong_requests_are_refused_and_leave_nothing() {
    let shop = with_dense_run("");
    shop.train("--set train.steps=1");
    shop.write("taken/file", "mine");
    shop.write("file", "not a folder");
    let cases: &[(&str, i32, &[&str])] = &[
        (
            &format!("{DENSE} --experts 0"),
            2,
            &["with experts: 1 problem", "moe.experts = 0 (--experts 0)", "value is 1"],
        ),
        (&format!("{DENSE} --experts {}", u64::MAX), 2, &["from 1 to 1048576", "value is 1048576"]),
        (&format!("{DENSE} --experts 4 --top-k 0"), 2, &["moe.top_k = 0 (--top-k 0)", "value is 1"]),
        (&format!("{DENSE} --experts 4 --top-k 5"), 2, &["moe.top_k = 5 (--top-k 5)", "moe.experts = 4"]),
        (&format!("{DENSE} --experts 4 --top-k 3 --divide"), 2, &["moe.top_k = 3", "model.d_ff = 64", "2 and 4"]),
        (&format!("{DENSE} --experts 0 --layers list:9"), 2, &["2 problems", "(--layers list:9)", "layer 9 is beyond"]),
        (&format!("{DENSE} --experts 4 --layers some"), 2, &["--layers some", "every:2"]),
        (&format!("{DENSE} --experts 4 --layers list:1,x"), 2, &["--layers list:1,x"]),
        (&format!("{DENSE} --experts 1048576"), 2, &["both models need"]),
        ("nowhere --experts 4", 2, &["nowhere", "not a checkpoint"]),
        ("runs/tiny/checkpoints/latest --experts 4", 2, &["has 4 experts already"]),
        (&format!("{DENSE} --experts 4 -o taken"), 2, &["taken exists already"]),
        (&format!("{DENSE} --experts 4 -o file/out"), 1, &["file/"]),
        (&format!("{DENSE} --experts 4 -o /"), 2, &["/ has no name"]),
        (&format!("{DENSE} --experts many"), 2, &["--experts"]),
        (DENSE, 2, &["--experts"]),
    ];
    for (arguments, code, words) in cases {
        let output = if arguments.contains("-o ") { "" } else { "-o out" };
        shop.fails(&format!("surgery moefy {arguments} {output}"), *code, words);
        assert!(!shop.path("out").exists(), "{arguments} left something");
    }
    assert_eq!(shop.read("taken/file"), "mine");
    assert!(!shop.path(".partial-taken").exists());
    for name in ["model.safetensors", "config.toml", "tokenizer.json", "manifest.json"] {
        let path = shop.path(DENSE).join(name);
        let whole = fs::read(&path).unwrap();
        flip(&path, whole.len() / 2);
        shop.fails(&format!("surgery moefy {DENSE} --experts 4 -o out"), 2, &[name, "damaged"]);
        fs::write(path, whole).unwrap();
    }
    // What an interrupted write left is no obstacle.
    shop.write(".partial-out/stray", "half");
    shop.succeeds(&format!("surgery moefy {DENSE} --experts 4 -o out"));
    assert!(!shop.path(".partial-out").exists() && !shop.path("out/stray").exists());
}

#[test]
fn weights_to_begin_with_must_fit() {
    let shop = with_dense_run("");
    let begin = format!("train dense.toml --set train.init={DENSE} --set run.dir=on");
    let cases: &[(&str, &[&str])] = &[
        (
            "--set model.layers=3",
            &["dense/checkpoints/latest does not fit the recipe", "model.layers is 2 there, 3 in"],
        ),
        ("--set model.layers=1", &["model.layers is 2 there, 1 in the recipe"]),
        ("--set model.d_ff=32", &["model.d_ff is 64 there, 32 in the recipe"]),
        ("--set train.dtype=bf16", &["train.dtype is \"f32\" there, \"bf16\" in the recipe"]),
        ("--set moe.experts=4", &["moe.experts is absent there, 4 in the recipe", "guildhall surgery upcycle"]),
        ("--set model.vocab=299", &["vocabulary", "data.tokenizer = \"dense/checkpoints/latest/tokenizer.json\""]),
        // All at once, before any text is prepared.
        (
            "--set model.vocab=290 --set model.d_model=32 --set model.family=gpt2 --set train.dtype=bf16 \
             --set data.sources=[\"nowhere\"]",
            &[
                "model.family is \"mixtral\" there, \"gpt2\" in the recipe",
                "model.vocab is 300 there, 290 in the recipe",
                "model.d_model is 16 there, 32 in the recipe",
                "model.d_ff is 64 there, 128 in the recipe",
                "train.dtype is \"f32\" there, \"bf16\" in the recipe",
                "set them as they are there, the vocabulary by data.tokenizer = ",
            ],
        ),
        ("--set run.dir=dense", &["run.dir = dense", "another run.dir"]),
        ("--set train.init=nowhere", &["nowhere is not a checkpoint"]),
    ];
    for (change, words) in cases {
        shop.fails(&format!("{begin} {change}"), 2, words);
    }
    assert!(shop.path("dense/checkpoints/latest").exists(), "a refused run has moved the other aside");
    // What no single key says, its tensors do.
    shop.fails(&format!("{begin} --set moe.experts=4 --set model.kv_heads=1"), 2, &["moe.experts is absent"]);
    shop.fails(&format!("{begin} --set model.kv_heads=1"), 2, &["k_proj.weight is F32 [16, 16] there, F32 [8, 16] in"]);
    let given = format!("--set data.tokenizer={DENSE}/tokenizer.json");
    shop.succeeds(&format!("{begin} {given} --set train.steps=1"));
}
