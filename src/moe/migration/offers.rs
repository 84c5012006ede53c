//! What sequences save that give up their place for another, found without looking at all of them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::MigrationUnit;

/// The lengths of a unit's sequences, the host that it leaves and the one that it goes to.
type Way<'a> = (&'a [u64], [usize; 2]);

/// What a unit saves, and its number; of equals the first is the largest.
type Offer = (i128, Reverse<usize>);

/// What each unit saves at each other host.
pub(super) struct Offers<'a> {
    units: &'a [MigrationUnit],
    /// `prices[unit][host]`.
    prices: Rc<Vec<Vec<u64>>>,
    by_way: BTreeMap<Way<'a>, BTreeSet<Offer>>,
}

impl<'a> Offers<'a> {
    /// With unit i at host `of[i]`.
    pub(super) fn new(units: &'a [MigrationUnit], prices: Rc<Vec<Vec<u64>>>, of: &[usize]) -> Offers<'a> {
        let mut offers = Offers { units, prices, by_way: BTreeMap::new() };
        (0..units.len()).for_each(|unit| offers.put(unit, of[unit]));
        offers
    }

    /// Those of a unit.
    fn of(&self, unit: usize, from: usize) -> Vec<(Way<'a>, Offer)> {
        let (lengths, prices) = (&self.units[unit].lengths[..], &self.prices[unit]);
        let saved = |to: usize| i128::from(prices[from]) - i128::from(prices[to]);
        let others = (0..prices.len()).filter(|&to| to != from);
        others.map(|to| ((lengths, [from, to]), (saved(to), Reverse(unit)))).collect()
    }

    fn put(&mut self, unit: usize, at: usize) {
        for (way, offer) in self.of(unit, at) {
            self.by_way.entry(way).or_default().insert(offer);
        }
    }

    /// A unit goes from one host to another.
    pub(super) fn moves(&mut self, unit: usize, [from, to]: [usize; 2]) {
        for (way, offer) in self.of(unit, from) {
            self.by_way.entry(way).or_default().remove(&offer);
        }
        self.put(unit, to);
    }

    /// Of the units whose sequences are as long as those of unit `like`, what the one saves that saves most on its way from
    /// one host to another, and its number.
    pub(super) fn best(&self, like: usize, from_to: [usize; 2]) -> Option<(i128, usize)> {
        let offers = self.by_way.get(&(&self.units[like].lengths[..], from_to))?;
        offers.last().map(|&(saved, Reverse(unit))| (saved, unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guildhall_tensor::{Draws, Purpose};

    /// Against a look at every unit, while units go to and fro.
    #[test]
    fn the_best_offer_is_found_wherever_units_are() {
        let bits = |i: usize| u64::from(Draws::new(7, Purpose::Test, 0, 0).bits(i as u64));
        let unit = |i: usize| MigrationUnit { lengths: vec![8 + bits(i) % 2], ..MigrationUnit::default() };
        let units: Vec<MigrationUnit> = (0..12).map(unit).collect();
        let prices: Vec<Vec<u64>> =
            (0..12).map(|i| (0..3).map(|host| bits(100 + 3 * i + host) % 9).collect()).collect();
        let mut of: Vec<usize> = (0..12).map(|i| i % 3).collect();
        let mut offers = Offers::new(&units, Rc::new(prices.clone()), &of);
        for round in 0..40 {
            let (from, to, like) = (round % 3, (round + 1 + round / 3 % 2) % 3, bits(round) as usize % 12);
            let saved = |unit: usize| prices[unit][from] as i128 - prices[unit][to] as i128;
            let there = (0..12).filter(|&unit| of[unit] == from && units[unit].lengths == units[like].lengths);
            let wanted = there.map(|unit| (saved(unit), Reverse(unit))).max();
            assert_eq!(offers.best(like, [from, to]), wanted.map(|(saved, Reverse(unit))| (saved, unit)));
            if let Some((_, Reverse(unit))) = wanted {
                offers.moves(unit, [from, to]);
                of[unit] = to;
            }
        }
    }
}
