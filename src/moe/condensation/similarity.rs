//! Similarities of the tokens that one group sends to one expert: one matrix product a set.

use std::ops::Range;
use std::rc::Rc;

use guildhall_tensor::{Index, Tape, Tensor};
use serde::{Deserialize, Serialize};

use crate::moe::Routing;

/// Layers for which a pair that was not compared again keeps what history says of it.
const HISTORY_LAYERS: u8 = 2;

/// Bins of the histogram of similarities, which cover -1 to 1 evenly.
pub const BINS: usize = 20;

/// Routes of one group of tokens to one expert, in the order of their tokens, and their similarities.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComparedRoutes {
    pub routes: Vec<u32>,
    /// `[n, n]`: the cosine of routes i and j is at `i * n + j` with i above j; what is above the diagonal is not read.
    values: Vec<f32>,
    /// `[n, n]` likewise: layers since the pair was compared. Empty without a history.
    ages: Vec<u8>,
}

impl ComparedRoutes {
    /// A set of known similarities.
    pub fn known(routes: Vec<u32>, values: Vec<f32>) -> ComparedRoutes {
        assert_eq!(values.len(), routes.len() * routes.len(), "a similarity for each pair");
        ComparedRoutes { routes, values, ages: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.routes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// The cosine of the rows of its routes i and j, by place.
    pub fn similarity(&self, i: usize, j: usize) -> f32 {
        self.values[self.place(i, j)]
    }

    /// The same with other numbers for its routes.
    pub fn renumbered(&self, number: impl Fn(u32) -> u32) -> ComparedRoutes {
        ComparedRoutes { routes: self.routes.iter().map(|&route| number(route)).collect(), ..self.clone() }
    }

    /// The largest difference of a pair's similarity in two sets, of the pairs that both compared in this layer; infinity
    /// for sets of other routes.
    pub fn apart(&self, other: &ComparedRoutes) -> f64 {
        if self.routes != other.routes {
            return f64::INFINITY;
        }
        let is_new = |set: &ComparedRoutes, pair: usize| set.ages.get(pair).is_none_or(|&age| age == 0);
        let pairs = (0..self.len()).flat_map(|i| (0..i).map(move |j| self.place(i, j)));
        let compared = pairs.filter(|&pair| is_new(self, pair) && is_new(other, pair));
        let difference = |pair: usize| (f64::from(self.values[pair]) - f64::from(other.values[pair])).abs();
        // In a total order NaN is farther than anything.
        compared.map(difference).max_by(f64::total_cmp).unwrap_or(0.0)
    }

    /// Where the pair of its routes i and j stands in the tables.
    fn place(&self, i: usize, j: usize) -> usize {
        i.max(j) * self.len() + i.min(j)
    }
}

/// Pairs by their similarity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Compared pairs by cosine, from -1 to 1.
    pub compared: [u64; BINS],
    /// Pairs that history decided.
    pub remembered: u64,
}

impl Pairs {
    fn count(&mut self, cosine: f32) {
        let bin = ((f64::from(cosine) + 1.0) / 2.0 * BINS as f64) as usize;
        self.compared[bin.min(BINS - 1)] += 1;
    }

    fn count_all(&mut self, set: &ComparedRoutes) {
        let pairs = (0..set.len()).flat_map(|i| (0..i).map(move |j| set.place(i, j)));
        for pair in pairs {
            match set.ages.get(pair).is_some_and(|&age| age > 0) {
                true => self.remembered += 1,
                false => self.count(set.values[pair]),
            }
        }
    }
}

/// The similarities in one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Similarities {
    /// Nothing where they were forgotten.
    pub compared: Vec<Rc<ComparedRoutes>>,
    pub pairs: Pairs,
    /// For each route, its set and its place in it; `u32::MAX` without one. Empty without a history.
    places: Vec<[u32; 2]>,
    /// Routes of each token.
    slots: usize,
}

/// The tokens with these numbers in the step, cut into groups of `size` consecutive numbers, as ranges of their indices.
pub fn condense_groups(numbers: &[Range<u64>], size: usize) -> Vec<Range<usize>> {
    let (mut groups, mut start, mut last): (Vec<Range<usize>>, _, _) = (Vec::new(), 0, None);
    for run in numbers {
        let mut at = run.start;
        while at < run.end {
            let group = at / size as u64;
            let end = run.end.min((group + 1) * size as u64);
            let here = start..start + (end - at) as usize;
            match groups.last_mut().filter(|_| last == Some(group)) {
                Some(open) => open.end = here.end,
                None => groups.push(here.clone()),
            }
            (start, at, last) = (here.end, end, Some(group));
        }
    }
    groups
}

/// How many routes each set has that is compared of a routing of which only numbers are known: every group has its share.
pub(super) fn counted_together(routing: &Routing, groups: &[Range<usize>], most: usize) -> Vec<usize> {
    let of_group = |group: &Range<usize>| routing.of_tokens(group.clone()).rows();
    let parts = |rows: usize| (0..rows).step_by(most).map(move |first| (rows - first).min(most));
    groups.iter().flat_map(of_group).flat_map(parts).filter(|&routes| routes > 1).collect()
}

/// What comparing sets of so many rows of x costs, of which nothing is known.
pub(super) fn rehearse(x: &Tensor, together: &[usize]) {
    let x = x.to_f32();
    for &routes in together {
        products(&x, Index::Counted(routes));
    }
}

/// The routes that are compared: of each group and expert, in parts of at most `most`. A route that is compared with
/// none is in no set.
pub(super) fn routes_together(routing: &Routing, groups: &[Range<usize>], most: usize) -> Vec<Vec<u32>> {
    let mut together = Vec::new();
    for group in groups {
        let mut of_expert = vec![Vec::new(); routing.experts];
        for route in group.start * routing.k..group.end * routing.k {
            let expert = routing.expert[route];
            if expert != Routing::DROPPED {
                of_expert[expert as usize].push(route as u32);
            }
        }
        let parts = of_expert.iter().flat_map(|routes| routes.chunks(most));
        together.extend(parts.filter(|routes| routes.len() > 1).map(<[u32]>::to_vec));
    }
    together
}

/// Bytes of the tables of sets of so many routes.
pub(super) fn table_bytes(together: impl Iterator<Item = usize>) -> u64 {
    let of_pair = size_of::<f32>() + size_of::<u8>();
    together.map(|routes| (routes * routes * of_pair) as u64).sum()
}

impl Similarities {
    /// Compares the routes of x `[T, D]` that stand together. Pairs that the layer before compared are decided by `history`,
    /// if there is one: its similarities, and the bounds `[S1, S2]`. `each` sees one set after the other, and says whether
    /// its table is kept.
    pub(super) fn new(
        x: &Tensor,
        routing: &Routing,
        together: Vec<Vec<u32>>,
        history: Option<(Option<&Similarities>, [f64; 2])>,
        mut each: impl FnMut(&ComparedRoutes) -> bool,
    ) -> Similarities {
        let x = x.to_f32();
        let mut similarities = Similarities { slots: routing.k, ..Similarities::default() };
        for routes in together {
            let tokens: Vec<u32> = routes.iter().map(|route| route / routing.k as u32).collect();
            let set = match history {
                None => ComparedRoutes::known(routes, cosines(&x, &tokens)),
                Some((before, bounds)) => remembering(&x, routes, &tokens, before.map(|before| (before, bounds))),
            };
            similarities.pairs.count_all(&set);
            if each(&set) {
                similarities.compared.push(Rc::new(set));
            }
        }
        if history.is_some() {
            similarities.index(routing.expert.len());
        }
        similarities
    }

    fn index(&mut self, routes: usize) {
        self.places = vec![[u32::MAX; 2]; routes];
        for (number, set) in self.compared.iter().enumerate() {
            for (place, &route) in set.routes.iter().enumerate() {
                self.places[route as usize] = [number as u32, place as u32];
            }
        }
    }

    /// Of two tokens, their similarity and its age, if they met in a set.
    fn of_tokens(&self, a: u32, b: u32) -> Option<(f32, u8)> {
        let of = |token: u32| &self.places[token as usize * self.slots..][..self.slots];
        let met = |[set, i]: &[u32; 2]| {
            let [_, j] = of(b).iter().find(|[other, _]| other == set && *set != u32::MAX)?;
            let set = &self.compared[*set as usize];
            let place = set.place(*i as usize, *j as usize);
            Some((set.values[place], set.ages[place]))
        };
        of(a).iter().find_map(met)
    }
}

/// The cosines of some rows of x, `[n, n]`. The product is the same whatever rank computes it: it has no other rows.
fn cosines(x: &Tensor, tokens: &[u32]) -> Vec<f32> {
    let n = tokens.len();
    let mut products = products(x, tokens.into());
    // The diagonal has the squared norms. A row of zeros is similar to none.
    let scale: Vec<f32> =
        (0..n).map(|i| products[i * n + i]).map(|s| if s > 0.0 { s.sqrt().recip() } else { 0.0 }).collect();
    for (at, product) in products.iter_mut().enumerate() {
        *product *= scale[at / n] * scale[at % n];
    }
    products
}

/// The products of some rows of x with each other, `[n, n]`.
fn products(x: &Tensor, tokens: Index) -> Vec<f32> {
    let tape = Tape::inference(x.device());
    let rows = tape.constant(x.gathered_rows(tokens));
    rows.linear(&rows, None).value().to_vec()
}

/// A set in which pairs that history decides are not compared: rows without an undecided pair stay out of the product.
fn remembering(
    x: &Tensor,
    routes: Vec<u32>,
    tokens: &[u32],
    before: Option<(&Similarities, [f64; 2])>,
) -> ComparedRoutes {
    let n = routes.len();
    let (mut values, mut ages, mut open) = (vec![0.0; n * n], vec![0; n * n], vec![before.is_none(); n]);
    if let Some((before, [same, different])) = before {
        for (i, j) in (0..n).flat_map(|i| (0..i).map(move |j| (i, j))) {
            let known = before.of_tokens(tokens[i], tokens[j]).filter(|(_, age)| *age < HISTORY_LAYERS);
            let decided = known.and_then(|(value, age)| match f64::from(value) {
                value if value > same => Some((1.0, age + 1)),
                value if value < different => Some((0.0, age + 1)),
                _ => None,
            });
            match decided {
                Some((value, age)) => (values[i * n + j], ages[i * n + j]) = (value, age),
                None => (open[i], open[j]) = (true, true),
            }
        }
    }
    let compared: Vec<usize> = (0..n).filter(|&i| open[i]).collect();
    if !compared.is_empty() {
        let cosines = cosines(x, &compared.iter().map(|&i| tokens[i]).collect::<Vec<_>>());
        for (a, &i) in compared.iter().enumerate() {
            for (b, &j) in compared[..a].iter().enumerate().filter(|(_, j)| ages[i * n + **j] == 0) {
                values[i * n + j] = cosines[a * compared.len() + b];
            }
        }
    }
    ComparedRoutes { routes, values, ages }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guildhall_tensor::Device;

    /// Those of all routes, kept.
    fn all_of(
        x: &Tensor,
        routing: &Routing,
        groups: &[Range<usize>],
        most: usize,
        history: Option<(Option<&Similarities>, [f64; 2])>,
    ) -> Similarities {
        Similarities::new(x, routing, routes_together(routing, groups, most), history, |_| true)
    }

    fn one_group(tokens: usize) -> Vec<Range<usize>> {
        std::iter::once(0..tokens).collect()
    }

    #[test]
    fn groups_are_of_consecutive_numbers() {
        // Sequences 0 and 1 are of one group, 2 of the next; sequence 7 of another.
        let runs = [0..12, 28..32];
        assert_eq!(condense_groups(&runs, 8), [0..8, 8..12, 12..16]);
        assert_eq!(condense_groups(&[0..4, 4..8], 8), one_group(8));
        assert_eq!(condense_groups(&[0..4, 8..12], 2), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(condense_groups(&[], 8), Vec::<Range<usize>>::new());
    }

    fn x(rows: &[[f32; 2]]) -> Tensor {
        Tensor::from_slice(&Device::new(1), &[rows.len(), 2], &rows.concat())
    }

    /// Brute force in f64 over random rows, two groups and two routes a token.
    #[test]
    fn similarities_are_cosines_within_group_and_expert() {
        let value = |i: usize| ((i * 37 + 11) % 23) as f32 - 11.0;
        let rows: Vec<[f32; 2]> = (0..10).map(|t| [value(2 * t), value(2 * t + 1)]).collect();
        let chosen: Vec<u32> = (0..10).flat_map(|t| [t % 3, 3 + t % 2]).collect();
        let mut routing = Routing::new(chosen, 2, 5);
        routing.expert[4] = Routing::DROPPED;
        let found = all_of(&x(&rows), &routing, &[0..6, 6..10], 100, None);
        let mut pairs = 0;
        for set in &found.compared {
            for (i, j) in (0..set.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let [a, b] = [i, j].map(|i| rows[set.routes[i] as usize / 2].map(f64::from));
                let dot = |a: [f64; 2], b: [f64; 2]| a[0] * b[0] + a[1] * b[1];
                let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
                assert!((f64::from(set.similarity(i, j)) - cosine).abs() < 1e-6);
                let [r, s] = [i, j].map(|i| set.routes[i] as usize);
                assert_eq!((routing.expert[r], r / 12), (routing.expert[s], s / 12), "one expert, one group");
                pairs += 1;
            }
        }
        let all = (0..20).flat_map(|r| (0..r).map(move |s| (r, s)));
        let together = |&(r, s): &(usize, usize)| {
            routing.expert[r] == routing.expert[s] && routing.expert[r] != Routing::DROPPED && r / 12 == s / 12
        };
        assert_eq!(pairs, all.filter(together).count());
        assert_eq!(found.pairs.compared.iter().sum::<u64>() as usize, pairs);
    }

    #[test]
    fn no_more_are_compared_than_it_may() {
        let routing = Routing::new(vec![0; 7], 1, 1);
        let rows = [[1.0, 0.0]; 7];
        let found = all_of(&x(&rows), &routing, &one_group(7), 3, None);
        assert_eq!(found.compared.iter().map(|set| set.len()).collect::<Vec<_>>(), [3, 3], "one is left alone");
        let zeros = all_of(&x(&[[0.0; 2]; 2]), &Routing::new(vec![0; 2], 1, 1), &one_group(2), 9, None);
        assert_eq!(zeros.compared[0].similarity(0, 1), 0.0);
    }

    /// Tokens 0 and 1 were equal, 0 and 2 opposite, 1 and 3 in between; all look otherwise now. What was clear is kept
    /// for two layers, then compared again.
    #[test]
    fn history_decides_clear_pairs_for_two_layers() {
        let together = Routing::new(vec![0; 4], 1, 1);
        let bounds = [0.8, 0.2];
        let first = all_of(
            &x(&[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]]),
            &together,
            &one_group(4),
            9,
            Some((None, bounds)),
        );
        assert_eq!((first.pairs.remembered, first.compared[0].similarity(0, 2)), (0, -1.0));
        let now = x(&[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]);
        let next = |before: &Similarities| all_of(&now, &together, &one_group(4), 9, Some((Some(before), bounds)));
        let second = next(&first);
        let of = |similarities: &Similarities, i, j| similarities.compared[0].similarity(i, j);
        // 0.6 was in between: compared anew.
        assert_eq!([of(&second, 0, 1), of(&second, 0, 2), of(&second, 0, 3)], [1.0, 0.0, 1.0]);
        // 0-1, 0-2, 1-2 and, with a cosine of -0.6, 2-3.
        assert_eq!(second.pairs.remembered, 4);
        // Of the pairs that both compared: 0.6 and 1, 0.6 and 0.
        assert!((first.compared[0].apart(&second.compared[0]) - 0.6).abs() < 1e-6);
        let third = next(&second);
        assert_eq!([of(&third, 0, 1), of(&third, 0, 2)], [1.0, 0.0]);
        let fourth = next(&third);
        assert_eq!([of(&fourth, 0, 1), of(&fourth, 0, 2)], [0.0, 1.0], "compared again");
    }

    #[test]
    fn tokens_that_did_not_meet_have_no_history() {
        let bounds = [0.8, 0.2];
        let rows = x(&[[1.0, 0.0], [1.0, 0.0]]);
        let apart = all_of(&rows, &Routing::new(vec![0, 1], 1, 2), &one_group(2), 9, Some((None, bounds)));
        let met = all_of(&rows, &Routing::new(vec![0, 0], 1, 2), &one_group(2), 9, Some((Some(&apart), bounds)));
        assert_eq!((met.pairs.remembered, met.pairs.compared[BINS - 1]), (0, 1));
    }
}
