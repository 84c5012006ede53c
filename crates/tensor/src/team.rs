//! The threads that share a device's work: whoever asks for it, helpers that wait to be asked, and guests, threads of ranks that
//! wait ([`crate::standby`]).
//!
//! Kernels follow each other within microseconds, and to wake a thread that sleeps takes some forty. So a helper without work
//! looks for some for a while before it sleeps, and whoever waits for helpers does the same. Each thread takes the next part
//! that is left, so that nobody waits for a helper that has not begun; which thread does a part changes nothing about it.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::standby::Standby;

/// How often a thread that waits looks before it lets others run between its looks.
const LOOKS_AT_ONCE: u32 = 100;
/// How long it does that before it sleeps.
const AWAKE: Duration = Duration::from_micros(200);

/// Threads that do parts of one thing at a time.
#[derive(Debug)]
pub(crate) struct Team {
    desk: Arc<TeamDesk>,
    helpers: Vec<JoinHandle<()>>,
    /// Where guests come from.
    standby: Option<Arc<Standby>>,
}

/// What is asked of helpers, and how many are at it.
#[derive(Debug, Default)]
pub(crate) struct TeamDesk {
    order: Mutex<TeamOrder>,
    /// Changes with every order; helpers look at it without the lock.
    number: AtomicU64,
    /// Helpers and guests at work; grows only under the lock.
    at_work: AtomicUsize,
    /// Whether a thread waits for helpers and guests, asleep.
    is_awaited: AtomicBool,
    /// Whether some thread has the helpers.
    is_busy: AtomicBool,
    ordered: Condvar,
    done: Condvar,
}

#[derive(Debug, Default)]
struct TeamOrder {
    number: u64,
    /// Absent where nobody may begin any more.
    job: Option<TeamJob>,
    /// Helpers that may still begin.
    wanted: usize,
    /// Helpers that wait for `ordered`.
    asleep: usize,
    /// Of the first thread that panicked.
    panic: Option<Box<dyn Any + Send>>,
    is_over: bool,
}

/// What does parts until none is left, or until whoever does them is told to leave by its argument; says whether none is left.
type PartWork<'a> = dyn Fn(&dyn Fn() -> bool) -> bool + Sync + 'a;

/// A reference to it. It lives until nobody is at work and nobody can begin.
#[derive(Debug, Clone, Copy)]
struct TeamJob(*const PartWork<'static>);

// SAFETY: what it points to may be called from several threads.
unsafe impl Send for TeamJob {}

impl Team {
    /// For so many threads, one of which is whoever shares work. Where the system gives fewer, those there are do all of it.
    pub(crate) fn new(threads: usize) -> Team {
        Team::beside(threads, None)
    }

    /// The same, to which guests may come.
    pub(crate) fn beside(threads: usize, standby: Option<Arc<Standby>>) -> Team {
        let desk = Arc::<TeamDesk>::default();
        let of = thread::current().name().unwrap_or("device").to_owned();
        let helpers = started(1..threads, &format!("{of} k"), {
            let desk = desk.clone();
            move || desk.help()
        });
        Team { desk, helpers, standby }
    }

    /// Calls `f` with each part, on several threads at once, and returns when all have returned. A panic is passed on when
    /// no part is under way any more; some may not have been begun then. Where the helpers are at work already, for another
    /// thread or an outer part, the caller does all.
    pub(crate) fn share<P>(&self, parts: P, f: impl Fn(P::Item) + Sync)
    where
        P: IntoIterator<Item: Send, IntoIter: Send>,
    {
        let parts = parts.into_iter();
        let most = parts.size_hint().1.unwrap_or(usize::MAX);
        let helpers = self.helpers.len().min(most.saturating_sub(1));
        let standby = self.standby.as_ref().filter(|_| most > 1);
        if helpers == 0 && standby.is_none() || self.desk.is_busy.swap(true, Ordering::Acquire) {
            return parts.for_each(f);
        }
        let parts = Mutex::new(parts);
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = |may_go_on: &dyn Fn() -> bool| {
            while may_go_on() {
                let Some(part) = next() else { return true };
                f(part);
            }
            false
        };
        let number = self.desk.open(helpers, &work);
        standby.inspect(|standby| standby.post(&self.desk, number, most - 1));
        self.desk.attempt(|| work(&|| true));
        standby.inspect(|standby| standby.withdraw(&self.desk));
        let panic = self.desk.close();
        self.desk.is_busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    /// No helper waits for itself: whoever shares work has the team until its helpers are done.
    fn drop(&mut self) {
        self.desk.lock().is_over = true;
        self.desk.number.fetch_add(1, Ordering::Release);
        self.desk.ordered.notify_all();
        join(&mut self.helpers);
    }
}

/// Threads of these numbers that do `work` all their lives: the first of them where the system gives fewer.
pub(crate) fn started(
    numbers: Range<usize>,
    name: &str,
    work: impl Fn() + Clone + Send + 'static,
) -> Vec<JoinHandle<()>> {
    let start = |number| thread::Builder::new().name(format!("{name}{number}")).spawn(work.clone());
    numbers.map_while(|number| start(number).ok()).collect()
}

/// Waits for those that have been told to end.
pub(crate) fn join(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        // It passes panics on and has none of its own.
        let _ = thread.join();
    }
}

impl TeamDesk {
    fn lock(&self) -> MutexGuard<'_, TeamOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets so many helpers begin with `job`, which the caller keeps until the order is closed, and says the order's number.
    fn open(&self, helpers: usize, job: &PartWork) -> u64 {
        // SAFETY: only the lifetime changes, and `Team::share` closes every order before it ends, whatever panics.
        let job = unsafe { std::mem::transmute::<&PartWork, &'static PartWork<'static>>(job) };
        let mut order = self.lock();
        (order.job, order.wanted) = (Some(TeamJob(job)), helpers);
        order.number += 1;
        self.number.store(order.number, Ordering::Release);
        let (number, asleep) = (order.number, order.asleep.min(helpers));
        drop(order);
        (0..asleep).for_each(|_| self.ordered.notify_one());
        number
    }

    /// Lets nobody begin any more, and returns when all who have are done, with the first panic.
    fn close(&self) -> Option<Box<dyn Any + Send>> {
        self.lock().job = None;
        let are_done = || self.at_work.load(Ordering::SeqCst) == 0;
        if !looked(are_done) {
            let mut order = self.lock();
            // Whoever ends last after this sees it; whoever has ended before is seen.
            self.is_awaited.store(true, Ordering::SeqCst);
            while !are_done() {
                order = self.done.wait(order).unwrap_or_else(PoisonError::into_inner);
            }
            self.is_awaited.store(false, Ordering::SeqCst);
        }
        self.lock().panic.take()
    }

    /// Does what there is to do, and keeps a panic of it if no other came first. Says whether nothing is left to do.
    fn attempt(&self, job: impl FnOnce() -> bool) -> bool {
        catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
            let mut order = self.lock();
            match order.panic {
                None => order.panic = Some(panic),
                // To drop it may panic again.
                Some(_) => std::mem::forget(panic),
            }
            true
        })
    }

    /// Does parts of the order of this number while it may, and says whether none is left.
    pub(crate) fn visit(&self, number: u64, may_go_on: &dyn Fn() -> bool) -> bool {
        let order = self.lock();
        let Some(TeamJob(job)) = order.job.filter(|_| order.number == number) else { return true };
        self.at_work.fetch_add(1, Ordering::SeqCst);
        drop(order);
        // SAFETY: whoever has opened the order waits until this guest is no more at work.
        let is_done = self.attempt(|| unsafe { (*job)(may_go_on) });
        self.leave();
        is_done
    }

    /// To be at work no more.
    fn leave(&self) {
        if self.at_work.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_awaited.load(Ordering::SeqCst) {
            drop(self.lock());
            self.done.notify_one();
        }
    }

    /// What a helper does all its life.
    fn help(&self) {
        let mut seen = 0;
        while let Some((number, job)) = self.next(seen) {
            seen = number;
            let Some(TeamJob(job)) = job else { continue };
            // SAFETY: whoever has opened the order waits until this helper is no more at work.
            self.attempt(|| unsafe { (*job)(&|| true) });
            self.leave();
        }
    }

    /// The next order after one, begun with if this helper may; `None` when there will be none.
    fn next(&self, seen: u64) -> Option<(u64, Option<TeamJob>)> {
        looked(|| self.number.load(Ordering::Acquire) != seen);
        let mut order = self.lock();
        while order.number == seen && !order.is_over {
            order.asleep += 1;
            order = self.ordered.wait(order).unwrap_or_else(PoisonError::into_inner);
            order.asleep -= 1;
        }
        let job = order.job.filter(|_| order.wanted > 0);
        if job.is_some() {
            order.wanted -= 1;
            self.at_work.fetch_add(1, Ordering::SeqCst);
        }
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
            let part = |place: usize| assert!(place != bad, "part {place}");
            let ended = catch_unwind(AssertUnwindSafe(|| team.share(0..3, part)));
            assert_eq!(ended.unwrap_err().downcast_ref::<String>(), Some(&format!("part {bad}")));
            let done = AtomicUsize::new(0);
            team.share(0..3, |place| {
                done.fetch_add(place, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
        }
    }

    #[test]
    fn whoever_is_free_takes_what_is_left() {
        let (team, are_done) = (Team::new(2), AtomicUsize::new(0));
        // Whoever has the first part waits until somebody else has done all others.
        team.share(0..20, |part| {
            while part == 0 && are_done.load(Ordering::Relaxed) < 19 {
                thread::yield_now();
            }
            are_done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(are_done.into_inner(), 20);
    }

    #[test]
    fn nobody_waits_for_a_helper_that_has_not_begun() {
        let (mut team, sum) = (Team::new(1), AtomicUsize::new(0));
        team.helpers.push(thread::spawn(|| {}));
        team.share(1..4, |part| {
            sum.fetch_add(part, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 6);
    }
}
