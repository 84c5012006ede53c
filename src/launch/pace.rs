//! What takes some ranks longer than others outside of steps, such as reading a checkpoint.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use guildhall_comm::{Communicator, Error, Reduce};

use super::Rank;
use super::standstill::{DiskPatience, ThreadWatch};

/// Ranks that wait for one another meet so often.
const MEETINGS_EVERY: Duration = Duration::from_millis(50);

impl Rank {
    /// Calls `f`, which uses no communicator, and returns when it has ended on all ranks, or failed on one. A thread of each
    /// rank's own meets those of the others meanwhile, so that no rank is taken for lost, however long it takes, unless it
    /// waits for a disk that does not answer: then all end. Not counted as traffic. Collective.
    ///
    /// # Errors
    /// Those of `f`; what the world reports; on the other ranks, that one waits for its disk.
    pub fn at_own_pace<T, E: From<Error>>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        if self.runs_alone {
            return f();
        }
        let (ended, ends) = mpsc::channel();
        let at_own_pace = || {
            thread::scope(|scope| {
                // If `f` panics it is dropped, which the thread hears.
                let ended = ended;
                let mut caller = ThreadWatch::of_this_thread(self.disks);
                let meeting = scope.spawn(move || meet(&self.world, (&mut caller, self.disks), &ends));
                let result = f();
                let _ = ended.send(result.is_err());
                let met = meeting.join().unwrap_or_else(|panic| resume_unwind(panic));
                let value = result?;
                met?;
                Ok(value)
            })
        };
        self.ledger.uncounted(at_own_pace)
    }
}

/// Meets the other ranks until all have ended, one has failed, or the `caller` on this one is given up.
fn meet(
    world: &Arc<dyn Communicator>,
    (caller, disks): (&mut ThreadWatch, DiskPatience),
    ends: &Receiver<bool>,
) -> Result<(), Error> {
    let end = |reason: String| match disks.give_up {
        Some(give_up) => give_up(&format!("rank {}: {reason}", world.rank())),
        None => world.abort(&reason),
    };
    let mut own = None;
    loop {
        if own.is_none() {
            own = match ends.recv_timeout(MEETINGS_EVERY) {
                Ok(has_failed) => Some(has_failed),
                Err(RecvTimeoutError::Timeout) => {
                    caller.stands_still().into_iter().for_each(end);
                    None
                }
                Err(RecvTimeoutError::Disconnected) => Some(true),
            };
        }
        let state = [own.is_none(), own == Some(true)].map(u64::from).to_vec();
        let all = world.all_reduce(Reduce::Max, state)?.into_u64();
        if all[0] == 0 || all[1] > 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::launch::Process;
    use crate::parallel;

    /// What three ranks come to, of which rank 1 calls `f` and the others are done at once; all then meet.
    fn ended(f: impl Fn() -> Result<(), Error> + Sync) -> Vec<Result<u64, String>> {
        ended_over(Duration::MAX, f)
    }

    /// The same with disks that may take so long for one operation.
    fn ended_over(disk: Duration, f: impl Fn() -> Result<(), Error> + Sync) -> Vec<Result<u64, String>> {
        let config = parallel::Config { timeout_s: 1, threads: Some(1), ..parallel::Config::of(3, 1) };
        let mut process = Process::whole(&config);
        process.disks = DiskPatience { timeout: disk, ..DiskPatience::ENDLESS };
        let ended = process.each(&config, |rank| {
            rank.at_own_pace(|| if rank.world.rank() == 1 { f() } else { Ok(()) })?;
            assert!(rank.ledger.snapshot().is_empty(), "it is no traffic");
            Ok::<_, Error>(rank.world.all_reduce(Reduce::Sum, vec![1u64])?.into_u64()[0])
        });
        ended.into_iter().map(|ended| ended.map_err(|failure| failure.to_string())).collect()
    }

    #[test]
    fn a_rank_that_takes_longer_than_the_timeout_is_waited_for() {
        let all = ended(|| {
            thread::sleep(Duration::from_secs(3));
            Ok(())
        });
        assert_eq!(all, [Ok(3), Ok(3), Ok(3)]);
    }

    /// All that work are waited for, however slowly they do, but not one that is kept in one operation.
    #[test]
    fn a_rank_whose_disk_does_not_answer_is_given_up() {
        let disk = Duration::from_millis(1500);
        let slowly = || {
            (0..20).for_each(|_| thread::sleep(disk / 10));
            Ok(())
        };
        assert_eq!(ended_over(disk, slowly), [Ok(3), Ok(3), Ok(3)]);
        let all = ended_over(disk, || {
            thread::sleep(2 * disk);
            Ok(())
        });
        let named = |end: &Result<u64, String>| {
            end.as_ref().is_err_and(|told| told.contains("rank 1") && told.contains("its file system has not answered"))
        };
        assert!(all.iter().all(named), "{all:?}");
    }

    #[test]
    fn a_rank_that_fails_or_panics_ends_all() {
        let begun = Instant::now();
        let failed = ended(|| Err(Error::aborted(1, "as planned")));
        let panicked = ended(|| panic!("as planned"));
        for all in [failed, panicked] {
            assert!(all.iter().all(|end| end.as_ref().is_err_and(|told| told.contains("as planned"))), "{all:?}");
        }
        assert!(begun.elapsed() < Duration::from_secs(1), "nobody waits for the timeout");
    }
}
