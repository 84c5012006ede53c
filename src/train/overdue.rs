//! Checkpoints that could not be written.

use std::path::Path;

use crate::checkpoint;

/// Steps after a checkpoint that could not be written until the next is tried: a disk may have been cleared by then.
const AGAIN_AFTER: u64 = 10;

/// A checkpoint that is still to be written, because the last could not.
#[derive(Clone, Copy)]
pub(super) struct Overdue {
    /// The first step whose checkpoint was not written.
    since: u64,
    /// The step after which it is tried again.
    again: u64,
}

impl Overdue {
    /// That of `step` could not be written, as is known at step `now`; nor could those of `earlier`.
    pub(super) fn after(earlier: Option<Overdue>, step: u64, now: u64) -> Overdue {
        Overdue { since: earlier.map_or(step, |overdue| overdue.since), again: now + AGAIN_AFTER }
    }

    pub(super) fn is_due(&self, step: u64) -> bool {
        step >= self.again
    }

    pub(super) fn warning(
        &self,
        step: u64,
        error: &checkpoint::Error,
        (newest, steps): (Option<&Path>, u64),
    ) -> String {
        let kept =
            newest.map_or("no checkpoint is the newest".to_owned(), |path| format!("{} is the newest", path.display()));
        let early = if self.again < steps { format!("after step {} or ", self.again) } else { String::new() };
        format!(
            "warning: no checkpoint of step {step}: {error}\n  training goes on, and tries again {early}with the next \
             checkpoint that is due; until then {kept}"
        )
    }

    pub(super) fn is_made_up(&self, step: u64) -> String {
        format!("note: the checkpoint of step {step} is written, the first since step {}", self.since)
    }
}
