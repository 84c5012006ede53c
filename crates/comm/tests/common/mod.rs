//! What the test files share: worlds to hold laws in, seeded data, and the sequential truth about reductions.

// Each test file compiles its own copy and uses a part of it.
#![allow(dead_code)]

mod courier;
mod late;

use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::Failure;
use guildhall_comm::control::{ControlLane, Doorway, mailbox};
use guildhall_comm::simulated::{self, WorldScript};
use guildhall_comm::wrap::{Agreement, Delay, Fault, Faults, Link, Network, NodeWay, Patience, Relay, Trace};
use guildhall_comm::{Clock, Communicator, Error, Payload, Reduce, SystemClock, bf16, messages, solo, threads};

pub(crate) type Comm = Arc<dyn Communicator>;
pub(crate) type Outcome = Result<(), Error>;

/// Long enough for any correct run on a loaded machine, short enough to notice a hang.
pub(crate) const PATIENT: threads::Options = threads::Options { timeout: Duration::from_secs(60) };

/// An implementation of the trait: `ranks` threads, each communicator dressed by `dress`.
struct World {
    name: &'static str,
    ranks: usize,
    dress: fn(Comm) -> Result<Comm, Error>,
}

const WORLDS: [World; 24] = [
    World { name: "one thread", ranks: 1, dress: Ok },
    World { name: "two threads", ranks: 2, dress: Ok },
    World { name: "three threads", ranks: 3, dress: Ok },
    World { name: "four threads", ranks: 4, dress: Ok },
    World { name: "eight threads", ranks: 8, dress: Ok },
    World { name: "traced", ranks: 3, dress: |comm| Ok(Trace::wrap(comm).0) },
    World { name: "delayed", ranks: 2, dress: |comm| Ok(delayed(comm, 1)) },
    World { name: "delayed more", ranks: 4, dress: |comm| Ok(delayed(comm, 2)) },
    World { name: "traced and delayed", ranks: 3, dress: |comm| Ok(delayed(Trace::wrap(comm).0, 3)) },
    World { name: "charged", ranks: 4, dress: |comm| Ok(charged(comm)) },
    World { name: "traced, charged and delayed", ranks: 3, dress: |comm| Ok(delayed(charged(Trace::wrap(comm).0), 4)) },
    World { name: "uneven halves", ranks: 5, dress: |comm| comm.split(comm.rank() % 2, comm.rank()) },
    World { name: "reversed", ranks: 3, dress: |comm| comm.split(0, 10 - comm.rank()) },
    World { name: "duplicate", ranks: 3, dress: |comm| comm.duplicate() },
    World { name: "on devices", ranks: 3, dress: |comm| Ok(late::on_devices(comm)) },
    World { name: "on devices, delayed", ranks: 4, dress: |comm| Ok(late::on_devices(delayed(comm, 6))) },
    World { name: "on one device each, traced", ranks: 2, dress: |comm| Ok(late::on_devices(Trace::wrap(comm).0)) },
    World { name: "two_d", ranks: 4, dress: |comm| relayed(comm, &[0, 0, 1, 1], NodeWay::TwoD) },
    World { name: "two_d, out of order", ranks: 4, dress: |comm| relayed(comm, &[5, 2, 5, 2], NodeWay::TwoD) },
    World { name: "two_d, uneven", ranks: 5, dress: |comm| relayed(comm, &[0, 0, 0, 1, 1], NodeWay::TwoD) },
    World { name: "two_level", ranks: 4, dress: |comm| relayed(comm, &[0, 0, 1, 1], NodeWay::TwoLevel) },
    World { name: "two_level, uneven", ranks: 5, dress: |comm| relayed(comm, &[0, 1, 0, 2, 0], NodeWay::TwoLevel) },
    World { name: "two_level, of one node", ranks: 3, dress: |comm| relayed(comm, &[0; 3], NodeWay::TwoLevel) },
    World {
        name: "two_d, charged, traced and delayed",
        ranks: 8,
        dress: |comm| relayed(delayed(Trace::wrap(charged(comm)).0, 5), &[0, 0, 1, 1, 2, 2, 3, 3], NodeWay::TwoD),
    },
];

impl World {
    /// Whether ranks hand on what is for others, for which starts wait.
    fn is_relayed(&self) -> bool {
        self.name.starts_with("two_")
    }
}

/// Two ranks a node; the last may be alone.
fn in_pairs(comm: &Comm, way: NodeWay) -> Result<Comm, Error> {
    let nodes: Vec<usize> = (0..comm.size()).map(|rank| rank / 2).collect();
    relayed(comm.clone(), &nodes, way)
}

/// Ranks on these nodes.
fn relayed(comm: Comm, nodes: &[usize], way: NodeWay) -> Result<Comm, Error> {
    Relay::wrap(comm, nodes, way, "node")
}

fn delayed(comm: Comm, seed: u64) -> Comm {
    Fault::wrap(comm, Faults { seed, delay_max: Duration::from_micros(300), death: None })
}

/// Two ranks a node, and links fast enough for a suite of laws.
fn charged(comm: Comm) -> Comm {
    let link = |us, bandwidth| Link { latency: Duration::from_micros(us), message: Duration::ZERO, bandwidth };
    Delay::wrap(comm, Network { ranks_per_node: 2, within: link(1, 1e10), between: link(20, 1e9) })
}

/// How the ranks of a world of threads come to know whether they agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Means {
    /// They look at each other's requests.
    InPlace,
    /// Over a control lane of queues.
    Mailboxes,
    /// Over a control lane of TCP connections.
    Sockets,
    /// Over a control lane of queues; data travels in messages.
    Messages,
    /// The same, and what is in devices' memory is carried.
    Carried,
}

impl Means {
    pub(crate) const ALL: [Means; 5] =
        [Means::InPlace, Means::Mailboxes, Means::Sockets, Means::Messages, Means::Carried];

    /// Whether an operation begins with the call that starts it, and not with a later one.
    fn begins_at_once(self) -> bool {
        matches!(self, Means::InPlace | Means::Messages | Means::Carried)
    }

    /// A world of `size` ranks, in rank order.
    pub(crate) fn world(self, size: usize, options: threads::Options, clock: Arc<dyn Clock>) -> Vec<Comm> {
        let by_messages =
            || messages::local(size).into_iter().map(|post| messages::world(post, options.timeout)).collect();
        let world = match self {
            Means::Messages => by_messages(),
            Means::Carried => late::on_carried_devices(by_messages()),
            _ => threads::world_by(clock.clone(), size, options),
        };
        let lanes = match self {
            Means::InPlace => return world,
            Means::Mailboxes | Means::Messages | Means::Carried => mailbox::lanes(size),
            Means::Sockets => connected(size),
        };
        let patience = Patience { timeout: options.timeout, clock };
        let wrap = if self.begins_at_once() { Agreement::beside } else { Agreement::wrap };
        world.into_iter().zip(lanes).map(|(comm, lane)| wrap(comm, lane, patience.clone())).collect()
    }

    /// [`threads::run`] on such a world, by the time of the machine.
    pub(crate) fn run<T: Send, E: std::fmt::Display + Send>(
        self,
        size: usize,
        options: threads::Options,
        f: impl Fn(Comm) -> Result<T, E> + Sync,
    ) -> Vec<Result<T, Failure<E>>> {
        threads::run_on(self.world(size, options, SystemClock::new()), f)
    }
}

/// The control lanes of `size` ranks, connected over localhost.
pub(crate) fn connected(size: usize) -> Vec<Arc<dyn ControlLane>> {
    let doorways: Vec<Doorway> = (0..size).map(|_| Doorway::open("127.0.0.1:0").expect("a free port")).collect();
    let addresses: Vec<_> = doorways.iter().map(|doorway| doorway.address().expect("it is open")).collect();
    let pass = |(rank, doorway): (usize, Doorway)| doorway.pass(rank, &addresses, PATIENT.timeout).expect("all come");
    std::thread::scope(|scope| {
        let pass = &pass;
        let spawn = |ranked| scope.spawn(move || pass(ranked));
        let passing: Vec<_> = doorways.into_iter().enumerate().map(spawn).collect();
        passing.into_iter().map(|rank| rank.join().expect("it passes")).collect()
    })
}

/// Holds `law` on every rank of every implementation; under a launcher of MPI on this process's rank of its world.
pub(crate) fn hold(law: impl Fn(&Comm) -> Outcome + Sync) {
    if !is_held_by_mpi(&law) {
        hold_here(&law);
    }
}

/// Holds a law of those ranks whose messages a thread moves on: of messages within a process, or of MPI.
pub(crate) fn hold_moved(law: impl Fn(&Comm) -> Outcome + Sync) {
    if !is_held_by_mpi(&law) {
        for result in Means::Messages.run(3, PATIENT, |comm| law(&comm)) {
            result.unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

/// Whether a launcher of MPI has started this process; then the law is held in its world.
fn is_held_by_mpi(law: &(impl Fn(&Comm) -> Outcome + Sync)) -> bool {
    #[cfg(feature = "mpi")]
    if let Some(world) = launched::world() {
        for way in NodeWay::ALL {
            let world = in_pairs(&world, way).and_then(|world| law(&world));
            world.unwrap_or_else(|error| panic!("MPI, {}: {error}", way.name()));
        }
        return true;
    }
    let _ = law;
    false
}

fn hold_here(law: &(impl Fn(&Comm) -> Outcome + Sync)) {
    law(&solo::world()).unwrap_or_else(|error| panic!("solo: {error}"));
    law(&late::on_devices(solo::world())).unwrap_or_else(|error| panic!("solo, on a device: {error}"));
    for (seed, size, way) in
        [(1, 2, NodeWay::Direct), (2, 3, NodeWay::TwoD), (3, 4, NodeWay::Direct), (4, 4, NodeWay::TwoLevel)]
    {
        let script = WorldScript { seed, mishap: None, flaw: None };
        let held = |rank: simulated::SimulatedRank| law(&in_pairs(&rank.world, way)?);
        let end = simulated::run(size, PATIENT.timeout, script, held).expect("nobody waits for ever");
        end.ends.into_iter().flatten().for_each(|end| end.unwrap_or_else(|error| panic!("simulated: {error}")));
    }
    for means in Means::ALL {
        for world in WORLDS.iter().filter(|world| means.begins_at_once() || !world.is_relayed()) {
            let held = |comm| {
                let comm = (world.dress)(comm)?;
                // Or a law would hold of host memory twice.
                assert_eq!(comm.moves_devices(), means != Means::Messages && !world.is_relayed(), "{}", world.name);
                law(&comm)
            };
            for result in means.run(world.ranks, PATIENT, held) {
                result.unwrap_or_else(|failure| panic!("{} ({means:?}): {failure}", world.name));
            }
        }
    }
}

/// Numbers by seed, equal on every rank that asks equally.
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Draws(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// `count` lengths of which about a third are zero.
    pub(crate) fn counts(&mut self, count: usize, bound: usize) -> Vec<usize> {
        (0..count).map(|_| if self.below(3) == 0 { 0 } else { self.below(bound) }).collect()
    }
}

/// An element type, with its own slow arithmetic.
pub(crate) trait Element: Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static
where
    Payload: From<Vec<Self>>,
{
    fn draw(bits: u64) -> Self;
    fn fold(reduce: Reduce, values: impl Iterator<Item = Self>) -> Self;
    fn unpack(payload: Payload) -> Vec<Self>;
}

macro_rules! element {
    ($type:ty, $unpack:ident, $wide:ty, $widen:expr, $narrow:expr, $draw:expr, $add:expr) => {
        impl Element for $type {
            fn draw(bits: u64) -> Self {
                $draw(bits)
            }
            fn fold(reduce: Reduce, values: impl Iterator<Item = Self>) -> Self {
                let join = |a: $wide, b: $wide| match (reduce, a.partial_cmp(&b)) {
                    (Reduce::Sum, _) => $add(a, b),
                    // One is not a number.
                    (_, None) => $add(a, b),
                    (Reduce::Max, Some(order)) => {
                        if order.is_lt() {
                            b
                        } else {
                            a
                        }
                    }
                    (Reduce::Min, Some(order)) => {
                        if order.is_gt() {
                            b
                        } else {
                            a
                        }
                    }
                };
                $narrow(values.map($widen).reduce(join).expect("a group has a rank"))
            }
            fn unpack(payload: Payload) -> Vec<Self> {
                payload.$unpack()
            }
        }
    };
}

/// Magnitudes so different that the order of a sum shows in its last bits.
fn draw_f64(bits: u64) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    sign * (bits >> 40) as f64 * 2f64.powi((bits >> 1 & 15) as i32 - 20)
}

element!(f32, into_f32, f32, |x| x, |x| x, |bits| draw_f64(bits) as f32, |a, b| a + b);
element!(f64, into_f64, f64, |x| x, |x| x, draw_f64, |a, b| a + b);
element!(bf16, into_bf16, f32, bf16::to_f32, bf16::from_f32, |bits| bf16::from_f64(draw_f64(bits)), |a, b| a + b);
element!(u32, into_u32, u32, |x| x, |x| x, |bits| bits as u32, u32::wrapping_add);
element!(u64, into_u64, u64, |x| x, |x| x, |bits| bits, u64::wrapping_add);
element!(u8, into_u8, u8, |x| x, |x| x, |bits| bits as u8, u8::wrapping_add);

/// What rank `rank` contributes to `case`.
pub(crate) fn values<E: Element>(case: u64, rank: usize, len: usize) -> Vec<E>
where
    Payload: From<Vec<E>>,
{
    let mut draws = Draws::new(case << 32 ^ rank as u64);
    (0..len).map(|_| E::draw(draws.bits())).collect()
}

/// What the reduction of every rank's contribution to `case` must be, bit for bit.
pub(crate) fn reduced<E: Element>(reduce: Reduce, case: u64, size: usize, len: usize) -> Vec<E>
where
    Payload: From<Vec<E>>,
{
    let all: Vec<Vec<E>> = (0..size).map(|rank| values(case, rank, len)).collect();
    (0..len).map(|index| E::fold(reduce, all.iter().map(|values| values[index]))).collect()
}

/// The MPI world that this process was launched in, if it was, as a run has it: ranks agree over connections of their own.
#[cfg(feature = "mpi")]
mod launched {
    use std::env;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::{Mutex, PoisonError};

    use guildhall_comm::messages;
    use guildhall_comm::messages::mpi::Session;
    use guildhall_comm::wrap::Carried;

    use super::{Agreement, Comm, Doorway, PATIENT, Patience, SystemClock};

    /// Processes of one machine, which tell each other by MPI at which ports they listen.
    fn agreeing(world: Comm) -> Comm {
        let doorway = Doorway::open((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = u32::from(doorway.address().expect("an address").port());
        let size = world.size();
        let ports = world.all_gather(vec![port], vec![0u32; size], vec![1; size]).expect("all ports").recv.into_u32();
        let addresses: Vec<SocketAddr> =
            ports.into_iter().map(|port| (Ipv4Addr::LOCALHOST, port as u16).into()).collect();
        let lane = doorway.pass(world.rank(), &addresses, PATIENT.timeout).expect("all are connected");
        let patience = Patience { timeout: PATIENT.timeout, clock: SystemClock::new() };
        Agreement::beside(Carried::around(world), lane, patience)
    }

    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> i32;
    }

    struct HeldWorld(Session, Comm);

    // SAFETY: the laws of a process that was launched are held on its first thread (`--test-threads 1`), at whose end it
    // leaves.
    unsafe impl Send for HeldWorld {}

    static HELD: Mutex<Option<HeldWorld>> = Mutex::new(None);

    extern "C" fn leave() {
        if let Some(HeldWorld(session, world)) = HELD.lock().unwrap_or_else(PoisonError::into_inner).take() {
            drop(world);
            session.leave().expect("all processes leave");
        }
    }

    pub(super) fn world() -> Option<Comm> {
        ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(env::var_os)?;
        let start = || {
            let session = Session::start().expect("MPI can be entered");
            let world = agreeing(messages::world(session.post(), PATIENT.timeout));
            // SAFETY: it calls what this file defines.
            unsafe { atexit(leave) };
            HeldWorld(session, world)
        };
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        Some(held.get_or_insert_with(start).1.clone())
    }
}
