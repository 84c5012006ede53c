//! Watching for experts that no token is routed to any more.
//!
//! An expert starved for a step is ordinary; one starved for many is a parameter budget that no longer
//! trains, and worth saying once, when it begins, not every step.

use std::collections::BTreeMap;
use std::fmt;

use super::{DeadExpert, MoeRecord};

/// Something to tell the user about one expert; `Display` is the sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertEvent {
    Died(DeadExpert),
    Revived { layer: usize, expert: usize, step: u64 },
}

impl fmt::Display for ExpertEvent {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match self {
            ExpertEvent::Died(DeadExpert { layer, expert, since_step }) => write!(
                formatter,
                "layer {layer}: expert {expert} has had no routes since step {since_step}; \
                 if it stays so, raise moe.balance_weight"
            ),
            ExpertEvent::Revived { layer, expert, step } => {
                write!(formatter, "layer {layer}: expert {expert} has routes again at step {step}")
            }
        }
    }
}

/// Counts, for every expert, its streak of steps without routes.
///
/// Its state follows from the log alone: a resumed run feeds it the records it kept and ignores their events.
#[derive(Clone, Debug)]
pub struct DeadExperts {
    patience_steps: u64,
    streaks: BTreeMap<(usize, usize), Streak>,
}

#[derive(Clone, Copy, Debug)]
struct Streak {
    since_step: u64,
    steps: u64,
}

impl DeadExperts {
    /// An expert is dead after `patience_steps` steps in a row without routes.
    #[track_caller]
    pub fn new(patience_steps: u64) -> DeadExperts {
        assert!(patience_steps > 0, "a patience of 0 steps would call every expert dead");
        DeadExperts { patience_steps, streaks: BTreeMap::new() }
    }

    /// Takes in the loads of `step` and tells what began or ended with it.
    pub fn observe(&mut self, step: u64, layers: &[MoeRecord]) -> Vec<ExpertEvent> {
        let mut events = Vec::new();
        // A layer without any routes says nothing about its experts.
        for record in layers.iter().filter(|record| record.load.iter().any(|&routes| routes > 0)) {
            for (expert, &routes) in record.load.iter().enumerate() {
                events.extend(self.observe_expert(step, (record.layer, expert), routes));
            }
        }
        events
    }

    /// The experts dead now, by layer and index.
    pub fn dead(&self) -> Vec<DeadExpert> {
        let dead = self.streaks.iter().filter(|(_, streak)| streak.steps >= self.patience_steps);
        dead.map(|(&key, streak)| dead_expert(key, streak.since_step)).collect()
    }

    fn observe_expert(&mut self, step: u64, key: (usize, usize), routes: u64) -> Option<ExpertEvent> {
        if routes > 0 {
            let ended = self.streaks.remove(&key)?;
            let (layer, expert) = key;
            let was_dead = ended.steps >= self.patience_steps;
            return was_dead.then_some(ExpertEvent::Revived { layer, expert, step });
        }
        let streak = self.streaks.entry(key).or_insert(Streak { since_step: step, steps: 0 });
        streak.steps += 1;
        let begins = streak.steps == self.patience_steps;
        begins.then(|| ExpertEvent::Died(dead_expert(key, streak.since_step)))
    }
}

fn dead_expert((layer, expert): (usize, usize), since_step: u64) -> DeadExpert {
    DeadExpert { layer, expert, since_step }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(layer: usize, load: &[u64]) -> MoeRecord {
        MoeRecord::new(layer, load.to_vec(), load.iter().sum(), 0)
    }

    #[test]
    fn a_death_is_told_once_and_a_revival_once() {
        let mut watch = DeadExperts::new(3);
        let mut told = Vec::new();
        for step in 1..=12 {
            let routes = u64::from(step < 3 || step == 9);
            told.extend(watch.observe(step, &[layer(4, &[5, routes])]));
        }
        let died = |since_step| ExpertEvent::Died(DeadExpert { layer: 4, expert: 1, since_step });
        let revived = ExpertEvent::Revived { layer: 4, expert: 1, step: 9 };
        assert_eq!(told, [died(3), revived, died(10)]);
        assert_eq!(watch.dead(), [DeadExpert { layer: 4, expert: 1, since_step: 10 }]);
    }

    #[test]
    fn a_short_pause_and_an_idle_layer_are_not_deaths() {
        let mut watch = DeadExperts::new(2);
        let mut told = Vec::new();
        for step in 1..=6 {
            told.extend(watch.observe(step, &[layer(0, &[1, step % 2]), layer(1, &[0, 0])]));
        }
        assert_eq!(told, []);
        assert_eq!(watch.dead(), []);
    }

    #[test]
    fn the_same_expert_of_two_layers_is_two_experts() {
        let mut watch = DeadExperts::new(1);
        let told = watch.observe(7, &[layer(0, &[0, 9]), layer(2, &[0, 9])]);
        assert_eq!(told.len(), 2);
        assert_eq!(watch.dead().iter().map(|dead| dead.layer).collect::<Vec<_>>(), [0, 2]);
    }
}
