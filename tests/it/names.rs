//! What tensors are called in checkpoints, and that a checkpoint of an older format is used as one of this.

use std::collections::BTreeSet;
use std::fs;

use guildhall::moe::{BalanceScope, GateKind, Layers};
use guildhall::parallel::Parameters;
use serde_json::Value;

use crate::program::{RECIPE, Workshop, reseal, sealed};
use crate::tiny::{Recipe, bert, deepseek, gpt_oss, gpt2, mixtral, olmoe, qwen2, switch, transformer_xl};
use crate::world::{ONE, on_mesh};

const FAMILIES: [&str; 9] =
    ["mixtral", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3", "gpt2", "bert", "transformer_xl", "switch"];

fn numbered(name: &str) -> String {
    let part = |part: &str| if part.parse::<usize>().is_ok() { "#".to_owned() } else { part.to_owned() };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The names of all tensors of a model of the family, with every part that it may have.
fn names(family: &str) -> BTreeSet<String> {
    let plain = match family {
        "mixtral" => mixtral(),
        "olmoe" => olmoe(),
        "qwen2_moe" => qwen2(),
        "gpt_oss" => gpt_oss(),
        "deepseek_v3" => deepseek(),
        "switch" => switch(),
        "gpt2" => gpt2(),
        "bert" => bert(),
        _ => transformer_xl(),
    };
    let mut untied = plain.clone();
    untied.model.tie_embeddings = false;
    let (mut shared, mut residual) = (untied.clone(), untied);
    let moe = shared.moe.as_mut().expect("experts");
    (moe.shared_experts, moe.gate) = (1, GateKind::Sigmoid.into());
    moe.balance_scope = Some(BalanceScope::GlobalBatch);
    let moe = residual.moe.as_mut().expect("experts");
    (moe.residual, moe.gate, moe.layers) = (true, GateKind::Noisy.into(), Layers::Every(2));
    let of = |sizes| {
        let recipe = Recipe { sizes, rows: 2, micro_batch: 2 };
        let mut found = Vec::new();
        on_mesh(ONE, |rank, mesh| {
            let mut names = Vec::new();
            let mut trainer = recipe.trainer(rank, mesh);
            trainer
                .model
                .visit(&mut |weight| names.extend(weight.placement.pieces.iter().map(|piece| piece.name.clone())));
            trainer
                .model
                .visit_buffers(&mut |buffer| names.extend(buffer.placement.pieces.iter().map(|p| p.name.clone())));
            names
        })
        .into_iter()
        .for_each(|names| found.extend(names));
        found
    };
    [plain, shared, residual].into_iter().flat_map(of).map(|name| numbered(&name)).collect()
}

#[test]
fn names_are_those_of_the_format() {
    let of = |family: &&str| names(family).into_iter().map(|name| format!("{family} {name}\n")).collect::<String>();
    let got: String = FAMILIES.iter().map(of).collect();
    let want = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/names.txt")).unwrap();
    assert!(got == want, "who changes a name changes the format, for tests/it/names.txt has those of this one:\n{got}");
}

/// The newest format of the documents is the one that is written.
#[test]
fn the_formats_are_documented() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/checkpoints.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse::<u64>().ok());
    let rows: Vec<u64> = rows.collect();
    let shop = Workshop::new();
    shop.train("--set train.steps=1 --set train.eval_every=0");
    let manifest: Value = serde_json::from_str(&shop.read("runs/tiny/checkpoints/step-000001/manifest.json")).unwrap();
    assert_eq!(rows, (1..=manifest["format"].as_u64().unwrap()).collect::<Vec<_>>());
}

/// Makes of a checkpoint what the first format had in its place: flat keys of the gate, all of them.
fn as_format_1(shop: &Workshop, step: u64) {
    let folder = shop.checkpoint("runs/tiny", step);
    let recipe = fs::read_to_string(folder.join("config.toml")).unwrap();
    let mut recipe: toml::Table = recipe.parse().unwrap();
    let moe = recipe["moe"].as_table_mut().unwrap();
    let gate = moe.remove("gate").unwrap();
    moe.insert("gate".into(), gate["kind"].clone());
    for (key, value) in [("logical_workers", 1), ("groups", 1), ("top_groups", 1)] {
        moe.insert(key.into(), gate.get(key).cloned().unwrap_or(value.into()));
    }
    for (key, value) in [("route_scale", 1.0), ("bias_rate", 0.0), ("outside", 0.14)] {
        moe.insert(key.into(), gate.get(key).cloned().unwrap_or(value.into()));
    }
    fs::write(folder.join("config.toml"), recipe.to_string()).unwrap();
    reseal(&folder);
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["format"] = 1.into();
    fs::write(path, sealed(manifest)).unwrap();
}

#[test]
fn a_checkpoint_of_the_first_format_goes_on() {
    let set = "--set moe.gate=sigmoid --set moe.gate.bias_rate=0.05 --set moe.gate.groups=2 --set moe.gate.top_groups=2 \
               --set train.schedule=constant";
    let shop = Workshop::new();
    shop.train(set);
    let whole = shop.tensors("runs/tiny", 6);
    shop.train(&format!("{set} --set train.steps=4"));
    as_format_1(&shop, 4);
    shop.succeeds("evaluate runs/tiny/checkpoints/step-000004");
    shop.succeeds("generate runs/tiny/checkpoints/step-000004 --prompt the --tokens 3");
    let other = format!(
        "train {RECIPE} --resume --set train.schedule=constant --set moe.gate=sigmoid \
                         --set moe.gate.groups=2"
    );
    shop.fails(&other, 2, &["moe.gate.bias_rate: was 0.05, now 0.0", "moe.gate.top_groups: was 2, now 1"]);
    shop.train(&format!("{set} --set train.steps=6 --resume"));
    assert!(shop.tensors("runs/tiny", 6) == whole, "a run that went on from the first format differs");
}
