//! Pages of the host that stay where they are, for copies that the device makes by itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Accelerator, DeviceFailure};

/// Of the host's memory.
const PAGE_BYTES: usize = 4096;

/// All bytes of the host that are pinned for an engine: how many, by the address of the first.
#[derive(Debug, Default)]
pub(super) struct PinnedBytes(Mutex<BTreeMap<usize, usize>>);

impl PinnedBytes {
    fn all(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, bytes: &[u8]) {
        self.all().insert(bytes.as_ptr().addr(), bytes.len());
    }

    pub(super) fn remove(&self, first: usize) {
        self.all().remove(&first);
    }

    /// Whether any of these lie in a page with some that are pinned, for which a driver may take all of the page.
    pub(super) fn share_pages_with(&self, bytes: &[u8]) -> bool {
        let page = |address: usize| address / PAGE_BYTES;
        let (first, last) = (page(bytes.as_ptr().addr()), page(bytes.as_ptr().addr() + bytes.len().max(1) - 1));
        self.all().iter().any(|(&from, &len)| page(from) <= last && first <= page(from + len.max(1) - 1))
    }

    /// Whether all of these are.
    pub(super) fn contain(&self, bytes: &[u8]) -> bool {
        let (first, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
        self.all().range(..=first).next_back().is_some_and(|(from, len)| end <= from + len)
    }
}

/// Bytes of the host that are pinned until this is dropped.
#[derive(Debug)]
pub(crate) struct PagePin {
    first: usize,
    engine: Arc<dyn Accelerator>,
}

impl PagePin {
    /// Bytes that cannot be pinned end the rank's work.
    pub(super) fn new(engine: &Arc<dyn Accelerator>, bytes: &[u8]) -> PagePin {
        let refused = |reason: String| DeviceFailure::broken(format_args!("pinning {} bytes", bytes.len()), reason);
        engine.pin(bytes).unwrap_or_else(|reason| refused(reason).raise());
        PagePin { first: bytes.as_ptr().addr(), engine: engine.clone() }
    }
}

impl Drop for PagePin {
    fn drop(&mut self) {
        self.engine.unpin(self.first);
    }
}
