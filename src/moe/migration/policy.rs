//! The policies that a recipe can name: `parallel.migrate`.

use super::{AssignmentTerms, AttentionCost, MigrationUnit, RowPrices, SequenceRows, Whereabouts, forced, paying};
use crate::moe::{MigrationPolicy, Site};
use crate::parallel::{HeldSequences, Migrate};

/// All-to-alls that a migration adds to a layer at most, forward and backward: which results carry the residual stream and
/// where all go, the metadata of tokens, the weights of routes and the rows that nothing carries with their gradients; in
/// each step of a schedule the numbers beside carried rows with theirs; and the results of rows that stayed for visitors.
pub fn exchanges(steps: usize, visits: bool) -> usize {
    7 + 2 * steps + if visits { 2 } else { 0 }
}

/// Sequences of a host that moved behind a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedSequences {
    pub sequences: u64,
    pub tokens: u64,
    /// Rows of the residual stream that were sent by themselves; results carried those of the other tokens.
    pub residual_rows: u64,
    /// Their results that would have gone to another rank had they stayed.
    pub results_if_stayed: u64,
    /// Their results that go to another rank.
    pub results: u64,
}

impl MovedSequences {
    pub fn numbers(&self) -> [&u64; 5] {
        [&self.sequences, &self.tokens, &self.residual_rows, &self.results_if_stayed, &self.results]
    }

    pub fn numbers_mut(&mut self) -> [&mut u64; 5] {
        let MovedSequences { sequences, tokens, residual_rows, results_if_stayed, results } = self;
        [sequences, tokens, residual_rows, results_if_stayed, results]
    }

    /// Adds those of other sequences.
    pub fn add(&mut self, other: &MovedSequences) {
        self.numbers_mut().into_iter().zip(other.numbers()).for_each(|(sum, n)| *sum += n);
    }
}

/// `parallel.migrate = "auto"` or `"force"`.
#[derive(Clone, Debug, PartialEq)]
pub struct Migrating {
    pub forces: bool,
    /// Hosts with least traffic, among which time decides; `None`: all.
    pub candidates: Option<usize>,
    pub slack: f64,
    /// Consecutive tokens of a step that must stay on one host. The sequences of a host that have tokens of one group
    /// move together.
    pub group_tokens: usize,
    /// The stack behind which the loss is taken where sequences are.
    pub last_stack: u32,
}

impl Migrating {
    /// What a recipe asks for, in a model with so many stacks.
    pub fn new(migrate: Migrate, (candidates, slack): (Option<usize>, f64), stacks: usize) -> Option<Migrating> {
        let forces = match migrate {
            Migrate::Off => return None,
            Migrate::Auto => false,
            Migrate::Force => true,
        };
        Some(Migrating { forces, candidates, slack, group_tokens: 1, last_stack: stacks as u32 - 1 })
    }

    /// For each host, its sequences in the units that move together, as indices into its list.
    fn units(&self, held: &HeldSequences) -> Vec<Vec<Vec<usize>>> {
        let group = |first: &u64| first / self.group_tokens.max(1) as u64;
        let of_host = |sequences: &Vec<u64>| {
            let mut next = 0;
            let unit = |together: &[u64]| {
                next += together.len();
                (next - together.len()..next).collect()
            };
            sequences.chunk_by(|a, b| group(a) == group(b)).map(unit).collect()
        };
        held.iter().map(of_host).collect()
    }
}

impl MigrationPolicy for Migrating {
    fn hosts(&self, site: &Site, held: &HeldSequences, rows: &SequenceRows) -> Vec<Vec<usize>> {
        let home = if site.stack == self.last_stack { 0 } else { rows.prices.home };
        let prices = RowPrices { home, ..rows.prices };
        let units = self.units(held);
        let mut all: Vec<(u64, usize, &Vec<usize>)> = Vec::new();
        for (host, of_host) in units.iter().enumerate() {
            all.extend(of_host.iter().map(|unit| (held[host][unit[0]], host, unit)));
        }
        // By number, wherever they are.
        all.sort_unstable_by_key(|&(first, ..)| first);
        let unit = |&(_, host, sequences): &(u64, usize, &Vec<usize>)| {
            let of: Vec<&Whereabouts> = sequences.iter().map(|&sequence| &rows.of[host][sequence]).collect();
            prices.unit(&of)
        };
        let moving: Vec<MigrationUnit> = all.iter().map(unit).collect();
        let terms = self.terms(held.len(), rows);
        let hosts = if self.forces { forced(&moving, &terms) } else { paying(&moving, &terms) };
        let mut to: Vec<Vec<usize>> = held.iter().map(|sequences| vec![0; sequences.len()]).collect();
        for ((_, host, sequences), chosen) in all.into_iter().zip(hosts) {
            sequences.iter().for_each(|&sequence| to[host][sequence] = chosen);
        }
        to
    }
}

impl Migrating {
    fn terms(&self, hosts: usize, rows: &SequenceRows) -> AssignmentTerms {
        let rates = rows.rates.filter(|_| !self.forces);
        AssignmentTerms {
            hosts,
            candidates: self.candidates.unwrap_or(hosts),
            slack: self.slack,
            attention: AttentionCost::Spans,
            following: rows.following,
            exchanged: rows.exchanged(),
            ways: rows.ways(),
            speeds: rates.map(|rates| rows.speeds(rates)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::migration::{FollowingWork, RowCopies};
    use crate::parallel::Rates;

    /// Sequences of 4 tokens in groups of 8: those of one group that are on one host move together.
    #[test]
    fn sequences_of_one_group_move_together() {
        let held = vec![vec![0, 4, 16], vec![8, 12, 20]];
        let policy = |group_tokens, last_stack| Migrating {
            forces: false,
            candidates: None,
            slack: 1.0,
            group_tokens,
            last_stack,
        };
        assert_eq!(policy(8, 0).units(&held), [vec![vec![0, 1], vec![2]], vec![vec![0, 1], vec![2]]]);
        assert_eq!(policy(1, 0).units(&held), [vec![vec![0], vec![1], vec![2]], vec![vec![0], vec![1], vec![2]]]);
        // Sequence 0 would gain much at host 1, sequence 4 would lose little.
        let of = |host: usize, near: [u64; 2]| Whereabouts {
            host,
            home: Some(host),
            tokens: 4,
            alone: 4,
            rows: 8,
            near: near.into(),
        };
        let stays = |host: usize| of(host, if host == 0 { [8, 0] } else { [0, 8] });
        let first = [of(0, [0, 8]), of(0, [4, 3]), stays(0)];
        let prices =
            RowPrices { row: 2, token: 1, residual: 0, carried: 0, way: 0, home: 3, copies: RowCopies::default() };
        let rows = SequenceRows {
            seq: 4,
            of: vec![first.into(), vec![stays(1); 3]],
            prices,
            lanes: 1,
            exchanges: 9,
            following: FollowingWork::default(),
            rates: None,
        };
        let site = Site { step: 1, micro_batch: 0, stack: 0, layer: 0, call: 0 };
        let hosts = |policy: Migrating| policy.hosts(&site, &held, &rows)[0].clone();
        assert_eq!(hosts(policy(1, 0)), [1, 0, 0]);
        assert_eq!(hosts(policy(8, 0)), [1, 1, 0], "24 bytes if they stay, 18 if they go");
        // Once anything moves, each of the 12 rows that were sent says where its result goes: no less than the 12 bytes saved.
        let with_ways = SequenceRows { prices: RowPrices { way: 1, ..prices }, ..rows.clone() };
        assert_eq!(policy(1, 0).hosts(&site, &held, &with_ways)[0], [0, 0, 0]);
        assert_eq!(policy(8, 0).hosts(&site, &held, &with_ways)[0], [0, 0, 0]);
        // Reading and writing four sequences' tokens and results takes longer than 6 bytes that two sequences save.
        let at = |memory| {
            let copies = RowCopies { result: 10, token: 20, moving: 5 };
            let rates = Some(Rates { flops: f64::INFINITY, bandwidth: 1.0, latency: 0.0, memory });
            SequenceRows { prices: RowPrices { copies, ..prices }, rates, ..rows.clone() }
        };
        let copied = (6 * (8 * 10 + 4 * 20)) as f64 / 2.0;
        assert_eq!(at(1.0).speeds(at(1.0).rates.unwrap()).besides, copied);
        assert_eq!(
            [1e9, 1.0].map(|memory| policy(8, 0).hosts(&site, &held, &at(memory))[0].clone()),
            [[1, 1, 0], [0, 0, 0]]
        );
        let few = Migrating { candidates: Some(1), ..policy(8, 0) };
        assert_eq!([few, policy(8, 0)].map(|policy| policy.terms(2, &rows).candidates), [1, 2]);
        // In a stack that another follows the way home is paid, too.
        assert_eq!(hosts(policy(8, 1)), [0, 0, 0]);
        assert_eq!(hosts(policy(1, 1)), [0, 0, 0]);
    }
}
