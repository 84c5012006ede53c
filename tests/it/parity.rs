//! The same seed gives the same training on every mesh and in every cut into micro-batches, up to the order of sums;
//! on the same mesh, the same bits.

use guildhall::model::Sizes;
use guildhall::train::StepReport;
use guildhall_tensor::Dtype;

use crate::tiny::{Recipe, Tensors, Tolerance, all_near, gpt2, mixtral, near, pieces, union, weights};
use crate::world::{MESHES, ONE, Shape, on_mesh, shape};

const STEPS: u64 = 3;
/// Sums of a few hundred terms, each rounded at 2^-24 (6e-8), in other orders, three steps deep: 1e-6
/// was the most seen. The floor is for gradients that are zero in truth.
const REORDERED: Tolerance = Tolerance { relative: 1e-5, floor: 2e-9 };
/// Where the gradient is zero in truth (key biases), AdamW moves a weight by its noise times rate / epsilon = 100.
const MOVED: Tolerance = Tolerance { floor: 1e-6, ..REORDERED };

/// A run, over all ranks.
#[derive(PartialEq)]
struct Run {
    reports: Vec<StepReport>,
    weights: Tensors,
    moments: Tensors,
}

fn run(recipe: &Recipe, shape: Shape) -> Run {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        let slots = &trainer.optimizer.slots;
        let moments = pieces(&mut trainer.model, |_, i| Some(slots[i].m.clone()));
        (reports, weights(&mut trainer.model), moments)
    });
    let reports = ranks[0].0.clone();
    assert!(ranks.iter().all(|rank| rank.0 == reports), "{shape:?}: ranks report differently");
    let weights = union(ranks.iter().map(|rank| rank.1.clone()));
    Run { reports, weights, moments: union(ranks.into_iter().map(|rank| rank.2)) }
}

fn compare(what: &str, got: &Run, want: &Run) {
    for (got, want) in got.reports.iter().zip(&want.reports) {
        let numbers = |r: &StepReport| [r.loss, r.balance, r.z, r.gradient_norm].map(|x| x as f32);
        let names = ["loss", "balance", "z", "gradient norm"];
        for ((name, got), want) in names.iter().zip(numbers(got)).zip(numbers(want)) {
            near(&format!("{what}, {name}"), &[got], &[want], REORDERED);
        }
        // Integers: a routing that flipped would show here.
        assert_eq!((&got.moe, got.valid_tokens), (&want.moe, want.valid_tokens), "{what}");
    }
    all_near(&format!("{what}, weights"), &got.weights, &want.weights, MOVED);
    all_near(&format!("{what}, first moments"), &got.moments, &want.moments, REORDERED);
}

fn check(name: &str, sizes: &Sizes, rows: usize) {
    let recipe = |micro_batch| Recipe { sizes: sizes.clone(), rows, micro_batch };
    let want = run(&recipe(rows), ONE);
    check_loads(sizes, rows, &want.reports);
    for micro_batch in [rows, 1, 4] {
        for shape in MESHES {
            let got = run(&recipe(micro_batch), shape);
            compare(&format!("{name} on {shape:?}, micro-batches of {micro_batch} of {rows} rows"), &got, &want);
        }
    }
}

/// Every token of a MoE layer has its k routes and none is lost.
fn check_loads(sizes: &Sizes, rows: usize, reports: &[StepReport]) {
    let routes = (rows * sizes.model.seq * sizes.moe.as_ref().expect("experts").top_k) as u64;
    for record in reports.iter().flat_map(|report| &report.moe) {
        assert_eq!((record.load.iter().sum::<u64>(), record.dropped), (routes, 0), "layer {}", record.layer);
    }
    let layers = (0..sizes.model.layers).filter(|&layer| sizes.moe_of(layer).is_some()).count();
    assert!(reports.iter().all(|report| report.moe.len() == layers));
}

#[test]
fn mixtral_trains_alike_on_every_mesh() {
    check("mixtral", &mixtral(), 6);
}

#[test]
fn gpt2_with_dropout_trains_alike_on_every_mesh() {
    let mut sizes = gpt2();
    sizes.model.dropout = 0.2;
    check("gpt2", &sizes, 6);
}

#[test]
fn ranks_without_rows_change_nothing() {
    check("mixtral of few rows", &mixtral(), 3);
}

#[test]
fn the_same_mesh_gives_the_same_bits() {
    for sizes in [mixtral(), gpt2()] {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
        for shape in MESHES {
            assert!(run(&recipe, shape) == run(&recipe, shape), "{shape:?}: two runs differ");
        }
    }
}

/// Eight significant bits in every weight and activation: a percent or so of the loss.
#[test]
fn half_the_bits_give_nearly_the_loss() {
    for sizes in [mixtral(), gpt2()] {
        let recipe = |dtype| Recipe { sizes: Sizes { dtype, ..sizes.clone() }, rows: 6, micro_batch: 3 };
        let want = run(&recipe(Dtype::F32), ONE);
        for shape in [ONE, shape(2, 2), shape(4, 2)] {
            let got = run(&recipe(Dtype::Bf16), shape);
            for (got, want) in got.reports.iter().zip(&want.reports) {
                let error = (got.loss / want.loss - 1.0).abs();
                assert!(error < 0.02, "{shape:?}, step {}: {} instead of {}", got.step, got.loss, want.loss);
                assert!(got.loss != want.loss, "bf16 is stored in bf16");
            }
        }
    }
}
