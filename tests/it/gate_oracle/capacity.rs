//! What becomes of choices when experts have only so many places: the five overflow policies, route by route.

use std::ops::Range;

use guildhall::moe::gates::Draw;
use guildhall::moe::{GateKind, Overflow};

use super::cases::workers;
use super::choices::{Batch, Choices, best, ceiling};

/// The routing of a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Routes {
    /// What the gate said.
    pub(super) wanted: Choices,
    /// The same after moves.
    pub(super) chosen: Choices,
    /// What is left after drops.
    pub(super) kept: Choices,
}

/// A route of a group: its slot and its token within the group.
type Route = (usize, usize);

impl Batch {
    pub(super) fn route(&self) -> Routes {
        let mut routes = Routes::default();
        for group in self.groups() {
            let mut chosen = self.choose(group.clone());
            let mut kept = chosen.clone();
            routes.wanted.extend(chosen.clone());
            self.give_up(group.clone(), &mut kept);
            if self.config.gate != GateKind::ExpertChoice {
                self.limit(group, &mut chosen, &mut kept);
            }
            routes.chosen.extend(chosen);
            routes.kept.extend(kept);
        }
        routes
    }

    /// In training, or outside it.
    pub(super) fn factor(&self) -> Option<f64> {
        let outside = self.config.eval_capacity_factor.filter(|_| !self.draws.trains);
        outside.or(self.config.capacity_factor)
    }

    fn places(&self, tokens: usize) -> usize {
        let (config, factor) = (&self.config, self.factor().unwrap_or(f64::INFINITY));
        match config.gate.kind() {
            GateKind::DistributedCapacity => ceiling(factor, tokens, workers(config)),
            _ => ceiling(factor, tokens * config.top_k, config.experts.largest()),
        }
    }

    fn limit(&self, group: Range<usize>, chosen: &mut Choices, kept: &mut Choices) {
        let mut free = vec![self.places(group.len()); self.config.experts.largest()];
        let mut over = Vec::new();
        for (j, i) in self.queue(&group, kept) {
            let expert = kept[i][j].expect("only these queue");
            if free[expert] > 0 {
                free[expert] -= 1;
            } else {
                kept[i][j] = None;
                over.push((j, i));
            }
        }
        let nodes = match self.config.overflow {
            Overflow::Reroute => 1,
            Overflow::Node => self.config.logical_nodes,
            _ => return,
        };
        let node = |e: usize| e * nodes / self.config.experts.largest();
        for (j, i) in over {
            let full = chosen[i][j].expect("it asked for a place");
            let open = |e: &usize| free[*e] > 0 && node(*e) == node(full) && !chosen[i].contains(&Some(*e));
            let open: Vec<usize> = (0..self.config.experts.largest()).filter(open).collect();
            let logits: Vec<f64> = open.iter().map(|&e| f64::from(self.logits[group.start + i][e])).collect();
            if let Some(&at) = best(&logits, 1).first() {
                free[open[at]] -= 1;
                (chosen[i][j], kept[i][j]) = (Some(open[at]), Some(open[at]));
            }
        }
    }

    /// The routes that want a place, the one that gets the first place first.
    fn queue(&self, group: &Range<usize>, kept: &Choices) -> Vec<Route> {
        let slots = kept.first().map_or(0, Vec::len);
        let all = (0..slots).flat_map(|j| (0..group.len()).map(move |i| (j, i)));
        let by_position: Vec<Route> = all.filter(|&(j, i)| kept[i][j].is_some()).collect();
        let draws = self.draws.of(Draw::RandomSelection);
        let worth = |&(j, i): &Route| {
            let (token, expert) = (group.start + i, kept[i][j].expect("it wants a place"));
            match self.config.overflow {
                Overflow::Probability => f64::from(self.logits[token][expert]),
                Overflow::Random => f64::from(
                    draws.uniform((self.first + token as u64) * self.config.experts.largest() as u64 + expert as u64),
                ),
                Overflow::Position | Overflow::Reroute | Overflow::Node => 0.0,
            }
        };
        let worths: Vec<f64> = by_position.iter().map(worth).collect();
        best(&worths, worths.len()).into_iter().map(|at| by_position[at]).collect()
    }
}
