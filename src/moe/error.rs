//! Why a MoE layer stopped.

use guildhall_comm as comm;

use super::recording;

/// A failure on one rank.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] comm::Error),
    #[error("{key}: {why}")]
    Shadowing { key: &'static str, why: &'static str },
    /// Experts, perhaps a user's, that are cut otherwise than the mesh says.
    #[error(
        "experts cut into {held} slices on a mesh that cuts them into {slices}: set parallel.expert_tensor = {held}, or \
         make experts of {slices} slices (Expert::slices)"
    )]
    Slices { held: usize, slices: usize },
    /// A gate or experts, perhaps a user's, that do not let tokens share rows.
    #[error(
        "layer {layer}: moe.condense: {because}. Set moe.condense to \"off\" (MoeLayer::condensation to None), or take {instead}"
    )]
    Condensation { layer: u32, because: &'static str, instead: &'static str },
    #[error(transparent)]
    Recording(#[from] recording::Error),
    /// A gate, perhaps a user's, gave what cannot be a routing.
    #[error(
        "layer {layer}: the gate {gate} {problem}; a gate gives, for every token and choice, a different expert below \
         the number of experts, or Routing::DROPPED"
    )]
    Gate { layer: u32, gate: String, problem: String },
    /// A gate that compares tokens was shown padding.
    #[error(
        "layer {layer}: the gate {gate} compares tokens with each other, and would count the padding at the ends of rows \
         (Gate::skips_padding): choose another gate, for example \"softmax\""
    )]
    Padding { layer: u32, gate: String },
    /// A rewrite, perhaps a user's, lets tokens share a row that go on to different ranks.
    #[error(
        "tokens {} and {} of a rank share a row, and their sequences go on to different ranks: only tokens of one sequence \
         may share rows where sequences migrate",
        tokens[0], tokens[1]
    )]
    SharedRow { tokens: [u32; 2] },
    /// A migration policy, perhaps a user's, gave an impossible answer.
    #[error(
        "layer {layer}: the migration policy {policy} {problem}; a policy gives, for every sequence of every host, a host \
         below the number of hosts"
    )]
    Migration { layer: u32, policy: String, problem: String },
}

impl Error {
    /// Whether another rank's failure was the cause.
    pub fn is_consequence(&self) -> bool {
        matches!(self, Error::Comm(comm::Error::Aborted { .. }))
    }
}
