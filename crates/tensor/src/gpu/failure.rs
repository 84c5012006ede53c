//! What ends a rank's work on its accelerator.
//!
//! Kernels return nothing, and hundreds of lines launch them. So a failure unwinds from where it is met to whoever runs the
//! rank, as a value that no panic hook reports, and is an ordinary error from there on.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::account::mib;

/// Why a device did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFailure {
    /// So many bytes more, beside those that tensors hold. Memory that waited for reuse had been given back before.
    #[error("the device has no room for {:.2} MiB more beside the {:.2} that tensors hold ({reason})", mib(*bytes), mib(*held))]
    NoRoom { bytes: u64, held: u64, reason: String },
    /// It refuses, or has ended.
    #[error("the device fails at {what}: {reason}")]
    Broken { what: String, reason: String },
    /// It is well, and waits no more for what other ranks were to send.
    #[error("what other ranks were to send has not come: {reason}")]
    Ended { reason: String },
}

impl DeviceFailure {
    pub(super) fn broken(what: impl Display, reason: impl Display) -> DeviceFailure {
        DeviceFailure::Broken { what: what.to_string(), reason: reason.to_string() }
    }

    /// Unwinds to the [`on_device`] around the caller: for who has caught it on another thread.
    pub fn raise(self) -> ! {
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
