//! Checkpoints that could not be written.

use std::path::Path;

use crate::checkpoint;

/// Steps after a checkpoint that could not be written until the next is tried: a disk may have been cleared by then. After each
/// that fails they are twice as many, so that a disk which stays as it is does not fill the log, up to a limit.
const AGAIN_AFTER: u64 = 10;
const AGAIN_AFTER_MAX: u64 = 640;

/// A checkpoint that is still to be written, because the last could not.
#[derive(Clone, Copy)]
pub(super) struct Overdue {
    /// The first step whose checkpoint was not written.
    since: u64,
    /// The step after which it is tried again.
    again: u64,
    /// Steps from the last try to that one.
    pause: u64,
}

impl Overdue {
    /// That of `step` could not be written, as is known at step `now`; nor could those of `earlier`.
    pub(super) fn after(earlier: Option<Overdue>, step: u64, now: u64) -> Overdue {
        let (since, pause) =
            earlier.map_or((step, AGAIN_AFTER), |overdue| (overdue.since, (2 * overdue.pause).min(AGAIN_AFTER_MAX)));
        Overdue { since, again: now.saturating_add(pause), pause }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where a disk stays full through hundreds of checkpoints.
    #[test]
    fn pauses_grow_to_a_limit() {
        // A pause begins when it is known that a checkpoint was not written.
        let late = Overdue::after(None, 5, 9);
        assert!(late.is_due(19) && !late.is_due(18));
        let mut overdue = Overdue::after(None, 5, 5);
        assert!(overdue.is_due(15) && !overdue.is_due(14));
        overdue = Overdue::after(Some(overdue), 15, 15);
        assert!(overdue.is_due(35) && !overdue.is_due(34));
        for step in 36..236 {
            overdue = Overdue::after(Some(overdue), step, step);
        }
        assert!(overdue.is_due(235 + AGAIN_AFTER_MAX) && !overdue.is_due(234 + AGAIN_AFTER_MAX));
        assert!(!Overdue::after(Some(overdue), 5, u64::MAX - 5).is_due(u64::MAX - 6), "nothing overflows");
        assert!(overdue.is_made_up(240).contains("since step 5"));
    }
}
