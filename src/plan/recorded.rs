//! Loads as a run recorded them, for whatever mesh is planned.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

use guildhall_comm::Collective;
use rayon::prelude::*;

use super::books::{PlannedTraffic, traffic};
use super::layout::{CondensedRows, LayerTable, Load, RankRows, Task};
use super::script::left;
use super::step::{StepCost, step};
use crate::data::BatchPlan;
use crate::moe::Routing;
use crate::moe::recording::{ClusterFile, Error, HostChoices, Recording, Site, Visits};
use crate::parallel::{Axis, Rows, share};

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

/// An open recording, with the clusters of a run that condensed.
#[derive(Clone, Copy, Debug)]
pub struct RecordedFiles<'a> {
    pub routes: &'a Recording,
    pub clusters: Option<&'a ClusterFile>,
    /// Shadow sets of the same mesh.
    pub visits: Option<&'a Visits>,
    /// Hosts of sequences that migrate, of the same mesh.
    pub hosts: Option<&'a HostChoices>,
}

/// A rank in a micro-batch, and how many times an even share of rows it receives there.
#[derive(Clone, Copy)]
struct Moment {
    times: f64,
    step: u64,
    micro: usize,
    rank: usize,
}

impl Task {
    /// The heaviest of what was recorded of all tokens, as it falls on the ranks of this layout. The last micro-batch of a
    /// step is left out if it has fewer rows than others.
    ///
    /// # Errors
    /// A recording that cannot be read.
    pub fn recorded(&self, recording: RecordedFiles, steps: RangeInclusive<u64>) -> Result<Recorded, Error> {
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

    /// By group and collective, the calls and bytes of all ranks in some steps as they were recorded: those of the steps
    /// themselves, without what the loop around them sends.
    ///
    /// # Errors
    /// A recording that cannot be read.
    pub fn traffic_recorded(
        &self,
        recording: RecordedFiles,
        steps: RangeInclusive<u64>,
    ) -> Result<BTreeMap<(Axis, Collective), PlannedTraffic>, Error> {
        let mut sums = BTreeMap::<_, PlannedTraffic>::new();
        for number in steps {
            let costs = self.walk_all(number, &recording.followed(self.condensed()))?;
            for (key, sent) in costs.iter().flat_map(|cost| traffic(&cost.messages)) {
                *sums.entry(key).or_default() += sent;
            }
        }
        Ok(sums)
    }

    fn rows_recorded(&self, recording: RecordedFiles, step: u64, micro: usize) -> Result<LayerTable, Error> {
        let (mesh, ranks) = (&self.layout.mesh, self.layout.mesh.degree(Axis::Data));
        let of_layer = |layer: usize| {
            let of_host = |rank| self.host_recorded(recording, (step, micro, layer), (rank, ranks));
            let hosts = (0..ranks).map(of_host).collect::<Result<Vec<_>, Error>>()?;
            let rows = |rank| hosts[self.place(Axis::Data, rank).0].on_rank(self, rank);
            Ok((layer, (0..mesh.ranks).map(rows).collect()))
        };
        self.moe_layers().map(of_layer).collect()
    }

    /// What was recorded of the tokens of one rank of the data group.
    fn host_recorded(
        &self,
        recording: RecordedFiles,
        (step, micro, layer): (u64, usize, usize),
        (rank, ranks): (usize, usize),
    ) -> Result<HostRoutes, Error> {
        let (rows_per_step, micro_batch, seq) =
            (self.rows_per_step, self.micro_batch, self.sizes.model.row_length_of(layer));
        let rows = BatchPlan { seed: 0, rows_per_step, micro_batch, rank, ranks }.share(micro);
        let routing = recording.routes.read(step, layer as u32, rows.start as u64..rows.end as u64)?;
        let Some(condensation) = self.sizes.moe.as_ref().and_then(|moe| moe.condensation()) else {
            return Ok(HostRoutes { routing, left: None, compared: Vec::new() });
        };
        let tokens = Rows { seq, sequences: rows.map(|row| (row * seq) as u64).collect(), ..Rows::default() };
        let site = Site { step, micro_batch: micro as u32, stack: 0, layer: layer as u32, call: 0 };
        let left = match recording.clusters {
            Some(file) => file.read(&site, (&tokens, &routing))?.map(|clusters| clusters.rows(&routing)),
            None => self.condensed().map(|share| routing.rows().into_iter().map(|rows| left(rows, share)).collect()),
        };
        Ok(HostRoutes { compared: condensation.compared(&routing, &tokens), routing, left })
    }
}

/// What was recorded of one layer and of the tokens of a tensor group.
struct HostRoutes {
    routing: Routing,
    /// By expert, the rows that are left where routes share rows.
    left: Option<Vec<usize>>,
    compared: Vec<usize>,
}

impl HostRoutes {
    /// Of these, what is a rank's of the tensor group.
    fn on_rank(&self, task: &Task, rank: usize) -> RankRows {
        let (lane, lanes) = task.place(Axis::Tensor, rank);
        let dealt = |rows: Vec<usize>| {
            let lanes = task.layout.lanes(lane);
            rows.into_iter().map(|rows| lanes.of(rows, lanes.own())).collect()
        };
        // Rows that are shared are divided as those of tokens that every lane has.
        let sent = match &self.left {
            Some(left) => dealt(left.clone()),
            None if task.layout.sequence => self.routing.of_tokens(share(self.routing.tokens(), (lane, lanes))).rows(),
            None => dealt(self.routing.rows()),
        };
        let condensed = self.left.clone().map(|left| CondensedRows { routes: self.routing.rows(), left });
        RankRows { sent, condensed, compared: self.compared.clone() }
    }
}

impl Task {
    /// By rank, the rows that come to it of all that its expert group sends, over an even share of them.
    fn times(&self, layer: usize, rows: &[RankRows]) -> Vec<f64> {
        let axis = Axis::Expert(self.degree(layer));
        let table = self.layout.expert_table(rows[0].sent.len(), self.degree(layer));
        let of_rank = |rank| {
            let (group, held) = (self.layout.mesh.members(axis, rank), table.of(self.place(axis, rank).0));
            let all: usize = group.iter().flat_map(|&from| &rows[from].sent).sum();
            let come: usize =
                group.iter().flat_map(|&from| held.iter().map(move |&expert| rows[from].sent[expert])).sum();
            come as f64 * group.len() as f64 / all.max(1) as f64
        };
        (0..rows.len()).map(of_rank).collect()
    }
}
