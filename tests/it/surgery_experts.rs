//! Surgery on experts: models become one with the experts of all, or keep some of theirs. Tensors by name against loops
//! over them, functions that must be kept, loads against counts by hand, and the program.

use std::collections::BTreeSet;
use std::sync::Arc;

use guildhall::data::{self, Row, Source};
use guildhall::launch::Rank;
use guildhall::model::{Context, Model, Sizes};
use guildhall::moe::gates::SigmoidKeys;
use guildhall::moe::{self, BalanceScope, GateChoice, GateKind};
use guildhall::parallel::{Mesh, Parameters, PerLayer};
use guildhall::surgery::{aggregate, gate_norms, largest, prune};
use guildhall::train::{HeldOutPart, held_out_loads};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape};

use crate::program::{RECIPE, Workshop, flip};
use crate::tiny::{
    Documents, Recipe, Tensors, Tolerance, families, gpt2, m2m, mixtral, near, same_bits, ungrouped, weights,
};
use crate::world::{ONE, on_mesh, shape, sliced};

/// Sums of as many products in other orders, through two layers and their gates.
const ROUNDING: Tolerance = Tolerance { relative: 2e-6, floor: 0.0 };

/// What experts may have beside them, and gates that keep more than a matrix.
fn kinds() -> Vec<(String, Sizes)> {
    let mut all: Vec<_> = families().map(|(name, sizes)| (name.to_owned(), sizes)).into_iter().collect();
    let mut add = |name: &str, change: &dyn Fn(&mut moe::Config)| {
        let mut sizes = gpt2();
        change(sizes.moe.as_mut().expect("experts"));
        all.push((name.to_owned(), sizes));
    };
    add("residual", &|moe| moe.residual = true);
    add("shared", &|moe| moe.shared_experts = 2);
    add("noisy", &|moe| moe.gate = GateKind::Noisy.into());
    add("loads of a step", &|moe| moe.balance_scope = Some(BalanceScope::GlobalBatch));
    let keys = SigmoidKeys { bias_rate: 0.01, ..SigmoidKeys::default() };
    add("biased", &|moe| moe.gate = GateChoice::Sigmoid(keys.clone()));
    all.push(("bf16".to_owned(), Sizes { dtype: Dtype::Bf16, ..mixtral() }));
    all
}

fn with_experts(sizes: &Sizes, experts: usize, seed: u64) -> Sizes {
    let moe = moe::Config { experts: experts.into(), ..sizes.moe.clone().expect("experts") };
    Sizes { moe: Some(moe), seed, ..sizes.clone() }
}

/// A model that has taken two steps: no two of its numbers are equal by construction, and its buffers are not zero.
fn trained(rank: &Rank, mesh: &Mesh, sizes: &Sizes) -> Model {
    let recipe = Recipe { sizes: sizes.clone(), rows: 4, micro_batch: 4 };
    let mut trainer = recipe.trainer(rank, mesh);
    recipe.train(&mut trainer, 1..=2);
    trainer.model
}

/// Weights and buffers.
fn tensors(model: &mut Model) -> Tensors {
    let mut all = weights(model);
    model.visit_buffers(&mut |buffer| {
        all.insert(buffer.placement.pieces[0].name.clone(), buffer.value.to_vec());
    });
    all
}

/// `(layer, expert, part)` of an expert's tensor.
fn expert_of(name: &str) -> Option<(&str, usize, &str)> {
    let (layer, within) = name.split_once(".experts.")?;
    let (expert, part) = within.split_once('.')?;
    (!layer.ends_with("shared")).then(|| (layer, expert.parse().unwrap(), part))
}

const GATES: [&str; 4] = ["gate.weight", "gate.bias", "gate.noise.weight", "gate.e_score_correction_bias"];

/// Whether chosen experts weigh the same whatever others there are: not where a weight is a share of all scores.
fn weighs_the_chosen(sizes: &Sizes) -> bool {
    sizes.moe.as_ref().expect("experts").gate.kind() != GateKind::Switch
}

fn is_gate(name: &str) -> bool {
    GATES.iter().any(|part| name.ends_with(&format!("block_sparse_moe.{part}")))
}

/// The names of the routers' matrices in the order of layers: encoders come before decoders.
fn gate_names(tensors: &Tensors) -> Vec<String> {
    let mut names: Vec<String> = tensors.keys().filter(|name| name.ends_with(".gate.weight")).cloned().collect();
    names.sort_by_key(|name| name.contains(".decoder."));
    names
}

/// Root mean square of a matrix.
fn size(x: &[f32]) -> f64 {
    (x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / x.len() as f64).sqrt()
}

/// Checks every tensor of an aggregate against those it is made of.
fn check_aggregate(what: &str, parts: &[Tensors], experts: &[usize], dtype: Dtype, mut whole: Tensors) {
    for (model, (part, first)) in
        parts.iter().zip((0..experts.len()).map(|m| experts[..m].iter().sum::<usize>())).enumerate()
    {
        for (name, values) in part {
            let Some((layer, expert, rest)) = expert_of(name) else { continue };
            let there = whole.remove(&format!("{layer}.experts.{}.{rest}", first + expert));
            assert!(same_bits(&there.unwrap(), values), "{what}: {name} of model {model}");
        }
    }
    for (name, got) in whole {
        let all: Vec<&Vec<f32>> = parts.iter().map(|part| &part[&name]).collect();
        let mean = |i: usize| all.iter().map(|values| f64::from(values[i])).sum::<f64>() / all.len() as f64;
        // A router's biases go by its matrix.
        let rows = name.replace("gate.bias", "gate.weight");
        let sizes: Vec<f64> = parts.iter().map(|part| size(&part[&rows])).collect();
        let even = sizes.iter().sum::<f64>() / sizes.len() as f64;
        let want: Vec<f64> = if name.ends_with("gate.previous_load") {
            vec![0.0; experts.iter().sum::<usize>() + 1]
        } else if is_gate(&name) {
            let factor = |m: usize| if rows.ends_with("gate.weight") { even / sizes[m] } else { 1.0 };
            let scaled = |m: usize| all[m].iter().map(move |&x| f64::from(x) * factor(m));
            (0..all.len()).flat_map(scaled).collect()
        } else {
            (0..got.len()).map(mean).collect()
        };
        // One rounding, in bf16 two.
        let error = if dtype == Dtype::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
        let close = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= error * want.abs();
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        assert!(got.iter().zip(&want).all(close), "{what}: {name}");
    }
}

#[test]
fn every_tensor_of_an_aggregate_is_of_one_model_or_the_mean() {
    for (what, sizes) in kinds() {
        for experts in [&[4, 4][..], &[4, 3, 5]] {
            let made = on_mesh(ONE, |rank, mesh| {
                let seeded = experts.iter().zip(20..).map(|(&experts, seed)| with_experts(&sizes, experts, seed));
                let mut models: Vec<Model> = seeded.map(|sizes| trained(rank, mesh, &sizes)).collect();
                let moe = with_experts(&sizes, experts.iter().sum(), 0).moe.unwrap();
                let parts: Vec<Tensors> = models.iter_mut().map(tensors).collect();
                let (mut model, factors) = aggregate(&rank.device, &mut models, &moe, mesh);
                let told: Vec<Vec<f64>> = factors.into_iter().map(|of| of.factors).collect();
                let norms = models.iter_mut().map(gate_norms).collect::<Vec<_>>();
                check_factors(&told, &norms);
                (parts, tensors(&mut model))
            });
            let (parts, whole) = made.into_iter().next().unwrap();
            check_aggregate(&what, &parts, experts, sizes.dtype, whole);
        }
    }
}

/// What was announced makes the rows of all models of one size on average, the mean of what it was.
fn check_factors(factors: &[Vec<f64>], norms: &[Vec<Vec<f64>>]) {
    assert_eq!(factors.len(), norms[0].len(), "one line for each layer");
    for (layer, factors) in factors.iter().enumerate() {
        let sizes: Vec<f64> = norms
            .iter()
            .map(|of_model| {
                let squares = of_model[layer].iter().map(|norm| norm * norm);
                (squares.sum::<f64>() / of_model[layer].len() as f64).sqrt()
            })
            .collect();
        let even = sizes.iter().sum::<f64>() / sizes.len() as f64;
        assert!(factors.iter().zip(&sizes).all(|(factor, size)| (factor * size / even - 1.0).abs() < 1e-12));
    }
}

fn logits(model: &Model, sizes: &Sizes, mesh: &Mesh, tape: &Tape) -> Vec<f32> {
    let recipe = Recipe { sizes: sizes.clone(), rows: 4, micro_batch: 4 };
    let batch = &recipe.batches(mesh, 1).micro[0];
    model.logits(tape, batch, &Context::of_inference(mesh, 1)).unwrap().to_vec()
}

/// Twins have equal scores, where other numbers of experts make no other groups: with twice as many choices, or one of
/// one, each token finds the experts it had.
#[test]
fn a_model_aggregated_with_itself_computes_the_same() {
    for (what, sizes) in families().map(ungrouped).into_iter().filter(|(_, sizes)| weighs_the_chosen(sizes)) {
        for (before, after) in [(1, 1), (1, 2), (2, 4)] {
            for copies in [2, 3].into_iter().filter(|copies| after == 1 || after == before * copies) {
                let moe = moe::Config { top_k: before, ..sizes.moe.clone().unwrap() };
                let sizes = Sizes { moe: Some(moe.clone()), ..sizes.clone() };
                let mesh = if after == 1 { sliced(2, 2, 1) } else { ONE };
                on_mesh(mesh, |rank, mesh| {
                    let tape = Tape::inference(&rank.device);
                    let mut models: Vec<Model> = (0..copies).map(|_| trained(rank, mesh, &sizes)).collect();
                    let want = logits(&models[0], &sizes, mesh, &tape);
                    let config = moe::Config {
                        experts: moe.experts.map(|experts| copies * experts),
                        top_k: after,
                        ..moe.clone()
                    };
                    let (model, factors) = aggregate(&rank.device, &mut models, &config, mesh);
                    assert!(factors.iter().flat_map(|of| &of.factors).all(|factor| (factor - 1.0).abs() < 1e-15));
                    let what = format!("{what}, {copies} copies, top {before} to {after}");
                    near(&what, &logits(&model, &sizes, mesh, &tape), &want, ROUNDING);
                });
            }
        }
    }
}

#[test]
fn who_keeps_all_keeps_every_bit() {
    for (what, sizes) in kinds() {
        on_mesh(ONE, |rank, mesh| {
            let mut model = trained(rank, mesh, &sizes);
            let layers = gate_norms(&mut model).len();
            let mut same = prune(&rank.device, &mut model, &vec![(0..4).collect(); layers], mesh);
            let (was, is) = (tensors(&mut model), tensors(&mut same));
            assert!(was.keys().eq(is.keys()), "{what}");
            assert!(is.iter().all(|(name, values)| same_bits(values, &was[name])), "{what}");
            assert_eq!(same.sizes(), model.sizes());
        });
    }
}

#[test]
fn the_kept_move_up_and_take_their_rows_along() {
    for (what, sizes) in kinds() {
        on_mesh(ONE, |rank, mesh| {
            let mut model = trained(rank, mesh, &sizes);
            let names = gate_names(&weights(&mut model));
            // Another choice in each layer.
            let kept: Vec<Vec<usize>> = [vec![0, 2, 3], vec![0, 1, 3]].into_iter().cycle().take(names.len()).collect();
            let mut fewer = prune(&rank.device, &mut model, &kept, mesh);
            let (was, is) = (tensors(&mut model), tensors(&mut fewer));
            let mut gone: BTreeSet<String> = was.keys().cloned().collect();
            for (name, values) in &is {
                let layer = name.split_once(".block_sparse_moe.").map_or("", |(layer, _)| layer);
                let place = names.iter().position(|gate| gate.starts_with(&format!("{layer}.block_sparse_moe.")));
                let rows = |of: &[usize]| {
                    let width = was[name].len() / if name.ends_with("previous_load") { 5 } else { 4 };
                    of.iter().flat_map(|row| was[name][row * width..][..width].to_vec()).collect::<Vec<f32>>()
                };
                let (from, want) = match (expert_of(name), place) {
                    (Some((layer, expert, part)), Some(place)) => {
                        let from = format!("{layer}.experts.{}.{part}", kept[place][expert]);
                        (from.clone(), was[&from].clone())
                    }
                    (None, Some(place)) if is_gate(name) => (name.clone(), rows(&kept[place])),
                    (None, Some(place)) if name.ends_with("gate.previous_load") => {
                        (name.clone(), rows(&[&kept[place][..], &[4]].concat()))
                    }
                    _ => (name.clone(), was[name].clone()),
                };
                assert!(same_bits(values, &want), "{what}: {name}");
                gone.remove(&from);
            }
            let dropped: BTreeSet<&str> = gone.iter().map(|name| expert_of(name).expect("only experts go").0).collect();
            assert_eq!(dropped.len(), names.len(), "{what}: one expert of each layer");
        });
    }
}

/// If no token went to those that are gone, nothing has changed for any.
#[test]
fn experts_that_nobody_chose_may_go() {
    for (what, sizes) in families().map(ungrouped).into_iter().filter(|(_, sizes)| weighs_the_chosen(sizes)) {
        let moe = moe::Config { top_k: 1, ..with_experts(&sizes, 24, 0).moe.unwrap() };
        let sizes = Sizes { moe: Some(moe), ..sizes };
        on_mesh(ONE, |rank, mesh| {
            let recipe = Recipe { sizes: sizes.clone(), rows: 1, micro_batch: 1 };
            let (mut model, tape) = (trained(rank, mesh, &sizes), Tape::inference(&rank.device));
            let batch = &recipe.batches(mesh, 1).micro[0];
            let context = Context::of_inference(mesh, 1);
            let logits = |model: &Model| model.logits(&tape, batch, &context).unwrap().to_vec();
            let loads: Vec<Vec<u64>> = model
                .forward(&tape, batch, &context)
                .unwrap()
                .loads
                .into_iter()
                .map(|layer| layer.counts.load)
                .collect();
            let used = |load: &Vec<u64>| load.iter().filter(|&&routes| routes > 0).count();
            let keep = loads.iter().map(used).max().unwrap();
            assert!((2..20).contains(&keep), "{what}: {keep} of 24 are in use");
            let of_layer = |load: &Vec<u64>| largest(&load.iter().map(|&n| n as f64).collect::<Vec<_>>(), keep);
            let kept: Vec<Vec<usize>> = loads.iter().map(of_layer).collect();
            let fewer = prune(&rank.device, &mut model, &kept, mesh);
            near(what, &logits(&fewer), &logits(&model), ROUNDING);
        });
    }
}

#[test]
fn norms_are_those_of_the_rows_of_gates() {
    on_mesh(ONE, |rank, mesh| {
        let mut model = trained(rank, mesh, &m2m());
        let (norms, all) = (gate_norms(&mut model), weights(&mut model));
        let gates: Vec<&Vec<f32>> = gate_names(&all).iter().map(|name| &all[name]).collect();
        assert_eq!((norms.len(), gates.len()), (2, 2));
        for (norms, rows) in norms.iter().zip(gates) {
            for (norm, row) in norms.iter().zip(rows.chunks_exact(16)) {
                let want = size(row) * 4.0;
                assert!((norm / want - 1.0).abs() < 1e-12, "{norm}, {want}");
            }
        }
    });
}

/// Random rows, each with what it is a translation of.
struct Translations;

impl Source for Translations {
    fn len(&self) -> usize {
        7
    }

    fn seq(&self) -> usize {
        8
    }

    fn source_seq(&self) -> Option<usize> {
        Some(11)
    }

    fn get(&self, index: usize, _: u64) -> Result<Row, data::Error> {
        let draws = Draws::new(6, Purpose::Test, 0, index as u32);
        let text = |from: u64, len: u64| {
            Row::of_document(&(from..from + len).map(|i| draws.bits(i) % 31).collect::<Vec<u32>>())
        };
        Ok(Row { source: Some(Box::new(text(100, 11))), ..text(0, 8) })
    }

    fn fingerprint(&self) -> String {
        String::new()
    }
}

/// SplitMix64's finaliser, written from docs/gates.md: the expert of a token, by its number.
fn hashed(token: u32, experts: u64) -> usize {
    let mut z = u64::from(token).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % experts) as usize
}

/// Where tokens go by their numbers, anybody can count.
#[test]
fn loads_are_what_one_counts_by_hand() {
    let by_number = |sizes: Sizes| {
        let moe = moe::Config { gate: GateKind::Hash.into(), top_k: 1, ..sizes.moe.unwrap() };
        Sizes { moe: Some(moe), ..sizes }
    };
    let cases: [(Sizes, Arc<dyn Source>); 2] =
        [(by_number(mixtral()), Arc::new(Documents)), (by_number(m2m()), Arc::new(Translations))];
    for (sizes, source) in &cases {
        for rows in [7, 5] {
            let rows_read = || (0..rows).map(|index| source.get(index, 0).unwrap());
            let count = |tokens: Vec<u32>| {
                let mut load = vec![0.0; 4];
                tokens.iter().for_each(|&token| load[hashed(token, 4)] += 1.0);
                load
            };
            let targets = count(rows_read().flat_map(|row| row.tokens).collect());
            let read = count(rows_read().filter_map(|row| row.source).flat_map(|row| row.tokens).collect());
            let want = if source.source_seq().is_some() { vec![read, targets] } else { vec![targets.clone(), targets] };
            for mesh in [ONE, shape(2, 2), sliced(2, 2, 1), shape(4, 2)] {
                let loads = on_mesh(mesh, |rank, mesh| {
                    let model = Model::new(&rank.device, sizes, mesh);
                    held_out_loads(&model, &rank.device, mesh, &whole(source), (rows, 3)).unwrap()
                });
                assert!(loads.iter().all(|loads| *loads == want), "{mesh:?}: {loads:?}, not {want:?}");
            }
        }
    }
}

/// All of it in one part.
fn whole(rows: &Arc<dyn Source>) -> Vec<HeldOutPart> {
    vec![HeldOutPart { label: None, counts: true, rows: rows.clone() }]
}

/// A gate that learns tells nobody where tokens go; but the mesh must not matter, and each token chooses `top_k`.
#[test]
fn loads_are_the_same_on_every_mesh() {
    let count = |shape| {
        let loads = on_mesh(shape, |rank, mesh| {
            let model = Model::new(&rank.device, &mixtral(), mesh);
            held_out_loads(&model, &rank.device, mesh, &whole(&(Arc::new(Documents) as Arc<dyn Source>)), (7, 4))
                .unwrap()
        });
        assert!(loads.iter().all(|others| *others == loads[0]), "ranks agree");
        loads.into_iter().next().unwrap()
    };
    let one = count(ONE);
    assert!(one.iter().all(|load| load.iter().sum::<f64>() == 7.0 * 8.0 * 2.0), "{one:?}");
    assert_eq!(count(shape(2, 2)), one);
    assert_eq!(count(sliced(4, 2, 2)), one);
}

// --- through the program ----------------------------------------------------------------------------------------

const STEPS: &str = "--set train.steps=4 --set train.eval_every=0 --set train.checkpoint_every=0";

/// A workshop with runs `a` and `b`, which began with other weights.
fn with_two_runs(options: &str) -> Workshop {
    let shop = Workshop::new();
    for (run, seed) in [("a", 1), ("b", 2)] {
        shop.train(&format!("--set run.dir={run} --set train.seed={seed} {STEPS} {options}"));
    }
    shop
}

/// What every checkpoint is good for: it evaluates, generates, and begins a run on other ranks.
fn is_of_use(shop: &Workshop, checkpoint: &str, experts: usize) {
    let finished = shop.succeeds(&format!("evaluate {checkpoint}"));
    let told: serde_json::Value = serde_json::from_str(&finished.out).unwrap();
    let loss = told["eval_loss"].as_f64().unwrap();
    // Of 300 tokens, and four steps of training.
    assert!((3.0..6.5).contains(&loss), "{checkpoint}: {loss}");
    shop.succeeds(&format!("generate {checkpoint} --prompt the --tokens 5"));
    let on = format!("{checkpoint}-on");
    let begin = format!("train {checkpoint}/config.toml --set train.init={checkpoint} --set run.dir={on} {STEPS}");
    shop.succeeds(&format!("{begin} --ranks 2 --set parallel.expert=2"));
    let first = shop.series(&on, "loss")[0].as_f64().unwrap();
    assert!((first - loss).abs() < 0.5, "{first} after a held-out {loss}");
    let loads = shop.metrics(&on)[0]["moe"][0]["load"].as_array().unwrap().len();
    assert_eq!(loads, experts);
}

#[test]
fn two_runs_become_one_model() {
    let shop = with_two_runs("--ranks 2 --set parallel.expert=2");
    let finished = shop.succeeds("surgery aggregate a b -o out/both");
    assert_eq!(finished.out, "out/both\n");
    let words = ["a/checkpoints/step-000004, of step 4: experts 0 to 3", "b/checkpoints/step-000004", "experts 4 to 7"];
    for words in
        words.into_iter().chain(["layer 0: rows times", "layer 1: rows times", "AdamW", "run.dir=a-aggregated"])
    {
        assert!(finished.err.contains(words), "no {words:?} in {}", finished.err);
    }
    assert!(!shop.path("out/both/optimizer.safetensors").exists());
    is_of_use(&shop, "out/both", 8);
    // Three, one of which is an aggregate: 4 + 8 + 4 experts.
    shop.succeeds("surgery aggregate a out/both b/checkpoints/latest -o three --set moe.top_k=3");
    is_of_use(&shop, "three", 16);
    let loaded = guildhall::config::load(&shop.path("three/config.toml"), &[], None).unwrap();
    let moe = loaded.config.moe.unwrap();
    assert_eq!((moe.experts, moe.top_k, loaded.config.train.init), (PerLayer::Same(16), 3, None));
}

#[test]
fn experts_are_kept_by_use_by_gate_and_by_chance() {
    let shop = with_two_runs("--ranks 4 --set parallel.expert=4");
    let finished = shop.succeeds("surgery prune a --keep 3 -o by-use");
    assert_eq!(finished.out, "by-use\n");
    let words = ["3 of 4 experts stay", "layer 0: experts", "layer 1: experts", "% of its", "run.dir=a-pruned"];
    for words in words.into_iter().chain(["parallel.expert = 4", "does not divide --keep 3; 1 is used instead"]) {
        assert!(finished.err.contains(words), "no {words:?} in {}", finished.err);
    }
    let share = |err: &str| {
        let line = err.lines().find(|line| line.contains("layer 0")).unwrap();
        let (_, rest) = line.split_once("which had ").unwrap();
        rest.split_once(" %").unwrap().0.parse::<f64>().unwrap()
    };
    let most = share(&finished.err);
    assert!((75.0..=100.0).contains(&most), "the three most used of four: {most} %");
    // The mesh that measures does not matter, nor a capacity.
    for options in ["--ranks 1", "--set moe.capacity_factor=0.5"] {
        let again = shop.succeeds(&format!("surgery prune a/checkpoints/latest --keep 3 {options} -o again"));
        assert_eq!(share(&again.err), most, "{options}");
        let bytes = |folder: &str| std::fs::read(shop.path(folder).join("model.safetensors")).unwrap();
        assert!(bytes("again") == bytes("by-use"), "{options}");
        std::fs::remove_dir_all(shop.path("again")).unwrap();
    }
    shop.succeeds("train by-use/config.toml --set train.init=by-use --set run.dir=c --set train.steps=1 --ranks 3 --set parallel.expert=3 --set train.batch_tokens=288 --set train.micro_batch=9");
    // Without a corpus, what needs no text still works.
    std::fs::remove_dir_all(shop.path("cache")).unwrap();
    std::fs::rename(shop.path("corpus"), shop.path("elsewhere")).unwrap();
    let by_gate = shop.succeeds("surgery prune a --keep 2 --by gate --rows 0 -o by-gate");
    assert!(by_gate.err.contains("layer 1: experts") && !by_gate.err.contains('%'), "{}", by_gate.err);
    let kept = |seed: u64| {
        let chance = format!("surgery prune a --keep 2 --by random --seed {seed} --rows 0 -o chance-{seed}");
        let lines: Vec<String> = shop.succeeds(&chance).err.lines().map(str::to_owned).collect();
        lines.into_iter().filter(|line| line.starts_with("kept")).collect::<Vec<_>>()
    };
    assert!((2..10).any(|seed| kept(seed) != kept(100 + seed)), "other seeds draw other experts");
    shop.fails("surgery prune a --keep 2 -o out", 2, &["corpus"]);
    assert!(!shop.path("out").exists());
    std::fs::rename(shop.path("elsewhere"), shop.path("corpus")).unwrap();
    is_of_use(&shop, "by-gate", 2);
    is_of_use(&shop, "chance-2", 2);
}

/// A table of experts that are gone would be refused by the new recipe.
#[test]
fn who_held_which_expert_is_forgotten() {
    let shop = with_two_runs("--ranks 2 --set parallel.expert=2 --set parallel.expert_table=[0,1,1,1]");
    let finished = shop.succeeds("surgery prune a --keep 2 -o few");
    assert!(finished.err.contains("parallel.expert_table") && finished.err.contains("left out"), "{}", finished.err);
    let finished = shop.succeeds("surgery prune a --keep 4 -o all");
    assert!(!finished.err.contains("left out"), "{}", finished.err);
    shop.succeeds("surgery aggregate few few all -o many");
    let expert = |folder: &str| {
        let config = guildhall::config::load(&shop.path(folder).join("config.toml"), &[], None).unwrap().config;
        (config.moe.unwrap().experts.largest(), config.parallel.expert.to_string(), config.parallel.expert_table)
    };
    assert_eq!(expert("few"), (2, "2".to_owned(), None));
    assert_eq!(expert("all"), (4, "2".to_owned(), Some(vec![0, 1, 1, 1])));
    assert_eq!(expert("many"), (8, "2".to_owned(), None));
}

#[test]
fn what_cannot_be_one_model_is_refused_with_all_that_differs() {
    let shop = with_two_runs("");
    let other = "--set run.dir=other --set model.d_model=32 --set moe.balance_weight=0.5 --set train.dtype=bf16 \
                 --set model.vocab=290 --set model.seq=16";
    shop.train(&format!("{STEPS} {other}"));
    shop.train(&format!("{STEPS} --set run.dir=firm --set moe.balance_weight=0.5"));
    shop.train(&format!("{STEPS} --set run.dir=hashed --set moe.gate=hash"));
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
    shop.succeeds(&format!("train dense.toml --set run.dir=dense {STEPS}"));
    let all = [
        "different models than a/checkpoints/step-000004",
        "model.d_model is 32 in other/checkpoints/step-000004, 16 there",
        "model.vocab is 290",
        "model.seq is 16",
        "moe.balance_weight is 0.5",
        "train.dtype is \"bf16\"",
        "tokenizer.json of other",
        "with --set",
    ];
    let cases: &[(&str, i32, &[&str])] = &[
        ("aggregate a other -o out", 2, &all),
        ("aggregate a b firm -o out", 2, &["moe.balance_weight is 0.5 in firm", "0.01 there"]),
        ("aggregate a dense -o out", 2, &["dense/checkpoints/step-000004 has no experts", "surgery upcycle"]),
        ("aggregate a nowhere -o out", 2, &["nowhere is not a checkpoint"]),
        ("aggregate a -o out", 2, &["2 values required"]),
        ("aggregate a b", 2, &["--output"]),
        ("aggregate a b -o b", 2, &["b exists already"]),
        ("aggregate a b -o out --set moe.experts=9", 2, &["--set moe.experts=9", "leave it out"]),
        ("aggregate a b -o out --set moe.top_k=9", 2, &["moe.top_k = 9", "moe.experts"]),
        ("aggregate a b -o a/config.toml/out", 1, &["a/config.toml"]),
        ("prune a --keep 1 -o out", 2, &["--keep 1", "moe.top_k = 2 of 4", "keep from 2 to 4"]),
        ("prune a --keep 0 -o out", 2, &["keep from 2 to 4"]),
        ("prune a --keep 5 -o out", 2, &["keep from 2 to 4"]),
        ("prune a --keep -1 -o out", 2, &["-1"]),
        ("prune a -o out", 2, &["--keep"]),
        ("prune a --keep 2 --by luck -o out", 2, &["luck", "utilization, gate, random"]),
        ("prune a --keep 2 --seed 1 -o out", 2, &["--seed", "--by random"]),
        ("prune a --keep 2 --rows 0 -o out", 2, &["--rows 0", "--by gate"]),
        ("prune a --keep 2 --by gate --rows 0 --ranks 2 -o out", 2, &["--ranks", "--rows 0"]),
        ("prune a --keep 2 --set moe.experts=3 -o out", 2, &["--set moe.experts=3", "--keep"]),
        ("prune a --keep 3 --set parallel.ranks=2 --set parallel.expert=2 -o out", 2, &["does not divide", "= 3"]),
        ("prune a --keep 2 -o b", 2, &["b exists already"]),
        ("prune dense --keep 2 -o out", 2, &["has no experts"]),
        ("prune hashed --keep 2 -o out", 2, &["\"hash\"", "another expert"]),
        ("prune nowhere --keep 2 -o out", 2, &["nowhere is not a checkpoint"]),
    ];
    for (arguments, code, words) in cases {
        shop.fails(&format!("surgery {arguments}"), *code, words);
        assert!(!shop.path("out").exists(), "{arguments} left something");
    }
    // What has no part in the tensors may be set for all.
    shop.succeeds("surgery aggregate a firm -o out --set moe.balance_weight=0.2");
    let path = shop.path("b/checkpoints/latest/model.safetensors");
    flip(&path, std::fs::metadata(&path).unwrap().len() as usize / 2);
    for damaged in ["aggregate a b", "prune b --keep 2"] {
        shop.fails(&format!("surgery {damaged} -o more"), 2, &["damaged"]);
    }
}

/// Gates with groups want a number that these divide.
#[test]
fn keys_that_do_not_fit_the_experts_left_are_named() {
    let shop = Workshop::new();
    shop.train(
        &format!("{STEPS} --set run.dir=a --set 'moe.gate={{kind=\"sigmoid\",groups=2,top_groups=1}}'")
            .replace('\'', ""),
    );
    shop.fails("surgery prune a --keep 3 -o out", 2, &["moe.gate.groups = 2", "moe.experts = 3"]);
    shop.succeeds("surgery prune a --keep 2 --by gate -o out --set moe.gate.groups=1");
}

#[test]
fn upcycling_is_moefying() {
    let shop = Workshop::new();
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
    shop.succeeds(&format!("train dense.toml --set run.dir=dense {STEPS}"));
    shop.succeeds("surgery moefy dense/checkpoints/latest --experts 4 -o one");
    shop.succeeds("surgery upcycle dense --experts 4 -o other");
    let bytes = |folder: &str| std::fs::read(shop.path(folder).join("model.safetensors")).unwrap();
    assert!(bytes("one") == bytes("other"));
}
