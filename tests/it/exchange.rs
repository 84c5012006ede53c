//! What ranks tell each other before tokens that compete are routed: nothing where a routing group lies on one rank, and
//! otherwise the least that decides, between the ranks of a group alone.

use std::collections::BTreeMap;

use guildhall::launch::Rank;
use guildhall::moe::gates::{GateDraws, Tokens};
use guildhall::moe::{self, GateKind, Homes, Overflow, Peers};
use guildhall::parallel::Mesh;
use guildhall::plan::{self, Layout, Task};
use guildhall_comm::Collective;

use crate::gates::{GATES, OVERFLOWS};
use crate::gates::{of_two_workers, of_workers};
use crate::tiny::{BUCKETING, Recipe, mixtral};
use crate::world::{on_mesh, shape, sliced};

type Sent = BTreeMap<(String, Collective), [u64; 2]>;

/// Calls and bytes of what `f` makes this rank send.
fn sent(rank: &Rank, f: impl FnOnce()) -> Sent {
    let before = rank.ledger.snapshot();
    f();
    let mut sent = Sent::new();
    for (key, now) in rank.ledger.snapshot() {
        let then = before.get(&key).copied().unwrap_or_default();
        if now.calls > then.calls {
            sent.insert(key, [now.calls - then.calls, now.bytes - then.bytes]);
        }
    }
    sent
}

/// A step of the tiny model on two data-parallel ranks, each of which has four of its eight rows.
fn of_step(change: impl Fn(&mut moe::Config) + Sync) -> Vec<Sent> {
    on_mesh(shape(2, 1), |rank: &Rank, mesh: &Mesh| {
        let mut sizes = mixtral();
        sizes.moe.iter_mut().for_each(&change);
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        let mut trainer = recipe.trainer(rank, mesh);
        sent(rank, || drop(recipe.train(&mut trainer, 1..=1)))
    })
}

/// Every gate with every policy, its groups on one rank each: besides what a gate without competition sends, the ranks tell
/// each other once which tokens they have.
#[test]
fn groups_on_one_rank_exchange_nothing() {
    // Sums are as long as what a gate's weights and choices come to.
    let length = |collective, bytes| if collective == Collective::AllReduce { 0 } else { bytes };
    let data = |sent: &Sent| -> Sent {
        let of_data = sent.iter().filter(|((group, _), _)| group == "data");
        of_data.map(|(key, [calls, bytes])| (key.clone(), [*calls, length(key.1, *bytes)])).collect()
    };
    let quiet: Vec<Sent> = of_step(|_| {}).iter().map(data).collect();
    for &gate in GATES {
        for overflow in OVERFLOWS.map(Some).into_iter().chain([None]) {
            let got = of_step(|moe| {
                (moe.gate, moe.top_k) = (of_two_workers(gate), gate.only_top_k().unwrap_or(2));
                moe.logical_nodes = 2;
                // A rank's 32 tokens are two groups.
                moe.group_tokens = Some(16);
                moe.capacity_factor = overflow.map(|_| 0.9);
                moe.overflow = overflow.unwrap_or_default();
            });
            let competes = overflow.is_some()
                || [GateKind::Swipe, GateKind::Topology, GateKind::ExpertChoice, GateKind::Sinkhorn].contains(&gate);
            for (got, quiet) in got.iter().map(data).zip(&quiet) {
                let mut want = quiet.clone();
                let [calls, bytes] = want.get_mut(&("data".to_owned(), Collective::AllGather)).expect("token counts");
                if competes {
                    (*calls, *bytes) = (*calls + 1, *bytes + 16);
                }
                assert_eq!(got, want, "{}, {overflow:?}", gate.name());
            }
        }
    }
}

/// Bytes that each of three ranks, with 12, no and 20 of 32 tokens, sends for one routing.
fn of_route(config: &moe::Config) -> Vec<Sent> {
    on_mesh(shape(3, 1), |rank: &Rank, _| {
        let shares = [0..12u64, 12..12, 12..32];
        let mine = shares[rank.world.rank()].clone();
        let scores = |i: u64| ((i * 7919) % 613) as f32 / 100.0;
        let experts = config.experts.largest() as u64;
        let logits: Vec<f32> = (mine.start * experts..mine.end * experts).map(scores).collect();
        let draws = GateDraws { seed: 3, step: 1, layer: 0, trains: true };
        let bias = vec![0.0; config.experts.largest()];
        let tokens = Tokens {
            logits: &logits,
            largest: None,
            experts: config.experts.largest(),
            first: mine.start,
            ids: &[],
            bias: &bias,
            padding: &[],
            draws,
        };
        let homes = Homes::new(shares);
        let peers = Peers { group: &rank.world, homes: &homes, device: &rank.device };
        let live = rank.device.account().live_total();
        let sent = sent(rank, || drop(config.widest().selector().route(&[tokens], &peers).expect("a routing")));
        let account = rank.device.account();
        let moved: u64 = sent.values().map(|[_, bytes]| bytes).sum();
        assert!(account.peak_total() >= live + moved && account.live_total() == live, "what travels is accounted for");
        sent
    })
}

/// Experts chosen together are added up when somebody asks, and cost a step nothing.
#[test]
fn pairs_travel_when_they_are_asked_for() {
    // Ranks that see the same tokens count them once.
    let cases = [(shape(4, 2), 0), (shape(4, 2), 100), (sliced(4, 2, 2), 100)];
    for (shape, every) in cases {
        let seen = on_mesh(shape, |rank: &Rank, mesh: &Mesh| {
            let mut sizes = mixtral();
            sizes.moe.iter_mut().for_each(|moe| moe.pairs_every = every);
            let layout = Layout::of(shape, BUCKETING);
            let task = Task { sizes: sizes.clone(), layout, rows_per_step: 8, micro_batch: 4, predicted: 1.0 };
            let recipe = Recipe { sizes, rows: 8, micro_batch: 4 };
            let mut trainer = recipe.trainer(rank, mesh);
            let mut steps = Vec::new();
            sent(rank, || steps = recipe.train(&mut trainer, 1..=3));
            let mut tables = Vec::new();
            let told = sent(rank, || tables = trainer.sum_pairs().expect("a sum"));
            let bytes: u64 = told.values().map(|[_, bytes]| bytes).sum();
            assert_eq!(bytes, plan::pairs(&task, rank.world.rank()).bytes, "predicted");
            assert_eq!(told.len(), usize::from(every > 0));
            let again = trainer.sum_pairs().expect("a sum");
            assert!(again.iter().flatten().all(|&tokens| tokens == 0), "counting begins anew");
            let loads: Vec<u64> = (0..2).map(|layer| steps.iter().map(|step| step.moe[layer].load[0]).sum()).collect();
            (tables, loads)
        });
        for (tables, loads) in seen {
            assert_eq!(tables.len(), if every > 0 { 2 } else { 0 });
            for (table, load) in tables.iter().zip(loads) {
                // Three steps of 64 tokens, of which those that chose expert 0 are in {0, 1}, {0, 2} and {0, 3}.
                assert_eq!((table.len(), table.iter().sum::<u64>()), (6, 3 * 64));
                assert_eq!(table[..3].iter().sum::<u64>(), load);
            }
        }
    }
}

#[test]
fn ranks_tell_each_other_the_least_that_decides() {
    const E: u64 = 8;
    let of = |gate: GateKind, overflow, group_tokens| moe::Config {
        gate: of_workers(gate, 4),
        capacity_factor: Some(0.9),
        overflow,
        group_tokens,
        logical_nodes: 4,
        ..moe::Config::of(E as usize, 2)
    };
    let check = |config: &moe::Config, words: [u64; 3]| {
        let what = format!("{}, {:?}, {:?}", config.gate.kind().name(), config.overflow, config.group_tokens);
        for (sent, words) in of_route(config).iter().zip(words) {
            let all: Vec<_> = sent.iter().map(|((_, collective), sent)| (*collective, *sent)).collect();
            assert_eq!(all, [(Collective::AllToAll, [1, 4 * words])], "{what}");
        }
    };
    // One group of all: from 12 tokens to the rank with 20, and back; nothing to the one without.
    let both = |of_token: u64| [12 * of_token, 0, 20 * of_token];
    check(&of(GateKind::Softmax, Overflow::Position, None), [2 * E, 0, 2 * E]);
    check(&of(GateKind::Softmax, Overflow::Random, None), both(2));
    check(&of(GateKind::Softmax, Overflow::Probability, None), both(4));
    check(&of(GateKind::Gshard, Overflow::Reroute, None), both(E + 4));
    check(&of(GateKind::Swipe, Overflow::Position, None), both(2));
    check(&of(GateKind::Swipe, Overflow::Probability, None), both(E));
    check(&of(GateKind::Sinkhorn, Overflow::Position, None), both(E));
    // Groups of 8: the second alone lies on two ranks, with four tokens of each.
    check(&of(GateKind::Sinkhorn, Overflow::Position, Some(8)), [4 * E, 0, 4 * E]);
    check(&of(GateKind::Softmax, Overflow::Random, Some(8)), [4 * 2, 0, 4 * 2]);
}
