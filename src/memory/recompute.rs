//! From what a recipe says of recomputation to what tapes are told.

use guildhall_tensor::{Part, Recompute as Segments};

use super::config::{Config, Operation, Recompute};

impl Operation {
    /// The segments that it consists of.
    pub fn part(self) -> Part {
        match self {
            Operation::Attention => Part::Attention,
            Operation::Activations => Part::Activation,
            Operation::Experts => Part::Experts,
        }
    }
}

impl Config {
    /// Those that run again if operations do.
    pub fn operations(&self) -> &[Operation] {
        self.recompute_operations.as_deref().unwrap_or(&Operation::ALL)
    }

    /// The segments that run twice, and what their second run takes from the first.
    pub fn segments(&self) -> Segments {
        let parts = match self.recompute {
            Recompute::None => Vec::new(),
            Recompute::Block => vec![Part::Block],
            Recompute::Operations => self.operations().iter().map(|operation| operation.part()).collect(),
        };
        Segments::of(parts, self.keep_communication)
    }
}
