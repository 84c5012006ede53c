//! Buffers in memory that is not the host's, which a collective moves without a way by the host.
//!
//! A device is asked for copies by its rank's thread and makes them later. So a rank that has finished a round has asked
//! for everything, and what uses a buffer from there on comes after the others' copies by the buffers' *marks*: points in
//! a device's work that other devices wait for by themselves. No thread waits for a device.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::Communicator;
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

/// Bytes of a buffer on their way to a rank or from it.
#[derive(Debug)]
pub struct DeviceParcel<'a> {
    /// Rank of the group.
    pub peer: usize,
    pub buffer: &'a dyn DeviceBuffer,
    /// Not empty.
    pub bytes: Range<usize>,
}

/// Carries what is in devices' memory among the ranks of one group that cannot reach each other's, as NCCL does.
///
/// All ranks of the group ask for the same in the same order, and ranks that share several groups ask those in one order, too:
/// a device may do all that its rank's carriers are asked for one after the other. It is begun after the marks of the buffers,
/// which it renews, and nobody waits for a device or for another rank. Errors are the reason why it goes no further.
pub trait DeviceCarrier: Send + Sync {
    /// Copies `bytes` of `from` to `to` from an offset on, both of this rank's device.
    fn copy(&self, to: (&dyn DeviceBuffer, usize), from: &dyn DeviceBuffer, bytes: Range<usize>);

    /// Sends and receives all of these parcels, in whatever order.
    ///
    /// # Errors
    /// See the trait; so for all that follow.
    fn exchange(&self, sent: &[DeviceParcel], received: &[DeviceParcel]) -> Result<(), String>;

    /// Sends these parcels, and receives as many bytes as `own` has from every peer. Writes the reduction of what came and of
    /// `own`, in rank order, to `to` from an offset on; that may be where `own` is.
    ///
    /// # Errors
    /// See the trait.
    fn reduce(
        &self,
        reduce: Reduce,
        sent: &[DeviceParcel],
        own: (&dyn DeviceBuffer, Range<usize>),
        to: (&dyn DeviceBuffer, usize),
    ) -> Result<(), String>;
}

/// Opens carriers of groups, for one rank.
pub trait DeviceCarriers: Send + Sync {
    /// The carrier of this group, which is a lane of its own. Collective over the group.
    ///
    /// # Errors
    /// Why there is none.
    fn open(&self, group: &Arc<dyn Communicator>) -> Result<Arc<dyn DeviceCarrier>, String>;

    /// Ends what all carriers have under way, so that soon no device waits for other ranks any more; does not wait for it. Any
    /// thread may call it, and again.
    fn end(&self, reason: &str);
}
