//! Results that carry the residual stream: if a sequence moves behind a layer, a result that is delivered to the
//! sequence's new host can bring the token's row of the residual stream along, which then need not be sent by itself
//! (the paper leaves open how it follows; spec 4.7).
//!
//! The rank that computes a result has the row that was sent to it. With norms after sub-layers that is the residual
//! stream's row; with norms before them, it is rebuilt from its normalised form and two moments ([`Var::denormalise`]).
//! Of a token's routes one *carries*: its result is returned as `w y + x`, with the route's gate weight w, and counts with
//! weight 1 at the destination. What is sent besides are w and the moments.
//!
//! A row that several routes share cannot carry, since the other routes need its result alone. The residual row of a token
//! whose routes all share rows, or are dropped, is sent by itself.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::ops::NormMoments;
use guildhall_tensor::{Dtype, Elements, Index, Indices, Tensor, Var, to_host};

use super::Delivery;
use super::plan::Plan;
use crate::parallel::collectives::{RowCounts, Underway, all_to_all_rows, start_all_to_all_rows};
use crate::parallel::operands::{all_gather, whole_to_parts};
use crate::parallel::{Migration, cut};

/// The residual stream around a layer whose output is added to it without dropout.
#[derive(Clone)]
pub struct ResidualStream {
    /// `[T, D]`, for this rank's tokens.
    pub x: Var,
    /// The norm whose output enters the layer; `None` if x itself does.
    pub norm: Option<RowNorm>,
}

/// A norm over rows.
#[derive(Clone)]
pub struct RowNorm {
    pub moments: NormMoments,
    pub eps: f32,
    /// `[D]`.
    pub weight: Var,
    pub bias: Option<Var>,
}

/// By this factor, rebuilding may enlarge the rounding of a normalised element.
const MOST_ENLARGED: f32 = 16.0;

impl RowNorm {
    /// Whether rows are rebuilt without losing digits: f32 rows, no weight small against its bias or near zero. In a
    /// simulated step, weights are taken to be near their initial values.
    fn is_invertible(&self) -> bool {
        if !self.weight.device().has_data() {
            return true;
        }
        let values: Vec<Tensor> =
            [&self.weight].into_iter().chain(&self.bias).map(|vector| vector.value().to_f32()).collect();
        let mut values = to_host(&values.iter().collect::<Vec<_>>()).into_iter().map(Elements::into_f32s);
        let weight = values.next().expect("a weight");
        let bias = values.next().unwrap_or_else(|| vec![0.0; weight.len()]);
        weight.iter().zip(bias).all(|(weight, bias)| weight.abs() * MOST_ENLARGED >= bias.abs().max(1.0))
    }
}

impl ResidualStream {
    /// Whether a row can be rebuilt where its result is computed. The same on every rank, since all have the same norm.
    pub fn can_be_rebuilt(&self) -> bool {
        self.norm.as_ref().is_none_or(|norm| self.x.dtype() == Dtype::F32 && norm.is_invertible())
    }

    /// Numbers that are sent for each row that carries: the weight of its route, and the moments.
    fn numbers(&self) -> usize {
        if self.norm.is_some() { 3 } else { 1 }
    }

    /// Bytes of these numbers.
    pub fn bytes_per_row(&self) -> u64 {
        (self.numbers() * size_of::<f32>()) as u64
    }

    /// These numbers for each token, `[T, n]`; `weights` `[T, 1]`.
    fn numbers_of(&self, weights: Var) -> Var {
        let Some(RowNorm { moments, eps, .. }) = &self.norm else { return weights };
        let (tokens, width) = (weights.rows(), self.numbers());
        let first = weights.scatter_columns(Index::Cycle(tokens, 0..1), width);
        let moments = self.x.row_moments(*moments, *eps);
        first.add(&moments.scatter_columns(Index::Cycle(2 * tokens, 1..3), width))
    }
}

/// Which results carry, from the point of view of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carrying {
    /// For each token of this rank, the slot whose result carries; `u32::MAX` for none.
    slots: Indices,
    /// The tokens of the rows that carry, of all lanes in the order of the plan, and the number of each lane's.
    tokens: Indices,
    of_lanes: Vec<usize>,
    /// Among these, those of the rows that this rank sends or keeps.
    own: Range<usize>,
    /// For each route of the tokens that come to this rank, whether its result carries.
    arrived: Vec<bool>,
    /// The residual rows that are sent by themselves.
    alone: RowsAlone,
}

/// The rows of those of a migration's tokens that nothing carries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RowsAlone {
    /// This rank's tokens whose rows are sent, sorted by destination.
    order: Indices,
    counts: RowCounts,
    /// For each token that comes, in the order of [`Migration::carry`], its row; `u32::MAX` if a result carries it.
    places: Indices,
}

/// The carrying rows of one all-to-all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CarryingRows {
    /// Their range among the carrying rows that this rank sends.
    pub(super) sent: Range<usize>,
    pub(super) counts: RowCounts,
    /// Their places among the rows that this rank receives.
    pub(super) at: Indices,
}

impl CarryingRows {
    /// With the rows that this rank sends to each rank, and those that it receives, one word a row: `carries` tells
    /// which carry. `first` counts this rank's carrying rows that are sent before.
    pub(super) fn new(
        (sent, received): (&[&[u32]], &[&[u32]]),
        first: usize,
        carries: impl Fn(u32) -> bool,
    ) -> CarryingRows {
        let count = |words: &&[u32]| words.iter().filter(|word| carries(**word)).count();
        let counts =
            RowCounts { send: sent.iter().map(count).collect(), receive: received.iter().map(count).collect() };
        let all = received.iter().flat_map(|words| words.iter());
        let at = all.enumerate().filter(|(_, word)| carries(**word)).map(|(row, _)| row as u32).collect();
        CarryingRows { sent: first..first + counts.send.iter().sum::<usize>(), counts, at: Indices::Known(at) }
    }
}

/// For each row of a plan, whether its result carries the residual row of its token. `own` is this rank of the expert
/// group; only tokens that leave it need a carrier.
pub(super) fn carrying_rows(plan: &Plan, own: usize) -> Vec<bool> {
    let homes = plan.homes.as_deref().unwrap_or_default();
    let mut carries = vec![false; plan.tokens.len()];
    let rows = carrying_row_of_tokens(plan);
    rows.iter().zip(homes).filter(|(_, home)| **home as usize != own).filter_map(|(row, _)| *row).for_each(|row| {
        carries[row] = true;
    });
    carries
}

/// For each token, the row that would carry its residual row: the first of its rows that no other route shares.
pub(super) fn carrying_row_of_tokens(plan: &Plan) -> Vec<Option<usize>> {
    let mut sharing = vec![0u32; plan.tokens.len()];
    let places = plan.places.known();
    places.iter().filter(|row| **row != u32::MAX).for_each(|&row| sharing[row as usize] += 1);
    let alone = |&&row: &&u32| row != u32::MAX && sharing[row as usize] == 1;
    places.chunks_exact(plan.slots).map(|rows| rows.iter().find(alone).map(|&row| row as usize)).collect()
}

impl Carrying {
    /// From which rows carry here, and for each route of the tokens that come whether it carries.
    pub(super) fn new(plan: &Plan, carries: &[bool], arrived: Vec<bool>, migration: &Migration) -> Carrying {
        let (places, slots) = (plan.places.known(), plan.slots);
        let route_carries = |row: &u32| *row != u32::MAX && carries[*row as usize];
        let slot = |rows: &[u32]| rows.iter().position(route_carries).map_or(u32::MAX, |slot| slot as u32);
        let slot_of: Vec<u32> = places.chunks_exact(slots).map(slot).collect();
        let tokens = plan.tokens.known().iter().zip(carries).filter(|(_, carries)| **carries).map(|(&token, _)| token);
        let (mut of_lanes, mut first) = (Vec::new(), 0);
        for rows in plan.rows_of_lanes() {
            of_lanes.push(carries[first..first + rows].iter().filter(|carries| **carries).count());
            first += rows;
        }
        let before = of_lanes[..plan.lanes.own()].iter().sum();
        let own = before..before + of_lanes[plan.lanes.own()];
        let alone = RowsAlone::new(migration, &slot_of, &arrived, slots);
        let (tokens, slots) = (Indices::Known(tokens.collect()), Indices::Known(slot_of));
        Carrying { slots, tokens, of_lanes, own, arrived, alone }
    }

    /// The weights `[T, K]` of the routes that come, with 1 where a result has been weighted already.
    pub fn weights(&self, weights: &Var) -> Var {
        let (device, shape) = (weights.device(), weights.shape().to_vec());
        let flags = |of: bool| {
            let flag = |&carries: &bool| if carries == of { 1.0 } else { 0.0 };
            Tensor::from_values(device, &shape, || self.arrived.iter().map(flag).collect())
        };
        weights.mul_constant(&flags(false)).add(&weights.tape().constant(flags(true)))
    }

    /// Adds the residual rows that are sent by themselves to the sums `y` `[T, D]` of the tokens that come, in the order of
    /// [`Migration::carry`]; x `[T, D]` has the residual stream of this rank's tokens.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn add_rows_alone(&self, x: &Var, y: &Var, group: &Arc<dyn Communicator>) -> Result<Var, Error> {
        let RowsAlone { order, counts, places } = &self.alone;
        let rows = all_to_all_rows(x.gather_rows(order), counts, group)?;
        let ones = Tensor::from_fn(x.device(), &[places.len(), 1], |_| 1.0);
        Ok(y.add(&rows.weighted_sum_rows(&x.tape().constant(ones), places)))
    }
}

impl RowsAlone {
    /// `slots` are those that carry this rank's tokens; `arrived` tells which routes of the tokens that come carry.
    fn new(migration: &Migration, slots: &[u32], arrived: &[bool], k: usize) -> RowsAlone {
        let RowCounts { send, receive } = migration.counts();
        let is_alone = |token: &&u32| slots[**token as usize] == u32::MAX;
        let leaving = cut(migration.order().known(), send);
        let order = leaving.iter().flat_map(|tokens| tokens.iter()).filter(is_alone).copied().collect();
        let carried: Vec<bool> = arrived.chunks_exact(k).map(|slots| slots.contains(&true)).collect();
        let mut next = 0;
        let place = |&carried: &bool| {
            next += u32::from(!carried);
            if carried { u32::MAX } else { next - 1 }
        };
        let places = Indices::Known(carried.iter().map(place).collect());
        let counts = RowCounts {
            send: leaving.iter().map(|tokens| tokens.iter().filter(is_alone).count()).collect(),
            receive: cut(&carried, receive)
                .iter()
                .map(|from| from.iter().filter(|carried| !**carried).count())
                .collect(),
        };
        RowsAlone { order: Indices::Known(order), counts, places }
    }
}

/// What this rank sends along with its carrying rows, and what it needs to rebuild those of others.
pub struct CarriedRows {
    /// The norm's weight and bias, if there is a norm; ranks of a tensor group that divide the rows use them in parts.
    affine: Option<(Var, Option<Var>)>,
    /// For each of this rank's carrying rows, `[C, n]`.
    numbers: Var,
}

impl CarriedRows {
    /// `weights` `[T, K]` are those of this rank's tokens. Collective over `tensor` in backward.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn new(
        stream: &ResidualStream,
        carrying: &Carrying,
        weights: &Var,
        tensor: &Arc<dyn Communicator>,
    ) -> Result<CarriedRows, Error> {
        let Carrying { slots, tokens, of_lanes, own, .. } = carrying;
        let of_tokens = stream.numbers_of(weights.select(slots, 1));
        let divides = of_lanes.len() > 1;
        let (lanes, group) = (of_lanes.clone(), tensor.clone());
        let numbers = of_tokens.gather_rows_in_part([tokens.part(own.clone()), Index::from(tokens)], move |gradient| {
            if divides { Ok(all_gather(gradient, &lanes, &group)?) } else { Ok(gradient) }
        });
        let shared = |vector: &Var| if divides { whole_to_parts(vector.clone(), tensor) } else { Ok(vector.clone()) };
        let affine = stream.norm.as_ref().map(|RowNorm { weight, bias, .. }| {
            Ok::<_, Error>((shared(weight)?, bias.as_ref().map(shared).transpose()?))
        });
        Ok(CarriedRows { affine: affine.transpose()?, numbers })
    }

    /// Starts to send the numbers of a step's rows. Collective over the expert group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn start(&self, rows: &CarryingRows, group: &Arc<dyn Communicator>) -> Result<Underway, Error> {
        start_all_to_all_rows(self.of(rows), &rows.counts, group)
    }

    /// The numbers of this rank's rows.
    pub fn of(&self, rows: &CarryingRows) -> Var {
        self.numbers.gather_rows(Index::Run(rows.sent.start as u32..rows.sent.end as u32))
    }

    /// The results `[R, D]` of `rows` in the order in which they are delivered. Those that carry are weighted, with their
    /// residual rows: `w y + x`. `numbers` are those that came with the rows.
    pub fn load(&self, results: &Var, rows: &Var, delivery: &Delivery, numbers: &Var) -> Var {
        let Delivery { order, carrying: CarryingRows { at, .. }, .. } = delivery;
        let count = at.len();
        let weights = numbers.select(Index::Cycle(count, 0..1), 1);
        let x = rows.gather_rows(at);
        let x = match &self.affine {
            None => x,
            Some((weight, bias)) => {
                let moments = numbers.select(Index::Cycle(2 * count, 1..3), 2);
                x.denormalise(&moments, weight, bias.as_ref())
            }
        };
        results.carry_rows(order, at, &weights, &x)
    }
}

#[cfg(test)]
mod tests {
    use super::super::rewrites::condensation::condense;
    use super::super::{Clusters, CondenseGradient, Routing};
    use super::*;
    use crate::parallel::ExpertTable;

    /// Four tokens with two routes each. Tokens 0 and 1 share their rows for expert 0; token 2 has lost its first route,
    /// token 3 both.
    #[test]
    fn the_first_row_of_its_own_carries() {
        let mut routing = Routing::new(vec![0, 1, 0, 2, 1, 2, 0, 1], 2, 3);
        [4, 6, 7].into_iter().for_each(|route| routing.expert[route] = Routing::DROPPED);
        let plan = Plan::new(&routing, ExpertTable::even(3, 1), 0);
        let clusters = Clusters::Known(vec![0, 1, 0, 3, 4, 5, 6, 7]);
        let plan = condense(plan, &clusters, CondenseGradient::Spread);
        // Rows: expert 0 of tokens 0 and 1; expert 1 of token 0; expert 2 of tokens 1 and 2.
        assert_eq!(plan.tokens, Indices::Known(vec![0, 0, 1, 2]));
        assert_eq!(carrying_row_of_tokens(&plan), [Some(1), Some(2), Some(3), None]);
        // Token 1 stays.
        let plan = Plan { homes: Some(vec![1, 0, 1, 1]), ..plan };
        assert_eq!(carrying_rows(&plan, 0), [false, true, false, true]);
    }

    /// Of three rows to rank 1, sent after two that carry, the first and the last carry; of those that come from rank 0,
    /// the second.
    #[test]
    fn carrying_rows_are_counted_by_rank() {
        let (sent, received): ([&[u32]; 2], [&[u32]; 2]) = ([&[], &[1, 0, 1]], [&[0, 1], &[0]]);
        let rows = CarryingRows::new((&sent, &received), 2, |word| word == 1);
        let counts = RowCounts { send: vec![0, 2], receive: vec![1, 0] };
        assert_eq!(rows, CarryingRows { sent: 2..4, counts, at: Indices::Known(vec![1]) });
    }
}
