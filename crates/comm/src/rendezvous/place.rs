//! Where the bytes of a published buffer are, and how they move: the host's at once, a device's by its own copies.

use std::ops::Range;
use std::ptr;

use crate::arithmetic;
use crate::device::DeviceBuffer;
use crate::operation::Reduce;
use crate::payload::{ElementKind, Payload};

/// The first byte that takes part, or the device's buffer. Offsets and ranges are in bytes.
#[derive(Clone, Copy)]
pub(super) enum BufferPlace {
    Host(*mut u8),
    Device(*const dyn DeviceBuffer),
}

impl BufferPlace {
    /// Valid while the payload lives and is not resized.
    pub(super) fn of(payload: &mut Payload) -> BufferPlace {
        match payload {
            Payload::Device(.., buffer) => BufferPlace::Device(&raw const **buffer),
            host => BufferPlace::Host(host.as_mut_bytes_ptr()),
        }
    }

    /// Of what has no bytes.
    pub(super) fn nowhere() -> BufferPlace {
        BufferPlace::Host(ptr::null_mut())
    }

    /// Copies `bytes` of `from` here, from `first` on.
    ///
    /// # Safety
    /// Both buffers are published in this round and in one memory, the bytes lie within them, and nobody else touches those
    /// of this one.
    pub(super) unsafe fn copy(self, first: usize, from: BufferPlace, bytes: Range<usize>) {
        // SAFETY: the caller's promise.
        match (self, from) {
            (BufferPlace::Host(to), BufferPlace::Host(from)) => unsafe {
                ptr::copy_nonoverlapping(from.add(bytes.start).cast_const(), to.add(first), bytes.len());
            },
            (BufferPlace::Device(to), BufferPlace::Device(from)) => unsafe { (*to).copy(first, &*from, bytes) },
            _ => unreachable!("operations agree on the memory of their buffers"),
        }
    }

    /// Writes the reduction of `bytes` of all `from`, in their order, here from `first` on.
    ///
    /// # Safety
    /// As for [`BufferPlace::copy`]; one of `from` may be this buffer, and its bytes those that are written.
    pub(super) unsafe fn reduce(
        self,
        first: usize,
        (kind, reduce): (ElementKind, Reduce),
        from: &[BufferPlace],
        bytes: Range<usize>,
    ) {
        // SAFETY: the caller's promise.
        match self {
            BufferPlace::Host(to) => unsafe {
                let sources: Vec<*const u8> = from.iter().map(|from| from.host().add(bytes.start)).collect();
                arithmetic::reduce(kind, reduce, &sources, to.add(first), bytes.len() / kind.size());
            },
            BufferPlace::Device(to) => unsafe {
                let sources: Vec<&dyn DeviceBuffer> = from.iter().map(|from| &*from.device()).collect();
                (*to).reduce(first, reduce, &sources, bytes);
            },
        }
    }

    /// Others use what has been written here after it is there.
    ///
    /// # Safety
    /// The buffer is this rank's own, and published in this round.
    pub(super) unsafe fn mark(self) {
        if let BufferPlace::Device(own) = self {
            // SAFETY: the caller's promise.
            unsafe { (*own).mark() };
        }
    }

    /// The owner uses this one after what `other`'s owner has begun before its mark.
    ///
    /// # Safety
    /// Both buffers are published in this round.
    pub(super) unsafe fn wait(self, other: BufferPlace) {
        if let (BufferPlace::Device(own), BufferPlace::Device(other)) = (self, other) {
            // SAFETY: the caller's promise.
            unsafe { (*own).wait(&*other) };
        }
    }

    /// Waits until its owner's device moves nothing any more.
    ///
    /// # Safety
    /// The buffer is this rank's own, and published.
    pub(super) unsafe fn settle(self) {
        if let BufferPlace::Device(own) = self {
            // SAFETY: the caller's promise.
            unsafe { (*own).settle() };
        }
    }

    fn host(self) -> *const u8 {
        let BufferPlace::Host(first) = self else { unreachable!("operations agree on the memory of their buffers") };
        first
    }

    fn device(self) -> *const dyn DeviceBuffer {
        let BufferPlace::Device(buffer) = self else { unreachable!("operations agree on the memory of their buffers") };
        buffer
    }
}
