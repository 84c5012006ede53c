//! Loads as a run recorded them, for whatever mesh is planned.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

use rayon::prelude::*;

use super::layout::{Load, Task};
use super::step::{StepCost, step};
use crate::data::BatchPlan;
use crate::moe::Routing;
use crate::moe::recording::{Error, Recording};
use crate::parallel::{Axis, share};

/// Micro-batches that are looked at because a rank receives most rows in them over all layers.
const HEAVIEST: usize = 64;

/// The micro-batches of a recording that ask most of a rank.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// A rank, and the rows of a micro-batch in which it receives more than others do: over all layers, or in one.
    pub cases: Vec<(usize, Load)>,
    /// How many times an even share that is, for layouts of other meshes.
    pub skew: Load,
}

impl Recorded {
    /// One load of one rank.
    pub fn of(rank: usize, load: Load) -> Recorded {
        Recorded { cases: vec![(rank, load.clone())], skew: load }
    }

    /// What the case costs that takes most memory.
    pub fn heaviest(&self, task: &Task) -> StepCost {
        let costs = self.cases.par_iter().map(|(rank, load)| step(task, *rank, load));
        costs.max_by_key(|cost| cost.at_peak.total()).expect("a load comes to something")
    }
}

/// A rank in a micro-batch, and how many times an even share of rows it receives there.
#[derive(Clone, Copy)]
struct Moment {
    times: f64,
    step: u64,
    micro: usize,
    rank: usize,
}

/// Of one micro-batch, by layer, the rows from each rank of the world to each expert.
type LayerRows = Vec<(usize, Vec<Vec<usize>>)>;

impl Task {
    /// The heaviest of what was recorded of all tokens, as it falls on the ranks of this layout. The last micro-batch of a
    /// step is left out if it has fewer rows than others.
    ///
    /// # Errors
    /// A recording that cannot be read.
    pub fn recorded(&self, recording: &Recording, steps: RangeInclusive<u64>) -> Result<Recorded, Error> {
        let whole = (self.rows_per_step / self.micro_batch).max(1);
        let (mut heaviest, mut hottest) = (Vec::<Moment>::new(), vec![None::<Moment>; self.moe_layers().count()]);
        for (step, micro) in steps.flat_map(|step| (0..whole).map(move |micro| (step, micro))) {
            let rows = self.rows_recorded(recording, step, micro)?;
            let by_layer: Vec<Vec<f64>> = rows.iter().map(|(layer, rows)| self.times(*layer, rows)).collect();
            for rank in 0..self.layout.mesh.ranks {
                let times: Vec<f64> = by_layer.iter().map(|times| times[rank]).collect();
                let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
                let place = |times| Moment { times, step, micro, rank };
                for (now, hottest) in times.into_iter().zip(&mut hottest) {
                    if hottest.is_none_or(|before| now > before.times) {
                        *hottest = Some(place(now));
                    }
                }
                heaviest.push(place(mean));
            }
            heaviest.sort_by(|a, b| b.times.total_cmp(&a.times));
            heaviest.truncate(HEAVIEST);
        }
        let most = hottest.iter().flatten().map(|place| place.times).fold(0.0, f64::max);
        let mean = heaviest.first().map_or(0.0, |place| place.times);
        let mut places = BTreeMap::<_, BTreeSet<usize>>::new();
        for Moment { step, micro, rank, .. } in hottest.into_iter().flatten().chain(heaviest) {
            places.entry((step, micro)).or_default().insert(rank);
        }
        let mut cases = Vec::new();
        for ((step, micro), ranks) in places {
            let table = Load::Table(Arc::new(self.rows_recorded(recording, step, micro)?));
            cases.extend(ranks.into_iter().map(|rank| (rank, table.clone())));
        }
        Ok(Recorded { cases, skew: Load::Skewed { mean, most } })
    }

    fn rows_recorded(&self, recording: &Recording, step: u64, micro: usize) -> Result<LayerRows, Error> {
        let (mesh, ranks) = (&self.layout.mesh, self.layout.mesh.degree(Axis::Data));
        let of_layer = |layer: usize| {
            let routing = |rank| {
                let (rows_per_step, micro_batch) = (self.rows_per_step, self.micro_batch);
                let rows = BatchPlan { seed: 0, rows_per_step, micro_batch, rank, ranks }.share(micro);
                recording.read(step, layer as u32, rows.start as u64..rows.end as u64)
            };
            let routings = (0..ranks).map(routing).collect::<Result<Vec<_>, Error>>()?;
            let rows = |rank| self.rows_of_lane(&routings[self.place(Axis::Data, rank).0], rank);
            Ok((layer, (0..mesh.ranks).map(rows).collect()))
        };
        self.moe_layers().map(of_layer).collect()
    }

    /// Rows that a rank sends to each expert of the routes that its tensor group has.
    fn rows_of_lane(&self, routing: &Routing, rank: usize) -> Vec<usize> {
        let (lane, lanes) = self.place(Axis::Tensor, rank);
        if self.layout.sequence {
            return routing.of_tokens(share(routing.tokens(), (lane, lanes))).rows();
        }
        let lanes = self.layout.lanes(lane);
        routing.rows().into_iter().map(|rows| lanes.of(rows, lanes.own())).collect()
    }

    /// By rank, the rows that come to it of all that its expert group sends, over an even share of them.
    fn times(&self, layer: usize, rows: &[Vec<usize>]) -> Vec<f64> {
        let axis = Axis::Expert(self.degree(layer));
        let table = self.layout.expert_table(rows[0].len(), self.degree(layer));
        let of_rank = |rank| {
            let (group, held) = (self.layout.mesh.members(axis, rank), table.of(self.place(axis, rank).0));
            let all: usize = group.iter().flat_map(|&from| &rows[from]).sum();
            let come: usize = group.iter().flat_map(|&from| held.iter().map(move |&expert| rows[from][expert])).sum();
            come as f64 * group.len() as f64 / all.max(1) as f64
        };
        (0..rows.len()).map(of_rank).collect()
    }
}
