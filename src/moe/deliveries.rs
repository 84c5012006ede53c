//! Deliveries: if sequences migrate, the result of a row goes to the rank to which [`Migration::carry`] sends the row's
//! token, not to the rank that sent the row.
//!
//! The rank that computes a row needs the destination of its result, and the destination rank needs to know to which
//! route each result belongs. Both are exchanged as integers, after the row counts, once per layer and micro-batch.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Indices;

use super::carrying::{Carrying, CarryingRows, carrying_rows};
use super::{Plan, Step};
use crate::parallel::collectives::RowCounts;
use crate::parallel::{Migration, cut};

/// The all-to-alls that deliver results to the ranks to which a migration carries their tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliveries {
    /// For each step, the delivery of its results.
    pub steps: Vec<Delivery>,
    /// The delivery of the results of rows that stayed on this rank (shadowed experts).
    pub stayed: Delivery,
    /// For each lane, the number of result rows for the tokens that [`Migration::carry`] brings to this rank.
    pub rows_of_lanes: Vec<usize>,
    /// For each route of these tokens, in the order in which they are carried, its result row.
    pub places: Indices,
    /// Present if results carry the residual stream.
    pub carrying: Option<Carrying>,
}

/// One all-to-all of results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Permutation that sorts the results by destination rank; before, they are in the order in which the experts' rank
    /// received the rows.
    pub order: Indices,
    pub counts: RowCounts,
    /// Which of them carry the residual stream.
    pub carrying: CarryingRows,
}

/// A result row for the tokens that are carried to a rank. The fields are the sort key of the order in which results
/// arrive: by lane, by step, by the rank that computed the row, by the rank that sent it there, and by its index on
/// that rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ComingRow {
    lane: usize,
    step: usize,
    computed_by: usize,
    sent_by: usize,
    row: usize,
}

/// The encoding of a route without a row.
const NO_ROW: u64 = u64::MAX;

/// The bit of a row's destination that says that its result carries the residual stream.
const CARRYING_ROW: u32 = 1 << 31;

/// The same in the first word of a route.
const CARRYING_ROUTE: u64 = 1 << 62;

/// Number of words of a route: one for the lane, the step and the computing rank, one for the row.
const ROUTE_WORDS: usize = 2;

/// Bytes in which a row that is sent says where its result goes.
pub(super) const WAY_BYTES: u64 = size_of::<u32>() as u64;

/// Bytes in which the places of a token's `slots` routes are sent.
pub(super) fn route_bytes(slots: usize) -> u64 {
    (slots * ROUTE_WORDS * size_of::<u64>()) as u64
}

impl Delivery {
    /// The delivery of the results of received rows, whose words tell where they go. `sent` has the words of the rows that
    /// this rank sends; `first` counts its carrying rows in earlier steps. The receive counts are not known yet.
    fn new((sent, received): (&[&[u32]], &[&[u32]]), first: usize) -> Delivery {
        let carries = |word: u32| word & CARRYING_ROW != 0;
        let carrying = CarryingRows::new((sent, received), first, carries);
        let words = received.concat();
        let homes: Vec<u32> = words.iter().map(|word| word & !CARRYING_ROW).collect();
        let mut send = vec![0; received.len()];
        homes.iter().for_each(|&home| send[home as usize] += 1);
        let counts = RowCounts { send, receive: vec![0; received.len()] };
        Delivery { order: Indices::sorting(&homes), counts, carrying }
    }
}

impl Deliveries {
    /// The deliveries for a plan whose rows are sent in `steps`, or kept (`stay`), to the ranks to which `migration`
    /// carries their tokens. If `carries`, results carry the residual stream. Collective over the expert group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn new(
        plan: &Plan,
        (steps, stay): (&[Step], Range<usize>),
        migration: &Migration,
        carries: bool,
    ) -> Result<Deliveries, Error> {
        let carrying = match carries {
            true => carrying_rows(plan, migration.group().rank()),
            false => vec![false; plan.tokens.len()],
        };
        let (mut ways, mut stayed) = ways(plan, (steps, stay), &carrying, migration.group())?;
        let (coming, arrived): (Vec<_>, Vec<_>) = coming(plan, &carrying, migration)?.into_iter().unzip();
        let mut rows: Vec<ComingRow> = coming.iter().flatten().copied().collect();
        rows.sort_unstable();
        // Several routes may share a row.
        rows.dedup();
        let place =
            |row: &Option<ComingRow>| row.map_or(u32::MAX, |row| rows.partition_point(|other| *other < row) as u32);
        let places = Indices::Known(coming.iter().map(place).collect());
        let mut rows_of_lanes = vec![0; plan.lanes.sharing()];
        for row in &rows {
            rows_of_lanes[row.lane] += 1;
            if row.lane == plan.lanes.own() {
                let way = ways.get_mut(row.step).unwrap_or(&mut stayed);
                way.counts.receive[row.computed_by] += 1;
            }
        }
        let carrying = carries.then(|| Carrying::new(plan, &carrying, arrived, migration));
        Ok(Deliveries { steps: ways, stayed, rows_of_lanes, places, carrying })
    }
}

/// The deliveries of the results of each step, and of those of the rows that stay, without receive counts. Collective
/// over the expert group.
fn ways(
    plan: &Plan,
    (steps, stay): (&[Step], Range<usize>),
    carrying: &[bool],
    group: &Arc<dyn Communicator>,
) -> Result<(Vec<Delivery>, Delivery), Error> {
    let ranks = group.size();
    let homes = plan.homes.as_ref().expect("a plan that delivers");
    let word = |row: usize| {
        let home = homes[plan.tokens.known()[row] as usize];
        if carrying[row] { home | CARRYING_ROW } else { home }
    };
    let words: Vec<u32> = plan.own_rows().map(word).collect();
    let sent: Vec<Vec<&[u32]>> = steps.iter().map(|step| cut(&words[step.rows.clone()], &step.counts.send)).collect();
    // By rank, then by step.
    let to: Vec<Vec<u32>> =
        (0..ranks).map(|rank| sent.iter().flat_map(|parts| parts[rank]).copied().collect()).collect();
    let of_rank = |rank: usize| steps.iter().map(|step| step.counts.receive[rank]).sum();
    let receive: Vec<usize> = (0..ranks).map(of_rank).collect();
    let buffer = vec![0u32; receive.iter().sum()];
    let send = to.iter().map(Vec::len).collect();
    let come = group.all_to_all(to.concat(), send, buffer, receive.clone())?.recv.into_u32();
    let mut from = cut(&come, &receive);
    let (mut ways, mut first) = (Vec::with_capacity(steps.len()), 0);
    for (step, sent) in steps.iter().zip(&sent) {
        let arriving = from.iter_mut().zip(&step.counts.receive);
        let received: Vec<&[u32]> =
            arriving.map(|(from, &rows)| from.split_off(..rows).expect("what a rank sends in all steps")).collect();
        let delivery = Delivery::new((sent, &received), first);
        first = delivery.carrying.sent.end;
        ways.push(delivery);
    }
    // What stays is sent from this rank to itself.
    let mut stayed = vec![&words[..0]; ranks];
    stayed[group.rank()] = &words[stay];
    Ok((ways, Delivery::new((&stayed, &stayed), first)))
}

/// For each route of the tokens that are carried to this rank, in the order of [`Migration::carry`], its result row, and
/// whether that carries the residual stream. Collective over the expert group.
fn coming(plan: &Plan, carrying: &[bool], migration: &Migration) -> Result<Vec<(Option<ComingRow>, bool)>, Error> {
    let (group, slots) = (migration.group(), plan.slots);
    let runs: Vec<u64> = plan
        .runs
        .iter()
        .flat_map(|run| {
            let (step, rank) = run.rank.map_or((plan.schedule.steps(), group.rank()), |rank| (run.step, rank));
            std::iter::repeat_n((run.lane << 48 | step << 24 | rank) as u64, run.rows)
        })
        .collect();
    let words = |&row: &u32| match row {
        u32::MAX => [NO_ROW; ROUTE_WORDS],
        row if carrying[row as usize] => [runs[row as usize] | CARRYING_ROUTE, u64::from(row)],
        row => [runs[row as usize], u64::from(row)],
    };
    let places = plan.places.known();
    let of_token = |&token: &u32| places[token as usize * slots..][..slots].iter().flat_map(words);
    let send: Vec<u64> = migration.order().known().iter().flat_map(of_token).collect();
    let RowCounts { send: sent, receive } = migration.counts();
    let scaled = |tokens: &[usize]| tokens.iter().map(|n| n * slots * ROUTE_WORDS).collect::<Vec<_>>();
    let receive = scaled(receive);
    let buffer = vec![0u64; receive.iter().sum()];
    let come = group.all_to_all(send, scaled(sent), buffer, receive.clone())?.recv.into_u64();
    let sources = receive.iter().enumerate().flat_map(|(rank, words)| std::iter::repeat_n(rank, words / ROUTE_WORDS));
    let row = |(words, sent_by): (&[u64], usize)| {
        if words[0] == NO_ROW {
            return (None, false);
        }
        let [at, row] = [(words[0] & !CARRYING_ROUTE) as usize, words[1] as usize];
        let (lane, step, computed_by) = (at >> 48, at >> 24 & 0xFF_FFFF, at & 0xFF_FFFF);
        (Some(ComingRow { lane, step, computed_by, sent_by, row }), words[0] & CARRYING_ROUTE != 0)
    };
    Ok(come.chunks_exact(ROUTE_WORDS).zip(sources).map(row).collect())
}
