//! Models cut over tensor groups, with tokens split between sub-layers and without: the same training as on one rank,
//! and exactly the messages that the cut needs.

use std::collections::BTreeMap;

use guildhall::launch::Rank;
use guildhall::model::{Family, Sizes};
use guildhall::parallel::Mesh;
use guildhall::parallel::operands::{
    parts_to_split, parts_to_whole, split_to_parts, split_to_whole, whole_as_parts, whole_to_parts,
};
use guildhall::train::held_out_loss;
use guildhall_comm::{Collective, Communicator};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape, Tensor, Var};
use std::sync::Arc;

use crate::parity::{compare, run, train_on};
use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{self, Documents, Recipe, gpt2, mixtral, transformer_xl};
use crate::world::{ONE, SLICED, Shape, on_mesh, shape, sliced};

// --- the operands -----------------------------------------------------------------------------------------------

type Group = Arc<dyn Communicator>;

/// In which form the ranks of a group hold a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Whole,
    Split,
    Parts,
    /// Parts whose gradient is whole.
    Addends,
}
use Form::{Addends, Parts, Split, Whole};

type Operand = fn(Var, &[usize], &Group) -> Var;

const OPERANDS: [(&str, Form, Form, Operand); 6] = [
    ("whole_to_parts", Whole, Parts, |x, _, group| whole_to_parts(x, group).unwrap()),
    ("parts_to_whole", Parts, Whole, |x, _, group| parts_to_whole(x, group).unwrap()),
    ("split_to_parts", Split, Parts, |x, rows, group| split_to_parts(x, rows, group).unwrap()),
    ("parts_to_split", Parts, Split, |x, rows, group| parts_to_split(x, rows, group).unwrap()),
    ("split_to_whole", Split, Whole, |x, rows, group| split_to_whole(x, rows, group).unwrap()),
    ("whole_as_parts", Whole, Addends, |x, _, group| whole_as_parts(x, group.rank())),
];

const WIDTH: usize = 3;

/// Rows of the ranks: often uneven, often none.
fn rows(seed: u64, ranks: usize) -> Vec<usize> {
    let draws = Draws::new(seed, Purpose::Test, 2, 0);
    (0..ranks as u64).map(|rank| if seed == 0 { 0 } else { draws.bits(rank) as usize % 4 }).collect()
}

impl Form {
    /// Whether the ranks have the same.
    fn is_whole(self) -> bool {
        matches!(self, Whole | Addends)
    }

    fn random(self, rank: &Rank, rows: &[usize], (seed, stream): (u64, u32)) -> Tensor {
        let me = rank.world.rank();
        let here = if self == Split { rows[me] } else { rows.iter().sum() };
        let of = if self.is_whole() { 0 } else { me as u32 };
        let draws = Draws::new(seed, Purpose::Test, 3, 10 * stream + of);
        Tensor::from_fn(&rank.device, &[here, WIDTH], |i| draws.normal(i as u64))
    }
}

/// What one rank has of `<f(x), y>`, `<x, f*(y)>` and `|x| |y|`, f(x), and f*(y); a whole value is counted once.
fn sides(rank: &Rank, (from, to, f): (Form, Form, Operand), dtype: Dtype, seed: u64) -> ([f64; 3], [Tensor; 2]) {
    let rows = rows(seed, rank.world.size());
    let tape = Tape::new(&rank.device);
    let x = tape.leaf(from.random(rank, &rows, (seed, 1)));
    let out = f(x.cast(dtype), &rows, &rank.world);
    assert_eq!(out.dtype(), dtype);
    let (out, y) = (out.cast(Dtype::F32), to.random(rank, &rows, (seed, 2)));
    let gradients = tape.try_backward_from(&out, y.clone()).unwrap();
    let gradient = gradients.of(&x).expect("a gradient").clone();
    let dot = |a: &Tensor, b: &Tensor| -> f64 {
        assert_eq!(a.shape(), b.shape());
        a.f32s().iter().zip(b.f32s()).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let once = |form: Form| if form == Whole && rank.world.rank() > 0 { 0.0 } else { 1.0 };
    let size = (dot(x.value(), x.value()) * dot(&y, &y)).sqrt();
    let products = [dot(out.value(), &y) * once(to), dot(x.value(), &gradient) * once(from), size];
    (
        products,
        [out.value().clone(), gradient].map(|tensor| Tensor::from_slice(&rank.device, tensor.shape(), tensor.f32s())),
    )
}

#[test]
fn every_operand_goes_back_by_its_adjoint() {
    for (name, from, to, f) in OPERANDS {
        // Sums of up to four products of up to twelve rows; in bf16 x, y on its way, and what they are summed to lose 2^-9.
        for (dtype, rounding) in [(Dtype::F32, 1e-6), (Dtype::Bf16, 3.0 / 512.0)] {
            for (ranks, seed) in (1..=4).flat_map(|ranks| (0..6).map(move |seed| (ranks, seed))) {
                let what = format!("{name}, {ranks} ranks, {dtype:?}, seed {seed}");
                let sides = on_mesh(shape(ranks, 1), |rank, _| {
                    let (products, [value, gradient]) = sides(rank, (from, to, f), dtype, seed);
                    (products, [value.to_vec(), gradient.to_vec()])
                });
                let sum = |i: usize| sides.iter().map(|(products, _)| products[i]).sum::<f64>();
                let error = (sum(0) - sum(1)).abs();
                assert!(error <= rounding * sum(2), "{what}: {} against {}", sum(0), sum(1));
                for (form, which) in [(to, 0), (from, 1)] {
                    let alike = sides.iter().all(|(_, tensors)| tensors[which] == sides[0].1[which]);
                    assert!(form != Whole || alike, "{what}: what is whole differs");
                }
            }
        }
    }
}

/// What an operand gives is its form's; one that gave zeros would be its own adjoint.
#[test]
fn operands_give_sums_and_rows() {
    for ranks in 1..=4 {
        on_mesh(shape(ranks, 1), |rank, _| {
            let (me, tape) = (rank.world.rank(), Tape::inference(&rank.device));
            let rows: Vec<usize> = (0..ranks).collect();
            let all: usize = rows.iter().sum();
            let (first, own) = (rows[..me].iter().sum::<usize>(), rows[me]);
            let tensor = |rows: std::ops::Range<usize>, factor: usize| {
                let start = rows.start * WIDTH;
                let value = |i: usize| ((start + i) * factor) as f32;
                tape.constant(Tensor::from_fn(&rank.device, &[rows.len(), WIDTH], value))
            };
            let same = |got: Var, want: Var| {
                assert_eq!((got.shape(), got.value().f32s()), (want.shape(), want.value().f32s()))
            };
            let (part, sum) = (tensor(0..all, me + 1), ranks * (ranks + 1) / 2);
            same(whole_to_parts(part.clone(), &rank.world).unwrap(), part.clone());
            same(parts_to_whole(part.clone(), &rank.world).unwrap(), tensor(0..all, sum));
            same(parts_to_split(part.clone(), &rows, &rank.world).unwrap(), tensor(first..first + own, sum));
            same(split_to_parts(tensor(first..first + own, 1), &rows, &rank.world).unwrap(), tensor(0..all, 1));
            same(split_to_whole(tensor(first..first + own, 1), &rows, &rank.world).unwrap(), tensor(0..all, 1));
            same(whole_as_parts(part.clone(), me), if me == 0 { part } else { tensor(0..all, 0) });
        });
    }
}

// --- training ---------------------------------------------------------------------------------------------------

fn recipe(sizes: &Sizes, rows: usize) -> Recipe {
    Recipe { sizes: sizes.clone(), rows, micro_batch: 4 }
}

/// The same training as on one rank, on meshes given with whether tokens are split.
fn check(name: &str, sizes: &Sizes, rows: usize, meshes: impl IntoIterator<Item = (Shape, bool)>) {
    let want = run(&recipe(sizes, rows), ONE);
    for (shape, sequence) in meshes {
        let got = train_on(&recipe(sizes, rows), shape, |_, mesh| mesh.clone().with_sequence(sequence), |_| ());
        compare(&format!("{name}, {rows} rows on {shape:?}, tokens split: {sequence}"), &got, &want);
    }
}

fn families() -> [(&'static str, Sizes); 12] {
    tiny::families().map(|(name, mut sizes)| {
        sizes.model.dropout = 0.2;
        (name, sizes)
    })
}

/// Three rows leave some ranks without any.
#[test]
fn split_tokens_train_alike_on_every_mesh() {
    for (name, sizes) in families() {
        for rows in [6, 3] {
            check(name, &sizes, rows, SLICED.map(|shape| (shape, true)));
        }
    }
}

/// Three slices cut neither 31 entries of the vocabulary nor 8 tokens evenly.
#[test]
fn dense_models_train_alike_in_any_slices() {
    for (name, mut sizes) in families() {
        sizes.moe = None;
        sizes.model.tie_embeddings = !sizes.model.tie_embeddings;
        (sizes.model.d_model, sizes.model.heads) = (24, 6);
        sizes.model.kv_heads = sizes.model.kv_heads.map(|_| 3);
        let shapes = [sliced(3, 3, 1), sliced(6, 3, 1)];
        check(name, &sizes, 6, shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]));
    }
}

/// Two heads of keys and values for four ranks, and one for three.
#[test]
fn ranks_may_share_a_head_of_keys() {
    let mut sizes = Sizes { moe: None, ..mixtral() };
    check("two heads", &sizes, 6, [(sliced(4, 4, 1), false), (sliced(8, 4, 1), true)]);
    for (name, other) in [("with biases", tiny::qwen2()), ("apart and with biases", tiny::gpt_oss())] {
        check(name, &Sizes { moe: None, ..other }, 6, [(sliced(4, 4, 1), false), (sliced(8, 4, 1), true)]);
    }
    (sizes.model.d_model, sizes.model.heads, sizes.model.kv_heads) = (24, 6, Some(1));
    check("one head", &sizes, 6, [(sliced(3, 3, 1), false), (sliced(6, 3, 1), true)]);
}

/// A vocabulary of three on four ranks: one has none of it.
#[test]
fn a_rank_may_have_nothing_of_the_vocabulary() {
    let mut sizes = Sizes { moe: None, ..gpt2() };
    sizes.model.vocab = 3;
    check("gpt2", &sizes, 6, [(sliced(4, 4, 1), false), (sliced(4, 4, 1), true)]);
}

/// Rounding to eight bits happens on each rank before what they found is added up.
#[test]
fn half_the_bits_give_nearly_the_loss_in_slices() {
    for (name, mut sizes) in families() {
        sizes.model.dropout = 0.0;
        let want = run(&recipe(&sizes, 6), ONE);
        let half = recipe(&Sizes { dtype: Dtype::Bf16, ..sizes.clone() }, 6);
        for sequence in [false, true] {
            let got = train_on(&half, sliced(2, 2, 1), |_, mesh| mesh.clone().with_sequence(sequence), |_| ());
            for (got, want) in got.reports.iter().zip(&want.reports) {
                let error = (got.loss / want.loss - 1.0).abs();
                assert!(error < 0.02, "{name}, step {}: {} instead of {}", got.step, got.loss, want.loss);
            }
        }
    }
}

// --- use --------------------------------------------------------------------------------------------------------

#[test]
fn the_loss_on_held_out_rows_is_that_of_one_rank() {
    // Held-out rows have no sources.
    for (name, sizes) in families().into_iter().filter(|(_, sizes)| !sizes.blueprint().reads_a_source()) {
        let loss = |shape: Shape, sequence: bool| {
            let losses = on_mesh(shape, |rank, mesh| {
                let mesh = mesh.clone().with_sequence(sequence);
                let trainer = recipe(&sizes, 6).trainer(rank, &mesh);
                held_out_loss(&trainer.model, &rank.device, &mesh, &Documents, (7, 3)).unwrap()
            });
            assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()), "{name}: {losses:?}");
            losses[0]
        };
        let want = loss(ONE, false);
        for sequence in [false, true] {
            for shape in [sliced(2, 2, 1), sliced(4, 2, 2)] {
                let error = (loss(shape, sequence) / want - 1.0).abs();
                assert!(error < 1e-6, "{name} on {shape:?}: {error:.1e} away from {want}");
            }
        }
    }
}

/// Trained in slices, continued in others, evaluated in slices, and generated from on one rank.
#[test]
fn the_program_trains_evaluates_and_generates_in_slices() {
    let workshop = Workshop::new();
    let slices = "--set parallel.tensor=2 --set parallel.sequence=true";
    workshop.succeeds(&format!("train {RECIPE} --ranks 2 {slices} --set train.steps=4"));
    workshop.succeeds(&format!("train {RECIPE} --ranks 2 --set parallel.tensor=2 --resume"));
    let loss = |arguments: &str| {
        let out = workshop.succeeds(&format!("evaluate {RUN}/checkpoints/latest {arguments}")).out;
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["eval_loss"].as_f64().unwrap()
    };
    let (one, sliced) = (loss("--ranks 1"), loss("--ranks 2"));
    assert!((one / sliced - 1.0).abs() < 1e-6, "{one} on one rank, {sliced} in slices");
    let said = workshop.succeeds(&format!("generate {RUN}/checkpoints/latest --prompt the --tokens 5"));
    assert!(said.out.starts_with("the"), "{}", said.out);
}

// --- messages ---------------------------------------------------------------------------------------------------

/// Calls and bytes of each collective in tensor groups, of one rank in one step of one micro-batch.
fn messages(sizes: &Sizes, ranks: usize, sequence: bool) -> BTreeMap<Collective, (u64, u64)> {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 6 };
    let sent = on_mesh(sliced(ranks, ranks, 1), |rank, mesh| {
        let mesh: Mesh = mesh.clone().with_sequence(sequence);
        let mut trainer = recipe.trainer(rank, &mesh);
        recipe.train(&mut trainer, 1..=1);
        let of_tensor = rank.ledger.snapshot().into_iter().filter(|((group, _), _)| group == "tensor");
        of_tensor.map(|((_, collective), traffic)| (collective, (traffic.calls, traffic.bytes))).collect()
    });
    sent.into_iter().next_back().expect("a rank")
}

/// The embedding is added up and the head's gradient is; between them each of a block's two sub-layers adds up once
/// forward and once backward. The head also tells three numbers a token, in blocks of 256.
#[test]
fn a_layer_sends_two_messages_forward_and_two_back() {
    const TOKENS: u64 = 48;
    const BYTES: u64 = 4;
    for layers in [1, 3] {
        for family in [Family::Gpt2, Family::TransformerXl] {
            let mut sizes = Sizes { moe: None, ..if family == Family::Gpt2 { gpt2() } else { transformer_xl() } };
            sizes.model.layers = layers;
            let (sums, activation) = (4 * layers as u64 + 2, TOKENS * sizes.model.d_model as u64 * BYTES);
            for ranks in [2, 4] {
                let others = ranks as u64 - 1;
                let statistics = (1, others * TOKENS * 3 * BYTES);
                let all_reduces = (sums, sums * 2 * others * activation / ranks as u64);
                let want = BTreeMap::from([(Collective::AllReduce, all_reduces), (Collective::AllGather, statistics)]);
                assert_eq!(messages(&sizes, ranks, false), want, "{family:?}, {layers} layers, {ranks} ranks");
                // Each sum is now one scatter, and each scatter's adjoint one gathering.
                let halves = (sums, sums * others * activation / ranks as u64);
                let gathers = (halves.0 + statistics.0, halves.1 + statistics.1);
                let want = BTreeMap::from([(Collective::ReduceScatter, halves), (Collective::AllGather, gathers)]);
                assert_eq!(messages(&sizes, ranks, true), want, "{family:?}, {layers} layers, {ranks} ranks, split");
            }
        }
    }
}
