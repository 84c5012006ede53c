//! Ranks are made here, and nowhere else is it known what they are: threads of this process, each with a device that
//! has compute threads of its own. A run may have ranks in other processes too: a [`Process`] has those of this one. Under a
//! launcher of MPI it has one.
//!
//! ```text
//!                 in_turn: rank 0's process first, then the others      control lane
//!   Process ───▶    run: a thread for each rank of this process      ───▶ data communicator
//!                 how each rank ended                                   control lane ───▶ one verdict everywhere
//! ```

mod backend;
mod carriers;
mod contents;
mod ending;
mod heard;
mod join;
mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
mod node;
mod pace;
#[cfg(any(feature = "mpi", test))]
mod place;
mod process;
mod restarts;
mod signals;
mod simulated;
mod standby;
mod standstill;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::wrap::{Delay, Ledger, Link, Network, Trace};
use guildhall_comm::{Communicator, Failure};
use guildhall_tensor::{Device, DeviceFailure};

use backend::{ComputeMeans, device};
pub use backend::{MissingBackend, memory_apart, open_backend};
pub use carriers::{DevicePath, transport_is_here};
pub use ending::{Refusal, RunFailure, Tellable};
pub use join::{GiveUp, Joined};
pub use launcher::Launched;
pub use node::machine;
pub use process::{Member, Process};
pub use restarts::{Ended, end_with, supervise};
pub use signals::when_asked_to_stop;
pub use simulated::{simulate, stay_on};
pub use standstill::DiskPatience;

use crate::parallel::{self, Nodes};

/// The most ranks of one process, which are threads of it: more are planned, not run.
pub const RANKS_MAX: usize = 1024;

/// What a rank is handed: all it knows of the machine and of the others.
#[derive(Clone)]
pub struct Rank {
    pub world: Arc<dyn Communicator>,
    pub device: Arc<Device>,
    /// Of all ranks.
    pub nodes: Nodes,
    /// Counts this rank's traffic.
    pub ledger: Arc<Ledger>,
    /// The first of its process: what processes do once each is done by it.
    pub is_first_here: bool,
    /// While it runs nothing else may, so that an order of events can be drawn and played again: what others do on threads
    /// of their own, it does in its turn.
    pub runs_alone: bool,
    pub disks: DiskPatience,
}

/// Runs `f` on every rank of a world of this process alone and returns their results in rank order. When one fails the
/// others are told, so all return.
pub fn run<T: Send, E: Display + Send>(
    config: &parallel::Config,
    f: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Vec<Result<T, Failure<E>>> {
    Process::whole(config).each(config, f)
}

/// Compute threads of one of the `ranks` that share the cores on which this process may run: those it is given, or its
/// share.
pub fn share_of_cores(config: &parallel::Config, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    config.threads.unwrap_or((cores / ranks).max(1))
}

/// What one rank is handed of its world.
fn rank_of(
    world: Arc<dyn Communicator>,
    config: &parallel::Config,
    (nodes, place): (&Nodes, usize),
    means: ComputeMeans,
    (is_first_here, runs_alone, disks): (bool, bool, DiskPatience),
) -> Rank {
    let world = match network(config) {
        Some(network) => Delay::wrap(world, network),
        None => world,
    };
    let (world, ledger) = Trace::wrap(world);
    // Commands ask for the backend before they begin, so that its absence is a refusal. Here another GPU may be in the way.
    let device = device(config.backend, means, place).unwrap_or_else(|missing| {
        DeviceFailure::Broken { what: "its beginning".to_owned(), reason: missing.to_string() }.raise()
    });
    Rank { world, device, nodes: nodes.clone(), ledger, is_first_here, runs_alone, disks }
}

/// What messages cost, where the recipe says so; links it does not speak of are free.
fn network(config: &parallel::Config) -> Option<Network> {
    let link = |[latency_us, message_us, gbytes_per_s]: [f64; 3]| Link {
        latency: Duration::from_secs_f64(latency_us * 1e-6),
        message: Duration::from_secs_f64(message_us * 1e-6),
        bandwidth: gbytes_per_s * 1e9,
    };
    let within = config.link.map(|l| link([l.latency_us, l.message_us, l.gbytes_per_s]));
    let between = config.node_link.map(|l| link([l.latency_us, l.message_us, l.gbytes_per_s]));
    within.or(between).map(|_| Network {
        ranks_per_node: config.node_link.map_or(config.ranks, |link| link.ranks_per_node),
        within: within.unwrap_or(Link::FREE),
        between: between.unwrap_or(Link::FREE),
    })
}

/// The error that began it: of ranks that failed by themselves the first, else any.
pub fn first_cause<T, E>(
    results: Vec<Result<T, Failure<E>>>,
    is_consequence: impl Fn(&E) -> bool,
) -> Result<Vec<T>, Failure<E>> {
    let mut values = Vec::new();
    let mut failures = Vec::new();
    for result in results {
        match result {
            Ok(value) => values.push(value),
            Err(failure) => failures.push(failure),
        }
    }
    let is_caused = |failure: &Failure<E>| match failure {
        Failure::Returned(error) => is_consequence(error),
        Failure::OfDevice { trouble, .. } => trouble.is_consequence,
        Failure::Panicked { .. } => false,
    };
    ending::cause(failures, is_caused).map_or(Ok(values), Err)
}
