//! Going back is the adjoint of going forward: `<f(x), y> = <x, f*(y)>`, summed over ranks, for all that moves rows;
//! and what a plan is, whatever the routing.

use guildhall::launch::Rank;
use guildhall::moe::plan::StridedRows;
use guildhall::moe::rewrites::schedule::in_steps;
use guildhall::moe::rewrites::shadowing::{by_owner, shadow};
use guildhall::moe::{
    Expert, ExpertPlan, ExpertsOnTape, Outgoing, Plan, Routing, RowRun, Schedule, combine, dispatch, through_experts,
};
use guildhall::parallel::collectives::{RowCounts, all_to_all_rows};
use guildhall::parallel::{ExpertTable, Mesh, Parameters, Weight};
use guildhall_tensor::{Draws, Index, Indices, Purpose, Tape, Tensor, Var};
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

    /// Equal shares or any table, any number of steps, any experts shadowed.
    fn plan(&self, mesh: &Mesh) -> ExpertPlan {
        let routing = self.routing(mesh.expert.rank(), mesh.expert.size());
        self.plan_of(&routing, mesh, |plan| plan)
    }

    /// The same of any routing, with one more rewrite before all others.
    fn plan_of(&self, routing: &Routing, mesh: &Mesh, rewrite: impl FnOnce(Plan) -> Plan) -> ExpertPlan {
        let (rank, ranks) = (mesh.expert.rank(), mesh.expert.size());
        let (draws, experts) = (draws(self.seed, 10), ranks * self.experts_per_rank);
        let bits = |i: usize| draws.bits(i as u64) as usize;
        let anywhere = |e: usize| if e < ranks { e } else { bits(e) % ranks };
        let table = match bits(1000) % 2 {
            0 => ExpertTable::even(experts, ranks),
            _ => ExpertTable::new(&(0..experts).map(anywhere).collect::<Vec<_>>(), ranks),
        };
        let divisors: Vec<usize> = (1..=ranks).filter(|groups| ranks.is_multiple_of(*groups)).collect();
        let schedule = Schedule::new(rank, ranks, divisors[bits(1001) % divisors.len()]);
        let shadowed: Vec<usize> = (0..experts).filter(|&e| bits(2000 + e).is_multiple_of(4)).collect();
        let shadowed = by_owner(&shadowed, &table);
        let plan = shadow(rewrite(Plan::new(routing, table, rank)), shadowed);
        in_steps(plan, &[schedule]).exchange(mesh).unwrap()
    }
}

/// Experts that multiply by a matrix.
#[derive(Debug)]
struct Matrices;

impl Expert for Matrices {
    fn weights(&self, _: &Tape) -> Vec<Var> {
        unreachable!("tests give the weights")
    }

    fn apply(&self, weights: &[Var], rows: &Var, counts: &[usize]) -> Var {
        rows.grouped_linear(&weights[0], None, counts)
    }
}

impl Parameters for Matrices {
    fn visit(&mut self, _: &mut dyn FnMut(&mut Weight)) {}
}

/// All of a plan: the way there, the experts, the way back.
pub(crate) fn through(x: &Var, matrices: &Var, plan: &ExpertPlan, mesh: &Mesh) -> Var {
    let experts = ExpertsOnTape { experts: &Matrices, weights: std::slice::from_ref(matrices) };
    let (home, ()) = through_experts(x, plan, experts, None, mesh, || Ok(())).unwrap();
    Var::concat_rows(home)
}

/// The shape of this rank's matrices.
fn matrices(plan: &ExpertPlan, mesh: &Mesh) -> [usize; 3] {
    [plan.plan.table.of(mesh.expert.rank()).len(), WIDTH, WIDTH]
}

#[test]
fn the_way_through_experts_goes_back_as_it_came() {
    for_worlds(|ranks, seed| {
        let routes = Routes::of_seed(seed);
        check("rows through experts", ranks, seed, |rank, mesh| {
            let (plan, tokens) = (routes.plan(mesh), routes.tokens(mesh.expert.rank()));
            let matrices = random(rank, &matrices(&plan, mesh), (seed, 3));
            sides(rank, &[tokens, WIDTH], seed, |x| through(x, &x.tape().constant(matrices.clone()), &plan, mesh))
        });
        check("weights of experts", ranks, seed, |rank, mesh| {
            let (plan, tokens) = (routes.plan(mesh), routes.tokens(mesh.expert.rank()));
            let x = random(rank, &[tokens, WIDTH], (seed, 3));
            sides(rank, &matrices(&plan, mesh), seed, |w| through(&w.tape().constant(x.clone()), w, &plan, mesh))
        });
        check("combine of rows", ranks, seed, |rank, mesh| {
            let plan = routes.plan(mesh);
            let (rows, tokens) = (plan.plan.tokens.len(), routes.tokens(mesh.expert.rank()));
            let weights = random(rank, &[tokens, routes.k], (seed, 3));
            sides(rank, &[rows, WIDTH], seed, |x| {
                combine(vec![x.clone()], &plan, &x.tape().constant(weights.clone()), &mesh.tensor).unwrap()
            })
        });
        check("combine of weights", ranks, seed, |rank, mesh| {
            let plan = routes.plan(mesh);
            let tokens = routes.tokens(mesh.expert.rank());
            let rows = random(rank, &[plan.plan.tokens.len(), WIDTH], (seed, 3));
            sides(rank, &[tokens, routes.k], seed, |w| {
                combine(vec![w.tape().constant(rows.clone())], &plan, w, &mesh.tensor).unwrap()
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
            let (plan, tape) = (routes.plan(mesh), Tape::inference(&rank.device));
            let tokens = routes.tokens(mesh.expert.rank());
            let x = tape.constant(random(rank, &[tokens, WIDTH], (seed, 1)));
            let weights = tape.constant(random(rank, &[tokens, routes.k], (seed, 3)));
            let same = |i: usize| if i / WIDTH % WIDTH == i % WIDTH { 1.0 } else { 0.0 };
            let matrices = tape.constant(Tensor::from_fn(&rank.device, &matrices(&plan, mesh), same));
            let y = combine(vec![through(&x, &matrices, &plan, mesh)], &plan, &weights, &mesh.tensor).unwrap();
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

/// Of the rows of two neighbours who are alike, the first travels for both.
pub(crate) fn share_rows(plan: Plan) -> Plan {
    let half = |StridedRows { run, first, .. }: StridedRows| {
        let run = RowRun { rows: run.rows / 2, ..run };
        StridedRows { run, first, every: 2 }
    };
    let (halves, slots) = (plan.portions().into_iter().map(half).collect(), plan.slots);
    let mut plan = plan.of_portions(halves);
    let Indices::Known(places) = &mut plan.places else { panic!("known places") };
    for pair in places.chunks_exact_mut(2 * slots) {
        let (first, second) = pair.split_at_mut(slots);
        second.copy_from_slice(first);
    }
    plan
}

/// Tokens that are alike, two by two, give the same and learn the same whether their routes share rows or not; only what
/// comes back to them comes to the first.
#[test]
fn routes_may_share_rows() {
    for_worlds(|ranks, seed| {
        let routes = Routes::of_seed(seed);
        on_mesh(shape(ranks, ranks), |rank, mesh| {
            let (me, k) = (mesh.expert.rank(), routes.k);
            let pairs = routes.tokens(me);
            let mut alike = routes.routing(me, ranks).expert;
            // Not two routes of one token to one expert, whose rows would lie between those of neighbours.
            for token in alike.chunks_exact_mut(k) {
                for j in 1..k {
                    if token[..j].contains(&token[j]) {
                        token[j] = Routing::DROPPED;
                    }
                }
            }
            let twice = |values: &[u32]| values.chunks(k).flat_map(|token| [token, token].concat()).collect();
            let routing = Routing::new(twice(&alike), k, ranks * routes.experts_per_rank);
            let x: Vec<f32> = random(rank, &[pairs, WIDTH], (seed, 1)).to_vec();
            let x: Vec<f32> = x.chunks(WIDTH).flat_map(|token| [token, token].concat()).collect();
            let run = |plan: ExpertPlan| {
                let tape = Tape::new(&rank.device);
                let x = tape.leaf(Tensor::from_slice(&rank.device, &[2 * pairs, WIDTH], &x));
                let experts = tape.leaf(random(rank, &matrices(&plan, mesh), (seed, 3)));
                let weights = tape.leaf(random(rank, &[2 * pairs, k], (seed, 4)));
                let home = through(&x, &experts, &plan, mesh);
                let y = combine(vec![home], &plan, &weights, &mesh.tensor).unwrap();
                let back = tape.try_backward_from(&y, random(rank, &[2 * pairs, WIDTH], (seed, 2))).unwrap();
                let [dx, dexperts, dweights] =
                    [&x, &experts, &weights].map(|leaf| back.of(leaf).expect("a gradient").to_vec());
                let of_pairs: Vec<f32> =
                    dx.chunks(2 * WIDTH).flat_map(|pair| (0..WIDTH).map(|c| pair[c] + pair[WIDTH + c])).collect();
                [y.value().to_vec(), dexperts, dweights, of_pairs]
            };
            let want = run(routes.plan_of(&routing, mesh, |plan| plan));
            let shared = routes.plan_of(&routing, mesh, share_rows);
            let sent: usize = alike.iter().filter(|expert| **expert != Routing::DROPPED).count();
            assert_eq!(shared.sent(me).iter().sum::<usize>(), sent, "one row for two routes");
            // Sums of up to forty products of numbers around one, in another order.
            let near = |(got, want): (&f32, &f32)| (got - want).abs() < 1e-4;
            for (got, want) in run(shared).iter().zip(&want) {
                assert!(got.len() == want.len() && got.iter().zip(want).all(near), "{got:?}\n{want:?}");
            }
        });
    });
}

fn is_permutation(numbers: &[u32]) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.iter().enumerate().all(|(i, &n)| i == n as usize)
}

/// Of the routes to a rank's own experts that are not shadowed, by expert, then by route, the first half.
fn first_own(plan: &Plan, routing: &Routing, rank: usize) -> Vec<usize> {
    let chosen =
        |expert: usize| (0..routing.expert.len()).filter(move |&route| routing.expert[route] as usize == expert);
    let travels = |expert: &&usize| !plan.shadowed.contains(expert);
    let mut own: Vec<usize> = plan.table.of(rank).iter().filter(travels).flat_map(|&expert| chosen(expert)).collect();
    own.truncate(own.len() - own.len() / 2);
    own
}

/// What holds of a plan by itself.
fn check_plan(plan: &Plan, routing: &Routing, rank: usize) {
    let sent: Vec<usize> = (0..routing.expert.len()).filter(|&r| routing.expert[r] != Routing::DROPPED).collect();
    let places: Vec<u32> = sent.iter().map(|&route| plan.places.known()[route]).collect();
    assert!(is_permutation(&places) && places.len() == plan.tokens.len(), "every route once: {places:?}");
    assert_eq!(plan.places.known().iter().filter(|&&place| place == u32::MAX).count(), plan.places.len() - sent.len());
    for &route in &sent {
        assert_eq!(
            plan.tokens.known()[plan.places.known()[route] as usize] as usize,
            route / routing.k,
            "the token of route {route}"
        );
    }
    let mut by_row = sent.clone();
    by_row.sort_by_key(|&route| plan.places.known()[route]);
    let Plan { table, schedule, shadowed, .. } = plan;
    let owner = |expert: usize| (0..table.ranks()).find(|&rank| table.of(rank).contains(&expert)).unwrap();
    let first = first_own(plan, routing, rank);
    let step = |route: usize| {
        let expert = routing.expert[route] as usize;
        match shadowed.iter().position(|&shadow| shadow == expert) {
            Some(place) => (schedule.steps(), place, 0),
            None => (schedule.steps_to(owner(expert))[usize::from(!first.contains(&route))], owner(expert), expert),
        }
    };
    let key = |route: usize| (step(route), route);
    assert!(by_row.windows(2).all(|pair| key(pair[0]) < key(pair[1])), "rows by step, expert, token: {by_row:?}");
    let load: Vec<u64> = plan.rows_per_expert().iter().map(|&rows| rows as u64).collect();
    assert_eq!(load, routing.load());
    let stay: Vec<usize> = shadowed.iter().map(|&expert| load[expert] as usize).collect();
    assert_eq!(plan.staying(), stay);
}

/// What the ranks' plans say of each other.
fn check_together(plans: &[ExpertPlan]) {
    let Plan { table, shadowed, .. } = &plans[0].plan;
    for (to, plan) in plans.iter().enumerate() {
        let sent = |other: &ExpertPlan, expert: &usize| match shadowed.contains(expert) {
            true => 0,
            false => other.plan.rows_per_expert()[*expert],
        };
        for (from, other) in plans.iter().enumerate() {
            let rows = table.of(to).iter().map(|expert| sent(other, expert)).sum::<usize>();
            assert_eq!(plan.steps.iter().map(|step| step.counts.receive[from]).sum::<usize>(), rows, "{from} to {to}");
            for (step, others) in plan.steps.iter().zip(&other.steps) {
                assert_eq!(step.counts.receive[from], others.counts.send[to], "{from} to {to}");
            }
        }
        for (i, expert) in table.of(to).iter().enumerate() {
            let rows = plans.iter().map(|other| sent(other, expert)).sum::<usize>();
            assert_eq!(plan.steps.iter().map(|step| step.sorting.rows_per_expert[i]).sum::<usize>(), rows);
        }
        let mut next = 0;
        for step in &plan.steps {
            assert_eq!(step.rows, next..next + step.counts.send.iter().sum::<usize>(), "steps one after the other");
            next = step.rows.end;
            let [sorted, places] = [step.sorting.by_expert.clone(), step.sorting.places()]
                .map(|rows| (0..rows.len()).map(|i| Index::from(&rows).at(i)).collect::<Vec<u32>>());
            assert!(is_permutation(&sorted) && sorted.len() == step.counts.receive.iter().sum::<usize>());
            assert!(sorted.iter().enumerate().all(|(i, &row)| places[row as usize] as usize == i), "inverses");
            assert_eq!(step.sorting.is_done(), sorted.is_sorted());
        }
    }
}

/// Who a row is: its rank and token, exact in f32.
fn label(rank: usize, token: usize) -> f32 {
    (1000 * rank + token) as f32
}

/// The labels of the rows that come to one of a rank's experts in a step, as they should lie: by rank, then token.
fn labels_of(routes: &Routes, plan: &Plan, expert: usize, (step, me, ranks): (usize, usize, usize)) -> Vec<f32> {
    let of_rank = |rank: usize| {
        let routing = routes.routing(rank, ranks);
        let first = if rank == me { first_own(plan, &routing, me) } else { Vec::new() };
        let comes = |route: &usize| {
            plan.schedule.steps_from(rank)[usize::from(!first.contains(route))] == step
                && routing.expert[*route] as usize == expert
        };
        (0..routing.expert.len()).filter(comes).map(|route| label(rank, route / routing.k)).collect::<Vec<_>>()
    };
    (0..ranks).flat_map(of_rank).collect()
}

/// Plans of all ranks, and the labels of the rows that each step of dispatch brought each.
fn dispatched(routes: &Routes, ranks: usize) -> Vec<(ExpertPlan, Vec<Vec<f32>>)> {
    on_mesh(shape(ranks, ranks), |rank, mesh| {
        let (me, plan) = (mesh.expert.rank(), routes.plan(mesh));
        let labels = Tensor::from_fn(&rank.device, &[routes.tokens(me), 1], |token| label(me, token));
        let outgoing = Outgoing::new(&Tape::inference(&rank.device).constant(labels), &plan.plan, &mesh.tensor);
        let arriving = dispatch(&outgoing, &plan, &mesh.expert).unwrap();
        let rows = arriving
            .into_iter()
            .zip(&plan.steps)
            .map(|(rows, step)| step.sorting.sort(rows.finish().unwrap()).value().to_vec())
            .collect();
        (plan, rows)
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
            check_plan(&plan.plan, &routes.routing(rank, ranks), rank);
        }
        check_together(&plans);
        for (rank, (plan, rows)) in plans.iter().zip(rows).enumerate() {
            let Plan { table, shadowed, .. } = &plan.plan;
            for (step, rows) in rows.into_iter().enumerate() {
                let own = table.of(rank).iter().filter(|expert| !shadowed.contains(expert));
                let labels = |&expert: &usize| labels_of(&routes, &plan.plan, expert, (step, rank, ranks));
                prop_assert_eq!(rows, own.flat_map(labels).collect::<Vec<f32>>());
            }
        }
    }
}
