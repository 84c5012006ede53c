//! Going back is the adjoint of going forward: `<f(x), y> = <x, f*(y)>`, summed over ranks, for all that moves rows;
//! and what a plan is, whatever the routing.

use std::sync::Arc;

use guildhall::launch::Rank;
use guildhall::moe::{ExpertPlan, Plan, Routing, combine, dispatch};
use guildhall::parallel::Mesh;
use guildhall::parallel::collectives::{RowCounts, all_to_all_rows};
use guildhall_comm::Communicator;
use guildhall_tensor::{Draws, Purpose, Tape, Tensor, Var};
use proptest::prelude::*;

use crate::world::{on_mesh, shape};

/// Both sides are sums of up to a thousand products that f32 rounded at 2^-24 each; three operations long.
const ROUNDING: f64 = 1e-6;
const WIDTH: usize = 3;
const RANKS: std::ops::RangeInclusive<usize> = 1..=4;
/// Random plans per test and number of ranks.
const SEEDS: u64 = 12;

fn draws(seed: u64, stream: u32) -> Draws {
    Draws::new(seed, Purpose::Test, 1, stream)
}

/// Values that no two ranks share.
fn random(rank: &Rank, shape: &[usize], (seed, stream): (u64, u32)) -> Tensor {
    let draws = draws(seed, 100 * stream + rank.world.rank() as u32);
    Tensor::from_fn(&rank.device, shape, |i| draws.normal(i as u64))
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    a.f32s().iter().zip(b.f32s()).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// `<f(x), y>`, `<x, f*(y)>` and `|f(x)| |y|` of one rank, for x of a shape.
fn sides(rank: &Rank, shape: &[usize], seed: u64, f: impl Fn(&Var) -> Var) -> [f64; 3] {
    let tape = Tape::new(&rank.device);
    let x = tape.leaf(random(rank, shape, (seed, 1)));
    let out = f(&x);
    let y = random(rank, out.shape(), (seed, 2));
    let value = out.value().clone();
    let size = (dot(&value, &value) * dot(&y, &y)).sqrt();
    let forward = dot(&value, &y);
    let gradients = tape.try_backward_from(&out, y).unwrap();
    let backward = gradients.of(&x).map_or(0.0, |gradient| dot(x.value(), gradient));
    [forward, backward, size]
}

/// The law for an `f` that is made on every rank of a group of `ranks`.
fn check(what: &str, ranks: usize, seed: u64, f: impl Fn(&Rank, &Mesh) -> [f64; 3] + Sync) {
    let sides = on_mesh(shape(ranks, ranks), f);
    let sum = |i: usize| sides.iter().map(|side| side[i]).sum::<f64>();
    let (forward, backward, size) = (sum(0), sum(1), sum(2));
    let error = (forward - backward).abs();
    assert!(error <= ROUNDING * size, "{what}, {ranks} ranks, seed {seed}: {forward} against {backward}");
}

fn for_worlds(f: impl Fn(usize, u64)) {
    for ranks in RANKS {
        (0..SEEDS).for_each(|seed| f(ranks, seed));
    }
}

/// Rows from every rank to every other, a third of them none.
fn row_counts(rank: &Rank, seed: u64) -> RowCounts {
    let (me, size) = (rank.world.rank(), rank.world.size());
    let cell = |from: usize, to: usize| {
        let bits = draws(seed, 7).bits((from * size + to) as u64);
        if bits.is_multiple_of(3) { 0 } else { (bits >> 8) as usize % 5 }
    };
    RowCounts {
        send: (0..size).map(|to| cell(me, to)).collect(),
        receive: (0..size).map(|from| cell(from, me)).collect(),
    }
}

#[test]
fn all_to_all_rows_goes_back_the_way_it_came() {
    for_worlds(|ranks, seed| {
        check("all_to_all_rows", ranks, seed, |rank, mesh| {
            let counts = row_counts(rank, seed);
            let rows = counts.send.iter().sum();
            sides(rank, &[rows, WIDTH], seed, |x| all_to_all_rows(x.clone(), &counts, &mesh.expert).unwrap())
        });
    });
}

/// Tokens, experts and choices of one rank, at random.
#[derive(Clone, Copy, Debug)]
struct Routes {
    seed: u64,
    experts_per_rank: usize,
    k: usize,
    /// A rank has fewer tokens than this.
    tokens: usize,
    drops: bool,
}

impl Routes {
    fn of_seed(seed: u64) -> Routes {
        let bits = |i| draws(seed, 8).bits(i) as usize;
        let (experts_per_rank, k) = (1 + bits(0) % 3, 1 + bits(1) % 3);
        Routes { seed, experts_per_rank, k, tokens: 9, drops: bits(2).is_multiple_of(2) }
    }

    /// One rank in four has no tokens at all.
    fn tokens(&self, rank: usize) -> usize {
        let bits = draws(self.seed, 9).bits(rank as u64);
        if bits.is_multiple_of(4) { 0 } else { (bits >> 8) as usize % self.tokens }
    }

    /// Experts of low numbers are chosen more often, and some never.
    fn routing(&self, rank: usize, ranks: usize) -> Routing {
        let (draws, experts) = (draws(self.seed, 1000 + rank as u32), ranks * self.experts_per_rank);
        let choice = |route: u64| {
            let dropped = self.drops && draws.uniform(2 * route) < 0.2;
            let skewed = draws.uniform(2 * route + 1).powi(2) * experts as f32;
            if dropped { Routing::DROPPED } else { skewed as u32 }
        };
        let expert = (0..(self.tokens(rank) * self.k) as u64).map(choice).collect();
        Routing::new(expert, self.k, experts)
    }

    fn plan(&self, group: &Arc<dyn Communicator>) -> ExpertPlan {
        Plan::new(&self.routing(group.rank(), group.size())).exchange(group).unwrap()
    }
}

#[test]
fn dispatch_and_combine_go_back_the_way_they_came() {
    for_worlds(|ranks, seed| {
        let routes = Routes::of_seed(seed);
        check("dispatch", ranks, seed, |rank, mesh| {
            let plan = routes.plan(&mesh.expert);
            let tokens = routes.tokens(mesh.expert.rank());
            sides(rank, &[tokens, WIDTH], seed, |x| dispatch(x, &plan, &mesh.expert).unwrap())
        });
        check("combine of rows", ranks, seed, |rank, mesh| {
            let plan = routes.plan(&mesh.expert);
            let (rows, tokens) = (plan.by_expert.len(), routes.tokens(mesh.expert.rank()));
            let weights = random(rank, &[tokens, routes.k], (seed, 3));
            sides(rank, &[rows, WIDTH], seed, |x| {
                combine(x.clone(), &plan, &mesh.expert, &x.tape().constant(weights.clone())).unwrap()
            })
        });
        check("combine of weights", ranks, seed, |rank, mesh| {
            let plan = routes.plan(&mesh.expert);
            let tokens = routes.tokens(mesh.expert.rank());
            let rows = random(rank, &[plan.by_expert.len(), WIDTH], (seed, 3));
            sides(rank, &[tokens, routes.k], seed, |w| {
                combine(w.tape().constant(rows.clone()), &plan, &mesh.expert, w).unwrap()
            })
        });
    });
}

#[test]
fn gather_and_scatter_are_each_others_adjoint() {
    for seed in 0..SEEDS {
        let draws = draws(seed, 5);
        let (rows, picks) = (1 + draws.bits(0) as usize % 9, draws.bits(1) as u64 % 12);
        let index: Vec<u32> = (0..picks).map(|i| draws.bits(2 + i) % rows as u32).collect();
        check("gather", 1, seed, |rank, _| sides(rank, &[rows, WIDTH], seed, |x| x.gather_rows(&index)));
        check("scatter", 1, seed, |rank, _| {
            sides(rank, &[index.len(), WIDTH], seed, |x| x.scatter_add_rows(&index, rows))
        });
        let one = on_mesh(shape(1, 1), |rank, _| {
            let tape = Tape::inference(&rank.device);
            let x = tape.constant(random(rank, &[rows, WIDTH], (seed, 1)));
            let y = tape.constant(random(rank, &[index.len(), WIDTH], (seed, 2)));
            let across = dot(x.gather_rows(&index).value(), y.value());
            (across - dot(x.value(), y.scatter_add_rows(&index, rows).value())).abs()
        });
        assert!(one[0] < 1e-5, "gather against scatter, seed {seed}: {}", one[0]);
    }
}

/// With experts that do nothing, a token gets itself back times the weights of its routes that were sent.
#[test]
fn combine_undoes_dispatch() {
    for_worlds(|ranks, seed| {
        let routes = Routes::of_seed(seed);
        on_mesh(shape(ranks, ranks), |rank, mesh| {
            let (plan, tape) = (routes.plan(&mesh.expert), Tape::inference(&rank.device));
            let tokens = routes.tokens(mesh.expert.rank());
            let x = tape.constant(random(rank, &[tokens, WIDTH], (seed, 1)));
            let weights = tape.constant(random(rank, &[tokens, routes.k], (seed, 3)));
            let rows = dispatch(&x, &plan, &mesh.expert).unwrap();
            let y = combine(rows, &plan, &mesh.expert, &weights).unwrap();
            let experts = routes.routing(mesh.expert.rank(), ranks).expert;
            for (t, y) in y.value().f32s().chunks(WIDTH).enumerate() {
                let sent = |&route: &usize| experts[route] != Routing::DROPPED;
                let weight: f32 =
                    (t * routes.k..(t + 1) * routes.k).filter(sent).map(|route| weights.value().f32s()[route]).sum();
                let near = |(y, x): (&f32, &f32)| (y - x * weight).abs() < 1e-5;
                let x = &x.value().f32s()[t * WIDTH..(t + 1) * WIDTH];
                assert!(y.iter().zip(x).all(near), "token {t}: {y:?} instead of {weight} times {x:?}");
            }
        });
    });
}

fn is_permutation(numbers: &[u32]) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.iter().enumerate().all(|(i, &n)| i == n as usize)
}

/// What holds of a plan by itself.
fn check_plan(plan: &Plan, routing: &Routing) {
    let sent: Vec<usize> = (0..routing.expert.len()).filter(|&r| routing.expert[r] != Routing::DROPPED).collect();
    let places: Vec<u32> = sent.iter().map(|&route| plan.places[route]).collect();
    assert!(is_permutation(&places) && places.len() == plan.tokens.len(), "every route once: {places:?}");
    assert_eq!(plan.places.iter().filter(|&&place| place == u32::MAX).count(), plan.places.len() - sent.len());
    for &route in &sent {
        assert_eq!(plan.tokens[plan.places[route] as usize] as usize, route / routing.k, "the token of route {route}");
    }
    let mut by_row = sent.clone();
    by_row.sort_by_key(|&route| plan.places[route]);
    let key = |route: usize| (routing.expert[route], route);
    assert!(by_row.windows(2).all(|pair| key(pair[0]) < key(pair[1])), "rows by expert, then token: {by_row:?}");
    let load: Vec<u64> = plan.rows_per_expert.iter().map(|&rows| rows as u64).collect();
    assert_eq!(load, routing.load());
}

/// What the ranks' plans say of each other.
fn check_together(plans: &[ExpertPlan], local: usize) {
    for (to, plan) in plans.iter().enumerate() {
        for (from, other) in plans.iter().enumerate() {
            let experts = &other.plan.rows_per_expert[to * local..(to + 1) * local];
            assert_eq!(plan.counts.receive[from], experts.iter().sum::<usize>(), "{from} to {to}");
            assert_eq!(plan.counts.receive[from], other.counts.send[to], "{from} to {to}");
        }
        for expert in 0..local {
            let rows = plans.iter().map(|other| other.plan.rows_per_expert[to * local + expert]).sum::<usize>();
            assert_eq!(plan.rows_per_local_expert[expert], rows);
        }
        let (sorted, places) = (&plan.by_expert, plan.sorted_places());
        assert!(is_permutation(sorted) && sorted.len() == plan.counts.receive.iter().sum::<usize>());
        assert!(sorted.iter().enumerate().all(|(i, &row)| places[row as usize] as usize == i), "inverses");
        assert_eq!(plan.arrives_sorted(), sorted.is_sorted());
    }
}

/// Who a row is: its rank and token, exact in f32.
fn label(rank: usize, token: usize) -> f32 {
    (1000 * rank + token) as f32
}

/// The labels of the rows of one expert as they should lie: by rank, then token.
fn labels_of(routes: &Routes, expert: usize, ranks: usize) -> Vec<f32> {
    let of_rank = |rank: usize| {
        let routing = routes.routing(rank, ranks);
        let chosen = |&route: &usize| routing.expert[route] as usize == expert;
        (0..routing.expert.len()).filter(chosen).map(|route| label(rank, route / routing.k)).collect::<Vec<_>>()
    };
    (0..ranks).flat_map(of_rank).collect()
}

/// Plans of all ranks, and the labels of the rows that dispatch brought each.
fn dispatched(routes: &Routes, ranks: usize) -> Vec<(ExpertPlan, Vec<f32>)> {
    on_mesh(shape(ranks, ranks), |rank, mesh| {
        let (me, plan) = (mesh.expert.rank(), routes.plan(&mesh.expert));
        let labels = Tensor::from_fn(&rank.device, &[routes.tokens(me), 1], |token| label(me, token));
        let rows = dispatch(&Tape::inference(&rank.device).constant(labels), &plan, &mesh.expert).unwrap();
        (plan, rows.value().to_vec())
    })
}

fn routes() -> impl Strategy<Value = Routes> {
    (any::<u64>(), 1..=3usize, 1..=3usize, 1..20usize, any::<bool>())
        .prop_map(|(seed, experts_per_rank, k, tokens, drops)| Routes { seed, experts_per_rank, k, tokens, drops })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_send_every_route_once_and_sort_what_arrives(routes in routes(), ranks in RANKS) {
        let (plans, rows): (Vec<_>, Vec<_>) = dispatched(&routes, ranks).into_iter().unzip();
        for (rank, plan) in plans.iter().enumerate() {
            check_plan(&plan.plan, &routes.routing(rank, ranks));
        }
        check_together(&plans, routes.experts_per_rank);
        for (rank, rows) in rows.into_iter().enumerate() {
            let own = rank * routes.experts_per_rank..(rank + 1) * routes.experts_per_rank;
            let want: Vec<f32> = own.flat_map(|expert| labels_of(&routes, expert, ranks)).collect();
            prop_assert_eq!(rows, want);
        }
    }
}
