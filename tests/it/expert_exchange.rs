//! Experts travel instead of rows: nothing is learnt differently, and bytes are those of the weights, to the byte.

use std::collections::BTreeMap;

use guildhall::launch::Rank;
use guildhall::memory::RecomputedOp;
use guildhall::metrics::Imbalance;
use guildhall::model::Sizes;
use guildhall::parallel::{Axis, Exchange, Mesh, Order, Parameters, PerLayer, Spread, Zero};
use guildhall::plan::RecomputePolicy;
use guildhall::train::held_out_loss;
use guildhall_comm::Collective;
use guildhall_tensor::Dtype;
use serde_json::Value;

use crate::parity::{REORDERED, Run, compare, run, train_on};
use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{
    Documents, Recipe, Tensors, all_near, bert, families, gpt2, gradient_shares, mixtral, near, transformer_xl, union,
};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

/// How a recipe is run besides its mesh.
#[derive(Clone, Debug)]
struct Options {
    sequence: bool,
    zero: Zero,
    recompute: RecomputePolicy,
    owners: Option<Vec<usize>>,
}

const PLAIN: Options = Options { sequence: false, zero: Zero::Off, recompute: RecomputePolicy::Nothing, owners: None };

impl Options {
    fn mesh(&self, mesh: &Mesh, exchange: Exchange) -> Mesh {
        let mesh = mesh.clone().with_exchange(exchange).with_sequence(self.sequence).with_zero(self.zero);
        match &self.owners {
            Some(owners) => mesh.with_owners(owners),
            None => mesh,
        }
    }
}

fn trained(recipe: &Recipe, shape: Shape, options: &Options, exchange: Exchange) -> Run {
    let again = |trainer: &mut guildhall::train::Trainer| trainer.recompute = options.recompute.segments();
    train_on(recipe, shape, |_, mesh| options.mesh(mesh, exchange), again)
}

/// All gradients of the first step.
fn first_gradients(recipe: &Recipe, shape: Shape, options: &Options, exchange: Exchange) -> Tensors {
    union(on_mesh(shape, |rank, mesh| {
        let mesh = options.mesh(mesh, exchange);
        let mut trainer = recipe.trainer(rank, &mesh);
        trainer.recompute = options.recompute.segments();
        trainer.gradients(&recipe.batches(&mesh, 1), 1).unwrap();
        gradient_shares(&mut trainer.model, &mesh)
    }))
}

/// Compares a run whose experts travel with the same one whose rows do.
#[track_caller]
fn check(what: &str, sizes: &Sizes, shape: Shape, options: &Options) {
    // Two micro-batches.
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 4 };
    let what = format!("{what} on {shape:?}, {options:?}");
    let gradients = [Exchange::Experts, Exchange::Tokens].map(|way| first_gradients(&recipe, shape, options, way));
    all_near(&format!("{what}, gradients"), &gradients[0], &gradients[1], REORDERED);
    let [got, want] = [Exchange::Experts, Exchange::Tokens].map(|way| trained(&recipe, shape, options, way));
    compare(&what, &got, &want);
    let layers = (0..sizes.model.layers).filter(|&layer| sizes.moe_of(layer).is_some()).count();
    let visits = 2 * layers * shape.ranks / shape.expert / shape.expert_tensor * EXPERTS;
    for (got, want) in got.reports.iter().zip(&want.reports) {
        assert_eq!([got.shadowed, want.shadowed], [visits as u64, 0], "{what}: experts that travel");
        // Lanes round their shares up.
        assert!(shape.tensor > 1 || got.imbalance == Imbalance::EVEN, "{what}: a rank computes others' rows");
        for (sent, before) in got.sent.iter().zip(&want.sent) {
            for (rank, (rows, before)) in sent.rows.iter().zip(&before.rows).enumerate() {
                let place = shape.place(Axis::Expert(shape.expert), rank).index;
                let stay: u64 = before.iter().sum();
                let want: Vec<u64> = (0..shape.expert).map(|to| if to == place { stay } else { 0 }).collect();
                assert_eq!(*rows, want, "{what}: rows of rank {rank}");
            }
        }
    }
}

/// Of every model here.
const EXPERTS: usize = 4;

#[test]
fn whatever_travels_the_same_is_learnt() {
    for (name, sizes) in families() {
        for shape in [shape(2, 2), shape(4, 4), shape(4, 2), sliced(4, 2, 2)] {
            check(name, &sizes, shape, &PLAIN);
        }
    }
}

/// Against one rank that has all experts, not only against the same mesh.
#[test]
fn one_rank_learns_the_same() {
    for (name, sizes) in [("mixtral", mixtral()), ("bert", bert())] {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
        let want = run(&recipe, ONE);
        for shape in [shape(2, 2), shape(4, 4), sliced(4, 2, 2)] {
            compare(&format!("{name} on {shape:?}"), &trained(&recipe, shape, &PLAIN, Exchange::Experts), &want);
        }
    }
}

/// Sliced and whole experts, in both orders of ranks, duplicates dropped or not, the stream split or not. Of the last two
/// meshes ranks that see the same tokens are in expert groups that see different ones.
#[test]
fn experts_travel_on_every_mesh() {
    let turned = |shape| Shape { order: Order::DataExpert, ..shape };
    let meshes = [
        sliced(8, 2, 2),
        turned(sliced(8, 2, 2)),
        whole_experts(4, 2, 4),
        whole_experts(8, 2, 2),
        turned(whole_experts(8, 2, 2)),
        turned(shape(4, 2)),
        turned(whole_experts(4, 2, 2)),
        whole_experts(4, 4, 2),
    ];
    for (name, sizes) in [("mixtral", mixtral()), ("transformer_xl", transformer_xl())] {
        for shape in meshes {
            for (sequence, drop_duplicates) in [(false, true), (true, true), (false, false)] {
                if !drop_duplicates && shape.expert_tensor < shape.tensor || sequence && shape.tensor == 1 {
                    continue;
                }
                let mut sizes = sizes.clone();
                sizes.model.kv_heads = Some(4);
                sizes.moe.iter_mut().for_each(|moe| moe.drop_duplicates = drop_duplicates);
                check(&format!("{name}, {drop_duplicates}"), &sizes, shape, &Options { sequence, ..PLAIN });
            }
        }
    }
}

#[test]
fn experts_travel_from_shares_and_to_blocks_that_run_again() {
    let blocks = |keep| RecomputePolicy::Blocks { keep };
    let experts = RecomputePolicy::Operations(vec![RecomputedOp::Experts]);
    for (name, mut sizes) in [("gpt2", gpt2()), ("mixtral", mixtral())] {
        sizes.model.dropout = 0.2;
        for zero in Zero::ALL {
            for recompute in [RecomputePolicy::Nothing, experts.clone(), blocks(true), blocks(false)] {
                for (shape, owners) in [(shape(4, 2), Some(vec![1, 0, 1, 1])), (sliced(4, 2, 2), None)] {
                    let sequence = shape.tensor > 1;
                    check(name, &sizes, shape, &Options { sequence, zero, recompute: recompute.clone(), owners });
                }
            }
        }
    }
}

/// A rank that has all experts of its group needs none, whatever the key says: the same bits and the same bytes.
#[test]
fn where_every_rank_has_all_experts_nothing_changes() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 4 };
    for shape in [ONE, shape(2, 1), sliced(2, 2, 1)] {
        let [got, want] = [Exchange::Experts, Exchange::Tokens].map(|way| trained(&recipe, shape, &PLAIN, way));
        assert!(got == want, "{shape:?}");
        let [got, want] = [Exchange::Experts, Exchange::Tokens].map(|way| in_training(&recipe, shape, &PLAIN, way));
        assert_eq!(got, want, "{shape:?}");
    }
    // Of two layers only the one that is spread has visitors.
    let run = |exchange| {
        on_mesh(shape(4, 4), |rank, _| {
            let mesh = Mesh::of_degrees(rank.world.clone(), shape(4, 4), PerLayer::Each(vec![1, 4])).unwrap();
            let mut trainer = recipe.trainer(rank, &mesh.with_exchange(exchange));
            recipe.train(&mut trainer, 1..=1).remove(0)
        })
        .remove(0)
    };
    let [got, want] = [Exchange::Experts, Exchange::Tokens].map(run);
    assert_eq!(got.shadowed, 2 * EXPERTS as u64, "two micro-batches");
    near("loss", &[got.loss as f32], &[want.loss as f32], REORDERED);
}

// --- bytes ------------------------------------------------------------------------------------------------------

type Traffic = BTreeMap<(String, Collective), [u64; 2]>;

/// Calls and bytes of what a rank does, by group and collective.
fn counted(rank: &Rank, act: impl FnOnce()) -> Traffic {
    let before = rank.ledger.snapshot();
    act();
    let new = |(key, now): (&(String, Collective), &guildhall_comm::wrap::Traffic)| {
        let earlier = before.get(key).copied().unwrap_or_default();
        (key.clone(), [now.calls - earlier.calls, now.bytes - earlier.bytes])
    };
    rank.ledger.snapshot().iter().map(new).filter(|(_, [calls, _])| *calls > 0).collect()
}

fn in_training(recipe: &Recipe, shape: Shape, options: &Options, exchange: Exchange) -> Vec<Traffic> {
    on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, &options.mesh(mesh, exchange));
        trainer.recompute = options.recompute.segments();
        counted(rank, || drop(recipe.train(&mut trainer, 1..=1)))
    })
}

fn in_evaluation(recipe: &Recipe, shape: Shape, options: &Options, exchange: Exchange) -> Vec<Traffic> {
    on_mesh(shape, |rank, mesh| {
        let mesh = options.mesh(mesh, exchange);
        let trainer = recipe.trainer(rank, &mesh);
        counted(rank, || {
            held_out_loss(&trainer.model, &rank.device, &mesh, &Documents, (7, 4)).unwrap();
        })
    })
}

/// Of each rank: its experts of a layer, and the elements of one of them (or of its slice), over all layers.
fn held(recipe: &Recipe, shape: Shape, options: &Options) -> Vec<(usize, usize, usize)> {
    on_mesh(shape, |rank, mesh| {
        let mesh = options.mesh(mesh, Exchange::Tokens);
        let own = mesh.expert_table(EXPERTS).of(mesh.expert.rank()).len();
        let (mut elements, mut tensors) = (0, 0);
        recipe.trainer(rank, &mesh).model.visit(&mut |weight| {
            if matches!(weight.placement.spread, Spread::Expert(_) | Spread::ExpertTensor(_)) {
                (elements, tensors) = (elements + weight.parameter.len() / own, tensors + 1);
            }
        });
        (own, elements, tensors)
    })
}

/// Two directions, experts, weights: in each micro-batch a rank sends its own experts to each of the others, and each
/// other expert's gradient home. No counts and no rows travel. Blocks that communicate again fetch experts twice.
#[test]
fn the_bytes_are_those_of_the_experts() {
    let uneven = Options { owners: Some(vec![1, 0, 1, 1]), ..PLAIN };
    let again = |keep| Options { recompute: RecomputePolicy::Blocks { keep }, ..PLAIN };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (name, sizes) in [("mixtral", mixtral()), ("gpt2", gpt2())] {
            for (shape, options, fetched) in [
                (shape(2, 2), PLAIN, 1),
                (shape(4, 4), PLAIN, 1),
                (shape(4, 2), uneven.clone(), 1),
                (sliced(4, 2, 2), PLAIN, 1),
                (whole_experts(4, 2, 4), PLAIN, 1),
                (shape(2, 2), again(true), 1),
                (shape(2, 2), again(false), 2),
            ] {
                let what = format!("{name} in {dtype:?} on {shape:?}, {options:?}");
                let recipe = Recipe { sizes: Sizes { dtype, ..sizes.clone() }, rows: 6, micro_batch: 4 };
                let held = held(&recipe, shape, &options);
                let [training, evaluation] =
                    [in_training, in_evaluation].map(|count| count(&recipe, shape, &options, Exchange::Experts));
                for (rank, (own, elements, tensors)) in held.into_iter().enumerate() {
                    let weights = elements * dtype.bytes();
                    let [out, home] = [own * (shape.expert - 1) * weights, (EXPERTS - own) * weights];
                    let times = |n: usize, bytes: usize| [(n * tensors) as u64, (n * bytes) as u64];
                    let of_experts = |traffic: &Traffic| {
                        let mine = traffic.iter().filter(|((group, _), _)| group == "expert");
                        mine.map(|((_, kind), sent)| (*kind, *sent)).collect::<Vec<_>>()
                    };
                    let want =
                        [(Collective::AllGather, times(2 * fetched, out)), (Collective::ReduceScatter, times(2, home))];
                    assert_eq!(of_experts(&training[rank]), want, "{what}, rank {rank}");
                    // Seven rows, four at a time.
                    let want = [(Collective::AllGather, times(2, out))];
                    assert_eq!(of_experts(&evaluation[rank]), want, "{what}, rank {rank}: evaluation");
                }
            }
        }
    }
}

/// Through the program: of real text, whose routes are uneven, the plan says what is sent, and what is held.
#[test]
fn the_program_plans_experts_that_travel() {
    let shop = Workshop::new();
    let options = "--ranks 4 --set parallel.expert=4 --set parallel.exchange=experts --set train.eval_every=0";
    let planned = shop.succeeds(&format!("plan {RECIPE} {options} --json"));
    let planned: Value = serde_json::from_str(&planned.out).unwrap();
    shop.train(options);
    let summary = shop.summary(RUN);
    // Six steps of two layers, one micro-batch each.
    assert_eq!(summary["shadowed"], 6 * 2 * EXPERTS);
    for kind in ["all_gather", "reduce_scatter"] {
        let of_kind = |line: &&Value| line["group"] == "expert" && line["collective"] == kind;
        let line = planned["traffic"].as_array().unwrap().iter().find(of_kind).unwrap();
        for number in ["calls", "bytes"] {
            let of_all = 4 * 6 * line[number].as_u64().unwrap();
            assert_eq!(summary["traffic_by_group"]["expert"][kind][number], of_all, "{kind}: {number}");
        }
    }
    assert_eq!(summary["traffic_by_group"]["expert"].as_object().unwrap().len(), 2, "no all-to-all");
    let (held, predicted) = (&summary["peak_bytes"]["total"], &summary["predicted_peak_bytes"]);
    let (held, predicted) = (held.as_u64().unwrap(), predicted.as_u64().unwrap());
    assert_eq!(planned["bytes_total_skewed"].as_u64(), Some(predicted / 4));
    assert!(held <= predicted && held * 20 >= predicted * 19, "{held} of {predicted}");
}
