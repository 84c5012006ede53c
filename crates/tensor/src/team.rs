//! The threads that share a device's work: the one that asks for it, and helpers that wait to be asked.
//!
//! Kernels follow each other within microseconds, and to wake a thread that sleeps takes some forty. So a helper without work
//! looks for some for a while before it sleeps, and whoever waits for helpers does the same. Which thread does a part
//! changes nothing about it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a thread that waits looks before it lets others run between its looks.
const LOOKS_AT_ONCE: u32 = 1000;
/// How long it does that before it sleeps.
const AWAKE: Duration = Duration::from_micros(200);

/// Threads that do parts of one thing at a time.
#[derive(Debug)]
pub(crate) struct Team {
    desk: Arc<TeamDesk>,
    helpers: usize,
}

/// What is asked of helpers, and how far they are.
#[derive(Debug, Default)]
struct TeamDesk {
    order: Mutex<TeamOrder>,
    /// Changes with every order; helpers look at it without the lock.
    number: AtomicU64,
    /// Helpers that have not done their part yet.
    left: AtomicUsize,
    /// Whether a thread waits for helpers, asleep.
    is_awaited: AtomicBool,
    /// Whether some thread has the helpers.
    is_busy: AtomicBool,
    ordered: Condvar,
    done: Condvar,
}

#[derive(Debug, Default)]
struct TeamOrder {
    number: u64,
    job: Option<TeamJob>,
    /// Helpers that have a part.
    helpers: usize,
    asleep: usize,
    /// Of the first helper that panicked.
    panic: Option<Box<dyn Any + Send>>,
    is_over: bool,
}

/// A reference to what a part does, which lives until all helpers have done theirs.
#[derive(Debug, Clone, Copy)]
struct TeamJob(*const (dyn Fn(usize) + Sync));

// SAFETY: what it points to may be called from several threads.
unsafe impl Send for TeamJob {}

impl Team {
    /// So many threads, of which the calling one is the first. Where the system gives fewer, those there are do all parts.
    pub(crate) fn new(threads: usize) -> Team {
        let desk = Arc::<TeamDesk>::default();
        let start = |number: usize| {
            let desk = desk.clone();
            thread::Builder::new().name(format!("kernels {number}")).spawn(move || desk.help(number - 1))
        };
        let helpers = (1..threads).map_while(|number| start(number).ok()).count();
        Team { desk, helpers }
    }

    /// Calls `f` with each part, on several threads at once, and returns when all have returned. A panic of one is passed on.
    /// Where the helpers are at work already, for another thread or an outer part, the caller does all.
    pub(crate) fn share<T: Send>(&self, parts: impl IntoIterator<Item = T>, f: impl Fn(T) + Sync) {
        let slots: Vec<Mutex<Option<T>>> = parts.into_iter().map(|part| Mutex::new(Some(part))).collect();
        let do_part = |place: usize| {
            let part = slots[place].lock().unwrap_or_else(PoisonError::into_inner).take();
            f(part.expect("each place is asked for once"));
        };
        let helpers = self.helpers.min(slots.len().saturating_sub(1));
        if helpers == 0 || self.desk.is_busy.swap(true, Ordering::Acquire) {
            return (0..slots.len()).for_each(do_part);
        }
        self.desk.order_from(helpers, &do_part);
        let own = catch_unwind(AssertUnwindSafe(|| (helpers..slots.len()).for_each(do_part)));
        let theirs = self.desk.await_helpers();
        self.desk.is_busy.store(false, Ordering::Release);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    /// Helpers end by themselves; nobody waits for them.
    fn drop(&mut self) {
        self.desk.lock().is_over = true;
        self.desk.number.fetch_add(1, Ordering::Release);
        self.desk.ordered.notify_all();
    }
}

impl TeamDesk {
    fn lock(&self) -> MutexGuard<'_, TeamOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has each of the first `helpers` do the part of its number. The caller keeps `job` until they have been awaited.
    fn order_from(&self, helpers: usize, job: &(dyn Fn(usize) + Sync)) {
        self.left.store(helpers, Ordering::Relaxed);
        let mut order = self.lock();
        // SAFETY: only the lifetime changes, and `Team::share` waits for all helpers before it ends, whatever panics.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(job) };
        order.job = Some(TeamJob(job));
        order.helpers = helpers;
        order.number += 1;
        self.number.store(order.number, Ordering::Release);
        let sleep = order.asleep > 0;
        drop(order);
        if sleep {
            self.ordered.notify_all();
        }
    }

    /// Returns when all helpers have done their parts, with the first panic.
    fn await_helpers(&self) -> Option<Box<dyn Any + Send>> {
        let are_done = || self.left.load(Ordering::SeqCst) == 0;
        if !looked(are_done) {
            let mut order = self.lock();
            // Whoever ends last after this sees it; whoever has ended before is seen.
            self.is_awaited.store(true, Ordering::SeqCst);
            while !are_done() {
                order = self.done.wait(order).unwrap_or_else(PoisonError::into_inner);
            }
            self.is_awaited.store(false, Ordering::SeqCst);
        }
        let mut order = self.lock();
        order.job = None;
        order.panic.take()
    }

    /// What a helper does all its life.
    fn help(&self, place: usize) {
        let mut seen = 0;
        while let Some((number, job)) = self.next(seen, place) {
            seen = number;
            let Some(TeamJob(job)) = job else { continue };
            // SAFETY: who has ordered waits for `left`, which counts this helper until its part is done.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(place) }));
            if let Err(panic) = done {
                self.lock().panic.get_or_insert(panic);
            }
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_awaited.load(Ordering::SeqCst) {
                drop(self.lock());
                self.done.notify_one();
            }
        }
    }

    /// The next order after one, with what this helper has to do of it; `None` when there will be none.
    fn next(&self, seen: u64, place: usize) -> Option<(u64, Option<TeamJob>)> {
        looked(|| self.number.load(Ordering::Acquire) != seen);
        let mut order = self.lock();
        while order.number == seen && !order.is_over {
            order.asleep += 1;
            order = self.ordered.wait(order).unwrap_or_else(PoisonError::into_inner);
            order.asleep -= 1;
        }
        let job = order.job.filter(|_| place < order.helpers);
        (!order.is_over).then_some((order.number, job))
    }
}

/// Looks for a while whether something has come, and says so.
fn looked(has_come: impl Fn() -> bool) -> bool {
    let mut begun = None;
    for looks in 0_u32.. {
        if has_come() {
            return true;
        }
        if looks < LOOKS_AT_ONCE {
            std::hint::spin_loop();
        } else if begun.get_or_insert_with(Instant::now).elapsed() < AWAKE {
            thread::yield_now();
        } else {
            break;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// With pauses of all lengths, so that threads are met awake, as they go to sleep and asleep.
    #[test]
    fn every_part_is_done_once_before_it_goes_on() {
        for threads in 1..5 {
            let team = Team::new(threads);
            for round in 0_u64..400 {
                let parts = round as usize % 6;
                let mut out = vec![0; parts];
                team.share(out.iter_mut().enumerate(), |(place, out)| {
                    pause(round * 7 + place as u64);
                    *out = place + 1;
                });
                assert!(out.iter().enumerate().all(|(place, &out)| out == place + 1), "{threads}, {round}: {out:?}");
                pause(round);
            }
        }
    }

    /// None, some microseconds, or longer than a thread stays awake.
    fn pause(draw: u64) {
        match draw % 5 {
            0 | 1 => {}
            2 => thread::sleep(AWAKE + Duration::from_micros(draw % 100)),
            _ => {
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_micros(draw % 50) {}
            }
        }
    }

    #[test]
    fn several_threads_do_it() {
        let (team, seen) = (Team::new(3), Mutex::new(BTreeSet::new()));
        let all_here = std::sync::Barrier::new(3);
        team.share(0..3, |_| {
            all_here.wait();
            seen.lock().unwrap().insert(thread::current().name().map(str::to_owned));
        });
        assert_eq!(seen.into_inner().unwrap().len(), 3);
    }

    #[test]
    fn parts_of_parts_and_of_other_threads_are_done_by_who_asks() {
        let (team, sum) = (Team::new(2), AtomicUsize::new(0));
        let add = |n: usize| {
            sum.fetch_add(n, Ordering::Relaxed);
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..200).for_each(|_| team.share(0..2, |_| team.share(1..4, add))));
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 2 * 6);
    }

    #[test]
    fn a_panic_is_passed_on_and_the_team_goes_on() {
        let team = Team::new(3);
        for bad in 0..3 {
            let done = AtomicUsize::new(0);
            let part = |place: usize| match place == bad {
                true => panic!("part {place}"),
                false => done.fetch_add(1, Ordering::Relaxed),
            };
            let ended = catch_unwind(AssertUnwindSafe(|| {
                team.share(0..3, |place| {
                    part(place);
                });
            }));
            let told = ended.unwrap_err();
            assert_eq!(told.downcast_ref::<String>(), Some(&format!("part {bad}")));
            assert_eq!(done.into_inner(), 2, "the others end first");
        }
    }

    #[test]
    fn a_team_may_end_on_a_helper() {
        let team = Arc::new(Team::new(2));
        let last = Mutex::new(Some(team.clone()));
        team.share(0..2, |_| drop(last.lock().unwrap().take()));
        drop(team);
    }
}
