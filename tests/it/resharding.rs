//! What a run has learned on one mesh, it goes on from on any other: at any ZeRO stage, in any type of weights.

use std::fs;
use std::path::Path;

use guildhall::checkpoint::{
    Destination, ElementType, Extra, FileLayout, TrainingProgress, load_model, load_optimizer, open, retyped, save,
};
use guildhall::model::Sizes;
use guildhall::parallel::Mesh;
use guildhall::train::Trainer;
use guildhall_tensor::Dtype;
use serde_json::Value;

use crate::program::{TENSORS, Workshop};
use crate::tiny::{Recipe, Tensors, gpt2, mixtral, same_bits, state, union};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

/// A rate that does not know the length of the run, and a checkpoint in its middle.
const STEADY: &str = "--set train.schedule=constant --set train.lr=1e-3 --set train.eval_every=0 \
                      --set train.checkpoint_every=50";

/// Where the first fifty steps run and where the others do, and whether these sum in the same order.
const PAIRS: [([&str; 2], bool); 4] = [
    (
        [
            "--set parallel.ranks=4 --set parallel.expert=2",
            "--set parallel.ranks=4 --set parallel.expert=2 --set parallel.zero=3 --set memory.offload=file \
             --set memory.tile=100",
        ],
        true,
    ),
    (["", "--set parallel.ranks=4 --set parallel.expert=4 --set parallel.zero=2"], false),
    (["--set parallel.ranks=2 --set parallel.expert=2", "--set parallel.ranks=2 --set parallel.tensor=2"], false),
    (
        [
            "--set parallel.ranks=4 --set parallel.tensor=2 --set parallel.expert=2 --set parallel.zero=1",
            "--set parallel.ranks=2 --set parallel.expert=1 --set parallel.zero=3",
        ],
        false,
    ),
];

#[test]
fn fifty_steps_on_one_mesh_and_fifty_on_another_are_a_hundred_on_one() {
    for (pair, ([first, second], is_same_order)) in PAIRS.into_iter().enumerate() {
        let shop = Workshop::new();
        shop.train(&format!("{STEADY} {first} --set train.steps=100 --set run.dir=whole"));
        shop.train(&format!("{STEADY} {first} --set train.steps=50 --set run.dir=halves"));
        shop.train(&format!("{STEADY} {second} --set train.steps=100 --set run.dir=halves --resume"));
        let [whole, halves] = ["whole", "halves"].map(|run| shop.series(run, "loss"));
        assert_eq!((whole.len(), &whole[..50]), (100, &halves[..50]), "pair {pair}: the same first half");
        if is_same_order {
            assert_eq!(whole, halves, "pair {pair}");
            assert!(shop.tensors("whole", 100) == shop.tensors("halves", 100), "pair {pair}: other files");
        }
        for (step, (whole, halves)) in whole.iter().zip(&halves).enumerate() {
            let [whole, halves] = [whole, halves].map(|loss| Value::as_f64(loss).unwrap());
            // Each of fifty steps adds roundings of sums of f32, 6e-8 of their values, in another order.
            assert!((whole - halves).abs() <= 1e-5 * whole, "pair {pair}, step {}: {whole} and {halves}", step + 1);
        }
    }
}

/// A trainer per rank that has read a checkpoint, or made the state of two steps, as it was written by all in the end.
fn written(sizes: &Sizes, shape: Shape, from: Option<&Path>, run: &Path) -> Tensors {
    let recipe = Recipe { sizes: sizes.clone(), rows: 5, micro_batch: 4 };
    let states = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        match from {
            Some(from) => read(from, &mut trainer, mesh),
            None => drop(recipe.train(&mut trainer, 1..=2)),
        }
        let progress = TrainingProgress { step: 2, tokens: 0, seconds: 0.0, loss_trend: None };
        let extra = Extra { progress, data_fingerprint: String::new(), files: Vec::new() };
        save(Destination::of(run), &mut trainer.model, &mut trainer.optimizer, mesh, extra).unwrap();
        state(&mut trainer)
    });
    union(states)
}

/// As a run that is continued does.
fn read(from: &Path, Trainer { model, optimizer, .. }: &mut Trainer, mesh: &Mesh) {
    let source = retyped(&open(from).unwrap(), model, optimizer, mesh).unwrap();
    load_model(&source, model).unwrap();
    load_optimizer(&source, model, optimizer).unwrap();
}

fn files(run: &Path) -> [Vec<u8>; 2] {
    TENSORS.map(|name| fs::read(run.join("checkpoints/step-000002").join(name)).unwrap())
}

/// From 16 bits to 32 the masters are the weights, moments stay, and on the way back all is as it was.
#[test]
fn masters_become_weights_and_weights_masters() {
    for sizes in [mixtral(), gpt2()] {
        let half = Sizes { dtype: Dtype::Bf16, ..sizes.clone() };
        let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
        let [narrow, wide, again, once_more] = [0, 1, 2, 3].map(|at| folders[at].path());
        let was = written(&half, shape(4, 2), None, narrow);
        let is = written(&sizes, sliced(4, 2, 2), Some(narrow), wide);
        for (name, values) in &is {
            let master = format!("master/{name}");
            let origin = if was.contains_key(&master) { &master } else { name };
            assert!(same_bits(values, &was[origin]), "{name} and {origin}");
        }
        assert_eq!(is.len() + is.keys().filter(|name| was.contains_key(&format!("master/{name}"))).count(), was.len());
        written(&half, whole_experts(4, 2, 2), Some(wide), again);
        assert!(files(again) == files(narrow), "{:?}: other bits in 16 bits again", sizes.model.family);
        written(&sizes, ONE, Some(again), once_more);
        assert!(files(once_more) == files(wide), "{:?}: other bits in 32 bits again", sizes.model.family);
    }
}

#[test]
fn a_run_goes_on_in_other_types() {
    let shop = Workshop::new();
    shop.train("--set train.steps=4 --set train.dtype=bf16 --set train.gradient_dtype=bf16");
    shop.train("--set train.steps=8 --set train.dtype=f32 --set parallel.ranks=2 --resume");
    let types = |step| {
        let layout = FileLayout::read(&shop.checkpoint("runs/tiny", step).join(TENSORS[0])).unwrap();
        layout.entries.values().filter(|entry| entry.dtype == ElementType::F32).count() == layout.entries.len()
    };
    assert_eq!([4, 8].map(types), [false, true]);
    shop.train("--set train.steps=12 --set train.dtype=bf16 --resume");
    shop.succeeds("evaluate runs/tiny");
    let losses: Vec<f64> = shop.series("runs/tiny", "loss").iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert!(losses.len() == 12 && losses.is_sorted_by(|a, b| a > b), "it goes on learning: {losses:?}");
}
