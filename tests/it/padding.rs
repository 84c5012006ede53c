//! Padding at the ends of rows changes nothing: it goes to no expert, takes no places, and counts in no loss.

use std::sync::Arc;

use guildhall::data::{Batch, BatchPlan, IGNORE, PAD, Row, StepBatches};
use guildhall::model::Sizes;
use guildhall::moe::migration::Migrating;
use guildhall::moe::{self, BalanceScope, Dialect, GateKind, MigrationPolicy, Overflow, Routings};
use guildhall::parallel::Migrate;

use crate::parity::{Run, compare, row};
use crate::tiny::{Recipe, nllb, share};
use crate::world::{ONE, Shape, on_mesh, shape, sliced};

/// Rows of texts, each with what it is a translation of: lengths of the texts, text by text.
type Pairs = [(&'static [usize], &'static [usize])];

/// Six tokens in every row, seven in every row to read.
const FULL: &Pairs = &[(&[4, 2], &[3, 4]), (&[5, 1], &[5, 2]), (&[3, 3], &[1, 6]), (&[6], &[7])];
/// Six in both.
const ALIKE: &Pairs = &[(&[4, 2], &[3, 3]), (&[5, 1], &[5, 1]), (&[3, 3], &[1, 5]), (&[6], &[6])];
/// And as many rows without any.
const WITH_EMPTY: &Pairs = &[FULL[0], FULL[1], FULL[2], FULL[3], (&[], &[]), (&[], &[]), (&[], &[]), (&[], &[])];

const OVERFLOWS: [Overflow; 5] =
    [Overflow::Position, Overflow::Probability, Overflow::Random, Overflow::Reroute, Overflow::Node];

/// The texts, and padding up to `seq`.
fn padded(lengths: &[usize], seq: usize) -> Row {
    let mut row = row(lengths);
    row.tokens.resize(seq, 0);
    row.targets.resize(seq, IGNORE);
    row.segments.resize(seq, PAD);
    row.positions.resize(seq, 0);
    row
}

fn sizes(change: impl FnOnce(&mut moe::Config)) -> Sizes {
    let mut sizes = nllb();
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.capacity_factor, moe.logical_nodes) = (Some(0.8), 2);
    change(moe);
    sizes
}

/// A step on rows of `[to read, to predict]` tokens.
fn train(sizes: &Sizes, shape: Shape, pairs: &Pairs, lengths: [usize; 2]) -> Run {
    train_with(sizes, (shape, false), Migrate::Off, (pairs, lengths))
}

/// The same with sequence parallelism or without, and sequences that migrate or do not.
fn train_with(
    sizes: &Sizes,
    (shape, sequence): (Shape, bool),
    migrate: Migrate,
    (pairs, [source_seq, seq]): (&Pairs, [usize; 2]),
) -> Run {
    let recipe = Recipe { sizes: sizes.clone(), rows: pairs.len(), micro_batch: pairs.len() };
    Run::of_all(on_mesh(shape, |rank, mesh| {
        let mesh = &mesh.clone().with_sequence(sequence);
        let (rank_of_data, ranks) = (mesh.data.rank(), mesh.data.size());
        let plan =
            BatchPlan { seed: 0, rows_per_step: pairs.len(), micro_batch: pairs.len(), rank: rank_of_data, ranks };
        let texts = |seq, of: fn(&(&'static [usize], &'static [usize])) -> &'static [usize]| -> Batch {
            share(plan.share(0), seq, |place| padded(of(&pairs[place]), seq))
        };
        let batch = texts(seq, |pair| pair.0).reading(texts(source_seq, |pair| pair.1));
        let mut trainer = recipe.trainer(rank, mesh);
        let policy = Migrating::new(migrate, (None, 0.25), 2);
        let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        trainer.routings = Arc::new(Routings { migration, ..Routings::NONE });
        let report = trainer.step(&StepBatches { step: 1, micro: vec![batch] }, 1).unwrap();
        Run::of(&mut trainer, vec![report])
    }))
}

fn dropped(run: &Run) -> u64 {
    run.reports[0].moe.iter().map(|layer| layer.dropped).sum()
}

const SHAPES: [Shape; 4] = [ONE, shape(2, 2), shape(4, 2), sliced(2, 2, 1)];

/// Every way of giving out places, of choosing, and of comparing loads.
fn cases() -> Vec<(String, Sizes)> {
    let policies = OVERFLOWS.map(|overflow| (format!("{overflow:?}"), sizes(|moe| moe.overflow = overflow)));
    let gates = [
        (GateKind::Gshard, 2),
        (GateKind::Switch, 1),
        (GateKind::Noisy, 2),
        (GateKind::DistributedCapacity, 2),
        (GateKind::Sigmoid, 2),
        (GateKind::ExpertChoice, 2),
    ];
    let gates = gates.map(|(gate, top_k)| {
        (format!("{gate:?}"), sizes(|moe| (moe.gate, moe.top_k, moe.capacity_factor) = (gate.into(), top_k, Some(1.0))))
    });
    let scope = Some(BalanceScope::MicroBatch);
    let others = [
        ("hf", sizes(|moe| moe.dialect = Some(Dialect::Hf))),
        ("micro-batch", sizes(|moe| moe.balance_scope = scope)),
        ("noise by micro-batch", sizes(|moe| (moe.gate, moe.balance_scope) = (GateKind::Noisy.into(), scope))),
        ("jitter", sizes(|moe| moe.jitter = Some(0.1))),
        ("dropless", sizes(|moe| moe.capacity_factor = None)),
        ("beside", sizes(|moe| moe.shared_experts = 1)),
    ];
    policies.into_iter().chain(gates).chain(others.map(|(name, sizes)| (name.to_owned(), sizes))).collect()
}

/// Whatever draws by a token's number draws the same: rows before keep their numbers.
#[test]
fn rows_without_tokens_change_nothing() {
    for (name, sizes) in cases() {
        let want = train(&sizes, ONE, FULL, [7, 6]);
        let drops = sizes.moe.as_ref().is_some_and(|moe| moe.capacity_factor == Some(0.8));
        let moves = ["Reroute", "Node"].contains(&&name[..]);
        assert!(!drops || moves || dropped(&want) > 0, "{name}: all routes had a place");
        for shape in SHAPES {
            compare(&format!("{name} on {shape:?}"), &train(&sizes, shape, WITH_EMPTY, [7, 6]), &want);
        }
    }
}

#[test]
fn longer_rows_change_nothing() {
    let draws = ["Random", "Gshard", "Switch", "Noisy", "DistributedCapacity", "noise by micro-batch", "jitter"];
    for (name, sizes) in cases().into_iter().filter(|(name, _)| !draws.contains(&&name[..])) {
        let want = train(&sizes, ONE, FULL, [7, 6]);
        for shape in SHAPES {
            compare(&format!("{name} on {shape:?}"), &train(&sizes, shape, FULL, [11, 8]), &want);
        }
    }
}

/// Tokens of a row on several ranks, and rows that move to others: padding goes with them.
#[test]
fn split_and_moving_rows_keep_their_padding() {
    for (name, sizes) in cases() {
        let want = train(&sizes, ONE, FULL, [7, 6]);
        for (mesh, migrate) in [((sliced(2, 2, 1), true), Migrate::Off), ((shape(2, 2), false), Migrate::Force)] {
            let got = train_with(&sizes, mesh, migrate, (WITH_EMPTY, [7, 6]));
            compare(&format!("{name} on {mesh:?}, {migrate:?}"), &got, &want);
        }
    }
}

/// Groups of a row each.
#[test]
fn longer_groups_change_nothing() {
    for overflow in [Overflow::Position, Overflow::Probability, Overflow::Reroute] {
        let of_group = |tokens| sizes(|moe| (moe.overflow, moe.group_tokens) = (overflow, Some(tokens)));
        let want = train(&of_group(6), ONE, ALIKE, [6, 6]);
        for shape in SHAPES {
            compare(&format!("{overflow:?} on {shape:?}"), &train(&of_group(9), shape, ALIKE, [9, 9]), &want);
        }
    }
}

/// A gate that compares tokens would count padding among them.
#[test]
fn gates_that_would_count_padding_are_refused() {
    let sizes = sizes(|moe| (moe.gate, moe.capacity_factor) = (GateKind::Sinkhorn.into(), None));
    train(&sizes, ONE, FULL, [7, 6]);
    let recipe = Recipe { sizes, rows: 1, micro_batch: 1 };
    let told = on_mesh(ONE, |rank, mesh| {
        let texts = |seq| share(0..1, seq, |_| padded(&[4, 2], seq));
        let micro = vec![texts(6).reading(texts(8))];
        let told = recipe.trainer(rank, mesh).step(&StepBatches { step: 1, micro }, 1);
        told.map(|_| ()).expect_err("padding among tokens that are compared").to_string()
    });
    assert!(told[0].contains("would count the padding") && told[0].contains("layer 1"), "{}", told[0]);
}
