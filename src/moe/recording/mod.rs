//! Recordings: what was decided in every training step in files, to be looked at, compared, or followed by another run.
//!
//! ```text
//!  gate ------.                     .--> layer
//!              +--> Routings::of ---+
//!  replay -->--'   (who decides)    '--> record
//!
//!  rates -----.                     .--> transport
//!              +--> ::shadowed -----+
//!  replay -->--'                    '--> record
//! ```
//!
//! Tokens stand in a file in their global order, in blocks of one row of data each. So a file does not depend on the mesh
//! or on micro-batches, every rank writes and reads its own rows by position, and nothing is gathered. Shadow sets are a
//! matter of the mesh and lie in a file of their own, a block for every expert group. `docs/recordings.md` has the bytes.

mod block;
mod decisions;
mod error;
mod file;
mod header;
mod routes;
mod visits;

pub use decisions::{Decision, DecisionPlace, Decisions, Seen};
pub use error::Error;
pub use file::{Header, Ready, StepFile};
pub use header::Shape;
pub use routes::Recording;
pub use visits::{Visiting, Visits};

use super::gates::Tokens;
use super::{Error as LayerError, Homes, Routing};
use crate::parallel::{HeldSequences, Mesh};
use std::sync::Arc;

/// Where in a run something is decided that depends on data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    pub step: u64,
    /// Within the step.
    pub micro_batch: u32,
    /// Of a model's stacks of layers; a decoder has one, number 0.
    pub stack: u32,
    pub layer: u32,
    /// Of the layer's calls in this micro-batch.
    pub call: u32,
}

/// Decides without data, for whoever walks a step of sizes.
pub trait Script: std::fmt::Debug + Send + Sync {
    /// Where the tokens of a micro-batch lie on the ranks of the data group.
    fn homes(&self, micro_batch: u32) -> Homes;

    /// The routes of this rank's `tokens`, with `slots` choices each.
    fn routing(&self, site: &Site, tokens: usize, slots: usize) -> Routing;

    /// The experts that visit every rank of the expert group; absent where the layer decides by what the ranks tell it.
    fn shadowed(&self, site: &Site) -> Option<Vec<usize>>;

    /// Which experts of the layer that asked last visit every rank, whoever decided so.
    fn told_shadowed(&self, shadowed: &[usize]);
}

/// Decides where sequences go on behind a MoE layer.
pub trait MigrationPolicy: std::fmt::Debug + Send + Sync {
    /// Of each sequence that a host has, the host that has it from here on: by host, as `held` lists them. Pure: every rank
    /// asks by itself, and all must be told the same.
    fn hosts(&self, site: &Site, held: &HeldSequences) -> Vec<Vec<usize>>;
}

/// The one seam for decisions that depend on data: where they come from instead of the gate, and where they go besides
/// the layer. A layer that runs again in backward does not come here: it keeps what was decided.
#[derive(Clone, Debug)]
pub struct Routings {
    pub replay: Option<Recording>,
    pub record: Option<Recording>,
    /// Shadow sets to follow.
    pub replay_visits: Option<Visits>,
    /// Where shadow sets are kept.
    pub record_visits: Option<Visits>,
    /// Where scores and choices are kept in memory.
    pub decisions: Option<Decisions>,
    /// Decides where there is no data to decide by.
    pub script: Option<Arc<dyn Script>>,
    /// Without one, sequences stay where they are.
    pub migration: Option<Arc<dyn MigrationPolicy>>,
}

impl Routings {
    /// Gates decide, and nothing is written.
    pub const NONE: Routings = Routings {
        replay: None,
        record: None,
        replay_visits: None,
        record_visits: None,
        decisions: None,
        script: None,
        migration: None,
    };

    /// The routing of some tokens of one layer, by runs of consecutive ones: the recorded one, or what `decide` says.
    /// Collective if `decide` is.
    ///
    /// # Errors
    /// What `decide` or a file reports.
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

    /// The experts that visit the ranks of this one's expert group in `mesh`: the script's, the recorded ones, or what
    /// `decide` says.
    ///
    /// # Errors
    /// What `decide` or a file reports.
    pub fn shadowed(
        &self,
        site: &Site,
        mesh: &Mesh,
        decide: impl FnOnce() -> Result<Vec<usize>, LayerError>,
    ) -> Result<Vec<usize>, LayerError> {
        let scripted = self.script.as_ref().and_then(|script| script.shadowed(site));
        let shadowed = match (scripted, &self.replay_visits) {
            (Some(scripted), _) => scripted,
            (None, Some(visits)) => visits.read(site, mesh)?,
            (None, None) => decide()?,
        };
        if let Some(visits) = &self.record_visits {
            visits.write(site, mesh, &shadowed)?;
        }
        self.script.iter().for_each(|script| script.told_shadowed(&shadowed));
        Ok(shadowed)
    }

    /// Returns once everything recorded so far is on the disk.
    ///
    /// # Errors
    /// A disk that cannot take it.
    pub fn sync(&self) -> Result<(), Error> {
        self.record.as_ref().map_or(Ok(()), Recording::sync)?;
        self.record_visits.as_ref().map_or(Ok(()), Visits::sync)
    }
}
