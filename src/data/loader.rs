//! Batches ahead of time: a thread that reads the next steps while the current one is computed.
//!
//! Its whole state is the number of the step, so resuming is starting there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use super::batch::{Batch, BatchPlan};
use super::error::Error;
use super::source::Source;

/// Finished steps that wait; one more is being read.
const STEPS_AHEAD: usize = 1;

/// One rank's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepBatches {
    pub step: u64,
    /// As many on every rank; some may have no rows.
    pub micro: Vec<Batch>,
}

impl StepBatches {
    /// Number of micro-batches.
    pub fn len(&self) -> usize {
        self.micro.iter().map(|batch| batch.alike() as usize).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.micro.is_empty()
    }

    /// Number of targets that count, over this rank's micro-batches.
    pub fn valid(&self) -> usize {
        self.micro.iter().map(|batch| batch.valid() * batch.alike() as usize).sum()
    }
}

/// Gives the steps from a first one on, in order and without end.
#[derive(Debug)]
pub struct Loader {
    /// Taken on drop, which is how the thread learns of it while it waits.
    steps: Option<Receiver<Result<StepBatches, Error>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Starts reading at `first_step`.
    ///
    /// # Errors
    /// A plan that describes nothing, a source without rows, or no thread.
    pub fn new(source: Arc<dyn Source>, plan: BatchPlan, first_step: u64) -> Result<Self, Error> {
        plan.check()?;
        if source.is_empty() {
            return Err(Error::RowOutOfRange { index: 0, len: 0 });
        }
        let (sender, receiver) = sync_channel(STEPS_AHEAD);
        let stop = Arc::new(AtomicBool::new(false));
        let reader = ReadAhead { source, plan, stop: Arc::clone(&stop) };
        let thread = thread::Builder::new()
            .name(format!("loader-{}", plan.rank))
            .spawn(move || reader.run(first_step, &sender))
            .map_err(|source| Error::Thread { source })?;
        Ok(Self { steps: Some(receiver), stop, thread: Some(thread) })
    }

    /// The next step, waiting for it if need be.
    ///
    /// # Errors
    /// Whatever stopped the reading; afterwards the loader has nothing more to give.
    #[expect(clippy::should_implement_trait, reason = "an endless stream of results is no iterator to map over")]
    pub fn next(&mut self) -> Result<StepBatches, Error> {
        let steps = self.steps.as_ref().ok_or(Error::LoaderStopped)?;
        steps.recv().map_err(|_| Error::LoaderStopped)?
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported by it and must not become a second one here.
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct ReadAhead {
    source: Arc<dyn Source>,
    plan: BatchPlan,
    stop: Arc<AtomicBool>,
}

impl ReadAhead {
    fn run(&self, first_step: u64, steps: &SyncSender<Result<StepBatches, Error>>) {
        for step in first_step.. {
            let batches = self.step(step);
            let failed = batches.is_err();
            if steps.send(batches).is_err() || failed {
                return;
            }
        }
    }

    /// One step; an error that nobody receives when the loader is gone.
    fn step(&self, step: u64) -> Result<StepBatches, Error> {
        let wanted = || !self.stop.load(Ordering::Relaxed);
        let micro = (0..self.plan.micro_batches())
            .map(|micro| self.plan.batch_while(self.source.as_ref(), step, micro, &wanted));
        Ok(StepBatches { step, micro: micro.collect::<Result<_, _>>()? })
    }
}
