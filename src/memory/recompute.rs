//! From what a recipe says of recomputation to what tapes are told.

use guildhall_tensor::{Part, Recompute as Segments};

use super::config::{Config, Operation, Recompute};

impl Config {
    /// The segments that run twice, and what their second run takes from the first.
    pub fn segments(&self) -> Segments {
        let part = |operation: &Operation| match operation {
            Operation::Attention => Part::Attention,
            Operation::Activations => Part::Activation,
            Operation::Experts => Part::Experts,
        };
        let parts = match self.recompute {
            Recompute::None => Vec::new(),
            Recompute::Block => vec![Part::Block],
            Recompute::Operations => {
                self.recompute_operations.as_deref().unwrap_or(&Operation::ALL).iter().map(part).collect()
            }
        };
        Segments::of(parts, self.keep_communication)
    }
}
