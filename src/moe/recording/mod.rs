//! Recordings: files with the decisions of every training step, to be inspected, compared, or replayed by another run.
//!
//! ```text
//!  gate ------.                     .--> layer
//!              +--> Routings::of ---+
//!  replay -->--'   (who decides)    '--> record
//!
//!  rates -----.                     .--> transport
//!              +--> ::shadowed -----+
//!  replay -->--'                    '--> record
//!
//!  similarities -.                  .--> layer
//!              +--> ::clusters -----+
//!  replay -->--'                    '--> record
//! ```
//!
//! A file has the tokens in their global order, in blocks of one row of data (one sequence) each. It depends neither on
//! the mesh nor on micro-batches: every rank writes and reads its own rows by position, and nothing is gathered. Clusters
//! have a file of their own, of the same kind, as not every run condenses. Shadow
//! sets and the hosts of sequences depend on the mesh, so they have files of their own. `docs/recordings.md`
//! describes the bytes.

mod block;
mod clusters;
mod companion;
mod decisions;
mod error;
mod file;
mod header;
mod hosts;
mod routes;
mod visits;

pub use clusters::{ClusterFile, Clustering};
pub use companion::Companion;
pub use decisions::{Decision, DecisionPlace, Decisions, Seen, SeenClusters};
pub use error::Error;
pub use file::{Header, Ready, StepFile};
pub use header::Shape;
pub use hosts::{HostChoices, Hosting};
pub use routes::Recording;
pub use visits::{Visiting, Visits};

use super::condensation::Similarities;
use super::gates::Tokens;
use super::migration::SequenceRows;
use super::{Clusters, Condensation, Condensed, Error as LayerError, Homes, Routing};
use crate::parallel::{HeldSequences, Hosts, Mesh, Rows};
use std::rc::Rc;
use std::sync::Arc;

/// Where in a run a decision that depends on data is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    pub step: u64,
    /// Index within the step.
    pub micro_batch: u32,
    /// Number of the stack in the model; a decoder has only stack 0.
    pub stack: u32,
    pub layer: u32,
    /// Index among the layer's calls in this micro-batch.
    pub call: u32,
}

/// Supplies the decisions of a simulated step, which has no data to decide by.
pub trait Script: std::fmt::Debug + Send + Sync {
    /// Which rank of the data group has which tokens of a micro-batch, whose rows have `seq`; `None` if the ranks tell each other.
    fn homes(&self, _micro_batch: u32, _seq: usize) -> Option<Homes> {
        None
    }

    /// The routes of this rank's tokens, with `slots` choices each.
    ///
    /// # Errors
    /// Any error of a file; so for what follows.
    fn routing(&self, site: &Site, tokens: &Rows, slots: usize) -> Result<Routing, LayerError>;

    /// The rows that are left of a routing after condensation; `None` if nothing is condensed.
    ///
    /// # Errors
    /// As [`Script::routing`].
    fn condensed(&self, _site: &Site, _tokens: (&Rows, &Routing)) -> Result<Option<Clusters>, LayerError> {
        Ok(None)
    }

    /// How many routes each set has that is compared for condensation; `None` if every group of tokens has its share.
    fn compared(&self, _site: &Site) -> Option<Vec<usize>> {
        None
    }

    /// Receives the shadowed experts of the layer that asked last, whoever chose them.
    fn told_shadowed(&self, _shadowed: &[usize]) {}
}

/// Decides to which hosts sequences migrate after a MoE layer.
pub trait MigrationPolicy: std::fmt::Debug + Send + Sync {
    /// For each host and each of its sequences, as `held` lists them, the host that has the sequence from here on;
    /// `rows` says where the results of each sequence are computed. A pure function: every rank calls it independently,
    /// and all must get the same result.
    fn hosts(&self, site: &Site, held: &HeldSequences, rows: &SequenceRows) -> Vec<Vec<usize>>;
}

/// The only interface for decisions that depend on data: it replaces those of the gate, and records them. A layer that
/// is recomputed in backward does not call it again: it keeps its decisions.
#[derive(Clone, Debug)]
pub struct Routings {
    pub replay: Option<Recording>,
    pub record: Option<Recording>,
    /// Shadow sets to replay.
    pub replay_visits: Option<Visits>,
    /// Where shadow sets are recorded.
    pub record_visits: Option<Visits>,
    /// Clusters to replay.
    pub replay_clusters: Option<ClusterFile>,
    /// Where clusters are recorded.
    pub record_clusters: Option<ClusterFile>,
    /// Hosts of sequences to replay.
    pub replay_hosts: Option<HostChoices>,
    /// Where hosts of sequences are recorded.
    pub record_hosts: Option<HostChoices>,
    /// Where scores and choices are kept in memory.
    pub decisions: Option<Decisions>,
    /// Decides in a simulated step, which has no data.
    pub script: Option<Arc<dyn Script>>,
    /// Without a policy, sequences do not migrate.
    pub migration: Option<Arc<dyn MigrationPolicy>>,
}

impl Routings {
    /// Gates decide, and nothing is recorded.
    pub const NONE: Routings = Routings {
        replay: None,
        record: None,
        replay_visits: None,
        record_visits: None,
        replay_clusters: None,
        record_clusters: None,
        replay_hosts: None,
        record_hosts: None,
        decisions: None,
        script: None,
        migration: None,
    };

    /// The routing of some tokens of one layer, given as runs of consecutive tokens: the recorded one, or the result of
    /// `decide`. Collective if `decide` is.
    ///
    /// # Errors
    /// Any error of `decide` or of a file.
    pub fn of(
        &self,
        runs: &[Tokens],
        decide: impl FnOnce() -> Result<Routing, LayerError>,
    ) -> Result<Routing, LayerError> {
        let routing = match &self.replay {
            Some(recording) => {
                let rows = |tokens: &Tokens| recording.rows(tokens.numbers());
                let read = |tokens: &Tokens| recording.read(tokens.draws.step, tokens.draws.layer, rows(tokens));
                Routing::join(runs.iter().map(read).collect::<Result<Vec<_>, _>>()?)
            }
            None => decide()?,
        };
        if self.record.is_some() || self.decisions.is_some() {
            self.keep(runs, &routing)?;
        }
        Ok(routing)
    }

    fn keep(&self, runs: &[Tokens], routing: &Routing) -> Result<(), LayerError> {
        let mut start = 0;
        for tokens in runs {
            let routing = routing.of_tokens(start..start + tokens.len());
            start += tokens.len();
            if let Some(recording) = &self.record {
                let rows = recording.rows(tokens.numbers());
                recording.write(tokens.draws.step, tokens.draws.layer, rows, &routing)?;
            }
            if let Some(decisions) = &self.decisions {
                decisions.note(tokens, &routing);
            }
        }
        Ok(())
    }

    /// The experts to shadow in this rank's expert group in `mesh`: the recorded ones, or the result of `decide`.
    ///
    /// # Errors
    /// Any error of `decide` or of a file.
    pub fn shadowed(
        &self,
        site: &Site,
        mesh: &Mesh,
        decide: impl FnOnce() -> Result<Vec<usize>, LayerError>,
    ) -> Result<Vec<usize>, LayerError> {
        let shadowed = match &self.replay_visits {
            Some(visits) => visits.read(site, mesh)?,
            None => decide()?,
        };
        if let Some(visits) = &self.record_visits {
            visits.write(site, mesh, &shadowed)?;
        }
        self.script.iter().for_each(|script| script.told_shadowed(&shadowed));
        Ok(shadowed)
    }

    /// The host of each sequence from here on: the recorded one, or that of the policy, if there is one. `None` without a
    /// policy.
    ///
    /// # Errors
    /// An answer of the policy that is impossible; any error of a file.
    pub fn hosts(
        &self,
        site: &Site,
        hosts: &Hosts,
        held: &HeldSequences,
        rows: &SequenceRows,
    ) -> Result<Option<Vec<Vec<usize>>>, LayerError> {
        let Some(policy) = &self.migration else { return Ok(None) };
        let row = |first: &u64| first / rows.seq as u64;
        let to = match &self.replay_hosts {
            Some(file) => {
                let read = |first: &u64| file.read(site, row(first), &hosts.origins);
                let of_host = |sequences: &Vec<u64>| sequences.iter().map(read).collect::<Result<Vec<_>, _>>();
                held.iter().map(of_host).collect::<Result<Vec<_>, _>>()?
            }
            None => policy.hosts(site, held, rows),
        };
        if let Some(problem) = misplaced(held, &to) {
            return Err(LayerError::Migration { layer: site.layer, policy: format!("{policy:?}"), problem });
        }
        if let Some(file) = &self.record_hosts {
            let mut own = held[hosts.own].iter().zip(&to[hosts.own]);
            own.try_for_each(|(first, &to)| file.write(site, row(first), hosts.origins[to]))?;
        }
        Ok(Some(to))
    }

    /// Which routes of these tokens share a row: as recorded, or the result of `decide`, which also gives the similarities
    /// that it decided by, if it compared rows.
    ///
    /// # Errors
    /// Any error of `decide` or of a file.
    pub fn clusters(
        &self,
        site: &Site,
        tokens: (&Rows, &Routing),
        condensation: &Condensation,
        decide: impl FnOnce() -> Result<(Condensed, Option<Rc<Similarities>>), LayerError>,
    ) -> Result<Condensed, LayerError> {
        let (condensed, similarities) = match &self.replay_clusters {
            Some(file) => (condensation.told(file.read(site, tokens)?), None),
            None => decide()?,
        };
        if let Some(file) = &self.record_clusters {
            file.write(site, tokens, condensed.clusters.as_ref())?;
        }
        if let Some(decisions) = &self.decisions {
            decisions.note_clusters(site, tokens, &condensed, similarities.as_deref());
        }
        Ok(condensed)
    }

    /// Waits until everything recorded so far is on disk.
    ///
    /// # Errors
    /// Any error of the disk.
    pub fn sync(&self) -> Result<(), Error> {
        self.record.as_ref().map_or(Ok(()), Recording::sync)?;
        self.record_visits.as_ref().map_or(Ok(()), Visits::sync)?;
        self.record_clusters.as_ref().map_or(Ok(()), ClusterFile::sync)?;
        self.record_hosts.as_ref().map_or(Ok(()), HostChoices::sync)
    }
}

/// The first impossible destination, in words.
fn misplaced(held: &HeldSequences, to: &[Vec<usize>]) -> Option<String> {
    let (has, gives): (Vec<_>, Vec<_>) = (held.iter().map(Vec::len).collect(), to.iter().map(Vec::len).collect());
    if has != gives {
        return Some(format!("gave {gives:?} destinations for hosts with {has:?} sequences"));
    }
    let beyond = to.iter().flatten().find(|host| **host >= held.len());
    beyond.map(|host| format!("sent a sequence to host {host} of {}", held.len()))
}
