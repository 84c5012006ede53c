//! What ranks know of a run each for itself, brought together at its end: over the communicator, so that it makes no
//! difference which of them share a process.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use serde::{Deserialize, Serialize};

use crate::metrics::{CollectiveTraffic, DeadExpert, Offloaded};
use crate::parallel::gather_bytes;

/// One rank's part.
#[derive(Serialize, Deserialize)]
pub(super) struct OwnShare {
    /// By cause.
    pub(super) peak_bytes: BTreeMap<String, u64>,
    pub(super) offload: Option<Offloaded>,
    /// (group, collective) each with its traffic.
    pub(super) traffic: Vec<((String, String), CollectiveTraffic)>,
    /// Known to rank 0, which logs.
    pub(super) dead_experts: Vec<DeadExpert>,
}

/// That of all ranks.
#[derive(Default)]
pub(super) struct AllShares {
    /// By rank.
    pub(super) peak_bytes: Vec<BTreeMap<String, u64>>,
    pub(super) offload: Option<Offloaded>,
    pub(super) traffic: BTreeMap<(String, String), CollectiveTraffic>,
    pub(super) dead_experts: Vec<DeadExpert>,
}

/// The same on every rank. Collective.
pub(super) fn of_all_ranks(own: &OwnShare, world: &Arc<dyn Communicator>) -> Result<AllShares, Error> {
    let text = serde_json::to_vec(own).expect("strings and numbers are plain JSON");
    let mut sums = AllShares::default();
    for part in gather_bytes(text, world)? {
        sums.add(serde_json::from_slice(&part).expect("a rank's own JSON"));
    }
    Ok(sums)
}

impl AllShares {
    fn add(&mut self, rank: OwnShare) {
        if self.peak_bytes.is_empty() {
            self.dead_experts = rank.dead_experts;
        }
        self.peak_bytes.push(rank.peak_bytes);
        if let Some(own) = rank.offload {
            let sum = self.offload.get_or_insert_default();
            sum.host_bytes += own.host_bytes;
            sum.moved_bytes += own.moved_bytes;
            sum.busy_s += own.busy_s;
            sum.waited_s += own.waited_s;
        }
        for (key, traffic) in rank.traffic {
            *self.traffic.entry(key).or_default() += traffic;
        }
    }
}
