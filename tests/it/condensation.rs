//! Token condensation: what a layer gives and learns is what its definition says, and no mesh, no way of travelling and
//! no recomputation changes it. Where nothing is similar enough, no bit changes.

use std::sync::Arc;

use guildhall::launch::Rank;
use guildhall::model::{Context, Sizes};
use guildhall::moe::condensation::{Circumstances, ClusterPolicy, ClusterRule, ComparedRoutes};
use guildhall::moe::migration::Migrating;
use guildhall::moe::{
    Clusters, Condense, CondenseGradient, Condensed, Config, Expert, Facts, GateKind, History, Homes, Importance,
    LayerSizes, LossTrend, MigrationPolicy, Mixed, MoeLayer, Overflow, Routing, Routings, ScheduleKind, StepFacts,
};
use guildhall::parallel::{Init, Mesh, Migrate, Order, Parameters, Rows, Stream, Weight, Zero};
use guildhall::train::Trainer;
use guildhall_tensor::{Draws, Dtype, Purpose, Tape, Tensor, Var};
use serde_json::Value;

use crate::parity::{Run, compare, train_on};
use crate::program::Workshop;
use crate::recompute::blocks;
use crate::tiny::{Recipe, Tolerance, bert, families, gpt2, mixtral, near, nllb, transformer_xl, weights, with};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

fn condensing(sizes: &Sizes, threshold: f64) -> Sizes {
    with(sizes.clone(), |moe| (moe.condense, moe.condense_threshold) = (Condense::Static, threshold))
}

/// How a recipe is run besides its mesh.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    zero: bool,
    recompute: Option<bool>,
}

fn run(sizes: &Sizes, micro_batch: usize, shape: Shape, options: Options) -> Run {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch };
    let zero = if options.zero { Zero::Parameters } else { Zero::Off };
    let mesh = |mesh: &Mesh| mesh.clone().with_zero(zero);
    train_on(
        &recipe,
        shape,
        |_, own| mesh(own),
        |trainer| {
            if let Some(keep_communication) = options.recompute {
                trainer.recompute = blocks(keep_communication);
            }
        },
    )
}

/// Of all routes of a run, the share without a row of their own.
fn uncomputed(run: &Run) -> f64 {
    let layers = run.reports.iter().flat_map(|report| &report.moe).map(|layer| layer.condensed.as_ref().unwrap());
    let (saved, all) = layers.fold((0, 0), |(saved, all), layer| (saved + layer.uncomputed, all + layer.routes));
    saved as f64 / all as f64
}

const SHAPES: [Shape; 6] = [
    shape(2, 2),
    shape(4, 4),
    sliced(2, 2, 1),
    sliced(4, 2, 2),
    whole_experts(4, 2, 4),
    Shape { order: Order::DataExpert, ..sliced(8, 2, 2) },
];

/// Compares what is condensed on these meshes with one rank.
fn check(what: &str, sizes: &Sizes, shapes: &[Shape], ways: &[Options]) {
    let want = run(sizes, 6, ONE, Options::default());
    let share = uncomputed(&want);
    assert!((0.05..0.9).contains(&share), "{what}: {share} of all routes share the row of another");
    for &shape in shapes {
        for &way in ways {
            for micro_batch in [6, 4] {
                let what = format!("{what} on {shape:?}, {way:?}, micro-batches of {micro_batch}");
                compare(&what, &run(sizes, micro_batch, shape, way), &want);
            }
        }
    }
}

#[test]
fn every_family_condenses_alike_on_every_mesh() {
    for (name, mut sizes) in families() {
        sizes.model.dropout = 0.2;
        check(name, &condensing(&sizes, 0.5), &SHAPES, &[Options::default()]);
    }
}

#[test]
fn clusters_are_kept_where_blocks_run_again() {
    let shapes = [shape(4, 4), sliced(4, 2, 2)];
    for (name, sizes) in [("mixtral", mixtral()), ("bert", bert()), ("nllb", nllb())] {
        for gradient in [CondenseGradient::Spread, CondenseGradient::Literal] {
            let sizes = with(condensing(&sizes, 0.5), |moe| moe.condense_gradient = gradient);
            let ways = [false, true].map(|keep| Options { zero: true, recompute: Some(keep) });
            check(&format!("{name}, {gradient:?}"), &sizes, &shapes, &ways);
        }
    }
}

/// Rows in steps, experts that visit, duplicates, networks beside the experts, places that run out, and gates that draw.
#[test]
fn rows_are_shared_however_they_travel() {
    let ways: [(&str, fn(&mut Config)); 10] = [
        ("literal", |moe| moe.condense_gradient = CondenseGradient::Literal),
        ("steps", |moe| moe.schedule = ScheduleKind::Smart),
        ("visits", |moe| moe.shadowing = "force:2".to_owned()),
        ("duplicates", |moe| moe.drop_duplicates = false),
        ("shared", |moe| moe.shared_experts = 1),
        ("residual", |moe| moe.residual = true),
        ("places", |moe| (moe.capacity_factor, moe.group_tokens) = (Some(0.8), Some(16))),
        ("chance", |moe| {
            (moe.capacity_factor, moe.group_tokens, moe.overflow) = (Some(0.8), Some(8), Overflow::Random);
        }),
        ("stars", |moe| moe.condense_clusters = Some(ClusterRule::Star)),
        ("hash", |moe| moe.gate = GateKind::Hash.into()),
    ];
    for (name, change) in ways {
        let sizes = with(condensing(&Sizes { seed: 6, ..mixtral() }, 0.5), change);
        let shapes = [shape(2, 2), shape(4, 4), sliced(4, 2, 2), whole_experts(4, 2, 4)];
        check(name, &sizes, &shapes, &[Options::default()]);
    }
}

/// So few tokens are similar that some tensor groups have clusters in a layer and others have none.
#[test]
fn some_hosts_condense_where_others_do_not() {
    for drop_duplicates in [true, false] {
        let sizes = with(condensing(&mixtral(), 0.95), |moe| moe.drop_duplicates = drop_duplicates);
        let want = run(&sizes, 6, ONE, Options::default());
        let share = uncomputed(&want);
        assert!(share > 0.0 && share < 0.13, "{share}");
        for shape in [sliced(4, 2, 2), whole_experts(4, 2, 4), sliced(8, 2, 4)] {
            for micro_batch in [6, 4, 1] {
                let got = run(&sizes, micro_batch, shape, Options::default());
                compare(&format!("{shape:?}, {drop_duplicates}, micro-batches of {micro_batch}"), &got, &want);
            }
        }
    }
}

/// The second layer has similarities of the first to go by; without a history it compares all pairs.
#[test]
fn a_layer_remembers_the_pairs_of_the_one_before() {
    for history in [None, Some(vec![0.6, 0.1])] {
        let sizes = with(condensing(&mixtral(), 0.4), |moe| moe.condense_history.clone_from(&history));
        let run = run(&sizes, 8, ONE, Options::default());
        for moe in run.reports.iter().flat_map(|report| &report.moe) {
            let condensed = moe.condensed.as_ref().expect("a layer that condenses");
            assert_eq!(condensed.remembered > 0, moe.layer > 0 && history.is_some(), "{history:?}: {moe:?}");
        }
    }
}

/// Groups of half a sequence; groups of two, which lie on one rank each; sets that are cut; thresholds that follow
/// the loss; pairs that are not compared again.
#[test]
fn groups_thresholds_and_history_do_not_know_the_mesh() {
    let ways: [(&str, fn(&mut Config)); 5] = [
        ("half a sequence", |moe| moe.condense_tokens = Some(4)),
        ("parts", |moe| moe.condense_compared = 3),
        ("paper", |moe| moe.condense = Condense::Paper),
        ("adaptive", |moe| {
            (moe.condense, moe.condense_range, moe.condense_warmup) = (Condense::Adaptive, vec![0.7, 0.2], 1);
        }),
        ("history", |moe| moe.condense_history = Some(vec![0.6, 0.1])),
    ];
    for (name, change) in ways {
        for sizes in [mixtral(), transformer_xl()] {
            let shapes = [shape(4, 4), sliced(4, 2, 2)];
            check(name, &with(condensing(&sizes, 0.4), change), &shapes, &[Options::default()]);
        }
    }
    let two = with(condensing(&bert(), 0.5), |moe| moe.condense_tokens = Some(16));
    let recipe = |micro_batch| Recipe { sizes: two.clone(), rows: 8, micro_batch };
    let trained = |micro, shape| train_on(&recipe(micro), shape, |_, mesh| mesh.clone(), |_| ());
    for (micro, shape) in [(4, shape(2, 2)), (8, shape(4, 4)), (4, sliced(4, 2, 2))] {
        compare(&format!("pairs of sequences on {shape:?}"), &trained(micro, shape), &trained(8, ONE));
    }
}

/// Above 1 nothing is condensed, to the bit; what is compared is counted.
#[test]
fn a_threshold_above_one_changes_no_bit() {
    for (name, sizes) in [("gpt2", gpt2()), ("bert", bert())] {
        for shape in [ONE, shape(4, 4), sliced(4, 2, 2)] {
            let trained = |sizes: Sizes| run(&sizes, 4, shape, Options::default());
            let [off, above] = [sizes.clone(), condensing(&sizes, 1.5)].map(trained);
            assert!(off.weights == above.weights, "{name} on {shape:?}: weights differ");
            for (off, above) in off.reports.iter().zip(&above.reports) {
                assert_eq!(
                    (off.loss.to_bits(), off.gradient_norm.to_bits()),
                    (above.loss.to_bits(), above.gradient_norm.to_bits())
                );
            }
            assert_eq!(uncomputed(&above), 0.0);
            let condensed =
                above.reports.iter().flat_map(|report| &report.moe).filter_map(|layer| layer.condensed.as_ref());
            assert!(condensed.map(|layer| layer.similarity.iter().sum::<u64>()).sum::<u64>() > 100);
        }
    }
}

/// Does not heed the threshold.
#[derive(Debug)]
struct Heedless;

impl ClusterPolicy for Heedless {
    fn representatives(&self, set: &ComparedRoutes, _: f64) -> Vec<usize> {
        ClusterRule::Leader.representatives(set, 0.95)
    }
}

/// Hosts agree about what to send together from the threshold alone: above 1 it is nothing, whatever a policy would say of
/// the tokens of one of them.
#[test]
fn above_one_no_policy_is_asked() {
    let sizes = condensing(&mixtral(), 1.5);
    let recipe = Recipe { sizes, rows: 6, micro_batch: 6 };
    let trained = |policy: Option<Arc<dyn ClusterPolicy>>| {
        let forced = Migrating::new(Migrate::Force, (None, 0.25), 1).unwrap();
        let migration = Some(Arc::new(forced) as Arc<dyn MigrationPolicy>);
        let routings = Arc::new(Routings { migration, ..Routings::NONE });
        let prepare = |trainer: &mut Trainer| {
            trainer.routings = routings.clone();
            for layer in 0..2 {
                let layer = trainer.model.moe_layer(layer).expect("experts");
                layer.condensation.as_mut().expect("a layer that condenses").policy.clone_from(&policy);
            }
        };
        train_on(&recipe, sliced(4, 2, 2), |_, mesh| mesh.clone(), prepare)
    };
    let heedless = trained(Some(Arc::new(Heedless)));
    assert_eq!(uncomputed(&heedless), 0.0);
    assert!(heedless == trained(None), "other weights or reports");
}

/// Experts that look at more than a row.
#[derive(Debug)]
struct Neighbourly(Box<dyn Expert>);

impl Expert for Neighbourly {
    fn weights(&self, tape: &Tape) -> Vec<Var> {
        self.0.weights(tape)
    }

    /// The mean of a row's result and the one before it.
    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        let results = self.0.apply(weights, rows, counts);
        let before: Vec<u32> = (0..rows.rows() as u32).map(|row| row.saturating_sub(1)).collect();
        results.add(&results.gather_rows(&before)).scale(0.5)
    }

    fn is_of_the_row_alone(&self) -> bool {
        false
    }
}

impl Parameters for Neighbourly {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.visit(f);
    }
}

/// Tokens cannot share rows of experts, or be sent by gates, of one's own that ask for more than the row. Every rank says
/// so, before anything is learnt; without condensation they train.
#[test]
fn what_depends_on_other_rows_is_refused() {
    let neighbourly = |layer: &mut MoeLayer| {
        let own = std::mem::replace(&mut layer.experts, Box::new(Mixed(Vec::new())));
        layer.experts = Box::new(Mixed(vec![(2, Box::new(Neighbourly(own)))]));
    };
    let competing = |layer: &mut MoeLayer| {
        layer.selector = Config { gate: GateKind::Sinkhorn.into(), ..Config::of(4, 2) }.widest().selector();
    };
    let ways: [(fn(&mut MoeLayer), &str); 2] = [
        (neighbourly, "depends on more than that row (Expert::is_of_the_row_alone)"),
        (competing, "tokens compete for experts"),
    ];
    let step = |sizes: &Sizes, (shape, change): (Shape, fn(&mut MoeLayer))| {
        let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 6 };
        on_mesh(shape, |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            change(trainer.model.moe_layer(1).expect("experts"));
            let before = weights(&mut trainer.model);
            let step = trainer.step(&recipe.batches(mesh, 1), 1);
            (step.map_err(|error| error.to_string()), weights(&mut trainer.model) == before)
        })
    };
    for (change, because) in ways {
        for (error, is_unchanged) in step(&condensing(&mixtral(), 0.5), (shape(2, 2), change)) {
            let error = error.unwrap_err();
            assert!(error.contains("layer 1: moe.condense: ") && error.contains(because), "{error}");
            assert!(error.contains("moe.condense to \"off\"") && is_unchanged, "{error}");
        }
    }
    assert!(step(&mixtral(), (shape(2, 2), neighbourly)).iter().all(|(step, _)| step.is_ok()));
}

/// Where a tensor group splits its tokens no rank can compare them: every rank says so, and trains without.
#[test]
fn tokens_that_are_split_are_not_compared() {
    let step = |sizes: &Sizes| {
        let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 6 };
        on_mesh(sliced(4, 2, 2), |rank, mesh| {
            let mesh = &mesh.clone().with_sequence(true);
            let step = recipe.trainer(rank, mesh).step(&recipe.batches(mesh, 1), 1);
            step.map(drop).map_err(|error| error.to_string())
        })
    };
    for told in step(&condensing(&mixtral(), 0.5)) {
        let error = told.unwrap_err();
        assert!(error.contains("moe.condense: its tokens are split") && error.contains("parallel.sequence"), "{error}");
    }
    assert_eq!(step(&mixtral()), vec![Ok(()); 4]);
}

/// Fewer rows travel, as many fewer as are counted; loads and routes are of all tokens.
#[test]
fn rows_that_are_not_sent_are_counted() {
    for shadowing in ["off", "force:2"] {
        let sizes = with(mixtral(), |moe| moe.shadowing = shadowing.to_owned());
        rows_are_counted(&sizes, shape(4, 4));
    }
    // The ranks of a tensor group are in one expert group, so that a row travels from one of them and not from another.
    rows_are_counted(&mixtral(), whole_experts(4, 2, 4));
}

fn rows_are_counted(sizes: &Sizes, shape: Shape) {
    let [off, on] = [sizes.clone(), condensing(sizes, 0.5)].map(|sizes| run(&sizes, 6, shape, Options::default()));
    // Of the first step: later ones route other tokens.
    let (off, on) = (&off.reports[0], &on.reports[0]);
    let (plain, shared) = (&off.sent[0], &on.sent[0]);
    let rows = |sent: &[Vec<u64>], to_others: bool| -> u64 {
        let of = |(rank, rows): (usize, &Vec<u64>)| {
            rows.iter().enumerate().filter(|(to, _)| !to_others || *to != rank).map(|(_, n)| n).sum::<u64>()
        };
        sent.iter().enumerate().map(of).sum()
    };
    let (computed, sent) = (on.moe[0].condensed.clone().unwrap(), shared.condensed.unwrap());
    assert_eq!(rows(&plain.rows, false) - rows(&shared.rows, false), computed.uncomputed);
    assert_eq!(rows(&plain.rows, false), computed.routes);
    // The hottest experts are those with most rows, which condensation may change: the others travel.
    assert_eq!(rows(&shared.rows, true), sent.routes - sent.unsent);
    if sizes.moe.as_ref().is_some_and(|moe| moe.shadowing == "off") {
        assert_eq!(
            (rows(&plain.rows, true), rows(&plain.rows, true) - rows(&shared.rows, true)),
            (sent.routes, sent.unsent)
        );
    }
    assert_eq!((&off.moe[0].load, off.moe[0].routes), (&on.moe[0].load, on.moe[0].routes));
    assert!(sent.unsent > 0 && sent.unsent_share > 0.0);
}

/// What a trained model computes does not know that it was condensed in training.
#[test]
fn evaluation_condenses_nothing() {
    let losses = |sizes: Sizes, trains: bool| {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 6 };
        let of = |rank: &Rank, mesh: &Mesh| {
            let trainer = recipe.trainer(rank, mesh);
            let facts = if trains { StepFacts::of_training(0, 1) } else { StepFacts::of_inference() };
            let context = Context { facts, ..Context::of_inference(mesh, 48) };
            let batch = &recipe.batches(mesh, 1).micro[0];
            trainer.model.forward(&Tape::inference(&rank.device), batch, &context).unwrap().cross_entropy().to_bits()
        };
        on_mesh(shape(2, 2), of)
    };
    let [off, on] = [mixtral(), condensing(&mixtral(), 0.3)];
    assert_eq!(losses(off.clone(), false), losses(on.clone(), false));
    assert_ne!(losses(off, true), losses(on, true));
}

const D: usize = 6;
const TOKENS: usize = 16;

fn layer(rank: &Rank, mesh: &Mesh, gradient: CondenseGradient, residual: bool) -> MoeLayer {
    let init = Init::Normal { std: 0.4, seed: 3 };
    let config = Config {
        condense: Condense::Static,
        condense_threshold: 0.6,
        condense_gradient: gradient,
        condense_clusters: Some(ClusterRule::Star),
        residual,
        capacity_factor: Some(0.9),
        ..Config::of(3, 2)
    };
    let activation = guildhall::moe::Activation::Gelu;
    let sizes = LayerSizes {
        d_model: D,
        d_ff: 10,
        activation,
        gates_shared: false,
        router_bias: false,
        dtype: Dtype::F32,
        adapters: None,
        inits: [init; 2],
    };
    MoeLayer::new(&rank.device, ("layer", 0), config.widest(), &sizes, mesh)
}

fn values(stream: u32, len: usize) -> Vec<f32> {
    let draws = Draws::new(29, Purpose::Test, 0, stream);
    (0..len as u64).map(|i| draws.normal(i)).collect()
}

/// The routed part by its definition: every route has the result of its representative's row, times its own gate weight.
/// In backward, a row's gradient goes to its representative, or evenly to its cluster.
fn by_definition(layer: &MoeLayer, x: &Var, weights: &Var, routing: &Routing, condensed: &Condensed) -> Var {
    let Some(Clusters::Known(of)) = &condensed.clusters else { panic!("clusters") };
    let (tape, k) = (x.tape(), routing.k);
    let placed = |route: usize| routing.expert[route] != Routing::DROPPED;
    let mut rows: Vec<usize> = (0..of.len()).filter(|&route| of[route] as usize == route && placed(route)).collect();
    rows.sort_by_key(|&route| routing.expert[route]);
    let members = |row: usize| (0..of.len()).filter(move |&route| of[route] as usize == row && placed(route));
    let tokens: Vec<u32> = rows.iter().map(|&route| (route / k) as u32).collect();
    let sent = match condensed.gradient {
        CondenseGradient::Literal => x.gather_rows(&tokens),
        CondenseGradient::Spread => {
            // The mean of the cluster, and a constant that makes it the representative.
            let most = rows.iter().map(|&row| members(row).count()).max().unwrap();
            let mut places = vec![u32::MAX; rows.len() * most];
            let mut shares = vec![0.0; places.len()];
            for (i, &row) in rows.iter().enumerate() {
                let count = members(row).count();
                for (j, member) in members(row).enumerate() {
                    (places[i * most + j], shares[i * most + j]) = ((member / k) as u32, 1.0 / count as f32);
                }
            }
            let shares = tape.constant(Tensor::from_slice(x.device(), &[rows.len(), most], &shares));
            let mean = x.weighted_sum_rows(&shares, &places);
            let mut rest = x.value().gathered_rows(&tokens);
            rest.add_scaled(mean.value(), -1.0);
            mean.add(&tape.constant(rest))
        }
    };
    let counts: Vec<usize> =
        (0..routing.experts).map(|e| rows.iter().filter(|&&row| routing.expert[row] as usize == e).count()).collect();
    let results = layer.experts.forward(&sent, &counts);
    let place = |route: usize| rows.iter().position(|&row| placed(route) && row == of[route] as usize);
    let places: Vec<u32> = (0..of.len()).map(|route| place(route).map_or(u32::MAX, |place| place as u32)).collect();
    results.weighted_sum_rows(weights, &places)
}

#[test]
fn a_layer_gives_and_learns_what_the_definition_says() {
    for gradient in [CondenseGradient::Literal, CondenseGradient::Spread] {
        on_mesh(ONE, |rank, mesh| {
            let layer = layer(rank, mesh, gradient, false);
            let direction = Tensor::from_slice(&rank.device, &[TOKENS, D], &values(2, TOKENS * D));
            let x = || Tensor::from_slice(&rank.device, &[TOKENS, D], &values(1, TOKENS * D));
            let step = StepFacts::of_training(0, 1);
            let importance = Importance::new(&[0; TOKENS], TOKENS, vec![true; TOKENS], 1.0);
            let stream = mesh.stream(Rows::consecutive(0, TOKENS));
            let homes = Homes::alone(0..TOKENS as u64);
            let facts = Facts { importance: &importance, homes: &homes, history: &History::default(), step: &step };

            let tape = Tape::new(&rank.device);
            let leaf = tape.leaf(x());
            let output = layer.forward(&leaf, &stream, &facts, mesh).unwrap();
            let saved = output.counts.condensed.unwrap();
            assert!(saved.uncomputed > 4 && output.counts.dropped > 0, "{saved:?}, {}", output.counts.dropped);
            let got = tape.backward(&output.y.dot_constant(direction.clone()));

            let tape = Tape::new(&rank.device);
            let want_leaf = tape.leaf(x());
            let (routing, condensed, weights) = decisions(&layer, &want_leaf, &stream);
            let y = by_definition(&layer, &want_leaf, &weights, &routing, &condensed);
            let want = tape.backward(&y.dot_constant(direction));
            // The same sums of at most ten terms in another order.
            let close = Tolerance { relative: 2e-6, floor: 1e-6 };
            near("y", &output.y.value().to_vec(), &y.value().to_vec(), close);
            let gradient = |of: &guildhall_tensor::Gradients, x: &Var| of.of(x).unwrap().to_vec();
            near("gradient of x", &gradient(&got, &leaf), &gradient(&want, &want_leaf), close);
        });
    }
}

/// What the layer decides about x: routing, clusters, and the weights of routes.
fn decisions(layer: &MoeLayer, x: &Var, stream: &Stream) -> (Routing, Condensed, Var) {
    let scores = layer.router.scores(
        x,
        &stream.numbers(),
        &guildhall::moe::gates::GateDraws { seed: 0, step: 1, layer: 0, trains: true },
    );
    let logits = scores.logits.value().to_vec();
    let (homes, world) = (Homes::alone(0..TOKENS as u64), guildhall_comm::solo::world());
    let tokens = guildhall::moe::gates::Tokens {
        logits: &logits,
        largest: None,
        experts: 3,
        first: 0,
        ids: &[],
        bias: &[],
        padding: &[],
        draws: guildhall::moe::gates::GateDraws { seed: 0, step: 1, layer: 0, trains: true },
    };
    let peers = guildhall::moe::Peers { group: &world, homes: &homes, device: x.device() };
    let routing = layer.selector.route(&[tokens], &peers).unwrap();
    let history = History::default();
    let at = Circumstances { step: 1, trend: None::<LossTrend>, is_causal: true, history: &history };
    let (condensed, _) = layer.condensation.as_ref().unwrap().decide(x.value(), &routing, stream.rows(), (&at, false));
    let weighting = layer.selector.gate.weighting();
    let probabilities = weighting.probabilities(&scores.logits);
    let weights = weighting.weights(&scores.logits, &probabilities, &routing.weighed(), routing.k);
    (routing, condensed, weights)
}

/// A threshold that follows the loss is continued where an interrupted run left it; the files say what was saved.
#[test]
fn a_resumed_run_continues_its_threshold() {
    let shop = Workshop::new();
    let with = "--set train.schedule=\"constant\" --ranks 2 --set parallel.expert=2 --set moe.condense=adaptive \
                --set moe.condense_warmup=1 --set moe.condense_range=[0.6,0.1]";
    shop.train(&format!("{with} --set run.dir=runs/whole"));
    shop.train(&format!("{with} --set run.dir=runs/parts --set train.steps=3"));
    shop.train(&format!("{with} --set run.dir=runs/parts --resume"));
    assert!(shop.tensors("runs/parts", 6) == shop.tensors("runs/whole", 6), "other weights or state");
    let thresholds = shop.series("runs/whole", "condense_threshold");
    assert_eq!(shop.series("runs/parts", "condense_threshold"), thresholds);
    let of = |step: usize| thresholds[step].as_f64().unwrap();
    assert!(of(0) == 0.6 && of(5) < of(2) && of(2) < of(0), "{thresholds:?}");

    let layers: Vec<Value> =
        shop.metrics("runs/whole").iter().flat_map(|step| step["moe"].as_array().unwrap().clone()).collect();
    let sum = |field: &str| layers.iter().map(|layer| layer["condensed"][field].as_u64().unwrap()).sum::<u64>();
    let condensed = shop.summary("runs/whole")["condensed"].clone();
    let share = sum("uncomputed") as f64 / sum("routes") as f64;
    assert!(share > 0.0 && (condensed["uncomputed_share"].as_f64().unwrap() - share).abs() < 1e-12, "{condensed}");
    let unsent = condensed["unsent_share"].as_f64().unwrap();
    assert!(unsent > 0.0 && unsent < 1.0, "{condensed}");
    // A parted run says the same of both parts.
    assert_eq!(shop.summary("runs/parts")["condensed"]["routes"], condensed["routes"]);
    shop.train("--ranks 2 --set run.dir=runs/plain");
    assert!(shop.summary("runs/plain").get("condensed").is_none());
}
