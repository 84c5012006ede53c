//! The MoE layer against loops over tokens in f64 (`reference`): output, losses, loads and every gradient, with tokens
//! spread unevenly over one, two and four ranks, some of which have none.

use std::collections::BTreeMap;
use std::ops::Range;

use guildhall::launch::Rank;
use guildhall::moe::gates::{GateDraws, Perturbation};
use guildhall::moe::migration::FollowingWork;
use guildhall::moe::{
    self, Activation, Beside, Expert, Experts, ExpertsShape, Facts, GateState, History, Homes, Importance, MoeLayer,
    Proportions, Router, StepFacts, Transport,
};
use guildhall::parallel::{Init, Mesh, Rows, Spread, sync_gradients};
use guildhall_tensor::{Draws, Dtype, Purpose, Tape, Tensor, Var};

use crate::reference::{MoeLoops, MoeOutput, Numbers};
use crate::tiny::{Tensors, Tolerance, all_near, gradients, near, set, union};
use crate::world::{MESHES, Shape, on_mesh};

const D: usize = 6;
const F: usize = 5;
/// Tokens in a row.
const SEQ: usize = 4;
/// Weights of the auxiliary losses: as large as the output's, so that an error in them shows.
const BALANCE: f32 = 0.7;
const Z: f32 = 0.3;
/// Sums of at most 30 terms, each rounded at 2^-24 (6e-8), one behind the other: two products, an activation, a
/// softmax of scores up to 20. The floor is for gradients that nearly cancel; all values are of order one.
const ROUNDING: Tolerance = Tolerance { relative: 4e-6, floor: 1e-7 };

/// Of the step that is taken.
const FACTS: GateDraws = GateDraws { seed: 0, step: 1, layer: 0, trains: true };

#[derive(Clone, Copy, PartialEq)]
enum Scores {
    Random,
    /// Experts 1 and 2 score alike everywhere, and everything is a small fraction, so ties are exact.
    Tied,
    /// Every token prefers expert 2 (or the last), then 0.
    OneExpert,
}

#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    experts: usize,
    top_k: usize,
    scores: Scores,
    /// Several documents a row and some targets ignored.
    ragged: bool,
    /// A network beside the experts, mixed with them.
    residual: bool,
    /// The share of results that is skipped.
    masking: f32,
}

const PLAIN: Case =
    Case { rows: 3, experts: 4, top_k: 2, scores: Scores::Random, ragged: false, residual: false, masking: 0.0 };

const CASES: [Case; 14] = [
    PLAIN,
    Case { ragged: true, ..PLAIN },
    Case { scores: Scores::Tied, ragged: true, ..PLAIN },
    Case { scores: Scores::Tied, top_k: 1, ..PLAIN },
    Case { rows: 0, ..PLAIN },
    Case { scores: Scores::OneExpert, top_k: 1, ..PLAIN },
    Case { scores: Scores::OneExpert, ragged: true, ..PLAIN },
    Case { experts: 1, top_k: 1, ragged: true, ..PLAIN },
    Case { top_k: 4, ..PLAIN },
    Case { residual: true, ..PLAIN },
    Case { residual: true, ragged: true, top_k: 1, ..PLAIN },
    Case { residual: true, rows: 0, ..PLAIN },
    Case { masking: 0.6, ragged: true, ..PLAIN },
    Case { masking: 0.6, residual: true, top_k: 1, ..PLAIN },
];

/// The rows of every rank, per number of ranks.
fn shares(ranks: usize, rows: usize) -> Vec<Vec<Range<usize>>> {
    match (ranks, rows) {
        (_, 0) => vec![vec![0..0; ranks]],
        (1, _) => vec![vec![0..rows]],
        (2, _) => vec![vec![0..rows, rows..rows], vec![0..1, 1..rows]],
        _ => vec![vec![0..0, 0..2, 2..2, 2..rows], vec![0..0, 0..0, 0..0, 0..rows]],
    }
}

impl Case {
    fn tokens(&self) -> usize {
        self.rows * SEQ
    }

    /// Documents within rows: `[0 0 1 1]`, `[0 0 0 0]`, `[0 1 2 3]` in turn.
    fn segments(&self) -> Vec<u32> {
        let segment = |t: usize| match t / SEQ % 3 {
            0 => t % SEQ / 2,
            1 => 0,
            _ => t % SEQ,
        };
        (0..self.tokens()).map(|t| if self.ragged { segment(t) as u32 } else { 0 }).collect()
    }

    /// Which tokens have a target: all, or all but two of every five, which leaves some documents without any.
    fn valid(&self) -> Vec<bool> {
        (0..self.tokens()).map(|t| !self.ragged || t % 5 > 1).collect()
    }

    fn loops(&self, activation: Activation) -> MoeLoops {
        let sequence = self.segments().iter().enumerate().map(|(t, s)| (t / SEQ * SEQ) as u32 + s).collect();
        let (experts, top_k, counts) = (self.experts, self.top_k, self.valid());
        let draws = FACTS.output_mask();
        let kept = (0..(self.tokens() * top_k) as u64).map(|route| draws.uniform(route) >= self.masking).collect();
        MoeLoops { d_model: D, experts, top_k, activation, sequence, counts, kept }
    }

    /// `x`, `gate.weight` and all networks' weights.
    fn values(&self, activation: Activation) -> Tensors {
        let mut values = BTreeMap::from([
            ("x".to_owned(), random(self.tokens() * D, 1)),
            ("gate.weight".to_owned(), random(self.experts * D, 2)),
        ]);
        let parts = match activation {
            Activation::SwiGlu => vec![("w1.weight", F * D), ("w2.weight", D * F), ("w3.weight", F * D)],
            Activation::PlainRelu | Activation::ClampedSwiGlu => panic!("loops of {activation:?}"),
            Activation::Gelu | Activation::Relu => {
                vec![("fc_in.weight", F * D), ("fc_in.bias", F), ("fc_out.weight", D * F), ("fc_out.bias", D)]
            }
        };
        let mut networks: Vec<String> = (0..self.experts).map(|expert| format!("experts.{expert}")).collect();
        if self.residual {
            networks.push("mlp.0".to_owned());
            values.insert("coefficient.weight".to_owned(), random(2 * D, 4));
            values.insert("coefficient.bias".to_owned(), random(2, 5));
        }
        for (number, name) in networks.iter().enumerate() {
            for (i, (part, len)) in parts.iter().enumerate() {
                values.insert(format!("{name}.{part}"), random(*len, 10 + 4 * number as u32 + i as u32));
            }
        }
        self.arrange(&mut values);
        values
    }

    fn arrange(&self, values: &mut Tensors) {
        match self.scores {
            Scores::Random => {}
            Scores::Tied => {
                for name in ["x", "gate.weight"] {
                    values.get_mut(name).expect("drawn").iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0);
                }
                values.get_mut("gate.weight").expect("drawn").copy_within(D..2 * D, 2 * D);
            }
            Scores::OneExpert => {
                // The first feature is a constant that the router loves two experts for.
                values.get_mut("x").expect("drawn").chunks_mut(D).for_each(|x| x[0] = 1.0);
                let gate = values.get_mut("gate.weight").expect("drawn");
                gate.chunks_mut(D).enumerate().for_each(|(e, row)| row[0] = [10.0, -10.0, 20.0, -10.0][e]);
            }
        }
    }

    /// What the output's gradient is.
    fn direction(&self) -> Vec<f32> {
        random(self.tokens() * D, 3)
    }
}

fn random(len: usize, stream: u32) -> Vec<f32> {
    let draws = Draws::new(23, Purpose::Test, 0, stream);
    (0..len as u64).map(|i| draws.normal(i) * 0.7).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// What a layer gives: over all ranks, or one rank's part.
#[derive(Clone)]
struct Outcome {
    y: Vec<f32>,
    balance: f32,
    z: f32,
    load: Vec<u64>,
    x_gradient: Vec<f32>,
    gradients: Tensors,
}

fn expected(case: &Case, activation: Activation) -> Outcome {
    let loops = case.loops(activation);
    let numbers: Numbers = case.values(activation).iter().map(|(name, x)| (name.clone(), wide(x))).collect();
    let direction = wide(&case.direction());
    let objective = |out: &MoeOutput| {
        let along: f64 = out.y.iter().zip(&direction).map(|(y, d)| y * d).sum();
        along + f64::from(BALANCE) * out.balance + f64::from(Z) * out.z
    };
    let routing = loops.routing(&numbers);
    let output = loops.forward(&numbers, &routing);
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let mut gradients: Tensors =
        loops.gradients(&numbers, &routing, objective).iter().map(|(name, x)| (name.clone(), narrow(x))).collect();
    let x_gradient = gradients.remove("x").expect("x is a number too");
    let (y, balance, z) = (narrow(&output.y), output.balance as f32, output.z as f32);
    Outcome { y, balance, z, load: loops.load(&routing), x_gradient, gradients }
}

fn layer(rank: &Rank, mesh: &Mesh, case: &Case, activation: Activation) -> MoeLayer {
    let transport = Transport::plain(case.experts, mesh);
    let experts = |name: &str, local, spread| -> Box<dyn Expert> {
        let shape = ExpertsShape { local, d_model: D, d_expert: F, activation, spread, slice: (0, 1) };
        Box::new(Experts::new(&rank.device, name, &shape, Dtype::F32, [Init::Zeros; 2]))
    };
    let residual = || {
        let proportions = Proportions::new(&rank.device, "coefficient", D, Init::Zeros);
        Beside::Residual(experts("mlp", vec![0], Spread::Replicated), Box::new(proportions))
    };
    let moe = moe::Config::of(case.experts, case.top_k);
    let mut layer = MoeLayer {
        index: 0,
        condensation: None,
        is_causal: true,
        following: FollowingWork::default(),
        stack: 0,
        router: Router::new(&rank.device, "gate", (case.experts, D), Init::Zeros, Perturbation::None),
        selector: moe.widest().selector(),
        experts: experts(
            "experts",
            transport.table.of(mesh.expert.rank()).to_vec(),
            Spread::Expert(mesh.expert.size()),
        ),
        transport,
        beside: if case.residual { residual() } else { Beside::Nothing },
        output_masking: case.masking,
        balance: moe.balance(),
        balance_scope: moe.scope(),
        state: GateState::default(),
    };
    set(&mut layer, &case.values(activation));
    layer
}

/// One rank's part, of the rows it has.
fn part(rank: &Rank, mesh: &Mesh, case: &Case, activation: Activation, rows: Range<usize>) -> Outcome {
    let mut layer = layer(rank, mesh, case, activation);
    let (tape, tokens) = (Tape::new(&rank.device), rows.start * SEQ..rows.end * SEQ);
    let own = |values: Vec<f32>| {
        Tensor::from_slice(&rank.device, &[tokens.len(), D], &values[tokens.start * D..tokens.end * D])
    };
    let x = tape.leaf(own(case.values(activation).remove("x").expect("drawn")));
    let all_valid = case.valid().iter().filter(|&&valid| valid).count();
    let (segments, valid) = (&case.segments()[tokens.clone()], case.valid()[tokens.clone()].to_vec());
    let importance = Importance::new(segments, SEQ, valid, 1.0 / all_valid.max(1) as f32);
    let stream = mesh.stream(Rows::consecutive(tokens.start as u64, tokens.len()));
    let facts = Facts {
        importance: &importance,
        homes: &Homes::default(),
        history: &History::default(),
        step: &StepFacts::of_training(0, 1),
    };
    let output = layer.forward(&x, &stream, &facts, mesh).unwrap();
    assert_eq!(output.counts.dropped, 0);
    let (balance, z) = (&output.losses.balance, &output.losses.z);
    let loss = output.y.dot_constant(own(case.direction())).add(&balance.scale(BALANCE)).add(&z.scale(Z));
    let back = tape.try_backward(&loss).unwrap();
    sync_gradients(&mut layer, mesh).unwrap();
    let scalar = |x: &Var| x.value().scalar();
    Outcome {
        y: output.y.value().to_vec(),
        balance: scalar(balance),
        z: scalar(z),
        load: output.counts.load,
        x_gradient: back.of(&x).map_or_else(Vec::new, Tensor::to_vec),
        gradients: gradients(&mut layer),
    }
}

fn together(parts: &[Outcome]) -> Outcome {
    let sum = |x: fn(&Outcome) -> f32| parts.iter().map(x).sum();
    Outcome {
        y: parts.iter().flat_map(|part| part.y.clone()).collect(),
        balance: sum(|part| part.balance),
        z: sum(|part| part.z),
        load: (0..parts[0].load.len()).map(|e| parts.iter().map(|part| part.load[e]).sum()).collect(),
        x_gradient: parts.iter().flat_map(|part| part.x_gradient.clone()).collect(),
        gradients: union(parts.iter().map(|part| part.gradients.clone())),
    }
}

fn check(case: &Case, activation: Activation, shape: Shape, want: &Outcome, index: usize) {
    for share in shares(shape.ranks, case.rows) {
        let what = |part: &str| format!("case {index}, {activation:?}, {shape:?}, rows {share:?}: {part}");
        let parts = on_mesh(shape, |rank, mesh| part(rank, mesh, case, activation, share[mesh.world.rank()].clone()));
        let got = together(&parts);
        assert_eq!(got.load, want.load, "{}", what("loads"));
        near(&what("output"), &got.y, &want.y, ROUNDING);
        near(&what("losses"), &[got.balance, got.z], &[want.balance, want.z], ROUNDING);
        near(&what("gradient of x"), &got.x_gradient, &want.x_gradient, ROUNDING);
        all_near(&what("gradient"), &got.gradients, &want.gradients, ROUNDING);
    }
}

#[test]
fn a_moe_layer_is_its_loops() {
    for (index, case) in CASES.iter().enumerate() {
        for activation in [Activation::SwiGlu, Activation::Gelu, Activation::Relu] {
            let want = expected(case, activation);
            for shape in MESHES.into_iter().filter(|shape| case.experts.is_multiple_of(shape.expert)) {
                check(case, activation, shape, &want, index);
            }
        }
    }
}

/// The cases are what their names say.
#[test]
fn the_cases_are_what_they_claim() {
    let load = |case: &Case| expected(case, Activation::SwiGlu).load;
    let all = (PLAIN.tokens()) as u64;
    assert_eq!(load(&CASES[5]), [0, 0, all, 0]);
    assert_eq!(load(&CASES[6]), [all, 0, all, 0]);
    assert_eq!(load(&CASES[8]), [all; 4]);
    let tied = load(&CASES[3]);
    assert!(tied[1] > 0 && tied[2] == 0, "a tie of 1 and 2 goes to 1: {tied:?}");
    assert!(load(&PLAIN).iter().all(|&routes| routes > 0));
    for case in &CASES[12..] {
        let kept = case.loops(Activation::SwiGlu).kept;
        let routes = kept.chunks(case.top_k).filter(|of_token| of_token.contains(&true)).count();
        assert!(0 < routes && routes < case.tokens() && kept.contains(&false), "some tokens keep nothing: {kept:?}");
    }
}
