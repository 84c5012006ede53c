//! FastMoE's own tests, here: on 1, 2, 4 and 8 thread ranks, against loops in f64 (`reference`).
//!
//! | FastMoE's | here |
//! |---|---|
//! | numerical, ddp | `a_layer_is_its_loops_on_every_mesh`; the same with biases of losses: `moe_oracle.rs` |
//! | heterogeneous experts | the same, with `Mixed` |
//! | zero: one expert for all, masked tokens | the same, with choices given |
//! | faster schedule, faster shadow | `schedules_and_shadows_give_what_the_plain_layer_gives`; any mask: `adjoint.rs` |
//! | local ddp | `gradients_are_summed_over_those_who_share` |
//! | local exchange, mimo | `one_plan_moves_any_number_of_tensors` |
//! | gates | `no_expert_gets_more_than_its_places`, `survivors_keep_their_weights`, `noise_is_a_function_of_its_place` |
//! | topology gate | `few_leave_their_node` |
//! | swipe | `no_worker_gets_more_than_its_share` |
//! | communicator init | `crates/comm/tests/laws.rs` |
//! | CUDA: assign, count, limit, prune | unit tests of `src/moe/plan.rs`; `adjoint.rs`; the gates' tests here |
//! | benchmark | `benches/layer.rs` |
//!
//! A batch that is a tree of tensors has no type of its own here: each tensor is dispatched with the same plan.

use std::collections::BTreeMap;
use std::ops::Range;

use guildhall::launch::Rank;
use guildhall::moe::gates::{BalanceKind, Draw, Gate, GateDraws, Perturbation, Scope, Tokens};
use guildhall::moe::migration::FollowingWork;
use guildhall::moe::{
    self, Activation, BalanceScope, Beside, Counts, Expert, Experts, ExpertsShape, Facts, GateKind, GateState, History,
    Homes, Importance, Mixed, MoeLayer, Outgoing, Peers, Plan, Router, Routing, Selector, Shadowing, StepFacts,
    Transport, Weighting, dispatch,
};
use guildhall::parallel::{Init, Mesh, Parameters, Placement, Rows, Spread, Weight, sync_gradients};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape, Tensor};

use crate::gates::of_workers;
use crate::reference::{MoeLoops, MoeOutput, Numbers};
use crate::tiny::{Tensors, Tolerance, all_near, gradients, near, set, union};
use crate::world::{Shape, on_mesh, shape};

// FastMoE's sizes: tokens, features, inner width.
const S: usize = 4;
const M: usize = 16;
const F: usize = 32;
/// Inner width of the experts of another kind.
const OTHER: usize = 12;
/// Sums of at most 32 terms, each rounded at 2^-24 (6e-8), three products deep, where FastMoE allows 1e-3. The floor is
/// for what nearly cancels.
const ROUNDING: Tolerance = Tolerance { relative: 4e-6, floor: 2e-7 };

fn random(len: usize, stream: u32) -> Vec<f32> {
    let draws = Draws::new(29, Purpose::Test, 0, stream);
    (0..len as u64).map(|i| draws.normal(i) * 0.5).collect()
}

/// Meshes of 1, 2, 4 and 8 ranks, experts spread as far as they go.
fn meshes(experts: usize) -> [Shape; 4] {
    [1, 2, 4, 8].map(|ranks: usize| shape(ranks, ranks.min(experts)))
}

/// This rank's consecutive share of some tokens.
fn share(tokens: usize, mesh: &Mesh) -> Range<usize> {
    let (rank, ranks) = (mesh.world.rank(), mesh.world.size());
    tokens * rank / ranks..tokens * (rank + 1) / ranks
}

// --- numerical, ddp, heterogeneous experts, zero ----------------------------------------------------------------

/// Choices that are given, by global token.
#[derive(Clone, Debug)]
struct Given {
    chosen: Vec<u32>,
    k: usize,
}

impl Gate for Given {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let first = tokens.first as usize;
        self.chosen[first * self.k..(first + tokens.len()) * self.k].to_vec()
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        Weighting::AmongChosen
    }
}

/// Groups of ranks that take turns, and who is shadowed.
type Way = (usize, Shadowing);

const PLAIN: Way = (1, Shadowing::Off);

struct Case {
    tokens: usize,
    experts: usize,
    k: usize,
    /// Odd experts are SwiGLU networks of another width.
    mixed: bool,
    /// Instead of the k best.
    given: Option<Vec<u32>>,
}

impl Case {
    fn is_other(&self, expert: usize) -> bool {
        self.mixed && expert % 2 == 1
    }

    fn values(&self) -> Tensors {
        let mut values = BTreeMap::from([
            ("x".to_owned(), random(self.tokens * M, 1)),
            ("gate.weight".to_owned(), random(self.experts * M, 2)),
        ]);
        for e in 0..self.experts {
            let parts = match self.is_other(e) {
                true => vec![("w1.weight", OTHER * M), ("w2.weight", M * OTHER), ("w3.weight", OTHER * M)],
                false => vec![("fc_in.weight", F * M), ("fc_in.bias", F), ("fc_out.weight", M * F), ("fc_out.bias", M)],
            };
            for (i, (part, len)) in parts.into_iter().enumerate() {
                values.insert(format!("experts.{e}.{part}"), random(len, 10 + 4 * e as u32 + i as u32));
            }
        }
        values
    }

    fn selector(&self) -> Selector {
        let config = moe::Config { gate: GateKind::Naive.into(), ..moe::Config::of(self.experts, self.k) };
        match &self.given {
            None => config.widest().selector(),
            Some(chosen) => {
                let gate = std::sync::Arc::new(Given { chosen: chosen.clone(), k: self.k });
                Selector { gate, ..config.widest().selector() }
            }
        }
    }

    fn layer(&self, rank: &Rank, mesh: &Mesh) -> MoeLayer {
        let of_one = |&e: &usize| -> (usize, Box<dyn Expert>) {
            let (activation, d_expert) =
                if self.is_other(e) { (Activation::SwiGlu, OTHER) } else { (Activation::Gelu, F) };
            let shape = ExpertsShape {
                local: vec![e],
                d_model: M,
                d_expert,
                activation,
                spread: Spread::Expert(mesh.expert.size()),
                slice: (0, 1),
            };
            (1, Box::new(Experts::new(&rank.device, "experts", &shape, Dtype::F32, [Init::Zeros; 2])))
        };
        let transport = Transport::plain(self.experts, mesh);
        let local = transport.table.of(mesh.expert.rank());
        let alike = || {
            let (local, activation) = (local.to_vec(), Activation::Gelu);
            let shape = ExpertsShape {
                local,
                d_model: M,
                d_expert: F,
                activation,
                spread: Spread::Expert(mesh.expert.size()),
                slice: (0, 1),
            };
            Experts::new(&rank.device, "experts", &shape, Dtype::F32, [Init::Zeros; 2])
        };
        let experts: Box<dyn Expert> =
            if self.mixed { Box::new(Mixed(local.iter().map(of_one).collect())) } else { Box::new(alike()) };
        let mut layer = MoeLayer {
            index: 0,
            condensation: None,
            is_causal: true,
            following: FollowingWork::default(),
            stack: 0,
            router: Router::new(&rank.device, "gate", (self.experts, M), Init::Zeros, Perturbation::None),
            selector: self.selector(),
            experts,
            transport,
            beside: Beside::Nothing,
            output_masking: 0.0,
            balance: BalanceKind::AllChoices,
            balance_scope: BalanceScope::Sequence,
            state: GateState::default(),
        };
        set(&mut layer, &self.values());
        layer
    }

    /// Output, then gradients of everything, `x` among them, in f64.
    fn expected(&self) -> (Vec<f32>, Tensors) {
        let loops = MoeLoops {
            d_model: M,
            experts: self.experts,
            top_k: self.k,
            activation: Activation::Gelu,
            sequence: vec![0; self.tokens],
            counts: vec![true; self.tokens],
            kept: vec![true; self.tokens * self.k],
        };
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let numbers: Numbers = self.values().iter().map(|(name, x)| (name.clone(), wide(x))).collect();
        let direction = wide(&random(self.tokens * M, 3));
        let objective = |out: &MoeOutput| out.y.iter().zip(&direction).map(|(y, d)| y * d).sum::<f64>();
        let kept = |routes: &[u32]| {
            routes.iter().filter(|&&e| e != Routing::DROPPED).map(|&e| e as usize).collect::<Vec<usize>>()
        };
        let routing = match &self.given {
            None => loops.routing(&numbers),
            Some(chosen) => chosen.chunks(self.k).map(kept).collect(),
        };
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let gradients = loops.gradients(&numbers, &routing, objective);
        let gradients = gradients.iter().map(|(name, x)| (name.clone(), narrow(x))).collect();
        (narrow(&loops.forward(&numbers, &routing).y), gradients)
    }

    /// One rank's part of the output, of the gradient of x, and its weights' gradients.
    fn part(&self, rank: &Rank, mesh: &Mesh, way: Way) -> (Vec<f32>, Vec<f32>, Tensors) {
        let mut layer = self.layer(rank, mesh);
        (layer.transport.groups, layer.transport.shadowing) = way;
        let mine = share(self.tokens, mesh);
        let own = |all: &[f32]| Tensor::from_slice(&rank.device, &[mine.len(), M], &all[mine.start * M..mine.end * M]);
        let tape = Tape::new(&rank.device);
        let x = tape.leaf(own(&self.values()["x"]));
        let importance = Importance::new(&vec![0; mine.len()], mine.len().max(1), vec![true; mine.len()], 1.0);
        let stream = mesh.stream(Rows::consecutive(mine.start as u64, mine.len()));
        let facts = Facts {
            importance: &importance,
            homes: &Homes::default(),
            history: &History::default(),
            step: &StepFacts::of_training(0, 1),
        };
        let output = layer.forward(&x, &stream, &facts, mesh).unwrap();
        let y = output.y.value().to_vec();
        let back = tape.try_backward(&output.y.dot_constant(own(&random(self.tokens * M, 3)))).unwrap();
        sync_gradients(&mut layer, mesh).unwrap();
        let of_x = back.of(&x).map_or_else(|| vec![0.0; mine.len() * M], Tensor::to_vec);
        (y, of_x, gradients(&mut layer))
    }

    /// Output, gradients of x and of all weights, from all ranks together.
    fn found(&self, shape: Shape, way: Way) -> (Vec<f32>, Vec<f32>, Tensors) {
        let parts = on_mesh(shape, |rank, mesh| {
            // Who goes by no speed measures none.
            let speeds = way.1 == Shadowing::Auto;
            let mesh = if speeds { mesh.clone().measured(&rank.device, Dtype::F32).unwrap() } else { mesh.clone() };
            self.part(rank, &mesh, way)
        });
        let joined = |of: fn(&(Vec<f32>, Vec<f32>, Tensors)) -> &Vec<f32>| parts.iter().flat_map(of).copied().collect();
        let weights = union(parts.iter().map(|part| part.2.clone()));
        (joined(|part| &part.0), joined(|part| &part.1), weights)
    }

    fn check(&self, what: &str) {
        let (y, mut want) = self.expected();
        let of_x = want.remove("x").expect("x is a number too");
        for shape in meshes(self.experts) {
            self.compare(&format!("{what}, {shape:?}"), shape, PLAIN, &(y.clone(), of_x.clone(), want.clone()));
        }
    }

    fn compare(&self, what: &str, shape: Shape, way: Way, want: &(Vec<f32>, Vec<f32>, Tensors)) {
        let what = |part: &str| format!("{what}, {} experts, top {}: {part}", self.experts, self.k);
        let got = self.found(shape, way);
        near(&what("output"), &got.0, &want.0, ROUNDING);
        near(&what("gradient of x"), &got.1, &want.1, ROUNDING);
        all_near(&what("gradient"), &got.2, &want.2, ROUNDING);
    }
}

#[test]
fn a_layer_is_its_loops_on_every_mesh() {
    for (experts, k) in [(4, 3), (8, 2)] {
        Case { tokens: S, experts, k, mixed: false, given: None }.check("alike");
    }
    Case { tokens: S, experts: 4, k: 2, mixed: true, given: None }.check("of two kinds");
    const NO: u32 = Routing::DROPPED;
    let one = Case { tokens: S, experts: 4, k: 1, mixed: false, given: Some(vec![2; S]) };
    one.check("one expert for all");
    let masked = vec![1, 3, NO, NO, 0, 1, NO, NO];
    Case { tokens: S, experts: 4, k: 2, mixed: true, given: Some(masked) }.check("two of four tokens masked");
    let all_masked = Case { tokens: S, experts: 8, k: 2, mixed: false, given: Some(vec![NO; 2 * S]) };
    all_masked.check("all tokens masked");
    assert!(all_masked.expected().0.iter().all(|&y| y == 0.0));
}

// --- smart schedule, shadowing ------------------------------------------------------------------------------------

/// Groups of 1, 2 and 4 ranks, one expert a rank or four; the hottest, some, and what the policy says.
#[test]
fn schedules_and_shadows_give_what_the_plain_layer_gives() {
    for (tokens, experts) in [(16, 8), (512, 8), (16, 32)] {
        let case = Case { tokens, experts, k: 2, mixed: false, given: None };
        let want = case.found(shape(1, 1), PLAIN);
        for ranks_per_group in [1, 2, 4] {
            for shadowing in [Shadowing::Off, Shadowing::Force(1), Shadowing::Force(5), Shadowing::Auto, Shadowing::All]
            {
                let what = format!("{tokens} tokens, groups of {ranks_per_group}, {shadowing:?}");
                case.compare(&what, shape(8, 8), (8 / ranks_per_group, shadowing), &want);
            }
        }
    }
}

/// Visitors must be of the hosts' kind.
#[test]
fn experts_of_two_kinds_cannot_be_shadowed() {
    let case = Case { tokens: S, experts: 4, k: 2, mixed: true, given: None };
    let forward = |expert, shadowing| {
        on_mesh(shape(2, expert), |rank, mesh| {
            let mut layer = case.layer(rank, mesh);
            layer.transport.shadowing = shadowing;
            let x = Tape::new(&rank.device).leaf(Tensor::zeros(&rank.device, &[2, M]));
            let importance = Importance::new(&[0, 0], 2, vec![true; 2], 0.25);
            let stream = mesh.stream(Rows::consecutive(2 * mesh.world.rank() as u64, 2));
            let facts = Facts {
                importance: &importance,
                homes: &Homes::default(),
                history: &History::default(),
                step: &StepFacts::of_training(0, 1),
            };
            layer.forward(&x, &stream, &facts, mesh).map(|output| output.shadowed).map_err(|error| error.to_string())
        })
    };
    for (shadowing, key) in [(Shadowing::Force(1), "moe.shadowing: "), (Shadowing::All, "parallel.exchange: ")] {
        for result in forward(2, shadowing) {
            let error = result.unwrap_err();
            assert!(error.contains(key) && error.contains("not all of one kind"), "{error}");
        }
    }
    // Of experts that every rank has none need travel.
    assert_eq!(forward(1, Shadowing::All), [Ok(vec![]), Ok(vec![])]);
}

// --- local ddp --------------------------------------------------------------------------------------------------

/// Two weights: one that all ranks share, one that the ranks of an expert-data group do.
struct Two([Weight; 2]);

impl Parameters for Two {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.0.iter_mut().for_each(f);
    }
}

#[test]
fn gradients_are_summed_over_those_who_share() {
    for (ranks, expert) in [(1, 1), (2, 1), (2, 2), (4, 2), (8, 2), (8, 4), (8, 8)] {
        let sums = on_mesh(shape(ranks, expert), |rank, mesh| {
            let weight = |spread| {
                let placement = Placement::new(spread, [("weight".to_owned(), vec![3])]);
                Weight::new(&rank.device, placement, &[3], Dtype::F32, Init::Zeros)
            };
            let mut two = Two([weight(Spread::Replicated), weight(Spread::Expert(mesh.expert.size()))]);
            // Powers of two: every sum of ranks is another number, and exact.
            let own = (1u32 << mesh.world.rank()) as f32;
            two.visit(&mut |weight| {
                weight.parameter.with_gradient(|g| g.f32s_mut().copy_from_slice(&[own, 0.0, -own]))
            });
            sync_gradients(&mut two, mesh).unwrap();
            two.0.each_ref().map(|weight| weight.parameter.with_gradient(|g| g.to_vec()))
        });
        for (rank, [replicated, experts]) in sums.iter().enumerate() {
            let sum_of = |those: &dyn Fn(usize) -> bool| {
                let sum = (0..ranks).filter(|&r| those(r)).map(|r| (1u32 << r) as f32).sum::<f32>();
                vec![sum, 0.0, -sum]
            };
            assert_eq!(*replicated, sum_of(&|_| true), "{ranks} ranks, {expert} an expert group, rank {rank}");
            assert_eq!(*experts, sum_of(&|r| r % expert == rank % expert), "{ranks}, {expert}, rank {rank}");
        }
    }
}

// --- local exchange, mimo ---------------------------------------------------------------------------------------

/// Rows of two widths arrive where a lookup of the choices says, without those that were dropped.
#[test]
fn one_plan_moves_any_number_of_tensors() {
    const TOKENS: usize = 5;
    const EXPERTS: usize = 8;
    const K: usize = 2;
    let routing = |rank: usize| {
        let draws = Draws::new(31, Purpose::Test, 0, rank as u32);
        let choice = |route: u64| if draws.uniform(route) < 0.2 { Routing::DROPPED } else { draws.bits(route) % 8 };
        Routing::new((0..(TOKENS * K) as u64).map(choice).collect(), K, EXPERTS)
    };
    for ranks in [1, 2, 4, 8] {
        on_mesh(shape(ranks, ranks), |rank, mesh| {
            let label = |rank: usize, token: usize, column: usize| (100 * rank + 10 * token + column) as f32;
            let table = mesh.expert_table(EXPERTS);
            let plan = Plan::new(&routing(mesh.expert.rank()), table.clone(), mesh.expert.rank());
            let plan = plan.exchange(mesh).unwrap();
            let tape = Tape::inference(&rank.device);
            for width in [2, 3] {
                let features = |i: usize| label(mesh.expert.rank(), i / width, i % width);
                let x = tape.constant(Tensor::from_fn(&rank.device, &[TOKENS, width], features));
                let arrived =
                    dispatch(&Outgoing::new(&x, &plan.plan, &mesh.tensor), &plan, &mesh.expert).unwrap().remove(0);
                let got = plan.steps[0].sorting.sort(arrived.finish().unwrap()).value().to_vec();
                let mut want = Vec::new();
                for &expert in table.of(mesh.expert.rank()) {
                    for from in 0..ranks {
                        let experts = routing(from).expert;
                        let routes = (0..TOKENS * K).filter(|&route| experts[route] as usize == expert);
                        want.extend(routes.flat_map(|r| (0..width).map(move |c| label(from, r / K, c))));
                    }
                }
                assert_eq!(got, want, "{ranks} ranks, width {width}");
            }
        });
    }
}

// --- gates ------------------------------------------------------------------------------------------------------

const DRAWS: GateDraws = GateDraws { seed: 3, step: 1, layer: 0, trains: true };

fn tokens<'a>(logits: &'a [f32], config: &'a moe::Config, first: usize, bias: &'a [f32]) -> Tokens<'a> {
    Tokens {
        logits,
        largest: None,
        experts: config.experts.largest(),
        first: first as u64,
        ids: &[],
        bias,
        padding: &[],
        draws: DRAWS,
    }
}

/// The routing of `count` tokens spread over ranks, put together again.
fn route(config: &moe::Config, count: usize, ranks: usize) -> Routing {
    let logits = random(count * config.experts.largest(), 50);
    let parts = on_mesh(shape(ranks, 1), |rank, mesh| {
        let (mine, bias) = (share(count, mesh), vec![0.0; config.experts.largest()]);
        let own = &logits[mine.start * config.experts.largest()..mine.end * config.experts.largest()];
        let homes = Homes::gather(&(mine.start as u64..mine.end as u64).into(), &mesh.world).unwrap();
        let peers = Peers { group: &mesh.world, homes: &homes, device: &rank.device };
        config.widest().selector().route(&[tokens(own, config, mine.start, &bias)], &peers).unwrap()
    });
    let join = |of: fn(&Routing) -> &Vec<u32>| parts.iter().flat_map(of).copied().collect();
    let (expert, chosen) = (join(|part| &part.expert), join(|part| &part.chosen));
    Routing { expert, ..Routing::new(chosen, parts[0].k, config.experts.largest()) }
}

fn sent(routing: &Routing) -> Vec<usize> {
    let mut sent = vec![0; routing.experts];
    routing.expert.iter().filter(|&&e| e != Routing::DROPPED).for_each(|&e| sent[e as usize] += 1);
    sent
}

#[test]
fn no_expert_gets_more_than_its_places() {
    for (gate, k) in [(GateKind::Switch, 1), (GateKind::Gshard, 2), (GateKind::Naive, 3)] {
        for factor in [0.3, 0.7, 1.0] {
            let config = moe::Config { gate: gate.into(), capacity_factor: Some(factor), ..moe::Config::of(8, k) };
            for ranks in [1, 2, 4, 8] {
                let routing = route(&config, 61, ranks);
                let places = (factor * (61 * k) as f64 / 8.0).ceil() as usize;
                assert!(sent(&routing).iter().all(|&n| n <= places), "{gate:?}, {factor}: {:?}", sent(&routing));
                assert!(
                    sent(&routing).contains(&places) && routing.expert.contains(&Routing::DROPPED),
                    "{gate:?}, {factor}: no limit met"
                );
                let kept = routing.expert.iter().zip(&routing.chosen).all(|(e, c)| e == c || *e == Routing::DROPPED);
                assert!(kept, "{gate:?}: a survivor goes where it chose");
                assert_eq!(routing, route(&config, 61, 1), "{gate:?}: {ranks} ranks");
            }
        }
    }
}

/// What a limit leaves has the weight that a softmax over all the token's choices gives.
#[test]
fn survivors_keep_their_weights() {
    for (gate, k) in [(GateKind::Gshard, 2), (GateKind::Naive, 3)] {
        let config = moe::Config { gate: gate.into(), capacity_factor: Some(0.6), ..moe::Config::of(8, k) };
        let (routing, logits) = (route(&config, 40, 4), random(40 * 8, 50));
        let weights = on_mesh(shape(1, 1), |rank, _| {
            let tape = Tape::inference(&rank.device);
            let logits = tape.constant(Tensor::from_slice(&rank.device, &[40, 8], &logits));
            let weighting = config.widest().selector().gate.weighting();
            weighting.weights(&logits, &weighting.probabilities(&logits), &routing.choices(), k).value().to_vec()
        });
        for (route, weight) in weights[0].iter().enumerate().filter(|(r, _)| routing.expert[*r] != Routing::DROPPED) {
            let token = route / k;
            let score = |&e: &u32| f64::from(logits[token * 8 + e as usize]).exp();
            let all: f64 = routing.chosen[token * k..(token + 1) * k].iter().map(score).sum();
            // One exponential and one quotient, rounded at 2^-24 each.
            let want = score(&routing.expert[route]) / all;
            assert!((f64::from(*weight) - want).abs() < 5e-7, "{gate:?}, route {route}: {weight} instead of {want}");
        }
    }
}

/// A noisy router's scores, from the formula and the draws of each token's global index.
#[test]
fn noise_is_a_function_of_its_place() {
    const TOKENS: usize = 11;
    const E: usize = 4;
    let (x, init) = (random(TOKENS * M, 60), Init::Normal { std: 0.5, seed: 4 });
    for ranks in [1, 2, 4, 8] {
        let parts = on_mesh(shape(ranks, 1), |rank, mesh| {
            let mut router = Router::new(&rank.device, "gate", (E, M), init, Perturbation::Noise);
            let mine = share(TOKENS, mesh);
            let own = Tensor::from_slice(&rank.device, &[mine.len(), M], &x[mine.start * M..mine.end * M]);
            let scores = router.scores(
                &Tape::inference(&rank.device).constant(own),
                &(mine.start as u64..mine.end as u64).into(),
                &DRAWS,
            );
            (scores.logits.value().to_vec(), crate::tiny::weights(&mut router))
        });
        let (got, weights) = (parts.iter().flat_map(|part| part.0.clone()), &parts[0].1);
        let got: Vec<f32> = got.collect();
        let dot = |name: &str, t: usize, e: usize| -> f64 {
            (0..M).map(|i| f64::from(weights[name][e * M + i]) * f64::from(x[t * M + i])).sum()
        };
        let logit = |i: usize| {
            let (t, e) = (i / E, i % E);
            let sigma = (1.0 + dot("gate.noise.weight", t, e).exp()).ln() + 0.01;
            (dot("gate.weight", t, e) + sigma * f64::from(DRAWS.of(Draw::Noise).normal(i as u64))) as f32
        };
        near(&format!("{ranks} ranks"), &got, &(0..TOKENS * E).map(logit).collect::<Vec<f32>>(), ROUNDING);
    }
}

#[test]
fn few_leave_their_node() {
    for nodes in [2, 4, 8] {
        for ranks in [1, 2, 4, 8] {
            let config =
                moe::Config { gate: GateKind::Topology.into(), logical_nodes: nodes, ..moe::Config::of(16, 2) };
            assert_eq!(config.widest().selector().gate.scope(), Scope::Scores);
            let (count, share) = (93, 16 / nodes);
            let routing = route(&config, count, ranks);
            let outside = |route: usize| routing.chosen[route] as usize / share != route / 2 * nodes / count;
            let limit = (count as f64 * 0.14).floor() as usize;
            let leaving = (0..2 * count).filter(|&route| outside(route)).count();
            // Of 93 tokens more than 13 would rather leave, so exactly as many do as may.
            assert_eq!(leaving, limit, "{nodes} nodes, {ranks} ranks");
            assert!((0..count).all(|t| !outside(2 * t)), "the first choice is inside");
        }
    }
}

/// Both choices count against one share, which the first leaves to the second.
#[test]
fn no_worker_gets_more_than_its_share() {
    for workers in [2, 4, 8, 16] {
        for ranks in [1, 2, 4, 8] {
            let config = moe::Config { gate: of_workers(GateKind::Swipe, workers), ..moe::Config::of(16, 2) };
            let routing = route(&config, 75, ranks);
            let of_worker: Vec<usize> = sent(&routing).chunks(16 / workers).map(|n| n.iter().sum()).collect();
            let most = (75usize * 2).div_ceil(workers);
            assert!(of_worker.iter().all(|&n| n <= most), "{workers} workers, {ranks} ranks: {of_worker:?}");
            assert_eq!(routing, route(&config, 75, 1), "{ranks} ranks");
            let counts = Counts::new((&routing, routing.tokens()), &*config.widest().selector().gate, &[], 0);
            assert_eq!(of_worker.iter().sum::<usize>() as u64 + counts.dropped, 150, "{workers} workers");
            // A worker with one expert has nothing for a token that is there already; one with two always has.
            assert_eq!(counts.dropped > 0, workers == 16, "{workers} workers: {} dropped", counts.dropped);
            // Nothing is in a first choice's way, and a second one is given up for the sake of the first alone.
            let lost = (0..75).filter(|t| routing.expert[2 * t + 1] == Routing::DROPPED).count() as u64;
            assert_eq!(lost, counts.dropped, "{workers} workers");
        }
    }
}
