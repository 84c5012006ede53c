//! State kept away from the device with the sums of gradients, and the thread that moves tiles of it.
//!
//! Sums leave the device as they arrive from their group (ZeRO-Offload, Ren et al. 2021): the thread puts them down, or adds
//! them to those of earlier micro-batches, and squares them where they are for the gradient's norm. While tile i is worked on, tile i + 1 is read and tile i - 1 is written:
//!
//! ```text
//!  this thread        ... wait 1 | update 1           | wait 2 | update 2           | ...
//!  the other          ...  read 1, write 0, read 2         write 1, read 3
//! ```
//!
//! Three pieces of staging memory, made when a walk begins, go round between the two threads.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Cause, Device, Dtype, Tensor};

use super::Error;
use super::backing::{Backing, OffloadTarget};
use super::mover::{Finished, Mover, TransferJob};
use super::shard::{Access, Address, GradientPart, Shard};
use crate::parallel::{Landing, Sums, norm_tiles};

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

/// State elsewhere.
#[derive(Debug)]
pub(super) struct Away {
    rank: usize,
    place: OffloadTarget,
    /// Of all state of this rank.
    bytes: u64,
    host: Option<Arc<Device>>,
    mover: Mover,
    walk: Option<Course>,
    moved: Moved,
    shards: Vec<Shard>,
    /// Sums on their way.
    leaving: usize,
    /// Sums of this step are here.
    has_sums: bool,
    squares: Option<SquareSums>,
    /// Why sums could not leave; told where somebody can be told.
    failed: Option<Error>,
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
    /// Room for `shards` of `device`, of contents that a first walk must write.
    pub(super) fn new(device: &Device, rank: usize, place: &OffloadTarget, shards: &[Shard]) -> Result<Away, Error> {
        let bytes = shards.iter().map(|shard| shard.len() + shard.range.len()).sum::<usize>() as u64 * 4;
        let fail = |source| error(rank, place, bytes, "make room for", source);
        let backing = Backing::new(device, place, shards).map_err(fail)?;
        let host = backing.host().cloned();
        let mover = Mover::new(device, rank, backing).map_err(fail)?;
        Ok(Away {
            rank,
            place: place.clone(),
            bytes,
            host,
            mover,
            walk: None,
            moved: Moved::default(),
            shards: shards.to_vec(),
            leaving: 0,
            has_sums: false,
            squares: None,
            failed: None,
        })
    }

    /// Strips that a tile of the walk under way has.
    pub(super) fn strips(&mut self, shard: &Shard) -> usize {
        shard.strips + usize::from(self.course().access == Access::Change)
    }

    /// Whether the sums of a step are here, for an update that has not been.
    pub(super) fn has_sums(&self) -> bool {
        self.has_sums
    }

    /// Sends sums on their way, when those before them have landed: so much of them is on the device at once, however
    /// slow the place.
    pub(super) fn keep(&mut self, sums: Sums) {
        self.has_sums = true;
        if let Err(error) = self.land() {
            self.failed.get_or_insert(error);
            return;
        }
        let parts: Vec<GradientPart> = sums.landings.iter().map(|landing| self.part(landing)).collect();
        self.moved.bytes += parts.iter().map(|part| 4 * part.from.len() as u64).sum::<u64>();
        self.leaving = 1;
        self.mover.send(if sums.are_first {
            TransferJob::Put(sums.message, parts)
        } else {
            TransferJob::Add(sums.message, parts)
        });
    }

    fn part(&self, landing: &Landing) -> GradientPart {
        let Landing { weight, elements, at } = landing;
        let first = elements.start - self.shards[*weight].range.start;
        let before: usize = self.shards[..*weight].iter().map(|shard| shard.range.len()).sum();
        GradientPart { weight: *weight, place: (before, first), from: *at..at + elements.len() }
    }

    /// Returns when no sums are on their way.
    fn land(&mut self) -> Result<(), Error> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        while self.leaving > 0 {
            self.await_one()?;
        }
        Ok(())
    }

    /// By weight, the sum of the squares of the given elements of its gradient, in a tensor where sums are kept.
    pub(super) fn squares(&mut self, shares: &[Range<usize>]) -> Result<SquareSums, Error> {
        self.land()?;
        let tile = |weight: usize, elements: Range<usize>| {
            let (at, len) = (0, elements.len());
            GradientPart { from: 0..len, ..self.part(&Landing { weight, elements, at }) }
        };
        let of = |(weight, share): (usize, &Range<usize>)| norm_tiles(share.clone()).map(|t| tile(weight, t)).collect();
        let tiles = shares.iter().enumerate().map(of).collect();
        self.mover.send(TransferJob::Square(tiles));
        loop {
            self.await_one()?;
            if let Some(squares) = self.squares.take() {
                return Ok(squares);
            }
        }
    }

    pub(super) fn host(&self) -> Option<&Arc<Device>> {
        self.host.as_ref()
    }

    pub(super) fn moved(&self) -> Moved {
        self.moved
    }

    /// Begins a walk over tiles: their memory is on `device`.
    pub(super) fn begin(&mut self, device: &Arc<Device>, addresses: Vec<Address>, access: Access) -> Result<(), Error> {
        self.land()?;
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
            Access::Write | Access::Change => {
                course.open += 1;
                self.moved.bytes += 4 * address.written() as u64 * address.alike;
                self.mover.send(TransferJob::Write(address, staging));
            }
        }
    }

    /// Ends a walk when everything is where it is kept.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        while self.course().open > 0 {
            self.await_one()?;
        }
        if self.walk.take().is_some_and(|walk| walk.access == Access::Change) {
            self.has_sums = false;
        }
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
            Access::Read | Access::Change => {
                course.open += 1;
                self.moved.bytes += 4 * address.len() as u64 * address.alike;
                self.mover.send(TransferJob::Read(address, staging));
            }
        }
        Ok(())
    }

    fn await_one(&mut self) -> Result<(), Error> {
        let since = Instant::now();
        let done = self.mover.answer();
        self.moved.waited_s += since.elapsed().as_secs_f64();
        let done = done.map_err(|source| error(self.rank, &self.place, self.bytes, "move", source))?;
        self.moved.busy_s += done.took.as_secs_f64();
        match done.what {
            Finished::Read(staging) => {
                self.course().open -= 1;
                self.course().arrived.push(staging);
            }
            Finished::Written(staging) => {
                self.course().open -= 1;
                self.course().free.push(staging);
            }
            Finished::Landed(sums) => {
                drop(sums);
                self.leaving -= 1;
            }
            Finished::Squares(squares) => self.squares = Some(squares),
        }
        Ok(())
    }

    fn course(&mut self) -> &mut Course {
        self.walk.as_mut().expect("a walk is under way")
    }
}

fn error(rank: usize, place: &OffloadTarget, bytes: u64, action: &'static str, source: io::Error) -> Error {
    let path = match place {
        OffloadTarget::File(folder) => folder.clone(),
        OffloadTarget::None | OffloadTarget::Host => Path::new("memory").to_owned(),
    };
    Error { rank, action, bytes, path, source }
}
