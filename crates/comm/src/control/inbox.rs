//! What has come for one rank and has not been received yet.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, PoisonError};

use super::{OnFailure, Received, Signal};
use crate::bell::Bell;
use crate::sync::{Mutex, MutexGuard};

/// A queue with a bell.
pub(crate) struct Inbox {
    queue: Mutex<VecDeque<Received>>,
    bell: Arc<Bell>,
    on_failure: OnceLock<OnFailure>,
}

impl Inbox {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Inbox { queue: Mutex::new(VecDeque::new()), bell: Bell::new(), on_failure: OnceLock::new() })
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// To be called once.
    pub(crate) fn on_failure(&self, call: OnFailure) {
        assert!(self.on_failure.set(call).is_ok(), "a lane tells one listener of failures");
    }

    pub(crate) fn post(&self, from: usize, signal: Signal) {
        let is_failure = matches!(signal, Signal::Failed { .. });
        self.queue().push_back(Received { from, signal });
        self.bell.ring();
        if let Some(call) = self.on_failure.get().filter(|_| is_failure) {
            call();
        }
    }

    pub(crate) fn take(&self) -> Option<Received> {
        self.queue().pop_front()
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Received>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
