//! What all ranks of a world share, whatever they are split into: whether it has been aborted, and one bell by
//! which sleeping ranks are woken. See README.md for the orderings.

use std::sync::{OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use crate::sync::{Condvar, Mutex};

/// How often a waiting rank looks before it gives its core away: some 3 microseconds. More would gain nothing on an
/// idle core, where a yield returns at once, and lose much when two ranks happen to share a busy one.
const SPINS: u32 = 100;

/// Looks when ranks outnumber cores: whoever we wait for may need this very core.
const SPINS_CROWDED: u32 = 20;

/// How long a rank then looks between yields before it sleeps.
const YIELD_FOR: Duration = Duration::from_micros(500);

/// Why a wait ended without what it waited for.
#[derive(Debug)]
pub(crate) enum Interrupt {
    Aborted(Error),
    TimedOut { waited: Duration },
}

/// The shared end of a world.
pub(crate) struct Fate {
    timeout: Duration,
    spins: u32,
    aborted: AtomicBool,
    /// Rank and reason; set before `aborted`.
    cause: OnceLock<(usize, String)>,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Fate {
    /// The fate of a world of `size` threads in which every wait is limited by `timeout`.
    pub(crate) fn new(size: usize, timeout: Duration) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Fate {
            timeout,
            spins: if size > cores { SPINS_CROWDED } else { SPINS },
            aborted: AtomicBool::new(false),
            cause: OnceLock::new(),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            bell: Condvar::new(),
        }
    }

    /// Ends the world; the first cause is kept.
    pub(crate) fn abort(&self, by: usize, reason: &str) {
        // A later cause is a consequence of the first one: dropping it is the point.
        let _ = self.cause.set((by, reason.to_string()));
        self.aborted.store(true, Ordering::Release);
        self.ring();
    }

    /// An error once the world has been aborted.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.aborted.load(Ordering::Acquire) { Err(self.error()) } else { Ok(()) }
    }

    /// What every operation gets once the world has been aborted.
    pub(crate) fn error(&self) -> Error {
        let (by, reason) = self.cause.get().expect("the cause is set before anybody is told of it").clone();
        Error::Aborted { by, reason }
    }

    /// Wakes sleeping ranks. To be called after the store they may be waiting for.
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            // Taking the lock lets a rank between its last look and its sleep fall asleep before it is woken.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.bell.notify_all();
        }
    }

    /// Waits until `ready`: spins, then yields, then sleeps. What is ready wins over an abort, so that ranks which
    /// need nothing more from the failed one still finish what they had.
    pub(crate) fn wait_until(&self, mut ready: impl FnMut() -> bool) -> Result<(), Interrupt> {
        if self.spin_until(&mut ready) {
            return Ok(());
        }
        let since = Instant::now();
        match self.yield_until(&mut ready, since) {
            Some(result) => result,
            None => self.sleep_until(ready, since),
        }
    }

    fn spin_until(&self, ready: &mut impl FnMut() -> bool) -> bool {
        // The model checker would explore every look in vain; asleep it covers all of them.
        let spins = if cfg!(loom) { 0 } else { self.spins };
        for _ in 0..spins {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    fn yield_until(&self, ready: &mut impl FnMut() -> bool, since: Instant) -> Option<Result<(), Interrupt>> {
        while !cfg!(loom) && since.elapsed() < YIELD_FOR.min(self.timeout) {
            if ready() {
                return Some(Ok(()));
            }
            if let Err(aborted) = self.check() {
                return Some(Err(Interrupt::Aborted(aborted)));
            }
            thread::yield_now();
        }
        None
    }

    fn sleep_until(&self, mut ready: impl FnMut() -> bool, since: Instant) -> Result<(), Interrupt> {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let result = loop {
            if ready() {
                break Ok(());
            }
            if let Err(aborted) = self.check() {
                break Err(Interrupt::Aborted(aborted));
            }
            let waited = since.elapsed();
            if waited >= self.timeout {
                break Err(Interrupt::TimedOut { waited });
            }
            let woken = self.bell.wait_timeout(guard, self.timeout - waited);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
        result
    }
}
