//! Ranks are made here, and nowhere else is it known what they are: threads of this process, each with a pool of
//! compute threads of its own.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::Communicator;
use guildhall_comm::threads::{self, Failure, Options};
use guildhall_comm::wrap::{Cost, Ledger, Link, Network, Trace};
use guildhall_tensor::Device;

use crate::parallel;

/// What a rank is handed: all it knows of the machine and of the others.
#[derive(Clone)]
pub struct Rank {
    pub world: Arc<dyn Communicator>,
    pub device: Arc<Device>,
    /// Counts this rank's traffic.
    pub ledger: Arc<Ledger>,
}

/// Runs `f` on every rank and returns their results in rank order. When one fails the others are told, so all return.
pub fn run<T: Send, E: Display + Send>(
    config: &parallel::Config,
    f: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Vec<Result<T, Failure<E>>> {
    let threads_per_rank = threads_per_rank(config);
    let options = Options { timeout: Duration::from_secs(config.timeout_s) };
    threads::run(config.ranks, options, |world| {
        let world = match network(config) {
            Some(network) => Cost::wrap(world, network),
            None => world,
        };
        let (world, ledger) = Trace::wrap(world);
        let rank = Rank { world, device: Device::new(threads_per_rank), ledger };
        in_pool(threads_per_rank, || f(rank.clone()))
    })
}

/// Compute threads of one rank: those it is given, or its share of the cores.
pub fn threads_per_rank(config: &parallel::Config) -> usize {
    config.threads.unwrap_or_else(|| (cores() / config.ranks).max(1))
}

/// What messages cost, where the recipe says so; links it does not speak of are free.
fn network(config: &parallel::Config) -> Option<Network> {
    let link = |latency_us: f64, gbytes_per_s: f64| Link {
        latency: Duration::from_secs_f64(latency_us * 1e-6),
        bandwidth: gbytes_per_s * 1e9,
    };
    let within = config.link.map(|l| link(l.latency_us, l.gbytes_per_s));
    let between = config.node_link.map(|l| link(l.latency_us, l.gbytes_per_s));
    within.or(between).map(|_| Network {
        ranks_per_node: config.node_link.map_or(config.ranks, |link| link.ranks_per_node),
        within: within.unwrap_or(Link::FREE),
        between: between.unwrap_or(Link::FREE),
    })
}

/// A pool of one is the calling thread itself.
fn in_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    match pool {
        Ok(pool) if threads > 1 => pool.install(f),
        // Without more threads kernels run on this one; they give the same numbers for the same device.
        _ => f(),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
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
    let caused = |failure: &Failure<E>| matches!(failure, Failure::Returned(error) if is_consequence(error));
    let cause = failures.iter().position(|failure| !caused(failure)).unwrap_or(0);
    if failures.is_empty() { Ok(values) } else { Err(failures.swap_remove(cause)) }
}
