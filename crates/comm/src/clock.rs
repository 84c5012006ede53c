//! The time by which waits run out, as a value, so that tests of time-outs need not wait for them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::bell::{Bell, Sleeper};

/// Between two looks of who looks for something that rings no bell.
pub(crate) const LOOK_EVERY: Duration = Duration::from_micros(100);

/// After which part of its timeout a waiting rank tells all others where it is.
pub(crate) const TELL_AFTER: u32 = 10;

/// Such a one looks again at once so often, then lets other threads run in between, then sleeps.
const LOOKS_AT_ONCE: u32 = 200;
const LOOKS_YIELDING: u32 = 2000;

/// What time it is, and how to sleep until a time.
pub trait Clock: Send + Sync {
    /// The time since a moment of the clock's own choosing. It never goes back.
    fn now(&self) -> Duration;

    /// Sleeps until the sleeper's bell rings or the time is `deadline`; may also wake for no reason.
    fn wait_until<'a>(&self, deadline: Duration, sleeper: Sleeper<'a>) -> Sleeper<'a>;

    /// Passes the time of one who has looked `looks` times for something that rings no bell, and looks again when this
    /// returns: soon, and not after `deadline`.
    fn linger(&self, looks: u32, _deadline: Duration) {
        match looks {
            0..LOOKS_AT_ONCE => std::hint::spin_loop(),
            LOOKS_AT_ONCE..LOOKS_YIELDING => thread::yield_now(),
            _ => thread::sleep(LOOK_EVERY),
        }
    }
}

impl dyn Clock {
    /// Sleeps until the time is `deadline`.
    pub fn sleep_until(&self, deadline: Duration) {
        Bell::new().sleep_until(self, deadline, || None::<()>);
    }
}

/// The time of the machine.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// A clock that begins now.
    pub fn new() -> Arc<Self> {
        Arc::new(SystemClock(Instant::now()))
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wait_until<'a>(&self, deadline: Duration, sleeper: Sleeper<'a>) -> Sleeper<'a> {
        sleeper.sleep(Some(deadline.saturating_sub(self.now())))
    }
}

/// A clock that stands still until it is set forward.
pub struct ManualClock {
    state: Mutex<ManualState>,
    /// Tells [`ManualClock::await_sleepers`] of one more.
    asleep: Condvar,
}

#[derive(Default)]
struct ManualState {
    now: Duration,
    sleepers: Vec<Asleep>,
}

/// Who sleeps until when.
struct Asleep {
    deadline: Duration,
    bell: Arc<Bell>,
    /// How often the bell had rung when the sleep began.
    rings: u64,
}

impl ManualClock {
    /// A clock at zero.
    pub fn new() -> Arc<Self> {
        Arc::new(ManualClock { state: Mutex::default(), asleep: Condvar::new() })
    }

    /// Lets `time` pass, and wakes all who sleep by this clock.
    pub fn advance(&self, time: Duration) {
        let mut state = self.state();
        state.now = state.now.saturating_add(time);
        let bells: Vec<Arc<Bell>> = state.sleepers.iter().map(|asleep| asleep.bell.clone()).collect();
        drop(state);
        bells.iter().for_each(|bell| bell.ring());
    }

    /// Returns when at least `count` threads sleep until times to come, and none of them has been rung for since.
    pub fn await_sleepers(&self, count: usize) {
        let are_few = |state: &mut ManualState| {
            let sleeps = |asleep: &&Asleep| asleep.deadline > state.now && asleep.bell.rings() == asleep.rings;
            state.sleepers.iter().filter(sleeps).count() < count
        };
        drop(self.asleep.wait_while(self.state(), are_few).unwrap_or_else(PoisonError::into_inner));
    }

    fn state(&self) -> MutexGuard<'_, ManualState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        self.state().now
    }

    fn wait_until<'a>(&self, deadline: Duration, sleeper: Sleeper<'a>) -> Sleeper<'a> {
        let bell = sleeper.bell();
        let mut state = self.state();
        if state.now >= deadline {
            return sleeper;
        }
        let rings = bell.rings();
        state.sleepers.push(Asleep { deadline, bell: bell.clone(), rings });
        drop(state);
        self.asleep.notify_all();
        // Whoever sets the clock forward finds the bell listed, and can ring it only when the sleeper sleeps.
        let sleeper = sleeper.sleep(None);
        let mut state = self.state();
        let is_own =
            |asleep: &Asleep| (asleep.deadline, asleep.rings) == (deadline, rings) && Arc::ptr_eq(&asleep.bell, bell);
        let own = state.sleepers.iter().position(is_own).expect("listed above");
        state.sleepers.swap_remove(own);
        drop(state);
        sleeper
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_wakes_whom_its_time_has_come() {
        let clock = ManualClock::new();
        let by: &dyn Clock = &*clock;
        thread::scope(|scope| {
            let early = scope.spawn(|| by.sleep_until(Duration::from_secs(1)));
            let late = scope.spawn(|| by.sleep_until(Duration::from_secs(3)));
            clock.await_sleepers(2);
            clock.advance(Duration::from_secs(2));
            early.join().expect("its time has come");
            clock.await_sleepers(1);
            assert!(!late.is_finished());
            clock.advance(Duration::from_secs(1));
        });
        assert_eq!(clock.now(), Duration::from_secs(3));
    }

    #[test]
    fn a_deadline_that_has_passed_is_not_slept_for() {
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(1));
        (&*clock as &dyn Clock).sleep_until(Duration::from_secs(1));
        let found = Bell::new().sleep_until(&*clock, Duration::ZERO, || Some(7));
        assert_eq!(found, Some(7), "what is there is found, however late");
    }

    #[test]
    fn the_system_clock_lets_time_pass() {
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_millis(5);
        (&*clock as &dyn Clock).sleep_until(deadline);
        assert!(clock.now() >= deadline);
    }

    #[test]
    fn a_ring_ends_a_sleep_before_its_deadline() {
        let (clock, bell) = (&*ManualClock::new(), &Bell::new());
        let rung = &std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let look = move || rung.load(std::sync::atomic::Ordering::SeqCst).then_some(());
            let sleeper = scope.spawn(move || bell.sleep_until(clock, Duration::from_secs(1), look));
            clock.await_sleepers(1);
            rung.store(true, std::sync::atomic::Ordering::SeqCst);
            bell.ring();
            assert_eq!(sleeper.join().expect("it does not panic"), Some(()));
        });
        assert_eq!(clock.now(), Duration::ZERO);
    }
}
