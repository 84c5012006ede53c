//! Adapters: on every mesh they learn what they learn on one rank, all else keeps its bits, they go to PEFT and into the
//! weights, and what cannot be is said. What PEFT computes, `golden.rs` compares.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use guildhall::checkpoint::{Destination, Extra, TrainingProgress, load_model, load_optimizer, open, retyped, save};
use guildhall::lora::{self, Target, Targets, is_factor};
use guildhall::model::{Model, Role, Sizes, count};
use guildhall::moe::{GateKind, ScheduleKind};
use guildhall::parallel::Zero;
use guildhall::plan::{Layout, Offload, RecomputePolicy};
use guildhall::train::Trainer;
use guildhall_tensor::{Dtype, Part, Recompute};
use safetensors::SafeTensors;

use crate::frozen::changing_ranks_changes_no_bit;
use crate::parity::{MOVED, STEPS, compare, run, run_prepared, run_with_mesh};
use crate::plan::{check, plain};
use crate::program::{RECIPE, RUN, Workshop, reseal};
use crate::tiny::{
    Recipe, Tensors, all_near, bert, families, gpt2, gradient_shares, mixtral, nllb, qwen2, same_bits, state,
    transformer_xl, union, weights, with,
};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};
use crate::zero::{Keeping, keeping, ways};

/// Of rank 2, every projection and every expert; only they are trained.
pub(crate) fn adapted(sizes: Sizes) -> Sizes {
    of(sizes, &[Target::All], true)
}

fn of(sizes: Sizes, targets: &[Target], experts: bool) -> Sizes {
    let lora = lora::Config { rank: 2, alpha: Some(6.0), targets: Targets(targets.to_vec()), experts };
    Sizes { lora: Some(lora), frozen: Role::ALL.to_vec(), ..sizes }
}

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 6, micro_batch: 3 }
}

/// Meshes on which every kind of matrix is cut in every way.
const MESHES: [Shape; 6] =
    [shape(2, 2), shape(4, 2), sliced(2, 2, 1), sliced(4, 2, 2), sliced(4, 4, 1), whole_experts(4, 2, 4)];

#[test]
fn adapters_learn_the_same_on_every_mesh() {
    for (name, sizes) in families() {
        let recipe = recipe(adapted(sizes));
        let want = run(&recipe, ONE);
        for shape in MESHES {
            compare(&format!("{name} on {shape:?}"), &run(&recipe, shape), &want);
        }
    }
}

/// Some projections of a fused product alone, dense layers, and a network beside experts that is sliced.
#[test]
fn some_targets_learn_the_same_on_every_mesh() {
    let dense = Sizes { moe: None, ..mixtral() };
    for (name, sizes) in [
        ("q and v", of(mixtral(), &[Target::QProj, Target::VProj], false)),
        ("k and o", of(mixtral(), &[Target::KProj, Target::OProj], false)),
        ("up and down", of(dense, &[Target::UpProj, Target::DownProj], false)),
        ("a gate beside experts", of(qwen2(), &[Target::GateProj], false)),
        ("experts", of(mixtral(), &[], true)),
    ] {
        let recipe = recipe(sizes);
        let want = run(&recipe, ONE);
        for shape in [shape(4, 2), sliced(4, 2, 2), sliced(4, 4, 1)] {
            compare(&format!("{name} on {shape:?}"), &run(&recipe, shape), &want);
        }
        for shape in [sliced(4, 2, 2), whole_experts(4, 2, 2)] {
            let split = run_with_mesh(&recipe, shape, |mesh| mesh.with_sequence(true));
            compare(&format!("{name} on {shape:?}, tokens split"), &split, &want);
        }
    }
}

/// Experts that visit other ranks, with their adapters, and rows that leave in several steps.
#[test]
fn experts_visit_with_their_adapters() {
    let visiting = with(adapted(qwen2()), |moe| {
        (moe.shadowing, moe.schedule) = ("force:1".to_owned(), ScheduleKind::Smart);
    });
    let want = run(&recipe(adapted(qwen2())), ONE);
    for shape in [shape(4, 2), shape(4, 4)] {
        let got = run(&recipe(visiting.clone()), shape);
        all_near(&format!("on {shape:?}"), &got.weights, &want.weights, MOVED);
    }
}

/// The tensors of a run's end, and shares of its first gradients.
fn learnt(recipe: &Recipe, shape: Shape, keeping: &Keeping) -> [Tensors; 3] {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut first = keeping.trainer(recipe, rank, mesh);
        let mesh = first.mesh.clone();
        first.gradients(&recipe.batches(&mesh, 1), 1).unwrap();
        let Trainer { model, optimizer, .. } = &mut first;
        optimizer.recall(model).unwrap();
        let gradients = gradient_shares(model, &mesh);
        drop(first);
        let mut trainer = keeping.trainer(recipe, rank, &mesh);
        let before = weights(&mut trainer.model);
        recipe.train(&mut trainer, 1..=STEPS);
        [gradients, before, state(&mut trainer)]
    });
    [0, 1, 2].map(|part| union(ranks.iter().map(|rank| rank[part].clone())))
}

/// B is zero at first, so A's first gradients are zero and B's are not; what is no adapter keeps its bits, and has neither
/// gradients nor state. On every stage, in tiles and elsewhere, they learn the same bits as without.
#[test]
fn nothing_but_adapters_moves() {
    let folder = tempfile::tempdir().unwrap();
    for sizes in [mixtral(), Sizes { dtype: Dtype::Bf16, ..gpt2() }] {
        // Stages add several micro-batches up in other orders.
        let recipe = Recipe { micro_batch: 6, ..recipe(adapted(sizes)) };
        for shape in [shape(4, 2), sliced(4, 2, 2)] {
            let want = learnt(&recipe, shape, &keeping(Zero::Off));
            let [gradients, before, after] = &want;
            for (name, first) in before {
                let what = format!("{name} on {shape:?}");
                assert_eq!(gradients.contains_key(name), is_factor(name), "{what}");
                assert_eq!(after.contains_key(&format!("m/{name}")), is_factor(name), "{what}");
                if !is_factor(name) {
                    assert!(same_bits(first, &after[name]), "{what} moved");
                    continue;
                }
                assert!(!same_bits(first, &after[name]), "{what} stayed");
                let is_b = name.ends_with("lora_B.weight");
                assert_eq!(first.iter().all(|&x| x == 0.0), is_b, "{what} at first");
                assert_eq!(gradients[name].iter().any(|&x| x != 0.0), is_b, "the first gradient of {what}");
            }
            for keeping in ways(folder.path()).into_iter().step_by(5) {
                let got = learnt(&recipe, shape, &keeping);
                for (got, want) in got[1..].iter().zip(&want[1..]) {
                    assert!(got.keys().eq(want.keys()), "{keeping:?}");
                    want.iter()
                        .for_each(|(name, x)| assert!(same_bits(x, &got[name]), "{name}, {shape:?}, {keeping:?}"));
                }
            }
        }
    }
}

/// A starts as PEFT's: evenly up to the root of one by the inputs, by its name, whatever the mesh.
#[test]
fn adapters_start_as_pefts() {
    let sizes = adapted(mixtral());
    let [before, sliced] = [ONE, sliced(4, 2, 2)]
        .map(|shape| union(on_mesh(shape, |rank, mesh| weights(&mut Model::new(&rank.device, &sizes, mesh)))));
    assert!(before.keys().eq(sliced.keys()));
    let mut all = Vec::new();
    for (name, x) in before.iter().filter(|(name, _)| name.ends_with("lora_A.weight")) {
        assert!(same_bits(x, &sliced[name]), "{name}");
        let inputs = x.len() / 2;
        all.extend(x.iter().map(|x| f64::from(*x) * (inputs as f64).sqrt()));
    }
    let (count, mean) = (all.len() as f64, all.iter().sum::<f64>() / all.len() as f64);
    let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    assert!(all.iter().all(|x| x.abs() <= 1.0) && all.iter().any(|x| x.abs() > 0.98));
    assert!(mean.abs() < 3.0 / (3.0 * count).sqrt() && (variance * 3.0 - 1.0).abs() < 0.1, "{mean} {variance}");
}

#[test]
fn what_runs_again_learns_the_same_bits() {
    for sizes in [mixtral(), gpt2(), transformer_xl(), nllb()] {
        let recipe = recipe(adapted(sizes));
        let want = run(&recipe, sliced(4, 2, 2));
        for parts in [vec![Part::Block], vec![Part::Attention, Part::Activation, Part::Experts]] {
            for keep in [true, false] {
                let again = Recompute::of(parts.clone(), keep);
                let got = run_prepared(&recipe, sliced(4, 2, 2), |trainer| trainer.recompute = again.clone());
                assert!(got == want, "{parts:?} of {:?}", recipe.sizes.model.family);
            }
        }
    }
}

/// Experts that change ranks take their adapters along.
#[test]
fn adapters_change_ranks_with_their_experts() {
    changing_ranks_changes_no_bit("adapters", &adapted(mixtral()));
}

/// The plan of a step, which is the step: memory and messages of adapters are foreseen as all others.
#[test]
fn bytes_of_adapters_are_foreseen() {
    for (name, sizes) in families() {
        for (dtype, shape, zero) in [(Dtype::F32, ONE, 0), (Dtype::Bf16, shape(4, 2), 3)] {
            let recipe = Recipe { sizes: Sizes { dtype, ..adapted(sizes.clone()) }, rows: 8, micro_batch: 8 };
            check(&format!("{name} {dtype:?}"), &recipe, Layout { zero, ..plain(shape) });
        }
    }
    let blocks = RecomputePolicy::Blocks { keep: false };
    for (shape, zero, offload, recompute) in [
        (sliced(4, 2, 2), 1, Offload::None, RecomputePolicy::Nothing),
        (whole_experts(4, 2, 4), 0, Offload::None, blocks.clone()),
        (shape(4, 2), 2, Offload::Host, RecomputePolicy::Nothing),
        (sliced(4, 2, 2), 3, Offload::None, blocks.clone()),
    ] {
        let mut sizes = with(adapted(qwen2()), |moe| moe.gate = GateKind::Balanced.into());
        sizes.model.kv_heads = Some(4);
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        check(&format!("qwen2 at stage {zero}"), &recipe, Layout { zero, offload, recompute, ..plain(shape) });
    }
}

/// Rank times the sum of a matrix's sizes, each of the adapted ones.
#[test]
fn adapters_are_counted() {
    let (all, without) = (count(&adapted(mixtral())), count(&mixtral()));
    // Width 16, 4 heads of 4, 2 of keys and values; experts of width 12; two layers of four experts.
    let attention =
        [(16, 16), (8, 16), (8, 16), (16, 16)].map(|(outputs, inputs)| outputs + inputs).iter().sum::<u64>();
    let expert = (24 + 16) + (16 + 12);
    assert_eq!(all.trained, 2 * 2 * (attention + 4 * expert));
    assert_eq!(all.total, without.total + all.trained);
    assert_eq!(all.experts, without.experts + 2 * 2 * 4 * expert);
}

// --- files ------------------------------------------------------------------------------------------------------

/// A run goes on, on another mesh and stage, where it stopped.
#[test]
fn runs_go_on_elsewhere() {
    for sizes in [mixtral(), gpt2(), bert()] {
        let recipe = Recipe { micro_batch: 6, ..recipe(adapted(sizes)) };
        let runs = tempfile::tempdir().unwrap();
        let train = |(shape, zero): (Shape, Zero), name: &str, from: Option<&Path>, steps: RangeInclusive<u64>| {
            let ranks = on_mesh(shape, |rank, mesh| {
                let mut trainer = keeping(zero).trainer(&recipe, rank, mesh);
                if let Some(folder) = from {
                    let (source, Trainer { model, optimizer, mesh, .. }) = (open(folder).unwrap(), &mut trainer);
                    let source = retyped(&source, model, optimizer, mesh).unwrap();
                    load_model(&source, model).unwrap();
                    load_optimizer(&source, model, optimizer).unwrap();
                }
                recipe.train(&mut trainer, steps.clone());
                let progress = TrainingProgress { step: *steps.end(), tokens: 0, seconds: 0.0, loss_trend: None };
                let extra = Extra { progress, data_fingerprint: String::new(), files: Vec::new() };
                let Trainer { model, optimizer, mesh, .. } = &mut trainer;
                (save(Destination::of(&runs.path().join(name)), model, optimizer, mesh, extra).unwrap(), weights(model))
            });
            (ranks[0].0.clone(), union(ranks.into_iter().map(|rank| rank.1)))
        };
        let (_, want) = train((ONE, Zero::Off), "at once", None, 1..=4);
        let (folder, _) = train((shape(4, 2), Zero::Parameters), "first", None, 1..=2);
        for place in [(sliced(4, 2, 2), Zero::Optimizer), (whole_experts(2, 2, 2), Zero::Off), (ONE, Zero::Off)] {
            let (_, got) = train(place, &format!("{place:?}"), Some(&folder), 3..=4);
            all_near(&format!("{place:?}"), &got, &want, MOVED);
        }
    }
}

fn tensors(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    read.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// The program adapts a checkpoint on another mesh, says so, goes on only as it began, uses adapters wherever a checkpoint
/// is used, and makes them a part of the weights.
#[test]
fn the_program_adapts_a_checkpoint() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let lora = "--set lora.rank=4 --set lora.alpha=8 --set lora.experts=true";
    let tune = format!("train tiny.toml --set train.init=runs/tiny --set run.dir=tuned {lora}");
    let mesh = "--ranks 2 --set parallel.tensor=2";
    let said = shop.succeeds(&format!("{tune} {mesh} --set train.steps=4")).err;
    assert!(said.contains("parameters of adapters of rank 4: every projection, every expert"), "{said}");
    let model = |run: &str, step| tensors(&shop.checkpoint(run, step).join("model.safetensors"));
    let (before, after) = (model(RUN, 2), model("tuned", 4));
    for (name, bytes) in &after {
        assert!(is_factor(name) != before.contains_key(name), "{name}");
        assert!(is_factor(name) || before[name] == *bytes, "{name} moved");
    }
    let other = ["cannot be continued", "lora.rank: was 4, now 2"];
    shop.fails(&format!("{tune} --resume --set train.steps=6 --set lora.rank=2"), 2, &other);
    shop.fails("train tiny.toml --set run.dir=tuned --resume --set train.steps=6", 2, &["train.only: was \"lora\""]);
    shop.succeeds(&format!("{tune} --resume --set train.steps=6"));

    // From adapters the same ones can be trained on, and no others.
    let on = format!("train tiny.toml --set train.init=tuned --set train.steps=1 --set run.dir=on {lora}");
    shop.succeeds(&on);
    shop.fails(&format!("{on} --set lora.rank=2"), 2, &["lora.rank is 4 there, 2 in the recipe"]);
    let without = "train tiny.toml --set train.init=tuned --set train.steps=1 --set run.dir=on";
    shop.fails(without, 2, &["lora.rank is 4 there, absent in the recipe", "guildhall convert --to guildhall"]);

    let said = shop.succeeds("convert tuned merged --to guildhall").err;
    assert!(said.contains("merge    adapters become a part of 32 matrices"), "{said}");
    let loss = |folder: &str| {
        let out = shop.succeeds(&format!("evaluate {folder}")).out;
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["eval_loss"].as_f64().unwrap()
    };
    let [start, adapted, merged] = ["runs/tiny", "tuned", "merged"].map(loss);
    assert!((merged - adapted).abs() < 1e-5, "{merged} instead of {adapted}");
    assert!(start - adapted > 1e-2, "adapters learned nothing: from {start} to {adapted}");
    let [one, other] = ["tuned", "merged"]
        .map(|run| shop.succeeds(&format!("generate {run} --prompt the --tokens 8 --temperature 0")).out);
    assert_eq!(one, other);
    let names = |folder: &str| tensors(&shop.path(folder).join("model.safetensors")).into_keys().collect::<Vec<_>>();
    assert_eq!(names("merged"), before.into_keys().collect::<Vec<_>>());
    shop.succeeds("convert tuned hf --to hf");
    shop.succeeds("convert merged hf-of-merged --to hf");
    let file = |folder: &str| tensors(&shop.path(folder).join("model.safetensors"));
    assert!(file("hf") == file("hf-of-merged"));
    shop.fails("surgery prune tuned --keep 2 --output pruned", 2, &["tuned has adapters", "guildhall convert"]);
    shop.fails("convert merged adapters --to peft", 2, &["merged has no adapters", "[lora]"]);

    let said = shop.succeeds("convert tuned adapters --to peft").err;
    assert!(said.contains("the adapters of Guildhall (mixtral) to PEFT (mixtral)"), "{said}");
    let config: serde_json::Value = serde_json::from_str(&shop.read("adapters/adapter_config.json")).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&4.into(), &8.0.into()));
    assert_eq!(config["target_modules"], serde_json::json!(["k_proj", "o_proj", "q_proj", "v_proj"]));
    let parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"];
    assert_eq!(config["target_parameters"], serde_json::json!(parameters));
    let exported = tensors(&shop.path("adapters/adapter_model.safetensors"));
    let own = model("tuned", 6);
    let at = "base_model.model.model.layers.1.";
    let a = |name: &str| &own[&format!("model.layers.1.{name}")];
    assert_eq!(exported[&format!("{at}self_attn.q_proj.lora_A.weight")], *a("self_attn.q_proj.lora_A.weight"));
    let experts = |e: usize, part: &str| a(&format!("block_sparse_moe.experts.{e}.{part}.weight"));
    let all: Vec<u8> = (0..4).flat_map(|e| experts(e, "w13.lora_A").clone()).collect();
    assert_eq!(exported[&format!("{at}mlp.experts.base_layer.lora_A.weight")], all);
    // Row f of down's B, column i E + e.
    let b = &exported[&format!("{at}mlp.experts.lora_B.weight")];
    let (row, column, e) = (5, 3, 2);
    let (theirs, ours) = ((row * 4 + column) * 4 + e, row * 4 + column);
    assert_eq!(b[4 * theirs..][..4], experts(e, "w2.lora_B")[4 * ours..][..4]);

    // A factor that f16 does not have is not written as infinite.
    let latest = shop.checkpoint("tuned", 6);
    let path = latest.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let factor = SafeTensors::deserialize(&bytes).unwrap();
    let factor = factor.tensor("model.layers.1.block_sparse_moe.experts.2.w2.lora_B.weight").unwrap().data();
    let at = factor.as_ptr() as usize - bytes.as_ptr() as usize;
    fs::write(&path, [&bytes[..at], &1e6f32.to_le_bytes(), &bytes[at + 4..]].concat()).unwrap();
    reseal(&latest);
    shop.fails("convert tuned halves --to peft --dtype f16", 2, &["lora_B.weight has values beyond those of F16"]);
    assert!(!shop.path("halves").exists());
}

/// Where gates and ups of experts come in turn, rows of B do.
#[test]
fn adapters_of_gates_and_ups_that_alternate_do_so_too() {
    let shop = Workshop::new();
    shop.train(
        "--set model.family=gpt_oss --set lora.rank=2 --set lora.experts=true --set train.steps=1 --set run.dir=oss",
    );
    shop.succeeds("convert oss adapters --to peft");
    let own = tensors(&shop.checkpoint("oss", 1).join("model.safetensors"));
    let exported = tensors(&shop.path("adapters/adapter_model.safetensors"));
    let b = &exported["base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"];
    let (rows, rank, experts) = (2 * 32, 2, 4);
    assert_eq!(b.len(), rows * rank * experts * size_of::<f32>());
    for (place, element) in b.as_chunks::<4>().0.iter().enumerate() {
        let (row, i, e) = (place / (rank * experts), place / experts % rank, place % experts);
        let part = ["w1", "w3"][row % 2];
        let factor = &own[&format!("model.layers.0.block_sparse_moe.experts.{e}.{part}.lora_B.weight")];
        let ours = row / 2 * rank + i;
        assert_eq!(factor[4 * ours..][..4], *element, "row {row}, expert {e}");
    }
    assert!(b.iter().any(|&byte| byte != 0), "they have learned");
}

/// Where queries, keys and values are one module, PEFT has one adapter for all three.
#[test]
fn adapters_without_modules_of_their_own_stay() {
    let shop = Workshop::new();
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
    let gpt2 = "--set model.family=gpt2 --set model.tie_embeddings=true --set train.steps=1";
    let told = shop.succeeds(&format!("train dense.toml {gpt2} --set lora.rank=2")).err;
    assert!(told.contains("there is no train.init: its weights are random"), "{told}");
    let words = ["q_proj.weight is no matrix by itself", "gpt2", "`--to hf` makes them a part of the weights"];
    shop.fails("convert runs/dense adapters --to peft", 2, &words);
    shop.succeeds("convert runs/dense hf --to hf");
}

#[test]
fn what_cannot_be_adapted_is_said() {
    let shop = Workshop::new();
    for (set, words) in [
        ("lora.rank=0", &["lora.rank = 0", "the nearest valid value is 1"][..]),
        ("lora.rank=17", &["more than the 16 rows or columns of q_proj", "the largest valid value is 16"]),
        ("lora.targets=q_proy", &["lora.targets", "q_proj"]),
        ("lora.targets=[\"q_proy\"]", &["lora.targets[0]", "q_proj", "down_proj"]),
        ("lora.targets=fc_in", &["the model has no \"fc_in\"", "q_proj"]),
        ("lora.targets=[\"q_proj\",\"v_proj\",\"q_proj\"]", &["lora.targets", "\"q_proj\" is there twice"]),
        ("lora.targets=[]", &["no matrix gets an adapter", "lora.experts = true"]),
        ("train.freeze=[\"router\"]", &["[lora] freezes the whole model", "leave the key out"]),
        ("train.only=all", &["[lora] trains adapters and nothing else"]),
        ("train.only=experts", &["[lora] trains adapters and nothing else"]),
    ] {
        let rank = if set.starts_with("lora.rank") { "" } else { "--set lora.rank=2" };
        shop.fails(&format!("plan {RECIPE} {rank} --set {set}"), 2, words);
    }
    shop.fails(&format!("plan {RECIPE} --set train.only=lora"), 2, &["the recipe has no [lora] section"]);
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
    let none = ["there are no experts, the recipe has no [moe] section"];
    shop.fails("plan dense.toml --set lora.rank=2 --set lora.experts=true", 2, &none);
}
