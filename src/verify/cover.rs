//! Covering arrays: few combinations of the values of several factors in which every two values meet.

use std::collections::{BTreeSet, HashMap};

use guildhall_tensor::{Draws, Purpose};

/// Values by factor, each as an index below the factor's size; 0 is the plain one.
pub(super) type Combination = Vec<usize>;

/// A factor and one of its values.
pub(super) type FactorValue = (usize, usize);

/// Rows in which every pair of values that can meet does, and the pairs that cannot: those for which `possible` refuses
/// every row that has nothing else but a value of factor 0. The all-plain row comes first.
pub(super) fn cover(
    sizes: &[usize],
    mut possible: impl FnMut(&[usize]) -> bool,
) -> (Vec<Combination>, Vec<[FactorValue; 2]>) {
    let mut open: BTreeSet<[FactorValue; 2]> = pairs(sizes).collect();
    let mut rows = Vec::new();
    let mut apart = Vec::new();
    let mut take = |row: Combination, open: &mut BTreeSet<[FactorValue; 2]>| {
        open.retain(|pair| !has(&row, pair));
        rows.push(row);
    };
    take(vec![0; sizes.len()], &mut open);
    while let Some(pair) = open.first().copied() {
        match begin(sizes, pair, &mut possible) {
            Some((row, fixed)) => take(extend(sizes, row, fixed, &open, &mut possible), &mut open),
            None => {
                open.remove(&pair);
                apart.push(pair);
            }
        }
    }
    (rows, apart)
}

/// How many combinations there are.
pub(super) fn combinations(sizes: &[usize]) -> usize {
    sizes.iter().copied().fold(1, usize::saturating_mul)
}

/// Every combination, the last factor's values fastest.
pub(super) fn product(sizes: &[usize]) -> impl Iterator<Item = Combination> {
    (0..combinations(sizes)).map(|number| nth(sizes, number))
}

/// Every combination, in an order that the seed alone decides and in which all orders are as likely: the first of them are
/// a sample without replacement.
pub(super) fn shuffled(sizes: &[usize], seed: u64) -> impl Iterator<Item = Combination> {
    let (all, draws) = (combinations(sizes), Draws::new(seed, Purpose::Sample, 0, 0));
    // Swaps of a list of all numbers, of which only what was moved is written down.
    let mut moved: HashMap<usize, usize> = HashMap::new();
    (0..all).map(move |place| {
        let bits = |half: u64| u128::from(draws.bits(2 * place as u64 + half));
        let rest = (all - place) as u128;
        let other = place + (((bits(0) << 32 | bits(1)) * rest) >> 64) as usize;
        let here = moved.remove(&place).unwrap_or(place);
        let drawn = if other == place { here } else { moved.insert(other, here).unwrap_or(other) };
        nth(sizes, drawn)
    })
}

/// The combination of a number, whose digits its values are.
fn nth(sizes: &[usize], number: usize) -> Combination {
    let mut rest = number;
    let mut row: Combination = sizes.iter().rev().map(|&size| (rest % size, rest /= size).0).collect();
    row.reverse();
    row
}

fn pairs(sizes: &[usize]) -> impl Iterator<Item = [FactorValue; 2]> {
    let values = |factor: usize| (0..sizes[factor]).map(move |value| (factor, value));
    let factors = (0..sizes.len()).flat_map(move |a| (a + 1..sizes.len()).map(move |b| (a, b)));
    factors.flat_map(move |(a, b)| values(a).flat_map(move |one| values(b).map(move |other| [one, other])))
}

fn has(row: &[usize], pair: &[FactorValue; 2]) -> bool {
    pair.iter().all(|&(factor, value)| row[factor] == value)
}

/// A possible row with the pair and, if need be, a value of factor 0; and which factors are now fixed.
fn begin(
    sizes: &[usize],
    pair: [FactorValue; 2],
    possible: &mut impl FnMut(&[usize]) -> bool,
) -> Option<(Combination, BTreeSet<usize>)> {
    let mut fixed: BTreeSet<usize> = pair.iter().map(|&(factor, _)| factor).collect();
    let mut row = vec![0; sizes.len()];
    pair.iter().for_each(|&(factor, value)| row[factor] = value);
    if fixed.insert(0) {
        // The last values are the largest meshes, where most things are possible.
        row[0] = (0..sizes[0]).rev().find(|&first| {
            row[0] = first;
            possible(&row)
        })?;
    } else if !possible(&row) {
        return None;
    }
    Some((row, fixed))
}

/// Gives every free factor the value with which the row has most open pairs and is possible.
fn extend(
    sizes: &[usize],
    mut row: Combination,
    mut fixed: BTreeSet<usize>,
    open: &BTreeSet<[FactorValue; 2]>,
    possible: &mut impl FnMut(&[usize]) -> bool,
) -> Combination {
    for factor in 0..sizes.len() {
        if fixed.contains(&factor) {
            continue;
        }
        let gain = |value: usize| {
            let with = |other: &usize| [(*other, row[*other]), (factor, value)];
            let met = |mut pair: [FactorValue; 2]| {
                pair.sort_unstable();
                open.contains(&pair)
            };
            fixed.iter().map(with).filter(|&pair| met(pair)).count()
        };
        let mut values: Vec<usize> = (0..sizes[factor]).collect();
        values.sort_by_key(|&value| std::cmp::Reverse(gain(value)));
        let plain = row[factor];
        let fits = values.into_iter().find(|&value| {
            row[factor] = value;
            possible(&row)
        });
        row[factor] = fits.unwrap_or(plain);
        fixed.insert(factor);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs, counted by brute force.
    fn missing(rows: &[Combination], sizes: &[usize], apart: &[[FactorValue; 2]]) -> Vec<[FactorValue; 2]> {
        let meet = |row: &Combination, [(a, x), (b, y)]: [FactorValue; 2]| row[a] == x && row[b] == y;
        pairs(sizes).filter(|pair| !apart.contains(pair) && !rows.iter().any(|row| meet(row, *pair))).collect()
    }

    #[test]
    fn every_two_values_meet_in_few_rows() {
        for (sizes, most) in
            [(vec![3, 2], 6), (vec![6, 3, 3, 2, 2, 2, 2], 24), (vec![20, 2, 2, 2, 3, 2, 2, 2, 2, 2], 66)]
        {
            let (rows, apart) = cover(&sizes, |_| true);
            assert!(missing(&rows, &sizes, &apart).is_empty() && apart.is_empty(), "{sizes:?}");
            assert!(rows.len() <= most, "{} rows for {sizes:?}", rows.len());
            assert_eq!(rows[0], vec![0; sizes.len()]);
        }
    }

    /// The third factor needs a large value of the first, and never meets the second's last.
    #[test]
    fn what_cannot_meet_is_told_and_all_else_meets() {
        let sizes = [4, 3, 2, 2];
        let possible = |row: &[usize]| row[2] == 0 || (row[0] >= 2 && row[1] < 2);
        let (rows, apart) = cover(&sizes, possible);
        assert!(rows.iter().all(|row| possible(row)));
        assert!(missing(&rows, &sizes, &apart).is_empty());
        assert_eq!(apart, [[(0, 0), (2, 1)], [(0, 1), (2, 1)], [(1, 2), (2, 1)]]);
    }

    #[test]
    fn the_product_has_every_row_once() {
        let rows: Vec<Combination> = product(&[2, 3]).collect();
        assert_eq!(rows, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
    }

    #[test]
    fn a_shuffle_has_every_row_once_and_hangs_on_its_seed() {
        let sizes = [3, 2, 4];
        let of = |seed: u64| shuffled(&sizes, seed).collect::<Vec<Combination>>();
        let all: BTreeSet<Combination> = product(&sizes).collect();
        for seed in 0..20 {
            let rows = of(seed);
            assert_eq!(
                (rows.len(), rows.iter().cloned().collect::<BTreeSet<Combination>>()),
                (24, all.clone()),
                "{seed}"
            );
            assert_eq!(rows, of(seed));
        }
        assert_ne!(of(1), of(2));
        // Each row comes first as often as others: 2400 seeds, of each 100 expected, and six standard errors.
        let mut first: HashMap<Combination, u32> = HashMap::new();
        (0..2400).for_each(|seed| *first.entry(of(seed)[0].clone()).or_default() += 1);
        assert!(first.len() == 24 && first.values().all(|n| (40..160).contains(n)), "{first:?}");
    }

    #[test]
    fn a_sample_of_more_than_can_be_listed_is_drawn() {
        let sizes = [1000; 6];
        let drawn: BTreeSet<Combination> = shuffled(&sizes, 7).take(1000).collect();
        assert_eq!(drawn.len(), 1000);
        assert!(drawn.iter().any(|row| row[0] > 900) && drawn.iter().any(|row| row[0] < 100));
    }
}
