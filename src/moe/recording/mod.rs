//! Recordings: the routing of every training step in a file, to be looked at, compared, or followed by another run.
//!
//! ```text
//!  gate ------.                     .--> layer
//!              +--> Routings::of ---+
//!  replay -->--'   (who decides)    '--> record
//! ```
//!
//! Tokens stand in a file in their global order, in blocks of one row of data each. So a file does not depend on the mesh
//! or on micro-batches, every rank writes and reads its own rows by position, and nothing is gathered. `docs/recordings.md`
//! has the bytes.

mod block;
mod decisions;
mod error;
mod file;
mod header;

pub use decisions::{Decision, Decisions, Place, Seen};
pub use error::Error;
pub use file::Recording;
pub use header::Shape;

use super::gates::Tokens;
use super::{Error as LayerError, Routing};

/// Where routings come from instead of the gate, and where they go besides the layer.
#[derive(Clone, Debug)]
pub struct Routings {
    pub replay: Option<Recording>,
    pub record: Option<Recording>,
    /// Where scores and choices are kept in memory.
    pub decisions: Option<Decisions>,
}

impl Routings {
    /// Gates decide, and nothing is written.
    pub const NONE: Routings = Routings { replay: None, record: None, decisions: None };

    /// The routing of some tokens of one layer: the recorded one, or what `decide` says. Collective if `decide` is.
    ///
    /// # Errors
    /// What `decide` or a file reports.
    pub fn of(
        &self,
        tokens: &Tokens,
        decide: impl FnOnce() -> Result<Routing, LayerError>,
    ) -> Result<Routing, LayerError> {
        let rows = |recording: &Recording| recording.rows(tokens.first, tokens.len());
        let routing = match &self.replay {
            Some(recording) => recording.read(tokens.draws.step, tokens.draws.layer, rows(recording))?,
            None => decide()?,
        };
        if let Some(recording) = &self.record {
            recording.write(tokens.draws.step, tokens.draws.layer, rows(recording), &routing)?;
        }
        if let Some(decisions) = &self.decisions {
            decisions.note(tokens, &routing);
        }
        Ok(routing)
    }
}
