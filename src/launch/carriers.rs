//! How what is in GPUs' memory goes from rank to rank: GPUs of one process copy from each other, NCCL carries it, or it goes
//! by way of the host.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use guildhall_comm::control::mailbox;
use guildhall_comm::wrap::{Agreement, Carried, OnHost, Patience};
use guildhall_comm::{Communicator, DeviceCarrier, DeviceCarriers, Error, SystemClock};
use guildhall_tensor::{Device, DeviceFailure, EngineError, NcclId, NcclRank, find_nccl};

use super::Launched;
use super::backend::gpus;
use crate::parallel::{self, Backend, GpuTransport, NcclCarrier};

/// The way that all ranks of a run take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DevicePath {
    /// As the ranks' world does it: devices of one process copy from each other.
    Own,
    Nccl,
    /// Where NCCL was to be taken, why it is not.
    Host(Option<String>),
}

impl fmt::Display for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DevicePath::Own => f.write_str("from GPU to GPU"),
            DevicePath::Nccl => f.write_str("by NCCL"),
            DevicePath::Host(_) => f.write_str("by way of the host"),
        }
    }
}

/// What a process tells the others of it: the GPUs that NCCL would find, or what is missing. Nothing, where nobody asks.
pub(super) fn told(config: &parallel::Config) -> String {
    let found = || -> Result<String, EngineError> {
        find_nccl()?;
        let gpus = gpus(Backend::Cuda)?;
        Ok(gpus.into_iter().map(|gpu| format!("{GPU}{}", gpu.identity)).collect::<Vec<_>>().join(" "))
    };
    match may_take_nccl(config) {
        true => found().unwrap_or_else(|missing| missing.to_string().replace('\n', " ")),
        false => String::new(),
    }
}

/// Before the identity of a GPU.
const GPU: &str = "GPU-";

fn may_take_nccl(config: &parallel::Config) -> bool {
    let may_be = matches!(config.transport, GpuTransport::Auto | GpuTransport::Nccl);
    config.backend == Backend::Cuda && config.ranks > 1 && may_be
}

/// Why NCCL cannot carry between ranks, if it cannot, by each rank's place among those of its node and by what its process has
/// told.
fn no_nccl(ranks: &[(usize, &str)]) -> Option<String> {
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    ranks.iter().enumerate().find_map(|(rank, &(place, told))| {
        let gpus: Vec<&str> = told.split(' ').collect();
        if !gpus.iter().all(|gpu| gpu.starts_with(GPU)) {
            let lacks = if told.is_empty() { "there is no GPU" } else { told };
            return Some(format!("rank {rank}: {lacks}"));
        }
        let other = taken.insert(gpus[place % gpus.len()].to_owned(), rank)?;
        Some(format!("ranks {other} and {rank} share a GPU, and NCCL takes one for each"))
    })
}

/// The way of ranks of which each is a process, by its place among those of its node and by what it has told.
///
/// # Errors
/// If the recipe wants a way that they cannot have, and why.
pub(super) fn between_processes(config: &parallel::Config, ranks: &[(usize, &str)]) -> Result<DevicePath, String> {
    if config.backend != Backend::Cuda {
        return Ok(DevicePath::Own);
    }
    match (config.transport, no_nccl(ranks)) {
        _ if config.ranks == 1 => Ok(DevicePath::Host(None)),
        (GpuTransport::Host, _) => Ok(DevicePath::Host(None)),
        (GpuTransport::Copies, _) => {
            Err("parallel.transport = \"copies\": GPUs of several processes do not copy from each other; \
                                          \"nccl\" and \"host\" go between processes, and \"auto\" takes one of them"
                .to_owned())
        }
        (_, None) => Ok(DevicePath::Nccl),
        (GpuTransport::Nccl, Some(why)) => Err(lacks_nccl(&why, "host")),
        (GpuTransport::Auto, Some(why)) => Ok(DevicePath::Host(Some(why))),
    }
}

fn lacks_nccl(why: &str, instead: &str) -> String {
    format!("parallel.transport = \"nccl\": {why}; \"{instead}\" needs no NCCL and no GPU for each rank")
}

/// The way of ranks that are threads.
///
/// # Errors
/// If the recipe wants NCCL, and why it cannot be had.
pub(super) fn within_a_process(config: &parallel::Config) -> Result<DevicePath, String> {
    if config.transport == GpuTransport::Host && config.backend != Backend::Cpu {
        return Ok(DevicePath::Host(None));
    }
    if !may_take_nccl(config) {
        return Ok(DevicePath::Own);
    }
    let told = told(config);
    let ranks: Vec<_> = (0..config.ranks).map(|place| (place, told.as_str())).collect();
    match no_nccl(&ranks) {
        None => Ok(DevicePath::Nccl),
        Some(why) if config.transport == GpuTransport::Nccl => Err(lacks_nccl(&why, "copies")),
        Some(_) => Ok(DevicePath::Own),
    }
}

/// Whether ranks of this process can have the way that the recipe wants.
///
/// # Errors
/// If NCCL is wanted, and why it cannot be had.
pub fn transport_is_here(config: &parallel::Config) -> Result<(), String> {
    match Launched::here() {
        // Processes find out together.
        Some(_) => Ok(()),
        None => within_a_process(config).map(drop),
    }
}

impl DevicePath {
    /// The world of ranks that are threads, with what this way needs: where NCCL carries, what they are asked for is compared
    /// as between processes.
    pub(super) fn of_threads(
        &self,
        worlds: Vec<Arc<dyn Communicator>>,
        timeout: Duration,
    ) -> Vec<Arc<dyn Communicator>> {
        let lanes = mailbox::lanes(worlds.len());
        let dressed = |(world, lane)| match self {
            DevicePath::Own => world,
            DevicePath::Host(_) => OnHost::wrap(world),
            DevicePath::Nccl => {
                Agreement::beside(Carried::around(world), lane, Patience { timeout, clock: SystemClock::new() })
            }
        };
        worlds.into_iter().zip(lanes).map(dressed).collect()
    }

    /// Has NCCL carry what is in the memory of a rank's device, if this is its way. Collective.
    ///
    /// # Errors
    /// Why it does not.
    pub(super) fn begin(
        &self,
        world: &Arc<dyn Communicator>,
        device: &Arc<Device>,
        timeout: Duration,
    ) -> Result<(), DeviceFailure> {
        if *self != DevicePath::Nccl {
            return Ok(());
        }
        let broken = |reason: String| DeviceFailure::Broken {
            what: "joining the others".to_owned(),
            reason: format!("{reason} (parallel.transport = \"host\" goes without NCCL)"),
        };
        let told: Weak<dyn Communicator> = Arc::downgrade(world);
        let tell = move |reason: &str| told.upgrade().iter().for_each(|world| world.abort(reason));
        let rank = NcclRank::new(device, timeout, tell).map_err(|missing| broken(missing.to_string()))?;
        let carries = world.carry_by(Some(Arc::new(NcclCarriers(rank)))).map_err(|error| match error {
            Error::Aborted { .. } => DeviceFailure::Ended { reason: error.to_string() },
            Error::Transport { detail, .. } => broken(detail),
            error => broken(error.to_string()),
        })?;
        assert!(carries, "worlds whose ranks take NCCL have it carry");
        Ok(())
    }

    /// When the rank is done, and what it has begun is over.
    pub(super) fn end(&self, world: &Arc<dyn Communicator>) {
        if *self == DevicePath::Nccl {
            // Nothing is carried any more, whatever is met with.
            let _ = world.carry_by(None);
        }
    }
}

/// NCCL's groups of a rank, opened for groups of ranks.
struct NcclCarriers(Arc<NcclRank>);

impl DeviceCarriers for NcclCarriers {
    fn open(&self, group: &Arc<dyn Communicator>) -> Result<Arc<dyn DeviceCarrier>, String> {
        let (rank, size) = (group.rank(), group.size());
        // A world of one asks nobody.
        let id = if rank == 0 && size > 1 { NcclId::new()? } else { NcclId([0; 128]) };
        let id = group.broadcast(0, id.0.to_vec()).map_err(|error| error.to_string())?.into_u8();
        let id = NcclId(id.try_into().expect("as long as it was sent"));
        Ok(Arc::new(NcclCarrier(self.0.join(id, rank, size)?)))
    }

    fn end(&self, reason: &str) {
        self.0.end(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(transport: GpuTransport, ranks: &[(usize, &str)]) -> Result<DevicePath, String> {
        let config = parallel::Config { backend: Backend::Cuda, transport, ..parallel::Config::of(ranks.len(), 1) };
        between_processes(&config, ranks)
    }

    /// By the GPUs that ranks take, whatever each process sees and however many ranks a node has.
    #[test]
    fn nccl_needs_a_gpu_for_each_rank() {
        let (two, other, third) = ("GPU-a GPU-b", "GPU-c GPU-d", "GPU-e");
        let auto = |ranks: &[(usize, &str)]| path(GpuTransport::Auto, ranks).expect("some way");
        assert_eq!(auto(&[(0, two), (1, two)]), DevicePath::Nccl);
        // Two on one node, one on another; a process that sees its own alone.
        assert_eq!(auto(&[(0, two), (1, two), (0, other)]), DevicePath::Nccl);
        assert_eq!(auto(&[(0, "GPU-a"), (1, "GPU-b"), (2, third)]), DevicePath::Nccl);
        let shared = [(0, two), (1, two), (2, two)];
        let why = "ranks 0 and 2 share a GPU, and NCCL takes one for each";
        assert_eq!(auto(&shared), DevicePath::Host(Some(why.to_owned())));
        assert!(path(GpuTransport::Nccl, &shared).expect_err("it is wanted").contains(why));
        let lacks = [(0, two), (0, "libnccl.so.2 is not to be found"), (1, "")];
        assert_eq!(auto(&lacks), DevicePath::Host(Some("rank 1: libnccl.so.2 is not to be found".to_owned())));
        assert_eq!(auto(&[(0, two), (0, "")]), DevicePath::Host(Some("rank 1: there is no GPU".to_owned())));
        assert_eq!(path(GpuTransport::Host, &[(0, two), (1, two)]), Ok(DevicePath::Host(None)));
        assert!(
            path(GpuTransport::Copies, &[(0, two), (1, two)])
                .expect_err("of processes")
                .contains("\"copies\": GPUs of")
        );
    }
}
