//! Layers with different numbers of experts: they learn the same on every mesh, are recorded and replayed, and are what
//! pruning over all layers leaves; recipes that cannot be are refused before the first step.

use std::path::Path;

use guildhall::config;
use guildhall::model::{Sizes, count};
use guildhall::moe::gates::{SigmoidKeys, SwipeKeys};
use guildhall::moe::{self, BalanceScope, GateChoice, GateKind, ScheduleKind};
use guildhall::parallel::{Mesh, PerLayer, Zero};
use guildhall::surgery::{ExpertsToKeep, Pruning, gate_norms, multiples_of_means, prune};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::parity::{compare, run, train_on};
use crate::program::{RECIPE, RUN, Workshop};
use crate::task_recipes;
use crate::tiny::{Recipe, bert, m2m, mixtral, nllb, weights, with};
use crate::world::{ONE, on_mesh, shape, sliced, whole_experts};

fn uneven(sizes: Sizes, experts: [usize; 2]) -> Sizes {
    with(sizes, |moe| moe.experts = PerLayer::Each(experts.to_vec()))
}

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 6, micro_batch: 6 }
}

/// By hand: a router's row and three matrices for each expert, of which a token uses two a layer.
#[test]
fn parameters_are_counted_layer_by_layer() {
    let even = count(&mixtral());
    let (router, expert) = (16, 3 * 12 * 16);
    for experts in [[4, 2], [2, 7], [3, 3]] {
        let counts = count(&uneven(mixtral(), experts));
        let all: u64 = experts.iter().map(|&n| n as u64).sum();
        assert_eq!(counts.experts, all * expert, "{experts:?}");
        assert_eq!(counts.total, even.total - 8 * (router + expert) + all * (router + expert), "{experts:?}");
        assert_eq!(counts.active, counts.total - (all - 4) * expert, "{experts:?}");
    }
}

/// Gates whose keys or losses are of the number of experts.
fn gates() -> Vec<(&'static str, Sizes)> {
    let of = |sizes: Sizes, change: &dyn Fn(&mut moe::Config)| uneven(with(sizes, |moe| change(moe)), [4, 2]);
    let grouped = SigmoidKeys { groups: 2, top_groups: 1, bias_rate: 0.01, ..SigmoidKeys::default() };
    vec![
        ("noisy", of(mixtral(), &|moe| moe.gate = GateKind::Noisy.into())),
        ("hash", of(mixtral(), &|moe| moe.gate = GateKind::Hash.into())),
        ("swipe", of(mixtral(), &|moe| moe.gate = GateChoice::Swipe(SwipeKeys { workers: 2 }))),
        ("groups", of(mixtral(), &|moe| (moe.gate, moe.top_k) = (GateChoice::Sigmoid(grouped.clone()), 1))),
        ("loads of a step", of(mixtral(), &|moe| moe.balance_scope = Some(BalanceScope::GlobalBatch))),
        ("places", of(mixtral(), &|moe| (moe.capacity_factor, moe.group_tokens) = (Some(1.0), Some(16)))),
        ("experts choose", of(bert(), &|moe| moe.gate = GateKind::ExpertChoice.into())),
        ("shadows", of(mixtral(), &|moe| (moe.shadowing, moe.schedule) = ("force:2".into(), ScheduleKind::Smart))),
    ]
}

#[test]
fn uneven_layers_train_alike_on_every_mesh() {
    let mut cases = gates();
    cases.extend([
        ("mixtral", uneven(mixtral(), [4, 2])),
        ("more later", uneven(mixtral(), [2, 8])),
        ("nllb", uneven(nllb(), [2, 4])),
        ("m2m", uneven(m2m(), [4, 2])),
    ]);
    let meshes = [shape(2, 2), shape(4, 2), sliced(2, 2, 1), sliced(4, 2, 2), whole_experts(4, 2, 2)];
    for (name, sizes) in cases {
        let recipe = recipe(sizes);
        let want = run(&recipe, ONE);
        for mesh in meshes.into_iter().filter(|mesh| name != "shadows" || mesh.tensor == 1) {
            compare(&format!("{name} on {mesh:?}"), &run(&recipe, mesh), &want);
        }
    }
}

/// Each layer on as many ranks as share its experts evenly.
#[test]
fn layers_spread_as_many_experts_as_they_have() {
    for (sizes, experts, degrees, ranks) in [
        (mixtral(), [4, 2], [4, 2], 4),
        (mixtral(), [3, 4], [1, 4], 4),
        (mixtral(), [3, 2], [3, 2], 6),
        (nllb(), [5, 4], [1, 2], 2),
    ] {
        let recipe = recipe(uneven(sizes, experts));
        let want = run(&recipe, ONE);
        let degrees =
            |mesh: &Mesh| Mesh::of_degrees(mesh.world.clone(), shape(ranks, 1), PerLayer::Each(degrees.into()));
        for zero in Zero::ALL {
            let got = train_on(&recipe, shape(ranks, 1), |_, mesh| degrees(mesh).unwrap().with_zero(zero), |_| ());
            compare(&format!("{experts:?} experts on {ranks} ranks, {zero:?}"), &got, &want);
        }
    }
}

#[test]
fn stages_change_no_bit_of_uneven_layers() {
    for (sizes, mesh) in [(mixtral(), shape(4, 2)), (m2m(), sliced(4, 2, 1))] {
        let recipe = recipe(uneven(sizes, [4, 2]));
        let train = |zero| train_on(&recipe, mesh, |_, mesh| mesh.clone().with_zero(zero), |_| ());
        let want = train(Zero::Off);
        assert!(Zero::ALL.into_iter().all(|zero| train(zero) == want), "{mesh:?}");
    }
}

/// The experts that a loop over all gates names: of each layer the best two, and of all others the best, a row's norm
/// measured by the mean of its layer.
#[test]
fn pruning_over_all_layers_keeps_whom_a_loop_names() {
    for (sizes, keep) in [(mixtral(), 3), (m2m(), 3), (uneven(mixtral(), [2, 7]), 3)] {
        on_mesh(ONE, |rank, mesh| {
            let recipe = recipe(sizes.clone());
            let mut trainer = recipe.trainer(rank, mesh);
            recipe.train(&mut trainer, 1..=2);
            let scores = multiples_of_means(&gate_norms(&mut trainer.model));
            let mut named: Vec<Vec<usize>> = Vec::new();
            for layer in &scores {
                let better = |expert: usize| layer.iter().filter(|&&other| other > layer[expert]).count();
                named.push((0..layer.len()).filter(|&expert| better(expert) < 2).collect());
            }
            while named.iter().map(Vec::len).sum::<usize>() < 2 * keep {
                let mut best = (f64::MIN, 0, 0);
                for (place, layer) in scores.iter().enumerate() {
                    for (expert, &score) in layer.iter().enumerate() {
                        if !named[place].contains(&expert) && score > best.0 {
                            best = (score, place, expert);
                        }
                    }
                }
                named[best.1].push(best.2);
                named[best.1].sort_unstable();
            }
            assert_eq!(guildhall::surgery::largest_of_all(&scores, 2 * keep, 2), named);
            let was = weights(&mut trainer.model);
            let mut fewer = prune(&rank.device, &mut trainer.model, &named, mesh);
            let is = weights(&mut fewer);
            assert_eq!(
                fewer.sizes().moe_layers().map(|(_, moe)| moe.experts).collect::<Vec<_>>(),
                [named[0].len(), named[1].len()]
            );
            let gates = was.keys().filter(|name| name.ends_with("gate.weight"));
            let mut gates: Vec<&str> = gates.map(|name| name.strip_suffix("gate.weight").unwrap()).collect();
            gates.sort_by_key(|name| name.contains(".decoder."));
            for (layer, kept) in gates.iter().zip(&named) {
                for (now, then) in kept.iter().enumerate() {
                    let row = |of: &[f32], row: usize| of[16 * row..][..16].to_vec();
                    let gate = format!("{layer}gate.weight");
                    assert_eq!(row(&is[&gate], now), row(&was[&gate], *then), "{gate}");
                    let of = |expert: usize| format!("{layer}experts.{expert}.");
                    let parts = is.iter().filter(|(name, _)| name.starts_with(&of(now)));
                    let same = parts.map(|(name, values)| values == &was[&name.replace(&of(now), &of(*then))]);
                    let same: Vec<bool> = same.collect();
                    assert!(same.len() > 1 && same.iter().all(|&same| same), "{layer} {now}");
                }
            }
        });
    }
}

// --- through the program ----------------------------------------------------------------------------------------

/// A run of the recipe with layers of four and three experts.
fn with_a_run(options: &str) -> Workshop {
    let shop = Workshop::new();
    shop.train(&format!("--set moe.experts=[4,3] {options}"));
    shop
}

fn experts(path: &Path) -> String {
    config::load(path, &[], None).unwrap().config.moe.unwrap().experts.to_string()
}

/// The numbers of routes of each expert in a line of metrics.
fn loads(line: &Value) -> Vec<usize> {
    line["moe"].as_array().unwrap().iter().map(|layer| layer["load"].as_array().unwrap().len()).collect()
}

#[test]
fn a_list_trains_resumes_and_is_told() {
    let constant = "--set train.schedule=constant";
    let shop = with_a_run(constant);
    let kept = shop.path("runs/tiny/config.toml");
    assert_eq!(experts(&kept), "[4, 3]");
    assert!(shop.read("runs/tiny/config.toml").contains("experts = [4, 3]"));
    assert_eq!(loads(&shop.metrics(RUN)[0]), [4, 3]);
    assert!(
        shop.run(&format!("train {RECIPE} --set moe.experts=[4,3] --set run.dir=b")).err.contains("[4, 3] experts")
    );
    // On other ranks, layer by layer, to the end of the run that was not stopped.
    let begin = format!("--set moe.experts=[4,3] --set run.dir=c {constant}");
    shop.train(&format!("{begin} --set train.steps=2"));
    shop.train(&format!("{begin} --resume"));
    assert_eq!(shop.series("c", "loss"), shop.series(RUN, "loss"));
    assert_eq!(shop.tensors("c", 6), shop.tensors(RUN, 6));
    shop.train(&format!("--set moe.experts=[4,3] --set run.dir=d --ranks 2 --set parallel.expert=[2,1] {constant}"));
    let near = |(a, b): (&Value, &Value)| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4;
    assert!(shop.series("d", "loss").iter().zip(&shop.series(RUN, "loss")).all(near));
    assert_eq!(shop.metrics("d")[0]["moe"][1]["load"], shop.metrics(RUN)[0]["moe"][1]["load"]);
    shop.fails(
        "train tiny.toml --resume --set train.schedule=constant --set moe.experts=4",
        2,
        &["moe.experts: was [4, 3], now 4"],
    );
    shop.fails(
        &format!("train tiny.toml --set run.dir=e --set train.init={RUN}/checkpoints/latest"),
        2,
        &["moe.experts is [4, 3] there, 4 in the recipe"],
    );
    // A list of equal numbers is the number.
    shop.train(&format!("--set moe.experts=[4,4] --set run.dir=even {constant}"));
    assert_eq!(experts(&shop.path("even/config.toml")), "4");
    shop.train(&format!("--set run.dir=even --resume --set train.steps=7 {constant}"));
    shop.succeeds(&format!("evaluate {RUN}/checkpoints/latest"));
    shop.succeeds(&format!("generate {RUN}/checkpoints/latest --prompt the --tokens 5"));
    shop.succeeds(&format!("report {RUN}"));
}

#[test]
fn uneven_recordings_are_replayed_on_any_mesh_and_planned() {
    let shop = with_a_run("--set moe.record=routes");
    let followed = |options: &str, run: &str| {
        shop.train(&format!("--set moe.experts=[4,3] --set moe.replay=routes --set run.dir={run} {options}"));
        let routed = shop.routed(run).0;
        assert_eq!(routed, shop.routed(RUN).0, "{options}");
    };
    followed("", "alone");
    assert_eq!(shop.series("alone", "loss"), shop.series(RUN, "loss"));
    followed("--ranks 4 --set parallel.expert=[4,1]", "spread");
    shop.fails("train tiny.toml --set run.dir=x --set moe.replay=routes", 2, &["moe.experts: [4, 3] there, 4 here"]);
    shop.train("--set run.dir=even --set moe.record=even-routes");
    let other = "train tiny.toml --set run.dir=x --set moe.replay=even-routes --set moe.experts=[4,3]";
    shop.fails(other, 2, &["moe.experts: 4 there, [4, 3] here"]);
    shop.succeeds("plan runs/tiny/config.toml --imbalance recorded:routes --ranks 2 --set parallel.expert=[2,1]");
    // Experts that choose have as many choices as there are experts.
    let chosen =
        "--set model.family=bert --set moe.gate=expert_choice --set moe.experts=[4,3] --set data.mask_rate=0.3";
    shop.train(&format!("{chosen} --set run.dir=f --set moe.record=chosen"));
    shop.train(&format!("{chosen} --set run.dir=g --set moe.replay=chosen --ranks 2"));
    assert_eq!(shop.routed("f").0, shop.routed("g").0);
}

#[test]
fn impossible_lists_are_refused_in_one_message() {
    let shop = Workshop::new();
    let cases: &[(&str, &[&str])] = &[
        ("moe.experts=[4,3,2]", &["1 problem", "moe.experts = [4, 3, 2]", "a list of 3, but 2 layers have experts"]),
        ("moe.experts=[4]", &["1 problem", "a list of 1, but 2 layers have experts", "one number for all"]),
        ("moe.experts=[]", &["1 problem", "a list of 0, but 2 layers"]),
        ("moe.experts=[4,0]", &["1 problem", "moe.experts = [4, 0]", "the nearest valid value is 1"]),
        ("moe.experts=[4,1]", &["1 problem", "moe.top_k = 2", "more than the 1 experts of a layer", "value is 1"]),
        ("moe.experts=many", &["1 problem", "a whole number, or a list of one for each layer with experts"]),
        ("moe.experts=[4,3] moe.shadowing=force:4 parallel.ranks=1", &["than the 3 experts of a layer", "force:3"]),
        ("moe.experts=[4,3] moe.dialect=hf", &["1 problem", "moe.dialect", "different numbers", "megatron"]),
        (
            "moe.experts=[4,3] moe.gate=swipe moe.gate.workers=2",
            &["does not divide moe.experts = [4, 3]", "value is 1"],
        ),
        (
            "moe.experts=[4,3] parallel.ranks=2 parallel.expert=2",
            &["1 problem", "the 3 experts of layer 1 (moe.experts)", "a list of one for each layer"],
        ),
        (
            "moe.experts=[4,3] parallel.ranks=4 parallel.expert=[4,2]",
            &["1 problem", "2 of layer 1 does not divide the 3 experts of layer 1"],
        ),
        (
            "moe.experts=[4,2] parallel.ranks=2 parallel.expert=2 parallel.expert_table=[0,1,0,1]",
            &["1 problem", "parallel.expert_table", "layers of as many, not of moe.experts = [4, 2]", "leave it out"],
        ),
    ];
    for (set, words) in cases {
        let set: Vec<String> = set.split(' ').map(|set| format!("--set {set}")).collect();
        shop.fails(&format!("train {RECIPE} {}", set.join(" ")), 2, words);
        assert!(!shop.path("runs").exists(), "{set:?}");
    }
    let written =
        shop.read(RECIPE).replace("experts = 4", "experts = [4, 2]").replace("heads = 2", "heads = 2\nkv_heads = 2");
    shop.write("list.toml", &written);
    shop.succeeds("train list.toml --ranks 2 --set parallel.expert=2 --set parallel.zero=3 --set train.steps=1");
}

/// Expert tensors of a checkpoint, by layer.
fn held(shop: &Workshop, folder: &str) -> Vec<usize> {
    let bytes = std::fs::read(shop.path(folder).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let gates = tensors.names().into_iter().filter(|name| name.ends_with("gate.weight"));
    let mut gates: Vec<&str> = gates.collect();
    gates.sort_unstable_by_key(|name| (name.contains(".decoder."), *name));
    gates.into_iter().map(|name| tensors.tensor(name).unwrap().shape()[0]).collect()
}

#[test]
fn what_is_pruned_over_all_layers_is_a_model_like_any() {
    let shop = Workshop::new();
    shop.train("--set moe.experts=8 --ranks 2 --set parallel.expert=2 --set train.steps=4");
    let told = shop.succeeds(&format!("surgery prune {RUN} --keep 4 --global -o few")).err;
    assert!(told.contains("8 of 16 experts stay, 2 or more in each layer"), "{told}");
    let kept = held(&shop, "few");
    assert_eq!(kept.iter().sum::<usize>(), 8, "{told}");
    assert!(kept.iter().all(|&experts| experts >= 2));
    let listed = experts(&shop.path("few/config.toml"));
    assert_eq!(listed, PerLayer::of_each(kept.clone()).to_string());
    for line in ["kept     layer 0: experts ", "kept     layer 1: experts "] {
        assert!(told.contains(line), "{told}");
    }
    shop.succeeds("evaluate few");
    shop.succeeds("generate few --prompt the --tokens 5");
    // By chance, so that layers differ whatever was learned.
    let by_chance = |seed: u64| {
        let folder = format!("chance{seed}");
        shop.succeeds(&format!("surgery prune {RUN} --keep 4 --global --by random --seed {seed} --rows 0 -o {folder}"));
        (held(&shop, &folder)[0] % 2 == 1).then_some(folder)
    };
    let odd = (0..40).find_map(by_chance).expect("an odd number of experts by some seed");
    // Each layer on as many ranks as it can.
    let degrees = config::load(&shop.path(&odd).join("config.toml"), &[], None).unwrap().config.parallel.expert;
    assert_eq!(degrees, PerLayer::Same(1), "two ranks share no odd number, and both are odd");
    let begin = format!(
        "train {odd}/config.toml --set train.init={odd} --set train.eval_every=0 --set train.schedule=constant"
    );
    for (run, options) in
        [("one", "--ranks 1"), ("two", "--ranks 2 --set parallel.zero=3"), ("cut", "--ranks 2 --set parallel.tensor=2")]
    {
        shop.succeeds(&format!("{begin} --set run.dir={run} {options}"));
        assert_eq!(loads(&shop.metrics(run)[0]), held(&shop, &odd));
        let near = |(a, b): (&Value, &Value)| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4;
        assert!(shop.series(run, "loss").iter().zip(&shop.series("one", "loss")).all(near), "{run}");
    }
    // Stopped and resumed, it ends where it would have.
    shop.succeeds(&format!("{begin} --set run.dir=half --ranks 2 --set parallel.zero=3 --set train.steps=2"));
    shop.succeeds("train half/config.toml --resume --set train.steps=4");
    assert_eq!(shop.series("half", "loss"), shop.series("two", "loss"));
    assert_eq!(shop.tensors("half", 4), shop.tensors("two", 4));
    // Pruned again, alike and over all layers, and joined layer by layer.
    shop.succeeds(&format!("surgery prune {odd} --keep 2 -o fewer"));
    assert_eq!(held(&shop, "fewer"), [2, 2]);
    let most = held(&shop, &odd).into_iter().min().unwrap();
    let wrong = format!("surgery prune {odd} --keep {} -o out", most + 1);
    shop.fails(&wrong, 2, &["--keep", &format!("to {most}, of which every layer has so many"), "--global"]);
    shop.fails(&format!("surgery prune {odd} --keep 5 --global -o out"), 2, &["keep from 2 to 4"]);
    shop.fails(&format!("surgery prune {odd} --keep 1 --global -o out"), 2, &["keep from 2 to 4"]);
    shop.succeeds(&format!("surgery prune {odd} --keep 3 --global -o fewest"));
    assert_eq!(held(&shop, "fewest").iter().sum::<usize>(), 6);
    let told = shop.succeeds(&format!("surgery aggregate {odd} few fewest -o joined")).err;
    let sum = |folders: &[&str]| {
        let all = folders.iter().map(|folder| held(&shop, folder));
        all.reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect()).unwrap()
    };
    assert_eq!(held(&shop, "joined"), sum(&[&odd, "few", "fewest"]), "{told}");
    shop.succeeds("evaluate joined");
}

#[test]
fn both_stacks_are_pruned_together_and_translate() {
    let shop = task_recipes::shop();
    shop.succeeds("train tasks.toml");
    let prune = |seed: u64| {
        let folder = format!("few{seed}");
        let chance = format!("--by random --seed {seed} --rows 0");
        shop.succeeds(&format!("surgery prune {} --keep 3 --global {chance} -o {folder}", task_recipes::RUN));
        (held(&shop, &folder) == [4, 2]).then_some(folder)
    };
    let few = (0..60).find_map(prune).expect("the encoder keeps all by some seed");
    assert_eq!(experts(&shop.path(&few).join("config.toml")), "[4, 2]");
    shop.succeeds(&format!("evaluate {few}"));
    shop.write("lines.txt", "the dog sleeps here.\n");
    shop.succeeds(&format!("translate {few} --from en --to de lines.txt --max-tokens 6 --beams 2"));
    let begin = format!("train {few}/config.toml --set train.init={few} --set train.steps=2");
    shop.succeeds(&format!("{begin} --set run.dir=on --ranks 2 --set parallel.expert=2"));
    assert_eq!(loads(&shop.metrics("on")[0]), [4, 2]);
    shop.succeeds("train tasks.toml --set run.dir=list --set moe.experts=[2,5] --set train.steps=1");
}

/// Ranks that count are also those of the recipe where the command says what they do there.
#[test]
fn ranks_beside_keys_of_the_mesh_are_a_part_of_it() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    shop.succeeds(&format!("surgery prune {RUN} --keep 2 --ranks 4 --set parallel.expert=2 -o four"));
    let parallel =
        |folder: &str| config::load(&shop.path(folder).join("config.toml"), &[], None).unwrap().config.parallel;
    assert_eq!((parallel("four").ranks, parallel("four").expert), (4, PerLayer::Same(2)));
    shop.succeeds(&format!("surgery prune {RUN} --keep 2 --ranks 4 -o one"));
    assert_eq!((parallel("one").ranks, parallel("one").expert), (1, PerLayer::Same(1)));
    let bytes = |folder: &str| std::fs::read(shop.path(folder).join("model.safetensors")).unwrap();
    assert!(bytes("four") == bytes("one"));
    let impossible = format!("surgery prune {RUN} --keep 2 --ranks 4 --set parallel.expert=3 -o out");
    shop.fails(&impossible, 2, &["parallel.expert = 3", "parallel.ranks = 4"]);
}

/// Over all layers, a layer keeps as many experts as a token goes to, however little they are used.
#[test]
fn no_layer_is_left_with_fewer_experts_than_routes() {
    let shop = Workshop::new();
    shop.train("--set train.steps=1");
    let wanted = ExpertsToKeep { experts: 2, is_global: true };
    let pruning = Pruning::open(&shop.path(RUN), &[], None, wanted).unwrap();
    let scores = [vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 20.0, 30.0, 40.0]];
    assert_eq!(pruning.kept(&scores), [[2, 3], [2, 3]]);
}
