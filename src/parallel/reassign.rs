//! Which rank of an expert group should own which expert, by the rows that experts received: the problem of EPLB
//! (DeepSeek) without replicas. Integers alone, so that every rank finds the same table by itself.
//!
//! Every rank keeps as many experts as it has: no tensor changes its shape. What is minimised is, in this order, the
//! largest load of a rank, the largest load of a node, and the number of experts that move.
//!
//! ```text
//!  loads            9 7 1 1 | 3 2 2 1        two ranks with 18 and 8 rows
//!  reassigned       9 2 1 1 | 3 7 2 1        13 and 13: two experts change places
//! ```

use std::cmp::Reverse;

use super::ExpertTable;

/// Partial packings that a search for the best one looks at.
const VISITS_MAX: usize = 1 << 14;
/// With more loads than this nothing is searched: a greedy packing of so many is nearly even.
const SEARCHED_MAX: usize = 128;

/// The load of the rank that has most.
pub fn largest_load(loads: &[u64], table: &ExpertTable) -> u64 {
    (0..table.ranks()).map(|rank| table.of(rank).iter().map(|&expert| loads[expert]).sum()).max().unwrap_or(0)
}

/// A table with as small a largest load as is found; the smallest there is, where experts are few. Rank r of the group
/// is on node `nodes[r]`.
///
/// # Panics
/// If ranks own different numbers of experts: configuration has been checked before.
pub fn reassigned(loads: &[u64], now: &ExpertTable, nodes: &[usize]) -> ExpertTable {
    let (ranks, owners) = (now.ranks(), now.owners());
    let share = loads.len() / ranks;
    assert!((0..ranks).all(|rank| now.of(rank).len() == share), "equally many experts: {owners:?}");
    let mut exchanged = owners.clone();
    exchange(loads, &mut exchanged, ranks);
    let packed = placed(&packed(loads, &vec![share; ranks]), loads, &owners, nodes);
    let cost = |table: &Vec<usize>| {
        let of_nodes = nodes.iter().max().map_or(0, |last| last + 1);
        let of_experts: Vec<usize> = table.iter().map(|&rank| nodes[rank]).collect();
        let moved = table.iter().zip(&owners).filter(|(new, old)| new != old).count();
        (most(&sums(loads, table, ranks)), most(&sums(loads, &of_experts, of_nodes)), moved)
    };
    let best = [owners.clone(), exchanged, packed].into_iter().min_by_key(cost).expect("three tables");
    ExpertTable::new(&best, ranks)
}

fn sums(loads: &[u64], bins: &[usize], count: usize) -> Vec<u64> {
    let mut sums = vec![0; count];
    bins.iter().zip(loads).for_each(|(&bin, load)| sums[bin] += load);
    sums
}

fn most(sums: &[u64]) -> u64 {
    sums.iter().copied().max().unwrap_or(0)
}

/// A bin for each load, with `rooms[b]` loads in bin b and as small a largest bin as is found.
fn packed(loads: &[u64], rooms: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&item| (Reverse(loads[item]), item));
    let mut bins = greedy(loads, &order, rooms);
    exchange(loads, &mut bins, rooms.len());
    if loads.len() > SEARCHED_MAX {
        return bins;
    }
    let even = loads.iter().sum::<u64>().div_ceil(rooms.len().max(1) as u64);
    let mut search = PackingSearch {
        loads,
        order,
        least: even.max(most(loads)),
        rooms: rooms.to_vec(),
        sums: vec![0; rooms.len()],
        bins: bins.clone(),
        best: most(&sums(loads, &bins, rooms.len())),
        found: bins,
        visits: 0,
    };
    search.from(0);
    search.found
}

/// The largest load first, each into the emptiest bin that has room: EPLB's packing.
fn greedy(loads: &[u64], order: &[usize], rooms: &[usize]) -> Vec<usize> {
    let (mut bins, mut sums, mut rooms) = (vec![0; loads.len()], vec![0; rooms.len()], rooms.to_vec());
    for &item in order {
        let open = (0..rooms.len()).filter(|&bin| rooms[bin] > 0);
        let bin = open.min_by_key(|&bin| (sums[bin], bin)).expect("room for every load");
        (bins[item], sums[bin], rooms[bin]) = (bin, sums[bin] + loads[item], rooms[bin] - 1);
    }
    bins
}

/// Lets two loads change places, one of them of the fullest bin, as long as that makes the fuller of their two bins
/// emptier than the fullest was.
fn exchange(loads: &[u64], bins: &mut [usize], count: usize) {
    loop {
        let sums = sums(loads, bins, count);
        let full = (0..count).max_by_key(|&bin| (sums[bin], Reverse(bin))).expect("a bin");
        let here = (0..loads.len()).filter(|&item| bins[item] == full);
        let pairs = here.flat_map(|a| (0..loads.len()).map(move |b| (a, b)));
        let outcome = |(a, b): (usize, usize)| {
            let less = loads[a].checked_sub(loads[b]).filter(|&less| less > 0 && bins[b] != full)?;
            let fuller = (sums[full] - less).max(sums[bins[b]] + less);
            (fuller < sums[full]).then_some((fuller, a, b))
        };
        let Some((_, a, b)) = pairs.filter_map(outcome).min() else { return };
        bins.swap(a, b);
    }
}

/// Branch and bound over packings, the largest loads first, bins from the emptiest.
struct PackingSearch<'a> {
    loads: &'a [u64],
    order: Vec<usize>,
    /// No packing has a smaller largest bin.
    least: u64,
    rooms: Vec<usize>,
    sums: Vec<u64>,
    bins: Vec<usize>,
    best: u64,
    found: Vec<usize>,
    visits: usize,
}

impl PackingSearch<'_> {
    /// Packs what is left from the load at this place of the order on.
    fn from(&mut self, place: usize) {
        let Some(&item) = self.order.get(place) else {
            // Every bin was below the best when its last load came.
            (self.best, self.found) = (most(&self.sums), self.bins.clone());
            return;
        };
        let mut open: Vec<usize> = (0..self.rooms.len()).filter(|&bin| self.rooms[bin] > 0).collect();
        open.sort_by_key(|&bin| (self.sums[bin], self.rooms[bin], bin));
        let mut before = None;
        for bin in open {
            let alike = (self.sums[bin], self.rooms[bin]);
            self.visits += 1;
            if self.best == self.least || self.visits > VISITS_MAX || alike.0 + self.loads[item] >= self.best {
                return;
            }
            // Bins that are alike lead to packings that are alike.
            if before.replace(alike) == Some(alike) {
                continue;
            }
            self.bins[item] = bin;
            (self.sums[bin], self.rooms[bin]) = (alike.0 + self.loads[item], alike.1 - 1);
            self.from(place + 1);
            (self.sums[bin], self.rooms[bin]) = alike;
        }
    }
}

/// The rank of each expert, for packs that may be any rank's: nodes with equal loads first, then few moves. `owners`
/// are the ranks that have the experts now.
fn placed(packs: &[usize], loads: &[u64], owners: &[usize], nodes: &[usize]) -> Vec<usize> {
    let ranks = nodes.len();
    let on: Vec<Vec<usize>> = members(nodes, nodes.iter().max().map_or(0, |last| last + 1));
    let on: Vec<&Vec<usize>> = on.iter().filter(|ranks| !ranks.is_empty()).collect();
    let rooms: Vec<usize> = on.iter().map(|ranks| ranks.len()).collect();
    let sets = members(&packed(&sums(loads, packs, ranks), &rooms), on.len());
    // How many of a pack's experts a rank has already.
    let mut kept = vec![vec![0; ranks]; ranks];
    packs.iter().zip(owners).for_each(|(&pack, &owner)| kept[pack][owner] += 1);
    let kept_of_set = |set: usize, node: usize| {
        sets[set].iter().map(|&pack| on[node].iter().map(|&rank| kept[pack][rank]).sum::<usize>()).sum()
    };
    let node_of = matched(sets.len(), |set, node| (sets[set].len() == on[node].len()).then(|| kept_of_set(set, node)));
    let mut rank_of = vec![0; ranks];
    for (set, &node) in sets.iter().zip(&node_of) {
        let of = matched(set.len(), |pack, rank| Some(kept[set[pack]][on[node][rank]]));
        set.iter().zip(of).for_each(|(&pack, rank)| rank_of[pack] = on[node][rank]);
    }
    packs.iter().map(|&pack| rank_of[pack]).collect()
}

/// What is in each bin.
fn members(bins: &[usize], count: usize) -> Vec<Vec<usize>> {
    let mut members = vec![Vec::new(); count];
    bins.iter().enumerate().for_each(|(item, &bin)| members[bin].push(item));
    members
}

/// A place for each of `count` sets, where `kept` says what stays if a set takes a place, or that it does not fit; the
/// pairs that keep most come first. Sets and places that fit each other are equally many.
fn matched(count: usize, kept: impl Fn(usize, usize) -> Option<usize>) -> Vec<usize> {
    let pairs = (0..count).flat_map(|set| (0..count).map(move |place| (set, place)));
    let mut pairs: Vec<_> = pairs.filter_map(|(set, place)| Some((Reverse(kept(set, place)?), set, place))).collect();
    pairs.sort_unstable();
    let (mut place_of, mut is_taken) = (vec![None; count], vec![false; count]);
    for (_, set, place) in pairs {
        if place_of[set].is_none() && !is_taken[place] {
            (place_of[set], is_taken[place]) = (Some(place), true);
        }
    }
    place_of.into_iter().map(|place| place.expect("a place that fits")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The smallest largest load of all tables with equal shares.
    fn least(loads: &[u64], ranks: usize) -> u64 {
        fn walk(loads: &[u64], share: usize, table: &mut Vec<usize>, ranks: usize) -> u64 {
            if table.len() == loads.len() {
                return most(&sums(loads, table, ranks));
            }
            let mut best = u64::MAX;
            for rank in 0..ranks {
                if table.iter().filter(|&&owner| owner == rank).count() < share {
                    table.push(rank);
                    best = best.min(walk(loads, share, table, ranks));
                    table.pop();
                }
            }
            best
        }
        walk(loads, loads.len() / ranks, &mut Vec::new(), ranks)
    }

    fn moved(a: &ExpertTable, b: &ExpertTable) -> usize {
        a.owners().iter().zip(b.owners()).filter(|(a, b)| *a != b).count()
    }

    #[test]
    fn the_example_of_the_head() {
        let loads = [9, 7, 1, 1, 3, 2, 2, 1];
        let now = ExpertTable::even(8, 2);
        let table = reassigned(&loads, &now, &[0, 0]);
        assert_eq!((largest_load(&loads, &now), largest_load(&loads, &table), moved(&now, &table)), (18, 13, 2));
        assert_eq!(reassigned(&loads, &table, &[0, 0]), table, "what is best stays");
    }

    /// Loads of which the heavy ones can share a rank, but not a node: two ranks are one node.
    #[test]
    fn nodes_share_the_load_too() {
        let (loads, nodes) = ([8, 8, 1, 1], [0, 0, 1, 1]);
        let now = ExpertTable::new(&[0, 1, 2, 3], 4);
        let table = reassigned(&loads, &now, &nodes);
        assert_eq!(largest_load(&loads, &table), 8);
        let of_nodes: BTreeSet<usize> = [0, 1].map(|hot| nodes[table.owners()[hot]]).into();
        assert_eq!(of_nodes.len(), 2, "{table:?}");
        assert_eq!(moved(&now, &table), 2, "{table:?}");
    }

    /// A greedy packing has 6 + 3 + 2 = 11 on one rank; 6 + 2 + 2 and 4 + 3 + 3 are even.
    #[test]
    fn better_than_greedy() {
        let loads = [6, 4, 3, 3, 2, 2];
        let table = reassigned(&loads, &ExpertTable::even(6, 2), &[0, 0]);
        assert_eq!(largest_load(&loads, &table), 10);
    }

    /// Many experts of a Zipf-like load: near the even share, in little time.
    #[test]
    fn many_experts_are_nearly_even() {
        let loads: Vec<u64> = (0..1024u64).map(|expert| 1_000_000 / (64 + expert)).collect();
        let now = ExpertTable::even(1024, 64);
        let table = reassigned(&loads, &now, &(0..64).map(|rank| rank / 8).collect::<Vec<_>>());
        let even = loads.iter().sum::<u64>().div_ceil(64);
        let largest = largest_load(&loads, &table);
        assert!(largest <= even + even / 100, "{largest} of {even}");
    }

    proptest! {
        #[test]
        fn few_experts_are_as_even_as_they_can_be(
            (ranks, loads, owners) in (2usize..=4, 1usize..=4).prop_flat_map(|(ranks, share)| {
                let experts = ranks * share.min(8 / ranks);
                let owners = (0..experts).map(|expert| expert % ranks).collect::<Vec<usize>>();
                (Just(ranks), prop::collection::vec(0u64..40, experts), Just(owners).prop_shuffle())
            }),
            per_node in 1usize..=4,
        ) {
            let (now, nodes) = (ExpertTable::new(&owners, ranks), (0..ranks).map(|rank| rank / per_node).collect::<Vec<_>>());
            let table = reassigned(&loads, &now, &nodes);
            prop_assert_eq!(largest_load(&loads, &table), least(&loads, ranks));
            prop_assert!((0..ranks).all(|rank| table.of(rank).len() == loads.len() / ranks));
            prop_assert_eq!(&reassigned(&loads, &now, &nodes), &table);
        }
    }
}
