//! Ranks that see the same tokens: whoever of them sends a token, nothing changes but what travels.

use guildhall::metrics::Imbalance;
use guildhall::metrics::SentRows;
use guildhall::model::Sizes;
use guildhall::moe::{BalanceScope, GateKind, ScheduleKind};
use guildhall_comm::Collective;
use guildhall_tensor::{Part, Recompute};

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

/// The run without what each rank sent and received: of all that is reported, only that may change.
fn but_for_rows(mut run: Run) -> Run {
    run.reports.iter_mut().for_each(|report| (report.sent, report.imbalance) = (Vec::new(), Imbalance::EVEN));
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

/// What all ranks together sent in one step, in bytes, where their tensors' owners are elsewhere.
struct Travelled {
    /// Rows of experts, there and back, forward, again and backward.
    rows: u64,
    /// The counts before them.
    counts: u64,
    /// Sums over a tensor group: of activations and of gradients of activations.
    sums: u64,
    /// All-gathers and reduce-scatters over a tensor group or the slices of experts.
    gathers: u64,
}

fn travelled(recipe: &Recipe, shape: Shape, recompute: &Recompute) -> Travelled {
    let per_rank = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.recompute = recompute.clone();
        trainer.step(&recipe.batches(mesh, 1), 1).unwrap();
        rank.ledger.snapshot()
    });
    let sent = |groups: &[&str], kinds: &[Collective]| {
        let all = per_rank.iter().flatten();
        let of = all.filter(|((group, kind), _)| groups.contains(&group.as_str()) && kinds.contains(kind));
        of.map(|(_, traffic)| traffic.bytes).sum::<u64>()
    };
    let (layers, micro_batches) = (recipe.sizes.model.layers as u64, 2);
    let experts = recipe.sizes.moe.as_ref().expect("experts").experts.largest() as u64;
    // Eight bytes for each expert that another rank holds.
    let others = experts - experts / shape.expert as u64;
    let counts = shape.ranks as u64 * layers * micro_batches * others * 8;
    let slices = ["tensor", "expert_tensor"];
    Travelled {
        rows: sent(&["expert"], &[Collective::AllToAll]) - counts,
        counts,
        sums: sent(&slices, &[Collective::AllReduce]),
        gathers: sent(&slices, &[Collective::AllGather, Collective::ReduceScatter]),
    }
}

const ONCE: Recompute = Recompute { parts: Vec::new(), keeps: Vec::new() };

fn again(keep_communication: bool) -> Recompute {
    Recompute::of(vec![Part::Block], keep_communication)
}

/// TED's promise, exactly: all ranks together send a T-th of the rows.
#[test]
fn each_row_travels_once() {
    let recipe = recipe(mixtral(), |_| {});
    for (shape, tensor) in [(sliced(4, 2, 2), 2), (sliced(8, 2, 4), 2)] {
        let (with, without) = (travelled(&recipe, shape, &ONCE), travelled(&without_dropping(&recipe), shape, &ONCE));
        assert!(with.rows > 0 && with.counts == without.counts);
        assert_eq!(with.rows * tensor, without.rows, "{shape:?}");
        let lane = crate::world::shape(shape.ranks / 2, shape.expert);
        assert_eq!(with.rows, travelled(&recipe, lane, &ONCE).rows, "as many as without slices");
    }
}

/// Of three passes (forward, again, backward) keeping what came from others leaves two: of rows, and of sums of
/// activations. Both savings together leave (2/3) / T of the rows.
#[test]
fn keeping_and_dropping_leave_two_thirds_of_a_share() {
    let (recipe, shape, tensor) = (recipe(mixtral(), |_| {}), sliced(4, 2, 2), 2);
    let duplicates = without_dropping(&recipe);
    let baseline = travelled(&duplicates, shape, &again(false));
    let keeping = travelled(&duplicates, shape, &again(true));
    let both = travelled(&recipe, shape, &again(true));
    assert_eq!(3 * keeping.rows, 2 * baseline.rows);
    assert_eq!(3 * tensor * both.rows, 2 * baseline.rows);
    // Sums of a block, each pass: behind attention and behind the experts, or before them on the way back. Beside them
    // stand those of the table and of the head, in which nothing runs again.
    let beside = travelled(&duplicates, shape, &ONCE).sums - 2 * (baseline.sums - keeping.sums);
    assert_eq!(3 * (keeping.sums - beside), 2 * (baseline.sums - beside));
    assert!(baseline.sums > keeping.sums);
    assert!(both.gathers > keeping.gathers, "the price of dropping: rows are gathered over the slices");
    assert_eq!((baseline.counts, keeping.counts), (both.counts, both.counts), "nothing is decided twice");
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
    let noisy = |moe: &mut guildhall::moe::Config| {
        (moe.gate, moe.balance_scope) = (GateKind::Noisy.into(), Some(BalanceScope::MicroBatch))
    };
    let recipes = [
        ("mixtral", recipe(mixtral(), |_| {})),
        ("gpt2, shared experts", recipe(gpt2(), |moe| moe.shared_experts = 1)),
        ("bert, residual", recipe(bert(), |moe| moe.residual = true)),
        ("transformer-xl, overfull", recipe(transformer_xl(), |moe| moe.capacity_factor = Some(0.9))),
        ("noisy", recipe(mixtral(), noisy)),
        ("jitter", recipe(mixtral(), |moe| (moe.gate, moe.top_k) = (GateKind::Switch.into(), 1))),
        ("skipped results", recipe(mixtral(), |moe| moe.output_masking = 0.4)),
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
