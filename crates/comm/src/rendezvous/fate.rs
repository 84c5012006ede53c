//! What all ranks of a world share, whatever they are split into: whether it has been aborted, one bell by which
//! sleeping ranks are woken, and the clock by which their waits run out. See README.md for the orderings.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::bell::Bell;
use crate::clock::Clock;
use crate::error::Error;
use crate::sync::atomic::{AtomicBool, Ordering};

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
    clock: Arc<dyn Clock>,
    spins: u32,
    aborted: AtomicBool,
    /// Rank and reason; set before `aborted`.
    cause: OnceLock<(usize, String)>,
    bell: Arc<Bell>,
}

impl Fate {
    /// The fate of a world of `size` threads in which every wait is limited by `timeout`, measured by `clock`.
    pub(crate) fn new(size: usize, timeout: Duration, clock: Arc<dyn Clock>) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Fate {
            timeout,
            clock,
            spins: if size > cores { SPINS_CROWDED } else { SPINS },
            aborted: AtomicBool::new(false),
            cause: OnceLock::new(),
            bell: Bell::new(),
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
        Error::aborted(by, reason)
    }

    /// Wakes sleeping ranks. To be called after the store they may be waiting for.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// Waits until `ready`: spins, then yields, then sleeps. What is ready wins over an abort, so that ranks which
    /// need nothing more from the failed one still finish what they had.
    ///
    /// Who `owes_a_ring` for a store before this rings when spinning was in vain. A fence before the first look would make the
    /// caller wait for that store, and only then see what others have stored.
    pub(crate) fn wait_until(&self, mut ready: impl FnMut() -> bool, owes_a_ring: bool) -> Result<(), Interrupt> {
        if self.spin_until(&mut ready) {
            return Ok(());
        }
        if owes_a_ring {
            self.ring();
        }
        let since = self.clock.now();
        match self.yield_until(&mut ready) {
            Some(result) => result,
            None => self.sleep_until(ready, since),
        }
    }

    fn spin_until(&self, ready: &mut impl FnMut() -> bool) -> bool {
        // The model checker would explore every look in vain; asleep it covers all but the first.
        let spins = if cfg!(loom) { 1 } else { self.spins };
        for _ in 0..spins {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    fn yield_until(&self, ready: &mut impl FnMut() -> bool) -> Option<Result<(), Interrupt>> {
        // How to wait is a matter of the machine's time, whatever clock says how long.
        let since = Instant::now();
        while !cfg!(loom) && since.elapsed() < YIELD_FOR.min(self.timeout) {
            if let Some(result) = self.look(ready) {
                return Some(result);
            }
            thread::yield_now();
        }
        None
    }

    fn sleep_until(&self, mut ready: impl FnMut() -> bool, since: Duration) -> Result<(), Interrupt> {
        let deadline = since.saturating_add(self.timeout);
        let found = self.bell.sleep_until(&*self.clock, deadline, || self.look(&mut ready));
        found.unwrap_or_else(|| Err(Interrupt::TimedOut { waited: self.clock.now() - since }))
    }

    fn look(&self, ready: &mut impl FnMut() -> bool) -> Option<Result<(), Interrupt>> {
        if ready() {
            return Some(Ok(()));
        }
        self.check().err().map(|aborted| Err(Interrupt::Aborted(aborted)))
    }
}
