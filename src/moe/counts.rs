//! What a routing comes to in numbers that add up over micro-batches and ranks.

use super::Routing;
use super::condensation::Pairs;
use super::gates::Gate;
use super::migration::MovedSequences;

/// With more experts than this, pairs are not counted: their number grows with the square.
const PAIRS_EXPERTS_MAX: usize = 1024;

/// Sums over some tokens of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Routes that chose each expert of all ranks, sent or not.
    pub load: Vec<u64>,
    /// Routes that the tokens asked for: those that were sent and those that were dropped.
    pub routes: u64,
    /// Routes without a place: given up by the gate, or left over by a capacity.
    pub dropped: u64,
    /// Every two experts that one token chose, sent or not: places in the upper triangle of a table of all experts without
    /// its diagonal, row by row. Empty where no token chooses two, or with more than 1024 experts.
    pub pairs: Vec<u32>,
    /// Rows to each rank of the expert group, this one included.
    pub sent: Vec<u64>,
    /// Rows that this rank computes: from all ranks of the expert group, this one included, to its experts, and its own to
    /// visitors.
    pub computed: u64,
    /// Sequences that went on to another host.
    pub moved: MovedSequences,
    /// Present if the layer condenses.
    pub condensed: Option<CondensedCounts>,
}

/// What condensation saves among some tokens of one layer, in routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CondensedCounts {
    /// Routes with a place.
    pub routes: u64,
    /// Those that share the row of another: no rank computes a row for them.
    pub uncomputed: u64,
    /// Routes to experts on other ranks of the expert group, which do not visit this one.
    pub travelling: u64,
    /// Those of them that share the row of another.
    pub unsent: u64,
    /// The pairs of tokens that were compared.
    pub pairs: Pairs,
}

impl CondensedCounts {
    /// All numbers, which add up over tokens.
    pub fn numbers(&self) -> impl Iterator<Item = &u64> {
        let scalars = [&self.routes, &self.uncomputed, &self.travelling, &self.unsent, &self.pairs.remembered];
        scalars.into_iter().chain(&self.pairs.compared)
    }

    /// The same, to be changed.
    pub fn numbers_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        let CondensedCounts { routes, uncomputed, travelling, unsent, pairs } = self;
        [routes, uncomputed, travelling, unsent, &mut pairs.remembered].into_iter().chain(&mut pairs.compared)
    }

    /// Adds what other tokens come to.
    pub fn add(&mut self, other: &CondensedCounts) {
        self.numbers_mut().zip(other.numbers()).for_each(|(sum, n)| *sum += n);
    }
}

impl Counts {
    /// Of a routing by `gate`, of so many tokens that are not padding; `send` are rows to each rank of the expert group, `computed` those that its experts and visitors get.
    pub fn new((routing, present): (&Routing, usize), gate: &dyn Gate, send: &[usize], computed: usize) -> Counts {
        let load = routing.load();
        let routes = gate.asked(present, load.iter().sum::<u64>() as usize) as u64;
        Counts {
            load,
            routes,
            // Of routes that are only counted, lanes' shares may be rounded up.
            dropped: routes.saturating_sub(routing.rows().iter().sum::<usize>() as u64),
            pairs: pairs(routing),
            sent: send.iter().map(|&rows| rows as u64).collect(),
            computed: computed as u64,
            condensed: None,
            moved: MovedSequences::default(),
        }
    }

    /// Pairs there are of `experts` experts, with `slots` choices per token.
    pub fn pairs_len(experts: usize, slots: usize) -> usize {
        if slots < 2 || experts > PAIRS_EXPERTS_MAX { 0 } else { experts * (experts - 1) / 2 }
    }

    /// Adds what other tokens come to.
    pub fn add(&mut self, other: &Counts) {
        self.routes += other.routes;
        self.dropped += other.dropped;
        self.computed += other.computed;
        self.moved.add(&other.moved);
        self.pairs.extend(&other.pairs);
        if let Some(condensed) = &other.condensed {
            self.condensed.get_or_insert_default().add(condensed);
        }
        for (mine, others) in [(&mut self.load, &other.load), (&mut self.sent, &other.sent)] {
            mine.iter_mut().zip(others).for_each(|(sum, n)| *sum += n);
        }
    }
}

fn pairs(routing: &Routing) -> Vec<u32> {
    let (experts, mut pairs) = (routing.experts, Vec::new());
    if Counts::pairs_len(experts, routing.k) == 0 {
        return pairs;
    }
    // Rows before a have experts - 1, experts - 2, ... pairs.
    let row = |a: usize| a * (2 * experts - a - 1) / 2;
    let before: Vec<u32> = (0..experts).map(|a| (row(a) - a) as u32).collect();
    pairs.reserve(routing.chosen.len() * (routing.k - 1) / 2);
    for routes in routing.chosen.chunks_exact(routing.k) {
        for (i, &one) in routes.iter().enumerate() {
            for &other in &routes[i + 1..] {
                // A dropped route is beyond all experts.
                let (a, b) = (one.min(other), one.max(other));
                if b != Routing::DROPPED {
                    pairs.push(before[a as usize] + b - 1);
                }
            }
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(routing: &Routing) -> Vec<u64> {
        let mut tokens = vec![0; Counts::pairs_len(routing.experts, routing.k)];
        pairs(routing).into_iter().for_each(|pair| tokens[pair as usize] += 1);
        tokens
    }

    #[test]
    fn pairs_are_counted_in_the_order_of_the_triangle() {
        let x = Routing::DROPPED;
        let tokens = [[2, 0, 1], [3, 2, 0], [x, 3, x], [x, 2, 1]];
        let [p01, p02, p03, p12, p13, p23] = [1, 2, 1, 2, 0, 1];
        // Whether they are sent does not matter.
        let routing = Routing { expert: vec![x; 12], ..Routing::new(tokens.concat(), 3, 4) };
        assert_eq!(counted(&routing), [p01, p02, p03, p12, p13, p23]);
        for experts in 2..9 {
            let every = (0..experts).flat_map(|a| (a + 1..experts).map(move |b| [b as u32, a as u32]));
            let routing = Routing::new(every.flatten().collect(), 2, experts);
            assert_eq!(counted(&routing), vec![1; experts * (experts - 1) / 2], "{experts} experts");
        }
        assert_eq!(pairs(&Routing::new(vec![0, 1], 1, 2)), Vec::<u32>::new());
        assert_eq!(pairs(&Routing::new(vec![0, 1], 2, 1025)), Vec::<u32>::new());
    }
}
