//! Deliveries: results go to the ranks on which their tokens go on, not to those that sent the rows.
//!
//! An expert's rank has to know where each row's result goes, and the rank that gets it which token it is of. Both are told
//! when counts are: integers, once a layer and micro-batch.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Request};
use guildhall_tensor::Indices;

use super::{Plan, Step};
use crate::parallel::Migration;
use crate::parallel::collectives::RowCounts;

/// How results get to where their tokens go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliveries {
    /// Of each step, the way of its results.
    pub steps: Vec<Delivery>,
    /// The way of the results of rows that stayed.
    pub stayed: Delivery,
    /// Rows of each lane that come here, lane after lane.
    pub rows_of_lanes: Vec<usize>,
    /// The row of every route of the tokens that come here, in the order in which they are carried.
    pub places: Indices,
}

/// Results on their way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Rows as experts have them, by the rank to which they go.
    pub order: Indices,
    pub counts: RowCounts,
}

/// A row among all that come to a rank: they lie by lane, by step, by the rank that computed them, by the rank that had
/// sent them there, and as they were there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ComingRow {
    lane: usize,
    step: usize,
    computed_by: usize,
    sent_by: usize,
    row: usize,
}

/// How a route without a row is told.
const NO_ROW: u64 = u64::MAX;

/// Words of a route: lane, step, rank; its row.
const ROUTE_WORDS: usize = 2;

impl Delivery {
    /// Of rows whose results go to these ranks.
    fn new(homes: &[u32], ranks: usize) -> Delivery {
        let mut order: Vec<u32> = (0..homes.len() as u32).collect();
        order.sort_by_key(|&row| homes[row as usize]);
        let mut send = vec![0; ranks];
        homes.iter().for_each(|&home| send[home as usize] += 1);
        Delivery { order: Indices::Known(order), counts: RowCounts { send, receive: vec![0; ranks] } }
    }
}

impl Deliveries {
    /// The way of the results of a plan whose rows travel in these steps, or `stay`, to where the tokens of `migration` go
    /// on. Collective over the expert group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn new(plan: &Plan, steps: &[Step], stay: Range<usize>, migration: &Migration) -> Result<Deliveries, Error> {
        let (mut ways, mut stayed) = ways(plan, steps, stay, migration.group())?;
        let coming = coming(plan, migration)?;
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
        Ok(Deliveries { steps: ways, stayed, rows_of_lanes, places })
    }
}

/// The ways of what each step brings here, and of what stays.
fn ways(
    plan: &Plan,
    steps: &[Step],
    stay: Range<usize>,
    group: &Arc<dyn Communicator>,
) -> Result<(Vec<Delivery>, Delivery), Error> {
    let ranks = group.size();
    let homes = plan.homes.as_ref().expect("a plan that delivers");
    let own = plan.tokens.known()[plan.own_rows()].iter();
    let homes: Vec<u32> = own.map(|&token| homes[token as usize]).collect();
    // All rows to a rank are of one step.
    let mut to = vec![&homes[..0]; ranks];
    for step in steps {
        let mut rest = &homes[step.rows.clone()];
        for (rank, &rows) in step.counts.send.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            (to[rank], rest) = rest.split_at(rows);
        }
    }
    let of_rank = |rank: usize| steps.iter().map(|step| step.counts.receive[rank]).sum();
    let receive: Vec<usize> = (0..ranks).map(of_rank).collect();
    let buffer = vec![0u32; receive.iter().sum()];
    let send = to.iter().map(|homes| homes.len()).collect();
    let request = Request::all_to_all(to.concat(), send, buffer, receive.clone());
    let come = group.start(request)?.wait()?.recv.into_u32();
    let mut from = Vec::new();
    let mut rest = &come[..];
    for rows in receive {
        let (these, others) = rest.split_at(rows);
        from.push(these);
        rest = others;
    }
    let of_step = |step: &Step| {
        let sources = (0..ranks).filter(|&rank| step.counts.receive[rank] > 0);
        Delivery::new(&sources.flat_map(|rank| from[rank]).copied().collect::<Vec<_>>(), ranks)
    };
    Ok((steps.iter().map(of_step).collect(), Delivery::new(&homes[stay], ranks)))
}

/// The rows of the routes of all tokens that come here, in the order in which they are carried.
fn coming(plan: &Plan, migration: &Migration) -> Result<Vec<Option<ComingRow>>, Error> {
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
        row => [runs[row as usize], u64::from(row)],
    };
    let places = plan.places.known();
    let of_token = |&token: &u32| places[token as usize * slots..][..slots].iter().flat_map(words);
    let send: Vec<u64> = migration.order().known().iter().flat_map(of_token).collect();
    let RowCounts { send: sent, receive } = migration.counts();
    let scaled = |tokens: &[usize]| tokens.iter().map(|n| n * slots * ROUTE_WORDS).collect::<Vec<_>>();
    let receive = scaled(receive);
    let buffer = vec![0u64; receive.iter().sum()];
    let request = Request::all_to_all(send, scaled(sent), buffer, receive.clone());
    let come = group.start(request)?.wait()?.recv.into_u64();
    let sources = receive.iter().enumerate().flat_map(|(rank, words)| std::iter::repeat_n(rank, words / ROUTE_WORDS));
    let row = |(words, sent_by): (&[u64], usize)| {
        let [at, row] = [words[0] as usize, words[1] as usize];
        let (lane, step, computed_by) = (at >> 48, at >> 24 & 0xFF_FFFF, at & 0xFF_FFFF);
        (words[0] != NO_ROW).then_some(ComingRow { lane, step, computed_by, sent_by, row })
    };
    Ok(come.chunks_exact(ROUTE_WORDS).zip(sources).map(row).collect())
}
