//! Threads that stand by while ranks of their process wait for each other, and do parts of what others still have to do.
//!
//! Ranks of one process share its cores. One whose experts have few rows waits for one whose experts have many, and its cores
//! meanwhile have nothing to do. So a rank that sleeps gives its threads away, and as many *guests* take parts of what other
//! ranks share among theirs. When it wakes, guests end the part that they are at. Who does a part changes nothing about it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::team::{TeamDesk, join, started};

/// The guests of a process, and how many of them may work.
#[derive(Debug)]
pub struct Standby {
    board: Arc<StandbyBoard>,
    guests: Vec<JoinHandle<()>>,
    /// Threads of a rank.
    each: usize,
}

#[derive(Debug, Default)]
struct StandbyBoard {
    state: Mutex<StandbyState>,
    called: Condvar,
}

#[derive(Debug, Default)]
struct StandbyState {
    /// Threads of ranks that sleep.
    idle: usize,
    /// Guests at work.
    active: usize,
    /// Orders that have parts left as far as is known, by desk and number; the one that was joined last comes last.
    orders: VecDeque<(Arc<TeamDesk>, u64)>,
    /// How often guests have done parts of an order.
    visits: u64,
    is_over: bool,
}

impl Standby {
    /// For so many ranks of so many threads each.
    pub fn new(ranks: usize, threads: usize) -> Arc<Standby> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // One rank at least has its own threads at work.
        Standby::with((ranks.saturating_sub(1) * threads).min(cores), threads)
    }

    /// With so many guests, or as many as the system gives.
    fn with(guests: usize, threads: usize) -> Arc<Standby> {
        let board = Arc::<StandbyBoard>::default();
        let guests = started(0..guests, "standby ", {
            let board = board.clone();
            move || board.stand_by()
        });
        Arc::new(Standby { board, guests, each: threads })
    }

    /// Calls `wait`, in which a rank sleeps, and gives its threads away meanwhile.
    pub fn while_waiting<R>(&self, wait: impl FnOnce() -> R) -> R {
        struct Lending<'a>(&'a Standby);
        impl Drop for Lending<'_> {
            fn drop(&mut self) {
                self.0.board.lock().idle -= self.0.each;
            }
        }
        let mut state = self.board.lock();
        state.idle += self.each;
        self.board.call(&state, self.each);
        drop(state);
        let _lending = Lending(self);
        wait()
    }

    /// How often a guest has done parts of what a rank shares.
    pub fn visits(&self) -> u64 {
        self.board.lock().visits
    }

    /// Guests may join this order of the desk: so many at most have something to do.
    pub(crate) fn post(&self, desk: &Arc<TeamDesk>, number: u64, most: usize) {
        let mut state = self.board.lock();
        state.orders.push_front((desk.clone(), number));
        self.board.call(&state, most);
    }

    /// They no longer may; some may be at it.
    pub(crate) fn withdraw(&self, desk: &Arc<TeamDesk>) {
        self.board.lock().orders.retain(|(other, _)| !Arc::ptr_eq(other, desk));
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        self.board.lock().is_over = true;
        self.board.called.notify_all();
        join(&mut self.guests);
    }
}

impl StandbyBoard {
    fn lock(&self) -> MutexGuard<'_, StandbyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes guests that may work, so many at most.
    fn call(&self, state: &StandbyState, most: usize) {
        if !state.orders.is_empty() {
            (state.active..state.idle).take(most).for_each(|_| self.called.notify_one());
        }
    }

    /// What a guest does all its life.
    fn stand_by(&self) {
        let mut state = self.lock();
        while !state.is_over {
            let order = if state.active < state.idle { state.orders.pop_front() } else { None };
            let Some((desk, number)) = order else {
                state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.active += 1;
            state.orders.push_back((desk.clone(), number));
            drop(state);
            let looks = Cell::new(0_u64);
            let is_done = desk.visit(number, &|| {
                looks.set(looks.get() + 1);
                self.is_welcome()
            });
            state = self.lock();
            state.active -= 1;
            // It is asked before each part, and once more.
            state.visits += u64::from(looks.get() > 1);
            if is_done {
                state.orders.retain(|(other, at)| !(Arc::ptr_eq(other, &desk) && *at == number));
            }
        }
    }

    /// Whether a guest at work may take another part.
    fn is_welcome(&self) -> bool {
        let state = self.lock();
        state.active <= state.idle
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::team::Team;

    /// Runs `f` while so many ranks wait.
    fn while_ranks_wait(standby: &Standby, ranks: usize, f: impl FnOnce()) {
        let (asleep, are_asleep) = mpsc::channel();
        thread::scope(|scope| {
            let (over, waits): (Vec<_>, Vec<_>) = (0..ranks).map(|_| mpsc::channel::<()>()).unzip();
            for wait in waits {
                let asleep = asleep.clone();
                scope.spawn(move || {
                    standby.while_waiting(|| {
                        asleep.send(()).unwrap();
                        // The other end is dropped.
                        assert!(wait.recv().is_err());
                    });
                });
            }
            (0..ranks).for_each(|_| are_asleep.recv().unwrap());
            // Unwinding drops them as well.
            let _over = over;
            f();
        });
    }

    fn until(happened: impl Fn() -> bool) {
        let begun = Instant::now();
        while !happened() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it has not happened");
            thread::yield_now();
        }
    }

    /// The first part is done when somebody else has done all others.
    fn a_part_waits_for_the_rest(team: &Team) {
        let done = AtomicUsize::new(0);
        team.share(0..20, |part| {
            until(|| part != 0 || done.load(Ordering::SeqCst) == 19);
            done.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(done.into_inner(), 20);
    }

    #[test]
    fn guests_do_parts_of_a_rank_with_one_thread() {
        let standby = Standby::with(1, 1);
        let team = Team::beside(1, Some(standby.clone()));
        while_ranks_wait(&standby, 1, || (0..50).for_each(|_| a_part_waits_for_the_rest(&team)));
    }

    #[test]
    fn guests_come_in_the_middle_of_it() {
        let standby = Standby::with(1, 1);
        let team = Team::beside(1, Some(standby.clone()));
        let (begun, has_begun) = mpsc::channel();
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                team.share(0..20, |part| {
                    if part == 0 {
                        begun.send(()).unwrap();
                        until(|| done.load(Ordering::SeqCst) == 19);
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                });
            });
            has_begun.recv().unwrap();
            while_ranks_wait(&standby, 1, || until(|| done.load(Ordering::SeqCst) == 20));
        });
    }

    /// Nobody waits: whoever shares work does all of it.
    #[test]
    fn without_ranks_that_wait_no_guest_works() {
        let standby = Standby::with(3, 1);
        let team = Team::beside(1, Some(standby.clone()));
        let caller = thread::current().id();
        while_ranks_wait(&standby, 3, || a_part_waits_for_the_rest(&team));
        for _ in 0..100 {
            team.share(0..8, |_| assert_eq!(thread::current().id(), caller));
        }
        until(|| {
            let state = standby.board.lock();
            (state.idle, state.active, state.orders.len()) == (0, 0, 0)
        });
    }

    /// A rank that wakes has its core back after the part that a guest is at.
    #[test]
    fn guests_leave_when_their_rank_wakes() {
        let standby = Standby::with(1, 1);
        let team = Team::beside(1, Some(standby.clone()));
        let (caller, guest_parts, is_awake) = (thread::current().id(), AtomicUsize::new(0), AtomicUsize::new(0));
        let (wake, woken) = mpsc::channel::<()>();
        let (standby, is_awake) = (&*standby, &is_awake);
        thread::scope(|scope| {
            scope.spawn(move || {
                standby.while_waiting(|| woken.recv().unwrap());
                is_awake.store(1, Ordering::SeqCst);
            });
            team.share(0..40, |part| {
                if thread::current().id() != caller {
                    guest_parts.fetch_add(1, Ordering::SeqCst);
                    wake.send(()).unwrap();
                    until(|| is_awake.load(Ordering::SeqCst) == 1);
                } else if part == 0 {
                    // There are parts left when the guest is done with its own.
                    until(|| guest_parts.load(Ordering::SeqCst) > 0 && standby.board.lock().active == 0);
                }
            });
        });
        assert_eq!(guest_parts.into_inner(), 1);
    }

    /// Two ranks at work, two that wait: guests are divided among them.
    #[test]
    fn several_ranks_have_guests_at_once() {
        let standby = Standby::with(2, 1);
        let teams = [(); 2].map(|()| Team::beside(1, Some(standby.clone())));
        let here = AtomicUsize::new(0);
        while_ranks_wait(&standby, 2, || {
            thread::scope(|scope| {
                for team in &teams {
                    scope.spawn(|| {
                        // One more than guests could take before the other rank is here.
                        team.share(0..3, |_| {
                            here.fetch_add(1, Ordering::SeqCst);
                            until(|| here.load(Ordering::SeqCst) >= 4);
                        });
                    });
                }
            });
        });
        assert_eq!(here.into_inner(), 6);
    }

    #[test]
    fn a_panic_of_a_guest_is_passed_on() {
        let standby = Standby::with(1, 1);
        let team = Team::beside(1, Some(standby.clone()));
        let caller = thread::current().id();
        while_ranks_wait(&standby, 1, || {
            let guest_is_here = AtomicUsize::new(0);
            let ended = catch_unwind(AssertUnwindSafe(|| {
                team.share(0..2, |_| {
                    if thread::current().id() != caller {
                        guest_is_here.store(1, Ordering::SeqCst);
                        panic!("a guest's");
                    }
                    until(|| guest_is_here.load(Ordering::SeqCst) == 1);
                });
            }));
            assert_eq!(ended.unwrap_err().downcast_ref::<&str>(), Some(&"a guest's"));
            a_part_waits_for_the_rest(&team);
        });
    }

    /// Ranks that sleep and wake all the time, orders of all lengths: every part is done once.
    #[test]
    fn every_part_is_done_once_whoever_comes_and_goes() {
        let standby = Standby::with(4, 2);
        let is_over = AtomicUsize::new(0);
        thread::scope(|scope| {
            for pause in [3, 17] {
                let (standby, is_over) = (&standby, &is_over);
                scope.spawn(move || {
                    while is_over.load(Ordering::SeqCst) < 2 {
                        standby.while_waiting(|| thread::sleep(Duration::from_micros(pause)));
                        thread::yield_now();
                    }
                });
            }
            for threads in [1, 2] {
                let (standby, is_over) = (&standby, &is_over);
                scope.spawn(move || {
                    let team = Team::beside(threads, Some(standby.clone()));
                    for round in 0..1000 {
                        let mut out = vec![0; round % 7];
                        team.share(out.iter_mut().enumerate(), |(place, out)| *out += place + 1);
                        assert!(out.iter().enumerate().all(|(place, &out)| out == place + 1), "{round}: {out:?}");
                    }
                    is_over.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
    }
}
