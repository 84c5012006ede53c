//! What is kept of the tokens so far where a text is continued.

use guildhall_tensor::Tensor;
use guildhall_tensor::ops::KvCache;

/// Of one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache {
    pub(super) keys_values: KvCache,
    /// Relative positions: the projected distances, which no token changes.
    pub(super) distances: Option<Tensor>,
}
