//! Offloaded optimizer state and reduced gradients, and the thread that transfers tiles of them.
//!
//! A bucket's gradients are offloaded as soon as they are reduced (ZeRO-Offload, Ren et al. 2021). The thread stores
//! them, or adds them to those of earlier micro-batches, and sums their squares on the host for the gradient's norm.
//! While tile i is updated, tile i + 1 is read and tile i - 1 is written:
//!
//! ```text
//!  this thread        ... wait 1 | update 1           | wait 2 | update 2           | ...
//!  the other          ...  read 1, write 0, read 2         write 1, read 3
//! ```
//!
//! Three staging buffers, allocated when a pass over the tiles begins, circulate between the two threads.

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

/// Transfers of a rank's offloaded state so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// Bytes read and written.
    pub bytes: u64,
    /// Seconds the transfer thread was busy.
    pub busy_s: f64,
    /// Seconds the rank waited for the transfer thread: the exposed time of transfers.
    pub waited_s: f64,
}

/// Offloaded optimizer state, with the reduced gradients.
#[derive(Debug)]
pub(super) struct Away {
    rank: usize,
    device: Arc<Device>,
    place: OffloadTarget,
    /// Bytes of all offloaded state and gradients of this rank.
    bytes: u64,
    host: Option<Arc<Device>>,
    mover: Mover,
    walk: Option<Course>,
    moved: Moved,
    /// Of each weight, the first element of this rank's share, and where the share's gradient begins among all that are
    /// stored.
    shares: Vec<(usize, usize)>,
    /// Number of messages of reduced gradients in flight.
    leaving: usize,
    /// Whether this step's reduced gradients have been offloaded.
    has_sums: bool,
    squares: Option<SquareSums>,
    /// An error of an earlier offload; the next call that can fail returns it.
    failed: Option<Error>,
}

/// A pass over the tiles in progress.
#[derive(Debug)]
struct Course {
    addresses: Vec<Address>,
    access: Access,
    free: Vec<Tensor>,
    /// Number of tiles requested.
    asked: usize,
    /// Tiles that are ready to be worked on.
    arrived: Vec<Tensor>,
    /// Number of tiles given back.
    returned: usize,
    /// Number of reads and writes in flight.
    open: usize,
}

/// Staging buffers of a pass: for the tile that is read, the one that is updated and the one that is written.
const STAGES: usize = 3;

impl Away {
    /// Reserves storage for the state and gradients of `shards`, which are updated on `device`. The storage is
    /// undefined until the first pass writes it.
    pub(super) fn new(
        device: &Arc<Device>,
        rank: usize,
        place: &OffloadTarget,
        shards: &[Shard],
    ) -> Result<Away, Error> {
        let bytes = shards.iter().map(|shard| shard.len() + shard.range.len()).sum::<usize>() as u64 * 4;
        let fail = |source| error(rank, place, bytes, "make room for", source);
        let backing = Backing::new(device, place, shards).map_err(fail)?;
        let host = backing.host().cloned();
        let mover = Mover::new(device, rank, backing).map_err(fail)?;
        let begins = shards.iter().scan(0, |next, shard| {
            let begin = *next;
            *next += shard.range.len();
            Some((shard.range.start, begin))
        });
        Ok(Away {
            rank,
            device: device.clone(),
            place: place.clone(),
            bytes,
            host,
            mover,
            walk: None,
            moved: Moved::default(),
            shares: begins.collect(),
            leaving: 0,
            has_sums: false,
            squares: None,
            failed: None,
        })
    }

    /// Number of strips of each tile in the current pass. A strip is the tile's range of one tensor: of each of the two
    /// moments, of the master weights if there are any, and in an update also of the gradient.
    pub(super) fn strips(&mut self, shard: &Shard) -> usize {
        shard.strips + usize::from(self.course().access == Access::Change)
    }

    /// Whether reduced gradients have been offloaded for an update that has not run yet.
    pub(super) fn has_sums(&self) -> bool {
        self.has_sums
    }

    /// Starts to offload reduced gradients, after waiting for the previous message to be stored. So at most one message
    /// is in flight on the device, however slow the storage is.
    pub(super) fn keep(&mut self, sums: Sums) {
        self.has_sums = true;
        if let Err(error) = self.land() {
            self.failed.get_or_insert(error);
            return;
        }
        let parts: Vec<GradientPart> = sums.landings.iter().map(|landing| self.part(landing)).collect();
        self.moved.bytes += parts.iter().map(|part| 4 * part.from.len() as u64).sum::<u64>();
        self.leaving = 1;
        let (message, point) = (sums.message, self.device.point());
        let job = if sums.are_first { TransferJob::Put } else { TransferJob::Add };
        self.mover.send(job(message, parts, point));
    }

    fn part(&self, landing: &Landing) -> GradientPart {
        let Landing { weight, elements, at } = landing;
        let (first, begin) = self.shares[*weight];
        GradientPart { to: begin + elements.start - first, from: *at..at + elements.len() }
    }

    /// Returns when no reduced gradients are in flight.
    fn land(&mut self) -> Result<(), Error> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        while self.leaving > 0 {
            self.await_one()?;
        }
        Ok(())
    }

    /// For each weight, the sum of the squares of the given elements of its gradient, in a tensor on the host.
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

    /// Begins a pass over the tiles at `addresses`. The staging buffers are on the rank's device.
    pub(super) fn begin(&mut self, addresses: Vec<Address>, access: Access) -> Result<(), Error> {
        self.land()?;
        let device = self.device.clone();
        let (largest, stages) = (addresses.iter().map(Address::len).max().unwrap_or(0), STAGES.min(addresses.len()));
        let _charge = device.charge(Cause::Optimizer);
        let free = (0..stages).map(|_| Tensor::stale(&device, &[largest], Dtype::F32)).collect();
        self.walk = Some(Course { addresses, access, free, asked: 0, arrived: Vec::new(), returned: 0, open: 0 });
        self.ask()
    }

    /// The next tile, in staging memory. The read of the one after it is in flight.
    pub(super) fn next(&mut self) -> Result<Tensor, Error> {
        while self.course().arrived.is_empty() {
            self.await_one()?;
        }
        let tile = self.course().arrived.remove(0);
        self.ask()?;
        Ok(tile)
    }

    /// Gives back the staging buffer of a finished tile, and starts its write unless the pass only reads.
    pub(super) fn give_back(&mut self, staging: Tensor) {
        let course = self.course();
        let address = course.addresses[course.returned].clone();
        course.returned += 1;
        match course.access {
            Access::Read => course.free.push(staging),
            Access::Write | Access::Change => {
                course.open += 1;
                self.moved.bytes += 4 * address.written() as u64 * address.alike;
                self.mover.send(TransferJob::Write(address, staging, self.device.point()));
            }
        }
    }

    /// Ends a pass when all writes have completed.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        while self.course().open > 0 {
            self.await_one()?;
        }
        if self.walk.take().is_some_and(|walk| walk.access == Access::Change) {
            self.has_sums = false;
        }
        Ok(())
    }

    /// Requests one more tile, if there is one.
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
                self.mover.send(TransferJob::Read(address, staging, self.device.point()));
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
