//! From what a recipe says of recomputation to what tapes are told.

use guildhall_tensor::{Part, Recompute as Segments};

use super::config::{Config, RecomputeMode, RecomputedOp};

impl RecomputedOp {
    /// The segments that it consists of.
    pub fn part(self) -> Part {
        match self {
            RecomputedOp::Attention => Part::Attention,
            RecomputedOp::Activations => Part::Activation,
            RecomputedOp::Experts => Part::Experts,
        }
    }
}

impl Config {
    /// Those that run again if operations do.
    pub fn operations(&self) -> &[RecomputedOp] {
        self.recompute_operations.as_deref().unwrap_or(&RecomputedOp::ALL)
    }

    /// The segments that run twice, and what their second run takes from the first.
    pub fn segments(&self) -> Segments {
        let parts = match self.recompute {
            RecomputeMode::None => Vec::new(),
            RecomputeMode::Block => vec![Part::Block],
            RecomputeMode::Operations => self.operations().iter().map(|operation| operation.part()).collect(),
        };
        Segments::of(parts, self.keep_communication)
    }
}
