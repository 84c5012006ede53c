//! Parts of a model that are not trained: they keep their bits, cost neither gradients nor state nor messages, and change
//! nothing of what the others learn from a step.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{
    Destination, Extra, TensorKind, TrainingProgress, load_model, load_optimizer, open, retyped, save,
};
use guildhall::launch::Rank;
use guildhall::model::{Model, Role, Sizes, count};
use guildhall::moe::{BalanceScope, GateKind, ScheduleKind};
use guildhall::parallel::{Mesh, Parameters, Zero};
use guildhall::plan::{Layout, Load, Offload, RecomputePolicy, StepCost, Task, step, traffic};
use guildhall::train::{Replacing, StepReport, Trainer};
use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype, Part, Recompute};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::gates::biased;
use crate::plan::{check, plain};
use crate::program::{RECIPE, RUN, Workshop};
use crate::tiny::{
    Recipe, Tensors, bert, families, gpt2, gradient_shares, mixtral, nllb, same_bits, state, union, weights, with,
};
use crate::world::{ONE, SLICED, Shape, on_mesh, shape, sliced, whole_experts};
use crate::zero::{Keeping, keeping, ways};

const STEPS: u64 = 3;

/// All roles but these.
fn all_but(trained: &[Role]) -> Vec<Role> {
    Role::ALL.into_iter().filter(|role| !trained.contains(role)).collect()
}

/// Each part alone, experts alone, what a new gate or a new head would be trained with, and norms.
fn choices() -> Vec<Vec<Role>> {
    let alone = Role::ALL.map(|role| vec![role]);
    let only: [&[Role]; 4] =
        [&[Role::Experts], &[Role::Router, Role::Experts], &[Role::Embedding, Role::Head], &[Role::Norms]];
    alone.into_iter().chain(only.map(all_but)).collect()
}

fn frozen(sizes: Sizes, frozen: &[Role]) -> Sizes {
    Sizes { frozen: frozen.to_vec(), ..sizes }
}

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 6, micro_batch: 3 }
}

/// The tensors of a model, each with what it is for.
fn named(sizes: &Sizes) -> Vec<(Role, String)> {
    on_mesh(ONE, |rank, mesh| {
        let mut named = Vec::new();
        Model::new(&rank.device, sizes, mesh).visit_roles(&mut |role, weight| {
            named.extend(weight.placement.pieces.iter().map(|piece| (role, piece.name.clone())));
        });
        named
    })
    .remove(0)
}

/// The names of those of some roles.
fn names(sizes: &Sizes, of: impl Fn(Role) -> bool) -> Vec<String> {
    named(sizes).into_iter().filter(|(role, _)| of(*role)).map(|(_, name)| name).collect()
}

#[test]
fn every_weight_is_of_one_role_and_lacking_roles_are_known() {
    for (name, sizes) in families() {
        let changed = [
            sizes.clone(),
            Sizes { moe: None, ..sizes.clone() },
            with(sizes.clone(), |moe| (moe.shared_experts, moe.residual) = (0, false)),
            with(sizes.clone(), |moe| (moe.shared_experts, moe.residual) = (0, true)),
            with(sizes.clone(), |moe| (moe.shared_experts, moe.residual) = (2, false)),
        ];
        for sizes in changed {
            for tie_embeddings in [false, true] {
                let mut sizes = sizes.clone();
                sizes.model.tie_embeddings = tie_embeddings;
                let named = named(&sizes);
                for role in Role::ALL {
                    let (has, lacks) =
                        (named.iter().any(|(own, _)| *own == role), sizes.model.lacks(role, sizes.moe.as_ref()));
                    assert_eq!(has, lacks.is_none(), "{name}, {role:?}");
                }
            }
        }
    }
    let of = |sizes: &Sizes, role: Role| names(sizes, |own| own == role);
    assert_eq!(of(&mixtral(), Role::Router), [0, 1].map(|n| format!("model.layers.{n}.block_sparse_moe.gate.weight")));
    assert_eq!(of(&mixtral(), Role::Embedding), ["model.embed_tokens.weight"]);
    assert_eq!(of(&mixtral(), Role::Head), ["lm_head.weight"]);
    assert_eq!(of(&mixtral(), Role::Norms).len(), 2 * 2 + 1);
    assert_eq!(of(&mixtral(), Role::Experts).len(), 2 * 4 * 3);
}

/// What a rank has after its part of a run: shares of the first step's gradients, weights before and after, state.
struct Learnt {
    gradients: Tensors,
    before: Tensors,
    state: Tensors,
    reports: Vec<StepReport>,
}

fn learn(recipe: &Recipe, keeping: &Keeping, recompute: &Recompute, rank: &Rank, mesh: &Mesh) -> Learnt {
    let trainer = || {
        let mut trainer = keeping.trainer(recipe, rank, mesh);
        trainer.recompute = recompute.clone();
        trainer
    };
    let mut first = trainer();
    let Trainer { mesh, .. } = &first;
    let (mesh, batches) = (mesh.clone(), recipe.batches(mesh, 1));
    first.gradients(&batches, 1).unwrap();
    let Trainer { model, optimizer, .. } = &mut first;
    optimizer.recall(model).unwrap();
    let gradients = gradient_shares(model, &mesh);
    drop(first);
    let mut trainer = trainer();
    let before = weights(&mut trainer.model);
    let reports = recipe.train(&mut trainer, 1..=STEPS);
    Learnt { gradients, before, state: state(&mut trainer), reports }
}

/// The same of all ranks together.
fn learnt(recipe: &Recipe, shape: Shape, keeping: &Keeping, recompute: &Recompute) -> Learnt {
    let ranks = on_mesh(shape, |rank, mesh| learn(recipe, keeping, recompute, rank, mesh));
    let reports = ranks[0].reports.clone();
    let all = |of: fn(&Learnt) -> &Tensors| union(ranks.iter().map(|rank| of(rank).clone()));
    Learnt { gradients: all(|it| &it.gradients), before: all(|it| &it.before), state: all(|it| &it.state), reports }
}

/// The norm of some of a model's gradients, in f64.
fn norm<'a>(gradients: &Tensors, of: impl Iterator<Item = &'a String>) -> f64 {
    of.flat_map(|name| &gradients[name]).map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Frozen weights keep their bits and have no moments; the others' first gradients are those of a run that trains all,
/// to the bit, and the norm is theirs.
fn check_learning(what: &str, sizes: &Sizes, roles: &[Role], (shape, keeping): (Shape, &Keeping), again: &Recompute) {
    let own = |role: Role| roles.contains(&role);
    let (kept, trained) = (names(sizes, own), names(sizes, |role| !own(role)));
    let what = format!("{what} without {roles:?} on {shape:?}, {keeping:?}");
    let whole = learnt(&recipe(sizes.clone()), shape, keeping, again);
    let part = learnt(&recipe(frozen(sizes.clone(), roles)), shape, keeping, again);
    for name in &kept {
        assert!(same_bits(&part.before[name], &part.state[name]), "{what}: {name} moved");
        assert!(!part.state.contains_key(&format!("m/{name}")), "{what}: {name} has moments");
    }
    for name in &trained {
        assert!(same_bits(&part.gradients[name], &whole.gradients[name]), "{what}: the gradient of {name} differs");
        assert!(part.state.contains_key(&format!("v/{name}")), "{what}: {name} has no moments");
    }
    assert!(trained.iter().any(|name| !same_bits(&part.before[name], &part.state[name])), "{what}: nothing moved");
    let apart = part.reports[0].gradient_norm / norm(&part.gradients, trained.iter()) - 1.0;
    assert!(apart.abs() < 1e-9, "{what}: the norm is {apart:e} away from that of what is trained");
    assert_eq!(part.reports[0].loss, whole.reports[0].loss, "{what}");
}

fn nothing_again() -> Recompute {
    Recompute::of(Vec::new(), true)
}

#[test]
fn frozen_weights_stay_and_the_others_learn_the_same() {
    let half = Sizes { dtype: Dtype::Bf16, ..mixtral() };
    for (name, sizes) in [("mixtral", mixtral()), ("gpt2", gpt2()), ("bf16", half)] {
        for roles in choices() {
            for shape in [ONE, shape(4, 2)] {
                check_learning(name, &sizes, &roles, (shape, &keeping(Zero::Off)), &nothing_again());
            }
        }
    }
    for (name, sizes) in [("bert", bert()), ("nllb", nllb())] {
        for roles in [vec![Role::Attention, Role::Embedding], all_but(&[Role::Experts])] {
            check_learning(name, &sizes, &roles, (shape(2, 2), &keeping(Zero::Off)), &nothing_again());
        }
    }
}

#[test]
fn on_slices_too() {
    for roles in [vec![Role::Router, Role::Head], all_but(&[Role::Experts])] {
        for shape in SLICED.into_iter().filter(|shape| shape.ranks < 8) {
            check_learning("mixtral", &mixtral(), &roles, (shape, &keeping(Zero::Off)), &nothing_again());
        }
    }
}

/// Experts that visit other ranks, rows that leave in several steps, a network beside the experts.
#[test]
fn with_experts_that_visit_too() {
    let visiting = with(mixtral(), |moe| {
        (moe.shadowing, moe.schedule, moe.shared_experts) = ("force:1".to_owned(), ScheduleKind::Smart, 1);
    });
    for roles in [vec![Role::Experts], all_but(&[Role::Experts]), all_but(&[Role::SharedExperts])] {
        for shape in [shape(4, 2), shape(4, 4)] {
            check_learning("visiting", &visiting, &roles, (shape, &keeping(Zero::Off)), &nothing_again());
        }
        let recipe = Recipe { rows: 8, micro_batch: 8, ..recipe(frozen(visiting.clone(), &roles)) };
        check(&format!("visiting without {roles:?}"), &recipe, plain(shape(4, 4)));
    }
}

#[test]
fn in_shares_tiles_and_elsewhere_too() {
    let folder = tempfile::tempdir().unwrap();
    for (number, keeping) in ways(folder.path()).into_iter().enumerate() {
        let choices = choices();
        let roles = &choices[(5 * number) % choices.len()];
        for sizes in [mixtral(), Sizes { dtype: Dtype::Bf16, ..mixtral() }] {
            check_learning("mixtral", &sizes, roles, (shape(4, 2), &keeping), &nothing_again());
        }
    }
}

#[test]
fn with_what_runs_again_too() {
    let parts = [vec![Part::Block], vec![Part::Attention, Part::Activation, Part::Experts]];
    for (roles, parts) in choices().into_iter().zip(parts.iter().cycle()) {
        for zero in [Zero::Off, Zero::Parameters] {
            let again = Recompute::of(parts.clone(), true);
            check_learning("gpt2", &gpt2(), &roles, (shape(4, 2), &keeping(zero)), &again);
        }
    }
}

/// The bias that balances a router is a part of it; the loads of the step before are not.
#[test]
fn the_bias_of_a_frozen_router_stays() {
    let sizes = with(mixtral(), |moe| (moe.gate, moe.balance_scope) = (biased(0.05), Some(BalanceScope::GlobalBatch)));
    let buffers = |roles: &[Role]| {
        let recipe = recipe(frozen(sizes.clone(), roles));
        on_mesh(shape(2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            recipe.train(&mut trainer, 1..=STEPS);
            let mut buffers = Tensors::new();
            trainer.model.visit_buffers(&mut |buffer| {
                buffers.insert(buffer.placement.pieces[0].name.clone(), buffer.value.to_vec());
            });
            buffers
        })
        .remove(0)
    };
    for (roles, moves) in [(vec![Role::Router], false), (vec![Role::Experts], true)] {
        for (name, values) in buffers(&roles) {
            let moved = values.iter().any(|&x| x != 0.0);
            assert_eq!(moved, moves || name.ends_with("previous_load"), "{name} without {roles:?}: {values:?}");
        }
    }
}

/// Experts that change ranks take along what there is of them.
#[test]
fn frozen_experts_change_ranks() {
    for roles in [vec![Role::Experts], vec![Role::Embedding, Role::Norms]] {
        changing_ranks_changes_no_bit(&format!("{roles:?}"), &frozen(mixtral(), &roles));
    }
}

/// At every stage of ZeRO a model of eight experts learns the same whether they change ranks in every step or stay.
#[track_caller]
pub(crate) fn changing_ranks_changes_no_bit(what: &str, sizes: &Sizes) {
    for zero in Zero::ALL {
        let sizes = with(sizes.clone(), |moe| moe.experts = 8.into());
        let recipe = Recipe { sizes, rows: 6, micro_batch: 6 };
        let train = |every: Option<u64>| {
            let ranks = on_mesh(shape(4, 2), |rank, mesh| {
                let mut trainer = keeping(zero).trainer(&recipe, rank, mesh);
                trainer.replacing = every.map(|every| Replacing { every, gain: 0.0, loads: Vec::new() });
                let reports = recipe.train(&mut trainer, 1..=STEPS);
                (reports.iter().flat_map(|it| &it.replaced).map(|it| it.moved).sum::<usize>(), state(&mut trainer))
            });
            (ranks[0].0, union(ranks.into_iter().map(|rank| rank.1)))
        };
        let ((moves, moved), (_, stayed)) = (train(Some(1)), train(None));
        assert!(moves > 0, "{what}, {zero:?}");
        assert!(moved.keys().eq(stayed.keys()));
        moved.iter().for_each(|(name, x)| assert!(same_bits(x, &stayed[name]), "{name}, {what}, {zero:?}"));
    }
}

// --- bytes ------------------------------------------------------------------------------------------------------

/// The plan of a step, which is the step: memory and messages of frozen models are foreseen as those of others.
#[test]
fn bytes_of_frozen_models_are_foreseen() {
    for (name, sizes) in families() {
        let roles =
            [vec![Role::Router, Role::Norms], all_but(&[Role::Experts]), all_but(&[Role::Head, Role::Embedding])];
        for roles in roles {
            for (dtype, shape, zero) in [(Dtype::F32, ONE, 0), (Dtype::Bf16, shape(4, 2), 3)] {
                let recipe =
                    Recipe { sizes: Sizes { dtype, ..frozen(sizes.clone(), &roles) }, rows: 8, micro_batch: 8 };
                check(&format!("{name} {dtype:?} without {roles:?}"), &recipe, Layout { zero, ..plain(shape) });
            }
        }
    }
    let blocks = RecomputePolicy::Blocks { keep: false };
    for roles in choices() {
        for (shape, zero, offload, recompute) in [
            (sliced(4, 2, 2), 1, Offload::None, RecomputePolicy::Nothing),
            (whole_experts(4, 2, 4), 0, Offload::None, blocks.clone()),
            (shape(4, 2), 2, Offload::Host, RecomputePolicy::Nothing),
            (shape(4, 2), 3, Offload::None, blocks.clone()),
        ] {
            let mut sizes = with(frozen(mixtral(), &roles), |moe| moe.gate = GateKind::Balanced.into());
            sizes.model.kv_heads = Some(4);
            let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
            let layout = Layout { zero, offload, recompute, ..plain(shape) };
            check(&format!("mixtral without {roles:?} at stage {zero}"), &recipe, layout);
        }
    }
}

fn cost(sizes: &Sizes, layout: Layout) -> StepCost {
    let task = Task { sizes: sizes.clone(), layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
    step(&task, 0, &Load::Even { imbalance: 1.0 })
}

/// Four bytes of gradient and eight of state for each element that is trained, no more; gradients alone are sent to holders.
#[test]
fn what_is_frozen_costs_its_weights_alone() {
    for roles in choices() {
        let sizes = frozen(mixtral(), &roles);
        let (all, trained) = on_mesh(ONE, |rank, mesh| {
            let (mut all, mut trained) = (0, 0);
            Model::new(&rank.device, &sizes, mesh).visit_roles(&mut |role, weight| {
                all += weight.parameter.len() as u64;
                trained += if roles.contains(&role) { 0 } else { weight.parameter.len() as u64 };
            });
            (all, trained)
        })[0];
        let counts = count(&sizes);
        assert_eq!((counts.total, counts.trained), (all, trained));
        let peaks = cost(&sizes, plain(ONE)).peaks;
        let of = |cause| peaks.of(cause);
        assert_eq!(of(Cause::Parameters), 4 * all, "{roles:?}");
        assert_eq!([of(Cause::Gradients), of(Cause::Optimizer)], [4 * trained, 8 * trained], "{roles:?}");
        // Of two ranks that hold everything, each sends half of a gradient's terms and half of its sums.
        let sent = |sizes: &Sizes| {
            let sent = traffic(&cost(sizes, plain(shape(2, 1))).messages).into_iter();
            let reductions = sent.filter(|((_, collective), _)| *collective == Collective::AllReduce);
            reductions.map(|(_, traffic)| traffic.bytes).sum::<u64>()
        };
        assert_eq!(sent(&mixtral()) - sent(&sizes), 4 * (all - trained), "{roles:?}");
    }
}

// --- files ------------------------------------------------------------------------------------------------------

fn write(run: &Path, trainer: &mut Trainer, step: u64) -> PathBuf {
    let progress = TrainingProgress { step, tokens: 0, seconds: 0.0, loss_trend: None };
    let extra = Extra { progress, data_fingerprint: String::new(), files: Vec::new() };
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save(Destination::of(run), model, optimizer, mesh, extra).unwrap()
}

/// All weights are in a checkpoint and the state of those that are trained, on any mesh; stopping and continuing on another
/// stage changes no bit.
#[test]
fn checkpoints_have_the_state_of_what_is_trained() {
    for roles in [vec![Role::Router, Role::Attention], all_but(&[Role::Experts])] {
        // Stages add several micro-batches up in other orders.
        let recipe = Recipe { micro_batch: 6, ..recipe(frozen(mixtral(), &roles)) };
        for shape in [ONE, shape(4, 2), sliced(4, 2, 2)] {
            let runs = tempfile::tempdir().unwrap();
            let zeros = if shape == ONE { [Zero::Off; 2] } else { [Zero::Optimizer, Zero::Parameters] };
            let train = |run: &str, zero: Zero, resumed: Option<&Path>, steps: RangeInclusive<u64>| {
                let ranks = on_mesh(shape, |rank, mesh| {
                    let mut trainer = keeping(zero).trainer(&recipe, rank, mesh);
                    if let Some(folder) = resumed {
                        let (source, Trainer { model, optimizer, mesh, .. }) = (open(folder).unwrap(), &mut trainer);
                        let source = retyped(&source, model, optimizer, mesh).unwrap();
                        load_model(&source, model).unwrap();
                        load_optimizer(&source, model, optimizer).unwrap();
                    }
                    recipe.train(&mut trainer, steps.clone());
                    (write(&runs.path().join(run), &mut trainer, *steps.end()), state(&mut trainer))
                });
                (ranks[0].0.clone(), union(ranks.into_iter().map(|rank| rank.1)))
            };
            let (_, want) = train("at once", zeros[0], None, 1..=4);
            let (folder, _) = train("first", zeros[0], None, 1..=2);
            let (_, got) = train("second", zeros[1], Some(&folder), 3..=4);
            assert!(got.keys().eq(want.keys()));
            got.iter().for_each(|(name, x)| assert!(same_bits(x, &want[name]), "{name} on {shape:?}"));
            let files = open(&folder).unwrap();
            let there = |kind| {
                let mut names: Vec<String> =
                    files.tensors(kind).unwrap().entries().map(|(name, _)| name.clone()).collect();
                names.sort();
                names
            };
            let mut weights = names(&recipe.sizes, |_| true);
            weights.sort();
            assert_eq!(there(TensorKind::Model), weights);
            let trained = names(&recipe.sizes, |role| !roles.contains(&role));
            let mut state: Vec<String> = trained.iter().flat_map(|n| [format!("m/{n}"), format!("v/{n}")]).collect();
            state.sort();
            assert_eq!(there(TensorKind::Optimizer), state);
        }
    }
}

/// The program fine-tunes a checkpoint on another mesh, says what it trains, and goes on only as it began.
#[test]
fn the_program_fine_tunes_a_checkpoint() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let tune = "train tiny.toml --set train.init=runs/tiny --set run.dir=tuned --set train.only=experts";
    let said = shop.succeeds(&format!("{tune} --ranks 2 --set parallel.expert=2 --set train.steps=4")).err;
    assert!(said.contains("trained  "), "{said}");
    assert!(said.contains("frozen: embedding, attention, norms, router, head"), "{said}");
    let tensors = |run: &str, step| {
        let folder = shop.checkpoint(run, step);
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        let of = |(name, view): (String, TensorView<'_>)| (name, view.data().to_vec());
        read.tensors().into_iter().map(of).collect::<BTreeMap<_, _>>()
    };
    let (before, after) = (tensors(RUN, 2), tensors("tuned", 4));
    for (name, bytes) in &before {
        assert_eq!(*bytes != after[name], name.contains(".experts."), "{name}");
    }
    let differs = ["cannot be continued", "train.only: was \"experts\", now \"all\""];
    shop.fails("train tiny.toml --set run.dir=tuned --resume --set train.steps=6", 2, &differs);
    let differs = ["train.freeze: was absent, now [\"head\"]"];
    let other = "train tiny.toml --set run.dir=runs/tiny --resume --set train.steps=6 --set train.freeze=[\"head\"]";
    shop.fails(other, 2, &differs);
    shop.succeeds(&format!("{tune} --resume --set train.steps=6"));
    let plan = shop.succeeds(&format!("plan {RECIPE} --set train.freeze=[\"experts\"] --json")).out;
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let of = |key: &str| plan["parameters"][key].as_u64().unwrap();
    assert_eq!(of("trained"), of("total") - of("experts"));
}

/// Nothing is recorded for backward below the first weight that is trained.
#[test]
fn layers_before_what_is_trained_keep_no_activations() {
    let of = |roles: &[Role]| cost(&frozen(mixtral(), roles), plain(ONE)).at_peak.of(Cause::Activations);
    let [all, head] = [Vec::new(), all_but(&[Role::Head])].map(|roles| of(&roles));
    assert!(2 * head < all, "{head} of {all}");
}
