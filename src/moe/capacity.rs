//! Capacity: how many routes of a routing group an expert takes, and what becomes of the rest (`docs/gates.md`).

use std::ops::Range;

use guildhall_tensor::ops::comparable;

use super::gates::{Draw, Tokens};
use super::{Overflow, Routing};

/// `ceil(factor * routes / experts)`, at least 1; what rounding adds to a whole number does not count.
pub fn share(factor: f64, routes: usize, experts: usize) -> usize {
    ((factor * routes as f64 / experts as f64 - 1e-9).ceil() as usize).max(1)
}

/// A limit on what experts take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    pub factor: f64,
    /// The factor outside training.
    pub eval_factor: f64,
    pub overflow: Overflow,
    /// Logical nodes, for [`Overflow::Node`].
    pub nodes: usize,
}

/// Routes of some tokens before places are given out: route `t * slots + j` is token t's j-th.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claims {
    pub slots: usize,
    /// What the gate said.
    pub chosen: Vec<u32>,
    /// The same without what the gate gave up.
    pub kept: Vec<u32>,
    /// The logits of `kept`, where places go by them; otherwise empty.
    pub keys: Vec<f32>,
}

impl Claims {
    /// Those of some of the tokens.
    pub fn of_tokens(&self, tokens: Range<usize>) -> Claims {
        let routes = tokens.start * self.slots..tokens.end * self.slots;
        let keys = if self.keys.is_empty() { Vec::new() } else { self.keys[routes.clone()].to_vec() };
        Claims {
            slots: self.slots,
            chosen: self.chosen[routes.clone()].to_vec(),
            kept: self.kept[routes].to_vec(),
            keys,
        }
    }

    /// Takes away the routes of tokens that are not to have any.
    pub fn leave_out(&mut self, is_absent: impl Fn(usize) -> bool) {
        for t in (0..self.tokens()).filter(|&t| is_absent(t)) {
            let routes = t * self.slots..(t + 1) * self.slots;
            self.chosen[routes.clone()].fill(Routing::DROPPED);
            self.kept[routes].fill(Routing::DROPPED);
        }
    }

    pub fn tokens(&self) -> usize {
        self.kept.len() / self.slots.max(1)
    }

    /// Routes that ask for each expert in each slot, `[slots, E]`.
    pub fn counts(&self, experts: usize) -> Vec<u32> {
        let mut counts = vec![0; self.slots * experts];
        for (route, &expert) in self.kept.iter().enumerate().filter(|(_, expert)| **expert != Routing::DROPPED) {
            counts[route % self.slots * experts + expert as usize] += 1;
        }
        counts
    }

    /// All of several, one behind the other.
    pub fn join(parts: impl Iterator<Item = Claims>) -> Claims {
        let join = |mut all: Claims, part: Claims| {
            all.chosen.extend(part.chosen);
            all.kept.extend(part.kept);
            all.keys.extend(part.keys);
            all
        };
        parts.reduce(join).unwrap_or_default()
    }

    /// Gives each expert at most `limit` routes by position, where so many of each slot and expert, `[slots, E]`, come
    /// before those of the same slot here.
    pub fn behind(mut self, mut before: Vec<u32>, limit: usize) -> Claims {
        let experts = before.len() / self.slots.max(1);
        for (route, expert) in self.kept.iter_mut().enumerate().filter(|(_, expert)| **expert != Routing::DROPPED) {
            let before = &mut before[route % self.slots * experts + *expert as usize];
            *before += 1;
            if *before as usize > limit {
                *expert = Routing::DROPPED;
            }
        }
        self
    }
}

/// The routes of one routing group while places are given out.
struct Places<'a> {
    tokens: &'a Tokens<'a>,
    slots: usize,
    /// Per expert.
    free: Vec<usize>,
    /// Routes without a place, in the order of position.
    over: Vec<usize>,
}

impl Capacity {
    /// The factor in training, or outside it.
    pub fn factor_at(&self, trains: bool) -> f64 {
        if trains { self.factor } else { self.eval_factor }
    }

    /// Gives each expert at most `limit` of the routes that a group's `claims` keep: routes that move change there,
    /// those without a place become [`Routing::DROPPED`]. A route that is not kept may still be chosen: nothing of
    /// its token moves to its expert. Of `tokens`, logits are read where routes move.
    pub fn limit(&self, tokens: &Tokens, limit: usize, claims: &mut Claims) {
        let Claims { slots, chosen, kept, keys } = claims;
        let mut places = Places { tokens, slots: *slots, free: vec![limit; tokens.experts], over: Vec::new() };
        places.give(kept, keys, self.overflow);
        match self.overflow {
            Overflow::Position | Overflow::Probability | Overflow::Random => {}
            Overflow::Reroute => places.move_over(chosen, kept, |_, _| true),
            Overflow::Node => {
                let share = tokens.experts / self.nodes;
                places.move_over(chosen, kept, |from, to| from / share == to / share);
            }
        }
    }
}

impl Places<'_> {
    fn give(&mut self, kept: &mut [u32], keys: &[f32], overflow: Overflow) {
        let by_position = (0..self.slots).flat_map(|j| (j..kept.len()).step_by(self.slots));
        let mut routes: Vec<usize> = by_position.filter(|&route| kept[route] != Routing::DROPPED).collect();
        // Sorts are stable: equals stay in the order of position.
        match overflow {
            Overflow::Probability => {
                routes.sort_by(|&a, &b| comparable(keys[b]).total_cmp(&comparable(keys[a])));
            }
            Overflow::Random => {
                let draws = self.tokens.draws.of(Draw::RandomSelection);
                let key = |route: usize| {
                    let token = self.tokens.first + (route / self.slots) as u64;
                    draws.bits(token * self.tokens.experts as u64 + u64::from(kept[route])) >> 8
                };
                routes.sort_by_key(|&route| std::cmp::Reverse(key(route)));
            }
            Overflow::Position | Overflow::Reroute | Overflow::Node => {}
        }
        for route in routes {
            let free = &mut self.free[kept[route] as usize];
            if *free > 0 {
                *free -= 1;
            } else {
                kept[route] = Routing::DROPPED;
                self.over.push(route);
            }
        }
    }

    /// Moves what is over to the best expert with a place that `near(full expert, it)` allows.
    fn move_over(&mut self, chosen: &[u32], kept: &mut [u32], near: impl Fn(usize, usize) -> bool) {
        for &route in &self.over {
            let token = route / self.slots;
            let mine = token * self.slots..(token + 1) * self.slots;
            let full = chosen[route] as usize;
            // What was chosen and is not there any more is full or given up: either way no place to move to.
            let has = |e: u32| chosen[mine.clone()].contains(&e) || kept[mine.clone()].contains(&e);
            let open = |e: usize| self.free[e] > 0 && near(full, e) && !has(e as u32);
            let best = super::gates::top_k(self.tokens.row(token), 1, open)[0];
            if best != Routing::DROPPED {
                self.free[best as usize] -= 1;
                kept[route] = best;
            }
        }
    }
}
