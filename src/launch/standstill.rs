//! Whether a thread runs, or waits for one operation of the system, such as a read from a disk that does not answer.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::thread::gettid;

use super::GiveUp;

/// How long a disk may take for one operation, and what ends a run that waits longer.
#[derive(Clone, Copy, Debug)]
pub struct DiskPatience {
    pub timeout: Duration,
    /// Of a run that is in this process alone, whose blocked threads no other process can leave behind.
    pub give_up: Option<GiveUp>,
}

impl DiskPatience {
    /// For ever.
    pub const ENDLESS: DiskPatience = DiskPatience { timeout: Duration::MAX, give_up: None };
}

/// Watches a thread from another one. A thread that is blocked does not run at all, while one that works, however slow its
/// disk is, runs a little with each operation. What other threads do in its stead must come back to it in parts.
pub(super) struct ThreadWatch {
    /// Where the kernel counts how long the thread has run.
    account: PathBuf,
    /// How long one operation may take.
    timeout: Duration,
    /// What was counted last, when, and for how long it has been that much.
    seen: Option<(String, Instant, Duration)>,
}

impl ThreadWatch {
    /// For the calling thread.
    pub(super) fn of_this_thread(patience: DiskPatience) -> ThreadWatch {
        let account = format!("/proc/self/task/{}/schedstat", gettid().as_raw_nonzero()).into();
        ThreadWatch { account, timeout: patience.timeout, seen: None }
    }

    /// Why the thread must be given up, if it has not run for longer than an operation may take. It never is where the
    /// kernel does not count.
    pub(super) fn stands_still(&mut self) -> Option<String> {
        // Some kernels have the account and do not keep it.
        let counted = fs::read_to_string(&self.account).ok().filter(|counted| !counted.starts_with("0 "))?;
        let now = Instant::now();
        let stood = match &self.seen {
            // Between two looks the whole process may have been stopped for hours.
            Some((seen, looked, stood)) if *seen == counted => *stood + (now - *looked).min(self.timeout / 2),
            _ => Duration::ZERO,
        };
        self.seen = Some((counted, now, stood));
        let why = || format!("its file system has not answered for {} s (train.checkpoint_timeout_s)", stood.as_secs());
        (stood >= self.timeout).then(why)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write, pipe};
    use std::thread;

    use super::*;

    /// Blocked in a read, and not when it runs now and then.
    #[test]
    fn a_blocked_thread_stands_still_and_a_slow_one_does_not() {
        let (mut from, mut to) = pipe().unwrap();
        let (send, watch) = std::sync::mpsc::channel();
        let reader = thread::spawn(move || {
            let patience = DiskPatience { timeout: Duration::from_secs(1), ..DiskPatience::ENDLESS };
            send.send(ThreadWatch::of_this_thread(patience)).unwrap();
            let mut byte = [0];
            while from.read(&mut byte).unwrap() > 0 {}
        });
        let mut watch = watch.recv().unwrap();
        for _ in 0..30 {
            to.write_all(&[0]).unwrap();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(watch.stands_still(), None, "it reads");
        }
        let why = loop {
            thread::sleep(Duration::from_millis(50));
            if let Some(why) = watch.stands_still() {
                break why;
            }
        };
        assert!(why.contains("train.checkpoint_timeout_s"), "{why}");
        drop(to);
        reader.join().unwrap();
    }
}
