//! Ranks that are threads of this process.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::Communicator;
use crate::clock::{Clock, SystemClock};
use crate::error::Error;
use crate::failure::{DeviceTrouble, Failure};
use crate::operation::{Completed, Request, Summation};
use crate::pending::{InFlight, Pending};
use crate::rendezvous::{Fate, Lane, Rendezvous};

/// How a world of threads behaves.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The longest any wait for another rank may take before it fails with [`Error::Timeout`].
    pub timeout: Duration,
}

/// The communicators of a new world of `size` ranks, in rank order; each goes to one thread. Whoever catches a rank's panic
/// aborts the world, as [`run_on`] does; otherwise its peers wait until their timeout.
///
/// Panics if `size` is zero.
pub fn world(size: usize, options: Options) -> Vec<Arc<dyn Communicator>> {
    world_by(SystemClock::new(), size, options)
}

/// [`world`], whose timeout is measured by `clock`.
pub fn world_by(clock: Arc<dyn Clock>, size: usize, options: Options) -> Vec<Arc<dyn Communicator>> {
    assert!(size > 0, "a world has at least one rank");
    let fate = Arc::new(Fate::new(size, options.timeout, clock));
    let rendezvous = Arc::new(Rendezvous::new((0..size).collect(), fate));
    let member = |rank| -> Arc<dyn Communicator> {
        Arc::new(Threads { lane: Arc::new(Lane::new(rendezvous.clone(), rank)), name: "world".into() })
    };
    (0..size).map(member).collect()
}

/// Runs `f` on `size` threads named "rank N", each with its communicator, and joins them all; results are in rank
/// order. A rank that returns an error or panics aborts the world, so that the others end too.
///
/// Panics if `size` is zero or a thread cannot be started.
pub fn run<T, E, F>(size: usize, options: Options, f: F) -> Vec<Result<T, Failure<E>>>
where
    T: Send,
    E: fmt::Display + Send,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    run_on(world(size, options), f)
}

/// [`run`] on a world that is there already, in rank order, whatever its communicators are dressed in.
pub fn run_on<T, E, F>(world: Vec<Arc<dyn Communicator>>, f: F) -> Vec<Result<T, Failure<E>>>
where
    T: Send,
    E: fmt::Display + Send,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    let f = &f;
    thread::scope(|scope| {
        let ranks: Vec<_> = world.into_iter().map(|comm| spawn_rank(scope, comm, f)).collect();
        ranks.into_iter().map(join_rank).collect()
    })
}

type RankHandle<'scope, T, E> = (usize, thread::ScopedJoinHandle<'scope, Result<T, Failure<E>>>);

fn spawn_rank<'scope, 'env, T, E, F>(
    scope: &'scope thread::Scope<'scope, 'env>,
    comm: Arc<dyn Communicator>,
    f: &'env F,
) -> RankHandle<'scope, T, E>
where
    T: Send + 'scope,
    E: fmt::Display + Send + 'scope,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    let rank = comm.rank();
    let thread = thread::Builder::new().name(format!("rank {rank}"));
    let handle = thread.spawn_scoped(scope, move || run_rank(comm, f));
    (rank, handle.unwrap_or_else(|error| panic!("cannot start a thread for rank {rank}: {error}")))
}

fn run_rank<T, E: fmt::Display>(
    comm: Arc<dyn Communicator>,
    f: impl Fn(Arc<dyn Communicator>) -> Result<T, E>,
) -> Result<T, Failure<E>> {
    // The world is aborted on a panic, and nothing `f` touched is used afterwards by this thread.
    let result = match catch_unwind(AssertUnwindSafe(|| f(comm.clone()))) {
        Ok(result) => result.map_err(Failure::Returned),
        Err(panic) => Err(thrown(comm.rank(), panic)),
    };
    if let Err(failure) = &result {
        comm.abort(&failure.to_string());
    }
    result
}

fn join_rank<T, E>((rank, handle): RankHandle<'_, T, E>) -> Result<T, Failure<E>> {
    handle.join().map_err(|panic| thrown(rank, panic)).flatten()
}

/// What a rank has unwound with.
fn thrown<E>(rank: usize, thrown: Box<dyn Any + Send>) -> Failure<E> {
    match thrown.downcast::<DeviceTrouble>() {
        Ok(trouble) => Failure::OfDevice { rank, trouble: *trouble },
        Err(panic) => Failure::Panicked { rank, message: panic_message(panic.as_ref()) },
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_string())
}

/// One rank's communicator: a lane and the name it goes by.
struct Threads {
    lane: Arc<Lane>,
    name: Arc<str>,
}

impl Threads {
    /// The lane of this rank in the group that `color` and `key` place it in.
    fn split_lane(&self, color: usize, key: usize) -> Result<Lane, Error> {
        let (size, rendezvous) = (self.size(), self.lane.rendezvous());
        let wish = vec![color as u64, key as u64];
        let request = Request::all_gather(wish, vec![0u64; 2 * size], vec![2; size]);
        let index = self.lane.start(request, &self.name)?;
        let wishes = self.lane.wait(index, &self.name)?.recv.into_u64();
        let mut members: Vec<usize> = (0..size).filter(|rank| wishes[2 * rank] == color as u64).collect();
        members.sort_by_key(|rank| wishes[2 * rank + 1]);
        let rank = members.iter().position(|member| *member == self.rank());
        let rank = rank.expect("a rank is among those that chose its colour");
        let members = members.into_iter().map(|member| rendezvous.world_rank(member)).collect();
        Ok(Lane::new(rendezvous.split_off(index, color, members), rank))
    }
}

impl Communicator for Threads {
    fn rank(&self) -> usize {
        self.lane.rank()
    }

    fn size(&self) -> usize {
        self.lane.rendezvous().size()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(Threads { lane: self.lane.clone(), name: name.into() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let index = self.lane.start(request, &self.name)?;
        let started = Started { lane: self.lane.clone(), name: self.name.clone(), index, awaited: false };
        Ok(Pending::in_flight(Box::new(started)))
    }

    fn finish(&self, request: Request) -> Result<Completed, Error> {
        self.lane.finish(request, &self.name)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        let lane = Arc::new(self.split_lane(color, key)?);
        Ok(Arc::new(Threads { lane, name: format!("{}/{color}", self.name).into() }))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        let lane = Arc::new(self.split_lane(0, self.rank())?);
        Ok(Arc::new(Threads { lane, name: self.name.clone() }))
    }

    fn moves_devices(&self) -> bool {
        true
    }

    fn sums(&self) -> Summation {
        Summation::Exact
    }

    fn abort(&self, reason: &str) {
        self.lane.abort(reason);
    }
}

/// A started operation: its round on its lane.
struct Started {
    lane: Arc<Lane>,
    name: Arc<str>,
    index: u64,
    awaited: bool,
}

impl InFlight for Started {
    fn wait(mut self: Box<Self>) -> Result<Completed, Error> {
        self.awaited = true;
        self.lane.wait(self.index, &self.name)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.awaited {
            self.lane.abandon(self.index);
        }
    }
}
