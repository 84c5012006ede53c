//! Who does a rank's tasks: a thread beside the rank, or the rank itself where nothing may run beside it.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Error;
use super::writer::{Oversight, TaskWriter, WriteTask, Written};

/// How long a thread of which nothing is wanted any more is waited for: the other ranks wait meanwhile.
const FAREWELL: Duration = Duration::from_secs(1);

/// Where files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePace {
    /// On a thread beside the rank, so that it is never long away from the others.
    Beside,
    /// In the rank's own turn, where a seed draws who runs when: the same seed must come to the same.
    InTurn,
}

/// A rank's disk over its checkpoints: how long one operation may take, and who still waits for one that took longer. The
/// kernel does not let go of a thread that waits for a disk, so nobody waits for that thread.
#[derive(Debug)]
pub struct DiskWatch {
    timeout: Duration,
    left: Mutex<Option<StuckWriter>>,
}

/// A thread that waits for its disk.
#[derive(Debug)]
struct StuckWriter {
    thread: JoinHandle<()>,
    since: Instant,
}

impl DiskWatch {
    pub fn new(timeout: Duration) -> DiskWatch {
        DiskWatch { timeout, left: Mutex::new(None) }
    }

    /// Since when a thread of an earlier checkpoint has waited, if one still does.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.take_if(|left| left.thread.is_finished());
        left.as_ref().map(|left| left.since)
    }

    fn leave(&self, left: StuckWriter) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(left);
    }
}

impl Default for DiskWatch {
    /// A disk may take as long as it likes.
    fn default() -> DiskWatch {
        DiskWatch::new(Duration::MAX)
    }
}

/// Does tasks in their order.
#[derive(Debug)]
pub(super) struct Helper {
    hands: Hands,
    /// Tasks that are not done.
    open: usize,
    /// What the last one that gave something back gave, or what went wrong first.
    outcome: Result<Written, Error>,
    /// Since when the disk has not answered, once it is not waited for any more.
    given_up: Option<Instant>,
    partial: PathBuf,
}

#[derive(Debug)]
enum Hands {
    Thread {
        tasks: Option<Sender<WriteTask>>,
        done: Receiver<Result<Written, Error>>,
        thread: Option<JoinHandle<()>>,
        oversight: Arc<Oversight>,
        seen: LifeSigns,
        disk: Arc<DiskWatch>,
    },
    /// Answers wait to be asked for.
    Own { writer: Box<TaskWriter>, done: VecDeque<Result<Written, Error>> },
}

/// A thread's signs of life.
#[derive(Debug)]
struct LifeSigns {
    count: u64,
    /// When they were first that many, moved on by the time in which the process was stopped.
    since: Instant,
    /// When they were last counted.
    counted: Instant,
}

impl LifeSigns {
    fn new(count: u64, now: Instant) -> LifeSigns {
        LifeSigns { count, since: now, counted: now }
    }

    /// Since when there has been none, if that is at least `timeout`. They are `count` now.
    fn missing(&mut self, count: u64, now: Instant, timeout: Duration) -> Option<Instant> {
        if count != self.count {
            *self = LifeSigns::new(count, now);
        }
        // The whole process may have been stopped for hours. So no time between two counts is more than half of `timeout`.
        self.since += (now - self.counted).saturating_sub(timeout / 2);
        self.counted = now;
        (now - self.since >= timeout).then_some(self.since)
    }
}

impl Helper {
    /// For rank `rank`, which writes into `partial`. That no thread can be started, or that an earlier one still waits for
    /// the disk, is what goes wrong first.
    pub(super) fn new(
        pace: WritePace,
        disk: Arc<DiskWatch>,
        (rank, partial): (usize, &Path),
        writer: impl FnOnce(Arc<Oversight>) -> TaskWriter,
    ) -> Helper {
        let oversight = Arc::new(Oversight::default());
        let (mut writer, mut outcome) = (writer(oversight.clone()), Ok(Written::Nothing));
        let hands = match pace {
            WritePace::InTurn => Hands::Own { writer: Box::new(writer), done: VecDeque::new() },
            WritePace::Beside => {
                let (tasks, inbox) = channel();
                let (outbox, done) = channel();
                let work = move || {
                    let _ = inbox.into_iter().all(|task| outbox.send(writer.work(task)).is_ok());
                };
                let thread = match disk.waits_since() {
                    Some(since) => Err(no_answer(partial, since)),
                    None => thread::Builder::new()
                        .name(format!("checkpoint {rank}"))
                        .spawn(work)
                        .map_err(Error::io("start a thread that writes", partial)),
                };
                let thread = thread.map_err(|error| outcome = Err(error)).ok();
                Hands::Thread {
                    tasks: Some(tasks),
                    done,
                    thread,
                    oversight,
                    seen: LifeSigns::new(0, Instant::now()),
                    disk,
                }
            }
        };
        Helper { hands, open: 0, outcome, given_up: None, partial: partial.to_owned() }
    }

    pub(super) fn submit(&mut self, task: WriteTask) {
        let begins = self.open == 0;
        self.open += 1;
        match &mut self.hands {
            Hands::Own { writer, done } => done.push_back(writer.work(task)),
            Hands::Thread { tasks, seen, .. } => {
                if begins {
                    *seen = LifeSigns::new(seen.count, Instant::now());
                }
                // A thread that is gone is noticed where its answer is missed.
                let _ = tasks.as_ref().map(|tasks| tasks.send(task));
            }
        }
    }

    /// Whether all tasks are done, or none will be, at the latest after some time.
    pub(super) fn is_done(&mut self, within: Duration) -> bool {
        while self.open > 0 {
            let answer = match &mut self.hands {
                Hands::Own { done, .. } => done.pop_front().ok_or(RecvTimeoutError::Disconnected),
                Hands::Thread { done, .. } => done.recv_timeout(within),
            };
            let answer = match answer {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout) => match self.stands_still() {
                    Some(since) => {
                        // Nothing more comes of what is open.
                        self.open = 1;
                        self.given_up = Some(since);
                        Err(no_answer(&self.partial, since))
                    }
                    None => return false,
                },
                Err(RecvTimeoutError::Disconnected) => {
                    Err(Error::io("write", &self.partial)(io::Error::other("the thread that writes is gone")))
                }
            };
            self.open -= 1;
            if self.outcome.is_ok() && !matches!(answer, Ok(Written::Nothing)) {
                self.outcome = answer;
            }
        }
        true
    }

    /// Since when the thread has given no sign of life, if that is longer than its disk may take.
    fn stands_still(&mut self) -> Option<Instant> {
        let Hands::Thread { oversight, seen, disk, .. } = &mut self.hands else { return None };
        seen.missing(oversight.signs(), Instant::now(), disk.timeout)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.outcome.is_err()
    }

    /// What the last task gave back.
    ///
    /// # Errors
    /// What went wrong first.
    pub(super) fn outcome(&mut self) -> Result<Written, Error> {
        std::mem::replace(&mut self.outcome, Ok(Written::Nothing))
    }
}

impl Drop for Helper {
    /// What is under way ends soon, unless its disk does not answer, and nothing begins any more.
    fn drop(&mut self) {
        let Hands::Thread { tasks, thread, oversight, done, disk, .. } = &mut self.hands else { return };
        oversight.abandon();
        *tasks = None;
        let Some(thread) = thread.take() else { return };
        let begun = Instant::now();
        let patience = if self.given_up.is_some() { Duration::ZERO } else { FAREWELL };
        loop {
            match done.recv_timeout(patience.saturating_sub(begun.elapsed())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = thread.join();
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {
                    return disk.leave(StuckWriter { thread, since: self.given_up.unwrap_or(begun) });
                }
            }
        }
    }
}

/// `partial` cannot be written.
fn no_answer(partial: &Path, since: Instant) -> Error {
    Error::NoAnswer { path: partial.to_owned(), seconds: since.elapsed().as_secs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let (timeout, begun) = (Duration::from_secs(10), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut seen = LifeSigns::new(3, begun);
        assert_eq!(seen.missing(3, at(4), timeout), None);
        // Stopped for an hour.
        assert_eq!(seen.missing(3, at(3604), timeout), None);
        assert!(seen.missing(3, at(3605), timeout).is_some());
        assert_eq!(seen.missing(4, at(3606), timeout), None);
        assert_eq!(seen.missing(4, at(3610), timeout), None);
        assert_eq!(seen.missing(4, at(3615), timeout), None);
        assert_eq!(seen.missing(4, at(3616), timeout), Some(at(3606)));
    }
}
