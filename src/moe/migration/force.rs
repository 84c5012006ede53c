//! Moves that are made whether they pay or not: `parallel.migrate = "force"`.

use std::collections::BTreeMap;

use super::MigrationUnit;
use super::assign::{Assignment, AssignmentTerms};

/// Of all sequences, the part that a forced migration moves at least: one in so many.
const FORCED: usize = 4;

/// [`super::paying`] without its last word, and as many more as it takes to move a quarter of all sequences, those that lose least. If every host is
/// full, two change places.
pub fn forced(units: &[MigrationUnit], terms: &AssignmentTerms) -> Vec<usize> {
    let mut assignment = Assignment::new(units, terms);
    assignment.improve();
    assignment.trade();
    let all: usize = units.iter().map(|unit| unit.lengths.len()).sum();
    let mut moves = assignment.moves();
    while terms.hosts > 1 && assignment.moved() < all.div_ceil(FORCED) {
        assignment.force(&mut moves);
    }
    assignment.of
}

impl<'a> Assignment<'a> {
    /// Sequences that are not where they were.
    fn moved(&self) -> usize {
        let away = self.units.iter().zip(&self.of).filter(|(unit, of)| unit.host != **of);
        away.map(|(unit, _)| unit.lengths.len()).sum()
    }

    /// Every move of a unit to another host, those that lose least first.
    fn moves(&self) -> Vec<(usize, usize)> {
        let to = |unit: usize| (0..self.terms.hosts).map(move |host| (unit, host));
        let all = (0..self.units.len()).flat_map(to).filter(|&(unit, host)| host != self.units[unit].host);
        let mut moves: Vec<(usize, usize)> = all.collect();
        moves.sort_by_key(|&(unit, host)| (self.loss(unit, host), unit, host));
        moves
    }

    /// Moves one more unit that has not moved, or exchanges two of them; those that lose least, of `moves` in that order.
    fn force(&mut self, moves: &mut Vec<(usize, usize)>) {
        moves.retain(|&(unit, _)| self.of[unit] == self.units[unit].host);
        if let Some(&(unit, host)) = moves.iter().find(|(unit, host)| self.has_room(*unit, *host)) {
            return self.set(unit, host);
        }
        if let Some((a, b)) = self.exchange(moves) {
            self.set(a, self.units[b].host);
            return self.set(b, self.units[a].host);
        }
        let held = |host: usize| self.loads.sequences(host);
        let last = moves.iter().min_by_key(|&&(unit, host)| (held(host), self.loss(unit, host), unit, host));
        let &(unit, host) = last.expect("fewer than a quarter have moved, and there are two hosts");
        self.set(unit, host);
    }

    /// The two units of equally many tokens that lose least if they change places: of each host those come first in `moves`
    /// that lose least at the other.
    fn exchange(&self, moves: &[(usize, usize)]) -> Option<(usize, usize)> {
        let mut first: BTreeMap<(&[u64], [usize; 2]), usize> = BTreeMap::new();
        for &(unit, host) in moves {
            let MigrationUnit { lengths, host: from, .. } = &self.units[unit];
            first.entry((lengths, [*from, host])).or_insert(unit);
        }
        let pair = |(&(lengths, [from, to]), &a): (&(&'a [u64], [usize; 2]), &usize)| {
            let b = *first.get(&(lengths, [to, from])).filter(|_| from < to)?;
            Some((self.loss(a, to) + self.loss(b, from), a.min(b), a.max(b)))
        };
        first.iter().filter_map(pair).min().map(|(_, a, b)| (a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::super::assign::tests::{TERMS, unit};
    use super::*;

    #[test]
    fn a_quarter_moves_if_forced() {
        for hosts in 2..5 {
            for per_host in 1..6 {
                for slack in [0.0, 0.25, 1.0] {
                    let of = |i: usize| {
                        unit(i / per_host, 8, &(0..hosts).map(|j| ((i + 2 * j) % 5) as u64).collect::<Vec<_>>())
                    };
                    let units: Vec<MigrationUnit> = (0..hosts * per_host).map(of).collect();
                    let to = forced(&units, &AssignmentTerms { hosts, slack, ..TERMS.clone() });
                    let moved = to.iter().zip(&units).filter(|(to, unit)| **to != unit.host).count();
                    assert!(4 * moved >= units.len(), "{moved} of {}", units.len());
                    let most = ((1.0 + slack) * per_host as f64).ceil() as usize;
                    let held = |host| to.iter().filter(|to| **to == host).count();
                    assert!((0..hosts).all(|host| held(host) <= most), "{to:?}, {most} at most");
                }
            }
        }
        // The one that loses least goes, where it loses least.
        let units = [unit(0, 8, &[0, 9, 9]), unit(0, 8, &[0, 5, 4]), unit(1, 8, &[9, 0, 9]), unit(2, 8, &[9, 9, 0])];
        assert_eq!(forced(&units, &AssignmentTerms { hosts: 3, ..TERMS.clone() }), [0, 2, 1, 2]);
        assert_eq!(forced(&units[..1], &AssignmentTerms { hosts: 1, ..TERMS.clone() }), [0], "nowhere to go");
        assert_eq!(forced(&[], &TERMS), [0usize; 0]);
    }
}
