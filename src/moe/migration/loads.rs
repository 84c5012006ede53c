//! What the hosts send, get and compute under an assignment of sequences, and how long that takes.

use std::cell::Cell;

use super::{AssignmentTerms, MigrationUnit, SequenceLengths};

/// What one host has under an assignment.
#[derive(Clone, Debug, Default)]
struct HostLoad {
    lengths: SequenceLengths,
    /// Bytes that its ranks send and get on account of the layer's results.
    out: u64,
    come: u64,
    /// Seconds of what follows for these lengths, once somebody has asked: most questions are of few other hosts.
    behind: Cell<Option<f64>>,
}

/// What each host has under an assignment. A unit is added or removed in time that does not grow with their number.
pub(super) struct HostLoads<'a> {
    units: &'a [MigrationUnit],
    terms: &'a AssignmentTerms,
    of: Vec<HostLoad>,
}

impl<'a> HostLoads<'a> {
    /// With every unit where it is.
    pub(super) fn new(units: &'a [MigrationUnit], terms: &'a AssignmentTerms) -> HostLoads<'a> {
        let all_results = |host: usize| units.iter().map(|unit| unit.results[host]).sum();
        let load = |host: usize| HostLoad { out: all_results(host), ..HostLoad::default() };
        let mut loads = HostLoads { units, terms, of: (0..terms.hosts).map(load).collect() };
        (0..units.len()).for_each(|unit| loads.put(unit, units[unit].host));
        loads
    }

    /// Adds a unit, of which results are sent but do not arrive yet.
    pub(super) fn put(&mut self, unit: usize, at: usize) {
        let unit = &self.units[unit];
        self.of[at].behind.take();
        unit.lengths.iter().for_each(|length| *self.of[at].lengths.entry(*length).or_default() += 1);
        self.of[at].out -= unit.results[at];
        for (from, to, bytes) in unit.ways(at) {
            from.into_iter().for_each(|from| self.of[from].out += bytes);
            to.into_iter().for_each(|to| self.of[to].come += bytes);
        }
    }

    /// Removes a unit that [`HostLoads::put`] has added.
    pub(super) fn take(&mut self, unit: usize, at: usize) {
        let unit = &self.units[unit];
        self.of[at].behind.take();
        for length in &unit.lengths {
            let sequences = self.of[at].lengths.get_mut(length).expect("a unit that is here");
            *sequences -= 1;
            if *sequences == 0 {
                self.of[at].lengths.remove(length);
            }
        }
        self.of[at].out += unit.results[at];
        for (from, to, bytes) in unit.ways(at) {
            from.into_iter().for_each(|from| self.of[from].out -= bytes);
            to.into_iter().for_each(|to| self.of[to].come -= bytes);
        }
    }

    /// Whether a host has no more than this.
    pub(super) fn is_within(&self, host: usize, (sequences, tokens): (usize, u64)) -> bool {
        let lengths = &self.of[host].lengths;
        lengths.values().sum::<u64>() <= sequences as u64 && self.terms.attention.tokens(lengths) <= tokens
    }

    /// Sequences of a host.
    pub(super) fn sequences(&self, host: usize) -> u64 {
        self.of[host].lengths.values().sum()
    }

    /// Seconds of the fullest link, and of the host that takes longest for what follows. 0 without speeds. `ways` are
    /// bytes that each host sends besides.
    pub(super) fn seconds(&self, ways: &[u64]) -> f64 {
        let AssignmentTerms { attention, following, speeds: Some(speeds), exchanged, .. } = self.terms else {
            return 0.0;
        };
        let slowest = |of: &dyn Fn(usize) -> f64| (0..self.of.len()).map(of).fold(0.0, f64::max);
        let link = |host: usize| {
            let &HostLoad { out, come, .. } = &self.of[host];
            speeds.of_bytes((out + ways.get(host).unwrap_or(&0)).max(come) as f64)
        };
        let behind = |host: usize| {
            let HostLoad { lengths, behind, .. } = &self.of[host];
            let seconds = behind.get().unwrap_or_else(|| {
                let bytes = u128::from(*exchanged) * u128::from(attention.tokens(lengths));
                speeds.of_work(attention.work(lengths, following) as f64) + speeds.of_bytes(bytes as f64)
            });
            behind.set(Some(seconds));
            seconds
        };
        slowest(&link) + slowest(&behind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::migration::{AttentionCost, FollowingWork, MigrationSpeeds};

    /// By hand: three units of hosts 0, 1 and 2, all at host 1.
    #[test]
    fn seconds_are_those_of_the_fullest_link_and_the_slowest_host() {
        let of = |host, home, results: [u64; 3], [others, moving, returning]: [u64; 3]| MigrationUnit {
            host,
            home,
            lengths: vec![4],
            results: results.to_vec(),
            others,
            moving,
            returning,
            copied: 0,
        };
        let units = [
            of(0, Some(0), [1, 2, 3], [4, 5, 0]),
            of(1, Some(0), [7, 1, 2], [0, 3, 6]),
            of(2, None, [1, 1, 9], [1, 2, 8]),
        ];
        let terms = AssignmentTerms {
            hosts: 3,
            candidates: 3,
            slack: 3.0,
            attention: AttentionCost::Spans,
            following: FollowingWork { per_token: 48, per_pair: 8, exchanges: true },
            exchanged: 10,
            ways: Vec::new(),
            speeds: Some(MigrationSpeeds { flops: 7.5, bandwidth: 1.0, memory: 0.5, besides: 0.0 }),
        };
        let mut loads = HostLoads::new(&units, &terms);
        let before = loads.seconds(&[]);
        for (unit, MigrationUnit { host, .. }) in units.iter().enumerate() {
            loads.take(unit, *host);
            loads.put(unit, 1);
        }
        // Host 1 gets 1 + 3 + 4 and 5, 7 + 2, 1 + 9 + 1 and 2 bytes: 35. It sends 2 units' way back, 6 and 8, and no
        // results. Host 2 sends 3 + 2 + 9, and 2 for the unit that leaves. Of 12 tokens, each has 10 bytes and 48 + 4 * 8
        // multiply-adds of a second each.
        let behind = 12.0 * (10.0 + 80.0);
        assert_eq!(loads.seconds(&[]), 35.0 + behind);
        assert_eq!(loads.seconds(&[0, 0, 25]), 16.0 + 25.0 + behind);
        assert!(loads.is_within(1, (3, 12)) && !loads.is_within(1, (2, 12)) && !loads.is_within(1, (3, 11)));
        for (unit, MigrationUnit { host, .. }) in units.iter().enumerate() {
            loads.take(unit, 1);
            loads.put(unit, *host);
        }
        assert_eq!(loads.seconds(&[]), before);
    }
}
