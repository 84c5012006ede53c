//! What has come for one rank and has not been received yet.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use super::{Received, Signal};
use crate::bell::Bell;
use crate::sync::{Mutex, MutexGuard};

/// A queue with a bell.
pub(super) struct Inbox {
    queue: Mutex<VecDeque<Received>>,
    bell: Arc<Bell>,
}

impl Inbox {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Inbox { queue: Mutex::new(VecDeque::new()), bell: Bell::new() })
    }

    pub(super) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(super) fn post(&self, from: usize, signal: Signal) {
        self.queue().push_back(Received { from, signal });
        self.bell.ring();
    }

    pub(super) fn take(&self) -> Option<Received> {
        self.queue().pop_front()
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Received>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
