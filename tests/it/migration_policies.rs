//! The policies that recipes name (`parallel.migrate`): a forced migration learns what plain expert parallelism learns,
//! and an automatic one moves sequences only if less travels then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use guildhall::data::{Row, StepBatches};
use guildhall::launch::Rank;
use guildhall::metrics::{MigratedSequences, SentRows};
use guildhall::model::{Model, Sizes};
use guildhall::moe::gates::{GateDraws, Tokens};
use guildhall::moe::migration::{FollowingWork, Migrating, SequenceRows, exchanges};
use guildhall::moe::recording::{Decisions, Seen};
use guildhall::moe::{Config, GateKind, Layers, MigrationPolicy, Overflow, Routings, ScheduleKind, Site};
use guildhall::parallel::{Axis, HeldSequences, Mesh, Migrate, Order, Rates, Zero};
use guildhall::train::{StepReport, Trainer};
use guildhall_comm::Collective;
use serde_json::Value;

use crate::migration::CARRIED;
use crate::parity::{Run, compare, train_on};
use crate::program::{RUN, Workshop};
use crate::recompute::blocks;
use crate::tiny::{
    Recipe, Tensors, all_near, bert, families, gradient_shares, mixtral, nllb, share, transformer_xl, union, with,
};
use crate::world::{Shape, on_mesh, shape, sliced, whole_experts};

/// How a recipe is run besides its mesh.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    sequence: bool,
    zero: bool,
    recompute: bool,
    /// The slack, if the migration has one of its own.
    slack: Option<f64>,
}

impl Options {
    fn mesh(&self, mesh: &Mesh) -> Mesh {
        let zero = if self.zero { Zero::Parameters } else { Zero::Off };
        mesh.clone().with_sequence(self.sequence).with_zero(zero)
    }

    fn set(&self, trainer: &mut Trainer, migrate: Migrate) {
        let stacks = trainer.model.sizes().blueprint().stacks().len();
        let policy = Migrating::new(migrate, (None, self.slack.unwrap_or(0.25)), stacks);
        let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        trainer.routings = Arc::new(Routings { migration, ..Routings::NONE });
        if self.recompute {
            trainer.recompute = blocks(true);
        }
    }
}

/// Three steps, and the gradients of the first.
fn run(recipe: &Recipe, shape: Shape, options: Options, migrate: Migrate) -> (Run, Tensors) {
    let trained = train_on(recipe, shape, |_, mesh| options.mesh(mesh), |trainer| options.set(trainer, migrate));
    let gradients = union(on_mesh(shape, |rank, mesh| {
        let mesh = options.mesh(mesh);
        let mut trainer = recipe.trainer(rank, &mesh);
        options.set(&mut trainer, migrate);
        trainer.gradients(&recipe.batches(&mesh, 1), 1).unwrap();
        gradient_shares(&mut trainer.model, &mesh)
    }));
    (trained, gradients)
}

/// Compares a forced migration, of which each layer moves a quarter of the sequences, with none.
#[track_caller]
fn check(what: &str, sizes: &Sizes, shape: Shape, options: Options) {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 4 };
    let [want, got] = [Migrate::Off, Migrate::Force].map(|migrate| run(&recipe, shape, options, migrate));
    let what = format!("{what} on {shape:?}, {options:?}");
    all_near(&format!("{what}, gradients"), &got.1, &want.1, CARRIED);
    compare(&what, &got.0, &want.0);
    let layers = sizes.model.layers;
    let experts = (0..layers).filter(|&layer| sizes.moe_of(layer).is_some()).count();
    for (report, plain) in got.0.reports.iter().zip(&want.0.reports) {
        assert_eq!((report.migrated.len(), plain.migrated.len()), (experts, 0), "{what}");
        for layer in &report.migrated {
            assert!(4 * layer.sequences >= recipe.rows as u64, "{what}: {layer:?}");
            let length = sizes.model.row_length_of(layer.layer);
            assert_eq!(layer.tokens, layer.sequences * length as u64, "{what}");
            match carriers(sizes) {
                Carriers::Nobody => assert_eq!(layer.residual_rows, layer.tokens, "{what}"),
                Carriers::Most => assert!(layer.residual_rows < layer.tokens, "{what}: {layer:?}"),
                Carriers::All => assert_eq!(layer.residual_rows, 0, "{what}"),
            }
        }
    }
}

/// Which of the tokens that move have a result that carries their residual row.
enum Carriers {
    Nobody,
    /// Not those whose routes are all dropped.
    Most,
    All,
}

fn carriers(sizes: &Sizes) -> Carriers {
    let moe = sizes.moe.as_ref().expect("a MoE section");
    if sizes.model.dropout > 0.0 || moe.shared_experts > 0 || moe.residual {
        Carriers::Nobody
    } else if moe.capacity_factor.is_some() {
        Carriers::Most
    } else {
        Carriers::All
    }
}

#[test]
fn a_quarter_of_the_sequences_moves_in_every_family() {
    for (name, sizes) in families() {
        for dropout in [0.0, 0.2] {
            let mut sizes = sizes.clone();
            sizes.model.dropout = dropout;
            for shape in [shape(2, 2), shape(4, 4)] {
                check(&format!("{name} with dropout {dropout}"), &sizes, shape, Options::default());
            }
        }
    }
    check("without slack", &mixtral(), shape(2, 2), Options { slack: Some(0.0), ..Options::default() });
}

#[test]
fn a_quarter_moves_between_tensor_groups() {
    let other_order = Shape { order: Order::DataExpert, ..whole_experts(8, 2, 2) };
    for (name, sizes) in [("mixtral", mixtral()), ("bert", bert()), ("transformer_xl", transformer_xl())] {
        for shape in [sliced(4, 2, 2), whole_experts(4, 2, 4), other_order] {
            for sequence in [false, true] {
                check(name, &sizes, shape, Options { sequence, zero: sequence, recompute: sequence, slack: None });
            }
        }
    }
}

/// Steps, visits, capacity, duplicates that are not dropped, a network beside the experts; with shards and recomputed
/// blocks, or without.
#[test]
fn a_quarter_moves_however_rows_travel() {
    let ways = [
        ("steps", with(mixtral(), |moe| moe.schedule = ScheduleKind::Smart)),
        ("visits", with(mixtral(), |moe| moe.shadowing = "force:2".to_owned())),
        ("duplicates", with(mixtral(), |moe| moe.drop_duplicates = false)),
        ("shared", with(mixtral(), |moe| moe.shared_experts = 1)),
        ("capacity", {
            let limited = |moe: &mut Config| {
                (moe.capacity_factor, moe.overflow, moe.group_tokens) = (Some(0.8), Overflow::Random, Some(12));
            };
            // Of another seed, two tokens of one group are told apart by their logits' last bit.
            Sizes { seed: 6, ..with(mixtral(), limited) }
        }),
    ];
    for (name, sizes) in ways {
        for (shape, sequence) in [(shape(4, 4), false), (sliced(4, 2, 2), false)] {
            for zero in [false, true] {
                check(name, &sizes, shape, Options { sequence, zero, recompute: zero, slack: None });
            }
        }
    }
}

/// A policy that keeps what it was asked and has answered, by layer: the sequences of the hosts, and where they go.
#[derive(Debug)]
struct Noted(Migrating, Mutex<BTreeMap<u32, [Vec<Vec<u64>>; 2]>>);

impl MigrationPolicy for Noted {
    fn hosts(&self, site: &Site, held: &HeldSequences, rows: &SequenceRows) -> Vec<Vec<usize>> {
        let to = self.0.hosts(site, held, rows);
        let words = to.iter().map(|to| to.iter().map(|&host| host as u64).collect()).collect();
        self.1.lock().unwrap().insert(site.layer, [held.clone(), words]);
        to
    }
}

/// Rows of a layer that are sent to another rank and whose results carry the residual row of a token that moves: each
/// token's first. Lanes divide a host's tokens, or else the rows of each expert in turn; if the lanes of a host are in
/// one expert group, one of them may have the expert itself.
fn carried(noted: &Noted, seen: &Seen, (layer, seq): (u32, usize), shape: Shape, is_split: bool) -> u64 {
    let [held, to] = noted.1.lock().unwrap()[&layer].clone();
    let (hosts, lanes) = (held.len(), shape.tensor);
    let (within, mut carried) = (shape.expert / hosts, 0);
    for (host, (sequences, to)) in held.iter().zip(&to).enumerate() {
        let mut rows_before = BTreeMap::<u32, usize>::new();
        for (place, token) in sequences.iter().flat_map(|&first| first..first + seq as u64).enumerate() {
            let ((.., first), decision) = seen.decisions.range(..=(1, layer, token)).next_back().unwrap();
            let (routing, at) = (&decision.routing, (token - first) as usize);
            let of_rank = routing.experts / shape.expert;
            for (slot, &expert) in routing.expert[at * routing.k..][..routing.k].iter().enumerate() {
                let ordinal = rows_before.entry(expert).or_default();
                let lane = if is_split { place * lanes / (sequences.len() * seq) } else { *ordinal % lanes };
                *ordinal += 1;
                let own = host * within + lane % within;
                let moves = to[place / seq] != host as u64;
                carried += u64::from(slot == 0 && moves && expert as usize / of_rank != own);
            }
        }
    }
    carried
}

/// The bytes of all-to-alls over expert groups, by the counts of the report: rows, which return as gradients, and
/// integers, which do not. Lanes that hold the same tokens all send the residual rows that no result carries, and any
/// lanes all metadata. Three numbers go along with each of the `carried` rows of a layer.
fn predicted(
    report: &StepReport,
    (sizes, shape, is_split): (&Sizes, Shape, bool),
    carried: impl Fn(u32) -> u64,
) -> u64 {
    let (moe, seq) = (sizes.moe.as_ref().expect("experts"), sizes.model.seq as u64);
    let (row, lanes) = (2 * 4 * sizes.model.d_model as u64, shape.tensor as u64);
    let of_layer = |(sent, moved): (&SentRows, &MigratedSequences)| {
        let index = |rank: usize| shape.place(Axis::Expert(shape.expert), rank).index;
        let away = |(rank, rows): (usize, &Vec<u64>)| rows.iter().sum::<u64>() - rows[index(rank)];
        let dispatched: u64 = sent.rows.iter().enumerate().map(away).sum();
        let results = dispatched - moved.results_if_stayed + moved.results;
        let counts = (shape.ranks * (shape.expert - 1) * moe.experts.largest() / shape.expert * 8) as u64;
        // Where the results of each row go; weights of routes there and back, places and metadata.
        let to = if moved.sequences > 0 { 4 * dispatched } else { 0 };
        let of_tokens = moved.tokens * (2 * 4 + 16) * moe.top_k as u64 + moved.residual_rows * row;
        let metadata = lanes * 16 * (moved.tokens + moved.sequences);
        let moves = if is_split { 1 } else { lanes } * of_tokens + metadata;
        assert_eq!(moved.tokens, moved.sequences * seq);
        let numbers = if moved.residual_rows == 0 { carried(moved.layer as u32) * 2 * 4 * 3 } else { 0 };
        row * (dispatched + results) + counts + to + moves + numbers
    };
    report.sent.iter().zip(&report.migrated).map(of_layer).sum()
}

/// One micro-batch with a forced migration: what is counted tells every byte that travelled, with residual rows by
/// themselves (behind dropout) and carried by results.
#[test]
fn counts_tell_the_bytes_that_travel() {
    let cases = [(0.0, false), (0.0, true), (0.1, false), (0.1, true)];
    for shape in [shape(2, 2), shape(4, 4), sliced(4, 2, 2), whole_experts(4, 2, 4)] {
        for (dropout, sequence) in cases {
            let mut recipe = Recipe { sizes: mixtral(), rows: 8, micro_batch: 8 };
            recipe.sizes.model.dropout = dropout;
            let options = Options { sequence, ..Options::default() };
            let forced = Migrating::new(Migrate::Force, (None, 0.25), 1).unwrap();
            let (noted, decisions) = (Arc::new(Noted(forced, Mutex::default())), Decisions::default());
            let ranks = on_mesh(shape, |rank, mesh| {
                let mesh = options.mesh(mesh);
                let mut trainer = recipe.trainer(rank, &mesh);
                let (migration, decisions) = (Some(noted.clone() as Arc<_>), Some(decisions.clone()));
                trainer.routings = Arc::new(Routings { migration, decisions, ..Routings::NONE });
                let report = trainer.step(&recipe.batches(&mesh, 1), 1).unwrap();
                let key = ("expert".to_owned(), Collective::AllToAll);
                (rank.ledger.snapshot()[&key].bytes, report)
            });
            let sent: u64 = ranks.iter().map(|(bytes, _)| bytes).sum();
            let (report, seen) = (&ranks[0].1, decisions.seen());
            assert!(report.migrated.iter().all(|layer| (layer.residual_rows > 0) == (dropout > 0.0)), "{report:?}");
            let is_split = sequence && shape.tensor > 1;
            let carried = |layer| carried(&noted, &seen, (layer, recipe.sizes.model.seq), shape, is_split);
            let told = predicted(report, (&recipe.sizes, shape, sequence), carried);
            assert_eq!(sent, told, "{shape:?}, dropout {dropout}, {sequence}");
        }
    }
}

/// Ids all of whose choices go to the experts of one rank of two; and ids with a choice on each.
fn ids(sizes: &Sizes) -> [Vec<u32>; 3] {
    let (moe, all) = (sizes.moe.as_ref().expect("experts"), (0..sizes.model.vocab as u32).collect::<Vec<_>>());
    let draws = GateDraws { seed: 0, step: 1, layer: 0, trains: true };
    let tokens = Tokens {
        logits: &[],
        largest: None,
        experts: moe.experts.largest(),
        first: 0,
        ids: &all,
        bias: &[],
        padding: &[],
        draws,
    };
    let chosen = moe.widest().selector().gate.choose(&tokens);
    let of = |id: &u32| &chosen[*id as usize * moe.top_k..][..moe.top_k];
    let on = |rank: u32| all.iter().copied().filter(|id| of(id).iter().all(|expert| expert / 2 == rank)).collect();
    let apart = |id: &u32| of(id).iter().any(|expert| expert / 2 != of(id)[0] / 2);
    [on(0), on(1), all.iter().copied().filter(apart).collect()]
}

fn hashed() -> Sizes {
    with(mixtral(), |moe| moe.gate = GateKind::Hash.into())
}

/// Rates at which a row takes longer than a sequence's attention.
const SLOW_LINK: Rates = Rates { flops: 1e12, bandwidth: 1e6, latency: 0.0, memory: f64::INFINITY };

/// A step of eight rows on two ranks, those at `place` with tokens of `ids[kinds[place]]`: the bytes that were sent over the
/// expert group by collective, over both ranks, and the report.
fn step_of(kinds: [usize; 8], migrate: Migrate, rates: Rates) -> (BTreeMap<Collective, u64>, StepReport) {
    step_in(&hashed(), Options::default(), (kinds, migrate, rates))
}

fn step_in(
    sizes: &Sizes,
    options: Options,
    (kinds, migrate, rates): ([usize; 8], Migrate, Rates),
) -> (BTreeMap<Collective, u64>, StepReport) {
    let recipe = Recipe { sizes: sizes.clone(), rows: 8, micro_batch: 8 };
    let (ids, seq) = (ids(&recipe.sizes), recipe.sizes.model.seq);
    let row = |place: usize| {
        let of = &ids[kinds[place]];
        Row::of_document(&(0..seq).map(|i| of[(3 * place + i) % of.len()]).collect::<Vec<u32>>())
    };
    let ranks = on_mesh(shape(2, 2), |rank: &Rank, mesh| {
        let mut trainer = recipe.trainer(rank, &mesh.clone().with_rates(rates));
        options.set(&mut trainer, migrate);
        let own = 4 * mesh.data.rank();
        let batch = share(own..own + 4, seq, row);
        let reads = sizes.blueprint().reads_a_source();
        let batch = if reads { batch.clone().reading(batch) } else { batch };
        let batches = StepBatches { step: 1, micro: vec![batch] };
        let report = trainer.step(&batches, 1).unwrap();
        (rank.ledger.snapshot(), report)
    });
    let mut sent = BTreeMap::new();
    for ((group, collective), traffic) in ranks.iter().flat_map(|(ledger, _)| ledger) {
        *sent.entry(*collective).or_default() += if group == "expert" { traffic.bytes } else { 0 };
    }
    (sent, ranks.into_iter().next().expect("two ranks").1)
}

/// Two sequences of each rank have all their experts on the other one.
#[test]
fn sequences_that_save_bytes_move() {
    let kinds = [1, 1, 0, 0, 0, 0, 1, 1];
    let [(plain, _), (auto, report)] = [Migrate::Off, Migrate::Auto].map(|migrate| step_of(kinds, migrate, SLOW_LINK));
    let moved: Vec<u64> = report.migrated.iter().map(|layer| layer.sequences).collect();
    // Then they are where their experts are, in the second layer too.
    assert_eq!(moved, [4, 0]);
    let (seq, first) = (hashed().model.seq as u64, &report.migrated[0]);
    let results = (first.results_if_stayed, first.results);
    assert_eq!((results, first.tokens, first.residual_rows), ((4 * seq * 2, 0), 4 * seq, 0));
    let bytes = |sent: &BTreeMap<Collective, u64>| sent.values().sum::<u64>();
    assert!(bytes(&auto) < bytes(&plain), "{} bytes, {} without migration", bytes(&auto), bytes(&plain));
    // Of the rows that travelled in two layers, there and back, those of the first dispatch are left, each again in
    // backward. Results carry the residual stream.
    let saved = 2 * (3 * 4 * seq * 2) * 4 * 16;
    let integers = bytes(&auto) + saved - bytes(&plain);
    assert!(integers < saved / 2, "{integers} bytes of integers, weights of routes and moments, {saved} saved");
    // Where what one more sequence computes takes longer than its rows travel, those move that change places.
    let slow = Rates { flops: 1e7, ..SLOW_LINK };
    assert_eq!(step_of(kinds, Migrate::Auto, slow).1.migrated[0].sequences, 4);
    // A link that takes less than a fiftieth of the time is not worth it.
    assert_eq!(step_of(kinds, Migrate::Auto, Rates { flops: 1e3, ..SLOW_LINK }).1.migrated[0].sequences, 0);
    // A fifth sequence of a host takes part in the exchanges of the second layer. Behind that, it only takes time.
    let one_way = [1, 0, 0, 0, 1, 1, 1, 1];
    let moved = [SLOW_LINK, slow].map(|rates| {
        let layers = step_of(one_way, Migrate::Auto, rates).1.migrated;
        layers.iter().map(|layer| layer.sequences).collect::<Vec<_>>()
    });
    assert_eq!(moved, [[0, 1], [0, 0]]);
}

#[test]
fn nothing_moves_where_nothing_is_saved() {
    // All at home; all with a choice on each rank, so that as many results travel from everywhere.
    for kinds in [[0, 0, 0, 0, 1, 1, 1, 1], [2; 8]] {
        let [(plain, without), (auto, report)] =
            [Migrate::Off, Migrate::Auto].map(|migrate| step_of(kinds, migrate, SLOW_LINK));
        assert!(report.migrated.len() == 2 && report.migrated.iter().all(|layer| layer.sequences == 0), "{report:?}");
        assert_eq!((report.loss, report.gradient_norm), (without.loss, without.gradient_norm), "the same bits");
        // What decides is all-gathered; nothing else is added.
        assert_eq!(plain[&Collective::AllToAll], auto[&Collective::AllToAll]);
    }
}

/// Messages that take long by themselves: what eight sequences save does not pay for those of a migration.
#[test]
fn messages_of_a_migration_are_paid() {
    let kinds = [1, 1, 0, 0, 0, 0, 1, 1];
    let moved = |latency: f64| step_of(kinds, Migrate::Auto, Rates { latency, ..SLOW_LINK }).1.migrated[0].sequences;
    assert_eq!([1e-6, 1.0].map(moved), [4, 0]);
}

/// Memory so slow that copies take longer than what eight sequences save.
#[test]
fn copies_of_a_migration_are_paid() {
    let kinds = [1, 1, 0, 0, 0, 0, 1, 1];
    let moved = |memory: f64| step_of(kinds, Migrate::Auto, Rates { memory, ..SLOW_LINK }).1.migrated[0].sequences;
    assert_eq!([1e9, 1e6].map(moved), [4, 0]);
}

/// All-to-alls over the expert group, in two layers of two ranks: plain, in three steps, and with visitors. Other gates and
/// options have fewer.
#[test]
fn a_migration_adds_so_many_exchanges() {
    let ways: [(fn(&mut Config), usize); 3] = [
        (|_| (), exchanges(1, false)),
        (|moe| (moe.schedule, moe.schedule_groups) = (ScheduleKind::Smart, Some(2)), exchanges(3, false)),
        (|moe| moe.shadowing = "force:2".to_owned(), exchanges(1, true)),
    ];
    for (change, added) in ways {
        let recipe = Recipe { sizes: with(mixtral(), change), rows: 8, micro_batch: 8 };
        let calls = [Migrate::Off, Migrate::Force].map(|migrate| {
            let calls = on_mesh(shape(2, 2), |rank: &Rank, mesh| {
                let mut trainer = recipe.trainer(rank, mesh);
                Options::default().set(&mut trainer, migrate);
                trainer.step(&recipe.batches(mesh, 1), 1).unwrap();
                rank.ledger.snapshot()[&("expert".to_owned(), Collective::AllToAll)].calls
            });
            calls[0]
        });
        assert_eq!(calls[1], calls[0] + 2 * added as u64, "{:?}", recipe.sizes.moe);
    }
}

/// Slices of a vocabulary of 31 and of shared experts of width 5 differ by a row: lanes that priced their own would come to
/// different hosts.
#[test]
fn all_lanes_know_the_same_of_what_follows() {
    let sizes = with(mixtral(), |moe| (moe.shared_experts, moe.d_expert) = (1, Some(5)));
    assert!(sizes.model.vocab % 2 == 1, "a vocabulary that two ranks cut unevenly");
    for shape in [whole_experts(4, 2, 2), sliced(4, 2, 2)] {
        let following = on_mesh(shape, |rank: &Rank, mesh: &Mesh| {
            let mut model = Model::new(&rank.device, &sizes, mesh);
            (0..sizes.model.layers).map(|layer| model.moe_layer(layer).map(|layer| layer.following)).collect::<Vec<_>>()
        });
        assert!(following.iter().all(|of_rank| of_rank == &following[0]), "{following:?}");
        let d = sizes.model.d_model as u64;
        let last = following[0].last().unwrap().expect("a layer with experts");
        // Half of the head and of the shared expert's three matrices, rounded up.
        assert_eq!(last.per_token, d * 16 + 3 * d * 3);
    }
}

/// What a model does behind its MoE layers, by hand.
#[test]
fn layers_know_what_follows_them() {
    let following = |moe_layers: Layers| {
        let mut sizes = with(mixtral(), |moe| moe.layers = moe_layers);
        sizes.model.layers = 4;
        let on_rank = |rank: &Rank, mesh: &Mesh| {
            let mut model = Model::new(&rank.device, &sizes, mesh);
            (0..4).map(|layer| model.moe_layer(layer).map(|layer| layer.following)).collect::<Vec<_>>()
        };
        on_mesh(shape(1, 1), on_rank).remove(0)
    };
    let Sizes { model, .. } = mixtral();
    let (d, kv_heads) = (model.d_model as u64, model.kv_heads.expect("fewer keys than queries") as u64);
    // Queries and the way out, keys and values; scores and weighted values.
    let projections = 2 * d * d + 2 * d * kv_heads * d / model.heads as u64;
    let attention = FollowingWork { per_token: projections, per_pair: 2 * d, exchanges: true };
    let head = FollowingWork { per_token: d * model.vocab as u64, ..FollowingWork::default() };
    assert_eq!(following(Layers::All), [Some(attention), Some(attention), Some(attention), Some(head)]);
    let dense = 3 * d * mixtral().d_ff() as u64;
    let two_blocks = FollowingWork { per_token: 2 * projections + dense, per_pair: 4 * d, exchanges: true };
    assert_eq!(following(Layers::Every(2)), [None, Some(two_blocks), None, Some(head)]);
}

/// Two results a token are saved. Behind dropout the residual row is sent by itself, which is one; a network beside the
/// experts needs the layer's input there, too, and nothing is left to save.
#[test]
fn all_rows_that_follow_a_token_are_paid() {
    let mut dropout = hashed();
    dropout.model.dropout = 0.1;
    let shared = with(hashed(), |moe| moe.shared_experts = 1);
    let residual = with(hashed(), |moe| moe.residual = true);
    for (what, sizes, want) in
        [("dropout", dropout, [4, 0]), ("shared", shared, [0, 0]), ("residual", residual, [0, 0])]
    {
        let kinds = [1, 1, 0, 0, 0, 0, 1, 1];
        let step = |migrate| step_in(&sizes, Options::default(), (kinds, migrate, SLOW_LINK));
        let [(plain, _), (auto, report)] = [Migrate::Off, Migrate::Auto].map(step);
        assert_eq!(report.migrated.iter().map(|layer| layer.sequences).collect::<Vec<_>>(), want, "{what}");
        let [auto, plain] = [auto, plain].map(|sent| sent[&Collective::AllToAll]);
        assert!(if want == [0, 0] { auto == plain } else { auto < plain }, "{what}: {auto} bytes, {plain} without");
    }
}

/// An encoder and a decoder with one choice a token. A sequence that moves in the encoder comes home before the decoder
/// starts, which costs the row that it saves. Behind the decoder the loss is taken where it is.
#[test]
fn the_way_home_between_stacks_is_paid() {
    let sizes = with(nllb(), |moe| (moe.gate, moe.top_k) = (GateKind::Hash.into(), 1));
    let kinds = [1, 1, 0, 0, 0, 0, 1, 1];
    let step = |migrate| step_in(&sizes, Options::default(), (kinds, migrate, SLOW_LINK));
    let [(plain, _), (auto, report)] = [Migrate::Off, Migrate::Auto].map(step);
    assert_eq!(report.migrated.iter().map(|layer| layer.sequences).collect::<Vec<_>>(), [0, 4]);
    let bytes = |sent: &BTreeMap<Collective, u64>| sent[&Collective::AllToAll];
    assert!(bytes(&auto) < bytes(&plain), "{} bytes, {} without migration", bytes(&auto), bytes(&plain));
}

/// A forced migration is there for tests, which do not depend on how fast a machine was measured to be.
#[test]
fn what_is_forced_does_not_depend_on_rates() {
    // With slack for all, three sequences save bytes; no more than two have to move.
    let options = Options { slack: Some(1.0), ..Options::default() };
    let fast = Rates { flops: 1e3, bandwidth: 1e12, latency: 0.0, memory: f64::INFINITY };
    let step = |rates| step_in(&hashed(), options, ([1, 1, 1, 0, 1, 1, 1, 1], Migrate::Force, rates)).1.migrated;
    let migrated = step(SLOW_LINK);
    assert_eq!(migrated[0].sequences, 3);
    assert_eq!(step(fast), migrated);
}

/// Through the program: keys, summary, log, and the same losses.
#[test]
fn recipes_migrate() {
    let shop = Workshop::new();
    let mut losses = Vec::new();
    for (mesh, expert) in [("--ranks 2", 2), ("--ranks 4", 4)] {
        for migrate in ["off", "force"] {
            let dir = format!("{RUN}-{expert}-{migrate}");
            shop.train(&format!(
                "{mesh} --set parallel.expert={expert} --set parallel.migrate={migrate} --set run.dir={dir}"
            ));
            let summary: Value = serde_json::from_str(&shop.read(&format!("{dir}/summary.json"))).unwrap();
            let log = shop.read(&format!("{dir}/metrics.jsonl"));
            let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let moved = |line: &Value| {
                let layers = line["migrated"].as_array().cloned().unwrap_or_default();
                layers.iter().map(|layer| layer["sequences"].as_u64().unwrap()).collect::<Vec<_>>()
            };
            // Eight rows a step.
            let layers = if migrate == "off" { 0 } else { 2 };
            assert!(lines.iter().map(moved).all(|moved| moved.len() == layers && moved.iter().all(|n| *n >= 2)));
            assert_eq!(summary["migrated"], lines.iter().flat_map(moved).sum::<u64>());
            losses.push(["loss_first", "loss_last", "eval_loss"].map(|loss| summary[loss].as_f64().unwrap()));
        }
    }
    for loss in &losses {
        // Six steps, whose sums have other orders.
        assert!(loss.iter().zip(&losses[0]).all(|(a, b)| (a - b).abs() < 1e-5 * b), "{losses:?}");
    }
    // What is measured for the decision is not counted: where nothing moves, as many bytes travel as without.
    let auto = "--ranks 2 --set parallel.expert=2 --set parallel.migrate=auto --set parallel.migrate_slack=0";
    let said = shop.succeeds(&format!("train tiny.toml {auto} --set run.dir=auto"));
    let summary = |dir: &str| serde_json::from_str::<Value>(&shop.read(&format!("{dir}/summary.json"))).unwrap();
    let rows = |dir: &str| summary(dir)["traffic_by_group"]["expert"]["all_to_all"].clone();
    assert_eq!(summary("auto")["migrated"], 0);
    assert!(said.err.contains("moved    no sequence"), "{}", said.err);
    assert_eq!(rows("auto")["calls"], rows(&format!("{RUN}-2-off"))["calls"]);
    let [of_auto, of_off] =
        ["auto".to_owned(), format!("{RUN}-2-off")].map(|dir| rows(&dir)["bytes"].as_u64().unwrap());
    assert!(of_auto.abs_diff(of_off) < of_off / 100, "{of_auto} and {of_off}");
    // Groups of two sequences stay together: tokens of both share rows, whose results go to one rank.
    let groups = "--set moe.condense=static --set moe.condense_threshold=0.3 --set moe.condense_tokens=64";
    shop.train(&format!(
        "--ranks 2 --set parallel.expert=2 --set parallel.migrate=force {groups} --set run.dir=groups"
    ));
    shop.train(&format!("--ranks 1 {groups} --set run.dir=alone"));
    let [moved, alone] = ["groups", "alone"].map(summary);
    let share = |summary: &Value| summary["condensed"]["uncomputed_share"].as_f64().unwrap();
    assert!(moved["migrated"].as_u64().unwrap() > 0 && share(&alone) > 0.05, "{moved}");
    // A few pairs at the threshold may be rounded to its other side.
    assert!((share(&moved) - share(&alone)).abs() < 1e-3, "{} for {}", share(&moved), share(&alone));
    let [moved, alone] = [moved, alone].map(|summary| summary["loss_last"].as_f64().unwrap());
    assert!((moved - alone).abs() < 1e-5 * alone, "{moved} for {alone}");
}
