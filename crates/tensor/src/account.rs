//! Byte accounting: what lives on a device now, the most that ever did, and for which cause.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// Why memory is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cause {
    Parameters,
    Gradients,
    Optimizer,
    Activations,
    Communication,
    /// The copy of a state that is being written.
    Checkpoint,
    Other,
}

impl Cause {
    pub const ALL: [Cause; 7] = [
        Cause::Parameters,
        Cause::Gradients,
        Cause::Optimizer,
        Cause::Activations,
        Cause::Communication,
        Cause::Checkpoint,
        Cause::Other,
    ];

    /// The name used in `summary.json`.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Parameters => "parameters",
            Cause::Gradients => "gradients",
            Cause::Optimizer => "optimizer",
            Cause::Activations => "activations",
            Cause::Communication => "communication",
            Cause::Checkpoint => "checkpoint",
            Cause::Other => "other",
        }
    }
}

/// Live and peak bytes of one device. The counts are of live tensors, and of what collectives of devices add up in; memory
/// waiting for reuse is not live.
#[derive(Debug)]
pub struct Account {
    current: AtomicU8,
    live: [AtomicU64; Cause::ALL.len()],
    peak: [AtomicU64; Cause::ALL.len()],
    live_total: AtomicU64,
    peak_total: AtomicU64,
    /// What was alive when the most was.
    at_peak: [AtomicU64; Cause::ALL.len()],
    limit: AtomicU64,
    excess: OnceLock<Excess>,
}

/// The first time that more was asked for than an account may come to. It was given: to end is up to whoever looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    pub cause: Cause,
    pub asked: u64,
    pub limit: u64,
    /// Bytes alive by cause, in the order of [`Cause::ALL`], with what was asked for.
    pub held: [u64; Cause::ALL.len()],
}

pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (cause, total) = (self.cause.name(), self.held.iter().sum());
        write!(f, "{:.2} MiB more for {cause} made {:.2} MiB", mib(self.asked), mib(total))?;
        write!(f, " of at most {:.2} MiB:", mib(self.limit))?;
        let held = Cause::ALL.iter().zip(self.held).filter(|(_, bytes)| *bytes > 0);
        for (i, (cause, bytes)) in held.enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma} {} {:.2}", cause.name(), mib(bytes))?;
        }
        Ok(())
    }
}

impl Account {
    pub(crate) fn new() -> Account {
        Account {
            current: AtomicU8::new(Cause::Activations as u8),
            live: Default::default(),
            peak: Default::default(),
            live_total: AtomicU64::new(0),
            peak_total: AtomicU64::new(0),
            at_peak: Default::default(),
            limit: AtomicU64::new(u64::MAX),
            excess: OnceLock::new(),
        }
    }

    /// From now on, notes the first time that more than so many bytes are alive.
    pub fn limit(&self, bytes: u64) {
        self.limit.store(bytes, Relaxed);
    }

    /// What went beyond the limit, if anything did.
    pub fn excess(&self) -> Option<&Excess> {
        self.excess.get()
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

    /// Bytes alive for `cause` when the most were alive at once.
    pub fn at_peak(&self, cause: Cause) -> u64 {
        self.at_peak[cause as usize].load(Relaxed)
    }

    /// Forgets all peaks: what is alive now is the most.
    pub fn restart_peaks(&self) {
        for cause in Cause::ALL {
            let live = self.live(cause);
            self.peak[cause as usize].store(live, Relaxed);
            self.at_peak[cause as usize].store(live, Relaxed);
        }
        self.peak_total.store(self.live_total(), Relaxed);
    }

    pub(crate) fn current(&self) -> Cause {
        Cause::ALL[self.current.load(Relaxed) as usize]
    }

    pub(crate) fn add(&self, cause: Cause, bytes: u64) {
        raise(&self.live[cause as usize], &self.peak[cause as usize], bytes);
        let before = self.peak_total();
        let (now, limit) = (raise(&self.live_total, &self.peak_total, bytes), self.limit.load(Relaxed));
        if now > before {
            self.at_peak.iter().zip(&self.live).for_each(|(at_peak, live)| at_peak.store(live.load(Relaxed), Relaxed));
        }
        if now > limit {
            let held = || Cause::ALL.map(|cause| self.live(cause));
            self.excess.get_or_init(|| Excess { cause, asked: bytes, limit, held: held() });
        }
    }

    pub(crate) fn remove(&self, cause: Cause, bytes: u64) {
        self.live[cause as usize].fetch_sub(bytes, Relaxed);
        self.live_total.fetch_sub(bytes, Relaxed);
    }
}

/// What is then alive.
fn raise(live: &AtomicU64, peak: &AtomicU64, bytes: u64) -> u64 {
    let now = live.fetch_add(bytes, Relaxed) + bytes;
    peak.fetch_max(now, Relaxed);
    now
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
