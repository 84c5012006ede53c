//! Where threads sleep until something they look for has happened, or a clock says that it is too late.
//!
//! Ringing costs a fence and a load while nobody sleeps. Why no ring is lost is told in the table of orderings in
//! `rendezvous/README.md`.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::clock::Clock;
use crate::sync::atomic::{AtomicUsize, Ordering, fence};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What wakes sleeping threads.
pub struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    ringing: Condvar,
    /// How often sleepers were woken; changed under the lock. Concerns tests alone, so loom need not see it.
    rings: AtomicU64,
}

impl Bell {
    /// A bell at which nobody sleeps.
    pub fn new() -> Arc<Self> {
        Arc::new(Bell {
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            ringing: Condvar::new(),
            rings: AtomicU64::new(0),
        })
    }

    /// Wakes all who sleep here. To be called after the store they may be waiting for, and not from within a `look`.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            // Taking the lock lets a thread between its last look and its sleep fall asleep before it is woken.
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.rings.fetch_add(1, Ordering::Relaxed);
            drop(guard);
            self.ringing.notify_all();
        }
    }

    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Ordering::Relaxed)
    }

    /// Sleeps until `look` finds something, looking again at every ring; nothing if by `deadline` it has not. `look` may
    /// ring no bell.
    pub fn sleep_until<T>(
        self: &Arc<Self>,
        clock: &dyn Clock,
        deadline: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut sleeper = Sleeper { bell: self, guard };
        let found = loop {
            // The clock is read first, so that what happened before the deadline is found.
            let is_late = clock.now() >= deadline;
            let found = look();
            if found.is_some() || is_late {
                break found;
            }
            sleeper = clock.wait_until(deadline, sleeper);
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        drop(sleeper);
        found
    }
}

/// A thread about to sleep: whoever rings its bell from now on wakes it.
pub struct Sleeper<'a> {
    bell: &'a Arc<Bell>,
    guard: MutexGuard<'a, ()>,
}

impl<'a> Sleeper<'a> {
    /// What wakes it.
    pub fn bell(&self) -> &'a Arc<Bell> {
        self.bell
    }

    /// Awake meanwhile: does something else, in which others may ring the bell.
    pub(crate) fn meanwhile(self, act: impl FnOnce()) -> Self {
        let Sleeper { bell, guard } = self;
        drop(guard);
        act();
        Sleeper { bell, guard: bell.lock.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Sleeps until the bell rings, for `at_most` so long if that is said; may also wake for no reason.
    pub fn sleep(self, at_most: Option<Duration>) -> Self {
        let Sleeper { bell, guard } = self;
        let guard = match at_most {
            Some(limit) => bell.ringing.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0,
            None => bell.ringing.wait(guard).unwrap_or_else(PoisonError::into_inner),
        };
        Sleeper { bell, guard }
    }
}
