//! State kept away from the device, and the thread that moves its tiles.
//!
//! While tile i is worked on, tile i + 1 is read and tile i - 1 is written:
//!
//! ```text
//!  this thread        ... wait 1 | update 1           | wait 2 | update 2           | ...
//!  the other          ...  read 1, write 0, read 2         write 1, read 3
//! ```
//!
//! Three pieces of staging memory, made when a walk begins, go round between the two threads.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use super::backing::Backing;
use super::store::{Access, Shard};
use super::{Error, Offload};

/// Where a tile lies.
#[derive(Clone, Debug)]
pub(super) struct Address {
    pub(super) weight: usize,
    /// Elements of all shards before this one.
    pub(super) base: usize,
    /// Elements of the shard's strips.
    pub(super) strip: usize,
    pub(super) strips: usize,
    /// Elements of each strip.
    pub(super) range: Range<usize>,
}

impl Address {
    pub(super) fn new(shards: &[Shard], weight: usize, range: Range<usize>) -> Address {
        let (base, shard) = (shards[..weight].iter().map(Shard::len).sum(), &shards[weight]);
        Address { weight, base, strip: shard.range.len(), strips: shard.strips, range }
    }

    /// Elements of the tile.
    fn len(&self) -> usize {
        self.range.len() * self.strips
    }
}

/// What moving state has cost a rank so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// Read and written.
    pub bytes: u64,
    /// Seconds the moving thread was busy.
    pub busy_s: f64,
    /// Seconds the rank waited for it: what moving did not hide behind the update.
    pub waited_s: f64,
}

enum Job {
    Read(Address, Tensor),
    Write(Address, Tensor),
}

/// A finished job: its staging memory, and how long it took.
struct Done {
    staging: Tensor,
    was_read: bool,
    took: Duration,
}

/// State elsewhere.
#[derive(Debug)]
pub(super) struct Away {
    rank: usize,
    place: Offload,
    /// Of all state of this rank.
    bytes: u64,
    host: Option<Arc<Device>>,
    jobs: Option<Sender<Job>>,
    done: Receiver<std::io::Result<Done>>,
    thread: Option<JoinHandle<()>>,
    walk: Option<Course>,
    moved: Moved,
}

/// A walk under way.
#[derive(Debug)]
struct Course {
    addresses: Vec<Address>,
    access: Access,
    free: Vec<Tensor>,
    /// Tiles asked for, arrived, and given back.
    asked: usize,
    arrived: Vec<Tensor>,
    returned: usize,
    /// Jobs without an answer yet.
    open: usize,
}

/// Staging memory of a walk: one tile comes, one is worked on, one goes.
const STAGES: usize = 3;

impl Away {
    /// Room for `shards`, of contents that a first walk must write.
    pub(super) fn new(rank: usize, place: &Offload, shards: &[Shard]) -> Result<Away, Error> {
        let bytes = shards.iter().map(Shard::len).sum::<usize>() as u64 * 4;
        let fail = |source| error(rank, place, bytes, "make room for", source);
        let backing = Backing::new(place, shards).map_err(fail)?;
        let host = backing.host().cloned();
        let (jobs, inbox) = channel();
        let (outbox, done) = channel();
        let work = move || serve(backing, &inbox, &outbox);
        let thread = thread::Builder::new().name(format!("offload {rank}")).spawn(work).map_err(fail)?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Away { rank, place: place.clone(), bytes, host, jobs, done, thread, walk: None, moved: Moved::default() })
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        self.host.as_ref()
    }

    pub(super) fn moved(&self) -> Moved {
        self.moved
    }

    /// Begins a walk over tiles: their memory is on `device`.
    pub(super) fn begin(&mut self, device: &Arc<Device>, addresses: Vec<Address>, access: Access) -> Result<(), Error> {
        let (largest, stages) = (addresses.iter().map(Address::len).max().unwrap_or(0), STAGES.min(addresses.len()));
        let _charge = device.charge(Cause::Optimizer);
        let free = (0..stages).map(|_| Tensor::stale(device, &[largest], Dtype::F32)).collect();
        self.walk = Some(Course { addresses, access, free, asked: 0, arrived: Vec::new(), returned: 0, open: 0 });
        self.ask()
    }

    /// The next tile, in staging memory. The one after it is on its way.
    pub(super) fn next(&mut self) -> Result<Tensor, Error> {
        while self.course().arrived.is_empty() {
            self.await_one()?;
        }
        let tile = self.course().arrived.remove(0);
        self.ask()?;
        Ok(tile)
    }

    /// Lets go of the tile that was worked on.
    pub(super) fn give_back(&mut self, staging: Tensor) {
        let course = self.course();
        let address = course.addresses[course.returned].clone();
        course.returned += 1;
        match course.access {
            Access::Read => course.free.push(staging),
            Access::Write | Access::Change => self.send(Job::Write(address, staging)),
        }
    }

    /// Ends a walk when everything is where it is kept.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        while self.course().open > 0 {
            self.await_one()?;
        }
        self.walk = None;
        Ok(())
    }

    /// Asks for one more tile, if there is one.
    fn ask(&mut self) -> Result<(), Error> {
        if self.course().asked == self.course().addresses.len() {
            return Ok(());
        }
        while self.course().free.is_empty() {
            self.await_one()?;
        }
        let course = self.course();
        let staging = course.free.pop().expect("one is free");
        let address = course.addresses[course.asked].clone();
        course.asked += 1;
        match course.access {
            Access::Write => course.arrived.push(staging),
            Access::Read | Access::Change => self.send(Job::Read(address, staging)),
        }
        Ok(())
    }

    fn send(&mut self, job: Job) {
        let bytes = match &job {
            Job::Read(address, _) | Job::Write(address, _) => address.len() as u64 * 4,
        };
        self.moved.bytes += bytes;
        self.course().open += 1;
        // A thread that is gone is noticed where its answer is missed.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    fn await_one(&mut self) -> Result<(), Error> {
        let since = Instant::now();
        let done = self.done.recv().unwrap_or_else(|_| Err(std::io::Error::other("the thread that moves it is gone")));
        self.moved.waited_s += since.elapsed().as_secs_f64();
        let done = done.map_err(|source| error(self.rank, &self.place, self.bytes, "move", source))?;
        self.moved.busy_s += done.took.as_secs_f64();
        let course = self.course();
        course.open -= 1;
        if done.was_read {
            course.arrived.push(done.staging)
        } else {
            course.free.push(done.staging)
        }
        Ok(())
    }

    fn course(&mut self) -> &mut Course {
        self.walk.as_mut().expect("a walk is under way")
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        // Without a sender the thread ends, and what it keeps goes with it.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn error(rank: usize, place: &Offload, bytes: u64, action: &'static str, source: std::io::Error) -> Error {
    let path = match place {
        Offload::File(folder) => folder.clone(),
        Offload::None | Offload::Host => Path::new("memory").to_owned(),
    };
    Error { rank, action, bytes, path, source }
}

/// Does jobs in their order until nobody asks any more.
fn serve(mut backing: Backing, jobs: &Receiver<Job>, done: &Sender<std::io::Result<Done>>) {
    for job in jobs {
        let since = Instant::now();
        let (result, staging, was_read) = match job {
            Job::Read(address, mut staging) => (backing.read(&address, staging.f32s_mut()), staging, true),
            Job::Write(address, staging) => (backing.write(&address, staging.f32s()), staging, false),
        };
        let answer = result.map(|()| Done { staging, was_read, took: since.elapsed() });
        if done.send(answer).is_err() {
            return;
        }
    }
}
