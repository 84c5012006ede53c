//! Who does a rank's tasks: a thread beside the rank, or the rank itself where nothing may run beside it.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::Error;
use super::writer::{TaskWriter, WriteTask, Written};

/// Where files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePace {
    /// On a thread beside the rank, so that it is never long away from the others.
    Beside,
    /// In the rank's own turn, where a seed draws who runs when: the same seed must come to the same.
    InTurn,
}

/// Does tasks in their order.
#[derive(Debug)]
pub(super) struct Helper {
    hands: Hands,
    /// Tasks that are not done.
    open: usize,
    /// What the last one that gave something back gave, or what went wrong first.
    outcome: Result<Written, Error>,
    partial: PathBuf,
}

#[derive(Debug)]
enum Hands {
    Thread {
        tasks: Option<Sender<WriteTask>>,
        done: Receiver<Result<Written, Error>>,
        thread: Option<JoinHandle<()>>,
        abandoned: Arc<AtomicBool>,
    },
    /// Answers wait to be asked for.
    Own { writer: Box<TaskWriter>, done: VecDeque<Result<Written, Error>> },
}

impl Helper {
    /// For rank `rank`, which writes into `partial`. That a thread cannot be started is what goes wrong first.
    pub(super) fn new(
        pace: WritePace,
        (rank, partial): (usize, &Path),
        writer: impl FnOnce(Arc<AtomicBool>) -> TaskWriter,
    ) -> Helper {
        let abandoned = Arc::new(AtomicBool::new(false));
        let (mut writer, mut outcome) = (writer(abandoned.clone()), Ok(Written::Nothing));
        let hands = match pace {
            WritePace::InTurn => Hands::Own { writer: Box::new(writer), done: VecDeque::new() },
            WritePace::Beside => {
                let (tasks, inbox) = channel();
                let (outbox, done) = channel();
                let work = move || inbox.into_iter().all(|task| outbox.send(writer.work(task)).is_ok());
                let thread = thread::Builder::new().name(format!("checkpoint {rank}")).spawn(move || {
                    let _ = work();
                });
                let thread = thread.map_err(Error::io("start a thread that writes", partial));
                let thread = thread.map_err(|error| outcome = Err(error)).ok();
                Hands::Thread { tasks: Some(tasks), done, thread, abandoned }
            }
        };
        Helper { hands, open: 0, outcome, partial: partial.to_owned() }
    }

    pub(super) fn submit(&mut self, task: WriteTask) {
        self.open += 1;
        match &mut self.hands {
            Hands::Own { writer, done } => done.push_back(writer.work(task)),
            Hands::Thread { tasks, .. } => {
                // A thread that is gone is noticed where its answer is missed.
                let _ = tasks.as_ref().map(|tasks| tasks.send(task));
            }
        }
    }

    /// Whether all tasks are done, at the latest after some time.
    pub(super) fn is_done(&mut self, within: Duration) -> bool {
        while self.open > 0 {
            let answer = match &mut self.hands {
                Hands::Own { done, .. } => done.pop_front().ok_or(RecvTimeoutError::Disconnected),
                Hands::Thread { done, .. } => done.recv_timeout(within),
            };
            let answer = match answer {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout) => return false,
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
    /// What is under way ends soon, and nothing begins any more.
    fn drop(&mut self) {
        if let Hands::Thread { tasks, thread, abandoned, .. } = &mut self.hands {
            abandoned.store(true, Relaxed);
            *tasks = None;
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}
