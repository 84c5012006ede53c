//! Every gate's choices as docs/gates.md has them: loops over the tokens of one routing group. Nothing here is fast, and
//! nothing is shared with the program but configurations and draws.

use std::ops::Range;

use guildhall::moe::gates::{Draw, GateDraws};
use guildhall::moe::{self, Dialect, GateChoice, GateKind};

use super::cases::{sigmoid_keys, workers};

/// The expert of each of a token's slots, if it has one.
pub(super) type Choices = Vec<Vec<Option<usize>>>;

/// A global micro-batch before one layer: all that decides its routing.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) config: moe::Config,
    /// By token, then expert.
    pub(super) logits: Vec<Vec<f32>>,
    pub(super) ids: Vec<u32>,
    /// By expert; zero but for the sigmoid gate.
    pub(super) bias: Vec<f32>,
    /// The first token's index within the step.
    pub(super) first: u64,
    pub(super) draws: GateDraws,
}

impl Batch {
    pub(super) fn groups(&self) -> Vec<Range<usize>> {
        let (all, size) = (self.logits.len(), self.config.group_tokens.unwrap_or(usize::MAX));
        let mut groups = Vec::new();
        let mut start = 0;
        while start < all {
            let end = all.min(start.saturating_add(size));
            groups.push(start..end);
            start = end;
        }
        groups
    }

    /// What the gate says of a group's tokens, before anything is given up or limited.
    pub(super) fn choose(&self, group: Range<usize>) -> Choices {
        let k = self.config.top_k;
        let each = |choose: &dyn Fn(usize) -> Vec<usize>| {
            group.clone().map(|t| choose(t).into_iter().map(Some).collect()).collect()
        };
        match self.config.gate.kind() {
            GateKind::Hash => each(&|t| self.hashed(self.ids[t])),
            GateKind::Balanced => {
                let index = |t: usize| self.first as usize + t;
                each(&|t| (0..k).map(|j| (index(t) * k + j) % self.config.experts.largest()).collect())
            }
            GateKind::Sigmoid => each(&|t| self.by_sigmoid(&self.logits[t])),
            GateKind::Topology => self.near(group.clone()),
            GateKind::ExpertChoice => self.by_experts(group.clone()),
            GateKind::Swipe if self.draws.trains => self.swipe(group.clone()),
            GateKind::Sinkhorn if self.draws.trains => {
                let matrix = self.sinkhorn(group.clone());
                each(&|t| best(&matrix[t - group.start], k))
            }
            _ => each(&|t| best(&wide(&self.logits[t]), k)),
        }
    }

    /// Random second choices that are given up: they keep their expert and lose their place.
    pub(super) fn give_up(&self, group: Range<usize>, kept: &mut Choices) {
        let second = [GateKind::Gshard, GateKind::DistributedCapacity].contains(&self.config.gate.kind());
        if !(second && self.draws.trains) {
            return;
        }
        let draws = self.draws.of(Draw::SecondChoice);
        for (routes, t) in kept.iter_mut().zip(group) {
            let logit = |j: usize| f64::from(self.logits[t][routes[j].expect("two choices")]);
            let share = sigmoid(logit(1) - logit(0)) as f32;
            let u = draws.uniform(self.first + t as u64);
            if 2.0 * share < u {
                routes[1] = None;
            }
        }
    }

    fn hashed(&self, id: u32) -> Vec<usize> {
        let experts = self.config.experts.largest();
        let mut chosen = Vec::new();
        for j in 0..self.config.top_k {
            let mut expert = (hash(id, j as u32) % experts as u64) as usize;
            while chosen.contains(&expert) {
                expert = (expert + 1) % experts;
            }
            chosen.push(expert);
        }
        chosen
    }

    fn by_sigmoid(&self, logits: &[f32]) -> Vec<usize> {
        let (config, keys) = (&self.config, sigmoid_keys(&self.config));
        let scores: Vec<f32> = logits.iter().zip(&self.bias).map(|(&l, &b)| sigmoid(f64::from(l)) as f32 + b).collect();
        let size = config.experts.largest() / keys.groups;
        let counted = match config.dialect {
            Some(Dialect::Megatron) => config.top_k / keys.top_groups,
            _ => 2,
        };
        let worth = |group: &[f32]| {
            let group = wide(group);
            best(&group, counted).iter().map(|&e| group[e] as f32).sum::<f32>()
        };
        let worths: Vec<f32> = scores.chunks(size).map(worth).collect();
        let open = match keys.groups {
            1 => vec![0],
            _ => best(&wide(&worths), keys.top_groups),
        };
        let allowed = best(&wide(&scores), config.experts.largest()).into_iter().filter(|e| open.contains(&(e / size)));
        allowed.take(config.top_k).collect()
    }

    /// Topology: few leave their node.
    fn near(&self, group: Range<usize>) -> Choices {
        let (experts, nodes, tokens) = (self.config.experts.largest(), self.config.logical_nodes, group.len());
        let inside = |i: usize, e: usize| e * nodes / experts == i * nodes / tokens;
        let GateChoice::Topology(keys) = &self.config.gate else { panic!("{:?}", self.config.gate) };
        let limit = (tokens as f64 * keys.outside + 1e-9).floor() as usize;
        let orders: Vec<Vec<usize>> = group.clone().map(|t| best(&wide(&self.logits[t]), experts)).collect();
        let leaving: Vec<usize> = (0..tokens).filter(|&i| !inside(i, orders[i][0])).collect();
        if leaving.len() < limit {
            return orders.iter().map(|order| vec![Some(order[0]), Some(order[1])]).collect();
        }
        let firsts: Vec<f32> = leaving.iter().map(|&i| self.logits[group.start + i][orders[i][0]]).collect();
        let may: Vec<usize> = best(&wide(&firsts), limit).into_iter().map(|at| leaving[at]).collect();
        let of_token = |i: usize| {
            let mut own = orders[i].iter().copied().filter(|&e| inside(i, e));
            let first = own.next();
            vec![first, if may.contains(&i) { Some(orders[i][0]) } else { own.next() }]
        };
        (0..tokens).map(of_token).collect()
    }

    /// Every expert takes the tokens that like it most; a token's experts in ascending order.
    fn by_experts(&self, group: Range<usize>) -> Choices {
        let config = &self.config;
        let places = ceiling(self.factor().unwrap_or(1.0), group.len() * config.top_k, config.experts.largest());
        let mut chosen = vec![vec![None; config.experts.largest()]; group.len()];
        let likings: Vec<Vec<f64>> = group.map(|t| softmax(&wide(&self.logits[t]))).collect();
        (0..config.experts.largest()).for_each(|e| {
            let liking: Vec<f64> = likings.iter().map(|of_token| f64::from(of_token[e] as f32)).collect();
            best(&liking, places).into_iter().for_each(|i| chosen[i][e] = Some(e));
        });
        chosen
    }

    fn swipe(&self, group: Range<usize>) -> Choices {
        let (k, experts, workers) = (self.config.top_k, self.config.experts.largest(), workers(&self.config));
        let (tokens, size) = (group.len(), experts / workers);
        let mut chosen: Choices =
            group.map(|t| best(&wide(&self.logits[t]), k).into_iter().map(Some).collect()).collect();
        let mut free = vec![(tokens * k).div_ceil(workers); workers];
        for j in 0..k {
            let mut ungranted = Vec::new();
            for (i, routes) in chosen.iter().enumerate() {
                let expert = routes[j].expect("top k");
                let again = routes[..j].contains(&Some(expert));
                if again || free[expert / size] == 0 {
                    ungranted.push(i);
                } else {
                    free[expert / size] -= 1;
                }
            }
            for i in ungranted {
                chosen[i][j] = None;
                let Some(worker) = free.iter().position(|&places| places > 0) else { continue };
                let tries = (0..size).map(|step| worker * size + (j + step) % size);
                let found = tries.into_iter().find(|&e| !chosen[i][..j].contains(&Some(e)));
                if found.is_some() {
                    (chosen[i][j], free[worker]) = (found, free[worker] - 1);
                }
            }
        }
        chosen
    }

    /// The balanced matrix of a group, by token.
    fn sinkhorn(&self, group: Range<usize>) -> Vec<Vec<f64>> {
        let (tokens, experts) = (group.len() as f64, self.config.experts.largest());
        let row = |t: usize| {
            let logits = wide(&self.logits[t]);
            let largest = logits[best(&logits, 1)[0]];
            logits.iter().map(|l| (l - largest).exp()).collect::<Vec<f64>>()
        };
        let matrix: Vec<Vec<f64>> = group.map(row).collect();
        let mut a = vec![1.0; matrix.len()];
        let mut b = vec![1.0; experts];
        for _ in 0..100 {
            for (a, row) in a.iter_mut().zip(&matrix) {
                let sum: f64 = (0..experts).map(|e| row[e] * b[e]).sum();
                *a = 1.0 / tokens / (sum + 1e-8);
            }
            let before = b.clone();
            for (e, b) in b.iter_mut().enumerate() {
                let sum: f64 = matrix.iter().zip(&a).map(|(row, a)| row[e] * a).sum();
                *b = 1.0 / experts as f64 / (sum + 1e-8);
            }
            let moved = b.iter().zip(&before).map(|(b, before)| (b - before).abs()).sum::<f64>() / experts as f64;
            if moved <= 1e-4 {
                break;
            }
        }
        let even =
            |(row, a): (&Vec<f64>, &f64)| row.iter().zip(&b).map(|(k, b)| f64::from((k * a * b) as f32)).collect();
        matrix.iter().zip(&a).map(even).collect()
    }
}

pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Where the n largest values are, the largest first: of equals the lower place; NaN is minus infinity.
pub(super) fn best(values: &[f64], n: usize) -> Vec<usize> {
    let mut rest: Vec<usize> = (0..values.len()).collect();
    let mut order = Vec::new();
    while order.len() < n && !rest.is_empty() {
        let mut at = 0;
        for other in 1..rest.len() {
            if comparable(values[rest[other]]) > comparable(values[rest[at]]) {
                at = other;
            }
        }
        order.push(rest.remove(at));
    }
    order
}

fn comparable(x: f64) -> f64 {
    if x.is_nan() { f64::NEG_INFINITY } else { x }
}

/// `ceil(factor routes / shares)`, at least 1; a whole number plus rounding is that number.
pub(super) fn ceiling(factor: f64, routes: usize, shares: usize) -> usize {
    ((factor * routes as f64 / shares as f64 - 1e-9).ceil() as usize).max(1)
}

pub(super) fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// SplitMix64's finaliser after one step of its sequence.
fn hash(id: u32, j: u32) -> u64 {
    let z = (u64::from(j) * (1 << 32) + u64::from(id)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
