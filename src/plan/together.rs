//! All ranks of a task, walked at once. What they tell each other in numbers is what the ranks of a run would, so that a
//! walk along a recording costs what the run did, migrations included.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::Failure;

use super::layout::Task;
use super::recorded::RecordedFiles;
use super::script::left;
use super::step::{StepCost, Walked};
use crate::moe::recording::{ClusterFile, Error, Recording};
use crate::moe::{Clusters, Error as LayerError, MigrationPolicy, Routing, Routings, Script, Site};
use crate::parallel::{self, Rows};
use crate::{launch, train};

/// Ranks wait for each other no longer than this; they only walk.
const TIMEOUT_S: u64 = 3600;

impl Task {
    /// What a step costs each rank whose decisions are `routings`'; sequences migrate by the task's policy.
    ///
    /// # Errors
    /// A recording that cannot be followed.
    pub(super) fn walk_all(&self, step: u64, routings: &Routings) -> Result<Vec<StepCost>, Error> {
        let policy = self.layout.migrating.clone();
        let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        let routings = Routings { migration, ..routings.clone() };
        let mesh = &self.layout.mesh;
        let ranks = parallel::Config::of(mesh.ranks, mesh.expert);
        let walked = launch::run(&parallel::Config { threads: Some(1), timeout_s: TIMEOUT_S, ..ranks }, |rank| {
            let walked = Walked::among(self, rank.world, routings.clone());
            walked.cost(&mut walked.trainer(), &walked.each_batch(step))
        });
        match launch::first_cause(walked, train::Error::is_consequence) {
            Ok(costs) => Ok(costs),
            Err(Failure::Returned(train::Error::Moe(LayerError::Recording(error)))) => Err(error),
            Err(other) => panic!("nobody else fails in a world of sizes: {other}"),
        }
    }
}

/// Follows a recording.
#[derive(Debug)]
pub(super) struct Followed {
    routes: Recording,
    clusters: Option<ClusterFile>,
    /// Without clusters, the share of routes without a row, if routes may share rows.
    shared: Option<f64>,
}

impl RecordedFiles<'_> {
    /// The decisions of these files, and a share of routes without a row where there are no clusters.
    pub(super) fn followed(&self, shared: Option<f64>) -> Routings {
        let script = Followed { routes: self.routes.clone(), clusters: self.clusters.cloned(), shared };
        Routings {
            script: Some(Arc::new(script)),
            replay_visits: self.visits.cloned(),
            replay_hosts: self.hosts.cloned(),
            ..Routings::NONE
        }
    }
}

impl Script for Followed {
    fn routing(&self, site: &Site, tokens: &Rows, _slots: usize) -> Result<Routing, LayerError> {
        let row = |first: &u64| first / tokens.seq as u64..first / tokens.seq as u64 + 1;
        let read = |rows: Range<u64>| self.routes.read(site.step, site.layer, rows);
        // A rank may have no sequence.
        let parts = [read(0..0)].into_iter().chain(tokens.sequences.iter().map(row).map(read));
        Ok(Routing::join(parts.collect::<Result<Vec<_>, _>>()?))
    }

    fn condensed(&self, site: &Site, tokens: (&Rows, &Routing)) -> Result<Option<Clusters>, LayerError> {
        match &self.clusters {
            Some(file) => Ok(file.read(site, tokens)?),
            None => Ok(self.shared.map(|share| sharing(tokens, share))),
        }
    }
}

/// Clusters in which a share of the routes has no row of its own, of each sequence and expert the same: every so many
/// routes in their order share the first one's.
pub(super) fn sharing((tokens, routing): (&Rows, &Routing), share: f64) -> Clusters {
    let mut of: Vec<u32> = (0..routing.expert.len() as u32).collect();
    for first in (0..tokens.len()).step_by(tokens.seq.max(1)) {
        let mut sets = vec![Vec::new(); routing.experts];
        for route in first * routing.k..(first + tokens.seq) * routing.k {
            if routing.expert[route] != Routing::DROPPED {
                sets[routing.expert[route] as usize].push(route);
            }
        }
        for set in sets {
            let rows = left(set.len(), share);
            // The first of those with the same row.
            let representative = |place: usize| (place * rows / set.len() * set.len()).div_ceil(rows);
            set.iter().enumerate().for_each(|(place, &route)| of[route] = set[representative(place)] as u32);
        }
    }
    Clusters::Known(of)
}
