//! Ranks that see the same tokens: whoever of them sends a token, nothing changes but what travels.

use std::collections::BTreeMap;

use guildhall::metrics::SentRows;
use guildhall::model::Sizes;
use guildhall::moe::{BalanceScope, GateKind, ScheduleKind};
use guildhall_comm::Collective;

use crate::parity::{Run, STEPS, compare, run, train_on};
use crate::tiny::{Recipe, bert, gpt2, mixtral, transformer_xl};
use crate::world::{ONE, Shape, on_mesh, sliced, whole_experts};

const ROWS: usize = 6;

fn recipe(mut sizes: Sizes, change: impl FnOnce(&mut guildhall::moe::Config)) -> Recipe {
    change(sizes.moe.as_mut().expect("experts"));
    Recipe { sizes, rows: ROWS, micro_batch: 4 }
}

fn without_dropping(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.sizes.moe.as_mut().expect("experts").drop_duplicates = false;
    recipe
}

/// The run without what each rank sent: of all that is reported, only that may change.
fn but_for_rows(mut run: Run) -> Run {
    run.reports.iter_mut().for_each(|report| report.sent = Vec::new());
    run
}

#[test]
fn dropping_duplicates_moves_no_bit() {
    let overfull = |moe: &mut guildhall::moe::Config| moe.capacity_factor = Some(0.7);
    let recipes = [
        ("dropless", recipe(mixtral(), |_| {})),
        ("three choices, biases", recipe(gpt2(), |_| {})),
        ("random token selection", recipe(mixtral(), overfull)),
    ];
    for (name, recipe) in recipes {
        for shape in [sliced(2, 2, 1), sliced(4, 2, 2), sliced(8, 2, 2)] {
            let [got, want] = [&recipe, &without_dropping(&recipe)].map(|recipe| but_for_rows(run(recipe, shape)));
            assert!(got == want, "{name} on {shape:?}: bits moved");
        }
    }
    // Rows that leave at several times add their gradients up in another order.
    let recipes = [
        ("steps", recipe(gpt2(), |moe| moe.schedule = ScheduleKind::Smart)),
        ("shadows", recipe(gpt2(), |moe| moe.shadowing = "force:2".to_owned())),
    ];
    for (name, recipe) in recipes {
        let [got, want] = [&recipe, &without_dropping(&recipe)].map(|recipe| run(recipe, sliced(4, 2, 2)));
        compare(name, &got, &want);
    }
}

/// Bytes of rows that all ranks sent to experts and back, forward and backward, and of the counts before them.
fn travelled(recipe: &Recipe, shape: Shape) -> [u64; 2] {
    let per_rank = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.step(&recipe.batches(mesh, 1), 1).unwrap();
        let traffic: BTreeMap<_, _> = rank.ledger.snapshot();
        traffic[&("expert".to_owned(), Collective::AllToAll)].bytes
    });
    let (layers, micro_batches) = (recipe.sizes.model.layers as u64, 2);
    let experts = recipe.sizes.moe.as_ref().expect("experts").experts as u64;
    // Eight bytes for each expert that another rank holds.
    let others = experts - experts / shape.expert as u64;
    let counts = shape.ranks as u64 * layers * micro_batches * others * 8;
    [per_rank.iter().sum::<u64>() - counts, counts]
}

/// TED's promise, exactly: all ranks together send a T-th of the rows.
#[test]
fn each_row_travels_once() {
    let recipe = recipe(mixtral(), |_| {});
    for (shape, tensor) in [(sliced(4, 2, 2), 2), (sliced(8, 2, 4), 2)] {
        let ([with, counts], [without, same]) =
            (travelled(&recipe, shape), travelled(&without_dropping(&recipe), shape));
        assert!(with > 0 && counts == same);
        assert_eq!(with * tensor, without, "{shape:?}");
        // Each row there and back, and its gradient there and back: f32 of 16 columns.
        let lane = crate::world::shape(shape.ranks / 2, shape.expert);
        let [one_lane, _] = travelled(&recipe, lane);
        assert_eq!(with, one_lane, "as many as without slices");
    }
}

/// Rows that each rank reports as sent: each route once.
#[test]
fn reported_rows_are_those_of_one_lane() {
    let recipe = recipe(mixtral(), |_| {});
    let all = |sent: &[SentRows]| sent.iter().flat_map(|layer| layer.rows.iter().flatten()).sum::<u64>();
    let want = all(&run(&recipe, ONE).reports[0].sent);
    for shape in [sliced(4, 2, 2), whole_experts(4, 2, 4)] {
        assert_eq!(all(&run(&recipe, shape).reports[0].sent), want, "{shape:?}");
        let lanes = without_dropping(&recipe);
        if shape.expert_tensor == 2 {
            assert_eq!(all(&run(&lanes, shape).reports[0].sent), 2 * want, "every lane sends its copy");
        }
    }
}

/// With the stream split by tokens every rank routes all and sends its own.
#[test]
fn a_split_stream_trains_alike() {
    let noisy =
        |moe: &mut guildhall::moe::Config| (moe.gate, moe.balance_scope) = (GateKind::Noisy, BalanceScope::MicroBatch);
    let recipes = [
        ("mixtral", recipe(mixtral(), |_| {})),
        ("gpt2, shared experts", recipe(gpt2(), |moe| moe.shared_experts = 1)),
        ("bert, residual", recipe(bert(), |moe| moe.residual = true)),
        ("transformer-xl, overfull", recipe(transformer_xl(), |moe| moe.capacity_factor = Some(0.9))),
        ("noisy", recipe(mixtral(), noisy)),
        ("jitter", recipe(mixtral(), |moe| (moe.gate, moe.top_k) = (GateKind::Switch, 1))),
        ("steps", recipe(mixtral(), |moe| moe.schedule = ScheduleKind::Smart)),
        ("shadows", recipe(gpt2(), |moe| moe.shadowing = "force:2".to_owned())),
    ];
    for (name, recipe) in recipes {
        let want = run(&recipe, ONE);
        assert_eq!(want.reports.len() as u64, STEPS);
        for shape in [sliced(2, 2, 1), sliced(4, 2, 2), whole_experts(4, 2, 4)] {
            let got = train_on(&recipe, shape, |_, mesh| mesh.clone().with_sequence(true), |_| ());
            compare(&format!("{name}, split on {shape:?}"), &got, &want);
            let got = run(&recipe, shape);
            compare(&format!("{name}, whole on {shape:?}"), &got, &want);
        }
    }
}
