//! Ranks talking to each other: collectives, startable and awaitable, behind one object-safe trait; and beside the data
//! a control lane of small signals, which an abort of the data leaves open.
//!
//! A *rank* is one worker; a *group* is a communicator over some ranks. The trait knows buffers and counts, no
//! tensors, and does not assume shared memory. All ranks of a group issue the same collectives in the same order;
//! where they do not, every rank gets an error that names both call sites. One rank's failure ends the whole world.
//!
//! ```text
//!   Request ──start──▶ Pending ──wait──▶ Completed          (operation, pending)
//!      │
//!      ├─ solo::world()            a world of one
//!      ├─ sizes::world             one rank of many that are not there: sizes travel, numbers are mirrored
//!      ├─ sizes::among             all of them at once: sizes travel nowhere, numbers really
//!      ├─ threads::world, run      ranks are threads; meet in `rendezvous`
//!      ├─ messages::world          ranks share no memory; messages between two, within the process or by MPI
//!      ├─ wrap::{Trace, Delay, Fault}  count bytes; charge time for them; shake the protocol
//!      ├─ wrap::Relay              all-to-alls from node to node, on behalf of all ranks of a node
//!      ├─ wrap::Carried            devices' memory by a carrier, as NCCL is one
//!      ├─ simulated::run       one rank at a time, in an order that a seed draws; with deaths
//!      └─ wrap::Agreement        check over a control lane what thread ranks check in place
//! ```
//!
//! ```
//! use guildhall_comm::{Error, Reduce, threads};
//!
//! let options = threads::Options { timeout: std::time::Duration::from_secs(5) };
//! let sums = threads::run(4, options, |comm| {
//!     let mine = vec![comm.rank() as f32];
//!     Ok::<_, Error>(comm.all_reduce(Reduce::Sum, mine)?.into_f32())
//! });
//! assert!(sums.into_iter().all(|sum| sum.unwrap() == [6.0]));
//! ```

mod arithmetic;
mod bell;
mod blocking;
mod clock;
pub mod control;
mod device;
mod digest;
mod error;
mod failure;
pub mod messages;
mod operation;
mod payload;
mod pending;
mod rendezvous;
pub mod simulated;
mod site;
pub mod sizes;
pub mod solo;
mod sync;
pub mod threads;
mod validate;
pub mod wrap;

use std::panic::Location;
use std::sync::Arc;

pub use bell::{Bell, Sleeper};
pub use clock::{Clock, ManualClock, SystemClock};
pub use device::{DeviceBuffer, DeviceCarrier, DeviceCarriers, DeviceParcel};
pub use error::{Attendance, Error, Interruption, LastSeen, Party};
pub use failure::{DeviceTrouble, Failure};
pub use half::bf16;
pub use operation::{Collective, Completed, Operation, Reduce, Request, Summation};
pub use payload::{ElementKind, Payload, Span};
pub use pending::{InFlight, Pending};
pub use site::CallSite;

/// One rank's membership in a group.
///
/// Operations of different ranks are matched by the order in which each started them on this communicator. One
/// thread at a time should use it; work that overlaps takes a lane of its own from [`Communicator::duplicate`].
/// Blocking conveniences (`all_reduce`, `all_gather_u64`, ...) are methods of `dyn Communicator`.
pub trait Communicator: Send + Sync {
    /// This rank's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// What errors and traffic reports call this communicator.
    fn name(&self) -> &str;

    /// The same lane under another name. Local: concerns no other rank.
    fn named(&self, name: &str) -> Arc<dyn Communicator>;

    /// Hands the buffers of `request` over to the group. May block while too many operations are in flight.
    ///
    /// # Errors
    /// [`Error::Counts`] if the request contradicts itself, [`Error::Aborted`] after any failure in the world, and those of
    /// [`Pending::wait`] where it blocks.
    fn start(&self, request: Request) -> Result<Pending, Error>;

    /// The same, awaited at once: an implementation may know how to do that with less bookkeeping.
    ///
    /// # Errors
    /// As [`Communicator::start`] and [`Pending::wait`].
    fn finish(&self, request: Request) -> Result<Completed, Error> {
        self.start(request)?.wait()
    }

    /// The group of the ranks that gave the same `color`, ordered by `key` and then by their rank here.
    /// Collective: every rank of this communicator calls it at the same place.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error>;

    /// The group of `members`, in that order; this rank is one of them. Collective: every rank of this communicator calls
    /// it at the same place, with the group it is in, and no two groups share a rank.
    ///
    /// # Errors
    /// As [`Communicator::split`].
    ///
    /// # Panics
    /// If this rank is not a member.
    fn group(&self, members: &[usize]) -> Result<Arc<dyn Communicator>, Error> {
        let place = members.iter().position(|&member| member == self.rank()).expect("a rank is in its own group");
        self.split(members[0], place)
    }

    /// The same lane, whose all-to-alls go `way` from node to node; `nodes` has the node of each rank, and groups of ranks on
    /// one node are called `name`. Collective.
    ///
    /// # Errors
    /// As [`Communicator::split`].
    ///
    /// # Panics
    /// If `nodes` are not as many as ranks.
    fn by_nodes(&self, nodes: &[usize], way: wrap::NodeWay, name: &str) -> Result<Arc<dyn Communicator>, Error> {
        wrap::Relay::wrap(self.named(self.name()), nodes, way, name)
    }

    /// A separate lane of the same ranks: its operations are matched independently of this one's. Collective.
    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error>;

    /// Whether it moves buffers in memory of devices ([`Payload::Device`]). Others refuse them: they are copied to the host
    /// first.
    fn moves_devices(&self) -> bool {
        false
    }

    /// Has what is in devices' memory carried by `carriers` from now on, in this group and in those that come from it
    /// later, or no more; false if it is not one that would ([`wrap::Carried`]). Collective.
    ///
    /// # Errors
    /// [`Error::Transport`] if they carry nothing, [`Error::Aborted`] after any failure in the world.
    fn carry_by(&self, _carriers: Option<Arc<dyn DeviceCarriers>>) -> Result<bool, Error> {
        Ok(false)
    }

    /// What it promises of sums: whoever claims that two runs come to the same bits goes by it.
    fn sums(&self) -> Summation;

    /// Ends the world this communicator came from, with all that was split from it: every operation under way or
    /// yet to come fails with [`Error::Aborted`] naming this rank and `reason`. Only the first abort is kept.
    fn abort(&self, reason: &str);

    /// Has `tell` called for an operation of this world that is awaited for long, splits included, if the implementation
    /// knows for whom; and again, for nobody, when it is over. To be called once, before the first operation.
    fn on_long_wait(&self, _tell: OnLongWait) {}
}

/// Is told where a rank waits, and for which ranks of the world.
pub type OnLongWait = Box<dyn Fn(Collective, &'static Location<'static>, &[usize]) + Send + Sync>;
