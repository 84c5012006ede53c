//! Who does what is to be done where state is kept: a thread beside the rank's own, or where nothing is computed the rank
//! itself, so that what is alive is the same.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Device, DeviceFailure, DevicePoint, Tensor, on_device};

use super::backing::Backing;
use super::shard::{Address, GradientPart};

/// A tensor comes with the point of the device that a copy to or from it waits for.
pub(super) enum TransferJob {
    Read(Address, Tensor, DevicePoint),
    Write(Address, Tensor, DevicePoint),
    /// Sums that replace those that are there, or are added.
    Put(Tensor, Vec<GradientPart>, DevicePoint),
    Add(Tensor, Vec<GradientPart>, DevicePoint),
    /// By weight the tiles whose squares are to be summed.
    Square(Vec<Vec<GradientPart>>),
}

/// A finished job: what it gives back, and how long it took.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) what: Finished,
    pub(super) took: Duration,
}

#[derive(Debug)]
pub(super) enum Finished {
    Read(Tensor),
    Written(Tensor),
    /// Memory of the device, which the rank itself lets go of.
    Landed(Tensor),
    Squares(SquareSums),
}

/// Does jobs in their order.
#[derive(Debug)]
pub(super) enum Mover {
    Thread {
        jobs: Option<Sender<TransferJob>>,
        done: Receiver<Result<io::Result<Done>, DeviceFailure>>,
        thread: Option<JoinHandle<()>>,
    },
    /// As soon as they come; answers wait to be asked for.
    Inline { backing: Box<Backing>, done: VecDeque<io::Result<Done>> },
}

impl Mover {
    /// For the rank of `device`.
    pub(super) fn new(device: &Device, rank: usize, backing: Backing) -> io::Result<Mover> {
        if !device.has_data() {
            return Ok(Mover::Inline { backing: Box::new(backing), done: VecDeque::new() });
        }
        let (jobs, inbox) = channel();
        let (outbox, done) = channel();
        let work = move || serve(backing, &inbox, &outbox);
        let thread = thread::Builder::new().name(format!("offload {rank}")).spawn(work)?;
        Ok(Mover::Thread { jobs: Some(jobs), done, thread: Some(thread) })
    }

    pub(super) fn send(&mut self, job: TransferJob) {
        match self {
            Mover::Thread { jobs, .. } => {
                // A thread that is gone is noticed where its answer is missed.
                if let Some(jobs) = jobs {
                    let _ = jobs.send(job);
                }
            }
            Mover::Inline { backing, done } => done.push_back(backing.answer(job)),
        }
    }

    /// The answer to the first job without one.
    pub(super) fn answer(&mut self) -> io::Result<Done> {
        let answer = match self {
            // A failure of the rank's device is one of the rank, on whichever thread it was met.
            Mover::Thread { done, .. } => {
                done.recv().ok().map(|answer| answer.unwrap_or_else(|failure| failure.raise()))
            }
            Mover::Inline { done, .. } => done.pop_front(),
        };
        answer.unwrap_or_else(|| Err(io::Error::other("the thread that moves it is gone")))
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        if let Mover::Thread { jobs, thread, .. } = self {
            // Without a sender the thread ends, and what it keeps goes with it.
            *jobs = None;
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Backing {
    fn answer(&mut self, job: TransferJob) -> io::Result<Done> {
        let since = Instant::now();
        let what = self.work(job);
        what.map(|what| Done { what, took: since.elapsed() })
    }

    fn work(&mut self, job: TransferJob) -> io::Result<Finished> {
        match job {
            TransferJob::Read(address, mut staging, after) => {
                self.read(&address, &mut staging, &after)?;
                Ok(Finished::Read(staging))
            }
            TransferJob::Write(address, staging, after) => {
                self.write(&address, &staging, &after)?;
                Ok(Finished::Written(staging))
            }
            TransferJob::Put(sums, parts, after) => {
                parts.iter().try_for_each(|part| self.put(part, &sums, &after))?;
                Ok(Finished::Landed(sums))
            }
            TransferJob::Add(sums, parts, after) => {
                parts.iter().try_for_each(|part| self.add(part, &sums, &after))?;
                Ok(Finished::Landed(sums))
            }
            TransferJob::Square(weights) => Ok(Finished::Squares(self.squares(&weights)?)),
        }
    }
}

/// Does jobs in their order until nobody asks any more.
fn serve(mut backing: Backing, jobs: &Receiver<TransferJob>, done: &Sender<Result<io::Result<Done>, DeviceFailure>>) {
    for job in jobs {
        if done.send(on_device(|| backing.answer(job))).is_err() {
            return;
        }
    }
}
