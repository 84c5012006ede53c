//! Sequences change ranks behind MoE layers, and nothing is learnt differently: losses and every gradient equal those of
//! plain expert parallelism, up to the order of sums.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guildhall::model::{Caches, Context, Sizes};
use guildhall::moe::migration::SequenceRows;
use guildhall::moe::rewrites::migration::deliver;
use guildhall::moe::{
    Condense, CondenseGradient, Config, GateKind, Layers, MigrationPolicy, Overflow, Plan, Recording, Routing,
    Routings, ScheduleKind, Site, StepFacts, combine,
};
use guildhall::parallel::{ExpertTable, HeldSequences, Mesh, Migration, Order, Rows, Zero};
use guildhall::train::Trainer;
use guildhall_tensor::{Draws, Purpose, Tape, Tensor};

use crate::adjoint::{share_rows, through};
use crate::parity::{REORDERED, Run, STEPS, compare, train_on};
use crate::recompute::blocks;
use crate::recording::recorded;
use crate::tiny::{
    Recipe, Tensors, Tolerance, all_near, bert, families, gpt2, gradient_shares, mixtral, near, nllb, transformer_xl,
    union, with,
};
use crate::world::{Shape, on_mesh, shape, sliced, whole_experts};

/// Where sequences go on.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Each to the next host.
    Onward,
    /// All to one, which is another behind every layer.
    Crowd,
    /// Each anywhere.
    Anywhere,
}

/// A policy for tests: nothing is gained by it.
#[derive(Debug)]
struct Moving {
    way: Way,
    /// Sequences that it sent to another host.
    moved: AtomicU64,
}

impl MigrationPolicy for Moving {
    fn hosts(&self, site: &Site, held: &HeldSequences, _: &SequenceRows) -> Vec<Vec<usize>> {
        let hosts = held.len();
        let of = |host: usize, first: u64| match self.way {
            Way::Onward => (host + 1) % hosts,
            Way::Crowd => site.layer as usize % hosts,
            Way::Anywhere => {
                let layer = 8 * site.layer + site.micro_batch;
                Draws::new(3, Purpose::Test, site.step, layer).bits(first) as usize % hosts
            }
        };
        let to = |(host, sequences): (usize, &Vec<u64>)| sequences.iter().map(|&first| of(host, first)).collect();
        let to: Vec<Vec<usize>> = held.iter().enumerate().map(to).collect();
        let moved = to.iter().enumerate().map(|(host, to)| to.iter().filter(|to| **to != host).count()).sum::<usize>();
        self.moved.fetch_add(moved as u64, Ordering::Relaxed);
        to
    }
}

/// For gradients of runs whose results carry the residual stream: its rows are sums in another order, or rebuilt. Exactly
/// 0 is the gradient of a bias of keys; what rounding leaves of it is of this size.
pub(crate) const CARRIED: Tolerance = Tolerance { floor: 1e-7, ..REORDERED };

/// How a recipe is run besides its mesh.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    sequence: bool,
    zero: bool,
    recompute: Option<bool>,
}

impl Options {
    fn mesh(&self, mesh: &Mesh) -> Mesh {
        let zero = if self.zero { Zero::Parameters } else { Zero::Off };
        mesh.clone().with_sequence(self.sequence).with_zero(zero)
    }

    fn set(&self, trainer: &mut Trainer, routings: &Arc<Routings>) {
        trainer.routings = routings.clone();
        if let Some(keep_communication) = self.recompute {
            trainer.recompute = blocks(keep_communication);
        }
    }
}

/// Three steps.
fn run(recipe: &Recipe, shape: Shape, options: Options, routings: &Arc<Routings>) -> Run {
    train_on(recipe, shape, |_, mesh| options.mesh(mesh), |trainer| options.set(trainer, routings))
}

/// All gradients of the first step.
fn first_gradients(recipe: &Recipe, shape: Shape, options: Options, routings: &Arc<Routings>) -> Tensors {
    union(on_mesh(shape, |rank, mesh| {
        let mesh = options.mesh(mesh);
        let mut trainer = recipe.trainer(rank, &mesh);
        options.set(&mut trainer, routings);
        trainer.gradients(&recipe.batches(&mesh, 1), 1).unwrap();
        gradient_shares(&mut trainer.model, &mesh)
    }))
}

/// Compares a run whose sequences move with the same one whose sequences stay.
#[track_caller]
fn check(what: &str, sizes: &Sizes, shape: Shape, options: Options) {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 4 };
    let stays = Arc::new(Routings::NONE);
    let want = (run(&recipe, shape, options, &stays), first_gradients(&recipe, shape, options, &stays));
    for way in [Way::Onward, Way::Crowd, Way::Anywhere] {
        let policy = Arc::new(Moving { way, moved: AtomicU64::new(0) });
        let moves = Arc::new(Routings { migration: Some(policy.clone()), ..Routings::NONE });
        let what = format!("{what} on {shape:?}, {options:?}, {way:?}");
        let got = first_gradients(&recipe, shape, options, &moves);
        all_near(&format!("{what}, gradients"), &got, &want.1, CARRIED);
        compare(&what, &run(&recipe, shape, options, &moves), &want.0);
        assert!(policy.moved.load(Ordering::Relaxed) > 0, "{what}: nothing moved");
    }
}

const PLAIN: [Shape; 2] = [shape(2, 2), shape(4, 4)];

/// Sliced and whole experts, in both orders of ranks; an expert group that is a part of the world.
const SLICED: [Shape; 4] = [
    sliced(4, 2, 2),
    whole_experts(4, 2, 4),
    Shape { order: Order::DataExpert, ..whole_experts(8, 2, 2) },
    sliced(8, 2, 2),
];

#[test]
fn sequences_of_every_family_move() {
    for (name, mut sizes) in families() {
        sizes.model.dropout = 0.2;
        for shape in PLAIN {
            check(name, &sizes, shape, Options::default());
        }
    }
}

#[test]
fn sequences_move_between_tensor_groups() {
    for (name, mut sizes) in [("mixtral", mixtral()), ("bert", bert()), ("transformer_xl", transformer_xl())] {
        sizes.model.dropout = 0.2;
        for shape in SLICED {
            for sequence in [false, true] {
                check(name, &sizes, shape, Options { sequence, ..Options::default() });
            }
        }
    }
}

#[test]
fn sequences_move_where_blocks_run_again() {
    for (name, mut sizes) in [("gpt2", gpt2()), ("transformer_xl", transformer_xl()), ("nllb", nllb())] {
        sizes.model.dropout = 0.2;
        for (shape, sequence) in [(shape(4, 2), false), (sliced(4, 2, 2), true)] {
            for keep in [false, true] {
                let options = Options { sequence, zero: true, recompute: Some(keep) };
                check(name, &sizes, shape, options);
            }
        }
    }
}

/// With experts in every layer, blocks run on sequences that have moved, and decoder blocks read a text that has.
#[test]
fn blocks_behind_a_migration_read_what_came() {
    let deep = |sizes: Sizes| {
        let mut sizes = with(sizes, |moe| moe.layers = Layers::All);
        (sizes.model.dropout, sizes.model.layers) = (0.2, 4);
        sizes
    };
    for (name, sizes) in [("nllb", deep(nllb())), ("gpt2", deep(gpt2()))] {
        for (shape, sequence) in [(shape(4, 4), false), (sliced(4, 2, 2), true), (whole_experts(4, 2, 4), false)] {
            check(name, &sizes, shape, Options { sequence, ..Options::default() });
            check(name, &sizes, shape, Options { sequence, zero: true, recompute: Some(false) });
        }
    }
}

/// Seven tokens a sequence, which a tensor group of two or four cuts unevenly.
#[test]
fn shares_of_tokens_may_be_uneven() {
    for (name, mut sizes) in [("mixtral", mixtral()), ("bert", bert())] {
        sizes.model.seq = 7;
        sizes.model.kv_heads = sizes.model.kv_heads.map(|_| 4);
        for shape in [sliced(4, 2, 2), whole_experts(4, 2, 4), sliced(8, 4, 2)] {
            check(name, &sizes, shape, Options { sequence: true, ..Options::default() });
        }
    }
}

/// Rows in steps, experts that visit, duplicates that are not dropped, and a network beside the experts.
#[test]
fn sequences_move_however_rows_travel() {
    let sizes = mixtral();
    let ways = [
        ("steps", with(sizes.clone(), |moe| moe.schedule = ScheduleKind::Smart)),
        ("visits", with(sizes.clone(), |moe| moe.shadowing = "force:2".to_owned())),
        ("all visit", with(sizes.clone(), |moe| moe.shadowing = "force:4".to_owned())),
        ("duplicates", with(sizes.clone(), |moe| moe.drop_duplicates = false)),
        ("shared", with(sizes.clone(), |moe| moe.shared_experts = 1)),
        ("residual", with(sizes.clone(), |moe| moe.residual = true)),
        ("condensed", with(sizes.clone(), |moe| (moe.condense, moe.condense_threshold) = (Condense::Static, 0.5))),
        (
            "literally condensed, in steps",
            with(sizes, |moe| {
                (moe.condense, moe.condense_threshold) = (Condense::Static, 0.5);
                (moe.condense_gradient, moe.schedule) = (CondenseGradient::Literal, ScheduleKind::Smart);
            }),
        ),
    ];
    for (name, sizes) in ways {
        let splits = !sizes.moe.as_ref().expect("experts").condenses();
        for (shape, sequence) in [(shape(4, 4), false), (sliced(4, 2, 2), false), (whole_experts(4, 2, 4), splits)] {
            check(name, &sizes, shape, Options { sequence, ..Options::default() });
        }
    }
}

/// Tokens compete for places with those of a group of the recipe's, whatever ranks they lie on; and gates draw.
#[test]
fn tokens_compete_with_the_same_others_wherever_they_lie() {
    for overflow in [Overflow::Position, Overflow::Random, Overflow::Probability, Overflow::Reroute] {
        for group_tokens in [None, Some(8), Some(12)] {
            let limited = |moe: &mut Config| {
                (moe.capacity_factor, moe.overflow, moe.group_tokens) = (Some(0.8), overflow, group_tokens);
            };
            let mut sizes = with(mixtral(), limited);
            // Without equal documents in one group, whose tokens would be told apart by the rounding of rebuilt rows.
            sizes.model.vocab = 997;
            for shape in [shape(4, 2), sliced(4, 2, 2)] {
                check(&format!("{overflow:?}, {group_tokens:?}"), &sizes, shape, Options::default());
            }
        }
    }
    // Two ranks come to have sequences with others between them, by whose numbers gates draw.
    for gate in [GateKind::Noisy, GateKind::Gshard, GateKind::Switch, GateKind::Hash] {
        let sizes = with(mixtral(), |moe| moe.gate = gate.into());
        for shape in [shape(2, 2), sliced(4, 2, 2)] {
            check(&format!("{gate:?}"), &sizes, shape, Options::default());
        }
    }
}

/// A recording stands in the order of data: it does not say where tokens were, and can be followed wherever they go.
#[test]
fn recordings_do_not_tell_where_tokens_were() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 4 };
    let migration =
        || Some(Arc::new(Moving { way: Way::Anywhere, moved: AtomicU64::new(0) }) as Arc<dyn MigrationPolicy>);
    let record = |name: &str, migration| {
        let path = folder.path().join(name);
        let record = Some(Recording::create(&path, recorded(&recipe.sizes), 1).unwrap());
        let routings = Arc::new(Routings { record, migration, ..Routings::NONE });
        run(&recipe, shape(4, 4), Options::default(), &routings);
        std::fs::read(path).unwrap()
    };
    assert!(record("stays", None) == record("moves", migration()), "recordings differ");
    let replay = |migration| {
        let replay = Some(Recording::open(&folder.path().join("stays"), recorded(&recipe.sizes), 1..=STEPS).unwrap());
        run(&recipe, shape(4, 4), Options::default(), &Arc::new(Routings { replay, migration, ..Routings::NONE }))
    };
    compare("a followed recording", &replay(migration()), &replay(None));
}

/// Logits are of the batch's tokens in their order: sequences come home before the head, and between two stacks.
#[test]
fn logits_are_of_the_tokens_of_the_batch() {
    for (name, sizes) in families() {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 6 };
        for shape in [shape(4, 4), sliced(4, 2, 2)] {
            let logits = |way: Option<Way>| {
                on_mesh(shape, |rank, mesh| {
                    let mesh = mesh.clone().with_sequence(mesh.tensor.size() > 1);
                    let trainer = recipe.trainer(rank, &mesh);
                    let migration =
                        way.map(|way| Arc::new(Moving { way, moved: AtomicU64::new(0) }) as Arc<dyn MigrationPolicy>);
                    let facts = StepFacts {
                        routings: Arc::new(Routings { migration, ..Routings::NONE }),
                        ..StepFacts::of_inference()
                    };
                    let context = Context { facts, ..Context::of_inference(&mesh, 1) };
                    let batch = &recipe.batches(&mesh, 1).micro[0];
                    trainer.model.logits(&Tape::inference(&rank.device), batch, &context).unwrap().to_vec()
                })
            };
            let want = logits(None);
            for way in [Way::Onward, Way::Crowd] {
                for (rank, (got, want)) in logits(Some(way)).iter().zip(&want).enumerate() {
                    near(&format!("{name} on {shape:?}, {way:?}, rank {rank}"), got, want, REORDERED);
                }
            }
        }
    }
}

/// Gives what cannot be.
#[derive(Debug)]
struct Wrong(fn(&HeldSequences) -> Vec<Vec<usize>>);

impl MigrationPolicy for Wrong {
    fn hosts(&self, _: &Site, held: &HeldSequences, _: &SequenceRows) -> Vec<Vec<usize>> {
        (self.0)(held)
    }
}

#[test]
fn an_impossible_policy_is_an_error_on_every_rank() {
    let recipe = Recipe { sizes: mixtral(), rows: 4, micro_batch: 4 };
    let wrong: [(fn(&HeldSequences) -> Vec<Vec<usize>>, &str); 2] = [
        (|held| held.iter().map(|of_host| vec![9; of_host.len()]).collect(), "sent a sequence to host 9 of 2"),
        (|_| vec![vec![0], vec![]], "gave [1, 0] destinations for hosts with [2, 2] sequences"),
    ];
    for (policy, says) in wrong {
        let errors = on_mesh(shape(2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            trainer.routings = Arc::new(Routings { migration: Some(Arc::new(Wrong(policy))), ..Routings::NONE });
            trainer.step(&recipe.batches(mesh, 1), 1).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| error.contains(says) && error.contains("layer 0")), "{errors:?}");
    }
}

/// The rows of tokens that share them, with every second sequence of `seq` tokens going to the other of two ranks.
fn delivered(seq: usize, rewrite: impl Fn(Plan) -> Plan + Sync) -> Vec<Result<Vec<f32>, String>> {
    on_mesh(shape(2, 2), |rank, mesh| {
        let (me, tokens) = (rank.world.rank(), 4);
        let sequences = (0..tokens / seq).map(|s| (tokens * me + s * seq) as u64).collect();
        let rows = Rows { seq, sequences, origins: vec![me as u32; tokens / seq], ..Rows::default() };
        let (stream, hosts) = (mesh.stream(rows), mesh.hosts());
        let held = hosts.held(stream.rows()).unwrap();
        let to: Vec<Vec<usize>> = held.iter().map(|of_host| (0..of_host.len()).map(|s| s % 2).collect()).collect();
        let migration = Migration::new(&stream, hosts, &held, &to).unwrap();
        // Neighbours go to the same experts.
        let routing = Routing::new(vec![0, 1, 0, 1, 1, 0, 1, 0], 2, 2);
        let plan = rewrite(Plan::new(&routing, ExpertTable::even(2, 2), me));
        let plan = match deliver(plan, Some(migration.destinations().to_vec())) {
            Ok(plan) => plan.exchange(mesh).unwrap().delivering(&migration, false).unwrap(),
            Err(error) => return Err(error.to_string()),
        };
        let tape = Tape::inference(&rank.device);
        // Neighbours are alike.
        let x = Tensor::from_fn(&rank.device, &[tokens, 3], |i| (10 * me + i / 6 * 3 + i % 3) as f32);
        let expert = Tensor::from_fn(&rank.device, &[1, 3, 3], |i| (me + i) as f32);
        let weights = Tensor::from_fn(&rank.device, &[tokens, 2], |i| 0.25 * (i % 3 + 1) as f32);
        let home = through(&tape.constant(x), &tape.constant(expert), &plan, mesh);
        let weights = migration.carry(&tape.constant(weights)).unwrap();
        let y = combine(vec![home], &plan, &weights, &mesh.tensor).unwrap();
        Ok(migration.settle(y).unwrap().value().to_vec())
    })
}

/// Tokens of one sequence may share rows that are delivered elsewhere; of two sequences, which may part, they may not.
#[test]
fn tokens_that_share_a_row_go_on_together() {
    let [shared, apart] = [delivered(2, share_rows), delivered(2, |plan| plan)];
    assert!(shared.iter().all(Result::is_ok) && shared == apart, "{shared:?}\n{apart:?}");
    for error in delivered(1, share_rows) {
        assert!(error.as_ref().is_err_and(|error| error.contains("tokens 1 and 0 of a rank share a row")), "{error:?}");
    }
}

/// A text is continued on the ranks that have its keys and values, whatever the policy.
#[test]
fn generation_moves_nothing() {
    let recipe = Recipe { sizes: mixtral(), rows: 2, micro_batch: 2 };
    on_mesh(shape(2, 2), |rank, mesh| {
        let trainer = recipe.trainer(rank, mesh);
        let logits = |migration: Option<Arc<dyn MigrationPolicy>>| {
            let routings = Arc::new(Routings { migration, ..Routings::NONE });
            let facts = StepFacts { routings, ..StepFacts::of_inference() };
            let context = Context { facts, ..Context::of_inference(mesh, 1) };
            let mut caches = Caches::new(recipe.sizes.model.layers);
            trainer.model.next_logits(&rank.device, &[3, 1, 4], &mut caches, &context).unwrap().to_vec()
        };
        let crowd = Moving { way: Way::Crowd, moved: AtomicU64::new(0) };
        assert_eq!(logits(Some(Arc::new(crowd))), logits(None));
    });
}
