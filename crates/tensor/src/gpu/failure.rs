//! What ends a rank's work on its accelerator.
//!
//! Kernels return nothing, and hundreds of lines launch them. So a failure unwinds from where it is met to whoever runs the
//! rank, as a value that no panic hook reports, and is an ordinary error from there on.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Why a device did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFailure {
    /// Memory that waited for reuse had been given back before.
    #[error("the device has no room for {bytes} bytes more beside the {held} that tensors hold ({reason})")]
    NoRoom { bytes: u64, held: u64, reason: String },
    /// Nothing more can be asked of it.
    #[error("the device fails at {what}: {reason}")]
    Broken { what: String, reason: String },
}

impl DeviceFailure {
    pub(super) fn broken(what: impl Display, reason: impl Display) -> DeviceFailure {
        DeviceFailure::Broken { what: what.to_string(), reason: reason.to_string() }
    }

    /// Unwinds to the [`on_device`] around the caller.
    pub(crate) fn raise(self) -> ! {
        resume_unwind(Box::new(self))
    }
}

/// Runs what works on a device.
///
/// # Errors
/// The device's failure, which ended it. What it worked on is of no use then but to be dropped.
pub fn on_device<R>(run: impl FnOnce() -> R) -> Result<R, DeviceFailure> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|thrown| match thrown.downcast::<DeviceFailure>() {
        Ok(failure) => *failure,
        Err(panic) => resume_unwind(panic),
    })
}
