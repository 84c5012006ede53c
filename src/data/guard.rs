//! Libraries that panic on foreign bytes: here that is one more error of the file.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Whether this thread is in such a library, so that its panic is not told besides the error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives, or `None` if it panics. Nothing that it was working on may be used afterwards.
pub(super) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work)).ok();
    GUARDED.set(outer);
    result
}

/// From now on this process says nothing of panics that become errors. All others are told as before.
pub fn keep_guarded_panics_quiet() {
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !GUARDED.get() {
            told(panic);
        }
    }));
}
