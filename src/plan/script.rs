//! What is decided without data when a step is walked, and what a rank is told by others that are not there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use guildhall_comm::sizes::GroupView;
use guildhall_comm::{Operation, Payload};

use super::layout::{CondensedRows, Hot, Layout, Load, RankRows, Task};
use crate::moe::{Clusters, CountedRoutes, Error, Homes, Routing, Script, Shadowing, Site};
use crate::parallel::collectives::RowCounts;
use crate::parallel::{Axis, Exchange, ExpertTable, Rows, share};

/// Routes that spread as a load says, as one rank of a task sees them.
#[derive(Debug)]
pub(super) struct Loads {
    task: Task,
    rank: usize,
    pub(super) load: Load,
    /// By degree and experts of a layer, who holds which expert, and this rank's place in its expert group.
    groups: Vec<([usize; 2], ExpertTable, usize)>,
    /// The layer whose experts are asked for.
    now: Mutex<Now>,
}

#[derive(Clone, Debug, Default)]
struct Now {
    layer: usize,
    /// What this rank has for them.
    rows: usize,
    /// Its experts that visit every rank.
    shadowed: Vec<usize>,
}

impl Loads {
    pub(super) fn new(task: &Task, rank: usize, load: &Load) -> Loads {
        let Layout { mesh, degrees, .. } = &task.layout;
        let kinds = task.sizes.moe.as_ref().map_or_else(Vec::new, |moe| degrees.pairs(&moe.experts));
        let group = |(degree, experts): (usize, usize)| {
            let table = task.layout.expert_table(experts, degree);
            ([degree, experts], table, mesh.place(Axis::Expert(degree), rank).index)
        };
        let groups = kinds.into_iter().map(group).collect();
        Loads { task: task.clone(), rank, load: load.clone(), groups, now: Mutex::default() }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who holds which expert of a layer, and this rank's place in its expert group.
    fn group(&self, layer: usize) -> (&ExpertTable, usize) {
        let kind = [self.task.degree(layer), self.task.experts(layer)];
        let (_, table, index) = self.groups.iter().find(|group| group.0 == kind).expect("a layer of the task");
        (table, *index)
    }

    /// Rows that this rank computes of a layer, over an even share.
    fn imbalance(&self, layer: usize) -> f64 {
        match &self.load {
            Load::Even { imbalance } => *imbalance,
            Load::Skewed { mean, .. } => *mean,
            Load::Peaked { layer: peak, most, .. } if layer == *peak => *most,
            Load::Peaked { others, .. } => *others,
            Load::Zipf { .. } | Load::Counted(_) | Load::Table(_) => 1.0,
        }
    }

    /// Routes that experts chose of this rank's tokens, over an even share. They are rows that it computes only where
    /// no row travels.
    fn imbalance_of_tokens(&self, layer: usize) -> f64 {
        match self.task.layout.exchange {
            Exchange::Tokens => 1.0,
            Exchange::Experts => self.imbalance(layer),
        }
    }

    /// Rows to and from each rank of one layer as they were counted, if they were.
    fn counted(&self, layer: usize) -> Option<&RowCounts> {
        let Load::Counted(layers) = &self.load else { return None };
        Some(of_layer(layers, layer))
    }

    /// What each rank of the world has of one layer, if all were counted.
    fn of_each(&self, layer: usize) -> Option<&[RankRows]> {
        let Load::Table(layers) = &self.load else { return None };
        Some(of_layer::<Vec<RankRows>>(layers, layer))
    }

    /// The rows to each expert of a rank's tensor group, of all `rows` that were counted.
    fn rows_of(&self, rank: usize, rows: &[RankRows]) -> Vec<usize> {
        let layout = &self.task.layout;
        if let Some(condensed) = &rows[rank].condensed {
            return condensed.left.clone();
        }
        if !layout.sequence && !layout.shares_rows() {
            return rows[rank].sent.clone();
        }
        let group = layout.mesh.members(Axis::Tensor, rank);
        (0..rows[rank].sent.len()).map(|expert| group.iter().map(|&rank| rows[rank].sent[expert]).sum()).collect()
    }

    /// Of what was counted of a whole micro-batch, how much there is of one with these tokens: the last may be smaller.
    fn scaled(&self, layer: usize, rows: &[usize], tokens: usize) -> Vec<usize> {
        let held = share(self.task.micro_batch, self.task.place(Axis::Data, self.rank)).len();
        let whole = held * self.task.sizes.model.row_length_of(layer);
        rows.iter().map(|rows| rows * tokens.min(whole) / whole.max(1)).collect()
    }

    /// The routes and rows of this rank's tensor group where routes share rows.
    fn shared(&self, layer: usize) -> Option<&CondensedRows> {
        self.of_each(layer)?[self.rank].condensed.as_ref()
    }

    fn members(&self, axis: Axis, rank: usize) -> Vec<usize> {
        self.task.layout.mesh.members(axis, rank)
    }

    /// Rows of a layer that this rank sends to each expert, of `routes` that the `tokens` of its tensor group have.
    fn own_rows(&self, layer: usize, tokens: usize, routes: usize) -> Vec<usize> {
        let ((table, _), layout) = (self.group(layer), &self.task.layout);
        if let Some(rows) = self.of_each(layer) {
            return self.scaled(layer, &rows[self.rank].sent, tokens);
        }
        let mut rows = vec![0; table.experts()];
        match self.counted(layer) {
            Some(counted) => {
                for (rank, &sent) in counted.send.iter().enumerate() {
                    let held = table.of(rank);
                    let of_place = |(place, &expert): (usize, &usize)| {
                        rows[expert] = share(sent, (place, held.len())).len();
                    };
                    held.iter().enumerate().for_each(of_place);
                }
            }
            None => {
                let lane = self.task.place(Axis::Tensor, self.rank);
                let shares = layout.sequence || layout.shares_rows();
                let own = if shares { share(routes, lane).len() } else { routes };
                let experts = rows.len();
                match self.load {
                    Load::Zipf { exponent } => rows = self.by_zipf(layer, exponent, own),
                    Load::Peaked { hot: Hot::Everyones, .. } => rows = self.to_visitors(layer, own),
                    _ => rows.iter_mut().enumerate().for_each(|(expert, n)| *n = share(own, (expert, experts)).len()),
                }
            }
        }
        rows
    }

    /// The experts that visit first: those of the ranks after this one. Where it is not said how many, those of one rank.
    fn visitors(&self, layer: usize) -> Vec<usize> {
        let (table, index) = self.group(layer);
        let after = (1..=table.ranks()).map(|distance| table.of((index + distance) % table.ranks()));
        let moe = self.task.sizes.moe_of(layer).expect("a layer with experts");
        let held = |n: usize| after.clone().flatten().copied().take(n).collect();
        match moe.shadowing() {
            Shadowing::Force(n) => held(n),
            _ => held(after.clone().map(<[usize]>::len).find(|&held| held > 0).unwrap_or(0)),
        }
    }

    /// Rows to each expert of a layer where all `rows` are shared out over those that visit.
    fn to_visitors(&self, layer: usize, rows: usize) -> Vec<usize> {
        let (visitors, mut shared) = (self.visitors(layer), vec![0; self.group(layer).0.experts()]);
        for (place, &expert) in visitors.iter().enumerate() {
            shared[expert] = share(rows, (place, visitors.len())).len();
        }
        shared
    }

    /// Rows to each expert of a layer where `own` are shared out by popularity, the experts of this rank first.
    fn by_zipf(&self, layer: usize, exponent: f64, own: usize) -> Vec<usize> {
        let (table, index) = self.group(layer);
        let mut rows = vec![0; table.experts()];
        let (held, mut is_held) = (table.of(index), vec![false; rows.len()]);
        held.iter().for_each(|&expert| is_held[expert] = true);
        let order = held.iter().copied().chain((0..rows.len()).filter(|&expert| !is_held[expert]));
        let weight = |place: usize| (place as f64 + 1.0).powf(-exponent);
        let all: f64 = (0..rows.len()).map(weight).sum();
        let (mut sum, mut before) = (0.0, 0);
        for (place, expert) in order.enumerate() {
            sum += weight(place);
            let until = (own as f64 * (sum / all).min(1.0)).round() as usize;
            rows[expert] = until - before;
            before = until;
        }
        rows
    }

    /// Routes to each expert of a layer of a tensor group's tokens of which this rank sends these.
    fn of_tensor_group(&self, layer: usize, own: Vec<usize>, tokens: usize, routes: usize) -> Vec<usize> {
        let (layout, (lane, lanes)) = (&self.task.layout, self.task.place(Axis::Tensor, self.rank));
        if let Some(shared) = self.shared(layer) {
            return self.scaled(layer, &shared.routes, tokens);
        }
        if layout.sequence {
            // Of the tokens this rank has its share.
            let here = share(tokens, (lane, lanes)).len().max(1);
            return own.into_iter().map(|rows| rows * tokens / here).collect();
        }
        if !layout.shares_rows() {
            return own;
        }
        if let Some(rows) = self.of_each(layer) {
            return self.rows_of(self.rank, rows);
        }
        // Of an expert's routes it sends every so many.
        let mut rows = own.into_iter().map(|rows| rows * lanes).collect::<Vec<_>>();
        self.top_up(&mut rows, routes, (lane, lanes));
        rows
    }

    /// Makes rows add up to all routes, as far as this lane sends no more of them for it.
    fn top_up(&self, rows: &mut [usize], routes: usize, (lane, lanes): (usize, usize)) {
        let mut missing = routes as i64 - rows.iter().sum::<usize>() as i64;
        for rows in rows.iter_mut() {
            // Of none, none is taken away.
            let least = if *rows == 0 { 0 } else { lane as i64 + 1 - lanes as i64 };
            let change = missing.clamp(least, lane as i64);
            *rows = (*rows as i64 + change) as usize;
            missing -= change;
        }
    }

    /// What the ranks of an expert group tell this one of the rows that it will receive, by rank and expert; `send` is what
    /// it tells them.
    fn incoming(&self, send: &[u64], ranks: usize) -> Vec<u64> {
        let Now { layer, rows: own, shadowed, .. } = self.now().clone();
        let (table, index) = self.group(layer);
        let local = table.of(index);
        let travels = |expert: &usize| !shadowed.contains(expert);
        if let Some(rows) = self.of_each(layer) {
            return self.arriving(self.rank, rows, layer, &shadowed);
        }
        if let Load::Zipf { .. } = self.load {
            // Every rank sends here what this one keeps.
            let first: usize = (0..index).map(|rank| table.of(rank).len()).sum();
            return send[first..first + local.len()].repeat(ranks);
        }
        let reached = local.iter().filter(|expert| travels(expert)).count();
        let receive: Vec<usize> = match self.counted(layer) {
            Some(counted) => counted.receive.clone(),
            None => {
                // No more than all of the group send.
                let (times, sent) = (self.imbalance(layer).min(ranks as f64), send.iter().sum::<u64>() as f64);
                let rows = match self.load {
                    Load::Peaked { .. } if !shadowed.is_empty() => {
                        // Beside the rows that stay.
                        let stay = own as f64 - sent;
                        if reached > 0 { (own as f64 * times - stay).max(0.0) } else { 0.0 }
                    }
                    _ => sent * times * (reached * ranks) as f64 / (table.experts() - shadowed.len()).max(1) as f64,
                };
                (0..ranks).map(|rank| share(rows.ceil() as usize, (rank, ranks)).len()).collect()
            }
        };
        let of_rank = |rows: usize| {
            let mut place = 0;
            local
                .iter()
                .map(move |expert| {
                    if !travels(expert) {
                        return 0;
                    }
                    place += 1;
                    share(rows, (place - 1, reached)).len() as u64
                })
                .collect::<Vec<_>>()
        };
        receive.into_iter().flat_map(of_rank).collect()
    }

    /// Rows that come to the experts of a rank, of all `rows` that were counted, by rank and expert.
    fn arriving(&self, rank: usize, rows: &[RankRows], layer: usize, shadowed: &[usize]) -> Vec<u64> {
        let (table, index) = self.group(layer);
        let travels = |expert: usize| !shadowed.contains(&expert);
        let row = |from: usize, expert: usize| if travels(expert) { rows[from].sent[expert] as u64 } else { 0 };
        let from = |from: usize| table.of(index).iter().map(move |&expert| row(from, expert));
        self.members(Axis::Expert(self.task.degree(layer)), rank).into_iter().flat_map(from).collect()
    }

    /// What the slices of an expert tell each other where rows of all lanes were counted: those that arrive, and those that
    /// stay.
    fn of_all_lanes(&self) -> Option<Vec<u64>> {
        let Now { layer, shadowed, .. } = self.now().clone();
        let rows = self.of_each(layer)?;
        let of_slice = |rank: usize| {
            let stay = shadowed.iter().map(|&expert| rows[rank].sent[expert] as u64);
            self.arriving(rank, rows, layer, &shadowed).into_iter().chain(stay).collect::<Vec<_>>()
        };
        Some(self.members(Axis::ExpertTensor, self.rank).into_iter().flat_map(of_slice).collect())
    }

    /// Routes to every expert of each rank of the group, of which this rank has `own`: those to its own experts are more
    /// than an even share by the imbalance.
    fn of_all_ranks(&self, own: &[u64], ranks: usize) -> Vec<u64> {
        let layer = self.now().layer;
        if let Some(rows) = self.of_each(layer) {
            let group = self.members(Axis::Expert(self.task.degree(layer)), self.rank);
            return group.into_iter().flat_map(|rank| self.rows_of(rank, rows)).map(|rows| rows as u64).collect();
        }
        let (table, index) = self.group(layer);
        let all = own.iter().sum::<u64>();
        let other: Vec<u64> = match self.load {
            Load::Zipf { .. } | Load::Peaked { hot: Hot::None, .. } => return own.repeat(ranks),
            // Hot experts that visit leave their owner less to do than others: so they are those of others.
            Load::Peaked { .. } => self.to_visitors(layer, all as usize).into_iter().map(|rows| rows as u64).collect(),
            _ => {
                let held = table.of(index).len();
                let even = all as f64 / table.experts() as f64;
                let hot = (even * self.imbalance(layer)).min(all as f64 / held as f64);
                let cold = (all as f64 - hot * held as f64) / (table.experts() - held).max(1) as f64;
                let mut other = vec![cold.floor() as u64; table.experts()];
                table.of(index).iter().for_each(|&expert| other[expert] = hot.ceil() as u64);
                other
            }
        };
        (0..ranks).flat_map(|rank| if rank == index { own } else { &other }).copied().collect()
    }

    /// What a collective of numbers gives that are not the same on every rank.
    pub(super) fn answer(&self, group: GroupView, operation: &Operation) -> Option<Payload> {
        let is = |axis| group.name == self.task.layout.degrees.name(axis);
        let layer = self.now().layer;
        match operation {
            Operation::AllToAll { send: Payload::U64(send), .. } => {
                Some(self.incoming(send.as_slice(), group.size).into())
            }
            Operation::AllGather { send: Payload::U64(send), .. } if is(Axis::Expert(self.task.degree(layer))) => {
                Some(self.of_all_ranks(send.as_slice(), group.size).into())
            }
            Operation::AllGather { send: Payload::U64(_), .. } if is(Axis::ExpertTensor) => {
                self.of_all_lanes().map(Payload::from)
            }
            _ => None,
        }
    }
}

/// What is left of rows if a share of them is not there.
pub(super) fn left(rows: usize, share: f64) -> usize {
    rows - (rows as f64 * share) as usize
}

/// What was counted of one layer.
///
/// # Panics
/// If only other layers were.
fn of_layer<T>(layers: &[(usize, T)], layer: usize) -> &T {
    let found = layers.iter().find(|(index, _)| *index == layer);
    &found.unwrap_or_else(|| panic!("no rows were counted of layer {layer}")).1
}

impl Script for Loads {
    fn homes(&self, micro_batch: u32, seq: usize) -> Option<Homes> {
        let (rows, all) = (self.task.micro_batch, self.task.rows_per_step);
        let first = (micro_batch as usize * rows).min(all);
        let rows = (first + rows).min(all) - first;
        let ranks = self.task.layout.mesh.degree(Axis::Data);
        let token = |row: usize| ((first + row) * seq) as u64;
        let shares = (0..ranks).map(|rank| share(rows, (rank, ranks)));
        Some(Homes::new(shares.map(|own| token(own.start)..token(own.end))))
    }

    fn routing(&self, site: &Site, tokens: &Rows, slots: usize) -> Result<Routing, Error> {
        let (layer, tokens) = (site.layer as usize, tokens.len());
        let moe = self.task.sizes.moe_of(layer).expect("a layer with experts");
        // Where experts choose, as many as they take.
        let taken = moe.capacity_factor.unwrap_or(1.0);
        let routes = match moe.chosen_per_token() {
            Some(_) => ((tokens * moe.top_k) as f64 * taken * self.imbalance_of_tokens(layer)).ceil() as usize,
            None => tokens * slots,
        };
        let own = self.own_rows(layer, tokens, routes);
        *self.now() = Now { layer, rows: own.iter().sum(), shadowed: Vec::new() };
        let rows = self.of_tensor_group(layer, own, tokens, routes);
        Ok(Routing::counted(CountedRoutes { tokens, rows }, slots))
    }

    /// Where nothing is known of clusters, the layout's share of the rows is saved.
    fn condensed(&self, site: &Site, (_, routing): (&Rows, &Routing)) -> Result<Option<Clusters>, Error> {
        let (layer, Some(share)) = (site.layer as usize, self.task.condensed()) else { return Ok(None) };
        if self.of_each(layer).is_some() {
            let left = |shared: &CondensedRows| Clusters::Counted(self.scaled(layer, &shared.left, routing.tokens()));
            return Ok(self.shared(layer).map(left));
        }
        let mut now = self.now();
        now.rows = left(now.rows, share);
        Ok(Some(Clusters::Counted(routing.rows().into_iter().map(|rows| left(rows, share)).collect())))
    }

    fn compared(&self, site: &Site) -> Option<Vec<usize>> {
        Some(self.of_each(site.layer as usize)?[self.rank].compared.clone())
    }

    fn told_shadowed(&self, shadowed: &[usize]) {
        self.now().shadowed = shadowed.to_vec();
    }
}
