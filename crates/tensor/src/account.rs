//! Byte accounting: what lives on a device now, the most that ever did, and for which cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use crate::device::Device;

/// Why memory is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cause {
    Parameters,
    Gradients,
    Optimizer,
    Activations,
    Communication,
    Other,
}

impl Cause {
    pub const ALL: [Cause; 6] =
        [Cause::Parameters, Cause::Gradients, Cause::Optimizer, Cause::Activations, Cause::Communication, Cause::Other];

    /// The name used in `summary.json`.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Parameters => "parameters",
            Cause::Gradients => "gradients",
            Cause::Optimizer => "optimizer",
            Cause::Activations => "activations",
            Cause::Communication => "communication",
            Cause::Other => "other",
        }
    }
}

/// Live and peak bytes of one device. The counts are of live tensors; memory waiting for reuse is not live.
#[derive(Debug)]
pub struct Account {
    current: AtomicU8,
    live: [AtomicU64; Cause::ALL.len()],
    peak: [AtomicU64; Cause::ALL.len()],
    live_total: AtomicU64,
    peak_total: AtomicU64,
}

impl Account {
    pub(crate) fn new() -> Account {
        Account {
            current: AtomicU8::new(Cause::Activations as u8),
            live: Default::default(),
            peak: Default::default(),
            live_total: AtomicU64::new(0),
            peak_total: AtomicU64::new(0),
        }
    }

    /// Until the guard is dropped, new tensors are charged to `cause`.
    pub fn charge(&self, cause: Cause) -> Charge<'_> {
        let before = self.current.swap(cause as u8, Relaxed);
        Charge { account: self, before }
    }

    /// Bytes alive now for `cause`.
    pub fn live(&self, cause: Cause) -> u64 {
        self.live[cause as usize].load(Relaxed)
    }

    /// The most bytes ever alive for `cause`. Peaks of different causes need not fall together.
    pub fn peak(&self, cause: Cause) -> u64 {
        self.peak[cause as usize].load(Relaxed)
    }

    /// Bytes alive now.
    pub fn live_total(&self) -> u64 {
        self.live_total.load(Relaxed)
    }

    /// The most bytes ever alive at once.
    pub fn peak_total(&self) -> u64 {
        self.peak_total.load(Relaxed)
    }

    pub(crate) fn current(&self) -> Cause {
        Cause::ALL[self.current.load(Relaxed) as usize]
    }

    pub(crate) fn add(&self, cause: Cause, bytes: u64) {
        raise(&self.live[cause as usize], &self.peak[cause as usize], bytes);
        raise(&self.live_total, &self.peak_total, bytes);
    }

    pub(crate) fn remove(&self, cause: Cause, bytes: u64) {
        self.live[cause as usize].fetch_sub(bytes, Relaxed);
        self.live_total.fetch_sub(bytes, Relaxed);
    }
}

fn raise(live: &AtomicU64, peak: &AtomicU64, bytes: u64) {
    let now = live.fetch_add(bytes, Relaxed) + bytes;
    peak.fetch_max(now, Relaxed);
}

/// Restores the previous cause when dropped.
pub struct Charge<'a> {
    account: &'a Account,
    before: u8,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.account.current.store(self.before, Relaxed);
    }
}

/// Bytes that are a tensor's no more and still held, as by a collective under way. Counted until dropped.
#[derive(Debug)]
pub struct Held {
    device: Arc<Device>,
    cause: Cause,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(device: Arc<Device>, cause: Cause, bytes: u64) -> Held {
        device.account().add(cause, bytes);
        Held { device, cause, bytes }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.device.account().remove(self.cause, self.bytes);
    }
}
