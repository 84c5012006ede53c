//! One rank of the processes that a launcher of MPI has started: data by MPI, agreement and words over TCP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use guildhall_comm::control::ControlLane;
use guildhall_comm::control::Doorway;
use guildhall_comm::messages::{self, mpi::Session};
use guildhall_comm::wrap::{Agreement, Carried, Patience};
use guildhall_comm::{Communicator, SystemClock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::join::GiveUp;
use super::place::{EVERYWHERE, ListeningPlace, PLACE_BYTES};
use super::{Launched, Member, Process, Refusal};
use crate::parallel;

/// This process as a rank of the launcher's world. Collective over its processes.
pub(super) fn join(
    config: &parallel::Config,
    launched: &Launched,
    give_up: GiveUp,
) -> Result<(Process, StartedMpi), Refusal> {
    allow_many_connections();
    let timeout = Duration::from_secs(config.timeout_s);
    let session = within(timeout, give_up, "started", Session::start).map_err(refused)?;
    if (session.rank(), session.size()) != (launched.rank, launched.size) {
        return Err(refused(format!(
            "{} has started this process as rank {} of {}, but MPI says that it is {} of {}: it is the launcher of another \
             MPI library than this program was built with",
            launched.by,
            launched.rank,
            launched.size,
            session.rank(),
            session.size()
        )));
    }
    let world = messages::world(session.post(), timeout);
    let lane = || connect(&world, timeout).map_err(|error| refused(error.to_string()));
    let (agreement, words) = (lane()?, lane()?);
    let world = Agreement::beside(Carried::around(world), agreement, Patience { timeout, clock: SystemClock::new() });
    Ok((Process::of(vec![Member { world, lane: words }], config)?, StartedMpi { session, timeout }))
}

/// MPI in this process, to be left when all others leave it.
pub(super) struct StartedMpi {
    session: Session,
    timeout: Duration,
}

impl StartedMpi {
    /// # Errors
    /// What MPI reports.
    pub(super) fn leave(self, give_up: GiveUp) -> Result<(), String> {
        within(self.timeout, give_up, "left", || self.session.leave())
    }
}

/// Calls `f`, which waits until all processes have `done` the same with MPI; one that does not holds the others until they give
/// up.
fn within<T>(timeout: Duration, give_up: GiveUp, done: &'static str, f: impl FnOnce() -> T) -> T {
    let (over, is_over) = mpsc::channel::<()>();
    thread::spawn(move || {
        if is_over.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            give_up(&format!(
                "not all processes of the run have {done} MPI within {} s (parallel.timeout_s): one has ended before, or \
                 stands still",
                timeout.as_secs()
            ));
        }
    });
    let result = f();
    drop(over);
    result
}

/// Each of two control lanes has a connection to each other process, and MPI may have more: as many as the system allows at most.
fn allow_many_connections() {
    let limit = getrlimit(Resource::Nofile);
    // Where it cannot be raised, a connection that cannot be opened says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn refused(text: String) -> Refusal {
    Refusal { is_request: false, text }
}

/// A control lane between all processes, which wait so long for each other.
fn connect(world: &Arc<dyn Communicator>, timeout: Duration) -> anyhow::Result<Arc<dyn ControlLane>> {
    let doorway = Doorway::open(&EVERYWHERE[..])?;
    let own = ListeningPlace::here(doorway.address()?.port());
    let told = own.told();
    let size = world.size();
    let all = world.all_gather(told, vec![0u8; size * PLACE_BYTES], vec![PLACE_BYTES; size])?.recv.into_u8();
    let places = all.chunks(PLACE_BYTES).map(|text| ListeningPlace::of_text(&String::from_utf8_lossy(text)));
    let reached: Vec<Vec<SocketAddr>> = places.map(|place| place.from(&own)).collect();
    Ok(doorway.pass_any(world.rank(), &reached, timeout)?)
}
