//! Buffers in memory that is not the host's, which a collective moves without a way by the host.
//!
//! A device is asked for copies by its rank's thread and makes them later. So a rank that has finished a round has asked
//! for everything, and what uses a buffer from there on comes after the others' copies by the buffers' *marks*: points in
//! a device's work that other devices wait for by themselves. No thread waits for a device.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;

use crate::operation::Reduce;

/// A rank's memory, lent to a collective. Offsets and ranges are in bytes of what takes part.
///
/// When it is lent it bears the mark of all that its owner's device has been asked for. Each method begins its work and
/// does not wait; work of one owner is done in the order in which it is begun. The buffers of one operation are of
/// devices that can reach each other's memory.
pub trait DeviceBuffer: Any + Debug + Send + Sync {
    /// Copies `bytes` of `from` to this buffer from `first` on, after the marks of both.
    ///
    /// # Panics
    /// If bytes lie beyond either buffer.
    fn copy(&self, first: usize, from: &dyn DeviceBuffer, bytes: Range<usize>);

    /// Writes the reduction of `bytes` of all `from`, taken in their order, to this buffer from `first` on, after the marks
    /// of all; it may be one of them, and the bytes the same.
    ///
    /// # Panics
    /// As [`DeviceBuffer::copy`], and of elements that are no floats.
    fn reduce(&self, first: usize, reduce: Reduce, from: &[&dyn DeviceBuffer], bytes: Range<usize>);

    /// Marks it: others use it after what its owner's device has begun for this collective and those before.
    fn mark(&self);

    /// Its owner uses it after the mark of `other`.
    fn wait(&self, other: &dyn DeviceBuffer);

    /// Waits until its owner's device is done with what it has begun for collectives. For an end after a failure: it does not
    /// fail itself.
    fn settle(&self);
}
